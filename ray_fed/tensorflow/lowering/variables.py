"""Replaces variables that a computation creates, such as an optimizer's, by values.

These variables exist during one call of the computation. While its graph is lowered, a
Python object, a `Variable`, has the tensor that the variable would hold. A read returns
this tensor, and an assignment replaces it:

    handle = VarHandleOp()                 written, with its control dependencies
    Assign(handle, 1); AssignAdd(handle, x); Read(handle) * 2

    (1 + x) * 2                            lowered

Each node is visited after its inputs and its control inputs. So a read finds the value
of the last assignment before it. Loops and branches carry the values of the variables
that they take.

The results have the same bits. TensorFlow cannot rewrite arithmetic across a variable,
so each assigned tensor is *opaque*: TensorFlow's optimizer cannot look behind it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import tensorflow as tf
from typing_extensions import override

from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.graphs.graph_message import GraphDef, make_constant, node_of
from ray_fed.tensorflow.lowering.inlining import Carried, Rule, Site


class Variable(Carried):
    """A variable while its graph is lowered.

    The static `shape` holds for all its values. `value` is None before the variable is
    initialized. `original` is as in `Carried`.
    """

    def __init__(
        self,
        dtype: tf.DType,
        shape: tf.TensorShape,
        value: tf.Tensor | None = None,
        original: Carried | None = None,
    ) -> None:
        super().__init__(original)
        self.dtype = dtype
        self._shape = shape
        self.value = value

    def read(self) -> tf.Tensor:
        """Return the current value, or raise Fallback before the first value."""
        if self.value is None:
            raise Fallback("a variable that is read before it is initialized")
        return self.value

    @override
    def leaves(self) -> list[tf.Tensor]:
        return [] if self.value is None else [self.value]

    @override
    def shapes(self) -> list[tf.TensorShape]:
        return [] if self.value is None else [self._shape]

    @override
    def with_leaves(self, leaves: Sequence[tf.Tensor]) -> "Variable":
        value = leaves[0] if leaves else None
        return Variable(self.dtype, self._shape, value, self.original)

    @override
    def take(self, leaves: Sequence[tf.Tensor]) -> None:
        self.value = leaves[0] if leaves else None


def _variable(site: Site, position: int = 0) -> Variable:
    value = site.inputs[position]
    if not isinstance(value, Variable):
        raise Fallback(f"{site.node.op} of a variable from elsewhere")
    return value


def _create(site: Site) -> list[Any]:
    attributes = site.node.attr
    dtype = tf.as_dtype(attributes["dtype"].type)
    return [Variable(dtype, tf.TensorShape(attributes["shape"].shape))]


def _read(site: Site) -> list[Any]:
    variable = _variable(site)
    if site.node.attr["dtype"].type != variable.dtype.as_datatype_enum:
        raise Fallback("a variable of another dtype")
    return [variable.read()]


def _is_initialized(site: Site) -> list[Any]:
    return [tf.constant(_variable(site).value is not None)]


def _shape(site: Site) -> list[Any]:
    out_type = tf.as_dtype(site.node.attr["out_type"].type)
    return [tf.shape(_variable(site).read(), out_type)]


def _assign(site: Site) -> list[Any]:
    variable, value = _variable(site), site.inputs[1]
    if not isinstance(value, tf.Tensor) or value.dtype != variable.dtype:
        raise Fallback("a variable of another dtype")
    if site.node.attr["validate_shape"].b:
        _expect_shape(site, value, variable.read())
    variable.value = site.opaque(value)
    return []


def _expect_shape(site: Site, value: tf.Tensor, like: tf.Tensor) -> None:
    # With other shapes, TensorFlow raises an error or broadcasts, depending on the op.
    is_known = value.shape.is_fully_defined()
    if not is_known or value.shape.as_list() != like.shape.as_list():
        raise Fallback(f"{site.node.op} of an unknown shape")


def _update(compute: Callable[..., tf.Tensor]) -> Rule:
    # `compute` takes the site, the variable's old value and the other inputs.

    def rule(site: Site) -> list[Any]:
        variable = _variable(site)
        inputs = [site.opaque(tensor) for tensor in site.inputs[1:]]
        variable.value = site.opaque(compute(site, variable.read(), *inputs))
        return []

    return rule


def _same_shape(compute: Callable[..., tf.Tensor]) -> Rule:
    def checked(site: Site, value: tf.Tensor, change: tf.Tensor) -> tf.Tensor:
        _expect_shape(site, change, value)
        return compute(value, change)

    return _update(checked)


def _scatter(compute: Callable[..., tf.Tensor]) -> Rule:

    def scatter(
        site: Site, value: tf.Tensor, indices: tf.Tensor, updates: tf.Tensor
    ) -> tf.Tensor:
        if not cast("int | None", updates.shape.rank):  # one number for all rows
            raise Fallback(f"{site.node.op} of an unknown shape")
        return compute(value, tf.expand_dims(indices, -1), updates)

    return _update(scatter)


def _scatter_nd(compute: Callable[..., tf.Tensor]) -> Rule:
    def scatter(site: Site, *tensors: tf.Tensor) -> tf.Tensor:
        del site
        return compute(*tensors)

    return _update(scatter)


def _assign_slice(
    site: Site,
    value: tf.Tensor,
    begin: tf.Tensor,
    end: tf.Tensor,
    strides: tf.Tensor,
    part: tf.Tensor,
) -> tf.Tensor:
    masks = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    attributes = {f"{mask}_mask": site.node.attr[f"{mask}_mask"].i for mask in masks}
    return tf.raw_ops.TensorStridedSliceUpdate(
        input=value, begin=begin, end=end, strides=strides, value=part, **attributes
    )


def _gather(site: Site) -> list[Any]:
    batch_dims = site.node.attr["batch_dims"].i
    return [
        tf.raw_ops.GatherV2(
            params=_variable(site).read(),
            indices=site.inputs[1],
            axis=batch_dims,
            batch_dims=batch_dims,
        )
    ]


def _gather_nd(site: Site) -> list[Any]:
    return [tf.gather_nd(_variable(site).read(), site.inputs[1])]


def _optimize(num_slots: int, step: Callable[..., Sequence[tf.Tensor]]) -> Rule:
    # The inputs of a step of an optimizer are a weight, `num_slots` other variables,
    # and tensors. `step` returns the new values of all variables.

    def rule(site: Site) -> list[Any]:
        variables = [_variable(site, index) for index in range(1 + num_slots)]
        inputs = [site.opaque(tensor) for tensor in site.inputs[1 + num_slots :]]
        values = [variable.read() for variable in variables]
        for tensor in [*values[1:], *(t for t in inputs if t.shape.rank != 0)]:
            _expect_shape(site, tensor, values[0])
        results = step(site, *values, *inputs)
        for variable, result in zip(variables, results, strict=True):
            variable.value = site.opaque(result)
        return []

    return rule


def _descend(site: Site, weight: Any, rate: Any, gradient: Any) -> list[tf.Tensor]:
    del site
    return [weight - gradient * rate]


def _step_momentum(
    site: Site, weight: Any, slot: Any, rate: Any, gradient: Any, momentum: Any
) -> list[tf.Tensor]:
    slot = slot * momentum + gradient
    if site.node.attr["use_nesterov"].b:
        return [weight - (gradient * rate + slot * momentum * rate), slot]
    return [weight - slot * rate, slot]


def _step_keras_momentum(
    site: Site, weight: Any, slot: Any, rate: Any, gradient: Any, momentum: Any
) -> list[tf.Tensor]:
    slot = slot * momentum - gradient * rate
    if site.node.attr["use_nesterov"].b:
        return [weight + (slot * momentum - gradient * rate), slot]
    return [weight + slot, slot]


def _step_adam(
    site: Site,
    weight: Any,
    mean: Any,
    square: Any,
    power_1: Any,
    power_2: Any,
    rate: Any,
    beta_1: Any,
    beta_2: Any,
    epsilon: Any,
    gradient: Any,
) -> list[tf.Tensor]:
    one = tf.ones([], gradient.dtype)
    scaled: Any = rate * tf.sqrt(one - power_2) / (one - power_1)
    mean = mean + (gradient - mean) * (one - beta_1)
    square = square + (gradient * gradient - square) * (one - beta_2)
    moved = mean
    if site.node.attr["use_nesterov"].b:
        moved = gradient * (one - beta_1) + beta_1 * mean
    return [weight - moved * scaled / (tf.sqrt(square) + epsilon), mean, square]


class Passed(Variable):
    """A value that says whether all checks so far have passed. No node takes it.

    `changed` says whether there was a check.
    """

    def __init__(self) -> None:
        super().__init__(tf.bool, tf.TensorShape([]), tf.ones([], tf.bool))
        self.changed = False


def _check(site: Site) -> list[Any]:
    for passed in site.inliner.unseen():
        if isinstance(passed, Variable) and isinstance(passed.original, Passed):
            passed.value = passed.read() & site.inputs[0]
            passed.original.changed = True
            return []
    raise Fallback("Assert in a function of a dataset")


_SHOWN_BY_SUMS = "_ray_fed_shown_by_sums"
"""Attribute of marked ops. Hashes of graphs ignore attributes that begin with `_`."""


def shown_by_sums(condition: tf.Tensor) -> tf.Tensor:
    """Mark a condition, such as whether a client's update is finite, and return it.

    If the condition is false, a sum over clients must be infinite or NaN. A graph for
    many clients can then leave the condition out, and check the sums.
    """
    operation: Any = condition.op
    operation._set_attr(_SHOWN_BY_SUMS, tf.compat.v1.AttrValue(b=True))  # noqa: SLF001 (no public name)
    return condition


def trust_sums(graph_def: GraphDef) -> bool:
    """Make the conditions true that `shown_by_sums` marked, and remove their checks.

    The graph is changed in place. Return whether there were marked conditions.
    """
    marked = {node.name for node in graph_def.node if _SHOWN_BY_SUMS in node.attr}
    for node in graph_def.node if marked else ():
        if node.name in marked:
            make_constant(node, value=True, dtype=tf.bool)
        elif node.op == "Assert" and node_of(node.input[0]) in marked:
            controls = [source for source in node.input if source.startswith("^")]
            node.op, node.input[:] = "NoOp", controls
            node.attr.clear()
    return bool(marked)


CHECKS: Mapping[str, Rule] = {"Assert": _check}
"""Rules of checks. The inliner must carry a `Passed` (`Inliner.carrying`)."""

CREATED: Mapping[str, Rule] = {"VarHandleOp": _create}
"""Rules of the ops that create variables."""

USED: Mapping[str, Rule] = {
    "ReadVariableOp": _read,
    "VarIsInitializedOp": _is_initialized,
    "VariableShape": _shape,
    "AssignVariableOp": _assign,
    "AssignAddVariableOp": _same_shape(tf.add),
    "AssignSubVariableOp": _same_shape(tf.subtract),
    "ResourceGather": _gather,
    "ResourceGatherNd": _gather_nd,
    "ResourceScatterUpdate": _scatter(tf.tensor_scatter_nd_update),
    "ResourceScatterAdd": _scatter(tf.tensor_scatter_nd_add),
    "ResourceScatterSub": _scatter(tf.tensor_scatter_nd_sub),
    "ResourceScatterMax": _scatter(tf.tensor_scatter_nd_max),
    "ResourceScatterMin": _scatter(tf.tensor_scatter_nd_min),
    "ResourceScatterNdUpdate": _scatter_nd(tf.tensor_scatter_nd_update),
    "ResourceScatterNdAdd": _scatter_nd(tf.tensor_scatter_nd_add),
    "ResourceScatterNdSub": _scatter_nd(tf.tensor_scatter_nd_sub),
    "ResourceStridedSliceAssign": _update(_assign_slice),
    "ResourceApplyGradientDescent": _optimize(0, _descend),
    "ResourceApplyMomentum": _optimize(1, _step_momentum),
    "ResourceApplyKerasMomentum": _optimize(1, _step_keras_momentum),
    "ResourceApplyAdam": _optimize(2, _step_adam),
}
"""Rules of the ops that read or write variables. None of them has another effect."""

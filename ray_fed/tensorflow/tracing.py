"""Traces a Python function into a graph of its own: a computation.

Side effects run in the order in which they are written, as in a `tf.function`. If the
function calls another computation, its graph is copied into the same graph. Variables
and tables of the graph are initialized again in each call.

Some methods of TensorFlow's classes are replaced while functions are traced
(`ray_fed.tensorflow.traced_graph`). Keras' are in `ray_fed.tensorflow.keras_seeds`.

* `==` and `!=` compare elements. TensorFlow compares tensors of a plain `tf.Graph` by
  identity, and also in its `tf.function`s and dataset functions. So `x == 0` would
  silently be False.
* Eager tensors, which have values already, become constants, because a computation must
  run in any process. The plain graph would refuse them. The content of a table that
  cannot change, such as the vocabulary of a Keras layer, is also written to the graph.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import federated_language as fl
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context  # no public name
from tensorflow.python.framework.auto_control_deps import (  # no public name
    AutomaticControlDependencies,
)
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.loader as loader
import ray_fed.tensorflow.keras_seeds as keras_seeds
import ray_fed.tensorflow.tensors.datasets as datasets
import ray_fed.tensorflow.trace_keys as trace_keys
import ray_fed.values.plain_values as plain_values
from ray_fed.language import blocks, structs, trees, type_checks
from ray_fed.plan import random_keys
from ray_fed.tensorflow.graphs import callbacks, frozen_weights, kept_graphs
from ray_fed.tensorflow.graphs.identity import identify_computation
from ray_fed.tensorflow.graphs.numbers import rewrite
from ray_fed.tensorflow.tensors import specs
from ray_fed.tensorflow.traced_graph import (
    Method,
    Number,
    Replacements,
    TracedGraph,
    traced_graph,
)
from ray_fed.values import tensor_structures
from ray_fed.values.columnar_sequence import Column, ColumnarSequence


def _comparing(operation: Method, *, when_none: bool) -> Callable[[Method], Method]:

    def make(original: Method) -> Method:
        def compare(self: Any, other: Any) -> Any:
            if not _is_traced(self) or _is_identity_meant():
                return original(self, other)
            if other is None:
                return when_none
            left = tf.convert_to_tensor(self)
            right = tf.convert_to_tensor(other, dtype_hint=left.dtype)
            return operation(x=left, y=right, incompatible_shape_error=False)

        return compare

    return make


_EQUAL = _comparing(tf.raw_ops.Equal, when_none=False)
_NOT_EQUAL = _comparing(tf.raw_ops.NotEqual, when_none=True)

compared_by_element = Replacements(
    {
        (tf.Tensor, "__eq__"): _EQUAL,
        (tf.Tensor, "__ne__"): _NOT_EQUAL,
        (tf.Variable, "__eq__"): _EQUAL,
        (tf.Variable, "__ne__"): _NOT_EQUAL,
    }
).replaced
"""Context manager. In its block, `==` in a `TracedGraph` compares elements."""


def _is_identity_meant() -> bool:
    # TensorFlow's own code compares identities.
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    caller = frame.f_globals["__name__"] if frame else ""
    return caller.startswith(("tensorflow.python.ops.", "tensorflow.python.framework."))


def _is_traced(value: Any) -> bool:
    return traced_graph(getattr(value, "graph", None)) is not None


_TensorFlow: Any = tf.__internal__  # no public name
_EAGER: Any = next(
    cls for cls in _TensorFlow.EagerTensor.__mro__ if "__tf_tensor__" in vars(cls)
)
"""The base class of eager tensors that has their conversion. No tensor is created to
find it, because that would fix the number of TensorFlow's threads."""


def _converting(original: Method) -> Method:

    def convert(tensor: Any, dtype: Any = None, name: str | None = None) -> Any:
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            if isinstance(graph, TracedGraph):
                return graph.write_once(tensor, _write)
        return original(tensor, dtype, name)

    return convert


captured_as_constants = Replacements({(_EAGER, "__tf_tensor__"): _converting}).replaced
"""Context manager. In its block, eager tensors become constants of a `TracedGraph`."""


def _write(tensor: Any) -> Any:
    if tensor.dtype not in (tf.resource, tf.variant):
        return tf.constant(tensor.numpy())
    # TensorFlow attaches its object to a handle. This has no public name.
    owner = getattr(tensor, "_parent_trackable", lambda: None)()
    if isinstance(owner, tf.lookup.StaticHashTable):
        return _write_table(owner)
    raise errors.CompileError(
        "Expected a computation to use tensors of values that it did not make, found"
        f" one of {tensor.dtype.name}, such as a dataset, a variable or a table that"
        " may change: make that inside of the computation, or pass it as an argument."
    )


def _write_table(table: Any) -> Any:
    with context.eager_mode():
        try:
            exported: Any = table.export()
        except tf.errors.OpError as error:
            raise errors.CompileError(
                "Expected a table that has its content, found one without: give its"
                " layer a vocabulary, or call `adapt`, before it is used here."
            ) from error
        keys, values = (tensor.numpy() for tensor in exported)
        default = table.default_value.numpy()
    order = np.argsort(keys)  # the table's own order differs from process to process
    initializer = tf.lookup.KeyValueTensorInitializer(
        keys[order], values[order], table.key_dtype, table.value_dtype
    )
    return tf.lookup.StaticHashTable(initializer, default).resource_handle


_OWN_MODULES = f"{__name__.partition('.')[0]}."
_OWN_CONTAINERS = (_OWN_MODULES, "builtins:", "collections:", "federated_language.")


class TracingContext(fl.framework.SyncContext):
    """The context in traced functions. It copies called computations into the graph."""

    @override
    @tf.autograph.experimental.do_not_convert
    def invoke(self, comp: Any, arg: Any) -> Any:
        proto = comp.to_proto()
        if proto.WhichOneof("computation") != "tensorflow":
            raise errors.ContextStateError(
                "Expected only TensorFlow computations to be called inside of one,"
                f" found a computation of type `{comp.type_signature}`: call it from a"
                " federated_computation."
            )
        message = proto.tensorflow
        feeds = _feeds(arg, comp.type_signature.parameter, message)
        graph_def = graph_message.graph_of(message)
        loader.isolate(graph_def, message.initialize_op or None)
        for name, tensor in frozen_weights.write_all(graph_def).items():
            feeds[name] = tf.identity(tensor)  # in the graph of a branch or loop body
        names = graph_message.bound_names(message.result)
        fetched = tf.graph_util.import_graph_def(
            graph_def, input_map=feeds, return_elements=names, name="call"
        )
        tensors = graph_message.from_bound(fetched, message.result)
        result = _unflatten(iter(tensors), comp.type_signature.result)
        return fl.framework.type_to_py_container(result, comp.type_signature.result)


def _feeds(arg: Any, parameter: fl.Type | None, message: Any) -> dict[str, Any]:
    feeds: dict[str, Any] = {}
    if message.session_token_tensor_name:
        feeds[message.session_token_tensor_name] = tf.constant("")
    if parameter is not None:
        tensors = graph_message.to_bound(_flatten(arg, parameter), message.parameter)
        tensors = map(tf.identity, tensors)  # in the graph of a branch or loop body
        feeds |= zip(graph_message.bound_names(message.parameter), tensors, strict=True)
    return feeds


def _flatten(value: Any, type_spec: fl.Type) -> list[Any]:
    match type_spec:
        case fl.StructType():
            return [
                tensor
                for element_type, _, element in structs.struct_elements(
                    value, type_spec
                )
                for tensor in _flatten(element, element_type)
            ]
        case fl.SequenceType() if isinstance(value, tf.data.Dataset):
            own_type = specs.infer_type(value)
            type_checks.check_assignable(type_spec, own_type, "a dataset")
            dataset = datasets.to_canonical(value, type_spec.element)
            return [tf.data.experimental.to_variant(dataset)]
        case fl.TensorType():
            return [_to_tensor(value, type_spec)]
        case _:
            raise errors.ValueMismatchError(
                f"Expected a value of type `{type_spec}`, found {structs.show(value)}."
            )


def _to_tensor(value: Any, type_spec: fl.TensorType) -> tf.Tensor:
    spec = specs.to_spec(type_spec)
    if any(tf.is_tensor(leaf) for leaf in tf.nest.flatten(value)):
        tensor = tf.convert_to_tensor(value)
    else:
        tensor = tf.constant(plain_values.to_plain(value, type_spec), spec.dtype)
    if tensor.dtype != spec.dtype or not spec.shape.is_compatible_with(tensor.shape):
        own_type = specs.infer_type(tensor)
        raise errors.ValueMismatchError(
            f"Expected a tensor of type `{type_spec}`, found `{own_type}`: nothing is"
            " cast, so convert it first."
        )
    return tensor


def _unflatten(tensors: Any, type_spec: fl.Type) -> Any:
    def restore(tensor: Any, leaf: Any) -> Any:
        if isinstance(leaf, fl.SequenceType):
            return datasets.from_variant(tensor, leaf.element)
        tensor.set_shape(specs.to_spec(leaf).shape)
        return tensor

    return trees.map_leaves(restore, trees.unflatten(tensors, type_spec), type_spec)


@blocks.depth_in_words()
def trace(
    fn: Callable[..., Any], parameter: fl.Type | None, *, unpack: bool | None
) -> fl.framework.ConcreteComputation:
    """Return the computation of a Python function or `tf.function`.

    Autograph converts the function, unless it belongs to ray_fed.

    Args:
        fn: The function.
        parameter: Type of the function's argument, or None if it takes none.
        unpack: Whether the elements of a struct are separate arguments of `fn`. With
            None, the signature of `fn` decides.

    Raises:
        TypeError: The parameter or the result is not made of tensors and sequences.
        ValueError: `fn` returns None.
        CompileError: A type nests too deeply for protobuf.
    """
    key = trace_keys.find_key(fn, parameter, unpack) if _is_own(fn) else None
    if key is not None and (kept := _find_kept(*key, parameter)) is not None:
        return kept
    had_keras = keras_seeds.is_loaded()
    traced = _trace(fn, parameter, unpack=unpack)
    if keras_seeds.is_loaded() and not had_keras:
        # The function imported Keras, whose seeds had no key yet.
        keras_seeds.forget_global_draws()
        traced = _trace(fn, parameter, unpack=unpack)
    if key is not None:
        _keep(*key, traced)
    return traced


def _find_kept(
    key: str, numbers: Sequence[Number], parameter: fl.Type | None
) -> fl.framework.ConcreteComputation | None:
    kept = kept_graphs.find(key)
    if kept is None:
        return None
    (marks, containers), serialized = kept
    renewed = dict(zip(marks, numbers, strict=True))
    proto = blocks.parse_block(serialized).to_proto()

    def change(mark: bytes, _: float) -> tuple[bytes, float]:
        number = renewed[mark.decode()]
        return number.mark, number.value

    rewrite(proto, change)
    result = fl.FunctionType.from_proto(proto.type).result
    result = trace_keys.with_containers(result, iter(containers))
    return fl.framework.ConcreteComputation(
        computation_proto=proto,
        context_stack=fl.framework.get_context_stack(),
        annotated_type=fl.FunctionType(parameter, result),
    )


def _keep(
    key: str, numbers: Sequence[Number], comp: fl.framework.ConcreteComputation
) -> None:
    # The type of the result may contain a class of the user, which can change.
    containers = list(trace_keys.containers_of(comp.type_signature.result))
    if all(not name or name.startswith(_OWN_CONTAINERS) for name in containers):
        marks = [number.mark.decode() for number in numbers]
        serialized = blocks.serialize_computation(comp)
        kept_graphs.put(key, [marks, containers], serialized)


def _trace(
    fn: Callable[..., Any], parameter: fl.Type | None, *, unpack: bool | None
) -> fl.framework.ConcreteComputation:
    outer = tf.compat.v1.get_default_graph()
    traced = TracedGraph()
    stack = fl.framework.get_context_stack()
    ordered = AutomaticControlDependencies()
    with (
        traced.as_default(),
        stack.install(TracingContext()),
        compared_by_element(),
        captured_as_constants(),
        keras_seeds.keyed(),
        ordered,
    ):
        if parameter is None:
            binding, args, kwargs = None, [], {}
        else:
            value, binding = graph_message.stamp_parameter(parameter)
            args, kwargs = fl.framework.unpack_arg(
                cast("Any", fn), parameter, value, unpack
            )
        result = convert(fn)(*args, **kwargs)
        if result is None:
            written: Any = getattr(fn, "python_function", fn)
            raise fl.framework.ComputationReturnedNoneError(written)
        if isinstance(result, tf.Variable):
            result = result.read_value()
        result_type = specs.infer_type(result)
        result_binding = graph_message.bind_result(
            result, result_type, ordered.mark_as_return
        )
    with traced.as_default():
        initialize_op = _initialize_op()
    callbacks.keep(traced, outer)
    message = graph_message.build_message(
        traced, binding, result_binding, initialize_op, fn
    )
    type_spec = fl.FunctionType(parameter, result_type)
    return fl.framework.ConcreteComputation(
        computation_proto=graph_message.build_computation(message, type_spec),
        context_stack=stack,
        annotated_type=type_spec,
    )


def convert(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose `for`, `while` and `if` work over tensors."""
    if _is_tf_function(fn):
        return fn
    # ray_fed's own functions need no conversion, which took two fifths of the time of
    # `build_fed_avg` (2026-11-27).
    if _is_own(fn):
        return tf.autograph.experimental.do_not_convert(fn)
    status = tf.__internal__.autograph.control_status_ctx()
    return tf.__internal__.autograph.tf_convert(fn, status)


def _is_own(fn: Any) -> bool:
    return str(getattr(fn, "__module__", "")).startswith(_OWN_MODULES)


def _initialize_op() -> str | None:
    variables = tf.compat.v1.global_variables() + tf.compat.v1.local_variables()
    tables = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS)
    if not (variables or tables):
        return None
    initializers = [tf.compat.v1.variables_initializer(variables), *tables]
    return tf.group(*initializers, name="initialize").name


def _wrap(
    fn: Callable[..., Any],
    parameter_type: fl.Type | None,
    unpack: bool | None = None,  # noqa: FBT001 (ComputationWrapper passes it so)
    name: str | None = None,
) -> fl.framework.ConcreteComputation:
    del name
    return trace(fn, parameter_type, unpack=unpack)


computation: Callable[..., Any] = fl.framework.ComputationWrapper(
    _wrap, to_type_fn=specs.to_type, infer_type_fn=specs.infer_type
)
"""Make a computation of a Python function or `tf.function` over tensors.

Use it as a decorator with the types of the parameters. A type is anything that
`fl.to_type` accepts, or a TensorFlow spec.

    @computation(np.float32)             one parameter
    @computation(np.int32, np.int32)     several parameters, in order
    @computation                         no parameter, or parameters of any types: the
                                         function is traced for each type of arguments
    computation(fn, type), computation(fn)

The function gets a tensor, a `tf.data.Dataset` for a sequence, and the containers of
the type for a structure. Autograph converts its control flow over tensors. Variables
and tables that it creates are initialized in each call. It may call other computations
of TensorFlow, which become part of its graph.

Raises:
    TypeError: The parameter or the result is not made of tensors, sequences and
        structures.
    ValueError: The function returns None.
"""


class RowMap:
    """Applies a user's function over tensors to each row of a table.

    The pickled object has the function, and traces it again where it is used.

    Args:
        function: Function from a row, in the containers of its type, to another row. It
            must not draw random numbers, or the constructor raises UnsupportedError.
        row: Type of a row. All shapes must be known, also in the result.

    Attributes:
        function: The function.
        result: Type of a row of the result.
        identity: A hash of the function's graph, or None if the graph runs Python code.
    """

    def __init__(self, function: Callable[[Any], Any], row: fl.Type) -> None:
        traced = computation(function, row)
        serialized = blocks.serialize_computation(traced)
        if random_keys.may_draw(serialized):
            raise errors.UnsupportedError(
                "Expected a function of a row alone to map, found one that draws random"
                " numbers: draw them in the client's work, which has keys for it."
            )
        self.function = function
        self._row = row
        self.result: fl.Type = traced.type_signature.result
        for type_spec in (row, self.result):
            for tensor in tensor_structures.flatten_type(type_spec):
                if tensor.shape is None or None in tensor.shape:
                    raise errors.ValueMismatchError(
                        "Expected rows of known shapes before and after a mapped"
                        f" function, found `{type_spec}`."
                    )
        try:
            self.identity = identify_computation(traced)[:16]
        except errors.UnsupportedError:
            self.identity = None
        # The function is traced now, so that later changes of arrays do not matter.
        self._traced: Any = self._trace()

    @override
    def __getstate__(self) -> dict[str, Any]:
        function: Any = self.function
        if _is_tf_function(function):  # one that was traced cannot be pickled
            function = function._clone(None)  # noqa: SLF001 (no public way)
        return self.__dict__ | {"function": function, "_traced": None}

    def apply(self, rows: ColumnarSequence, label: str) -> ColumnarSequence:
        """Return the function's results, in order. `label` names the rows in errors."""
        types = tensor_structures.flatten_type(self._row)
        if self._traced is None:
            self._traced = self._trace()
        with tf.device("/device:CPU:0"):
            tensors = [
                tf.constant(column.rows, specs.to_tf_dtype(tensor))
                for column, tensor in zip(rows.columns, types, strict=True)
            ]
            stacked = self._traced(tensors, tf.constant(rows.length))
        batched = tensor_structures.batch_type(self.result)
        plain = plain_values.to_plain(stacked, batched, label)
        columns = tuple(map(Column, trees.flatten(plain)))
        return ColumnarSequence(columns, rows.length)

    def _trace(self) -> Any:
        rows = [
            tf.TensorSpec([None, *(tensor.shape or ())], specs.to_tf_dtype(tensor))
            for tensor in tensor_structures.flatten_type(self._row)
        ]
        mapped = tf.function(self._map, autograph=False)
        with tf.device("/device:CPU:0"):
            return mapped.get_concrete_function(rows, tf.TensorSpec([], tf.int32))

    def _call(self, tensors: list[tf.Tensor]) -> Any:
        row = datasets.build(tensors, self._row)
        row = datasets.to_containers(row, self._row, canonical=False)
        if _is_tf_function(self.function):
            return self.function(row)
        return tf.function(self.function)(row)  # converted by autograph

    def _map(self, tensors: list[tf.Tensor], length: tf.Tensor) -> Any:
        def call(index: tf.Tensor) -> Any:
            return self._call([tensor[index] for tensor in tensors])

        spec = datasets.element_spec(self.result, canonical=False)
        return tf.map_fn(call, tf.range(length), fn_output_signature=spec)


def _is_tf_function(function: Any) -> bool:
    return hasattr(function, "get_concrete_function")

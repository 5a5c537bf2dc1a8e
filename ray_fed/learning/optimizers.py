"""A Keras optimizer inside of a graph that is being traced.

Keras' optimizers update variables and, with TensorFlow, have no stateless form. So the
graph makes the variables, assigns values, runs the update and reads the values. A
`tf.function` keeps this order.

The `get_config()` of an optimizer does not include everything, such as variables that
are excluded from weight decay. So copies take over the object's own attributes. Only
the variables are made anew, for weights with the model's paths.
"""

# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false

import contextlib
import copy
from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.learning.checks import check_positive, expect_object
from ray_fed.learning.models import Delta, Model, ModelWeights, expect_delta
from ray_fed.tensorflow.trace_keys import UndescribedError
from ray_fed.tensorflow.traced_graph import Number

OptimizerLike: TypeAlias = keras.optimizers.Optimizer | str
"""Optimizer of Keras, or its name, such as "sgd"."""


class OptimizerSpec:
    """A user's optimizer of Keras, from which copies in graphs are made.

    The user's optimizer is not changed. Copies have its settings, but not its number of
    steps and its moments. Raises ValueMismatchError for a value that is not an
    optimizer, a `LossScaleOptimizer`, a schedule with variables, or an unusual `build`.
    """

    @classmethod
    def of(cls, optimizer: "OptimizerLike | OptimizerSpec") -> "OptimizerSpec":
        """Return the spec of an optimizer. A spec is returned unchanged."""
        return optimizer if isinstance(optimizer, cls) else cls(optimizer)

    def __init__(self, optimizer: OptimizerLike) -> None:
        if isinstance(optimizer, str):
            optimizer = _named(optimizer)
        expect_object(
            optimizer, keras.optimizers.Optimizer, 'keras.optimizers.SGD(0.1) or "sgd"'
        )
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise errors.ValueMismatchError(
                "Expected an optimizer that takes gradients as they are, found a"
                " LossScaleOptimizer, which changes its factor by what each step finds:"
                " pass its inner optimizer, with a `loss_scale_factor` that stays."
            )
        self._class = type(optimizer)
        self._name = optimizer.name
        rate: Any = optimizer._learning_rate
        is_number = isinstance(rate, keras.Variable)
        self._rate: Any = Number(rate.numpy()) if is_number else rate
        if not is_number:
            _check_schedule(rate)
        bare = keras.optimizers.Optimizer(0.1)
        # Private attributes of the base class are its variables and their bookkeeping.
        # Copies have other variables, and another cache of excluded variables.
        left_out = {name for name in vars(bare) if name.startswith("_")}
        left_out |= {"built", "_exclude_from_weight_decay_cache"}
        self._settings = {
            name: _copied(value)
            for name, value in vars(optimizer).items()
            if name not in left_out
        }
        self._inner = _read_inner(optimizer)
        self._starts_from_weights = not self._inner and _starts_from_weights(self)

    @override
    def __str__(self) -> str:
        schedule = type(self._rate).__name__
        rate = f"{self.rate.value:g}" if self.rate else schedule
        return f"{self._class.__name__}({rate})"

    @property
    def plain_rate(self) -> float | None:
        """Learning rate of SGD without other settings. None for other optimizers."""
        plain = OptimizerSpec(keras.optimizers.SGD(0.0, name=self._name))
        is_plain = self._class is plain._class and self._settings == plain._settings
        return self.rate.value if is_plain and self.rate else None

    @property
    def rate(self) -> Number | None:
        """Learning rate as a number. None for a schedule or a MultiOptimizer."""
        is_one = isinstance(self._rate, Number) and not self._inner
        return self._rate if is_one else None

    def refuse(self, where: str, **reasons: str) -> None:
        """Raise ValueMismatchError if the optimizer has a setting in `reasons`."""
        specs = (self, *self._inner.values())
        for name, reason in reasons.items():
            if any(spec._settings.get(name) for spec in specs):
                raise errors.ValueMismatchError(
                    f"Expected an optimizer without `{name}` {where}, found"
                    f" `{self._class.__name__}` with it: {reason}."
                )

    def stamp(self, model: Model) -> "StampedOptimizer":
        """Add the optimizer, and variables for a model's weights, to the current graph.

        If the learning rate is a number, it is 0 until `assign_rate` or `assign_state`.
        """
        return StampedOptimizer(
            self._copy(0.0) if self.rate else self.copy(),
            model.trainable_variables,
            starts_from_weights=self._starts_from_weights,
        )

    def initial_state(self, model: Model) -> tuple[Any, ...]:
        """Return the variables before the first step, in `read_state`'s order."""
        optimizer = self.copy()
        optimizer.build(list(model.trainable_variables))
        return tuple(_numpy_of(optimizer.variables))

    def describe_for_graphs(self) -> Any:
        """Return the settings that graphs depend on. Equal optimizers share graphs."""
        if self._inner:  # graphs have their learning rates as constants
            raise UndescribedError("several optimizers")
        # Keras counts the names of optimizers.
        settings = {k: v for k, v in self._settings.items() if k != "name"}
        described = {**vars(self), "_settings": settings}
        return {name: v for name, v in described.items() if name != "_name"}

    def copy(self) -> Any:
        """Return a Keras optimizer with these settings, which is not yet built."""
        is_number = isinstance(self._rate, Number)
        return self._copy(self._rate.value if is_number else self._rate)

    def _copy(self, rate: Any) -> Any:
        copied: Any = object.__new__(self._class)
        keras.optimizers.Optimizer.__init__(copied, learning_rate=rate, name=self._name)
        vars(copied).update(
            {name: _copied(value) for name, value in self._settings.items()}
        )
        if self._inner:
            inner = {key: spec.copy() for key, spec in self._inner.items()}
            copied._inner_optimizers = list(inner.values())
            chosen_by = self._settings["_optimizer_map"]
            copied._optimizer_map = lambda variable: inner[id(chosen_by(variable))]
        return copied


class StampedOptimizer:
    """An optimizer and its variables in one graph; see `OptimizerSpec.stamp`.

    Args:
        optimizer: Optimizer that is not yet built. This object takes ownership of it.
        references: Variables of the model. The new variables for weights get their
            paths and constraints, which an optimizer may read.
        starts_from_weights: Whether `build` computes variables from the weights.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        references: Sequence[Any],
        *,
        starts_from_weights: bool,
    ) -> None:
        self._optimizer = optimizer
        self._starts_from_weights = starts_from_weights
        self._num_before_build = len(optimizer.variables)
        self._weights = [_variable_like(reference) for reference in references]
        optimizer.build(self._weights)
        for leaf in _leaves(optimizer):
            _exclude_alike(leaf, references, self._weights)

    def start(self, weights: Sequence[Any], *, begins_anew: bool = True) -> None:
        """Assign the weights before the first step.

        If `begins_anew`, an optimizer computes its variables from the weights if it
        does so.
        """
        self.assign_weights(weights)
        if self._starts_from_weights and begins_anew:
            _build_again(self._optimizer, self._weights, self._num_before_build)

    def assign_weights(self, values: Sequence[Any]) -> None:
        """Assign values to the weights."""
        _assign(self._weights, values)

    def assign_state(self, values: Sequence[Any]) -> None:
        """Assign values to the optimizer's own variables, in `read_state`'s order."""
        _assign(self._optimizer.variables, values)

    def assign_rate(self, rate: Any) -> None:
        """Set the learning rate."""
        self._optimizer.learning_rate = rate

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss, times the optimizer's `loss_scale_factor` if it has one."""
        return self._optimizer.scale_loss(loss)

    def apply(self, gradients: Sequence[Any]) -> None:
        """Take one step against the gradients of a scaled loss, one for each weight.

        A weight whose gradient is None stays as it is.
        """
        # `fit` calls this method, which a user's class may override.
        self._optimizer.apply_gradients(zip(gradients, self._weights, strict=True))

    def finish(self) -> tuple[tf.Tensor, ...]:
        """Return the weights as `fit` leaves them. With `use_ema` they are averages."""
        self._optimizer.finalize_variable_values(self._weights)
        return self.read_weights()

    def read_weights(self) -> tuple[tf.Tensor, ...]:
        """Return the weights as they are at this place of the graph."""
        return _read(self._weights)

    def read_state(self) -> tuple[tf.Tensor, ...]:
        """Return the optimizer's variables, such as its step count and moments."""
        return _read(self._optimizer.variables)


def server_step(model: Model, optimizer: OptimizerSpec) -> tuple[Any, Any]:
    """Return the server's step as a function, and its optimizer's first variables.

    The function takes weights, the optimizer's variables and a `Delta`, which is minus
    the gradient. It returns new weights and variables, in Keras' order. Running
    statistics move by the delta.
    """
    optimizer.refuse(
        "at the server",
        use_ema="its averages replace the weights at the end of training, which a"
        " process does not know",
    )

    def move(weights: ModelWeights, variables: Any, delta: Delta) -> Any:
        expect_delta(delta)
        stamped = optimizer.stamp(model)

        @tf.function(autograph=False)
        def step() -> tuple[Any, Any]:
            stamped.assign_weights(weights.trainable)
            stamped.assign_state(variables)
            stamped.apply([stamped.scale_loss(-move) for move in delta.trainable])
            return stamped.read_weights(), stamped.read_state()

        trainable, new_variables = step()
        statistics = model.move_statistics(weights, delta)
        return ModelWeights(trainable, statistics), new_variables

    return move, optimizer.initial_state(model)


def read_plain_rate(
    model: Model, optimizer: float | keras.optimizers.Optimizer | None
) -> float:
    """Return the learning rate of plain SGD, or raise ConfigError.

    `optimizer` is SGD or its rate, or None for the model's compiled optimizer.
    """
    rate: Any = model.compiled_optimizer if optimizer is None else optimizer
    if isinstance(rate, keras.optimizers.Optimizer):
        rate = OptimizerSpec(rate).plain_rate
        if rate is None:
            raise errors.ConfigError(
                "Expected SGD with a learning rate alone, whose steps are sums of"
                f" gradients, found {errors.describe(optimizer)}: pass"
                " keras.optimizers.SGD(0.1), or 0.1."
            )
    check_positive("client_optimizer", rate)
    return float(rate)


def _named(name: str) -> keras.optimizers.Optimizer:
    try:
        return keras.optimizers.get(name)
    except ValueError as error:
        raise errors.ValueMismatchError(
            f'Expected the name of a Keras optimizer, such as "sgd", found `{name}`.'
        ) from error


def _read_inner(optimizer: Any) -> dict[int, OptimizerSpec]:
    """Return a MultiOptimizer's inner optimizers by the `id` of the user's object."""
    if not isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return {}
    if not isinstance(optimizer._optimizer_map, keras.optimizers.OptimizerMap):
        raise errors.ValueMismatchError(
            "Expected a MultiOptimizer of a keras.optimizers.OptimizerMap, found one of"
            f" {errors.describe(optimizer._optimizer_map)}: name weights by patterns of"
            " their paths."
        )
    specs = {id(inner): OptimizerSpec(inner) for inner in optimizer.optimizers}
    if any(spec._starts_from_weights for spec in specs.values()):
        raise errors.ValueMismatchError(
            "Expected a MultiOptimizer of optimizers whose variables begin alike for"
            " all weights, found one, such as ScheduleFreeAdamW, that computes them"
            " from the weights: use it alone."
        )
    return specs


def _copied(value: Any) -> Any:
    """Return a setting. A container is copied, because Keras writes to some of them."""
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _leaves(optimizer: Any) -> list[Any]:
    """Return the optimizers that update variables: this one, or its inner parts."""
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return optimizer.optimizers
    return [optimizer]


def _variable_like(reference: Any) -> Any:
    """Return a variable of zeros that an optimizer treats like `reference`."""
    scope, _, _ = reference.path.rpartition("/")
    # With "/" at its end, TensorFlow adds no number to a name that exists.
    with tf.name_scope(f"{scope}/") if scope else contextlib.nullcontext():
        variable: Any = keras.Variable(
            "zeros", reference.shape, reference.dtype, name=reference.name
        )
    variable._path = reference.path
    variable.constraint = reference.constraint
    variable.overwrite_with_gradient = reference.overwrite_with_gradient
    return variable


def _exclude_alike(
    optimizer: Any, references: Sequence[Any], variables: Sequence[Any]
) -> None:
    excluded = getattr(optimizer, "_exclude_from_weight_decay", set[Any]())
    optimizer._exclude_from_weight_decay = {
        optimizer._var_key(variable)
        for reference, variable in zip(references, variables, strict=True)
        if optimizer._var_key(reference) in excluded
    }


def _check_schedule(schedule: Any) -> None:
    for name, value in getattr(schedule, "__dict__", {}).items():
        if isinstance(value, keras.Variable | tf.Variable):
            raise errors.ValueMismatchError(
                "Expected a schedule that computes from the number of steps alone,"
                f" found `{type(schedule).__name__}` with the variable `{name}`: make a"
                " number of it."
            )


def _starts_from_weights(spec: OptimizerSpec) -> bool:
    """Return whether `build` computes variables from the weights it receives.

    ScheduleFreeAdamW is an example. In a graph, `build` makes the variables before the
    weights have values, so `_build_again` runs it later. Raises ValueMismatchError if
    the second run gives other values, or if `build` does not make all variables.
    """
    variable: Any = keras.Variable(np.ones((2, 2), np.float32), name="kernel")
    first, second = spec.copy(), spec.copy()
    first.build([variable])
    _check_variables(first, variable)
    of_ones = _numpy_of(first.variables)
    variable.assign(np.full((2, 2), 2.0, np.float32))
    second.build([variable])
    of_twos = _numpy_of(second.variables)
    if all(map(np.array_equal, of_ones, of_twos)):
        return False
    _build_again(first, [variable], len(spec.copy().variables))
    if all(map(np.array_equal, _numpy_of(first.variables), of_twos)):
        return True
    raise errors.ValueMismatchError(
        "Expected an optimizer whose variables begin with the same values for all"
        f" weights, found `{type(first).__name__}`, whose `build` computes them from"
        " weights: have `build` make variables of zeros, then `assign` them values."
    )


def _check_variables(optimizer: Any, weight: Any) -> None:
    known = {id(variable) for variable in (*optimizer.variables, weight)}
    for name, value in vars(optimizer).items():
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, keras.Variable) and id(item) not in known:
                raise errors.ValueMismatchError(
                    "Expected an optimizer whose variables are made in its `build`,"
                    f" found `{type(optimizer).__name__}` with the variable `{name}`"
                    " that is not: a graph has variables of its own."
                )


def _build_again(optimizer: Any, weights: Sequence[Any], num_before: int) -> None:
    """Run `build` again, once weights have values, on the variables that it made."""
    existing = iter(optimizer.variables[num_before:])
    optimizer.built = False
    vars(optimizer)["add_variable"] = lambda *_, **__: next(existing)
    optimizer.build(list(weights))
    del vars(optimizer)["add_variable"]


def _numpy_of(variables: Sequence[Any]) -> list[Any]:
    return [variable.numpy() for variable in variables]


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.value.assign(value)


def _read(variables: Sequence[Any]) -> tuple[tf.Tensor, ...]:
    return tuple(variable.value.read_value() for variable in variables)

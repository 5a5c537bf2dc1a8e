"""The seam of aggregators: how the updates of clients become one."""

# pyright: reportUnknownLambdaType=false

import abc
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import federated_language as fl
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.learning.processes import AggregationPart
from ray_fed.learning.totals import widened


class Aggregator(abc.ABC):
    """How updates become one: built for a type once that is known.

    The computation `next` of what it builds

        takes    state@SERVER, update@CLIENTS, weight@CLIENTS (f32[], 0: left out)
        returns  state@SERVER, aggregate@SERVER, measurements@SERVER
    """

    @abc.abstractmethod
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> AggregationPart:
        """Return the part for updates of a type."""


def no_state() -> Any:
    """Return the computation ( -> <>@SERVER)."""

    @rtf.computation
    def nothing() -> tuple[()]:
        return ()

    @fl.federated_computation
    def initialize() -> Any:
        return fl.federated_eval(nothing, fl.SERVER)

    return initialize


def state_of(*values: float) -> Any:
    """Return the computation ( -> <f32, ...>@SERVER) of initial values."""

    @rtf.computation
    def values_of() -> tuple[tf.Tensor, ...]:
        return tuple(tf.constant(value, tf.float32) for value in values)

    @fl.federated_computation
    def initialize() -> Any:
        return fl.federated_eval(values_of, fl.SERVER)

    return initialize


def no_measurements() -> Any:
    """Return an empty struct at the server, inside of a federated computation."""

    @rtf.computation
    def nothing() -> "OrderedDict[str, Any]":
        return OrderedDict()

    return fl.federated_eval(nothing, fl.SERVER)


def joined(first_type: Any, second_type: Any) -> Any:
    """Return the computation that makes one struct by name of two."""

    @rtf.computation(first_type, second_type)
    def join(first: Any, second: Any) -> "OrderedDict[str, Any]":
        return OrderedDict(
            item for struct in (first, second) if struct for item in struct.items()
        )

    return join


def floats_of(update: Any) -> list[Any]:
    """Return the tensors of floats of an update, in order."""
    return [t for t in tf.nest.flatten(update) if t.dtype.is_floating]


def norm_of(update: Any) -> tf.Tensor:
    """Return the Euclidean norm of all floats of an update as one vector, f32[]."""
    squares = [
        tf.reduce_sum(tf.square(tf.cast(t, tf.float32))) for t in floats_of(update)
    ]
    return tf.sqrt(tf.add_n(squares)) if squares else tf.constant(0.0)


def scaled(update: Any, factor: Any) -> Any:
    """Return an update times a number, in types to add up in: integers as float64."""

    def scale(tensor: Any) -> tf.Tensor:
        wide = widened(tensor)
        if not wide.dtype.is_floating:
            wide = tf.cast(wide, tf.float64)
        return wide * tf.cast(factor, wide.dtype)

    return tf.nest.map_structure(scale, update)


def statistics_of(update: Any) -> tuple[Any, ...]:
    """Return the running statistics of an update, or their types of its type."""
    delta = getattr(update, "delta", update)
    return tuple(getattr(delta, "statistics", ()))


def refuse_statistics(update_type: fl.Type, name: str, why: str) -> None:
    """Raise for updates with running statistics, which a rule does not preserve.

    Args:
        update_type: of a client.
        name: of the aggregator.
        why: it does not.

    Raises:
        ValueMismatchError: there are some.
    """
    if found := statistics_of(update_type):
        raise errors.ValueMismatchError(
            f"Expected a model without running statistics for `{name}`, found"
            f" {len(found)}, such as those of BatchNormalization: {why}. Use"
            " GroupNormalization or LayerNormalization, set `trainable = False` on the"
            " layers that have them, or take `aggregators.mean()`."
        )


def at_clients(types: Sequence[fl.Type]) -> list[fl.FederatedType]:
    """Return the types of values at clients."""
    return [fl.FederatedType(t, fl.CLIENTS) for t in types]

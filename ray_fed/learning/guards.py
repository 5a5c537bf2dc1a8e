"""What keeps broken updates and empty rounds out of the weights."""

# pyright: reportUnknownLambdaType=false

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.learning.models import ModelWeights
from ray_fed.learning.totals import widened


@dataclasses.dataclass(frozen=True)
class Guards:
    """What a round does with updates that are not finite, and without any example.

    Attributes:
        non_finite: of a client's update that is infinite or not a number. "error": its
            work fails, which ends the round with an error that names the client; or,
            with `Config(max_dropped_clients=...)`, leaves the client out, named in the
            report. "leave_out": it counts nothing, and is counted in the metric
            `left_out`. New weights that are not finite always end the round.
        empty_round: of a round without any example, or any client. "skip": weights and
            optimizer stay as they are. "error": it ends with an error. A round with
            noise is a round like others: that nobody was there stays hidden.

    Raises:
        ConfigError: a field is none of these.
    """

    non_finite: Literal["error", "leave_out"] = "error"
    empty_round: Literal["skip", "error"] = "skip"

    def __post_init__(self) -> None:
        for name, kind in typing.get_type_hints(Guards).items():
            value, legal = getattr(self, name), typing.get_args(kind)
            if not isinstance(value, str) or value not in legal:
                raise errors.ConfigError(
                    f"Expected `{name}` to be one of {list(legal)}, found `{value}`."
                )


def is_finite(tensors: Sequence[Any]) -> tf.Tensor:
    """Return whether all elements of all floats are finite, as a bool[].

    Of elements so large that their sum is infinite it says that they are not.
    """
    # One pass and no copy: what is not finite makes a sum that is not.
    sums = [tf.reduce_sum(widened(t)) for t in tensors if t.dtype.is_floating]
    finite = [tf.math.is_finite(total) for total in sums]
    return tf.reduce_all(tf.stack(finite)) if finite else tf.ones([], tf.bool)


def require(condition: tf.Tensor, message: str, *tensors: Any) -> list[Any]:
    """Return tensors, which exist where a condition holds alone.

    Where it does not, the computation fails with the message.
    """
    with tf.control_dependencies([tf.debugging.Assert(condition, [message])]):
        return [tf.identity(tensor) for tensor in tensors]


def require_finite(weights: ModelWeights) -> ModelWeights:
    """Return weights, or fail: finite updates may have sums that are not."""
    trainable = require(
        is_finite(weights.trainable),
        "Expected finite weights after the step of the server, found infinities or"
        " NaN: lower its learning rate, or clip updates with aggregators.clipped",
        *weights.trainable,
    )
    return weights._replace(trainable=tuple(trainable))


def skip_empty(guards: Guards, counts: tf.Tensor, new: Any, old: Any) -> Any:
    """Return what a round made, or what was there before where it had no example."""
    if guards.empty_round == "error":
        flat = require(
            counts,
            "Expected a round with examples, found none at any client: choose other"
            ' clients, or pass Guards(empty_round="skip")',
            *tf.nest.flatten(new),
        )
        return tf.nest.pack_sequence_as(new, flat)
    return tf.nest.map_structure(lambda n, o: tf.where(counts, n, o), new, old)

"""The check of what a client sends, as part of a round: see `Guards`."""

# pyright: reportUnknownLambdaType=false

from collections import OrderedDict
from typing import Any

import federated_language as fl
import tensorflow as tf

from ray_fed import tensorflow as rtf
from ray_fed.learning.guards import Guards, is_finite, require
from ray_fed.learning.part_types import PartTypes
from ray_fed.learning.round_values import ClientResult


def build_guard(guards: Guards, types: PartTypes) -> Any:
    """Return the check of a client's result: <result, <kept, new>> -> <result, kept>.

    Where clients keep nothing, it takes and returns the result alone.
    """

    def check(result: ClientResult, new: Any) -> tf.Tensor:
        return is_finite(tf.nest.flatten((result.update, result.weight, new)))

    def guard(result: ClientResult, old: Any, new: Any) -> tuple[ClientResult, Any]:
        finite = check(result, new)
        if guards.non_finite == "error":
            flat = require(
                finite,
                "Expected a finite update of the client, found one with infinities or"
                " NaN: look at its data, or lower the learning rate",
                *tf.nest.flatten(result),
            )
            return tf.nest.pack_sequence_as(result, flat), new
        return _leave_out(result, finite), tf.nest.map_structure(
            lambda n, o: tf.where(finite, n, o), new, old
        )

    if types.kept is None:

        @rtf.computation(types.result)
        def guard_result(result: ClientResult) -> ClientResult:
            return guard(result, (), ())[0]

        return guard_result

    @rtf.computation(types.result, types.kept, types.kept)
    def guard_with_kept(result: ClientResult, old: Any, new: Any) -> Any:
        return guard(result, old, new)

    return guard_with_kept


def _leave_out(result: ClientResult, finite: tf.Tensor) -> ClientResult:
    zeroed: Any = tf.nest.map_structure(
        lambda t: tf.where(finite, t, tf.zeros_like(t)), result
    )
    counts = OrderedDict(zeroed.measured.counts or {})
    counts["left_out"] = tf.cast(tf.logical_not(finite), tf.int32)
    return zeroed._replace(measured=zeroed.measured._replace(counts=counts))


def apply_guard(guard: Any, result: Any, kept: Any) -> tuple[Any, Any]:
    """Return what clients sent and keep, checked, inside of a federated computation.

    Args:
        guard: what `build_guard` returned.
        result: of the clients.
        kept: what they kept before and keep now; None where they keep nothing.
    """
    if kept is None:
        return fl.federated_map(guard, result), None
    both = fl.federated_map(guard, (result, *kept))
    return both[0], both[1]

"""Sums as secure aggregation has them: of bounded integers, modulo a power of two.

What is simulated is the arithmetic, with its rounding and its modulus: the sum is that
of `federated_sum`, in the clear, which kernels run.

Sources:
    Keith Bonawitz, Vladimir Ivanov, Ben Kreuter, Antonio Marcedone, Brendan McMahan,
    Sarvar Patel, Daniel Ramage, Aaron Segal, Karn Seth: Practical Secure Aggregation
    for Privacy-Preserving Machine Learning. CCS 2017,
    https://eprint.iacr.org/2017/281, Section 4 (sums modulo R).
"""

import dataclasses
from collections import OrderedDict
from typing import Any

import federated_language as fl
import tensorflow as tf
from typing_extensions import override

from ray_fed import tensorflow as rtf
from ray_fed.learning.aggregators.aggregator import (
    Aggregator,
    no_state,
    refuse_statistics,
)
from ray_fed.learning.checks import check_positive, read_whole
from ray_fed.learning.processes import AggregationPart
from ray_fed.learning.totals import averaged

_MOST_BITS = 32


@dataclasses.dataclass(frozen=True)
class SecureMean(Aggregator):
    """See `secure_mean`.

    Attributes:
        bound: of the absolute value of each number.
        bits: of a client's integer.
        max_clients: of a round, which the modulus leaves room for.
    """

    bound: float
    bits: int
    max_clients: int

    @property
    def modulus(self) -> int:
        """The power of two that sums are taken modulo of."""
        return 2 ** (self.bits + (self.max_clients - 1).bit_length())

    @override
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> AggregationPart:
        why = "rounding may put variances below zero"
        refuse_statistics(update_type, "secure_mean", why)
        initialize = no_state()
        largest = 2**self.bits - 1
        step = 2 * self.bound / largest

        @rtf.computation(update_type, weight_type)
        def encode(update: Any, weight: Any) -> Any:
            counts = tf.cast(weight > 0, tf.int64)
            flat = tf.nest.flatten(update)
            places = [(tf.cast(t, tf.float64) + self.bound) / step for t in flat]
            integers = [
                counts * tf.cast(tf.round(tf.clip_by_value(p, 0, largest)), tf.int64)
                for p in places
            ]
            outside = [
                tf.reduce_sum(
                    tf.cast(tf.abs(tf.cast(t, tf.float64)) > self.bound, tf.int64)
                )
                for t in flat
            ]
            return tuple(integers), (counts, counts * tf.add_n(outside))

        encoded = encode.type_signature.result

        @rtf.computation(encoded, update_type)
        def decode(sums: Any, like: Any) -> Any:
            integers, (count, outside) = sums
            number = tf.cast(tf.maximum(count, 1), tf.float64)
            means = [
                tf.cast(tf.math.floormod(total, self.modulus), tf.float64)
                / number
                * step
                - self.bound * tf.cast(count > 0, tf.float64)
                for total in integers
            ]
            metrics = OrderedDict(
                modulus=tf.constant(self.modulus, tf.int64), num_clipped=outside
            )
            packed = tf.nest.pack_sequence_as(like, means)
            return averaged(packed, like), metrics

        @rtf.computation(update_type)
        def zeros(update: Any) -> Any:
            return tf.nest.map_structure(tf.zeros_like, update)

        @fl.federated_computation(
            initialize.type_signature.result,
            fl.FederatedType(update_type, fl.CLIENTS),
            fl.FederatedType(weight_type, fl.CLIENTS),
        )
        def merge(state: Any, update: Any, weight: Any) -> Any:
            sent = fl.federated_map(encode, (update, weight))
            integers = fl.federated_sum(sent[0])
            sums = fl.federated_zip((integers, fl.federated_sum(sent[1])))
            like = fl.federated_sum(fl.federated_map(zeros, update))
            ended = fl.federated_map(decode, (sums, like))
            return state, ended[0], ended[1]

        return AggregationPart(initialize, merge)


def secure_mean(
    *, bound: float, bits: int = 16, max_clients: int = 2**16
) -> Aggregator:
    """Return the unweighted mean by a simulated secure sum of integers.

    Each number is clipped to the bound and rounded to an integer; updates with running
    statistics are refused. Metrics: `modulus`, and `num_clipped`, numbers of all
    clients.

    Args:
        bound: of the absolute value of each number, > 0.
        bits: of a client's integer, 2 to 32.
        max_clients: of a round; with more the sum wraps around, as it would.

    Raises:
        ConfigError: an argument is out of its range.
    """
    check_positive("bound", bound)
    read_whole("bits", bits, 2, _MOST_BITS)
    read_whole("max_clients", max_clients, 1, 2**24)
    return SecureMean(bound, bits, max_clients)

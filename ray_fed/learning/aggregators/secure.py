"""Sums of bounded integers modulo a power of two, as in secure aggregation.

Only the arithmetic is simulated, with its rounding and its modulus. The sum itself is
an ordinary `federated_sum`, without encryption.

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

import ray_fed.tracebacks as tracebacks
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.aggregators.aggregator import (
    Aggregator,
    Summed,
    refuse_statistics,
)
from ray_fed.learning.checks import check_positive
from ray_fed.learning.tensors import specs_of

_MOST_BITS = 32


@dataclasses.dataclass(frozen=True)
class SecureMean(Summed):
    """The aggregator that `secure_mean` returns, which explains its fields."""

    bound: float
    bits: int
    max_clients: int

    @property
    def modulus(self) -> int:
        """Modulus of sums, a power of two with room for `max_clients` integers."""
        return 2 ** (self.bits + (self.max_clients - 1).bit_length())

    @override
    def check(self, update_type: fl.Type) -> None:
        why = "rounding may put variances below zero"
        refuse_statistics(update_type, "secure_mean", why)

    @override
    def count_bytes(self, update_type: fl.Type) -> int | None:
        bits = self.modulus.bit_length() - 1
        sizes = [
            None if spec.shape.rank is None else spec.shape.num_elements()
            for spec in tf.nest.flatten(specs_of(update_type))
        ]
        known = [-(-size * bits // 8) for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    @property
    def _step(self) -> float:
        return 2 * self.bound / (2**self.bits - 1)

    @override
    def client(self, update: Any, weight: Any, state: Any) -> Any:
        counts = tf.cast(weight > 0, tf.int64)

        def encode(tensor: Any) -> tf.Tensor:
            place = (tf.cast(tensor, tf.float64) + self.bound) / self._step
            rounded = tf.round(tf.clip_by_value(place, 0, 2**self.bits - 1))
            return counts * tf.cast(rounded, tf.int64)

        def count_outside(tensor: Any) -> tf.Tensor:
            is_outside = tf.abs(tf.cast(tensor, tf.float64)) > self.bound
            return tf.reduce_sum(tf.cast(is_outside, tf.int64))

        outside = tf.add_n([count_outside(t) for t in tf.nest.flatten(update)])
        return tf.nest.map_structure(encode, update), counts, counts * outside

    @override
    def server(self, sums: Any, state: Any) -> Any:
        integers, count, outside = sums
        number = tf.cast(tf.maximum(count, 1), tf.float64)
        shift = self.bound * tf.cast(count > 0, tf.float64)

        def decode(total: Any) -> tf.Tensor:
            wrapped = tf.cast(tf.math.floormod(total, self.modulus), tf.float64)
            return wrapped / number * self._step - shift

        metrics = OrderedDict(
            modulus=tf.constant(self.modulus, tf.int64), num_clipped=outside
        )
        return tf.nest.map_structure(decode, integers), state, metrics


@tracebacks.shorten
def secure_mean(
    *, bound: float, bits: int = 16, max_clients: int = 2**16
) -> Aggregator:
    """Return the unweighted mean by a simulated secure sum of integers.

    Each number of an update is clipped to the bound and rounded to an integer. Updates
    with running statistics are refused. Its metrics are `modulus`, the modulus of the
    sum, and `num_clipped`, how many numbers of all clients were clipped.

    Args:
        bound: Bound on the absolute value of each number, > 0.
        bits: Number of bits of a client's integer, 2 to 32.
        max_clients: Largest number of clients in a round. With more, the sum wraps
            around, as in secure aggregation.

    Raises:
        ConfigError: An argument is out of its range.
    """
    check_positive("bound", bound)
    read_whole("bits", bits, 2, _MOST_BITS)
    read_whole("max_clients", max_clients, 1, 2**24)
    return SecureMean(bound, bits, max_clients)

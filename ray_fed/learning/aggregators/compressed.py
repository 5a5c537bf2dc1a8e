"""Updates as if they were sent in fewer bytes, and how many that would be.

Nothing is sent here: what arrives is what would be left of an update, and the bytes are
counted from what each client would send.

Sources:
    Dan Alistarh, Demjan Grubic, Jerry Li, Ryota Tomioka, Milan Vojnovic: QSGD:
    Communication-Efficient SGD via Gradient Quantization and Encoding. NeurIPS 2017,
    https://arxiv.org/abs/1610.02132, Section 3.1 (stochastic rounding).
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import (
    Aggregator,
    Prepared,
    inner_or_mean,
    statistics_of,
)
from ray_fed.learning.checks import check_number, read_whole
from ray_fed.learning.tensors import widened

_Compress = Callable[[Any], tuple[Any, Any]]
_MOST_BITS = 16


@dataclasses.dataclass(frozen=True)
class Compressed(Prepared):
    """Compresses each tensor of floats but for running statistics, then aggregates.

    Attributes:
        inner: takes what is left of the updates.
        compress: returns what is left of a tensor, and its bytes, f32[].
    """

    inner: Aggregator
    compress: _Compress

    @override
    def client(self, update: Any, weight: Any, state: Any) -> Any:
        left: list[Any] = []
        sent = raw = tf.constant(0.0)
        as_is = [id(tensor) for tensor in statistics_of(update)]
        for tensor in tf.nest.flatten(update):
            size = np.float32(tensor.dtype.size * np.prod(tensor.shape))
            small, used = (
                self.compress(tensor)
                if tensor.dtype.is_floating and id(tensor) not in as_is
                else (tensor, size)
            )
            left.append(small)
            sent, raw = sent + used, raw + size
        counts = tf.cast(weight > 0, tf.float32)
        return tf.nest.pack_sequence_as(update, left), (sent * counts, raw * counts)

    @override
    def server(self, counts: Any, state: Any) -> Any:
        sent, raw = counts
        return state, OrderedDict(bytes_sent=sent, bytes_uncompressed=raw)


@tracebacks.shorten
def quantized(bits: int, inner: Aggregator | None = None) -> Aggregator:
    """Return an aggregator of updates rounded to 2^bits levels between their extremes.

    Each number is rounded up or down at random, so that its mean stays; running
    statistics are sent as they are. Metrics: `bytes_sent` of all clients, eight for the
    extremes of each tensor included, and `bytes_uncompressed`.

    Args:
        bits: of each number, 1 to 16.
        inner: aggregates what is left, by default the weighted mean.

    Raises:
        ConfigError: `bits` is out of its range.
    """
    read_whole("bits", bits, 1, _MOST_BITS)

    def round_all(tensor: Any) -> Any:
        wide: Any = widened(tensor)
        low, high = tf.reduce_min(wide), tf.reduce_max(wide)
        step = (high - low) / (2**bits - 1)
        position = tf.math.divide_no_nan(wide - low, step)
        drawn = tf.random.uniform(wide.shape, dtype=wide.dtype)
        used = np.float32(np.ceil(bits * np.prod(tensor.shape) / 8) + 8)
        rounded = low + tf.floor(position + drawn) * step
        return tf.cast(rounded, tensor.dtype), used

    return Compressed(inner_or_mean(inner), round_all)


@tracebacks.shorten
def sparsified(share: float, inner: Aggregator | None = None) -> Aggregator:
    """Return an aggregator of the largest numbers of each tensor; others are zeros.

    Running statistics are sent as they are. Metrics: `bytes_sent` of all clients, with
    four for the place of each number, and `bytes_uncompressed`.

    Args:
        share: of the numbers of a tensor that are sent, above 0, to 1; one at least.
        inner: aggregates what is left, by default the weighted mean.

    Raises:
        ConfigError: `share` is out of its range.
    """
    check_number("share", share, lambda part: 0 < part <= 1, "above 0, to 1")

    def keep_largest(tensor: Any) -> Any:
        flat = tf.reshape(tensor, [-1])
        number = max(1, round(share * int(np.prod(tensor.shape))))
        _, places = tf.math.top_k(tf.abs(flat), number)
        kept = tf.scatter_nd(places[:, None], tf.gather(flat, places), tf.shape(flat))
        used = np.float32(number * (tensor.dtype.size + 4))
        return tf.reshape(kept, tensor.shape), used

    return Compressed(inner_or_mean(inner), keep_largest)

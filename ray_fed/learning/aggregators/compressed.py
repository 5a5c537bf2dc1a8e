"""Simulated compression of updates, and the bytes that clients would send.

Nothing is sent here. The server receives updates as they would be after compression,
and the bytes that each client would send are counted. With error feedback, each client
keeps the error e_k of compression C, and adds it to its next update:

    p = delta_k + e_k;    sends C(p);    e_k <- p - C(p)

Sources:
    Dan Alistarh, Demjan Grubic, Jerry Li, Ryota Tomioka, Milan Vojnovic: QSGD:
    Communication-Efficient SGD via Gradient Quantization and Encoding. NeurIPS 2017,
    https://arxiv.org/abs/1610.02132, Section 3.1 (stochastic rounding).

    Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu: 1-Bit Stochastic Gradient
    Descent and its Application to Data-Parallel Distributed Training of Speech DNNs.
    Interspeech 2014, https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html
    (error feedback).

    Sai Praneeth Karimireddy, Quentin Rebjock, Sebastian U. Stich, Martin Jaggi: Error
    Feedback Fixes SignSGD and other Gradient Compression Schemes. ICML 2019,
    https://arxiv.org/abs/1901.09847, Algorithm 2.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.aggregators.aggregator import (
    Aggregator,
    Prepared,
    inner_or_mean,
    statistics_of,
)
from ray_fed.learning.checks import check_number
from ray_fed.learning.tensors import specs_of, widened

_MOST_BITS = 16


@dataclasses.dataclass(frozen=True)
class Compressed(Prepared):
    """Compresses tensors of floats, except running statistics, then aggregates.

    Attributes:
        inner: Aggregator of the compressed updates.
        compress: Function from a tensor to the tensor that the server reads.
        size: Function from the number of elements of a tensor, and the bytes of one
            element, to the bytes of its compressed form.
        error_feedback: Whether clients keep the error of compression for their next
            update.
    """

    inner: Aggregator
    compress: Callable[[Any], Any]
    size: Callable[[int, int], int]
    error_feedback: bool

    def _sizes(self, update: Any) -> list[int]:
        """Return the bytes in which each tensor of an update, or its spec, is sent."""
        sizes: list[int] = []
        for tensor, is_compressed in _parts_of(update):
            elements = int(np.prod(tensor.shape))
            size = tensor.dtype.size * elements
            sizes.append(
                self.size(elements, tensor.dtype.size) if is_compressed else size
            )
        return sizes

    @override
    def count_bytes(self, update_type: fl.Type) -> int | None:
        inner = self.inner.count_bytes(update_type)
        if inner is None:
            return None
        return min(inner, sum(self._sizes(specs_of(update_type))))

    @override
    def client(self, update: Any, weight: Any, state: Any) -> Any:
        left = [
            self.compress(tensor) if is_compressed else tensor
            for tensor, is_compressed in _parts_of(update)
        ]
        return tf.nest.pack_sequence_as(update, left), self._count(update, weight)

    def _count(self, update: Any, weight: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the bytes that a client sends, and the bytes without compression."""
        sent = raw = tf.constant(0.0)
        tensors = tf.nest.flatten(update)
        for tensor, used in zip(tensors, self._sizes(update), strict=True):
            size = np.float32(tensor.dtype.size * np.prod(tensor.shape))
            sent, raw = sent + np.float32(used), raw + size
        counts = tf.cast(weight > 0, tf.float32)
        return sent * counts, raw * counts

    @override
    def client_state(self, update_type: fl.Type) -> Any:
        if not self.error_feedback:
            return None
        wide = [
            (spec.shape, spec.dtype.as_numpy_dtype if spec.dtype.size > 2 else "f4")  # noqa: PLR2004
            for spec, is_compressed in _parts_of(specs_of(update_type))
            if is_compressed
        ]
        return tuple(np.zeros(shape, dtype) for shape, dtype in wide) or None

    @override
    def keeping_client(self, update: Any, weight: Any, state: Any, own: Any) -> Any:
        residuals, takes_part = iter(own), weight > 0
        left: list[Any] = []
        new: list[Any] = []
        for tensor, is_compressed in _parts_of(update):
            if not is_compressed:
                left.append(tensor)
                continue
            residual = next(residuals)
            corrected = widened(tensor) + residual
            sent = tf.cast(self.compress(corrected), tensor.dtype)
            left.append(sent)
            rest = corrected - widened(sent)
            # A client of weight 0 sends nothing.
            new.append(tf.where(takes_part, rest, residual))
        changed = tf.nest.pack_sequence_as(update, left)
        return changed, self._count(update, weight), tuple(new)

    @override
    def server(self, counts: Any, state: Any) -> Any:
        sent, raw = counts
        return state, OrderedDict(bytes_sent=sent, bytes_uncompressed=raw)


def _parts_of(update: Any) -> list[tuple[Any, bool]]:
    """Return each tensor or spec of an update, and whether it is compressed."""
    as_is = [id(tensor) for tensor in statistics_of(update)]
    return [
        (tensor, tensor.dtype.is_floating and id(tensor) not in as_is)
        for tensor in tf.nest.flatten(update)
    ]


@tracebacks.shorten
def quantized(
    bits: int, inner: Aggregator | None = None, *, error_feedback: bool = False
) -> Aggregator:
    """Return an aggregator that rounds each tensor's numbers to 2^bits levels.

    The levels are evenly spaced from the smallest to the largest number of the tensor.
    Each number is rounded up or down at random, so that its expected value stays.
    Running statistics are sent unchanged. Its metrics, summed over clients, are
    `bytes_sent`, with eight bytes for each tensor's smallest and largest number, and
    `bytes_uncompressed`.

    Args:
        bits: Number of bits of each number, 1 to 16.
        inner: Aggregator of the compressed updates, by default the weighted mean.
        error_feedback: Whether each client keeps the error of rounding, and adds it to
            its next update. `next` then takes and returns values of clients, as
            `build_scaffold` describes.

    Raises:
        ConfigError: `bits` is out of its range, or `error_feedback` is not a bool.
    """
    read_whole("bits", bits, 1, _MOST_BITS)
    _check_bool(error_feedback)

    def round_all(tensor: Any) -> Any:
        wide: Any = widened(tensor)
        low, high = tf.reduce_min(wide), tf.reduce_max(wide)
        step = (high - low) / (2**bits - 1)
        position = tf.math.divide_no_nan(wide - low, step)
        drawn = tf.random.uniform(wide.shape, dtype=wide.dtype)
        rounded = low + tf.floor(position + drawn) * step
        return tf.cast(rounded, tensor.dtype)

    return Compressed(
        inner_or_mean(inner),
        round_all,
        lambda elements, _: -(-bits * elements // 8) + 8,
        error_feedback,
    )


@tracebacks.shorten
def sparsified(
    share: float, inner: Aggregator | None = None, *, error_feedback: bool = False
) -> Aggregator:
    """Return an aggregator that sends the largest numbers of each tensor alone.

    The other numbers become zeros. A number's absolute value decides. Running
    statistics are sent unchanged. Its metrics, summed over clients, are `bytes_sent`,
    with four bytes for the place of each number, and `bytes_uncompressed`.

    Args:
        share: Share of a tensor's numbers that are sent, > 0 and <= 1. At least one
            number is sent.
        inner: Aggregator of the compressed updates, by default the weighted mean.
        error_feedback: Whether each client keeps the numbers that it did not send, and
            adds them to its next update. `next` then takes and returns values of
            clients, as `build_scaffold` describes.

    Raises:
        ConfigError: `share` is out of its range, or `error_feedback` is not a bool.
    """
    _check_bool(error_feedback)
    check_number("share", share, lambda part: 0 < part <= 1, "above 0, to 1")

    def count_kept(elements: int) -> int:
        return max(1, round(share * elements))

    def keep_largest(tensor: Any) -> Any:
        flat = tf.reshape(tensor, [-1])
        number = count_kept(int(np.prod(tensor.shape)))
        _, places = tf.math.top_k(tf.abs(flat), number)
        kept = tf.scatter_nd(places[:, None], tf.gather(flat, places), tf.shape(flat))
        return tf.reshape(kept, tensor.shape)

    return Compressed(
        inner_or_mean(inner),
        keep_largest,
        lambda elements, width: count_kept(elements) * (width + 4),
        error_feedback,
    )


def _check_bool(error_feedback: object) -> None:
    if not isinstance(error_feedback, bool):
        raise errors.ConfigError(
            "Expected `error_feedback` to be True or False, found"
            f" {errors.describe(error_feedback)}."
        )

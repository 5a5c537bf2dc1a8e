"""Statistics over the data of all clients, computed by federated computations.

    analytics.quantiles(data, [0.5, 0.9], value="age")

The argument `value` says which values of an element count: the name of a column, a
TensorFlow function from an element to a tensor, or None for the element itself. All
numbers of the tensor count, so batches count as their rows do. A client without a
sequence has one element. The functions raise a ValueMismatchError if `value` does not
choose one tensor, or chooses strings when numbers are needed.
"""

# pyright: reportUnknownLambdaType=false

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import federated_language as fl
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, NDArray

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf
from ray_fed.data import ClientData
from ray_fed.language.type_checks import read_whole

__all__ = ["count", "distinct", "heavy_hitters", "histogram", "mean", "quantiles"]

Value: TypeAlias = str | Callable[[Any], Any] | None

_SIZE = 256  # `quantiles` finds 8 of 64 bits at a time
_SIGN, _BELOW_SIGN = np.int64(63), np.int64(2**63 - 1)


@tracebacks.shorten
def count(data: ClientData, value: Value = None) -> int:
    """Return how many values all clients have together."""
    add = _sum(data, value, np.int64(0), lambda values, _: tf.size(values, "int64"))
    return int(add(0))


@tracebacks.shorten
def mean(data: ClientData, value: Value = None) -> float:
    """Return the mean of all clients' numbers in float64, or NaN without numbers."""

    def add(values: tf.Tensor, _: Any) -> Any:
        return tf.reduce_sum(_as_float(values)), tf.size(values, "int64")

    total, number = _sum(data, value, (np.float64(0), np.int64(0)), add)(0)
    return float(total / number) if number else float("nan")


@tracebacks.shorten
def histogram(
    data: ClientData, bins: ArrayLike, value: Value = None
) -> NDArray[np.int64]:
    """Return how many numbers of all clients are in each bin, i64[len(bins) - 1].

    `bins` are edges in increasing order, as for `numpy.histogram`. A bin includes its
    lower edge, and the last bin also its upper edge. NaN and numbers outside are in no
    bin. Numbers are compared in float64.

    Raises:
        ConfigError: `bins` are not such edges.
    """
    edges = np.asarray(bins, np.float64)
    if edges.ndim != 1 or len(edges) < 2 or not np.all(np.diff(edges) >= 0):  # noqa: PLR2004
        raise errors.ConfigError(
            f"Expected increasing edges of bins, found {errors.describe(bins)}."
        )

    def add(values: tf.Tensor, sent: tf.Tensor) -> tf.Tensor:
        numbers = _as_float(values)
        places = tf.searchsorted(sent, numbers, side="right", out_type=tf.int64)
        is_last = tf.cast(tf.equal(numbers, sent[-1]), tf.int64)
        return _tally(places - 1 - is_last, len(edges) - 1)

    zero = np.zeros(len(edges) - 1, np.int64)
    return np.asarray(_sum(data, value, zero, add, (np.float64, [len(edges)]))(edges))


@tracebacks.shorten
def quantiles(
    data: ClientData, q: float | Sequence[float], value: Value = None
) -> NDArray[np.float64]:
    """Return quantiles of the numbers of all clients, f64 in the shape of `q`.

    `q` are probabilities between 0 and 1, as for `numpy.quantile`. The quantiles are
    exact, interpolated by NumPy's method "linear", and NaN if there are no numbers.
    This is a radix search in eight calls. In each call, clients count how many of their
    numbers have each value of the next 8 bits, for each rank.

    Raises:
        ConfigError: A probability is not between 0 and 1.
        ValueMismatchError: A number is NaN.
    """
    shares = np.asarray(q, np.float64)
    if not np.all((shares >= 0) & (shares <= 1)):
        raise errors.ConfigError(
            f"Expected probabilities between 0 and 1, found {errors.describe(q)}."
        )
    number = count(data, value)
    if num_nan := number - int(histogram(data, [-np.inf, np.inf], value)[0]):
        raise errors.ValueMismatchError(
            f"Expected numbers, found {num_nan} NaN: leave them out of the data."
        )
    if not number:
        return np.full(shares.shape, np.nan)
    places = shares.reshape(-1) * (number - 1)
    below = np.floor(places).astype(np.int64)
    ranks = np.concatenate([below, np.minimum(below + 1, number - 1)])
    low, high = np.split(_find_ranked(data, value, ranks), 2)
    moved = (low < high) & (places > below)  # not from an infinity to the same
    low[moved] += (places - below)[moved] * (high[moved] - low[moved])
    return low.reshape(shares.shape)


@tracebacks.shorten
def distinct(data: ClientData, value: Value = None) -> NDArray[Any]:
    """Return the distinct numbers or strings of all clients, ascending.

    Strings are bytes. The server learns the distinct values of each client.
    """
    return _count_each(data, value)[0]


@tracebacks.shorten
def heavy_hitters(data: ClientData, k: int, value: Value = None) -> dict[Any, int]:
    """Return the `k` most frequent numbers or strings, with their exact counts.

    The most frequent value is first. If two values are equally frequent, the smaller
    value is first. Strings are bytes. The server learns the counts of each client.

    Raises:
        ConfigError: `k` is below 1.
    """
    read_whole("k", k, 1)
    values, counts = _count_each(data, value)
    order = np.argsort(-counts, kind="stable")[:k]
    return dict(zip(values[order].tolist(), counts[order].tolist(), strict=True))


def _find_ranked(
    data: ClientData, value: Value, ranks: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the numbers with the given ranks. Rank 0 is the smallest number."""
    rows = np.arange(len(ranks)) * _SIZE

    def add(values: tf.Tensor, sent: Any) -> tf.Tensor:
        shift, bases = sent
        bits = tf.bitcast(_as_float(values), tf.int64)
        keys = bits ^ (tf.bitwise.right_shift(bits, _SIGN) & _BELOW_SIGN)
        digits = tf.bitwise.right_shift(keys[:, tf.newaxis], shift) - bases
        is_inside = (digits >= 0) & (digits < _SIZE)
        return _tally(tf.where(is_inside, digits + rows, -1), rows.size * _SIZE)

    zero = np.zeros(rows.size * _SIZE, np.int64)
    count_digits = _sum(data, value, zero, add, [np.int64, (np.int64, [len(ranks)])])
    keys, bases = zero, np.full(len(ranks), -_SIZE // 2, np.int64)
    for shift in range(56, -1, -8):
        counts = np.reshape(count_digits([np.int64(shift), bases]), [-1, _SIZE])
        totals = np.cumsum(counts, axis=1)
        digits = np.sum(totals <= ranks[:, np.newaxis], axis=1)
        ranks = ranks - np.where(digits, totals[np.arange(len(ranks)), digits - 1], 0)
        keys = bases + digits
        bases = keys * _SIZE
    return (keys ^ (keys >> _SIGN & _BELOW_SIGN)).view(np.float64)


def _tally(indices: tf.Tensor, size: int) -> tf.Tensor:
    """Return how often each index occurs, i64[size]. Other indices are left out."""
    is_inside = (indices >= 0) & (indices < size)
    kept = tf.reshape(tf.where(is_inside, indices, -1), [-1])
    return tf.math.unsorted_segment_sum(tf.ones_like(kept), kept, size)


def _as_float(values: tf.Tensor) -> tf.Tensor:
    if values.dtype == tf.string or values.dtype.is_complex:
        raise errors.ValueMismatchError(
            f"Expected numbers, found values of `{values.dtype.name}`: pass `value=`."
        )
    return tf.cast(values, tf.float64)


def _pick(element: Any, value: Value) -> tf.Tensor:
    """Return the values of an element as a vector."""
    if isinstance(value, str):
        is_named = isinstance(element, dict) and value in element
        chosen = element[value] if is_named else ()
    else:
        chosen = element if value is None else value(element)
    if len(parts := tf.nest.flatten(chosen)) != 1:
        raise errors.ValueMismatchError(
            f"Expected `value` to choose one tensor of an element, found {len(parts)}"
            f" for `{value}`: pass a name of {element}, or a function of an element."
        )
    return tf.reshape(parts[0], [-1])


def _call(data: ClientData, work: Any, reduce: Any, sent_type: Any) -> Any:
    """Return a function of `sent` that applies `reduce` to `work(elements, sent)`."""
    member, sent_type = data.type_signature, rtf.to_type(sent_type)

    @rtf.computation(member, sent_type)
    def of_client(client: Any, sent: Any) -> Any:
        if not isinstance(member, fl.SequenceType):
            client = tf.data.Dataset.from_tensors(client)
        return work(client, sent)

    @fl.federated_computation(
        fl.FederatedType(member, fl.CLIENTS), fl.FederatedType(sent_type, fl.SERVER)
    )
    def over_clients(clients: Any, sent: Any) -> Any:
        pair = (clients, fl.federated_broadcast(sent))
        return reduce(fl.federated_map(of_client, pair))

    return lambda sent: over_clients(data, sent)


def _sum(
    data: ClientData, value: Value, zero: Any, add: Any, sent: Any = np.int32
) -> Any:
    """Return a function from `sent` to the sum of `add(values, sent)` over elements."""

    def work(elements: Any, received: Any) -> Any:
        def step(total: Any, element: Any) -> Any:
            added = add(_pick(element, value), received)
            return tf.nest.map_structure(tf.add, total, added)

        return elements.reduce(zero, step)

    return _call(data, work, fl.federated_sum, sent)


def _count_each(data: ClientData, value: Value) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the distinct values of all clients, ascending, and their counts."""

    def work(elements: Any, _: Any) -> Any:
        picked = elements.map(lambda element: _pick(element, value))
        begun = tf.zeros([0], picked.element_spec.dtype)
        values = picked.reduce(begun, lambda so_far, new: tf.concat([so_far, new], 0))
        return tf.unique_with_counts(values, tf.int64)[::2]

    counted = _call(data, work, lambda counts: counts, np.int32)(0)
    values, counts = map(np.concatenate, zip(*counted, strict=True))
    found, places = np.unique(values, return_inverse=True)
    totals = np.zeros(len(found), np.int64)
    np.add.at(totals, places, counts)
    return found, totals

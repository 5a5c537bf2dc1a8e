"""Robust aggregators, whose results a few broken clients cannot move far.

    median, trimmed_mean   the middle of each coordinate's values
    multi_krum             the mean of the updates that have the nearest neighbors
    geometric_median       the point with the smallest sum of distances to all updates

All of these need the updates of all clients of a round at once. So a partial result on
a worker is a table of fixed size, with one row for each client, which takes
`max_clients` times the size of an update. Rows are in client order and are combined at
the end. So the result is exact, and it does not depend on how clients are divided among
workers.

Sources:
    Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett: Byzantine-Robust
    Distributed Learning: Towards Optimal Statistical Rates. ICML 2018,
    https://arxiv.org/abs/1803.01498, Definitions 1 and 2.

    Peva Blanchard, El Mahdi El Mhamdi, Rachid Guerraoui, Julien Stainer: Machine
    Learning with Adversaries: Byzantine Tolerant Gradient Descent. NeurIPS 2017,
    https://arxiv.org/abs/1703.02757 (Krum and Multi-Krum).

    Krishna Pillutla, Sham M. Kakade, Zaid Harchaoui: Robust Aggregation for Federated
    Learning. IEEE Transactions on Signal Processing 70, 2022,
    https://arxiv.org/abs/1912.13445 (the smoothed Weiszfeld algorithm).
"""

# pyright: reportUnknownLambdaType=false

import abc
import dataclasses
from collections import OrderedDict
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.aggregators.aggregator import Aggregation, Aggregator
from ray_fed.learning.checks import check_number, check_positive
from ray_fed.learning.processes import build_initialize
from ray_fed.learning.tensors import averaged, require, specs_of, widened

_MOST_ITERATIONS = 1000
"""Largest number of iterations. Each adds a few operations to the graph."""


class Tabled(Aggregator):
    """Aggregates all updates of a round at once, from a table with one row for each.

    Attributes:
        max_clients: Number of rows of the table.
    """

    max_clients: int

    @abc.abstractmethod
    def combine(
        self, rows: Any, weights: tf.Tensor, count: tf.Tensor
    ) -> tuple[Any, "OrderedDict[str, Any]"]:
        """Return the aggregate of a round's updates, and metrics by name.

        Args:
            rows: Updates of the clients, in client order. Each tensor has a first axis
                of `max_clients`. Rows from `count` on are zeros.
            weights: Weights of the clients, f32[max_clients]. Only clients of a weight
                above 0 have a row.
            count: Number of clients, i32[].
        """

    @override
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> Aggregation:
        initialize = build_initialize(())
        table = _Table(update_type, weight_type, self.max_clients)
        finish = self._build_finish(table)

        @fl.federated_computation(
            initialize.type_signature.result,
            fl.FederatedType(update_type, fl.CLIENTS),
            fl.FederatedType(weight_type, fl.CLIENTS),
        )
        def merge(state: Any, update: Any, weight: Any) -> Any:
            filled = fl.federated_aggregate(
                fl.federated_zip((update, weight)),
                table.zero(),
                table.accumulate,
                table.merge,
                table.report,
            )
            ended = fl.federated_map(finish, filled)
            return state, ended[0], ended[1]

        return Aggregation(initialize, merge)

    def _build_finish(self, table: "_Table") -> Any:
        @rtf.computation(table.table_type)
        def finish(table: Any) -> Any:
            (rows, weights), count = table
            (count,) = require(
                count <= self.max_clients,
                f"Expected at most {self.max_clients} clients, `max_clients` of the"
                " aggregator, found more in a round: raise it",
                count,
            )
            return self.combine(rows, weights, count)

        return finish


@dataclasses.dataclass(frozen=True)
class Ranked(Tabled):
    """Averages the middle of each coordinate's values; see `median`, `trimmed_mean`.

    `trimmed_share` is the share that is cut off at either end. None cuts off all but
    the middle value or two.
    """

    max_clients: int
    trimmed_share: float | None

    @override
    def combine(self, rows: Any, weights: tf.Tensor, count: tf.Tensor) -> Any:
        cut = self._num_cut(count)
        middle = tf.nest.map_structure(lambda t: _middle(t, cut, count), rows)
        return middle, OrderedDict(num_aggregated=count, num_trimmed=2 * cut)

    def _num_cut(self, count: Any) -> Any:
        if self.trimmed_share is None:
            return tf.maximum(count - 1, 0) // 2
        exact = tf.cast(count, tf.float64) * self.trimmed_share
        # Without the small addend, 0.1 of 10 clients could fall below 1 by its last
        # bit.
        return tf.cast(tf.floor(exact + 1e-9), tf.int32)


@dataclasses.dataclass(frozen=True)
class MultiKrum(Tabled):
    """The aggregator that `multi_krum` returns, which explains its fields."""

    max_clients: int
    num_broken: int
    num_selected: int

    @property
    def least_clients(self) -> int:
        """Smallest number of clients that a round may have, except 0."""
        return max(2 * self.num_broken + 3, self.num_selected)

    @override
    def combine(self, rows: Any, weights: tf.Tensor, count: tf.Tensor) -> Any:
        (count,) = require(
            tf.logical_or(count == 0, count >= self.least_clients),
            f"Expected at least {self.least_clients} clients in a round, for"
            f" `num_broken={self.num_broken}` and `num_selected={self.num_selected}` of"
            " `multi_krum`, found fewer: lower these, or choose more clients",
            count,
        )
        is_row = tf.range(self.max_clients) < count
        is_self = tf.eye(self.max_clients, dtype=tf.bool)
        is_pair = is_row[:, None] & is_row[None] & tf.logical_not(is_self)
        gram = _gram(rows)
        norms = tf.linalg.diag_part(gram)
        distances = tf.maximum(norms[:, None] + norms[None] - 2 * gram, 0.0)
        distances = tf.where(is_pair, distances, np.inf)
        nearest = tf.range(self.max_clients) < count - self.num_broken - 2
        scores = tf.reduce_sum(
            tf.where(nearest[None], tf.sort(distances), tf.zeros_like(distances)), 1
        )
        order = tf.argsort(tf.where(is_row, scores, np.inf), stable=True)
        is_chosen = tf.argsort(order, stable=True) < self.num_selected
        shares = tf.cast(is_chosen & is_row, tf.float64)
        metrics = OrderedDict(
            num_aggregated=count, num_selected=tf.minimum(count, self.num_selected)
        )
        return averaged(_mean_of_rows(rows, shares), rows), metrics


@dataclasses.dataclass(frozen=True)
class GeometricMedian(Tabled):
    """The aggregator that `geometric_median` returns, which explains its fields."""

    max_clients: int
    num_iterations: int
    smoothing: float

    @override
    def combine(self, rows: Any, weights: tf.Tensor, count: tf.Tensor) -> Any:
        # Each point of the algorithm is a mean of rows, so its distances to the rows
        # follow from the inner products of the rows.
        gram, alphas = _gram(rows), tf.cast(weights, tf.float64)
        norms, betas = tf.linalg.diag_part(gram), alphas
        for step in range(self.num_iterations):
            squares = norms  # of the distances to the first point, zero
            if step:
                shares = tf.math.divide_no_nan(betas, tf.reduce_sum(betas))
                products = tf.linalg.matvec(gram, shares)
                squares += tf.tensordot(shares, products, 1) - 2 * products
            distances = tf.sqrt(tf.maximum(squares, 0.0))
            betas = alphas / tf.maximum(distances, self.smoothing)
        metrics = OrderedDict(num_aggregated=count)
        return averaged(_mean_of_rows(rows, betas), rows), metrics


@tracebacks.shorten
def median(*, max_clients: int) -> Aggregator:
    """Return an aggregator that computes the median of each coordinate of the updates.

    For an even number of clients, the median is the mean of the middle two values. Each
    client whose weight is above 0 counts the same. Its metrics are `num_aggregated`,
    the number of clients, and `num_trimmed`, the number of values that each coordinate
    leaves out.

    Args:
        max_clients: Largest number of clients in a round, >= 1. More clients are an
            error. A partial result on a worker takes this many times the bytes of an
            update.

    Raises:
        ConfigError: `max_clients` is below 1.
    """
    return Ranked(read_whole("max_clients", max_clients, 1), None)


@tracebacks.shorten
def trimmed_mean(trimmed_share: float, *, max_clients: int) -> Aggregator:
    """Return the mean of each coordinate without its smallest and largest values.

    Metrics and memory are as for `median`.

    Args:
        trimmed_share: beta of the paper: the share of clients that is cut off at either
            end, >= 0 and < 0.5. Their number is rounded down.
        max_clients: Largest number of clients in a round, >= 1. More are an error.

    Raises:
        ConfigError: An argument is out of its range.
    """
    below = 0.5  # nothing would be left
    check_number(
        "trimmed_share", trimmed_share, lambda s: 0 <= s < below, "from 0 to below 0.5"
    )
    return Ranked(read_whole("max_clients", max_clients, 1), trimmed_share)


@tracebacks.shorten
def multi_krum(
    num_broken: int, num_selected: int = 1, *, max_clients: int
) -> Aggregator:
    """Return the mean of the updates that have the nearest neighbors.

    The score of a client is the sum of the squared Euclidean distances from its update
    to the `n - num_broken - 2` nearest other updates, where n is the number of clients
    in the round. The clients with the lowest scores are selected. If scores are equal,
    the earlier client is selected. Each client whose weight is above 0 counts the same.
    Its metrics are `num_aggregated`, the number of clients, and `num_selected`.

    A round with fewer than `2 * num_broken + 3` clients, or with fewer than
    `num_selected`, is an error, but a round without clients is not.

    Args:
        num_broken: f of the paper: the number of clients in a round whose updates may
            be anything, >= 0.
        num_selected: m of the paper: the number of updates in the mean, >= 1. With 1,
            this is Krum.
        max_clients: Largest number of clients in a round, at least the smallest number
            that a round may have. More clients are an error. A partial result on a
            worker takes this many times the bytes of an update.

    Raises:
        ConfigError: An argument is out of its range.
    """
    num_broken = read_whole("num_broken", num_broken, 0)
    num_selected = read_whole("num_selected", num_selected, 1)
    max_clients = read_whole("max_clients", max_clients, 1)
    made = MultiKrum(max_clients, num_broken, num_selected)
    if made.least_clients > max_clients:
        raise errors.ConfigError(
            f"Expected `max_clients` of at least {made.least_clients}, which is"
            " `2 * num_broken + 3` or `num_selected`, found"
            f" {max_clients}: lower `num_broken` and `num_selected`, or raise"
            " `max_clients` and choose more clients for each round."
        )
    return made


@tracebacks.shorten
def geometric_median(
    *, max_clients: int, num_iterations: int = 10, smoothing: float = 1e-6
) -> Aggregator:
    """Return the weighted geometric median, by the smoothed Weiszfeld algorithm.

        beta_k = alpha_k / max(smoothing, |v - delta_k|)
        v <- sum_k beta_k delta_k / sum_k beta_k

    alpha_k is the weight of client k, such as its number of examples. v begins with
    zeros, which stands for the server's weights. An update far away from the others
    moves the result little, whatever its size. Its metric is `num_aggregated`, the
    number of clients.

    Args:
        max_clients: Largest number of clients in a round, >= 1. More clients are an
            error. A partial result on a worker takes this many times the bytes of an
            update.
        num_iterations: R of the paper: the number of steps, 1 to 1,000.
        smoothing: nu of the paper: the least distance that a step divides by, > 0.

    Raises:
        ConfigError: An argument is out of its range.
    """
    check_positive("smoothing", smoothing)
    return GeometricMedian(
        read_whole("max_clients", max_clients, 1),
        read_whole("num_iterations", num_iterations, 1, _MOST_ITERATIONS),
        smoothing,
    )


class _Table:
    """The computations that collect updates in a table with one row for each client.

    A table, the partial result on a worker, is <<updates, weights>, number of rows>.
    """

    def __init__(self, update_type: Any, weight_type: Any, size: int) -> None:
        @rtf.computation(fl.to_type((update_type, weight_type)))
        def widen(value: Any) -> Any:
            held = tf.nest.map_structure(
                lambda t: tf.zeros([size, *t.shape], t.dtype), value
            )
            return held, tf.constant(0)

        self.table_type: Any = widen.type_signature.result
        table_type = self.table_type

        @rtf.computation
        def zero() -> Any:
            return tf.nest.map_structure(
                lambda spec: tf.zeros(spec.shape, spec.dtype), specs_of(table_type)
            )

        @rtf.computation(table_type, (update_type, weight_type))
        def accumulate(table: Any, value: Any) -> Any:
            held, count = table
            _, weight = value
            here = tf.logical_and(tf.range(size) == count, weight > 0)
            held = tf.nest.map_structure(
                lambda rows, t: tf.where(_as_column(here, t), t[None], rows),
                held,
                value,
            )
            return held, count + tf.cast(weight > 0, tf.int32)

        @rtf.computation(table_type, table_type)
        def merge(first: Any, second: Any) -> Any:
            (held, count), (more, others) = first, second
            index = tf.range(size) - count
            moved = tf.clip_by_value(index, 0, size - 1)
            held = tf.nest.map_structure(
                lambda a, b: tf.where(
                    _as_column(index < 0, b[0]), a, tf.gather(b, moved)
                ),
                held,
                more,
            )
            return held, count + others

        @rtf.computation(table_type)
        def report(table: Any) -> Any:
            return table

        self.zero, self.accumulate = zero, accumulate
        self.merge, self.report = merge, report


def _as_column(mask: Any, row: Any) -> Any:
    """Reshape a mask of rows so that it broadcasts over a table of these rows."""
    return tf.reshape(mask, [-1] + [1] * len(row.shape))


def _middle(rows: Any, cut: Any, count: Any) -> Any:
    """Return the mean of the sorted rows from `cut` to `count - cut`, or 0."""
    index = tf.range(tf.shape(rows)[0])
    present = _as_column(index < count, rows[0])
    last = rows.dtype.max if rows.dtype.is_integer else np.inf
    # TensorFlow sorts fast only along the last axis.
    ordered = tf.sort(tf.where(present, rows, tf.constant(last, rows.dtype)), axis=0)
    kept = _as_column(tf.logical_and(index >= cut, index < count - cut), rows[0])
    values = widened(tf.where(kept, ordered, tf.zeros_like(ordered)))
    total = tf.reduce_sum(values, axis=0)
    middle = tf.math.divide_no_nan(total, tf.cast(count - 2 * cut, total.dtype))
    return tf.cast(middle, rows.dtype) if rows.dtype.is_floating else middle


def _gram(rows: Any) -> tf.Tensor:
    """Return the inner products of all rows, f64[max_clients, max_clients]."""
    products = tf.zeros([], tf.float64)
    for tensor in tf.nest.flatten(rows):
        flat = tf.cast(tf.reshape(tensor, [tensor.shape[0], -1]), tf.float64)
        products += tf.matmul(flat, flat, transpose_b=True)
    return products


def _mean_of_rows(rows: Any, shares: tf.Tensor) -> Any:
    """Return the mean of rows weighted by `shares`, in dtypes for sums, or zeros."""
    total = tf.reduce_sum(shares)
    shares = tf.math.divide_no_nan(shares, total)

    def average(tensor: Any) -> tf.Tensor:
        wide = widened(tensor)
        if not wide.dtype.is_floating:
            wide = tf.cast(wide, tf.float64)
        return tf.tensordot(tf.cast(shares, wide.dtype), wide, 1)

    return tf.nest.map_structure(average, rows)

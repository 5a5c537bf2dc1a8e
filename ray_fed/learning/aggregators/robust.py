"""Median and trimmed mean: what a few broken clients cannot move far.

Both need all updates of a round at once. A partial is a table with a row for each
client, of a fixed size, so that a worker takes `max_clients` times the size of an
update for each partial that it holds. Rows are put one after another and sorted at the
end, so the result is exact, and the same for any cut of the clients.

Sources:
    Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett: Byzantine-Robust
    Distributed Learning: Towards Optimal Statistical Rates. ICML 2018,
    https://arxiv.org/abs/1803.01498, Definitions 1 and 2.
"""

# pyright: reportUnknownLambdaType=false

import dataclasses
from collections import OrderedDict
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf
from typing_extensions import override

import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf
from ray_fed.learning.aggregators.aggregator import Aggregator
from ray_fed.learning.checks import check_number, read_whole
from ray_fed.learning.processes import Part, build_initialize
from ray_fed.learning.tensors import require, specs_of, widened


@dataclasses.dataclass(frozen=True)
class Ranked(Aggregator):
    """Averages the middle of each coordinate's values; see `median`, `trimmed_mean`.

    Attributes:
        max_clients: rows of the table.
        trimmed_share: cut off at either end; None: all but the middle one or two.
    """

    max_clients: int
    trimmed_share: float | None

    @override
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> Part:
        initialize = build_initialize(())
        rows = _Rows(update_type, weight_type, self.max_clients)
        finish = self._build_finish(rows)

        @fl.federated_computation(
            initialize.type_signature.result,
            fl.FederatedType(update_type, fl.CLIENTS),
            fl.FederatedType(weight_type, fl.CLIENTS),
        )
        def merge(state: Any, update: Any, weight: Any) -> Any:
            table = fl.federated_aggregate(
                fl.federated_zip((update, weight)),
                rows.zero(),
                rows.accumulate,
                rows.merge,
                rows.report,
            )
            ended = fl.federated_map(finish, table)
            return state, ended[0], ended[1]

        return Part(initialize, merge)

    def _build_finish(self, rows: "_Rows") -> Any:
        @rtf.computation(rows.table_type)
        def finish(table: Any) -> Any:
            held, count = table
            (count,) = require(
                count <= self.max_clients,
                f"Expected at most {self.max_clients} clients, `max_clients` of the"
                " aggregator, found more in a round: raise it",
                count,
            )
            cut = self._num_cut(count)
            middle = tf.nest.map_structure(lambda t: _middle(t, cut, count), held)
            return middle, OrderedDict(num_aggregated=count, num_trimmed=2 * cut)

        return finish

    def _num_cut(self, count: Any) -> Any:
        if self.trimmed_share is None:
            return tf.maximum(count - 1, 0) // 2
        exact = tf.cast(count, tf.float64) * self.trimmed_share
        # A share such as 0.1 of 10 clients is not to fall below 1 by its last bit.
        return tf.cast(tf.floor(exact + 1e-9), tf.int32)


@tracebacks.shorten
def median(*, max_clients: int) -> Aggregator:
    """Return the median of each coordinate, of an even number the middle two's mean.

    Each client whose weight is above 0 counts the same. Metrics: `num_aggregated`,
    clients, and `num_trimmed`, how many of these a coordinate leaves out.

    Args:
        max_clients: of a round, >= 1; more are an error. A partial takes this many
            times the bytes of an update.

    Raises:
        ConfigError: `max_clients` is below 1.
    """
    return Ranked(read_whole("max_clients", max_clients, 1), None)


@tracebacks.shorten
def trimmed_mean(trimmed_share: float, *, max_clients: int) -> Aggregator:
    """Return the mean of each coordinate without its smallest and largest values.

    Metrics and memory are those of `median`.

    Args:
        trimmed_share: beta of the paper, of the clients at either end, rounded down:
            0 to below 0.5.
        max_clients: of a round, >= 1; more are an error.

    Raises:
        ConfigError: an argument is out of its range.
    """
    below = 0.5  # nothing would be left
    check_number(
        "trimmed_share", trimmed_share, lambda s: 0 <= s < below, "from 0 to below 0.5"
    )
    return Ranked(read_whole("max_clients", max_clients, 1), trimmed_share)


class _Rows:
    """A table of updates as the partial of an aggregation: <rows, number of them>."""

    def __init__(self, update_type: Any, weight_type: Any, size: int) -> None:
        @rtf.computation(update_type)
        def widen(update: Any) -> Any:
            held = tf.nest.map_structure(
                lambda t: tf.zeros([size, *t.shape], t.dtype), update
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
            update, weight = value
            here = tf.logical_and(tf.range(size) == count, weight > 0)
            held = tf.nest.map_structure(
                lambda rows, t: tf.where(_as_column(here, t), t[None], rows),
                held,
                update,
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
    """Return a mask of rows in a shape that goes with a table of such rows."""
    return tf.reshape(mask, [-1] + [1] * len(row.shape))


def _middle(rows: Any, cut: Any, count: Any) -> Any:
    """Return the mean of the sorted rows from `cut` to `count - cut`; 0 of none."""
    index = tf.range(tf.shape(rows)[0])
    present = _as_column(index < count, rows[0])
    last = rows.dtype.max if rows.dtype.is_integer else np.inf
    # Along the last axis, which is the one that sorts fast.
    ordered = tf.sort(tf.where(present, rows, tf.constant(last, rows.dtype)), axis=0)
    kept = _as_column(tf.logical_and(index >= cut, index < count - cut), rows[0])
    values = widened(tf.where(kept, ordered, tf.zeros_like(ordered)))
    total = tf.reduce_sum(values, axis=0)
    middle = tf.math.divide_no_nan(total, tf.cast(count - 2 * cut, total.dtype))
    return tf.cast(middle, rows.dtype) if rows.dtype.is_floating else middle

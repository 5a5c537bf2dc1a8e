"""What 5,000 clients draw, and statistics of it whose distribution is known.

    python -m tests.contexts.draw_statistics           # the table, for all ways

Each client draws in two stages, by the same function and under the same accumulation,
so that nothing but keys tells those draws apart. The p-values are scipy's.
"""

import dataclasses
import functools
import importlib
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import ray_fed
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext

Numbers = NDArray[np.float64]

NUM_CLIENTS = 5000
WAYS: Mapping[str, Mapping[str, Any]] = {
    "kernels": {},
    "XLA": {"jit": "on"},
    "vectorized": {"vectorized_clients": 4},
    "interpreter": {"enabled": False},
}
"""Settings of `Config.kernels`."""

ITEMS = 9
"""Of what is shuffled: 362,880 orders."""
LONG = 64
"""Draws of one op for each client, to correlate clients with one another."""
KINDS = ("uniform", "again", "normal", "generator", "shuffle")
"""Ops that draw in `map` and in `accumulate`; "again" is a second uniform op."""
MAPPED = LONG + 3 + 2 * ITEMS
ADDED = 4 + ITEMS
ROW = fl.TensorType(np.float64, [MAPPED])
ROWS = fl.TensorType(np.float64, [None, MAPPED + ADDED])
ORDERED = fl.SequenceType(np.int32)


def draw(num_uniform: int) -> list[Any]:
    """Return draws of each kind as vectors."""
    generator = tf.random.Generator.from_non_deterministic_state()
    return [
        tf.random.uniform([num_uniform], dtype=tf.float64),
        tf.random.uniform([1], dtype=tf.float64),
        tf.random.normal([1], dtype=tf.float64),
        generator.uniform([1], dtype=tf.float64),
        tf.cast(tf.random.shuffle(tf.range(ITEMS)), tf.float64),
    ]


@rtf.computation(ORDERED, np.float64)
def work(ordered: Any, earlier: Any) -> Any:
    def append(taken: Any, item: Any) -> Any:
        return tf.concat([taken[1:], [tf.cast(item, tf.float64)]], 0)

    order = ordered.shuffle(ITEMS).reduce(tf.zeros([ITEMS], tf.float64), append)
    return tf.concat([*draw(LONG), order], 0) + 0.0 * earlier


@rtf.computation(ROWS, ROW)
def add_row(rows: Any, row: Any) -> Any:
    return tf.concat([rows, tf.concat([row, *draw(1)], 0)[tf.newaxis]], 0)


@rtf.computation(ROWS, ROWS)
def join(left: Any, right: Any) -> Any:
    return tf.concat([left, right], 0)


@rtf.computation(ROWS)
def first_of(rows: Any) -> Any:
    return rows[0, 0]


@rtf.computation
def no_rows() -> Any:
    return tf.zeros([0, MAPPED + ADDED], tf.float64)


@rtf.computation(ROWS)
def same(rows: Any) -> Any:
    return rows


@fl.federated_computation(fl.FederatedType(ORDERED, fl.CLIENTS))
def drawn_in_two_stages(clients: Any) -> Any:
    """Return what clients draw in each of two stages, by client."""
    zero = no_rows()
    stages: list[Any] = []
    earlier = fl.federated_value(np.float64(0), fl.SERVER)
    for _ in range(2):
        pairs = (clients, fl.federated_broadcast(earlier))
        rows = fl.federated_map(work, pairs)
        stages.append(fl.federated_aggregate(rows, zero, add_row, join, same))
        earlier = fl.federated_map(first_of, stages[-1])
    return stages


def sample(way: str, num_clients: int = NUM_CLIENTS) -> list[list[Numbers]]:
    """Return the draws of two calls: for each stage f64[clients, draws]."""
    config = ray_fed.Config(backend="local", workers=1, kernels=dict(WAYS[way]))
    clients = [list(range(ITEMS))] * num_clients
    with ray_fed.create_context(config) as context:
        return [invoke(context, clients) for _ in range(2)]


def invoke(context: ExecutionContext, clients: list[Any]) -> list[Numbers]:
    return [np.asarray(stage) for stage in context.invoke(drawn_in_two_stages, clients)]


def columns(rows: Numbers) -> dict[str, Numbers]:
    """Return one draw of each kind for each client, by slot and kind."""
    found: dict[str, Numbers] = {}
    starts = {"map": (0, LONG), "accumulate": (MAPPED, 1)}
    for slot, (start, num_uniform) in starts.items():
        after = start + num_uniform
        singles = [start, after, after + 1, after + 2]
        for kind, column in zip(KINDS, singles, strict=False):
            found[f"{slot} {kind}"] = rows[:, column]
        found[f"{slot} shuffle"] = _rank(rows[:, after + 3 : after + 3 + ITEMS])
    found["map tf.data shuffle"] = _rank(rows[:, MAPPED - ITEMS : MAPPED])
    return found


def _rank(orders: Numbers) -> Numbers:
    """Return where each row, an order, stands among all orders: uniform in [0, 1).

    By its Lehmer code; a draw inside of the order's share makes it continuous.
    """
    num_items = orders.shape[1]
    ranks = np.random.default_rng(0).uniform(size=len(orders))
    for place in reversed(range(num_items)):
        later = orders[:, place + 1 :] < orders[:, place : place + 1]
        ranks = (later.sum(1) + ranks) / (num_items - place)
    return ranks


@functools.cache
def _stats() -> Any:
    return importlib.import_module("scipy.stats")


def fit(name: str, values: Numbers) -> float:
    """Return the p-value of Kolmogorov and Smirnov for draws of a kind."""
    return float(_stats().kstest(values, "norm" if "normal" in name else "uniform")[1])


def independence(left: Numbers, right: Numbers) -> float:
    """Return the p-value of Pearson's correlation of pairs; 0 for constants."""
    if not np.ptp(left) or not np.ptp(right):
        return 0.0
    return float(_stats().pearsonr(left, right)[1])


def pairs_of_clients(draws: Numbers) -> tuple[float, float]:
    """Return p-values of all correlations of two clients' uniform draws.

    Args:
        draws: uniform in [0, 1), f64[clients, draws].

    Returns:
        For the mean of their squares, and for the largest of them.
    """
    centered = draws - 0.5
    num_clients, num_draws = draws.shape
    # Of one length: else all correlations of a client with large draws are large.
    rows = centered / np.linalg.norm(centered, axis=1, keepdims=True)
    scores = (rows @ rows.T)[np.triu_indices(num_clients, 1)] * math.sqrt(num_draws)
    # Squares have mean 1, and those of two pairs are uncorrelated.
    squares = scores**2
    spread = np.std(squares) / math.sqrt(len(squares))
    normal = _stats().norm
    mean = 2 * normal.sf(abs(np.mean(squares) - 1) / spread)
    largest = -math.expm1(
        len(scores) * math.log1p(-2 * normal.sf(np.abs(scores).max()))
    )
    return float(mean), float(largest)


@dataclasses.dataclass(frozen=True)
class Row:
    """P-values of one kind of statistic.

    Attributes:
        statistic: what was looked at.
        p_values: of each, by what it is of.
    """

    statistic: str
    p_values: Mapping[str, float]

    @property
    def least(self) -> float:
        """The chance that the smallest of so many is as small: Bonferroni's bound."""
        return min(1.0, min(self.p_values.values()) * len(self.p_values))


def statistics(calls: list[list[Numbers]]) -> list[Row]:
    """Return the table for what `sample` returned."""
    tables = [[columns(rows) for rows in stages] for stages in calls]
    everything = {
        f"call {c}, stage {s}, {name}": values
        for c, stages in enumerate(tables)
        for s, table in enumerate(stages)
        for name, values in table.items()
    }
    first, second = tables[0]
    later = tables[1][0]
    by_slot = {
        slot: [name for name in first if name.startswith(slot)]
        for slot in ("map", "accumulate")
    }
    pair = functools.partial(_pairs, first)
    return [
        Row("distribution (KS)", {n: fit(n, v) for n, v in everything.items()}),
        Row("lag 1", {n: independence(v[1:], v[:-1]) for n, v in everything.items()}),
        Row("between clients", _between_clients(calls)),
        Row(
            "between ops of a client",
            pair(
                couple
                for names in by_slot.values()
                for couple in itertools.combinations(names, 2)
            ),
        ),
        Row("map and accumulate", pair(itertools.product(*by_slot.values()))),
        Row("between stages", _same_columns(first, second)),
        Row("between calls", _same_columns(first, later)),
    ]


def _between_clients(calls: list[list[Numbers]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for stage, rows in enumerate(calls[0]):
        mean, largest = pairs_of_clients(rows[:, :LONG])
        found |= {f"stage {stage}, squares": mean, f"stage {stage}, largest": largest}
    return found


def _pairs(table: Mapping[str, Numbers], names: Any) -> dict[str, float]:
    return {f"{a} | {b}": independence(table[a], table[b]) for a, b in names}


def _same_columns(
    left: Mapping[str, Numbers], right: Mapping[str, Numbers]
) -> dict[str, float]:
    return {name: independence(left[name], right[name]) for name in left}


def show(say: Callable[[str], None] = print) -> None:
    """Print for each way and statistic: how many tests, and the least p-value."""
    say("| way | statistic | tests | least p | times their number |")
    say("| --- | --- | --- | --- | --- |")
    for way in WAYS:
        for row in statistics(sample(way)):
            least = min(row.p_values.values())
            cells = way, row.statistic, len(row.p_values), f"{least:.2g}"
            say(f"| {' | '.join(map(str, cells))} | {row.least:.2g} |")


if __name__ == "__main__":
    show()

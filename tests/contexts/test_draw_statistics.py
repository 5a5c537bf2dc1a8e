"""Draws are independent, and of their distributions: shown by numbers."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.contexts import draw_statistics
from tests.contexts.draw_statistics import ADDED, ITEMS, LONG, MAPPED, Numbers, Row

Calls = list[list[Numbers]]

LEAST = 1e-3
"""Below what p-value, times the number of tests of its kind, no draws are taken for
independent. The seed is fixed: what passes once, always passes."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_draws_of_many_clients_are_independent() -> None:
    sampled = draw_statistics.sample("kernels", draw_statistics.NUM_CLIENTS)
    table = draw_statistics.statistics(sampled)

    assert {row.statistic: row.least for row in table if row.least < LEAST} == {}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["XLA", "vectorized", "interpreter"])
def test_draws_of_every_way_are_the_same(way: str) -> None:
    expected = draw_statistics.sample("kernels", 50)

    np.testing.assert_array_equal(draw_statistics.sample(way, 50), expected)


def drawn_by_numpy(num_clients: int = 400) -> Calls:
    """Return what `draw_statistics.sample` would, drawn by numpy."""
    rng = np.random.default_rng(3)

    def orders() -> Numbers:
        ordered = np.tile(np.arange(float(ITEMS)), (num_clients, 1))
        return rng.permuted(ordered, axis=1)

    def stage() -> Numbers:
        rows = rng.uniform(size=(num_clients, MAPPED + ADDED))
        rows[:, LONG + 1] = rng.normal(size=num_clients)
        rows[:, MAPPED + 2] = rng.normal(size=num_clients)
        for start in (LONG + 3, MAPPED - ITEMS, MAPPED + 4):
            rows[:, start : start + ITEMS] = orders()
        return rows

    return [[stage(), stage()] for _ in range(2)]


def same_for_all_clients(calls: Calls) -> None:
    calls[0][0][:, MAPPED:] = calls[0][0][0, MAPPED:]


def same_for_neighbors(calls: Calls) -> None:
    calls[0][0][1::2] = calls[0][0][::2]


def same_for_two_clients(calls: Calls) -> None:
    calls[0][0][300] = calls[0][0][7]


def same_in_two_ops(calls: Calls) -> None:
    calls[0][0][:, LONG] = calls[0][0][:, 0]


def same_in_map_and_accumulate(calls: Calls) -> None:
    calls[0][0][:, MAPPED] = calls[0][0][:, 0]


def same_in_both_stages(calls: Calls) -> None:
    calls[0][1][:, LONG + 1] = calls[0][0][:, LONG + 1]


def same_in_both_calls(calls: Calls) -> None:
    calls[1][0][:, MAPPED + 4 :] = calls[0][0][:, MAPPED + 4 :]


def never_moves_the_first_item(calls: Calls) -> None:
    rows = calls[0][0][:, MAPPED - ITEMS : MAPPED]
    rows[:, 1:][rows[:, 1:] == 0] = rows[rows[:, 0] != 0, 0]
    rows[:, 0] = 0


FAULTS: dict[Callable[[Calls], None], str] = {
    same_for_all_clients: "distribution (KS)",
    never_moves_the_first_item: "distribution (KS)",
    same_for_neighbors: "lag 1",
    same_for_two_clients: "between clients",
    same_in_two_ops: "between ops of a client",
    same_in_map_and_accumulate: "map and accumulate",
    same_in_both_stages: "between stages",
    same_in_both_calls: "between calls",
}


def by_statistic(calls: Calls) -> dict[str, Row]:
    return {row.statistic: row for row in draw_statistics.statistics(calls)}


def test_statistics_accept_what_numpy_draws() -> None:
    found = by_statistic(drawn_by_numpy())

    assert all(row.least > LEAST for row in found.values())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_statistics_refuse_draws_that_are_not_independent(
    fault: Callable[[Calls], None],
) -> None:
    calls = drawn_by_numpy()
    fault(calls)

    assert by_statistic(calls)[FAULTS[fault]].least < LEAST

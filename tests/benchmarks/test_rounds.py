"""The benchmark of rounds, in a short form: all of its parts, and what fails it."""

import json
from typing import Any

import numpy as np
import pytest

from benchmarks import rounds, workloads
from ray_fed.program import ClientData
from tests.fixtures import run_python


@pytest.mark.slow
@pytest.mark.timeout(570)
def test_benchmark_prints_one_line_of_figures_that_agree() -> None:
    command = "-m benchmarks.rounds --workload tiny --clients 20 --workers 1 --rounds 1"

    printed = run_python(*command.split(), timeout_s=560, RAY_USAGE_STATS_ENABLED="0")

    line, *others = printed.splitlines()
    assert others == []
    figures = json.loads(line)
    assert figures["clients"] == 20
    ours = {"local", "ray", "local_by_hand", "ray_by_hand"}
    assert figures["clients_per_s"].keys() >= {"plain", "keras", *ours}
    assert figures["ratio_to_plain"].keys() == {"keras", *ours}
    assert figures["ratio_to_by_hand"].keys() == {"local", "ray"}
    assert figures["fixed_ms"].keys() == ours
    assert figures["first_result_s"].keys() == ours
    assert len(figures["memory"]["ray"]["worker_peak_mb"]) == 1
    told = figures["kernels"]["ray"]
    assert (told["interpreted_leaves"], told["reasons"]) == (0, [])
    assert told["xla"].keys() == {
        f"{label}{form}" for label in ("cohort", "fixed") for form in ("", "_by_hand")
    }


ONES, TWOS = [np.ones(3, np.float32)], [np.full(3, 2, np.float32)]


@pytest.mark.parametrize(
    ("results", "named"),
    [
        ({"plain": ONES, "local": ONES, "ray": ONES}, []),
        ({"plain": ONES, "local": ONES, "ray": TWOS}, ["`ray` differs", "same bits"]),
        (
            {"plain": ONES, "local": ONES, "ray": [ONES[0] + np.float32(1e-6)]},
            ["same bits"],
        ),
        ({"plain": ONES, "plain_xla": TWOS}, ["`plain_xla` differs"]),
    ],
    ids=["agree", "other weights", "other bits", "XLA differs"],
)
def test_results_that_differ_are_named(results: Any, named: list[str]) -> None:
    found = rounds.check_results(results)

    assert len(found) == len(named)
    for message, name in zip(found, named, strict=True):
        assert name in message


class Rounds:
    """Takes the seconds that are said, and remembers when."""

    def __init__(self, name: str, seconds: list[float], log: list[str]) -> None:
        self._name, self._seconds, self._log = name, iter(seconds), log

    def __call__(self) -> tuple[float, list[int]]:
        self._log.append(self._name)
        return next(self._seconds), [len(self._log)]


def test_turns_follow_one_another_and_begin_with_two_that_do_not_count() -> None:
    log: list[str] = []
    a = Rounds("a", [9.0, 8.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 7.0, 6.0], log)
    b = Rounds("b", [7.0] * 10, log)

    timed = rounds.take_turns({"a": rounds.one_by_one(a), "b": rounds.one_by_one(b)}, 6)

    assert "".join(log) == "aaaaaaabbbbbbbaaabbb"
    assert timed["a"] == rounds.Timed([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [17])


def test_figures_are_of_medians() -> None:
    timed = {
        "plain": rounds.Timed([1.0, 2.0, 9.0], []),
        "plain_xla": rounds.Timed([1.0], []),
        "ray": rounds.Timed([4.0], []),
    }

    figures = rounds.summarize(8, timed, {"ray": rounds.Timed([0.005], [])})

    assert figures["clients_per_s"] == {"plain": 4.0, "plain_xla": 8.0, "ray": 2.0}
    assert figures["ratio_to_plain"] == {"ray": 0.25}
    assert figures["fixed_ms"] == {"ray": 5.0}


def test_leaves_that_no_kernel_ran_are_told() -> None:
    facts = {
        "local": {"interpreted_leaves": 0, "reasons": []},
        "ray": {"interpreted_leaves": 3, "reasons": ["`x` at clients"]},
    }

    (message,) = rounds.check_kernels(facts)

    assert "`ray`, found 3 interpreted: `x` at clients" in message


def test_both_forms_of_data_give_a_client_the_data_of_its_index_mod_distinct() -> None:
    tiny = workloads.WORKLOADS["tiny"]

    placed = workloads.make_datasets(tiny, 5, 2, "placed")
    lists = workloads.make_datasets(tiny, 5, 2, "lists")

    assert isinstance(placed, ClientData)
    assert len(placed) == len(lists) == 5
    for index in range(5):
        x, y = tiny.client(index % 2)
        (batch,) = lists[index]
        np.testing.assert_array_equal(batch["x"], x[0])
        np.testing.assert_array_equal(batch["y"], y[0])
        rows = placed[index].read()
        held_x, held_y = (column.rows for column in rows.columns)
        np.testing.assert_array_equal(held_x, x[0])
        np.testing.assert_array_equal(held_y, y[0])

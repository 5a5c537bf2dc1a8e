"""Which subrounds are called stragglers, on a clock that the test turns."""

import pytest

from ray_fed.cluster.pool.stragglers import Stragglers


def _run(stragglers: Stragglers, subround: str, seconds: float) -> None:
    """Let a sibling begin at 0 s and end."""
    stragglers.begin(subround, "round 1", 0.0)
    stragglers.done(subround, seconds)


def test_limit_is_so_many_times_the_median_of_those_that_are_done() -> None:
    stragglers = Stragglers(3.0, 1.0)
    for index, seconds in enumerate([2.0, 4.0, 100.0]):
        _run(stragglers, f"done {index}", seconds)

    stragglers.begin("slow", "round 1", 10.0)

    assert stragglers.due_s("slow") == 10.0 + 3 * 4.0


def test_limit_is_no_less_than_the_least_seconds() -> None:
    stragglers = Stragglers(3.0, 60.0)
    _run(stragglers, "done", 2.0)

    stragglers.begin("slow", "round 1", 0.0)

    assert stragglers.due_s("slow") == 60.0


@pytest.mark.parametrize(
    ("num_done", "num_running", "expected"),
    [
        pytest.param(0, 1, None, id="nothing to compare with"),
        pytest.param(1, 2, None, id="most still run"),
        pytest.param(2, 2, 30.0, id="half are done"),
    ],
)
def test_nothing_is_said_before_half_of_them_are_done(
    num_done: int, num_running: int, expected: float | None
) -> None:
    stragglers = Stragglers(3.0, 1.0)
    for index in range(num_done):
        _run(stragglers, f"done {index}", 10.0)

    for index in range(num_running):
        stragglers.begin(f"running {index}", "round 1", 0.0)

    assert stragglers.due_s("running 0") == expected


def test_other_rounds_are_not_compared_with() -> None:
    stragglers = Stragglers(3.0, 1.0)
    _run(stragglers, "done", 2.0)

    stragglers.begin("slow", "round 2", 0.0)

    assert stragglers.due_s("slow") is None


def test_time_counts_from_the_last_worker_that_was_given() -> None:
    stragglers = Stragglers(3.0, 1.0)
    _run(stragglers, "done", 2.0)
    stragglers.begin("slow", "round 1", 0.0)

    stragglers.begin("slow", "round 1", 50.0)

    assert stragglers.due_s("slow") == 56.0


def test_subround_that_is_done_is_no_straggler() -> None:
    stragglers = Stragglers(3.0, 1.0)
    _run(stragglers, "done", 2.0)
    _run(stragglers, "slow", 50.0)

    assert stragglers.due_s("slow") is None
    assert stragglers.due_s("never seen") is None


def test_what_is_known_of_a_round_goes_with_its_last_subround() -> None:
    stragglers = Stragglers(3.0, 1.0)
    _run(stragglers, "a", 2.0)
    stragglers.begin("b", "round 1", 0.0)

    stragglers.forget("a")
    assert stragglers.due_s("b") == 6.0
    stragglers.forget("b")

    stragglers.begin("c", "round 1", 0.0)
    assert stragglers.due_s("c") is None

"""Notes: what work tells, collected by whoever evaluates it."""

import asyncio

import pytest

from ray_fed.plan import diagnostics

UNKEYED = diagnostics.Unkeyed("the computation `f`", "ab", ("draw (RandomCrop)",))
UNLOWERED = diagnostics.Unlowered("the computation `f`", "ab", "FlatMapDataset")


def test_notes_are_collected_once_each() -> None:
    with diagnostics.noting() as noted:
        diagnostics.note([UNKEYED, UNLOWERED])
        diagnostics.note([UNLOWERED])

    assert noted == {UNKEYED, UNLOWERED}


def test_what_nobody_asked_for_is_dropped() -> None:
    diagnostics.note([UNKEYED])

    with diagnostics.noting() as noted:
        pass

    assert noted == set()


def test_the_innermost_collects() -> None:
    with diagnostics.noting() as outer, diagnostics.noting() as inner:
        diagnostics.note([UNKEYED])

    assert (outer, inner) == (set(), {UNKEYED})


def test_tasks_tell_whoever_started_them() -> None:
    async def work() -> None:
        diagnostics.note([UNKEYED])

    async def evaluate() -> set[diagnostics.Note]:
        with diagnostics.noting() as noted:
            await asyncio.gather(
                work(), asyncio.to_thread(diagnostics.note, [UNLOWERED])
            )
        return noted

    assert asyncio.run(evaluate()) == {UNKEYED, UNLOWERED}


def test_order_depends_on_the_notes_alone() -> None:
    other = diagnostics.Unlowered("the computation `g`", "cd", "WindowDataset")

    orders = [
        diagnostics.in_order(told)
        for told in ([UNLOWERED, other, UNKEYED], [UNKEYED, other, UNLOWERED])
    ]

    assert orders[0] == orders[1]
    assert set(orders[0]) == {UNKEYED, UNLOWERED, other}


def test_work_that_was_interpreted_is_noted_with_the_first_line_of_its_error() -> None:
    note = diagnostics.Interpreted.of("a merge", ValueError("refused\nat a line"))

    assert note == diagnostics.Interpreted("a merge", "ValueError: refused")


def test_defect_of_ray_fed_is_raised_instead_of_noted() -> None:
    try:
        exec("None.missing", {"__name__": "ray_fed.somewhere"})
    except AttributeError as error:
        with pytest.raises(AttributeError, match="missing"):
            diagnostics.Interpreted.of("a merge", error)
    else:
        pytest.fail("no error to note")

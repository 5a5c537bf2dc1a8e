"""Notes: what work tells, collected by whoever evaluates it."""

import asyncio

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

"""Notes: what work tells, collected by whoever evaluates it."""

import asyncio

import ray_fed.notes as notes

UNKEYED = notes.Unkeyed("the computation `f`", "ab", ("draw (RandomCrop)",))
UNLOWERED = notes.Unlowered("the computation `f`", "ab", "FlatMapDataset")


def test_notes_are_collected_once_each() -> None:
    with notes.noting() as noted:
        notes.note([UNKEYED, UNLOWERED])
        notes.note([UNLOWERED])

    assert noted == {UNKEYED, UNLOWERED}


def test_what_nobody_asked_for_is_dropped() -> None:
    notes.note([UNKEYED])

    with notes.noting() as noted:
        pass

    assert noted == set()


def test_the_innermost_collects() -> None:
    with notes.noting() as outer, notes.noting() as inner:
        notes.note([UNKEYED])

    assert (outer, inner) == (set(), {UNKEYED})


def test_tasks_tell_whoever_started_them() -> None:
    async def work() -> None:
        notes.note([UNKEYED])

    async def evaluate() -> set[notes.Note]:
        with notes.noting() as noted:
            await asyncio.gather(work(), asyncio.to_thread(notes.note, [UNLOWERED]))
        return noted

    assert asyncio.run(evaluate()) == {UNKEYED, UNLOWERED}


def test_order_depends_on_the_notes_alone() -> None:
    other = notes.Unlowered("the computation `g`", "cd", "WindowDataset")

    orders = [
        notes.in_order(told)
        for told in ([UNLOWERED, other, UNKEYED], [UNKEYED, other, UNLOWERED])
    ]

    assert orders[0] == orders[1]
    assert set(orders[0]) == {UNKEYED, UNLOWERED, other}

"""What a coroutine leaves on a loop of its own ends with it."""

import asyncio
from collections.abc import Iterator

import pytest

from ray_fed.executors import loops


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


async def _wait_for_ever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("waiting")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_tasks_that_are_left_are_cancelled(
    loop: asyncio.AbstractEventLoop, error: type[BaseException]
) -> None:
    ended: list[str] = []
    begun: list[asyncio.Task[None]] = []

    async def leave() -> None:
        begun.append(asyncio.ensure_future(_wait_for_ever(ended)))
        await asyncio.sleep(0)
        raise error

    with pytest.raises(error):
        loops.run_alone(loop, leave())

    assert ended == ["waiting"]
    assert begun[0].cancelled()
    assert not asyncio.all_tasks(loop)


def test_interrupt_of_the_loop_cancels_the_coroutine(
    loop: asyncio.AbstractEventLoop,
) -> None:
    ended: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    loop.call_soon(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loops.run_alone(loop, _wait_for_ever(ended))

    assert not asyncio.all_tasks(loop)


def test_interrupt_while_tasks_end_leaves_the_next_coroutine_alone(
    loop: asyncio.AbstractEventLoop,
) -> None:
    begun: list[asyncio.Task[None]] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def leave() -> None:
        begun.append(asyncio.ensure_future(_wait_for_ever([])))
        loop.call_soon(loop.call_soon, interrupt)  # once this has ended

    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    with pytest.raises(KeyboardInterrupt):
        loops.run_alone(loop, leave())
    assert not begun[0].done()

    assert loops.run_alone(loop, answer()) == 42
    assert begun[0].cancelled()
    assert not asyncio.all_tasks(loop)

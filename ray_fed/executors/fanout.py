"""Run many coroutines; results by index, and nothing left behind."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")


async def gather_by_index(
    coroutines: Iterable[Coroutine[Any, Any, _T]], first: Sequence[int] = ()
) -> list[_T]:
    """Return the results in the order given; the first failure cancels the rest.

    Args:
        coroutines: what to run.
        first: indices of the coroutines to begin before the others, in this order.

    Raises:
        Exception: what the first coroutine to fail raised, after all others ended.
    """
    work = list(coroutines)
    order = dict.fromkeys([*first, *range(len(work))])
    begun = {index: asyncio.ensure_future(work[index]) for index in order}
    tasks = [begun[index] for index in range(len(work))]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await _end(tasks)
        raise
    finally:
        # What is raised refers to this frame, which is to hold nobody's result.
        begun.clear()
        tasks.clear()


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_in_order(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return the results in the order given, where each begins as its former ended."""
    return [await coroutine for coroutine in coroutines]

"""Run coroutines at the same time; results by index, and nothing left behind."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def gather_by_index(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return the results in the order given; the first failure cancels the rest.

    Raises:
        Exception: what the first coroutine to fail raised, after all others ended.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise

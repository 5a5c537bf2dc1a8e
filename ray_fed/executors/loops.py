"""Event loops: leaving no task behind on one that goes on."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run_alone(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _T]
) -> _T:
    """Return the result of a coroutine, on a loop that runs only for it.

    Tasks that it leaves are cancelled, as is the coroutine by an interrupt: what they
    wait for may come while nobody looks after the loop, which would hold it.
    """
    try:
        return loop.run_until_complete(coroutine)
    finally:
        # Named here, not in a task: an interrupt may leave that to the next coroutine.
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))

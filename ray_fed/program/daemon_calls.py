"""Calls that block, each on a thread that ends with the process.

The threads of `asyncio.to_thread` are waited for as the interpreter ends: a program
whose storage hangs would never end.
"""

import asyncio
import concurrent.futures
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_T = TypeVar("_T")
_P = ParamSpec("_P")


async def call_on_daemon(
    function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """Return what a function returns that blocks; the event loop goes on meanwhile.

    The call has a thread of its own, which ends with it. Where the caller is cancelled,
    or the process ends, nobody waits for the call.

    Raises:
        Exception: what the function raised.
    """
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()
    call = functools.partial(context.run, function, *args, **kwargs)

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 (told by the future)
            future.set_exception(error)

    threading.Thread(target=work, name="ray_fed storage", daemon=True).start()
    return await asyncio.wrap_future(future)

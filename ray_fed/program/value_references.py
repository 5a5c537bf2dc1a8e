"""References to values that may not be there yet, and stay where they were made."""

import asyncio
import concurrent.futures
import contextlib
from typing import Any, TypeVar

import federated_language as fl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.tracebacks as tracebacks
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.values import plain_values

_T = TypeVar("_T")


class RayValueReference(fl.program.MaterializableValueReference):
    """A tensor or sequence of a result, kept in the object store.

    The value is freed when nothing holds its reference any more, nor a call that takes
    it as an argument. On the local backend it is kept in this process.

    Args:
        type_signature: of the value.
        context: whose call makes it; reads it.
    """

    def __init__(
        self,
        type_signature: fl.program.MaterializableTypeSignature,
        context: ExecutionContext,
    ) -> None:
        self._type_signature = type_signature
        self._context = context
        self._component: concurrent.futures.Future[Any] = concurrent.futures.Future()

    @property
    @override
    def type_signature(self) -> fl.program.MaterializableTypeSignature:
        return self._type_signature

    @override
    @tracebacks.shorten
    async def get_value(self) -> Any:
        """Wait for the value and read it into this process.

        Returns:
            A numpy scalar or array, not to be written to; bytes for strings; a list of
            a sequence's elements.

        Raises:
            ComputationError: the computation raised, or one whose result it took.
            RetryBudgetError: workers died more often than may be.
            ContextStateError: the context was closed.
        """
        component = await self.held()
        value = await wait_in_loop(self._context.fetch(component))
        return _lock(plain_values.from_plain(value, self._type_signature))

    def __array__(
        self,
        dtype: np.dtype[Any] | None = None,
        copy: bool | None = None,  # noqa: FBT001 (numpy's protocol)
    ) -> NDArray[Any]:
        """Read the value for numpy, as `get_value` does, and wait for it."""
        held = self._component.result()
        value = self._context.fetch(held).result()
        plain = plain_values.from_plain(value, self._type_signature)
        return np.array(plain, dtype, copy=copy)

    async def held(self) -> Any:
        """Wait for the value and return it as it is kept: plain or stored."""
        return await wait_in_loop(self._component)

    def deliver(self, component: Any) -> None:
        """Take the value, as it is kept, from the call that made it."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._component.set_result(component)

    def fail(self, error: BaseException) -> None:
        """Take the failure of the call, unless there is a value."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._component.set_exception(error)

    def free(self, error: BaseException) -> None:
        """Let go of the value; whoever asks for it, or waits for it, gets an error."""
        self.fail(error)
        if self._component.exception() is None:
            self._component = concurrent.futures.Future()
            self._component.set_exception(error)

    @override
    def __repr__(self) -> str:
        state = "pending"
        if self._component.done():
            state = "kept" if self._component.exception() is None else "failed"
        return f"<reference to {self._type_signature}, {state}>"


def _lock(value: Any) -> Any:
    """Return an array as one that cannot be written to: others hold it too."""
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
    return value


async def wait_in_loop(future: concurrent.futures.Future[_T]) -> _T:
    """Wait in any loop for what many may wait for.

    An interrupt ends this wait, not what the future stands for.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(wake)
    await ended.wait()
    return future.result()

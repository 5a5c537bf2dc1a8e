"""An executor on a thread of its own: it ends when closed; no caller waits for ever."""

import asyncio
import contextlib
import gc
import threading
import time
from typing import Any

import federated_language as fl
import pytest
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.executors.threads import ThreadDelegatingExecutor

NAME = "a loop of this test"


def threads_of_this_test() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith(NAME)]


class RecordingExecutor(fl.framework.Executor):
    """Notes on which thread each verb runs; calls may wait for one another."""

    def __init__(self, barrier: threading.Barrier | None = None) -> None:
        self.verbs: list[tuple[str, str]] = []
        self.is_closed = False
        self._barrier = barrier

    def _note(self, verb: str) -> Any:
        self.verbs.append((verb, threading.current_thread().name))
        return verb

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> Any:
        if isinstance(value, Exception):
            raise value
        return self._note("value")

    @override
    async def create_call(self, comp: Any, arg: Any = None) -> Any:
        if self._barrier is not None:
            self._barrier.wait(10)
        return self._note("call")

    @override
    async def create_struct(self, elements: Any) -> Any:
        return self._note("struct")

    @override
    async def create_selection(self, source: Any, index: int) -> Any:
        return self._note("selection")

    @override
    def close(self) -> None:
        self.is_closed = True


class TestThreadDelegatingExecutor:
    def test_runs_every_verb_on_its_thread(self) -> None:
        target = RecordingExecutor()
        executor: Any = ThreadDelegatingExecutor(target, NAME)

        async def act() -> list[Any]:
            return [
                await executor.create_value(1),
                await executor.create_call(1, 2),
                await executor.create_struct([1]),
                await executor.create_selection(1, 0),
            ]

        results = asyncio.run(act())
        executor.close()

        assert results == ["value", "call", "struct", "selection"]
        assert target.verbs == [(verb, NAME) for verb in results]

    def test_lets_several_run_at_the_same_time(self) -> None:
        barrier = threading.Barrier(3)
        executors: list[Any] = [
            ThreadDelegatingExecutor(RecordingExecutor(barrier), f"{NAME} {index}")
            for index in range(3)
        ]

        async def act() -> list[Any]:
            return await asyncio.gather(*(e.create_call(1) for e in executors))

        results = asyncio.run(act())
        for executor in executors:
            executor.close()

        assert results == ["call"] * 3
        assert threads_of_this_test() == []

    @pytest.mark.claim("eager_tf.25")
    def test_does_not_block_the_loop_of_the_caller(self) -> None:
        barrier = threading.Barrier(2)
        executor: Any = ThreadDelegatingExecutor(RecordingExecutor(barrier), NAME)

        async def act() -> str:
            call = asyncio.ensure_future(executor.create_call(1))
            await asyncio.get_running_loop().run_in_executor(None, barrier.wait, 10)
            return await call

        result = asyncio.run(act())
        executor.close()

        assert result == "call"

    def test_hands_on_what_the_target_raises(self) -> None:
        executor = ThreadDelegatingExecutor(RecordingExecutor(), NAME)

        with pytest.raises(KeyError, match="mine"):
            asyncio.run(executor.create_value(KeyError("mine")))
        executor.close()

    @pytest.mark.claim("eager_tf.33")
    def test_close_closes_the_target_and_ends_the_thread(self) -> None:
        target = RecordingExecutor()
        executor = ThreadDelegatingExecutor(target, NAME)

        executor.close()
        executor.close()

        assert target.is_closed
        assert threads_of_this_test() == []

    def test_close_tells_who_waits(self) -> None:
        executor: Any = ThreadDelegatingExecutor(SleepingExecutor(), NAME)

        async def act() -> None:
            waiting = asyncio.ensure_future(executor.create_value(1))
            await asyncio.sleep(0.05)
            executor.close()
            await waiting

        with pytest.raises(errors.ContextStateError, match="found one that still ran"):
            asyncio.run(act())

    def test_cancelling_a_caller_at_once_leaves_nothing_to_await(
        self, recwarn: pytest.WarningsRecorder
    ) -> None:
        executor: Any = ThreadDelegatingExecutor(RecordingExecutor(), NAME)

        async def act() -> None:
            for _ in range(50):
                call = asyncio.ensure_future(executor.create_value(1))
                await asyncio.sleep(0)
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await call

        asyncio.run(act())
        executor.close()
        gc.collect()

        assert [str(warning.message) for warning in recwarn] == []

    def test_cancelling_a_caller_cancels_on_the_thread(self) -> None:
        executor: Any = ThreadDelegatingExecutor(SleepingExecutor(), NAME)

        async def act() -> None:
            await asyncio.wait_for(executor.create_value(1), 0.05)

        started = time.monotonic()
        with pytest.raises(TimeoutError):
            asyncio.run(act())
        executor.close()

        assert time.monotonic() - started < 10
        assert threads_of_this_test() == []


class SleepingExecutor(RecordingExecutor):
    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> Any:
        await asyncio.sleep(60)

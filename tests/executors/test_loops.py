"""Loops on threads: they end when they are closed, and nobody waits for ever."""

import asyncio
import concurrent.futures
import contextlib
import gc
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import ray_fed.errors as errors
from ray_fed.executors.calling_thread import run_alone
from ray_fed.executors.loops import LoopThread
from ray_fed.values import read_limits

NAME = "a loop of this test"


def threads_of_this_test() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith(NAME)]


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread(NAME)
    yield loop
    loop.close()


async def name_of_thread() -> str:
    return threading.current_thread().name


class TestLoopThread:
    def test_runs_coroutines_on_its_thread(self, loop: LoopThread) -> None:
        names = [loop.submit(name_of_thread()).result(10) for _ in range(3)]

        assert names == [NAME] * 3

    def test_close_ends_the_thread(self, loop: LoopThread) -> None:
        loop.submit(name_of_thread()).result(10)
        before = threads_of_this_test()

        loop.close()

        assert (before, threads_of_this_test()) == ([NAME], [])

    def test_close_cancels_what_still_runs(self, loop: LoopThread) -> None:
        started = threading.Event()
        ended: list[str] = []

        async def sleep() -> None:
            started.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("cleaned up")

        future = loop.submit(sleep())
        assert started.wait(10)
        loop.close()

        assert ended == ["cleaned up"]
        with pytest.raises(errors.ContextStateError, match="found one that still ran"):
            future.result(10)

    def test_stop_cleans_up_on_the_thread_and_tells_nobody(
        self, loop: LoopThread
    ) -> None:
        started = threading.Event()
        cleaned_up_on: list[str] = []

        async def sleep() -> None:
            started.set()
            try:
                await asyncio.sleep(60)
            finally:
                cleaned_up_on.append(await name_of_thread())

        future = loop.submit(sleep())
        assert started.wait(10)
        loop.stop()
        loop.join(10)

        assert (cleaned_up_on, future.done()) == ([NAME], False)

    def test_close_tells_what_was_about_to_begin(
        self, loop: LoopThread, recwarn: pytest.WarningsRecorder
    ) -> None:
        async def occupy() -> None:
            time.sleep(0.2)  # noqa: ASYNC251 (nothing else begins meanwhile)

        async def begin() -> None:
            await asyncio.sleep(60)

        futures = [loop.submit(occupy()), *(loop.submit(begin()) for _ in range(50))]
        loop.close()

        for future in futures[1:]:
            with pytest.raises(errors.ContextStateError):
                future.result(10)
        gc.collect()
        assert [str(warning.message) for warning in recwarn] == []

    def test_close_from_the_thread_itself_does_not_wait(self, loop: LoopThread) -> None:
        async def close() -> str:
            loop.close()
            return "closed"

        assert loop.submit(close()).result(10) == "closed"
        loop.close()

        assert threads_of_this_test() == []

    def test_refuses_work_after_close(self, loop: LoopThread) -> None:
        loop.close()

        with pytest.raises(errors.ContextStateError, match=f"`{NAME}` to run"):
            loop.submit(name_of_thread())

    def test_what_ends_as_the_thread_does_tells_who_waits(
        self, loop: LoopThread
    ) -> None:
        handed: list[concurrent.futures.Future[str]] = []

        async def hand_over_and_close() -> None:
            handed.append(loop.submit(name_of_thread()))
            with contextlib.suppress(RuntimeError):  # a thread cannot join itself
                loop.close()

        loop.submit(hand_over_and_close()).result(10)
        loop.close()

        assert handed[0].result(10) == NAME

    def test_work_that_exits_ends_alone(self, loop: LoopThread) -> None:
        async def leave() -> None:
            sys.exit(3)

        with pytest.raises(SystemExit):
            loop.submit(leave()).result(10)

        assert loop.submit(name_of_thread()).result(10) == NAME

    @pytest.mark.parametrize("how", ["cancel", "close", "stop"])
    def test_ends_a_call_that_holds_the_thread(
        self, loop: LoopThread, how: str
    ) -> None:
        began, ended = threading.Event(), threading.Event()
        seen: list[str] = []

        async def hold() -> None:
            try:
                with read_limits.interruptible(ended.set):
                    began.set()
                    assert ended.wait(10)
                    raise OSError("the call was ended")
            except asyncio.CancelledError as error:
                seen.append(str(error.__cause__))
                raise

        future = loop.submit(hold())
        assert began.wait(10)
        if how == "cancel":
            future.cancel()
            assert loop.submit(name_of_thread()).result(10) == NAME
        elif how == "close":
            loop.close()
        else:
            loop.stop()
            loop.join(10)

        assert seen == ["the call was ended"]
        assert threads_of_this_test() == ([NAME] if how == "cancel" else [])

    def test_a_call_of_other_work_goes_on(self, loop: LoopThread) -> None:
        began, goes_on = threading.Event(), threading.Event()
        ended: list[str] = []

        async def hold() -> str:
            with read_limits.interruptible(lambda: ended.append("ended")):
                began.set()
                assert goes_on.wait(10)
            return "went on"

        future = loop.submit(hold())
        assert began.wait(10)
        loop.submit(name_of_thread()).cancel()
        goes_on.set()

        assert (future.result(10), ended) == ("went on", [])

    @pytest.mark.parametrize("verb", ["submit", "run"])
    def test_refuses_work_while_others_still_clean_up(
        self, loop: LoopThread, verb: str
    ) -> None:
        cleaning, done = threading.Event(), threading.Event()

        async def clean_up_slowly() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                cleaning.set()
                await asyncio.to_thread(done.wait, 10)

        async def hand_over() -> None:
            if verb == "run":
                await loop.run(name_of_thread())
            else:
                await asyncio.wrap_future(loop.submit(name_of_thread()))

        first = loop.submit(clean_up_slowly())
        closing = threading.Thread(target=loop.close)
        loop.submit(name_of_thread()).result(10)  # the first one has begun
        closing.start()
        assert cleaning.wait(10)

        with pytest.raises(errors.ContextStateError, match="found it closed"):
            asyncio.run(asyncio.wait_for(hand_over(), 10))

        done.set()
        closing.join(10)
        assert isinstance(first.exception(), errors.ContextStateError)
        assert threads_of_this_test() == []


class TestWaitFor:
    def test_an_interrupt_cancels_the_coroutine_and_waits_for_its_end(
        self, loop: LoopThread
    ) -> None:
        ended: list[str] = []
        main_thread = threading.get_ident()

        async def interrupted() -> None:
            signal.pthread_kill(main_thread, signal.SIGINT)
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.02)
                ended.append("cleaned up")

        with pytest.raises(KeyboardInterrupt):
            loop.wait_for(interrupted())

        assert ended == ["cleaned up"]
        assert loop.wait_for(name_of_thread()) == NAME


async def _wait_for_ever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("waiting")


@pytest.fixture(name="plain_loop")
def plain_loop_fixture() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_tasks_that_are_left_are_cancelled(
    plain_loop: asyncio.AbstractEventLoop, error: type[BaseException]
) -> None:
    ended: list[str] = []
    begun: list[asyncio.Task[None]] = []

    async def leave() -> None:
        begun.append(asyncio.ensure_future(_wait_for_ever(ended)))
        await asyncio.sleep(0)
        raise error

    with pytest.raises(error):
        run_alone(plain_loop, leave())

    assert ended == ["waiting"]
    assert begun[0].cancelled()
    assert not asyncio.all_tasks(plain_loop)


def test_interrupt_of_the_loop_cancels_the_coroutine(
    plain_loop: asyncio.AbstractEventLoop,
) -> None:
    ended: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    plain_loop.call_soon(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_alone(plain_loop, _wait_for_ever(ended))

    assert not asyncio.all_tasks(plain_loop)


def test_interrupt_while_tasks_end_leaves_the_next_coroutine_alone(
    plain_loop: asyncio.AbstractEventLoop,
) -> None:
    begun: list[asyncio.Task[None]] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def leave() -> None:
        begun.append(asyncio.ensure_future(_wait_for_ever([])))
        plain_loop.call_soon(plain_loop.call_soon, interrupt)  # once this has ended

    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    with pytest.raises(KeyboardInterrupt):
        run_alone(plain_loop, leave())
    assert not begun[0].done()

    assert run_alone(plain_loop, answer()) == 42
    assert begun[0].cancelled()
    assert not asyncio.all_tasks(plain_loop)

"""Results by index, and nothing left behind."""

import asyncio
import weakref
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
from typing_extensions import override

from ray_fed.executors.fan_out import Once, gather_by_index
from ray_fed.executors.federating import FederatingExecutor
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.executors.strategy import FederatingStrategy

flf = fl.framework
INT = fl.TensorType(np.int32)
AT_SERVER = fl.FederatedType(np.int32, fl.SERVER)


async def first_is_slowest(index: int) -> int:
    await asyncio.sleep(0.02 if index == 0 else 0)
    return index * 10


@pytest.mark.parametrize("number", [0, 1, 5])
def test_results_are_in_the_order_given(number: int) -> None:
    async def act() -> list[int]:
        return await gather_by_index(first_is_slowest(n) for n in range(number))

    assert asyncio.run(act()) == [index * 10 for index in range(number)]


def test_some_are_begun_first_and_results_stay_in_the_order_given() -> None:
    begun: list[int] = []

    async def work(index: int) -> int:
        begun.append(index)
        return index * 10

    async def act() -> list[int]:
        return await gather_by_index((work(index) for index in range(4)), [2, 0])

    assert asyncio.run(act()) == [0, 10, 20, 30]
    assert begun == [2, 0, 1, 3]


def test_a_failure_cancels_the_rest_and_waits_for_it() -> None:
    ended: list[int] = []

    async def work(index: int) -> int:
        try:
            await asyncio.sleep(60 if index else 0)
        finally:
            await asyncio.sleep(0)
            ended.append(index)
        raise KeyError("mine")

    async def act() -> int:
        with pytest.raises(KeyError, match="mine"):
            await gather_by_index(work(index) for index in range(4))
        return len(asyncio.all_tasks())

    num_tasks = asyncio.run(act())

    assert (sorted(ended), num_tasks) == ([0, 1, 2, 3], 1)


def test_a_failure_holds_no_result_of_others() -> None:
    class Result:
        pass

    results: list[weakref.ref[Result]] = []

    async def work(index: int) -> Result:
        if not index:
            await asyncio.sleep(0.02)
            raise KeyError("mine")
        results.append(weakref.ref(result := Result()))
        return result

    with pytest.raises(KeyError, match="mine") as raised:
        asyncio.run(gather_by_index(work(index) for index in range(3)))

    assert raised.value.__traceback__ is not None
    assert [result() for result in results] == [None, None]


def test_a_cancelled_caller_cancels_all() -> None:
    ended: list[int] = []

    async def work(index: int) -> int:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(index)
        return index

    async def act() -> None:
        await asyncio.wait_for(gather_by_index(work(n) for n in range(3)), 0.02)

    with pytest.raises(TimeoutError):
        asyncio.run(act())

    assert sorted(ended) == [0, 1, 2]


class Waiting(flf.Executor):
    """Fails for the value 1 once another one is asked for, which never ends."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled: list[Any] = []

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> Any:
        if value == 1:
            await self.begun.wait()
            raise KeyError("mine")
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(value)
            raise

    @override
    async def create_call(self, comp: Any, arg: Any = None) -> Any:
        raise NotImplementedError

    @override
    async def create_struct(self, elements: Any) -> Any:
        raise NotImplementedError

    @override
    async def create_selection(self, source: Any, index: int) -> Any:
        raise NotImplementedError

    @override
    def close(self) -> None:
        pass


def literal(number: int) -> Any:
    return flf.Literal(np.int32(number), INT)


SHARED = flf.Reference("shared", INT)
FAILING: dict[str, Any] = {
    "struct": flf.Struct([literal(1), literal(2), literal(2)]),
    "nested struct": flf.Struct([flf.Struct([literal(1), literal(2)]), literal(2)]),
    "shared local": flf.Block(
        [("shared", literal(2))],
        flf.Struct([flf.Struct([literal(1), SHARED]), flf.Struct([SHARED])]),
    ),
}


@pytest.mark.parametrize("way", FAILING)
def test_executor_cancels_siblings_after_a_failure(way: str) -> None:
    async def act() -> tuple[list[Any], int]:
        target = Waiting()
        with pytest.raises(KeyError, match="mine"):
            await ReferenceResolvingExecutor(target).create_value(FAILING[way])
        return target.cancelled, len(asyncio.all_tasks())

    cancelled, num_tasks = asyncio.run(act())

    assert set(cancelled) == {2}
    assert num_tasks == 1


def test_federating_executor_cancels_siblings_after_a_failure() -> None:
    async def act() -> tuple[list[Any], int]:
        target, strategy = Waiting(), cast("FederatingStrategy", FederatingStrategy)
        executor = FederatingExecutor(lambda _: strategy, target)
        with pytest.raises(KeyError, match="mine"):
            await executor.create_value([1, 2], fl.StructType([AT_SERVER, AT_SERVER]))
        return target.cancelled, len(asyncio.all_tasks())

    assert asyncio.run(act()) == ([2], 1)


def test_once_runs_for_those_who_still_wait_when_one_is_cancelled() -> None:
    async def act() -> tuple[int, int, bool]:
        go, begun = asyncio.Event(), 0

        async def work() -> int:
            nonlocal begun
            begun += 1
            await go.wait()
            return begun

        once = Once(work)
        first, second = (asyncio.create_task(once.get()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        go.set()
        found = await second
        return found, await once.get(), first.cancelled()

    assert asyncio.run(act()) == (1, 1, True)


def test_once_is_cancelled_with_the_last_who_waits_and_begins_anew() -> None:
    async def act() -> tuple[list[str], int]:
        seen: list[str] = []
        go = asyncio.Event()

        async def work() -> int:
            seen.append("begun")
            try:
                await go.wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise
            return 5

        once = Once(work)
        waiter = asyncio.create_task(once.get())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait([waiter])
        go.set()
        return seen, await once.get()

    assert asyncio.run(act()) == (["begun", "cancelled", "begun"], 5)

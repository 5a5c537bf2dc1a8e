"""Results by index, and nothing left behind."""

import asyncio
import weakref

import pytest

from ray_fed.executors.loops import gather_by_index


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

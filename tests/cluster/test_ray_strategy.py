"""Chunks on workers that are lost: made again from their history, and only those."""

# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false

import asyncio
import gc
import threading
from collections.abc import Coroutine
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.cluster.ray_strategy import (
    LostWorkerError,
    RayFederatingStrategy,
    RemoteExecutor,
    Worker,
    WorkerConnection,
)
from ray_fed.cluster.worker_actor import LeafWorker
from ray_fed.executors.fan_out import gather_by_index
from ray_fed.language.blocks import Function, serialize
from ray_fed.language.structs import Struct

flf = fl.framework
FLOATS = fl.FederatedType(np.float32, fl.CLIENTS)
NUM_CLIENTS = 6
Built = tuple[RayFederatingStrategy, RemoteExecutor]


@rtf.computation(np.float32)
def double(x: Any) -> Any:
    return 2 * x


@rtf.computation(np.float32)
def add_noise(x: Any) -> Any:
    return x + tf.random.normal([])


@rtf.computation(np.float32, np.float32)
def add(x: Any, y: Any) -> Any:
    return x + y


@rtf.computation(np.float32)
def must_be_positive(x: Any) -> Any:
    with tf.control_dependencies([tf.debugging.Assert(x > 0, ["not positive"])]):
        return tf.identity(x)


def function(comp: Any) -> Function:
    return Function(serialize(comp.to_building_block()))


@pytest.fixture
def strategy(sources: list[Any]) -> Built:
    workers = [RemoteExecutor(WorkerConnection(source)) for source in sources]
    return RayFederatingStrategy(workers[0], workers, NUM_CLIENTS), workers[0]


def kill(source: Any) -> None:
    source.handles[-1].is_dead = True


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


async def mapped(built: Built, comp: Any = double) -> Any:
    placed = await built[0].place([float(n) for n in range(NUM_CLIENTS)], FLOATS)
    return await built[0].map(function(comp), placed, fl.TensorType(np.float32))


async def total(built: Built, placed: Any) -> float:
    zero = await built[1].create_value(0.0, np.float32)
    reduced = await built[0].reduce(placed, zero, function(add), function(add))
    return float(await reduced.compute())


@pytest.mark.parametrize("lost", [0, 1], ids=["merges too", "clients only"])
def test_chunk_lost_before_the_aggregation_is_mapped_again(
    strategy: Built, sources: list[Any], lost: int
) -> None:
    async def act() -> float:
        placed = await mapped(strategy)
        kill(sources[lost])
        return await total(strategy, placed)

    assert run(act()) == 30.0
    assert [len(source.handles) for source in sources] == [2 - lost, 1 + lost]
    assert sources[lost].handles[1].calls.count("map") == 1
    assert sources[1 - lost].handles[0].calls.count("map") == 1
    assert sources[lost].settled == 1


@pytest.mark.parametrize("method", ["place", "embed", "map", "reduce", "compute"])
def test_worker_lost_under_a_call_is_replaced(
    strategy: Built, sources: list[Any], method: str
) -> None:
    async def act() -> float:
        await strategy[0].place([0.0] * NUM_CLIENTS, FLOATS)
        zero = await strategy[1].create_value(0.0, np.float32)  # leases the first
        sources[0].handles[0].dies_at = method
        await zero.compute()
        return await total(strategy, await mapped(strategy))

    assert run(act()) == 30.0
    assert [len(source.handles) for source in sources] == [2, 1]


def test_all_workers_may_be_lost_more_than_once(
    strategy: Built, sources: list[Any]
) -> None:
    async def act() -> list[Any]:
        placed = await mapped(strategy)
        results: list[Any] = []
        for _ in range(2):
            for source in sources:
                kill(source)
            results.append(await placed.compute())
        return results

    expected = [2.0 * n for n in range(NUM_CLIENTS)]
    assert run(act()) == [expected, expected]


def test_history_of_several_intrinsics_is_replayed(
    strategy: Built, sources: list[Any]
) -> None:
    async def act() -> list[Any]:
        everywhere = fl.FederatedType(np.float32, fl.CLIENTS, all_equal=True)
        shift = await strategy[1].create_value(10.0, np.float32)
        doubled = await mapped(strategy)
        same = await strategy[0].place(shift, everywhere)
        both = Struct([(None, doubled), (None, same)])
        pair = fl.to_type([np.float32, np.float32])
        zipped = await strategy[0].map(None, both, pair)
        added = await strategy[0].map(function(add), zipped, fl.to_type(np.float32))
        for source in sources:
            kill(source)
        return await added.compute()

    assert run(act()) == [10.0 + 2 * n for n in range(NUM_CLIENTS)]


def test_unplaced_values_are_made_again_too(
    strategy: Built, sources: list[Any]
) -> None:
    async def act() -> tuple[Any, Any]:
        executor = strategy[1]
        called = await executor.create_call(
            await executor.create_value(add_noise),
            await executor.create_value(1.0, np.float32),
        )
        pair = await executor.create_struct([called, called])
        second = await executor.create_selection(pair, 1)
        before = await called.compute()
        kill(sources[0])
        return before, await second.compute()

    before, after = run(act())

    assert before == after


def test_work_that_loses_too_many_workers_fails(
    strategy: Built, sources: list[Any]
) -> None:
    async def act() -> Any:
        placed = await mapped(strategy)
        sources[1].max_workers = 1
        kill(sources[1])
        return await placed.compute()

    with pytest.raises(LostWorkerError, match="worker 1"):
        run(act())
    assert sources[1].settled == 0


def test_error_of_a_client_is_not_taken_for_a_loss(
    strategy: Built, sources: list[Any]
) -> None:
    async def act() -> Any:
        return await mapped(strategy, must_be_positive)

    with pytest.raises(errors.ComputationError, match="not positive") as caught:
        run(act())

    assert caught.value.location.client_index == 0
    assert [len(source.handles) for source in sources] == [1, 1]
    assert run(total(strategy, run(mapped(strategy)))) == 30.0


def test_values_that_nobody_holds_are_dropped_from_the_worker(
    strategy: Built, sources: list[Any]
) -> None:
    async def act() -> int:
        held = sources[0].handles[0]._actor._scopes.values("worker 0/1")
        for _ in range(60):
            await total(strategy, await mapped(strategy))
        gc.collect()
        return len(held)

    run(mapped(strategy))
    kept = run(act())

    assert kept < 150  # two functions, and what was not yet worth a call to drop


def test_broadcast_is_read_once_and_put_once(
    strategy: Built, sources: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[Any] = []
    monkeypatch.setattr(
        "ray_fed.cluster.object_store.store",
        lambda value: (stored.append(value) or value, 0),
    )

    async def act() -> Any:
        everywhere = fl.FederatedType(np.float32, fl.CLIENTS, all_equal=True)
        value = await strategy[1].create_value(3.0, np.float32)
        return await (await strategy[0].place(value, everywhere)).compute()

    assert run(act()) == [3.0] * NUM_CLIENTS
    assert stored == [3.0]
    assert sources[0].handles[0].calls.count("compute") == 1
    assert [s.handles[0].calls.count("embed") for s in sources] == [1, 1]


def test_worker_that_nobody_waits_for_any_more_is_refused_in_silence() -> None:
    said: list[Any] = []

    class Source:
        def __init__(self) -> None:
            self.left = asyncio.Event()

        async def lease(self, loss: LostWorkerError | None) -> Any:
            del loss
            await self.left.wait()
            raise errors.ClusterError("no worker")

        async def settle(self) -> None: ...

    async def work(worker: Any) -> None: ...

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, c: said.append(c))
        source = Source()
        call = asyncio.ensure_future(WorkerConnection(source).run(work))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        source.left.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        del call
        gc.collect()

    asyncio.run(leave())
    gc.collect()

    assert not said


def test_refusal_of_a_worker_is_read_where_another_refused_before() -> None:
    said: list[Any] = []

    class Refusing:
        def __init__(self) -> None:
            self.may_answer = asyncio.Event()
            self.embed = self

        async def remote(self, *args: Any) -> None:
            del args
            await self.may_answer.wait()
            raise errors.UnsupportedError("refused")

    class Source:
        def __init__(self, handle: Any) -> None:
            self._handle = handle

        async def lease(self, loss: LostWorkerError | None) -> Worker:
            del loss
            return Worker(self._handle, "a/1", "worker")

        async def settle(self) -> None: ...

    async def embed() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, c: said.append(c))
        first, second = Refusing(), Refusing()
        first.may_answer.set()
        values = [
            RemoteExecutor(WorkerConnection(Source(each))).embed(
                1.0, fl.TensorType(np.float32)
            )
            for each in (first, second)
        ]
        with pytest.raises(errors.UnsupportedError):
            await gather_by_index(value.ready() for value in values)
        second.may_answer.set()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    asyncio.run(embed())
    gc.collect()

    assert not said


def test_worker_that_loads_has_no_clients_to_forget() -> None:
    may_load = threading.Event()

    class Loading(LeafWorker):
        @override
        def load_now(self) -> None:
            may_load.wait()

    worker = Loading(1, 0.0, 2**20)
    try:
        worker.forget_clients(["of no source"])
        assert not worker._loading.done()
    finally:
        may_load.set()
        worker._loop.close()

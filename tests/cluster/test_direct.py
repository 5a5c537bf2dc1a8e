"""Stacks without subrounds on real workers: killed, refused, and used from contexts."""

# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false

import asyncio
import itertools
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed
import ray_fed.errors as errors
import ray_fed.worker.stacks as stacks
from ray_fed import tensorflow as rtf
from ray_fed.cluster.direct import RayExecutorFactory
from ray_fed.cluster.ray_strategy import RayFederatingStrategy
from ray_fed.executors.federating import FederatingExecutor
from ray_fed.executors.seeded import SeededExecutor
from tests.waiting_work import count_marks, mark

flf = fl.framework
INT = fl.FederatedType(np.int32, fl.CLIENTS)
NUM_CLIENTS = 4
TWO_WORKERS = ray_fed.Workers(count=2, num_cpus=0.5)


@rtf.computation(fl.to_type([np.int32, np.int32]))
def add(pair: Any) -> Any:
    return pair[0] + pair[1]


@rtf.computation
def noise() -> Any:
    return tf.random.normal([4])


@fl.federated_computation(INT)
def draw(clients: Any) -> Any:
    del clients
    return fl.federated_eval(noise, fl.CLIENTS)


def wait_for_the_last(folder: pathlib.Path) -> None:
    while not any(folder.glob(f"{NUM_CLIENTS - 1}-*")):
        time.sleep(0.05)


def pid_of(factory: RayExecutorFactory, index: int) -> int:
    async def ask(worker: Any) -> int:
        return await worker.handle.__ray_call__.remote(lambda _: os.getpid())

    return asyncio.run(factory._connections[index].run(ask))


async def mapped(executor: Any, work: Any) -> Any:
    """Map work over the clients 0, 1, 2 ..., on an executor with no lambdas above."""
    type_spec = fl.FunctionType([work.type_signature, INT], INT)
    function = await executor.create_value(flf.FEDERATED_MAP, type_spec)
    argument = await executor.create_struct(
        [
            await executor.create_value(work),
            await executor.create_value(list(range(NUM_CLIENTS)), INT),
        ]
    )
    return await executor.create_call(function, argument)


async def aggregated(executor: Any, placed: Any) -> int:
    server = fl.FederatedType(np.int32, fl.SERVER)
    report = rtf.computation(lambda x: x, np.int32)
    parts = [np.int32, add.type_signature, add.type_signature, report.type_signature]
    type_spec = fl.FunctionType([INT, *parts], server)
    function = await executor.create_value(flf.FEDERATED_AGGREGATE, type_spec)
    zero = await executor.create_value(0, np.int32)
    comps = [await executor.create_value(comp) for comp in (add, add, report)]
    argument = await executor.create_struct([placed, zero, *comps])
    return int(await (await executor.create_call(function, argument)).compute())


def seeded(factory: RayExecutorFactory, seed: int) -> Any:
    workers = factory.executors()
    executor = stacks.federated_stack(
        lambda federating: RayFederatingStrategy(
            federating.unplaced, workers, NUM_CLIENTS
        ),
        workers[0],
    )
    return SeededExecutor(executor, seed, itertools.count())


async def evaluate(executor: Any, comp: Any) -> tuple[Any, Any]:
    """Return the result of a call on as many clients, and what it computes to."""
    function = await executor.create_value(comp)
    argument = await executor.create_value(list(range(NUM_CLIENTS)), INT)
    called = await executor.create_call(function, argument)
    return called, await called.compute()


def bits(values: list[Any]) -> list[bytes]:
    return [np.asarray(value).tobytes() for value in values]


@pytest.fixture
def plain_executor(ray_killed: RayExecutorFactory) -> Iterator[Any]:
    """A FederatingExecutor as a user builds it, nothing above it."""
    workers = ray_killed.executors()
    executor = FederatingExecutor(
        lambda federating: RayFederatingStrategy(
            federating.unplaced, workers, NUM_CLIENTS
        ),
        workers[0],
    )
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def ray_killed(ray_cluster: None) -> Iterator[RayExecutorFactory]:
    """Workers of this module's own, to be killed."""
    with RayExecutorFactory(ray_fed.Config(workers=TWO_WORKERS)) as factory:
        yield factory


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.usefixtures("ray_cluster")
class TestAWorkerThatIsKilled:
    def test_between_map_and_aggregation_costs_its_own_clients_only(
        self,
        ray_killed: RayExecutorFactory,
        plain_executor: Any,
        tmp_path: pathlib.Path,
    ) -> None:
        @rtf.computation(np.int32)
        def work(x: Any) -> Any:
            return mark(x, tmp_path, tf.strings.as_string(x))

        placed = asyncio.run(mapped(plain_executor, work))
        before = count_marks(tmp_path, NUM_CLIENTS)

        os.kill(pid_of(ray_killed, 0), 9)  # which merges, too
        total = asyncio.run(aggregated(plain_executor, placed))

        assert total == sum(range(NUM_CLIENTS))
        assert before == [1, 1, 1, 1]
        assert count_marks(tmp_path, NUM_CLIENTS) == [2, 2, 1, 1]

    def test_under_a_map_is_replaced(
        self,
        ray_killed: RayExecutorFactory,
        plain_executor: Any,
        tmp_path: pathlib.Path,
    ) -> None:
        flag, folder = tmp_path / "killed", tmp_path / "runs"
        folder.mkdir()
        pid = pid_of(ray_killed, 1)

        @rtf.computation(np.int32)
        def last_waits_for_the_kill(x: Any) -> Any:
            written = mark(x, folder, tf.strings.as_string(x))

            def waits(_: Any) -> Any:
                killed = tf.size(tf.io.matching_files(str(flag))) > 0
                return tf.logical_and(tf.equal(written, NUM_CLIENTS - 1), ~killed)

            turns = tf.while_loop(waits, lambda n: [n + 1], [0])[0]
            return written + 0 * turns

        async def kill_in_flight() -> Any:
            mapping = asyncio.ensure_future(
                mapped(plain_executor, last_waits_for_the_kill)
            )
            await asyncio.to_thread(wait_for_the_last, folder)
            os.kill(pid, 9)
            flag.touch()
            return await (await mapping).compute()

        assert asyncio.run(kill_in_flight()) == list(range(NUM_CLIENTS))
        assert count_marks(folder, NUM_CLIENTS) == [1, 1, 2, 2]

    def test_draws_again_what_it_drew(self, ray_killed: RayExecutorFactory) -> None:
        placed, before = asyncio.run(evaluate(seeded(ray_killed, 5), draw))

        for index in range(2):
            os.kill(pid_of(ray_killed, index), 9)

        assert bits(asyncio.run(placed.compute())) == bits(before)

    def test_more_often_than_its_budget_fails_the_work(self) -> None:
        config = ray_fed.Config(workers=1, retry=ray_fed.Retry(crash=0))
        with RayExecutorFactory(config) as factory:
            executor = factory.create_executor({fl.CLIENTS: NUM_CLIENTS})
            placed, _ = asyncio.run(evaluate(executor, draw))
            os.kill(pid_of(factory, 0), 9)

            with pytest.raises(
                errors.RetryBudgetError, match="most 0 failures of crash"
            ) as caught:
                asyncio.run(placed.compute())

        assert caught.value.failure_class == "crash"


@pytest.mark.slow
@pytest.mark.ray
def test_context_of_federated_language_runs_over_the_factory(
    ray_executors: RayExecutorFactory,
) -> None:
    context = flf.SyncExecutionContext(ray_executors)

    @fl.federated_computation(INT)
    def total(x: Any) -> Any:
        return fl.federated_sum(x)

    with flf.get_context_stack().install(context):
        assert total([1, 2, 3]) == 6
        assert total([1, 2, 3, 4]) == 10
        with pytest.raises(errors.ValueMismatchError):
            total([1, "x"])
        assert total([1, 2, 3]) == 6

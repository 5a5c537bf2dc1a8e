"""The documented context over three contexts on Ray, one of whose workers is killed."""

# pyright: reportUnknownLambdaType=false

import asyncio
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import ray
import tensorflow as tf

import ray_fed
import ray_fed.errors as errors
from ray_fed import framework
from ray_fed import tensorflow as rtf
from ray_fed.observability import events
from tests.waiting_work import GO, mark_and_wait

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(590)]

NUM_CLIENTS = 9
NUM_CONTEXTS = 3
WAIT_S = 240.0
SEQUENCE_BYTES = 100_000
CLIENTS = fl.FederatedType(np.int32, fl.CLIENTS)


@pytest.fixture(scope="module")
def on_ray(cluster: Any) -> Iterator[list[framework.RayExecutionContext]]:
    """Three contexts over one pool of three workers."""
    workers = ray_fed.Workers(count=NUM_CONTEXTS, num_cpus=0.5)
    config = ray_fed.Config(
        workers=workers,
        stragglers={"enabled": False},
        data={"sequence_bytes": SEQUENCE_BYTES},
    )
    with framework.RayExecutionContext(config, address="auto") as first:
        others = [
            framework.RayExecutionContext(pool_of=first)
            for _ in range(NUM_CONTEXTS - 1)
        ]
        yield [first, *others]


def square_when_told(folder: pathlib.Path) -> Any:
    """Return a round: the sum of squares; clients leave files and wait for another."""

    @rtf.computation(np.int32)
    def square(x: Any) -> Any:
        let_go = mark_and_wait(x, folder, tf.strings.as_string(x))
        return let_go * let_go

    @fl.federated_computation(CLIENTS)
    def run(values: Any) -> Any:
        return fl.federated_sum(fl.federated_map(square, values))

    return run


class Subrounds:
    """Notes the subrounds that finished."""

    def __init__(self) -> None:
        self.found: list[events.SubroundFinished] = []

    def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.SubroundFinished):
            self.found.append(event)


def let_go(folder: pathlib.Path, act: Any = None) -> None:
    """Let clients go on once one of each slice runs; do something before."""
    deadline = time.monotonic() + WAIT_S
    try:
        while len([*folder.glob("*-*")]) < NUM_CONTEXTS:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if act is not None:
            act()
    finally:
        (folder / GO).touch()


def test_killed_worker_costs_the_documented_context_one_retry(
    on_ray: Any, tmp_path: pathlib.Path, meanwhile: Any, kill: Any
) -> None:
    work, clients = square_when_told(tmp_path), list(range(NUM_CLIENTS))
    context = framework.MergeableCompExecutionContext(
        on_ray, compiler_fn=framework.compile_to_mergeable_comp_form
    )
    seen = Subrounds()
    for one in on_ray:
        one.subscribe(seen)

    meanwhile(lambda: let_go(tmp_path))
    calm = context.invoke(work, clients)
    workers = {event.worker_pid for event in seen.found if event.num_clients}
    for path in tmp_path.iterdir():
        path.unlink()
    meanwhile(lambda: let_go(tmp_path, lambda: kill(min(workers))))
    disturbed = context.invoke(work, clients)
    context.close()

    assert len(workers) == NUM_CONTEXTS
    assert calm == disturbed == sum(client**2 for client in clients)
    (lost,) = [event for event in seen.found if event.lost]
    assert (lost.attempts, lost.num_clients) == (2, NUM_CLIENTS // NUM_CONTEXTS)
    assert [(a.worker_pid, a.ended) for a in lost.lost] == [(min(workers), "crash")]
    ran = [*tmp_path.glob("*-*")]
    assert len(ran) == NUM_CLIENTS + 1  # the lost slice was at its first client


@rtf.computation(np.int32)
def increment(x: Any) -> Any:
    return x + 1


@fl.federated_computation(CLIENTS)
def increments(values: Any) -> Any:
    return fl.federated_map(increment, values)


def test_each_invocation_is_one_task_of_ray(on_ray: Any) -> None:
    context = on_ray[1]
    values = list(range(NUM_CLIENTS))

    async def run() -> tuple[Any, Any]:
        return await context.invoke(increments, values), context.last_report

    loops = [asyncio.run(run()) for _ in range(2)]  # a context outlives loops

    here = ray.get_runtime_context().get_node_id()
    assert [result for result, _ in loops] == [[x + 1 for x in values]] * 2
    for _, report in loops:
        (subround,) = report.subrounds
        assert subround.num_clients == NUM_CLIENTS
        assert subround.coordinator_pid != subround.worker_pid
        assert subround.node != here


@rtf.computation(np.int32)
def refuse(x: Any) -> Any:
    with tf.control_dependencies([tf.debugging.Assert(x < 0, ["no", x])]):
        return tf.identity(x)


@fl.federated_computation(CLIENTS)
def refusals(values: Any) -> Any:
    return fl.federated_map(refuse, values)


@pytest.mark.parametrize(
    ("comp", "arg", "error"),
    [
        (refusals, [-1, 2, -1], errors.ComputationError),
        (increments, ["x"], TypeError),
        (increments, 3, TypeError),
        (3, None, TypeError),
    ],
    ids=["work raises", "type", "no list", "no computation"],
)
def test_errors_are_those_of_other_contexts(
    on_ray: Any, comp: Any, arg: Any, error: type[Exception]
) -> None:
    with pytest.raises(error) as raised:
        asyncio.run(on_ray[2].invoke(comp, arg))

    if isinstance(raised.value, errors.ComputationError):
        assert raised.value.location.client_index == 1


@rtf.computation(fl.SequenceType(np.int32))
def total(dataset: Any) -> Any:
    return dataset.reduce(np.int32(0), lambda so_far, x: so_far + x)


@fl.federated_computation(fl.FederatedType(fl.SequenceType(np.int32), fl.CLIENTS))
def totals(data: Any) -> Any:
    return fl.federated_map(total, data)


def test_endless_sequence_ends_at_its_limit(on_ray: Any) -> None:
    with pytest.raises(
        errors.ValueMismatchError, match=rf"{SEQUENCE_BYTES} bytes.*sequence_bytes"
    ):
        asyncio.run(on_ray[1].invoke(totals, [[1, 2], iter(int, 1)]))

    assert asyncio.run(on_ray[1].invoke(totals, [[1, 2], [3]])) == [3, 3]


def test_closed_context_leaves_its_pool_to_the_others(on_ray: Any) -> None:
    closed = framework.RayExecutionContext(pool_of=on_ray[0])
    closed.close()

    with pytest.raises(errors.ContextStateError, match="found it closed"):
        asyncio.run(closed.invoke(increments, [1]))
    assert asyncio.run(on_ray[0].invoke(increments, [1])) == [2]

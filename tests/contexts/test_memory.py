"""What rounds move, and that they leave nothing behind."""

import asyncio
import gc
import json
import os
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest
import ray
import tensorflow as tf

import ray_fed
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.learning import LearningProcess, Model, build_fed_avg
from ray_fed.program import RayFederatedContext
from tests.fixtures import ContextFactory, RayMemory, report_of, run_python

MODEL = fl.TensorType(np.float32, [40_000])
DATA = fl.TensorType(np.float32, [7_500])
"""The model is stored once; of a client's two values those of a subround, 60 kB each,
travel in its call, which Ray stores as it holds more than 100 kB."""


@rtf.computation(MODEL, DATA, DATA)
def train(model: Any, x: Any, y: Any) -> Any:
    return tf.math.tanh(model + tf.reduce_mean(x * y))


@fl.federated_computation(
    fl.FederatedType(MODEL, fl.SERVER),
    fl.FederatedType(DATA, fl.CLIENTS),
    fl.FederatedType(DATA, fl.CLIENTS),
)
def one_round(model: Any, x: Any, y: Any) -> Any:
    updates = fl.federated_map(train, (fl.federated_broadcast(model), x, y))
    return fl.federated_mean(updates)


@rtf.computation(np.float32, np.float32)
def squared_distance(x: Any, mean: Any) -> Any:
    return (x - mean) ** 2


@fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
def spread(values: Any) -> Any:
    mean = fl.federated_broadcast(fl.federated_mean(values))
    return fl.federated_mean(fl.federated_map(squared_distance, (values, mean)))


@pytest.mark.slow
@pytest.mark.ray
def test_rounds_leave_nothing_in_the_object_store(
    ray_contexts: ContextFactory, ray_memory: Any
) -> None:
    context = ray_contexts(workers=2)
    clients = [np.full(7_500, index, np.float32) for index in range(4)]
    context.invoke(one_round, (np.zeros(40_000, np.float32), clients, clients))
    ray_memory.begin()  # the context has its graphs there

    model = np.zeros(40_000, np.float32)
    for _ in range(4):
        model = context.invoke(one_round, (model, clients, clients))
    del model

    assert ray_memory.left() == (0, 0)


@pytest.mark.ray
def test_report_counts_the_bytes_that_move(ray_contexts: ContextFactory) -> None:
    context = ray_contexts(workers=2, subrounds=2)
    clients = [np.full(7_500, index, np.float32) for index in range(5)]
    others = clients[::-1]

    context.invoke(one_round, (np.zeros(40_000, np.float32), clients, others))

    report = report_of(context)
    value, partial = 2 * 4 * 7_500, 4 * 40_000 + 4
    assert report.bytes_broadcast == 4 * 40_000
    assert report.bytes_sliced == 5 * value
    by_clients = [(s.num_clients, s.bytes_sliced) for s in report.subrounds]
    assert sorted(by_clients) == [(0, 0), (2, 2 * value), (3, 3 * value)]
    first, second, finish = (s.bytes_returned for s in report.subrounds)
    assert finish == 4 * 40_000
    assert (first % partial, second % partial) == (0, 0)
    assert report.bytes_returned == first + second + finish


@pytest.mark.ray
def test_kept_state_counts_as_broadcast(ray_contexts: ContextFactory) -> None:
    context = ray_contexts(workers=2, subrounds=2)
    clients = [np.full(7_500, 1, np.float32)]
    with RayFederatedContext(context) as program:
        model = program.invoke(
            one_round, (np.zeros(40_000, np.float32), clients, clients)
        )
        model = program.invoke(one_round, (model, clients, clients))
        asyncio.run(model.get_value())

    report = report_of(context)
    assert report.bytes_broadcast == 4 * 40_000
    assert report.subrounds[-1].bytes_returned == 4 * 40_000


@pytest.mark.ray
def test_merged_values_count_as_broadcast(ray_contexts: ContextFactory) -> None:
    context = ray_contexts(workers=2, subrounds=2)

    context.invoke(spread, [np.float32(x) for x in range(5)])

    report = report_of(context)
    assert report.bytes_broadcast == 8  # the sum and the count of the first mean
    assert report.bytes_sliced == 5 * 4
    in_first, in_second = report.subrounds[:2], report.subrounds[3:5]
    for subrounds in (in_first, in_second):
        assert sum(subround.bytes_sliced for subround in subrounds) == 5 * 4


SETTLED, MIDDLE, NUM_ROUNDS = 100, 200, 300
"""Coordinators grow by a tenth in the first hundred rounds, and by a hundredth in the
next two hundred (2026-11-30)."""
NUM_MEASURED = 9
"""Rounds up to each of these whose median counts: of a busy machine, one round more or
less is under way when memory is read."""


def run_program(context: ExecutionContext, process: LearningProcess) -> Iterator[int]:
    """Yield after each round; state stays in the object store."""
    with RayFederatedContext(context) as program:
        state = program.invoke(process.initialize)
        for round_index in range(1, NUM_ROUNDS + 1):
            arg = (state, pick_cohort(round_index))
            state, metrics = program.invoke(process.next, arg)
            asyncio.run(fl.program.materialize_value(metrics))
            yield round_index


def wide_process() -> LearningProcess:
    """Return one whose weights, of more than 100 kB, Ray stores."""
    dense = [keras.layers.Dense(size) for size in (500, 1)]
    model = Model.from_keras(
        keras.Sequential([keras.Input((100,)), *dense]),
        loss=keras.losses.MeanSquaredError(),
        label_type=fl.TensorType(np.float32, [None, 1]),
    )
    return build_fed_avg(model, keras.optimizers.SGD(0.01))


def pick_cohort(round_index: int) -> list[Any]:
    """Return clients of 5 to 40 examples, a few more or less each round."""
    random = np.random.default_rng(round_index)
    sizes = random.integers(5, 40, size=random.integers(8, 13))
    return [
        [{"x": random.normal(size=(n, 100)).astype("f"), "y": np.zeros((n, 1), "f")}]
        for n in sizes
    ]


def resident_bytes(pid: int) -> int:
    status = pathlib.Path(f"/proc/{pid}/statm").read_text()
    return int(status.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def median_bytes(measured: list[dict[str, int]]) -> dict[str, float]:
    """Return the median of each process over the last of some rounds."""
    last = measured[-NUM_MEASURED:]
    return {
        pid: statistics.median(sizes[pid] for sizes in last if pid in sizes)
        for pid in last[-1]
    }


def pids_of(context: ExecutionContext) -> set[int]:
    """Return this process, the workers of the last round and their coordinators."""
    report = report_of(context)
    found = [(s.worker_pid, s.coordinator_pid) for s in report.subrounds]
    return {os.getpid(), *(pid for pids in found for pid in pids)}


def print_memory() -> None:
    """Run the rounds; print bytes of each process after each, then what is left."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = ray_fed.Config(workers=2, subrounds=2)
    process = wide_process()
    pids: set[int] = set()
    with ray_fed.create_context(config) as context:
        state = context.invoke(process.initialize)
        context.invoke(process.next, (state, pick_cohort(0)))
        del state
        memory = RayMemory()  # the store keeps the functions of the process's plan
        for _ in run_program(context, process):
            pids |= pids_of(context)
            print(json.dumps({pid: resident_bytes(pid) for pid in pids}))  # noqa: T201
        print(json.dumps(memory.left()))  # noqa: T201


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_memory_stays_flat_over_300_rounds() -> None:
    # A process of its own: one of tests has gigabytes of others', which move.
    printed = run_python("-m", "tests.contexts.test_memory", timeout_s=490)
    *lines, left = printed.splitlines()[-NUM_ROUNDS - 1 :]
    measured = [json.loads(line) for line in lines]

    settled, middle, end = (
        median_bytes(measured[:last]) for last in (SETTLED, MIDDLE, NUM_ROUNDS)
    )
    grown = {
        pid: ((middle[pid] - size) / size, (end[pid] - middle[pid]) / size)
        for pid, size in settled.items()
    }
    assert len(grown) >= 3
    # What rounds leave behind is in both halves; what is taken once, in one of them.
    assert max(min(halves) for halves in grown.values()) < 0.025, grown
    assert max(sum(halves) for halves in grown.values()) < 0.1, grown
    assert json.loads(left) == [0, 0]


def graphs_of_python() -> dict[int, Any]:
    for _ in range(3):  # what finalizers held is garbage once they ran
        gc.collect()
    return {id(each): each for each in gc.get_objects() if isinstance(each, tf.Graph)}


@pytest.mark.slow
def test_graphs_of_a_process_leave_no_python_objects_of_their_nodes(
    local_contexts: ContextFactory,
) -> None:
    """Python's graphs are most of the memory; functions of a few ops keep theirs."""
    context = local_contexts(workers=2)
    context.invoke(spread, [1.0, 2.0])
    wide_process()  # what Keras and TensorFlow trace once, for all
    before = set(graphs_of_python())

    process = wide_process()
    traced = [
        (type(graph).__name__, getattr(graph, "name", ""))
        for key, graph in graphs_of_python().items()
        if key not in before
    ]
    state = context.invoke(process.initialize)
    context.invoke(process.next, (state, pick_cohort(0)))

    assert traced == []
    assert report_of(context).kernel_leaves > 0
    left = [
        graph.get_operations()
        for key, graph in graphs_of_python().items()
        if key not in before
    ]
    assert max(map(len, left), default=0) < 100, left  # that of a fold has 600


def test_nothing_moves_on_the_local_backend(local_contexts: ContextFactory) -> None:
    context = local_contexts(workers=2)

    context.invoke(spread, [np.float32(x) for x in range(5)])

    report = report_of(context)
    moved = report.bytes_broadcast, report.bytes_sliced, report.bytes_returned
    assert moved == (0, 0, 0)


if __name__ == "__main__":
    print_memory()

"""Clients whose data has no end, or whose loading exits, fail; a context goes on."""

# pyright: reportUnknownLambdaType=false

import asyncio
import itertools
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.program import ClientData, RayFederatedContext

ContextFactory = Callable[..., ExecutionContext]
SEQUENCE = fl.SequenceType(np.int64)
AT_CLIENTS = fl.FederatedType(SEQUENCE, fl.CLIENTS)
CLIENT_BYTES = 2**14
SETTINGS = {"workers": ray_fed.Workers(count=2, client_bytes=CLIENT_BYTES)}
WAYS = ["local", "no kernels", "debug"]


@rtf.computation(SEQUENCE)
def total(dataset: Any) -> Any:
    return dataset.reduce(np.int64(0), lambda so_far, x: so_far + x)


@fl.federated_computation(AT_CLIENTS)
def sum_of_totals(data: Any) -> Any:
    return fl.federated_sum(fl.federated_map(total, data))


@pytest.fixture(params=WAYS)
def context(
    request: pytest.FixtureRequest, local_contexts: ContextFactory
) -> ExecutionContext:
    return local_contexts(
        **SETTINGS,
        debug=request.param == "debug",
        kernels={"enabled": request.param == "local"},
    )


def _endless(client: int) -> Any:
    return (index + client for index in itertools.count())


def _endless_dataset(client: int) -> Any:
    spec = tf.TensorSpec([], tf.int64)
    return tf.data.Dataset.from_generator(itertools.count, output_signature=spec).skip(
        client
    )


def _exit(client: int) -> Any:
    sys.exit(client)


def _interrupt(client: int) -> Any:
    raise KeyboardInterrupt(client)


def _end_generator(client: int) -> Any:
    raise GeneratorExit(client)


def _cancel(client: int) -> Any:
    raise asyncio.CancelledError(client)


def _exit_in_the_middle(client: int) -> Iterator[int]:
    yield client
    sys.exit(client)


def _raise_in_the_middle(client: int) -> Iterator[int]:
    yield client
    raise ValueError(client)


def _only_at_two(load: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda client: load(client) if client == 2 else [client, 1]


@pytest.mark.parametrize("load", [_endless, _endless_dataset])
def test_endless_client_ends_at_the_bound_and_the_next_call_runs(
    context: ExecutionContext, load: Any
) -> None:
    data = ClientData.from_function(range(4), _only_at_two(load), SEQUENCE)

    with pytest.raises(
        errors.ValueMismatchError,
        match=rf"id 2 .*{CLIENT_BYTES}.*workers\.client_bytes",
    ):
        context.invoke(sum_of_totals, data)

    assert context.invoke(sum_of_totals, data.select([0, 1, 3])) == 7


EXITS = [
    _exit,
    _interrupt,
    _end_generator,
    _cancel,
    _exit_in_the_middle,
    _raise_in_the_middle,
]


@pytest.mark.parametrize(
    ("context", "load"),
    [
        (way, load)
        for way in WAYS
        for load in EXITS
        if not (way == "debug" and load is _interrupt)  # on the main thread: Ctrl-C
    ],
    indirect=["context"],
)
def test_exit_of_a_client_is_its_failure(context: ExecutionContext, load: Any) -> None:
    data = ClientData.from_function(range(4), _only_at_two(load), SEQUENCE)

    with pytest.raises(errors.ComputationError, match=r"id 2, .*raised") as caught:
        context.invoke(sum_of_totals, data)

    assert caught.value.location.client_index == 2
    assert context.invoke(sum_of_totals, data.select([0, 1, 3])) == 7
    report = context.last_report
    assert report is not None
    assert report.num_retries == 0


@pytest.mark.parametrize("endless", [_endless, _endless_dataset])
@pytest.mark.parametrize("is_program", [False, True])
def test_endless_argument_ends_at_the_bound(
    local_contexts: ContextFactory, endless: Any, is_program: bool
) -> None:
    context = local_contexts(workers=1, data={"sequence_bytes": 10_000})
    caller = RayFederatedContext(context) if is_program else context

    with pytest.raises(
        errors.ValueMismatchError, match=r"10000 bytes.*data\.sequence_bytes"
    ):
        caller.invoke(sum_of_totals, [[1], endless(0)])

    assert context.invoke(sum_of_totals, [[1], [2]]) == 3


def test_endless_result_ends_at_the_bound(local_contexts: ContextFactory) -> None:
    @rtf.computation(np.int64)
    def endless(x: Any) -> Any:
        ones = tf.data.Dataset.from_tensors(x).repeat()
        return ones.filter(lambda one: one > 0)

    context = local_contexts(workers=ray_fed.Workers(count=1, client_bytes=2**14))

    with pytest.raises(errors.RayFedError, match="16384 bytes"):
        context.invoke(endless, 1)

    assert context.invoke(sum_of_totals, [[1], [2]]) == 3


def _interrupt_when(begun: Callable[[], bool]) -> threading.Thread:
    """Press Ctrl-C once something has begun."""

    def press() -> None:
        while not begun():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("backend", "is_dataset"),
    [
        ("local", False),
        ("local", True),
        pytest.param("ray", False, marks=[pytest.mark.ray, pytest.mark.slow]),
    ],
)
def test_interrupt_ends_the_reading_of_a_client(
    request: pytest.FixtureRequest,
    tmp_path: pathlib.Path,
    backend: str,
    is_dataset: bool,
) -> None:
    settings: dict[str, Any] = {"workers": ray_fed.Workers(count=2)}
    context = request.getfixturevalue(f"{backend}_contexts")(**settings)
    mark = tmp_path / "begun"

    def count() -> Iterator[int]:
        for index in itertools.count():
            if index % 1000 == 999:
                mark.write_text(str(index))
            yield index

    def load(client: int) -> Any:
        if client < 2:
            return [client]
        spec = tf.TensorSpec([], tf.int64)
        if is_dataset:
            return tf.data.Dataset.from_generator(count, output_signature=spec)
        return count()

    data = ClientData.from_function(range(4), load, SEQUENCE)
    pids = _worker_pids(context)
    presser = _interrupt_when(mark.exists)

    with pytest.raises(KeyboardInterrupt):
        context.invoke(sum_of_totals, data)

    presser.join()
    started = time.monotonic()
    assert context.invoke(sum_of_totals, data.select([0, 1])) == 1
    assert time.monotonic() - started < 60
    assert len(_worker_pids(context) | pids) <= 2  # nobody was replaced
    ended = mark.read_text()
    assert context.invoke(sum_of_totals, data.select([0, 1])) == 1
    assert mark.read_text() == ended  # nobody reads on


def _worker_pids(context: ExecutionContext) -> set[int]:
    context.invoke(sum_of_totals, [[1]] * 8)
    report = context.last_report
    assert report is not None
    return {subround.worker_pid for subround in report.subrounds}

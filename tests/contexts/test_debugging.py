"""`Config(debug=True)`: client work on the thread that calls, to the same bits."""

# pyright: reportUnknownLambdaType=false

import asyncio
import gc
import io
import pdb
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext
from tests.fixtures import ContextFactory

AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
CLIENTS = [0.0, 1.0, 2.0, 3.0, 4.0]


class Visits:
    """Python functions for graphs that note who called them, from which thread."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, float]] = []
        self.threads: set[int] = set()

    def note(self, kind: str) -> Callable[[Any], Any]:
        def visit(x: Any) -> Any:
            self.noted.append((kind, float(x)))
            self.threads.add(threading.get_ident())
            return x

        return visit

    def eager(self, x: Any, kind: str = "eager") -> Any:
        return tf.reshape(tf.py_function(self.note(kind), [x], tf.float32), [])

    def numpy(self, x: Any) -> Any:
        return tf.reshape(tf.numpy_function(self.note("numpy"), [x], tf.float32), [])

    def dataset(self, x: Any) -> Any:
        elements = tf.data.Dataset.from_tensors(x).repeat(2)
        return elements.map(lambda element: self.eager(element, "dataset"))


def calling(function: Callable[[Any], Any]) -> Any:
    """Return work of clients that calls a Python function."""

    @rtf.computation(np.float32)
    def work(x: Any) -> Any:
        return tf.reshape(tf.py_function(function, [x], tf.float32), [])

    return work


def mean_of(work: Any) -> Any:
    @fl.federated_computation(AT_CLIENTS)
    def mean(x: Any) -> Any:
        return fl.federated_mean(fl.federated_map(work, x))

    return mean


def test_clients_run_in_order_on_the_calling_thread(
    local_contexts: ContextFactory,
) -> None:
    visits = Visits()

    @rtf.computation(np.float32)
    def work(x: Any) -> Any:
        total = visits.numpy(visits.eager(x))
        for _ in tf.range(2):
            total += visits.eager(x, "loop")
        return total

    context = local_contexts(debug=True, subrounds=3, clients_per_leaf=2)
    gc.collect()

    result = context.invoke(mean_of(work), CLIENTS)

    kinds = ["eager", "numpy", "loop", "loop"]
    assert result == 6.0
    assert visits.noted == [(kind, x) for x in CLIENTS for kind in kinds]
    assert visits.threads == {threading.get_ident()}


def test_functions_of_datasets_run_on_the_calling_thread(
    local_contexts: ContextFactory,
) -> None:
    visits = Visits()

    @rtf.computation(np.float32)
    def made(x: Any) -> Any:
        return visits.dataset(x)

    @rtf.computation(fl.SequenceType(np.float32))
    def summed(dataset: Any) -> Any:
        return dataset.reduce(np.float32(0), lambda x, y: x + visits.eager(y))

    @fl.federated_computation(AT_CLIENTS)
    def comp(x: Any) -> Any:
        sequences = fl.federated_map(made, x)
        return sequences, fl.federated_map(summed, sequences)

    sequences, sums = local_contexts(debug=True).invoke(comp, [1.0, 2.0])

    assert [list(map(float, sequence)) for sequence in sequences] == [[1, 1], [2, 2]]
    assert [float(x) for x in sums] == [2.0, 4.0]
    assert {kind for kind, _ in visits.noted} == {"dataset", "eager"}
    assert visits.threads == {threading.get_ident()}


def test_another_thread_that_calls_runs_its_clients(
    local_contexts: ContextFactory,
) -> None:
    visits = Visits()
    comp = mean_of(rtf.computation(visits.numpy, np.float32))
    context = local_contexts(debug=True)
    thread = threading.Thread(target=context.invoke, args=(comp, CLIENTS))

    thread.start()
    thread.join()

    assert visits.threads == {thread.ident}


def test_without_debug_clients_run_elsewhere(local_contexts: ContextFactory) -> None:
    visits = Visits()
    comp = mean_of(rtf.computation(visits.numpy, np.float32))

    local_contexts(workers=1).invoke(comp, CLIENTS)

    assert threading.get_ident() not in visits.threads


def test_call_from_a_running_event_loop(local_contexts: ContextFactory) -> None:
    visits = Visits()
    comp = mean_of(rtf.computation(visits.numpy, np.float32))
    context = local_contexts(debug=True)

    async def main() -> tuple[Any, Any]:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        in_task = context.invoke(comp, CLIENTS)
        in_callback: asyncio.Future[Any] = loop.create_future()
        loop.call_soon(lambda: in_callback.set_result(context.invoke(comp, CLIENTS)))
        await asyncio.sleep(0)
        assert asyncio.current_task() is task
        assert asyncio.get_running_loop() is loop
        return in_task, await in_callback

    assert asyncio.run(main()) == (2.0, 2.0)
    assert visits.threads == {threading.get_ident()}


def test_a_breakpoint_stops_with_the_caller_on_the_stack(
    local_contexts: ContextFactory,
) -> None:
    told = io.StringIO()

    def inspect_me(x: Any) -> Any:
        commands = io.StringIO("p 'x is', float(x)\nwhere\ncontinue\n")
        pdb.Pdb(stdin=commands, stdout=told, nosigint=True).set_trace()
        return x

    context = local_contexts(debug=True)
    tracer = sys.gettrace()
    try:
        result = context.invoke(mean_of(calling(inspect_me)), [7.0])
    finally:
        sys.settrace(tracer)

    assert result == 7.0
    assert "('x is', 7.0)" in told.getvalue()
    assert "test_a_breakpoint_stops_with_the_caller_on_the_stack()" in told.getvalue()


def test_a_trace_function_of_the_thread_sees_client_work(
    local_contexts: ContextFactory,
) -> None:
    seen: list[str] = []

    def look_at_me(x: Any) -> Any:
        return x

    def trace(frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code.co_name == "look_at_me":
            seen.append(event)

    comp, context = mean_of(calling(look_at_me)), local_contexts(debug=True)
    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        context.invoke(comp, CLIENTS)
    finally:
        sys.settrace(tracer)

    assert seen == ["call"] * len(CLIENTS)


def test_an_error_of_client_work_names_the_client(
    local_contexts: ContextFactory,
) -> None:
    def refuse(x: Any) -> Any:
        if x == 3.0:
            raise ValueError("not three")
        return x

    context = local_contexts(debug=True)

    with pytest.raises(errors.ComputationError, match=r"`work` .*not three") as caught:
        context.invoke(mean_of(calling(refuse)), CLIENTS)

    assert caught.value.location.client_index == 3
    assert context.invoke(mean_of(calling(refuse)), [1.0, 2.0]) == 1.5


def test_an_interrupt_ends_the_call_and_leaves_the_context_usable(
    local_contexts: ContextFactory,
) -> None:
    def interrupt(x: Any) -> Any:
        if x == 2.0:
            raise KeyboardInterrupt
        return x

    context = local_contexts(debug=True)

    with pytest.raises(KeyboardInterrupt):
        context.invoke(mean_of(calling(interrupt)), CLIENTS)

    assert context.invoke(mean_of(calling(interrupt)), [1.0, 3.0]) == 2.0


def test_a_call_from_inside_of_client_work_is_refused(
    local_contexts: ContextFactory,
) -> None:
    context = local_contexts(debug=True)
    inner = mean_of(training)

    def call(x: Any) -> Any:
        return context.invoke(inner, [float(x)])

    with pytest.raises(errors.ComputationError, match="one call at a time"):
        context.invoke(mean_of(calling(call)), CLIENTS)


@rtf.computation(np.float32)
def training(x: Any) -> Any:
    weights = tf.Variable(tf.random.normal([8, 8]))
    for _ in tf.range(3):
        weights.assign_add(tf.linalg.matmul(weights, weights) * 0.01 + x)
    return tf.nn.relu(tf.reduce_sum(weights)) + tf.random.uniform([])


def check_bits(context: ExecutionContext, other: ExecutionContext) -> None:
    members = [x / 7 for x in range(11)]
    calls = [
        [np.asarray(c.invoke(mean_of(training), members)).tobytes() for _ in range(2)]
        for c in (context, other)
    ]

    assert calls[0] == calls[1]
    assert len(set(calls[0])) == 2


def test_bits_are_those_of_threads(local_contexts: ContextFactory) -> None:
    settings: Any = {"seed": 3, "clients_per_leaf": 2}

    check_bits(
        local_contexts(debug=True, **settings),
        local_contexts(workers=2, subrounds=3, **settings),
    )


def test_ray_is_refused() -> None:
    with pytest.raises(
        errors.ConfigError, match='Expected backend="local" with `debug'
    ):
        ray_fed.Config(debug=True)

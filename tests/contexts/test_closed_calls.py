"""Calls under which their context is closed: an error in words, and soon."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
from typing_extensions import override

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.compiler.split import compile_to_mergeable_comp_form
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.contexts.mergeable import MergeableCompExecutionContext
from ray_fed.observability import events
from ray_fed.program import RayFederatedContext

import tensorflow as tf  # isort: skip

AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
federated_computation = cast("Callable[..., Any]", fl.federated_computation)
NUM_CLIENTS = 200
CLIENTS = [1.0] * NUM_CLIENTS
SOON_S = 30.0
"""A call on all clients takes longer; the end of one client's work does not."""


@rtf.computation(np.float32)
def slowly(x: Any) -> Any:
    for _ in tf.range(1_000_000):
        x = x + 1.0
    return x


@federated_computation(AT_CLIENTS)
def slow_sum(values: Any) -> Any:
    return fl.federated_sum(fl.federated_map(slowly, values))


class Started:
    """Notes that a round has begun."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.RoundStarted):
            self.event.set()


class Caller(threading.Thread):
    """Calls a function on a thread, and keeps what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.error: BaseException | None = None

    @override
    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 (a bare cancellation is what fails)
            self.error = error


SETTINGS = [
    pytest.param({"backend": "local"}, id="local"),
    pytest.param({"backend": "local", "kernels": {"enabled": False}}, id="interpreted"),
    pytest.param({"backend": "local", "debug": True}, id="debug"),
]
ON_RAY = pytest.param(
    {"backend": "ray"}, id="ray", marks=[pytest.mark.ray, pytest.mark.slow]
)


@pytest.fixture(params=SETTINGS)
def context(request: pytest.FixtureRequest) -> Iterator[ExecutionContext]:
    settings = request.param
    if settings["backend"] == "ray":
        request.getfixturevalue("ray_cluster")
    context = ray_fed.init(config=ray_fed.Config(workers=1, **settings))
    yield context
    ray_fed.shutdown()


def close_under(context: ExecutionContext, caller: Caller) -> float:
    """Shut down once a call has begun; return the seconds until it has ended."""
    started = Started()
    context.subscribe(started)
    caller.start()
    assert started.event.wait(60)
    began = time.monotonic()
    ray_fed.shutdown()
    caller.join(60)
    return time.monotonic() - began


@pytest.mark.parametrize("context", [*SETTINGS, ON_RAY], indirect=True)
@pytest.mark.parametrize("way", ["from a thread", "from a coroutine"])
def test_call_under_shutdown_is_a_context_state_error(
    context: ExecutionContext, way: str
) -> None:
    async def call_in_a_loop() -> None:
        context.invoke(slow_sum, CLIENTS)

    caller = Caller(
        (lambda: context.invoke(slow_sum, CLIENTS))
        if way == "from a thread"
        else lambda: asyncio.run(call_in_a_loop())
    )

    seconds = close_under(context, caller)

    assert isinstance(caller.error, errors.ContextStateError)
    assert "before `close` or `shutdown`, found one that still ran" in str(caller.error)
    assert seconds < SOON_S


def test_reference_that_is_pending_under_shutdown_is_a_context_state_error(
    context: ExecutionContext,
) -> None:
    with RayFederatedContext(context) as program:
        references = list[Any]()

        def call() -> Any:
            references.append(program.invoke(slow_sum, CLIENTS))
            references.append(program.invoke(slow_sum, CLIENTS))
            return asyncio.run(references[0].get_value())

        caller = Caller(call)
        seconds = close_under(context, caller)

    assert isinstance(caller.error, errors.ContextStateError)
    for reference in references:
        with pytest.raises(errors.ContextStateError):
            asyncio.run(reference.get_value())
    assert seconds < SOON_S


class Endless(fl.framework.AsyncContext):
    """Never answers."""

    def __init__(self) -> None:
        self.started = threading.Event()

    @override
    async def invoke(self, comp: Any, arg: Any) -> Any:
        self.started.set()
        await asyncio.sleep(3600)


def test_documented_context_that_is_closed_under_a_call() -> None:
    endless = Endless()
    context = MergeableCompExecutionContext(
        [endless], compiler_fn=compile_to_mergeable_comp_form
    )
    caller = Caller(lambda: context.invoke(slow_sum, CLIENTS))
    caller.start()
    assert endless.started.wait(30)

    context.close()
    caller.join(30)

    assert isinstance(caller.error, errors.ContextStateError)
    with pytest.raises(errors.ContextStateError):
        context.invoke(slow_sum, CLIENTS)


class Closing:
    """Shuts down as a round begins: on the thread that runs it."""

    def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.RoundStarted):
            ray_fed.shutdown()


def test_shutdown_by_a_sink_ends_its_call(context: ExecutionContext) -> None:
    context.subscribe(Closing())

    caller = Caller(lambda: context.invoke(slow_sum, CLIENTS))
    caller.start()
    caller.join(60)

    assert isinstance(caller.error, errors.ContextStateError)


def test_debugged_call_ends_before_its_next_client() -> None:
    context = ray_fed.init(config=ray_fed.Config(backend="local", debug=True))
    begun, closing = threading.Event(), threading.Event()
    clients = list[float]()

    def note(x: Any) -> Any:
        clients.append(float(x))
        begun.set()
        closing.wait(30)
        time.sleep(0.2)  # the time that `shutdown` has to cancel the call
        return x

    @rtf.computation(np.float32)
    def noted(x: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(note, [x], tf.float32), [])

    @federated_computation(AT_CLIENTS)
    def noted_sum(values: Any) -> Any:
        return fl.federated_sum(fl.federated_map(noted, values))

    caller = Caller(lambda: context.invoke(noted_sum, CLIENTS))
    caller.start()
    assert begun.wait(60)
    closing.set()
    ray_fed.shutdown()
    caller.join(60)

    assert isinstance(caller.error, errors.ContextStateError)
    assert len(clients) == 1

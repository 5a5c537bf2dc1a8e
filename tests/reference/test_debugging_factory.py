"""Claims of the debugging factory's document that no other test holds."""

# pyright: reportUnknownLambdaType=false

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed.executors.eager_tf as eager_tf
from ray_fed import tensorflow as rtf
from ray_fed.framework import (
    EagerTFExecutor,
    FederatingExecutor,
    ReferenceResolvingExecutor,
    ThreadDelegatingExecutor,
    thread_debugging_executor_factory,
)
from ray_fed.worker.stacks import LocalStrategy

flf = fl.framework
Build = Callable[..., flf.ExecutorFactory]
federated_computation = cast("Callable[..., Any]", fl.federated_computation)

AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
AT_SERVER = fl.FederatedType(np.float32, fl.SERVER)


@rtf.computation(np.float32)
def half(x: Any) -> Any:
    return x / 2


@pytest.fixture
def build() -> Iterator[Build]:
    factories: list[flf.ExecutorFactory] = []

    def make(*args: Any, **kwargs: Any) -> flf.ExecutorFactory:
        factories.append(thread_debugging_executor_factory(*args, **kwargs))
        return factories[-1]

    yield make
    for factory in factories:
        factory.clean_up_executor({})
        for number in range(8):
            factory.clean_up_executor({fl.CLIENTS: number})


def invoke(factory: flf.ExecutorFactory, comp: Any, *args: Any) -> Any:
    context = flf.AsyncExecutionContext(factory)
    packed = None if not args else args[0] if len(args) == 1 else list(args)
    return asyncio.run(context.invoke(comp, packed))


@pytest.mark.claim("debugging.01", "debugging.02")
def test_factory_has_the_documented_arguments(build: Build) -> None:
    parameters = inspect.signature(thread_debugging_executor_factory).parameters

    assert [(name, p.default) for name, p in parameters.items()] == [
        ("num_clients", None),
        ("clients_per_thread", 1),
    ]
    assert isinstance(build(), flf.ExecutorFactory)
    assert isinstance(build(2, 2), flf.ExecutorFactory)


def targets_of(executor: Any) -> list[Any]:
    """Return the executors of a stack below its FederatingExecutor, server's last."""
    assert type(executor) is ReferenceResolvingExecutor
    federating = part(executor, "_target")
    assert type(federating) is FederatingExecutor
    strategy = federating.strategy
    assert type(strategy) is LocalStrategy
    return [*part(strategy, "_targets"), federating.unplaced]


def part(owner: object, name: str) -> Any:
    return getattr(owner, name)


@pytest.mark.claim("debugging.08", "debugging.09", "debugging.10", "debugging.17")
@pytest.mark.parametrize(
    ("number", "num_clients", "clients_per_thread", "num_leaves"),
    [(None, 0, 1, 0), (5, 5, 1, 5), (None, 5, 2, 3), (4, 4, 9, 1)],
)
def test_every_stack_has_the_documented_structure(
    build: Build,
    number: int | None,
    num_clients: int,
    clients_per_thread: int,
    num_leaves: int,
) -> None:
    factory = build(number, clients_per_thread)

    targets = targets_of(factory.create_executor({fl.CLIENTS: num_clients}))

    assert len(targets) == num_leaves + 1
    assert {type(target) for target in targets} == {ThreadDelegatingExecutor}
    assert {type(part(target, "_target")) for target in targets} == {EagerTFExecutor}
    assert len({id(part(target, "_thread")) for target in targets}) == len(targets)


@pytest.mark.claim("debugging.06", "debugging.07")
@pytest.mark.parametrize("clients_per_thread", [1, 2])
def test_each_call_of_the_computation_is_one_call_of_tensorflow(
    build: Build, clients_per_thread: int
) -> None:
    calls: list[float] = []

    def note(x: Any) -> Any:
        calls.append(float(x))
        return x

    @rtf.computation(np.float32)
    def watched(x: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(note, [x], tf.float32), [])

    comp = federated_computation(
        lambda x: fl.federated_map(watched, fl.federated_map(watched, x)), AT_CLIENTS
    )
    factory = build(clients_per_thread=clients_per_thread)

    results = [invoke(factory, comp, [5.0, 5.0, 7.0]) for _ in range(2)]

    assert results == [[5.0, 5.0, 7.0]] * 2
    assert sorted(calls) == [5.0] * 8 + [7.0] * 4


@pytest.mark.claim("debugging.04")
def test_nothing_below_the_top_resolves_references(build: Build) -> None:
    number = fl.TensorType(np.float32)
    references = [
        flf.Lambda("x", number, flf.Reference("x", number)),
        flf.Block([("x", flf.Literal(1.0, number))], flf.Reference("x", number)),
    ]
    top = build().create_executor({fl.CLIENTS: 2})

    for target in targets_of(top):
        for block in references:
            with pytest.raises(ValueError, match="a ReferenceResolvingExecutor above"):
                asyncio.run(target.create_value(block))
    assert asyncio.run(asyncio.run(top.create_value(references[1])).compute()) == 1.0


@pytest.mark.claim("debugging.12")
def test_independent_parts_run_at_the_same_time_and_dependent_ones_do_not(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    meeting = threading.Barrier(2)

    class MeetingExecutor(eager_tf.EagerTFExecutor):
        @override
        async def create_call(self, comp: Any, arg: Any = None) -> Any:
            value = float(arg.reference)
            if value in (1.0, 100.0):  # the first client's and the server's work
                meeting.wait(20)
            result = await super().create_call(comp, arg)
            order.append(f"{value} -> {float(result.reference)}")
            return result

    monkeypatch.setattr(eager_tf, "EagerTFExecutor", MeetingExecutor)

    @federated_computation(AT_CLIENTS, AT_SERVER)
    def work(clients: Any, server: Any) -> Any:
        halves = fl.federated_map(half, fl.federated_map(half, clients))
        return halves, fl.federated_map(half, server)

    result = invoke(build(), work, [1.0], 100.0)

    assert result == ([0.25], 50.0)
    assert order.index("1.0 -> 0.5") < order.index("0.5 -> 0.25")


@pytest.mark.claim("semantics.62")
def test_stack_does_not_follow_cardinalities_that_change_later(build: Build) -> None:
    factory = build()
    cardinalities: Any = {fl.CLIENTS: 2}
    executor = factory.create_executor(cardinalities)

    cardinalities[fl.CLIENTS] = 5

    assert factory.create_executor({fl.CLIENTS: 2}) is executor
    assert len(targets_of(factory.create_executor(cardinalities))) == 6
    assert len(targets_of(executor)) == 3

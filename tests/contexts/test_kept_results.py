"""Calls whose results stay where they were made, and travel on as arguments."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.values import components
from ray_fed.values.stored import Stored

import tensorflow as tf  # isort: skip

STATE = fl.StructType(
    [("model", fl.TensorType(np.float32, [40_000])), ("count", fl.TensorType(np.int32))]
)
AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)


@rtf.computation(STATE, np.float32)
def client_work(state: Any, x: Any) -> Any:
    return state["model"] * 0.5 + x


@rtf.computation(STATE, fl.TensorType(np.float32, [40_000]))
def server_work(state: Any, mean: Any) -> Any:
    return {"model": mean, "count": state["count"] + 1}


@rtf.computation(STATE)
def largest(state: Any) -> Any:
    return tf.reduce_max(state["model"])


@fl.federated_computation(fl.FederatedType(STATE, fl.SERVER), AT_CLIENTS)
def one_round(state: Any, data: Any) -> Any:
    updates = fl.federated_map(client_work, (fl.federated_broadcast(state), data))
    new_state = fl.federated_map(server_work, (state, fl.federated_mean(updates)))
    return new_state, fl.federated_map(largest, new_state)


@fl.federated_computation(fl.FederatedType(STATE, fl.SERVER))
def only_server(state: Any) -> Any:
    return fl.federated_map(largest, state), state


@rtf.computation(np.float32, np.float32)
def squared_distance(x: Any, mean: Any) -> Any:
    return (x - mean) ** 2


@fl.federated_computation(fl.FederatedType(np.float32, fl.SERVER), AT_CLIENTS)
def spread(start: Any, data: Any) -> Any:
    """One mean is taken over another."""
    mean = fl.federated_broadcast(fl.federated_mean(data))
    distances = fl.federated_map(squared_distance, (data, mean))
    return fl.federated_mean(distances), start


@pytest.fixture
def context(local_contexts: Any) -> ExecutionContext:
    return local_contexts(workers=2)


def start(context: ExecutionContext, comp: Any, arg: Any) -> list[Any]:
    """Run a computation on a plain argument and return its parts as they are kept."""
    delivered: list[Any] = []

    async def prepare() -> Any:
        return arg

    context.start(comp, prepare, delivered.extend).result(60)
    return delivered


def fetch(context: ExecutionContext, comp: Any, held: list[Any]) -> Any:
    type_spec = comp.type_signature.result
    fetched = [context.fetch(part).result(60) for part in held]
    return plain_values.from_plain(components.join(fetched, type_spec), type_spec)


MODEL = np.linspace(-1, 1, 40_000, dtype=np.float32)


def test_kept_state_gives_the_bits_of_one_passed_by_value(
    context: ExecutionContext,
) -> None:
    clients = [[0.5, 1.0, -2.0], [3.0, 4.0, 7.0]]
    state: Any = {"model": MODEL, "count": 3}
    top: Any = None
    for values in clients:
        state, top = context.invoke(one_round, (state, values))

    held: list[Any] = [MODEL, np.int32(3), None]
    for values in clients:
        held = start(context, one_round, ((held[0], held[1]), values))
    kept, kept_top = fetch(context, one_round, held)

    assert kept["model"].tobytes() == state["model"].tobytes()
    assert (kept["count"], kept_top) == (5, top)


@pytest.mark.ray
@pytest.mark.slow
def test_every_part_on_ray_stays_stored(ray_contexts: Any) -> None:
    held = start(ray_contexts(workers=2), one_round, ((MODEL, np.int32(0)), [1.0, 2.0]))

    assert [type(part) for part in held] == [Stored] * 3


def test_parts_without_any_client(context: ExecutionContext) -> None:
    held = start(context, only_server, (MODEL, np.int32(9)))

    top, state = fetch(context, only_server, held)

    assert (top, state["count"]) == (1.0, 9)
    np.testing.assert_array_equal(state["model"], MODEL)


def test_parts_of_aggregations_that_depend_on_one_another(
    context: ExecutionContext,
) -> None:
    held = start(context, spread, (np.float32(8.0), [1.0, 2.0, 3.0, 6.0]))
    again = start(context, spread, (held[1], [5.0]))

    assert fetch(context, spread, held) == (3.5, 8.0)
    assert fetch(context, spread, again) == (0.0, 8.0)


@fl.federated_computation(fl.FederatedType(np.str_, fl.SERVER), AT_CLIENTS)
def text_and_sum(text: Any, data: Any) -> Any:
    return text, fl.federated_sum(data)


@pytest.mark.parametrize("length", [3, 100_000])
def test_text_of_any_length_is_kept(context: ExecutionContext, length: int) -> None:
    text = b"x" * length

    held = start(context, text_and_sum, (text, [1.0, 2.0]))
    again = start(context, text_and_sum, (held[0], [3.0]))

    assert fetch(context, text_and_sum, held) == (text, 3.0)
    assert fetch(context, text_and_sum, again) == (text, 3.0)
    assert context.invoke(text_and_sum, (text, [5.0])) == (text, 5.0)


def test_result_without_parts(context: ExecutionContext) -> None:
    @fl.federated_computation
    def nothing() -> Any:
        return ()

    assert start(context, nothing, None) == []


def test_failure_is_that_of_a_plain_call(context: ExecutionContext) -> None:
    @rtf.computation(np.float32)
    def fail(x: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_less(x, 2.0)]):
            return tf.identity(x)

    @fl.federated_computation(AT_CLIENTS)
    def total(values: Any) -> Any:
        return fl.federated_sum(fl.federated_map(fail, values))

    with pytest.raises(errors.ComputationError, match="client at position 1"):
        start(context, total, [1.0, 5.0])


def test_calls_are_numbered_as_they_are_made(context: ExecutionContext) -> None:
    before = context.num_calls

    context.invoke(spread, (0.0, [1.0]))
    start(context, spread, (0.0, [1.0]))

    assert context.num_calls == before + 2


def test_resumed_context_draws_what_the_first_one_drew(
    context: ExecutionContext,
) -> None:
    @rtf.computation
    def draw() -> Any:
        return tf.random.uniform([])

    first = [context.invoke(draw) for _ in range(3)]
    context.resume_at(context.num_calls - 1)

    assert context.invoke(draw) == first[2]
    assert len(set(first)) == 3


def test_closed_context_starts_nothing(context: ExecutionContext) -> None:
    context.close()

    with pytest.raises(errors.ContextStateError, match="closed"):
        start(context, only_server, None)
    with pytest.raises(errors.ContextStateError, match="closed"):
        context.fetch(1)

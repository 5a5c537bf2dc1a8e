"""Calls whose results stay where they were made, and travel on as arguments."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed.values.plain_values as plain_values
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.values import components

import tensorflow as tf  # isort: skip


AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)


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

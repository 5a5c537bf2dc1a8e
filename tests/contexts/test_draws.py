"""Random client work: the same bits again, other bits for whatever should differ."""

import asyncio
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.executors.eager_tf import EagerTFExecutor
from ray_fed.observability import events
from ray_fed.plan.random_keys import DrawKey, using
from ray_fed.worker.stacks import local_stack
from tests.fixtures import EACH_BACKEND, ContextFactory, Seen, report_of

SEQUENCE = fl.SequenceType(np.int32)


@rtf.computation
def uniform() -> Any:
    return tf.random.uniform([4])


@rtf.computation
def normal() -> Any:
    return tf.random.normal([4])


@rtf.computation
def truncated() -> Any:
    return tf.random.truncated_normal([4])


@rtf.computation
def integers() -> Any:
    return tf.random.uniform([4], maxval=1_000_000, dtype=tf.int32)


@rtf.computation
def categorical() -> Any:
    return tf.random.categorical(tf.zeros([1, 1000]), 8)


@rtf.computation
def shuffled() -> Any:
    return tf.random.shuffle(tf.range(20))


@rtf.computation
def shuffled_dataset() -> Any:
    dataset = tf.data.Dataset.range(20).shuffle(20)
    return dataset.batch(20).get_single_element()


@rtf.computation
def in_a_loop() -> Any:
    total = tf.zeros([4])
    for _ in tf.range(3):
        total += tf.random.normal([4])
    return total


@rtf.computation
def not_deterministic() -> Any:
    return tf.raw_ops.NonDeterministicInts(shape=[4])


@rtf.computation
def random_variable() -> Any:
    variable = tf.Variable(tf.random.normal([4]))
    return variable.read_value()


ALL = [
    uniform, normal, truncated, integers, categorical, shuffled, shuffled_dataset,
    in_a_loop, not_deterministic, random_variable,
]  # fmt: skip
NAMES = [
    "uniform", "normal", "truncated", "integers", "categorical", "shuffle",
    "dataset shuffle", "loop", "not deterministic", "variable",
]  # fmt: skip


def at_clients(work: Any) -> Any:
    @fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
    def draw(clients: Any) -> Any:
        del clients
        return fl.federated_eval(work, fl.CLIENTS)

    return draw


def draws(context: ExecutionContext, comp: Any, num_clients: int = 3) -> list[bytes]:
    result = context.invoke(comp, list(range(num_clients)))
    return [np.asarray(value).tobytes() for value in result]


@pytest.mark.parametrize("work", ALL, ids=NAMES)
def test_draws_are_the_same_again_and_differ_by_client_and_call(
    local_contexts: ContextFactory, work: Any
) -> None:
    comp = at_clients(work)
    first, second = (local_contexts(workers=2, subrounds=2) for _ in range(2))

    calls = [draws(first, comp), draws(first, comp)]

    assert [draws(second, comp), draws(second, comp)] == calls
    assert len({*calls[0], *calls[1]}) == 6


def test_seed_decides_the_draws(local_contexts: ContextFactory) -> None:
    comp = at_clients(normal)

    zero, one = (draws(local_contexts(workers=1, seed=s), comp) for s in (0, 1))

    assert not set(zero) & set(one)


def test_draws_do_not_depend_on_who_asks_for_a_local_first() -> None:
    executor = local_stack(0, [EagerTFExecutor()], EagerTFExecutor())
    drawn = fl.framework.Reference("drawn", fl.TensorType(np.float32, [4]))
    call = fl.framework.Call(normal.to_building_block())
    nested = fl.framework.Block([("drawn", call), ("later", drawn)], drawn)
    asked_by_another = fl.framework.Block(
        [("drawn", call), ("later", drawn)],
        fl.framework.Reference("later", drawn.type_signature),
    )

    async def evaluate(block: Any) -> bytes:
        with using(DrawKey(seed=0, invocation=0)):
            value = await executor.create_value(block)
            return np.asarray(await value.compute()).tobytes()

    assert asyncio.run(evaluate(nested)) == asyncio.run(evaluate(asked_by_another))


@rtf.computation
def sampled() -> Any:
    return tf.random.log_uniform_candidate_sampler(
        tf.constant([[1]], tf.int64), 1, 4, unique=True, range_max=50, name="sample"
    )[0]


SETTINGS = {"workers": 2, "subrounds": 3}
"""Of what `build` builds."""


@EACH_BACKEND
def test_ops_without_a_key_are_told_once_a_round(build: ContextFactory) -> None:
    context, seen = build(), Seen()
    context.subscribe(seen)
    comp = at_clients(sampled)
    for _ in range(2):
        draws(context, comp, 5)
    report = report_of(context)
    draws(context, at_clients(normal))

    told = [
        event
        for event in seen
        if isinstance(event, events.RandomOpsUnkeyed | events.RoundFinished)
    ]
    kinds = [type(event).__name__ for event in told]
    assert kinds == ["RandomOpsUnkeyed", "RoundFinished"] * 2 + ["RoundFinished"]
    noted = [e for e in told if isinstance(e, events.RandomOpsUnkeyed)]
    assert [event.round_index for event in noted] == [0, 1]
    assert {event.ops for event in noted} == {("sample (LogUniformCandidateSampler)",)}
    assert noted[0].computation.startswith("the computation `sampled` (test_draws.py:")
    assert report is not None
    assert report.unkeyed_ops == (
        f"{noted[0].computation}: sample (LogUniformCandidateSampler)",
    )
    assert report_of(context).unkeyed_ops == ()


def trace_named_work(suffix: str) -> Any:
    """Trace a round of work whose ops, functions and variables have counted names.

    Args:
        suffix: of a name that the work gives itself.
    """

    @tf.function
    def noisy(x: Any) -> Any:
        return x + tf.random.normal([])

    @tf.custom_gradient
    def doubled(x: Any) -> Any:
        def double(upstream: Any) -> Any:
            return 2 * upstream

        return 2 * x, double

    @rtf.computation(np.float32, SEQUENCE)
    def work(x: Any, numbers: Any) -> Any:
        def draw(number: Any) -> Any:
            return tf.random.uniform([]) + tf.cast(number, tf.float32)

        total = numbers.map(draw).reduce(0.0, tf.add)
        variable = tf.Variable(noisy(doubled(x)), name=f"held_{suffix}")
        return total, variable + tf.random.uniform([], name=f"last_{suffix}")

    @fl.federated_computation(
        fl.FederatedType(np.float32, fl.CLIENTS), fl.FederatedType(SEQUENCE, fl.CLIENTS)
    )
    def total(values: Any, numbers: Any) -> Any:
        return fl.federated_sum(fl.federated_map(work, (values, numbers)))

    return total


@pytest.mark.parametrize("enabled", [True, False], ids=["kernels", "interpreter"])
def test_draws_are_those_of_the_code_whatever_was_traced_before(
    local_contexts: ContextFactory, *, enabled: bool
) -> None:
    def run(computation: Any) -> list[float]:
        context = local_contexts(seed=5, workers=1, kernels={"enabled": enabled})
        return [float(part) for part in context.invoke(computation, arguments)]

    arguments = ([1.0, 2.0], [[1, 2, 3], [4]])
    first = run(trace_named_work("once"))
    later = run(trace_named_work("again"))

    assert first == later
    assert len({number % 1 for number in first}) == 2  # they drew

"""Forms of computations: compiled and cut, or interpreted whole, the bits are equal.

Those of several parts: `contexts/test_cases` has each intrinsic by itself. Each runs
directly through a federating stack over the whole cohort, and compiled in 1, 2, 3 and 7
subrounds. The merge tree is the same, so the results are, too.
"""

# pyright: reportUnknownLambdaType=false

import collections
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed
import ray_fed.worker.stacks as stacks
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext
from tests.executor_calls import evaluate

federated_computation = cast("Callable[..., Any]", fl.federated_computation)

NUM_CLIENTS = 9


class State(NamedTuple):
    z: Any
    a: Any


class Update(NamedTuple):
    delta: Any
    weight: Any


VECTOR = fl.TensorType(np.float32, [2])
MODEL = collections.OrderedDict(w=VECTOR, b=np.float32)
FLOATS = fl.FederatedType(np.float32, fl.CLIENTS)
INTS = fl.FederatedType(np.int32, fl.CLIENTS)


DATA = fl.FederatedType(fl.SequenceType(np.float32), fl.CLIENTS)
STATES = fl.FederatedType(State(np.float32, np.int32), fl.CLIENTS)
ALL_EQUAL = fl.FederatedType(np.float32, fl.CLIENTS, all_equal=True)
SERVER_FLOAT = fl.FederatedType(np.float32, fl.SERVER)
SERVER_MODEL = fl.FederatedType(MODEL, fl.SERVER)
SERVER_STATE = fl.FederatedType(State(np.float32, np.int32), fl.SERVER)
KEYS = fl.FederatedType(fl.TensorType(np.int32, [2]), fl.CLIENTS)


def tf_computation(*types: Any) -> Callable[[Callable[..., Any]], Any]:
    return cast("Any", rtf.computation)(*types)


add = tf_computation(np.float32, np.float32)(lambda x, y: x + y)
subtract = tf_computation(np.float32, np.float32)(lambda x, y: x - y)
scale = tf_computation(np.float32)(lambda x: x * np.float32(1.1))
halve = tf_computation(np.float32)(lambda x: x / 2)
square = tf_computation(np.float32)(lambda x: x * x)


one = tf_computation()(lambda: np.float32(1))
three = tf_computation()(lambda: np.float32(3))


above = tf_computation(np.float32, np.float32)(lambda x, y: tf.cast(x > y, tf.float32))
total_of = tf_computation(fl.SequenceType(np.float32))(
    lambda data: data.reduce(np.float32(0), lambda x, y: x + y)
)
step = tf_computation(MODEL, fl.SequenceType(np.float32))(
    lambda model, data: Update(
        collections.OrderedDict(
            w=model["w"] + data.reduce(np.float32(0), lambda x, y: x + y),
            b=model["b"] * np.float32(0.9),
        ),
        data.reduce(np.float32(1), lambda n, _: n + 1),
    )
)
to_state = tf_computation(np.float32)(lambda x: State(x, tf.cast(x, tf.int32)))
next_state = tf_computation(State(np.float32, np.int32))(
    lambda state: State(state.z * 2, state.a + 1)
)
pick = tf_computation(fl.TensorType(np.float32, [4]), np.int32)(lambda t, k: t[k])
first_of = tf_computation(fl.SequenceType(np.float32))(
    lambda picked: picked.reduce(np.float32(0), lambda x, y: 2 * x + y)
)
to_vector = tf_computation(np.float32)(lambda x: tf.stack([x, x * x]))
mean_of = tf_computation(np.float32, np.float32)(lambda s, n: s / n)
counted = tf_computation(fl.StructType([np.float32, np.float32]), np.float32)(
    lambda acc, x: [acc[0] + x, acc[1] + 1]
)
merged = tf_computation(
    fl.StructType([np.float32, np.float32]), fl.StructType([np.float32, np.float32])
)(lambda x, y: [x[0] + y[0], x[1] + y[1]])
quotient = tf_computation(fl.StructType([np.float32, np.float32]))(
    lambda acc: acc[0] / acc[1]
)


@federated_computation(DATA)
def clipped_totals(data: Any) -> Any:
    """Both stages, and the result, need the totals and what is made of them."""
    totals = fl.federated_map(total_of, data)
    vectors = fl.federated_map(to_vector, totals)
    bound = fl.federated_broadcast(fl.federated_mean(totals))
    share = fl.federated_mean(fl.federated_map(above, (totals, bound)))
    return share, fl.federated_sum(vectors), vectors


@federated_computation(SERVER_MODEL, DATA)
def fed_avg_by_rounds(model: Any, data: Any) -> Any:
    """Structs that are kept; a part of them is aggregated in each of three stages."""
    updates = fl.federated_map(step, (fl.federated_broadcast(model), data))
    most = fl.federated_broadcast(fl.federated_max(updates.weight))
    heavy = fl.federated_map(above, (updates.weight, most))
    count = fl.federated_broadcast(fl.federated_sum(heavy))
    weights = fl.federated_map(add, (updates.weight, count))
    return fl.federated_mean(updates.delta, weights), fl.federated_max(weights)


def own_mean(values: Any) -> Any:
    zero = [np.float32(0), np.float32(0)]
    return fl.federated_aggregate(values, zero, counted, merged, quotient)


@federated_computation(FLOATS)
def deviation(values: Any) -> Any:
    mean = fl.federated_broadcast(fl.federated_mean(values))
    distances = fl.federated_map(subtract, (values, mean))
    return fl.federated_mean(fl.federated_map(square, distances))


@federated_computation(FLOATS)
def count_above_clipped(values: Any) -> Any:
    bound = fl.federated_broadcast(fl.federated_mean(values))
    share = fl.federated_mean(fl.federated_map(above, (values, bound)))
    again = fl.federated_map(above, (values, fl.federated_broadcast(share)))
    return fl.federated_sum(again), share


@federated_computation(SERVER_MODEL, DATA)
def fed_avg(model: Any, data: Any) -> Any:
    updates = fl.federated_map(step, (fl.federated_broadcast(model), data))
    mean = fl.federated_mean(updates.delta, updates.weight)
    return mean, fl.federated_sum(updates.weight)


@federated_computation(FLOATS)
def of_constants(values: Any) -> Any:
    """TensorFlow would make products with reciprocals of these quotients."""

    @federated_computation(np.float32)
    def thirds(x: Any) -> Any:
        return mean_of(mean_of(x, np.float32(3)), three())

    return fl.federated_sum(fl.federated_map(thirds, values))


@federated_computation(SERVER_STATE, STATES)
def states_on_both_sides(server: Any, clients: Any) -> Any:
    at_clients = fl.federated_map(next_state, clients)
    return State(
        z=fl.federated_map(next_state, server),
        a=collections.OrderedDict(
            clients=at_clients, total=fl.federated_sum(at_clients.a)
        ),
    )


@federated_computation(FLOATS)
def twice_the_sum(values: Any) -> Any:
    total = fl.federated_sum(values)
    return fl.federated_map(add, (total, total))


@federated_computation(FLOATS)
def extremes(values: Any) -> Any:
    scaled = fl.federated_map(scale, values)
    return fl.federated_min(scaled), fl.federated_max(scaled)


@federated_computation(DATA)
def sequences(data: Any) -> Any:
    return fl.federated_map(
        federated_computation(fl.SequenceType(np.float32))(
            lambda s: fl.sequence_sum(fl.sequence_map(scale, s))
        ),
        data,
    )


@federated_computation(
    KEYS, fl.FederatedType(fl.TensorType(np.float32, [4]), fl.SERVER)
)
def selected(keys: Any, table: Any) -> Any:
    largest = fl.federated_value(3, fl.SERVER)
    picked = fl.federated_select(keys, largest, table, pick)
    return fl.federated_sum(fl.federated_map(first_of, picked))


def program(*types: Any) -> Callable[[Callable[..., Any]], Any]:
    return federated_computation(*types)


RANDOM = np.random.default_rng(1)
SOME_FLOATS = [np.float32(x) for x in RANDOM.normal(size=NUM_CLIENTS)]
SOME_INTS = [np.int32(i * 3 % 7) for i in range(NUM_CLIENTS)]
SOME_DATA = [[np.float32(x) for x in range(i)] for i in range(NUM_CLIENTS)]
SOME_STATES = [State(np.float32(i), np.int32(i)) for i in range(NUM_CLIENTS)]


A_MODEL = collections.OrderedDict(w=np.ones(2, np.float32), b=np.float32(3))
SOME_KEYS = [np.array([i % 4, 3 - i % 4], np.int32) for i in range(NUM_CLIENTS)]
TABLE = np.array([1, 10, 100, 1000], np.float32)

FORMS: dict[str, tuple[Any, list[Any]]] = {
    "aggregate of a map": (
        program(FLOATS)(lambda x: own_mean(fl.federated_map(scale, x))),
        [SOME_FLOATS],
    ),
    "select": (selected, [SOME_KEYS, TABLE]),
    "map before and after": (
        program(FLOATS)(
            lambda x: fl.federated_map(
                halve, fl.federated_sum(fl.federated_map(scale, x))
            )
        ),
        [SOME_FLOATS],
    ),
    "broadcast inside": (
        program(SERVER_FLOAT, FLOATS)(
            lambda s, x: fl.federated_sum(
                fl.federated_map(add, (fl.federated_broadcast(s), x))
            )
        ),
        [np.float32(3), SOME_FLOATS],
    ),
    "all equal argument": (
        program(ALL_EQUAL, FLOATS)(
            lambda s, x: fl.federated_sum(fl.federated_map(add, (s, x)))
        ),
        [np.float32(3), SOME_FLOATS],
    ),
    "all equal result": (
        program(FLOATS)(lambda x: fl.federated_broadcast(fl.federated_sum(x))),
        [SOME_FLOATS],
    ),
    "several aggregations": (
        program(FLOATS, INTS)(
            lambda x, n: [
                fl.federated_mean(x),
                fl.federated_max(n),
                fl.federated_sum(x),
            ]
        ),
        [SOME_FLOATS, SOME_INTS],
    ),
    "one aggregation used twice": (twice_the_sum, [SOME_FLOATS]),
    "one map aggregated twice": (extremes, [SOME_FLOATS]),
    "sequences": (sequences, [SOME_DATA]),
    "federated averaging": (fed_avg, [A_MODEL, SOME_DATA]),
    "states on both sides": (
        states_on_both_sides,
        [State(np.float32(1), np.int32(2)), SOME_STATES],
    ),
    "containers kept": (
        program(FLOATS)(lambda x: State(z=fl.federated_sum(x), a=[x, {"k": x}])),
        [SOME_FLOATS],
    ),
    "clients only": (
        program(FLOATS)(lambda x: fl.federated_map(to_state, x)),
        [SOME_FLOATS],
    ),
    "server unchanged": (program(SERVER_MODEL)(lambda m: m), [A_MODEL]),
    "zip of clients and result": (
        program(FLOATS)(
            lambda x: fl.federated_zip((x, fl.federated_broadcast(fl.federated_sum(x))))
        ),
        [SOME_FLOATS],
    ),
    "apply after": (
        program(FLOATS)(lambda x: fl.federated_map(to_vector, fl.federated_sum(x))),
        [SOME_FLOATS],
    ),
    "two servers' zip": (
        program(FLOATS)(
            lambda x: fl.federated_map(
                mean_of, (fl.federated_sum(x), fl.federated_max(x))
            )
        ),
        [SOME_FLOATS],
    ),
    "empty struct": (
        program(FLOATS)(lambda x: (fl.federated_sum(x), ())),
        [SOME_FLOATS],
    ),
    "nested argument": (
        program(collections.OrderedDict(a=[FLOATS, SERVER_FLOAT], b=INTS))(
            lambda arg: (fl.federated_sum(arg["a"][0]), arg["a"][1], arg["b"])
        ),
        [collections.OrderedDict(a=[SOME_FLOATS, np.float32(2)], b=SOME_INTS)],
    ),
    "deviation: two stages": (deviation, [SOME_FLOATS]),
    "three stages": (count_above_clipped, [SOME_FLOATS]),
    "stage beside a stage": (
        program(FLOATS)(lambda x: (deviation(x), fl.federated_max(x), x)),
        [SOME_FLOATS],
    ),
    "kept: totals": (clipped_totals, [SOME_DATA]),
    "kept: structs": (fed_avg_by_rounds, [A_MODEL, SOME_DATA]),
    "kept: work without an argument": (
        program()(
            lambda: deviation(
                fl.federated_map(scale, fl.federated_eval(one, fl.CLIENTS))
            )
        ),
        [],
    ),
    "loss of a loss": (
        program(FLOATS)(
            lambda x: fl.federated_sum(
                fl.federated_map(add, (x, fl.federated_broadcast(fl.federated_sum(x))))
            )
        ),
        [SOME_FLOATS],
    ),
}
FORMS["of constants"] = (of_constants, [SOME_FLOATS])
NAMES = list(FORMS)

F, N = np.array(SOME_FLOATS, np.float64), NUM_CLIENTS
WEIGHTS = np.arange(1, N + 1)
TOTALS = np.array([sum(data) for data in SOME_DATA], np.float64)
PICKED = [2 * TABLE[first] + TABLE[second] for first, second in SOME_KEYS]


MEAN_DELTA = [np.full(2, np.average(1 + TOTALS, weights=WEIGHTS)), 2.7]
BY_NUMPY: dict[str, list[Any]] = {
    "aggregate of a map": [1.1 * F.mean()],
    "select": [sum(PICKED)],
    "map before and after": [0.55 * F.sum()],
    "broadcast inside": [(F + 3).sum()],
    "all equal argument": [(F + 3).sum()],
    "all equal result": [F.sum()],
    "several aggregations": [F.mean(), max(SOME_INTS), F.sum()],
    "one aggregation used twice": [2 * F.sum()],
    "one map aggregated twice": [1.1 * F.min(), 1.1 * F.max()],
    "sequences": [*(1.1 * TOTALS)],
    "federated averaging": [*MEAN_DELTA, WEIGHTS.sum()],
    "states on both sides": [
        2, 3, *(part for i in range(N) for part in (2 * i, i + 1)), WEIGHTS.sum(),
    ],
    "containers kept": [F.sum(), *F, *F],
    "clients only": [part for x in F for part in (x, np.trunc(x))],
    "server unchanged": [np.ones(2), 3],
    "zip of clients and result": [part for x in F for part in (x, F.sum())],
    "apply after": [[F.sum(), F.sum() ** 2]],
    "two servers' zip": [F.sum() / F.max()],
    "empty struct": [F.sum()],
    "nested argument": [F.sum(), 2, *SOME_INTS],
    "deviation: two stages": [F.var()],
    "three stages": [(np.mean(F.mean() < F) < F).sum(), np.mean(F.mean() < F)],
    "stage beside a stage": [F.var(), F.max(), *F],
    "kept: totals": [
        np.mean(TOTALS.mean() < TOTALS), [TOTALS.sum(), (TOTALS**2).sum()],
        *([total, total**2] for total in TOTALS),
    ],
    "kept: structs": [*MEAN_DELTA, N],
    "kept: work without an argument": [0],
    "loss of a loss": [(F + F.sum()).sum()],
    "of constants": [(F / 9).sum()],
}  # fmt: skip
"""The tensors of each result, in order, by numpy alone."""


@pytest.fixture(scope="module")
def direct() -> Iterator[Callable[[Any, list[Any]], Any]]:
    """Runs a computation through a federating stack, neither compiled nor cut."""
    leaves = stacks.threaded_stacks(2)
    executor = stacks.local_stack(NUM_CLIENTS, leaves, leaves[0])

    yield lambda comp, args: evaluate(executor, comp, *args)
    executor.close()
    for leaf in leaves:
        leaf.close()


@pytest.fixture(scope="module")
def contexts() -> Iterator[list[ExecutionContext]]:
    """Contexts that cut a round into 1, 2, 3 and 7 subrounds.

    Between stages two of these keep nothing, and what some of the clients did.
    """
    some = ray_fed.Config().kept_bytes
    built = [
        ray_fed.create_context(
            ray_fed.Config(
                backend="local",
                workers=2,
                subrounds=count,
                default_num_clients=NUM_CLIENTS,
                kept_bytes=kept_bytes,
            )
        )
        for count, kept_bytes in [(1, some), (2, 0), (3, 40), (7, some)]
    ]
    yield built
    for context in built:
        context.close()


@pytest.mark.parametrize("name", NAMES)
def test_compiled_form_equals_direct_interpretation(
    direct: Callable[[Any, list[Any]], Any], contexts: list[ExecutionContext], name: str
) -> None:
    comp, args = FORMS[name]
    arg = args[0] if len(args) == 1 else args or None

    results = [context.invoke(comp, arg) for context in contexts]

    expected = direct(comp, args)
    for result in results:
        assert_same(result, expected)
    for found, wanted in zip(tensors_of(expected), BY_NUMPY[name], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def tensors_of(value: Any) -> list[Any]:
    """Return the tensors of a result, in the order of its type."""
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, list | tuple):
        parts = cast("list[Any]", value)
        return [tensor for part in parts for tensor in tensors_of(part)]
    return [value]


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(cast("Any", expected))
        found, expected = list(found.values()), list(cast("Any", expected).values())
    if isinstance(expected, list | tuple):
        assert len(found) == len(cast("Any", expected))
        for left, right in zip(found, cast("Any", expected), strict=True):
            assert_same(left, right)
        return
    assert np.asarray(found).dtype == np.asarray(expected).dtype
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()

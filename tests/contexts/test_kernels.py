"""Client work in kernels: the interpreter's bits, its errors, and when it steps in."""

import importlib
from collections.abc import Sequence
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.tensorflow.kernels.client_batches as client_batches
import ray_fed.tensorflow.kernels.client_kernel as client_kernel
import ray_fed.tensorflow.kernels.server_kernels as server_kernels
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.observability import events
from ray_fed.plan import diagnostics
from tests.fixtures import ContextFactory, Seen, report_of
from tests.result_bits import bits
from tests.stages import summed

stats: Any = importlib.import_module("scipy.stats")

NUM_CLIENTS = 7
VECTOR = fl.TensorType(np.float32, [3])
ROWS = fl.TensorType(np.float32, [None, 3])
BATCH = fl.StructType([("x", ROWS), ("y", fl.TensorType(np.int32, [None]))])
STATE = fl.StructType([("w", VECTOR), ("b", np.float32)])


def at_clients(member: Any) -> fl.FederatedType:
    return fl.FederatedType(member, fl.CLIENTS)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def vectors() -> list[Any]:
    return list(rng().normal(size=(NUM_CLIENTS, 3)).astype(np.float32))


def batches(sizes: Sequence[int]) -> list[Any]:
    generator = rng()
    return [
        {
            "x": generator.normal(size=(size, 3)).astype(np.float32),
            "y": generator.integers(0, 5, size).astype(np.int32),
        }
        for size in sizes
    ]


RAGGED = [batches([4, 4, index % 4]) for index in range(NUM_CLIENTS)]


@rtf.computation(VECTOR)
def scale(x: Any) -> Any:
    return x * 3.0, tf.reduce_sum(x)


@rtf.computation(VECTOR)
def with_variable(x: Any) -> Any:
    variable = tf.Variable(tf.zeros([3]))
    variable.assign_add(x)
    variable.assign_add(variable * x)
    return variable.read_value()


@rtf.computation(VECTOR)
def with_table(x: Any) -> Any:
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a"], [2.0]), 1.0
    )
    return x * table.lookup(tf.constant("a"))


@rtf.computation(VECTOR)
def random_initial(x: Any) -> Any:
    variable = tf.Variable(tf.random.normal([3]))
    return x + variable + tf.random.uniform([3])


@rtf.computation(VECTOR)
def random_in_loop(x: Any) -> Any:
    for _ in tf.range(3):
        x += tf.random.normal([3])
    return x


@rtf.computation(fl.SequenceType(BATCH))
def reduce_batches(dataset: Any) -> Any:
    def add(total: Any, batch: Any) -> Any:
        weights, count = total
        step = tf.reduce_sum(batch["x"], 0) + tf.cast(
            tf.reduce_sum(batch["y"]), tf.float32
        )
        return weights * 0.5 + step, count + tf.shape(batch["x"])[0]

    return dataset.reduce((tf.zeros([3]), 0), add)


@rtf.computation(fl.SequenceType(VECTOR))
def random_over_sequence(dataset: Any) -> Any:
    def add(total: Any, x: Any) -> Any:
        return total + x * tf.random.normal([3])

    return dataset.reduce(tf.zeros([3]), add)


@rtf.computation(fl.SequenceType(VECTOR))
def over_shuffled(dataset: Any) -> Any:
    def add(total: Any, x: Any) -> Any:
        return 2 * total + x

    return dataset.shuffle(3).reduce(tf.zeros([3]), add)


@rtf.computation(STATE, fl.SequenceType(BATCH))
def train(state: Any, dataset: Any) -> Any:
    weights = tf.Variable(state["w"])
    for batch in dataset:
        error = (
            tf.linalg.matvec(batch["x"], weights)
            + state["b"]
            - tf.cast(batch["y"], tf.float32)
        )
        weights.assign_sub(0.1 * tf.linalg.matvec(batch["x"], error, transpose_a=True))
    return weights - state["w"]


@rtf.computation(np.str_)
def length_of_text(text: Any) -> Any:
    return tf.strings.length(text)


@rtf.computation(fl.TensorType(np.int32, [None]))
def total(x: Any) -> Any:
    return tf.reduce_sum(x)


@rtf.computation
def draw() -> Any:
    return tf.random.normal([3])


@fl.federated_computation(
    fl.FederatedType(STATE, fl.SERVER), at_clients(fl.SequenceType(BATCH))
)
def train_round(state: Any, data: Any) -> Any:
    sent = fl.federated_broadcast(state)
    return fl.federated_mean(fl.federated_map(train, (sent, data)))


@fl.federated_computation(np.float32, at_clients(VECTOR), at_clients(np.float32))
def weighted_and_bounds(factor: Any, values: Any, weights: Any) -> Any:
    @fl.federated_computation(VECTOR)
    def pair(x: Any) -> Any:
        return x, factor

    pairs = fl.federated_map(pair, values)
    return (
        fl.federated_mean(values, weights),
        fl.federated_min(weights),
        fl.federated_max(values),
        fl.federated_sum(pairs),
    )


@fl.federated_computation(at_clients(np.int32))
def drawing(data: Any) -> Any:
    drawn = fl.federated_eval(draw, fl.CLIENTS)
    again = fl.federated_eval(draw, fl.CLIENTS)
    return fl.federated_sum(drawn), fl.federated_sum(again), fl.federated_sum(data)


@rtf.computation(VECTOR, VECTOR)
def add_noisily(total: Any, x: Any) -> Any:
    return total + x * tf.random.normal([3])


@rtf.computation(VECTOR, VECTOR)
def add(total: Any, x: Any) -> Any:
    return total + x


@rtf.computation(VECTOR)
def add_half(x: Any) -> Any:
    return x + 0.5


@fl.federated_computation(at_clients(VECTOR))
def noisy_accumulation(data: Any) -> Any:
    zero = np.zeros(3, np.float32)
    return fl.federated_aggregate(data, zero, add_noisily, add, add_half)


STATE_VALUE = {"w": np.ones(3, np.float32), "b": np.float32(0.5)}
WEIGHTS = [np.float32(index) for index in range(1, NUM_CLIENTS + 1)]
CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "tensors": (summed(scale), (vectors(),)),
    "variable": (summed(with_variable), (vectors(),)),
    "table": (summed(with_table), (vectors(),)),
    "random initial value": (summed(random_initial), (vectors(),)),
    "random loop": (summed(random_in_loop), (vectors(),)),
    "ragged batches": (summed(reduce_batches), (RAGGED,)),
    "random over a sequence": (
        summed(random_over_sequence),
        ([vectors()[:n] for n in range(NUM_CLIENTS)],),
    ),
    "shuffled sequence": (
        summed(over_shuffled),
        ([vectors()[:n] for n in range(NUM_CLIENTS)],),
    ),
    "training": (train_round, (STATE_VALUE, RAGGED)),
    "aggregations and a capture": (
        weighted_and_bounds,
        (np.float32(2.5), vectors(), WEIGHTS),
    ),
    "strings": (summed(length_of_text), (["a" * n for n in range(NUM_CLIENTS)],)),
    "unknown leading dimension": (
        summed(total),
        ([np.arange(n, dtype=np.int32) for n in range(NUM_CLIENTS)],),
    ),
    "draws without data": (drawing, (list(range(NUM_CLIENTS)),)),
    "random accumulation": (noisy_accumulation, (vectors(),)),
}


def call(context: ExecutionContext, comp: Any, args: tuple[Any, ...]) -> list[bytes]:
    argument: Any = args[0] if len(args) == 1 else args
    return bits(context.invoke(comp, argument))


def interpreted(contexts: ContextFactory, **settings: Any) -> ExecutionContext:
    return contexts(workers=1, kernels={"enabled": False}, **settings)


def kernel_leaves(context: ExecutionContext) -> int:
    report = report_of(context)
    assert report.no_kernel == ()
    return report.kernel_leaves


@pytest.mark.parametrize("case", CASES)
def test_kernel_has_the_bits_of_the_interpreter(
    local_contexts: ContextFactory, case: str
) -> None:
    comp, args = CASES[case]
    context = local_contexts(workers=2, clients_per_leaf=3)

    found = [call(context, comp, args) for _ in range(2)]

    other = interpreted(local_contexts, clients_per_leaf=3)
    assert found == [call(other, comp, args) for _ in range(2)]
    assert kernel_leaves(context) == 3


def batches_by_numpy() -> list[Any]:
    weights, counts = np.zeros([NUM_CLIENTS, 3]), 0
    for client, data in enumerate(RAGGED):
        for batch in data:
            added = batch["x"].sum(0) + batch["y"].sum()
            weights[client] = weights[client] * 0.5 + added
            counts += len(batch["x"])
    return [weights.sum(0), counts]


def training_by_numpy() -> Any:
    changes: list[Any] = []
    for data in RAGGED:
        weights = STATE_VALUE["w"].astype(np.float64)
        for batch in data:
            error = batch["x"] @ weights + STATE_VALUE["b"] - batch["y"]
            weights = weights - 0.1 * batch["x"].T @ error
        changes.append(weights - STATE_VALUE["w"])
    return np.mean(changes, 0)


X = np.array(vectors(), np.float64)
BY_NUMPY: dict[str, list[Any]] = {
    "tensors": [3 * X.sum(0), X.sum()],
    "variable": [(X + X * X).sum(0)],
    "table": [2 * X.sum(0)],
    "ragged batches": batches_by_numpy(),
    "training": [training_by_numpy()],
    "aggregations and a capture": [
        np.average(X, 0, WEIGHTS), 1, X.max(0), X.sum(0), 2.5 * NUM_CLIENTS,
    ],
    "strings": [sum(range(NUM_CLIENTS))],
    "unknown leading dimension": [sum(n * (n - 1) // 2 for n in range(NUM_CLIENTS))],
}  # fmt: skip
WITH_DRAWS: dict[str, tuple[Any, Any]] = {
    "random initial value": (
        X.sum(0) + NUM_CLIENTS / 2, NUM_CLIENTS * (1 + 1 / 12)
    ),
    "random loop": (X.sum(0), 3 * NUM_CLIENTS),
    "random over a sequence": (
        0, sum((X[:n] ** 2).sum(0) for n in range(NUM_CLIENTS))
    ),
    "draws without data": (0, NUM_CLIENTS),
    "random accumulation": (0.5, (X**2).sum(0)),
}  # fmt: skip
"""Mean and variance of a result, where all draws are independent. Sums of uniform and
normal numbers are near enough to normal ones; orders of shuffles are counted in
`tests/tensorflow/lowering/test_lowering.py`."""
NUM_CALLS = 40


def test_passes_of_a_loop_begin_after_what_stands_before_it(
    local_contexts: ContextFactory,
) -> None:
    """In kernels, the loop read the variable of later clients before it was set."""
    rows = fl.SequenceType(fl.TensorType(np.float32, [None]))
    made: list[tf.Variable] = []

    @tf.function(autograph=False)
    def two_passes(start: Any, data: Any) -> Any:
        if not made:
            made.append(tf.Variable(tf.zeros([]), trainable=False))
        [kept] = made
        kept.assign(start)

        def step(count: Any, row: Any) -> Any:
            kept.assign(kept.read_value() / 2 + tf.reduce_sum(row))
            return count + 1

        def one_pass(index: Any, count: Any) -> Any:
            return index + 1, data.reduce(count, step)

        def goes_on(index: Any, count: Any) -> Any:
            return index < 2

        begun = tf.constant(0), tf.constant(0)
        _, count = tf.while_loop(goes_on, one_pass, begun)
        return kept.read_value(), count

    @rtf.computation(np.float32, rows)
    def train(start: Any, data: Any) -> Any:
        return two_passes(start, data)

    @fl.federated_computation(at_clients(np.float32), at_clients(rows))
    def train_all(starts: Any, data: Any) -> Any:
        return fl.federated_map(train, (starts, data))

    clients = [[np.full(8, i + j, np.float32) for j in range(i)] for i in range(9)]
    starts = [1024.0 * i for i in range(9)]
    context = local_contexts(workers=1)

    found = context.invoke(train_all, (starts, clients))

    expected = []
    for kept, rows_of_client in zip(starts, clients, strict=True):
        for row in [*rows_of_client, *rows_of_client]:
            kept = kept / 2 + float(row.sum())  # noqa: PLW2901
        expected.append((kept, 2 * len(rows_of_client)))
    report = report_of(context)
    assert report.kernel_leaves > 0
    assert [tuple(each) for each in found] == [
        (pytest.approx(kept), count) for kept, count in expected
    ]


def test_each_case_has_an_oracle() -> None:
    assert BY_NUMPY.keys() | WITH_DRAWS.keys() == CASES.keys() - {"shuffled sequence"}


def test_results_are_those_of_numpy(local_contexts: ContextFactory) -> None:
    context = local_contexts(workers=1, clients_per_leaf=3)

    for case, expected in BY_NUMPY.items():
        comp, args = CASES[case]
        result = context.invoke(comp, args[0] if len(args) == 1 else args)
        leaves = tf.nest.flatten(result)
        for found, wanted in zip(leaves, expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, err_msg=case)


@pytest.mark.parametrize("case", WITH_DRAWS)
def test_sums_of_draws_have_the_variance_of_independent_ones(
    local_contexts: ContextFactory, case: str
) -> None:
    (comp, args), (mean, variance) = CASES[case], WITH_DRAWS[case]
    context = local_contexts(workers=1, clients_per_leaf=3)
    argument = args[0] if len(args) == 1 else args

    calls = [context.invoke(comp, argument) for _ in range(NUM_CALLS)]

    sums = np.array([tf.nest.flatten(result)[0] for result in calls])
    scores = (sums - mean) / np.sqrt(variance)
    assert stats.kstest(scores.ravel(), "norm")[1] > 1e-3


@pytest.mark.parametrize("case", ["random initial value", "ragged batches"])
def test_bits_do_not_depend_on_how_many_clients_a_call_covers(
    local_contexts: ContextFactory, case: str
) -> None:
    comp, args = CASES[case]
    one_by_one = local_contexts(workers=1, kernels={"call_s": 1e-9}, clients_per_leaf=7)
    at_once = local_contexts(workers=1, clients_per_leaf=7)

    assert call(one_by_one, comp, args) == call(at_once, comp, args)


@fl.federated_computation(fl.SequenceType(np.int32))
def add_up(xs: Any) -> Any:
    return fl.sequence_sum(xs)


@fl.federated_computation(at_clients(np.int32))
def secure(data: Any) -> Any:
    return fl.federated_secure_sum(data, 100)


@pytest.mark.parametrize(
    ("comp", "data", "expected", "reason"),
    [
        (summed(add_up), [[1, 2], [3]], 6, "`sequence_sum` at clients"),
        (secure, [1, 2], 3, "`ray_fed_check_maximum` at clients"),
    ],
    ids=["sequence intrinsic", "secure sum"],
)
def test_work_without_a_kernel_is_interpreted_and_says_why(
    local_contexts: ContextFactory, comp: Any, data: Any, expected: int, reason: str
) -> None:
    context = local_contexts(workers=1)

    result = context.invoke(comp, data)

    report = report_of(context)
    assert result == expected
    assert report is not None
    assert (report.kernel_leaves, report.no_kernel) == (0, (reason,))


@rtf.computation(np.int32)
def double(x: Any) -> Any:
    return 2 * x


@fl.federated_computation(at_clients(np.int32))
def doubled(data: Any) -> Any:
    return fl.federated_map(double, data)


@rtf.computation(np.int32, np.int32)
def plus(x: Any, y: Any) -> Any:
    return x + y


@fl.federated_computation(at_clients(np.int32), np.int32)
def merged_by_the_argument(data: Any, number: Any) -> Any:
    """Merge by what the argument says, so that no mergeable form has the merge."""

    @fl.federated_computation(np.int32, np.int32)
    def merge(x: Any, y: Any) -> Any:
        return plus(plus(x, y), number)

    return fl.federated_aggregate(data, np.int32(0), plus, merge, double)


@pytest.mark.parametrize(
    ("comp", "args", "expected", "reason"),
    [
        pytest.param(doubled, [1, 2], [2, 4], "a result at clients", id="at clients"),
        pytest.param(
            merged_by_the_argument,
            ([1, 2], 10),
            26,
            "a computation without a mergeable form (Expected a merge that depends on",
            id="whole",
        ),
    ],
)
def test_work_that_is_not_merged_says_why_it_is_interpreted(
    local_contexts: ContextFactory, comp: Any, args: Any, expected: Any, reason: str
) -> None:
    context = local_contexts(workers=1, clients_per_leaf=1, kept_bytes=0)

    result = context.invoke(comp, args)

    assert result == expected
    (told,) = report_of(context).no_kernel
    assert told.startswith(reason)
    disabled = local_contexts(workers=1, kernels={"enabled": False}, kept_bytes=0)
    disabled.invoke(comp, args)
    assert report_of(disabled).no_kernel == ()


def test_switched_off_kernels_give_no_reason(local_contexts: ContextFactory) -> None:
    context = interpreted(local_contexts)

    call(context, *CASES["tensors"])

    assert kernel_leaves(context) == 0


@rtf.computation(VECTOR)
def sum_of_powers(x: Any) -> Any:
    return tf.reduce_sum(tf.stack([x**power for power in (1, 2, 3, 4)]), 0)


@rtf.computation(VECTOR)
def noisy_powers(x: Any) -> Any:
    return x * x * tf.random.uniform([3])


@pytest.mark.parametrize(
    "settings",
    [{"jit": "on"}, {"vectorized_clients": 2}],
    ids=["XLA", "vectorized"],
)
def test_bits_of_shaped_leaves_do_not_depend_on_workers_or_subrounds(
    local_contexts: ContextFactory, settings: dict[str, Any]
) -> None:
    comp, args = summed(sum_of_powers), (vectors(),)
    contexts = [
        local_contexts(
            workers=count, subrounds=count, clients_per_leaf=3, kernels=settings
        )
        for count in (1, 2)
    ]

    found = [call(context, comp, args) for context in contexts]

    assert found[0] == found[1]
    assert kernel_leaves(contexts[0]) == 3
    (without,) = call(local_contexts(workers=1, clients_per_leaf=3), comp, args)
    np.testing.assert_allclose(
        np.frombuffer(found[0][0], np.float32),
        np.frombuffer(without, np.float32),
        rtol=1e-5,
    )


def test_settings_of_kernels_reach_them(
    local_contexts: ContextFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bool, int]] = []

    class Noting(client_batches.ShapedClients):
        def __init__(self, *args: Any, **options: Any) -> None:
            asked.append((options["jit"], options["at_once"]))
            super().__init__(*args, **options)

    monkeypatch.setattr(client_kernel, "ShapedClients", Noting)
    settings = {"jit": "on", "vectorized_clients": 2}
    context = local_contexts(workers=1, clients_per_leaf=7, kernels=settings)

    call(context, summed(sum_of_powers), (vectors(),))

    assert asked == [(True, 2)]


def test_server_work_whose_graph_raises_is_interpreted_and_told_of(
    local_contexts: ContextFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("refused\nin many words")

    context = local_contexts(workers=1, clients_per_leaf=7)
    expected = call(context, summed(scale), (vectors(),))
    monkeypatch.setattr(server_kernels.ServerGraph, "run", refuse)

    found = call(context, summed(scale), (vectors(),))

    assert found == expected
    report = report_of(context)
    assert kernel_leaves(context) == 1
    for work in ("zeros and constants at the server", "the finish of a round"):
        assert f"{work}: ValueError: refused" in report.interpreted


def test_work_that_xla_is_not_to_compile_is_told_of(
    local_contexts: ContextFactory,
) -> None:
    told = Seen()
    context = local_contexts(workers=2, clients_per_leaf=2, kernels={"jit": "on"})
    context.subscribe(told)

    call(context, summed(with_table), (vectors(),))

    unshaped = [event for event in told if isinstance(event, events.WorkUnshaped)]
    reason = "HashTableV2, an op with state or effects"
    assert unshaped == [events.WorkUnshaped(reason, 0)]


@pytest.mark.parametrize(
    ("work", "clients_per_leaf", "setting", "reason"),
    [
        (sum_of_powers, 12, "on", "ops that XLA gains on"),
        (sum_of_powers, 3, "off", "few clients in a leaf"),
        (noisy_powers, 12, "off", "RandomUniform, not known to gain"),
    ],
    ids=["compiled", "small leaves", "draws"],
)
def test_rule_has_the_bits_of_the_setting_that_it_comes_to(
    local_contexts: ContextFactory,
    work: Any,
    clients_per_leaf: int,
    setting: str,
    reason: str,
) -> None:
    auto, given = (
        local_contexts(
            workers=2, clients_per_leaf=clients_per_leaf, kernels={"jit": jit}
        )
        for jit in ("auto", setting)
    )
    comp, args = summed(work), (vectors() * 4,)

    results = [call(auto, comp, args) for _ in range(2)]

    assert results == [call(given, comp, args) for _ in range(2)]
    decision = diagnostics.JitDecision(setting == "on", reason)
    assert report_of(auto).jit_decisions == (decision,)
    html = report_of(auto)._repr_html_()  # pyright: ignore[reportPrivateUsage]
    assert f"XLA is {setting}: {reason}" in html
    assert not report_of(given).jit_decisions


def test_rule_depends_on_the_cohort_and_not_on_a_short_last_leaf(
    local_contexts: ContextFactory,
) -> None:
    context = local_contexts(workers=1, clients_per_leaf=12, kernels={"jit": "auto"})

    call(context, summed(sum_of_powers), (vectors() * 2,))

    assert [found.jit for found in report_of(context).jit_decisions] == [True]


def test_empty_cohort_decides_nothing_of_xla(local_contexts: ContextFactory) -> None:
    context = local_contexts(workers=1, kernels={"jit": "auto"})

    call(context, summed(sum_of_powers), ([],))

    assert not report_of(context).jit_decisions


@pytest.mark.ray
def test_workers_of_ray_decide_as_threads_do(
    ray_contexts: ContextFactory, local_contexts: ContextFactory
) -> None:
    settings = {"clients_per_leaf": 12, "kernels": {"jit": "auto"}}
    context = ray_contexts(workers=2, subrounds=2, **settings)
    local = local_contexts(workers=1, **settings)
    comp, args = summed(sum_of_powers), (vectors() * 4,)

    found = call(context, comp, args)

    assert found == call(local, comp, args)
    assert report_of(context).jit_decisions == report_of(local).jit_decisions

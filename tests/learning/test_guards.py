# pyright: reportUnknownLambdaType=false

from collections.abc import Callable
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest
import tensorflow as tf

import ray_fed
import ray_fed.errors as errors
import ray_fed.tensorflow.lowering.variables as variables
from ray_fed.contexts.factory import ExecutionContext
from ray_fed.learning import (
    Guards,
    LearningProcess,
    Model,
    ServerView,
    aggregators,
    build_fed_avg,
    build_process,
    build_scaffold,
)
from ray_fed.learning.aggregators.aggregator import WithSum
from ray_fed.observability.events import WorkUnshaped
from tests.fixtures import Seen

BatchMaker = Callable[..., list[Any]]

OPTIMIZER = keras.optimizers.SGD(0.05)


@pytest.fixture
def clients(make_batches: BatchMaker) -> list[list[Any]]:
    """Three clients, of which the second has data that is no number."""
    clients = [make_batches([3], seed) for seed in range(3)]
    clients[1][0]["x"][0, 0] = np.nan
    return clients


WAYS: dict[str, dict[str, Any]] = {
    "a kernel": {"kernels": {"jit": "off"}},
    "pieces of leaves": {"kernels": {"jit": "off", "call_s": 1e-9}},
    "XLA": {"kernels": {"jit": "on"}},
    "XLA, pieces of leaves": {"kernels": {"jit": "on", "call_s": 1e-9}},
    "two at once": {"kernels": {"jit": "off", "vectorized_clients": 2}},
    "the interpreter": {"kernels": {"enabled": False}},
}


@pytest.fixture(scope="module", params=["error", "leave_out"])
def telling(request: pytest.FixtureRequest, linear_model: Model) -> LearningProcess:
    """A mean of updates whose first number and weight are the clients' first data."""

    def client(server: ServerView, batches: Any) -> Any:
        sums = batches.reduce(
            tf.zeros([3]), lambda s, batch: s + tf.reduce_sum(batch["x"], 0)
        )
        delta = linear_model.delta(server.weights, server.weights)
        delta = tf.nest.map_structure(lambda t: t + sums[0], delta)
        return delta, sums[1], linear_model.evaluate(server.weights, batches)

    return build_process(
        linear_model,
        client=client,
        server=keras.optimizers.SGD(1.0),
        guards=Guards(non_finite=request.param),
    )


def tell(*rows: tuple[float, float, float]) -> list[Any]:
    """Return clients of one row, which is an update, its weight and a feature more."""
    y = np.zeros((1, 1), np.float32)
    return [[{"x": np.array([row], np.float32), "y": y}] for row in rows]


NAN, INF = float("nan"), float("inf")
FINE = tell((1, 1, 0), (2, 3, 0), (0.5, 2, 0), (3, 1, 0))


def build_context(build: Any, **settings: Any) -> ExecutionContext:
    """Return a context whose leaves are of four clients."""
    return build(**{"workers": 1, "clients_per_leaf": 4} | settings)


def run_round(
    process: LearningProcess, clients: list[Any], context: ExecutionContext
) -> tuple[list[Any], Any]:
    """Return the flat weights, and the metrics, after a round."""
    context.subscribe(events := Seen())
    state = context.invoke(process.initialize, None)
    state, metrics = context.invoke(process.next, (state, clients))
    assert not [e for e in events if isinstance(e, WorkUnshaped)]
    return keras.tree.flatten(state.weights.trainable), metrics


@pytest.mark.parametrize("telling", ["error"], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_first_broken_client_is_named_alike(
    telling: LearningProcess, way: str, local_contexts: Any
) -> None:
    context = build_context(local_contexts, **WAYS[way])

    for broken in (
        tell((1, 1, 0), (NAN, 0, 0)),
        tell((1, 1, 0), (1, NAN, 0)),
        tell((1, 1, 0), (INF, 1, 0), (-INF, 1, 0)),
    ):
        with pytest.raises(errors.ComputationError) as caught:
            run_round(telling, [*FINE, *broken], context)

        assert caught.value.message.startswith("Expected a finite update of the client")
        assert caught.value.location is not None
        assert caught.value.location.client_index == 5


@pytest.mark.parametrize("telling", ["error"], indirect=True)
def test_error_on_ray_is_that_of_threads(
    telling: LearningProcess, local_contexts: Any, ray_contexts: Any
) -> None:
    clients = [*FINE, *tell((1, 1, 0), (NAN, 1, 0))]
    told: list[Any] = []

    for build in (local_contexts, ray_contexts):
        with pytest.raises(errors.ComputationError) as caught:
            run_round(telling, clients, build_context(build))
        location = caught.value.location
        told.append((caught.value.message, location and location.client_index))

    assert told[0] == told[1]
    assert told[0][1] == 5


@pytest.mark.parametrize("telling", ["leave_out"], indirect=True)
def test_broken_clients_are_left_out_alike(
    telling: LearningProcess, local_contexts: Any
) -> None:
    broken = tell((1, 1, 0), (NAN, 0, 0), (2, 2, 0), (1, INF, 0), (5, 1, 0))
    whole, _ = run_round(telling, [*FINE, *broken[::2]], build_context(local_contexts))

    bits: dict[str, list[bytes]] = {}
    for way, settings in WAYS.items():
        context = build_context(local_contexts, **settings)
        weights, metrics = run_round(telling, [*FINE, *broken], context)

        assert (metrics["left_out"], metrics["num_examples"]) == (2, 7)
        assert np.isfinite(metrics["loss"])
        report = context.last_report
        assert report is not None
        assert report.no_kernel == ()
        for found, wanted in zip(weights, whole, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
        bits[way] = [np.asarray(tensor).tobytes() for tensor in weights]

    for way, equal_to in [
        ("pieces of leaves", "a kernel"),
        ("the interpreter", "a kernel"),
        ("XLA, pieces of leaves", "XLA"),
    ]:
        assert bits[way] == bits[equal_to]


@pytest.mark.parametrize(
    ("aggregator", "is_left_out"),
    [
        (None, True),
        (aggregators.with_sum(), True),
        (aggregators.clipped(1.0), False),
        (aggregators.mean(weighted=False), False),
    ],
    ids=["mean", "sums beside it", "clipped", "unweighted"],
)
def test_graph_leaves_the_guard_out_where_sums_show_what_is_broken(
    linear_model: Model,
    make_batches: BatchMaker,
    local_contexts: Any,
    monkeypatch: pytest.MonkeyPatch,
    aggregator: Any,
    is_left_out: bool,
) -> None:
    trusted: list[bool] = []
    trust_sums = variables.trust_sums
    monkeypatch.setattr(
        variables, "trust_sums", lambda graph: trusted.append(trust_sums(graph))
    )

    def client(server: ServerView, batches: Any) -> Any:
        totals = linear_model.evaluate(server.weights, batches)
        delta = linear_model.delta(server.weights, server.weights)
        is_pair = isinstance(aggregator, WithSum)
        return (delta, tf.constant(1.0)) if is_pair else delta, tf.constant(1.0), totals

    process = build_process(
        linear_model,
        client=client,
        server=lambda weights, state, _: (weights, state),
        aggregator=aggregator,
    )
    context = local_contexts(workers=1)
    state = context.invoke(process.initialize, None)
    context.invoke(process.next, (state, [make_batches([3], 0)]))

    assert any(trusted) == is_left_out


@pytest.mark.parametrize("way", ["a kernel", "XLA", "the interpreter"])
def test_sums_that_overflow_break_no_client(
    telling: LearningProcess, way: str, local_contexts: Any
) -> None:
    context = build_context(local_contexts, **WAYS[way])

    (_, bias), metrics = run_round(telling, tell((1, 1, 1e38)), context)

    assert np.isinf(metrics["loss"])
    np.testing.assert_array_equal(bias, [1.5])
    with pytest.raises(errors.ComputationError, match="finite weights after"):
        run_round(telling, tell((1e38, 1, 0)) * 4, context)


@pytest.mark.slow
def test_client_that_may_be_dropped_is_named_in_the_report(
    averaging: LearningProcess, clients: list[Any]
) -> None:
    config = ray_fed.Config(backend="local", max_dropped_clients=1)

    with (
        ray_fed.create_context(config) as context,
        fl.framework.get_context_stack().install(context),
    ):
        state, metrics = averaging.next(averaging.initialize(), clients)

    assert context.last_report is not None
    assert list(context.last_report.dropped_clients) == [1]
    assert metrics["num_examples"] == 6
    assert all(np.isfinite(w).all() for w in state.weights.trainable)


@pytest.mark.slow
def test_client_left_out_keeps_what_it_had(
    linear_model: Model, clients: list[Any]
) -> None:
    process = build_scaffold(
        linear_model, 0.05, num_clients=3, guards=Guards(non_finite="leave_out")
    )
    kept = [process.initial_client_state] * 3

    _, new, _ = process.next(process.initialize(), kept, clients)

    assert [bool(np.any(value[0])) for value in new] == [True, False, True]


@pytest.mark.parametrize(
    "aggregator",
    [
        pytest.param(None, id="mean"),
        pytest.param(
            aggregators.mean(weighted=False), marks=pytest.mark.slow, id="unweighted"
        ),
        pytest.param(aggregators.clipped(1.0), marks=pytest.mark.slow, id="clipped"),
    ],
)
def test_round_without_clients_or_examples_takes_no_step(
    linear_model: Model, make_batches: BatchMaker, aggregator: Any
) -> None:
    server = keras.optimizers.SGD(1.0, momentum=0.9)
    skips = build_fed_avg(linear_model, OPTIMIZER, server, aggregator=aggregator)
    state, _ = skips.next(skips.initialize(), [make_batches([3], 0)])

    for nothing in ([], [[], []]):
        after, metrics = skips.next(state, nothing)

        np.testing.assert_equal(state.weights.trainable, after.weights.trainable)
        np.testing.assert_equal(state.server, after.server)
        assert after.round_index == 2
        assert metrics["num_examples"] == 0
        assert np.isnan(metrics["loss"])


def test_round_without_clients_or_examples_is_an_error_where_asked(
    linear_model: Model,
) -> None:
    guards = Guards(empty_round="error")
    process = build_fed_avg(linear_model, OPTIMIZER, guards=guards)

    for nothing in ([], [[], []]):
        with pytest.raises(errors.ComputationError, match="a round with examples"):
            process.next(process.initialize(), nothing)


def test_other_choices_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match=r"one of \['skip', 'error'\]"):
        Guards(empty_round="ignore")  # pyright: ignore[reportArgumentType]

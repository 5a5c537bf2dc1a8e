"""Algorithms against the papers' loops in numpy, which are in `references`."""

# pyright: reportUnknownLambdaType=false

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.contexts.factory import ExecutionContext
from ray_fed.learning import (
    Model,
    aggregators,
    build_ditto,
    build_fed_avg,
    build_fed_dyn,
    build_fed_nova,
    build_fed_per,
    build_fed_prox,
    build_fed_sgd,
    build_mime_lite,
    build_q_fed_avg,
    build_scaffold,
)
from tests.learning import references

BatchMaker = Callable[..., list[Any]]

RATE = 0.05
ROUNDS = 20
SIZES = [[4, 4, 1], [2], [7, 7, 3]]


@pytest.fixture
def clients(make_batches: BatchMaker) -> list[list[Any]]:
    return [make_batches(sizes, seed) for seed, sizes in enumerate(SIZES)]


def run_rounds(process: Any, clients: list[Any], context: ExecutionContext) -> Any:
    """Return the state after all rounds, once no leaf of a round was interpreted."""
    state = process.initialize()
    for _ in range(ROUNDS):
        state, _ = process.next(state, clients)
        assert context.last_report is not None
        assert context.last_report.no_kernel == ()
        assert context.last_report.kernel_leaves == len(clients)
    return state


def check_weights(found: Any, expected: references.Weights) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def start_of(model: Model) -> references.Weights:
    return references.as_doubles(model.initial_weights().trainable)


@pytest.mark.slow
def test_fed_prox_equals_the_paper(
    linear_model: Model, clients: list[Any], thread_context: ExecutionContext
) -> None:
    process = build_fed_prox(linear_model, keras.optimizers.SGD(RATE), proximal=0.8)

    state = run_rounds(process, clients, thread_context)

    start = start_of(linear_model)
    expected = references.fed_prox(start, clients, ROUNDS, RATE, 0.8)
    check_weights(state.weights.trainable, expected)
    without = references.fed_prox(start, clients, ROUNDS, RATE, 0.0)
    assert np.abs(without[0] - expected[0]).max() > 1e-3


@pytest.mark.slow
def test_fed_sgd_equals_the_paper(
    linear_model: Model, clients: list[Any], thread_context: ExecutionContext
) -> None:
    process = build_fed_sgd(linear_model, keras.optimizers.SGD(RATE))

    state = run_rounds(process, clients, thread_context)

    expected = references.fed_sgd(start_of(linear_model), clients, ROUNDS, RATE)
    check_weights(state.weights.trainable, expected)


@pytest.mark.slow
def test_mime_lite_equals_the_paper(
    linear_model: Model, clients: list[Any], thread_context: ExecutionContext
) -> None:
    optimizer = keras.optimizers.SGD(RATE, momentum=0.7)
    process = build_mime_lite(linear_model, optimizer)

    state = run_rounds(process, clients, thread_context)

    expected = references.mime_lite(start_of(linear_model), clients, ROUNDS, RATE, 0.7)
    check_weights(state.weights.trainable, expected)


COHORTS = [[0, 1], [1, 2], [0, 1, 2], [2]] * (ROUNDS // 4)


def run_cohorts(
    process: Any, clients: list[Any], context: ExecutionContext
) -> tuple[Any, list[Any]]:
    """Return state and what clients keep after `COHORTS`, none of them interpreted."""
    kept = [process.initial_client_state for _ in clients]
    state = process.initialize()
    for cohort in COHORTS:
        state, new, _ = process.next(
            state, [kept[i] for i in cohort], [clients[i] for i in cohort]
        )
        for client, value in zip(cohort, new, strict=True):
            kept[client] = value
        assert context.last_report is not None
        assert context.last_report.no_kernel == ()
        assert context.last_report.kernel_leaves == len(cohort)
    return state, kept


def check_clients(kept: list[Any], expected: list[references.Weights]) -> None:
    for one, other in zip(kept, expected, strict=True):
        check_weights(one, other)


@pytest.mark.slow
def test_scaffold_equals_the_paper_with_changing_cohorts(
    linear_model: Model, clients: list[Any], thread_context: ExecutionContext
) -> None:
    process = build_scaffold(linear_model, RATE, num_clients=len(clients))

    state, kept = run_cohorts(process, clients, thread_context)

    weights, control, own = references.scaffold(
        start_of(linear_model), clients, COHORTS, RATE
    )
    check_weights(state.weights.trainable, weights)
    check_weights(state.optimizer, control)
    check_clients(kept, own)


@pytest.mark.slow
def test_fed_nova_equals_the_paper(
    linear_model: Model, clients: list[Any], thread_context: ExecutionContext
) -> None:
    process = build_fed_nova(linear_model, keras.optimizers.SGD(RATE), epochs=2)

    state = run_rounds(process, clients, thread_context)

    start = start_of(linear_model)
    expected = references.fed_nova(start, clients, ROUNDS, RATE, 2)
    check_weights(state.weights.trainable, expected)
    twice = [batches * 2 for batches in clients]
    averaged = references.fed_prox(start, twice, ROUNDS, RATE, 0.0)
    assert np.abs(averaged[0] - expected[0]).max() > 1e-3


@pytest.mark.slow
def test_fed_dyn_equals_the_paper_with_changing_cohorts(
    linear_model: Model, clients: list[Any], thread_context: ExecutionContext
) -> None:
    process = build_fed_dyn(
        linear_model, keras.optimizers.SGD(RATE), alpha=0.5, num_clients=len(clients)
    )

    state, kept = run_cohorts(process, clients, thread_context)

    weights, h, own = references.fed_dyn(
        start_of(linear_model), clients, COHORTS, RATE, 0.5
    )
    check_weights(state.weights.trainable, weights)
    check_weights(state.optimizer, h)
    check_clients(kept, own)


@pytest.mark.slow
@pytest.mark.parametrize("q", [0.0, 2.0])
def test_q_fed_avg_equals_the_paper(
    linear_model: Model,
    clients: list[Any],
    thread_context: ExecutionContext,
    q: float,
) -> None:
    process = build_q_fed_avg(linear_model, RATE, q=q)

    state = run_rounds(process, clients, thread_context)

    expected = references.q_fed_avg(start_of(linear_model), clients, ROUNDS, RATE, q)
    check_weights(state.weights.trainable, expected)


@pytest.mark.slow
def test_ditto_equals_the_paper_with_changing_cohorts(
    linear_model: Model, clients: list[Any], thread_context: ExecutionContext
) -> None:
    process = build_ditto(linear_model, keras.optimizers.SGD(RATE), proximal=0.7)

    state, kept = run_cohorts(process, clients, thread_context)

    weights, own = references.ditto(start_of(linear_model), clients, COHORTS, RATE, 0.7)
    check_weights(state.weights.trainable, weights)
    check_clients(kept, own)


@pytest.mark.slow
def test_fed_per_equals_the_paper_with_changing_cohorts(
    linear_model: Model, clients: list[Any], thread_context: ExecutionContext
) -> None:
    optimizer = keras.optimizers.SGD(RATE)
    process = build_fed_per(linear_model, optimizer, personal=["bias"])

    state, kept = run_cohorts(process, clients, thread_context)

    start = start_of(linear_model)
    kernel, biases = references.fed_per(start, clients, COHORTS, RATE)
    check_weights(state.weights.trainable, (kernel, start[1]))
    check_clients(kept, [(bias,) for bias in biases])


@pytest.mark.slow
def test_adaptive_clipping_equals_the_paper(
    linear_model: Model, clients: list[Any], thread_context: ExecutionContext
) -> None:
    adapt = aggregators.AdaptiveNorm(initial=0.05, quantile=0.7, learning_rate=0.3)
    process = build_fed_avg(
        linear_model,
        keras.optimizers.SGD(RATE),
        aggregator=aggregators.clipped(adapt, aggregators.mean(weighted=False)),
    )

    state = run_rounds(process, clients, thread_context)

    weights, bound = references.adaptive_clip(
        start_of(linear_model), clients, ROUNDS, RATE, adapt
    )
    check_weights(state.weights.trainable, weights)
    np.testing.assert_allclose(state.parts.aggregate[0][0], bound, rtol=1e-5)


def make_disagreeing_clients() -> list[list[Any]]:
    """Two clients whose optima and curvatures differ: three batches each, the same."""
    clients: list[list[Any]] = []
    for scale, target in ((0.5, -1.0), (2.0, 3.0)):
        x = np.eye(3, dtype=np.float32) * scale
        y = np.full((3, 1), target, np.float32)
        clients.append([{"x": x, "y": y}] * 10)
    return clients


@pytest.mark.slow
def test_scaffold_reaches_the_optimum_that_averaging_misses() -> None:
    layer = keras.layers.Dense(1, use_bias=False)
    keras_model = keras.Sequential([keras.Input((3,)), layer])
    layer.set_weights([np.zeros((3, 1), np.float32)])
    model = Model.from_keras(
        keras_model,
        loss=keras.losses.MeanSquaredError(),
        label_type=references.LABEL_TYPE,
    )
    clients = make_disagreeing_clients()
    # sum_k a_k (a_k w - y_k) = 0 in each coordinate
    optimum = (0.5 * -1.0 + 2.0 * 3.0) / (0.5**2 + 2.0**2)
    averaging = build_fed_avg(model, keras.optimizers.SGD(0.1))
    scaffold = build_scaffold(model, 0.1, num_clients=2)
    average = averaging.initialize()
    corrected = scaffold.initialize()
    kept = [scaffold.initial_client_state] * 2

    for _ in range(60):
        average, _ = averaging.next(average, clients)
        corrected, kept, _ = scaffold.next(corrected, kept, clients)

    missed = abs(float(average.weights.trainable[0][0, 0]) - optimum)
    reached = abs(float(corrected.weights.trainable[0][0, 0]) - optimum)
    assert missed > 0.28
    assert reached < 1e-4


def test_scaffold_takes_sgd_for_its_rate(linear_model: Model) -> None:
    by_rate, by_optimizer = (
        build_scaffold(linear_model, rate, num_clients=3)
        for rate in (0.5, keras.optimizers.SGD(0.5))
    )

    assert by_rate.facts == by_optimizer.facts
    assert rtf.identify_computation(by_rate.next) == rtf.identify_computation(
        by_optimizer.next
    )


@pytest.mark.parametrize(
    ("build", "match"),
    [
        pytest.param(
            lambda model: build_fed_prox(
                model, keras.optimizers.SGD(RATE), proximal=-1.0
            ),
            "`proximal` to be at least 0",
            id="negative pull",
        ),
        pytest.param(
            lambda model: build_scaffold(model, 0.0, num_clients=3),
            "`client_learning_rate` above 0",
            id="no learning rate",
        ),
        pytest.param(
            lambda model: build_scaffold(
                model,
                0.1,
                num_clients=3,
                aggregator=aggregators.dp_mean(1.0, 1.0, 2, 3, 1e-5),
            ),
            "without noise for SCAFFOLD",
            id="noise on a part of what is sent",
        ),
        pytest.param(
            lambda model: build_fed_avg(
                model, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
            ),
            "pass its inner optimizer",
            id="loss scaling",
        ),
        pytest.param(
            lambda model: build_fed_prox(
                model,
                keras.optimizers.SGD(0.1),
                proximal=0.1,
                client_learning_rate=0.1,  # pyright: ignore[reportArgumentType]
            ),
            "Expected a Keras LearningRateSchedule",
            id="rate that is no schedule",
        ),
        pytest.param(
            lambda model: build_scaffold(
                model, keras.optimizers.SGD(0.1, momentum=0.9), num_clients=3
            ),
            "SGD with a learning rate alone",
            id="momentum",
        ),
        pytest.param(
            lambda model: build_fed_per(model, "sgd", personal=["head"]),
            "names of layers, or of their weights, as `personal`, of",
            id="no such layer",
        ),
        pytest.param(
            lambda model: build_fed_dyn(model, "sgd", alpha=0.0, num_clients=3),
            "`alpha` above 0",
            id="no pull",
        ),
        pytest.param(
            lambda model: build_q_fed_avg(model, 0.1, q=-1.0),
            "`q` of at least 0",
            id="negative power",
        ),
        pytest.param(
            lambda model: build_mime_lite(model, keras.optimizers.SGD(0.1), epochs=0),
            "at least 1, found 0",
            id="no pass",
        ),
    ],
)
def test_arguments_that_do_not_go_are_refused(
    linear_model: Model, build: Callable[[Model], Any], match: str
) -> None:
    with pytest.raises(errors.UserError, match=match):
        build(linear_model)

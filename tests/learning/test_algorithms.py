"""Algorithms against the papers' loops in numpy, which are in `references`."""

# pyright: reportUnknownLambdaType=false

import functools
from collections.abc import Callable
from typing import Any, cast

import keras
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.contexts.factory import ExecutionContext
from ray_fed.learning import (
    LearningProcess,
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


def check_kernels(context: ExecutionContext, num_leaves: int) -> None:
    """Raise if a leaf of the last round was interpreted."""
    report = context.last_report
    assert report is not None
    assert (report.no_kernel, report.kernel_leaves) == ((), num_leaves)


def check_weights(found: Any, expected: references.Weights) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def start_of(model: Model) -> references.Weights:
    return references.as_doubles(model.initial_weights().trainable)


SGD = keras.optimizers.SGD(RATE)
ADAPT = aggregators.AdaptiveNorm(initial=0.05, quantile=0.7, learning_rate=0.3)

PAPERS: dict[str, tuple[Callable[[Model], Any], Callable[..., references.Weights]]] = {
    "FedProx": (
        lambda m: build_fed_prox(m, SGD, proximal=0.8),
        lambda s, c: references.fed_prox(s, c, ROUNDS, RATE, 0.8),
    ),
    "FedSGD": (
        lambda m: build_fed_sgd(m, SGD),
        lambda s, c: references.fed_sgd(s, c, ROUNDS, RATE),
    ),
    "Mime Lite": (
        lambda m: build_mime_lite(m, keras.optimizers.SGD(RATE, momentum=0.7)),
        lambda s, c: references.mime_lite(s, c, ROUNDS, RATE, 0.7),
    ),
    "FedNova": (
        lambda m: build_fed_nova(m, SGD, epochs=2),
        lambda s, c: references.fed_nova(s, c, ROUNDS, RATE, 2),
    ),
    "q-FedAvg, 0": (
        lambda m: build_q_fed_avg(m, RATE, q=0.0),
        lambda s, c: references.q_fed_avg(s, c, ROUNDS, RATE, 0.0),
    ),
    "q-FedAvg, 2": (
        lambda m: build_q_fed_avg(m, RATE, q=2.0),
        lambda s, c: references.q_fed_avg(s, c, ROUNDS, RATE, 2.0),
    ),
    "adaptive clipping": (
        lambda m: build_fed_avg(
            m,
            SGD,
            aggregator=aggregators.clipped(ADAPT, aggregators.mean(weighted=False)),
        ),
        lambda s, c: references.adaptive_clip(s, c, ROUNDS, RATE, ADAPT)[0],
    ),
}
"""How a process is built, and the weights that the paper's loop has in the end."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_rounds_equal_those_of_the_paper(
    linear_model: Model,
    clients: list[Any],
    thread_context: ExecutionContext,
    name: str,
) -> None:
    build, compute = PAPERS[name]
    process = build(linear_model)
    state = process.initialize()

    for _ in range(ROUNDS):
        state, _ = process.next(state, clients)
        check_kernels(thread_context, len(clients))

    start = start_of(linear_model)
    expected = compute(start, clients)
    check_weights(state.weights.trainable, expected)
    if name in ("FedProx", "FedNova"):  # and not those of averaging
        epochs = 2 if name == "FedNova" else 1
        passes = [batches * epochs for batches in clients]
        averaged = references.fed_prox(start, passes, ROUNDS, RATE, 0.0)
        assert np.abs(averaged[0] - expected[0]).max() > 1e-3
    if name == "adaptive clipping":
        _, bound = references.adaptive_clip(start, clients, ROUNDS, RATE, ADAPT)
        np.testing.assert_allclose(state.aggregator[0][0], bound, rtol=1e-5)


COHORTS = [[0, 1], [1, 2], [0, 1, 2], [2]] * (ROUNDS // 4)


def fed_per(start: references.Weights, clients: list[Any]) -> Any:
    kernel, biases = references.fed_per(start, clients, COHORTS, RATE)
    return (kernel, start[1]), [(bias,) for bias in biases]


PAPERS_WITH_STATES: dict[str, tuple[Callable[[Model], Any], Callable[..., Any]]] = {
    "SCAFFOLD": (
        lambda m: build_scaffold(m, RATE, num_clients=len(SIZES)),
        lambda s, c: references.scaffold(s, c, COHORTS, RATE),
    ),
    "FedDyn": (
        lambda m: build_fed_dyn(m, SGD, alpha=0.5, num_clients=len(SIZES)),
        lambda s, c: references.fed_dyn(s, c, COHORTS, RATE, 0.5),
    ),
    "Ditto": (
        lambda m: build_ditto(m, SGD, proximal=0.7),
        lambda s, c: references.ditto(s, c, COHORTS, RATE, 0.7),
    ),
    "FedPer": (lambda m: build_fed_per(m, SGD, personal=["bias"]), fed_per),
}
"""As above; the loop returns weights, the server's variables if any, and clients'."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS_WITH_STATES)
def test_changing_cohorts_keep_what_those_of_the_paper_do(
    linear_model: Model,
    clients: list[Any],
    thread_context: ExecutionContext,
    name: str,
) -> None:
    build, compute = PAPERS_WITH_STATES[name]
    process = build(linear_model)
    kept = [process.initial_client_state for _ in clients]
    state = process.initialize()

    for cohort in COHORTS:
        state, new, _ = process.next(
            state, [kept[i] for i in cohort], [clients[i] for i in cohort]
        )
        for client, value in zip(cohort, new, strict=True):
            kept[client] = value
        check_kernels(thread_context, len(cohort))

    weights, *server, own = compute(start_of(linear_model), clients)
    check_weights(state.weights.trainable, weights)
    # SCAFFOLD keeps the variables of the server's optimizer beside its control.
    known = state.server[0] if name == "SCAFFOLD" else state.server
    for variables in server:
        check_weights(known, variables)
    for one, other in zip(kept, own, strict=True):
        check_weights(one, other)


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


WITH_SERVER: dict[str, Callable[..., LearningProcess]] = {
    "ditto": functools.partial(build_ditto, proximal=0.1),
    "fed nova": build_fed_nova,
    "fed per": functools.partial(build_fed_per, personal=["bias"]),
    "q fed avg": functools.partial(build_q_fed_avg, q=1.0),
    "scaffold": functools.partial(build_scaffold, num_clients=2),
}


@pytest.mark.parametrize("name", WITH_SERVER)
def test_server_optimizer_scales_the_step(
    linear_model: Model, make_batches: Callable[..., list[Any]], name: str
) -> None:
    clients = [make_batches([3], 0), make_batches([2], 1)]
    moves: list[Any] = []
    for rate in (1.0, 0.5):
        process = WITH_SERVER[name](linear_model, SGD, keras.optimizers.SGD(rate))
        start: Any = process.initialize()
        kept = [process.initial_client_state] * 2
        has_kept = kept[0] is not None
        given = (start, kept, clients) if has_kept else (start, clients)
        state: Any = process.next(*given)[0]
        moves.append(state.weights.trainable[0] - start.weights.trainable[0])

    assert np.any(moves[0])
    np.testing.assert_allclose(moves[1], moves[0] / 2, rtol=1e-4, atol=1e-6)


NOISY = aggregators.dp_mean(1.0, 1.0, 2, 3, 1e-5)
MOMENTUM = keras.optimizers.SGD(0.1, momentum=0.9)
REFUSED: dict[str, Callable[[Model], Any]] = {
    "`proximal` to be at least 0": lambda m: build_fed_prox(m, SGD, proximal=-1.0),
    "`client_optimizer` above 0": lambda m: build_scaffold(m, 0.0, num_clients=3),
    "without noise beside a sum": lambda m: build_scaffold(
        m, 0.1, num_clients=3, aggregator=NOISY
    ),
    "Expected a Keras LearningRateSchedule": lambda m: build_fed_prox(
        m, SGD, proximal=0.1, client_learning_rate=cast("Any", 0.1)
    ),
    "SGD with a learning rate alone": lambda m: build_scaffold(
        m, MOMENTUM, num_clients=3
    ),
    "names of layers, or of their weights, as `personal`, of": lambda m: build_fed_per(
        m, SGD, personal=["head"]
    ),
    "`alpha` above 0": lambda m: build_fed_dyn(m, SGD, alpha=0.0, num_clients=3),
    "`q` of at least 0": lambda m: build_q_fed_avg(m, 0.1, q=-1.0),
    "at least 1, found 0": lambda m: build_fed_avg(m, SGD, epochs=0),
}


@pytest.mark.parametrize("match", REFUSED)
def test_arguments_that_do_not_go_are_refused(linear_model: Model, match: str) -> None:
    with pytest.raises(errors.UserError, match=match):
        REFUSED[match](linear_model)

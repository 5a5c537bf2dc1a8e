from collections.abc import Callable
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest

import ray_fed
import ray_fed.errors as errors
from ray_fed.contexts.factory import ExecutionContext
from ray_fed.learning import (
    Guards,
    LearningProcess,
    Model,
    aggregators,
    build_fed_avg,
    build_scaffold,
)

BatchMaker = Callable[..., list[Any]]

OPTIMIZER = keras.optimizers.SGD(0.05)


@pytest.fixture
def clients(make_batches: BatchMaker) -> list[list[Any]]:
    """Three clients, of which the second has data that is no number."""
    clients = [make_batches([3], seed) for seed in range(3)]
    clients[1][0]["x"][0, 0] = np.nan
    return clients


def test_client_whose_update_is_not_finite_ends_the_round_by_name(
    averaging: LearningProcess, clients: list[Any]
) -> None:

    with pytest.raises(errors.ComputationError, match="finite update") as caught:
        averaging.next(averaging.initialize(), clients)
    assert caught.value.location is not None
    assert caught.value.location.client_index == 1


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


def test_client_left_out_counts_nothing_but_in_its_metric(
    linear_model: Model, clients: list[Any], thread_context: ExecutionContext
) -> None:
    process = build_fed_avg(
        linear_model, OPTIMIZER, guards=Guards(non_finite="leave_out")
    )
    state = process.initialize()

    with_it, metrics = process.next(state, clients)
    without, _ = process.next(state, [clients[0], clients[2]])

    assert metrics["left_out"] == 1
    assert metrics["num_examples"] == 6
    assert np.isfinite(metrics["loss"])
    for one, other in zip(
        with_it.weights.trainable, without.weights.trainable, strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert thread_context.last_report is not None
    assert thread_context.last_report.no_kernel == ()


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
        np.testing.assert_equal(state.optimizer, after.optimizer)
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


def test_finite_updates_whose_sum_is_not_end_the_round(linear_model: Model) -> None:
    process = build_fed_avg(linear_model, keras.optimizers.SGD(1.0))
    batch: Any = linear_model.batch_type
    x = np.zeros((2, batch["x"].shape[1]), np.float32)
    y = np.full((2, 1), 1e38, np.float32)

    with pytest.raises(errors.ComputationError, match="finite weights after"):
        process.next(process.initialize(), [[{"x": x, "y": y}]] * 4)


def test_other_choices_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match=r"one of \['skip', 'error'\]"):
        Guards(empty_round="ignore")  # pyright: ignore[reportArgumentType]

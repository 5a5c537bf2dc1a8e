"""Runs of processes with noise: cohorts as the accountant assumes, epsilon by round."""

import pathlib
from typing import Any

import keras
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed import learning
from ray_fed.learning import LearningProcess, Model, aggregators
from ray_fed.learning.accounting import SampledGaussian, TreeGaussian
from ray_fed.learning.run_loop import PrivateSampler
from ray_fed.program import PoissonSampler

NUM_CLIENTS = 12


@pytest.fixture
def clients(make_batches: Any) -> list[Any]:
    return [make_batches([3], seed) for seed in range(NUM_CLIENTS)]


@pytest.fixture
def process(linear_model: Model) -> LearningProcess:
    noisy = aggregators.dp_mean(
        clip_norm=0.5,
        noise_multiplier=0.8,
        clients_per_round=4,
        num_clients=NUM_CLIENTS,
        delta=1e-5,
    )
    optimizer = keras.optimizers.SGD(0.05)
    return learning.build_fed_avg(linear_model, optimizer, aggregator=noisy)


@pytest.mark.slow
def test_epsilon_is_a_column_that_a_resume_goes_on_with(
    process: LearningProcess, clients: list[Any], tmp_path: pathlib.Path
) -> None:
    whole = learning.run(process, clients, num_rounds=3)
    learning.run(process, clients, num_rounds=2, storage_path=tmp_path)

    resumed = learning.run(process, clients, num_rounds=3, storage_path=tmp_path)

    assert process.privacy is not None
    expected = [process.privacy.epsilon(count) for count in (1, 2, 3)]
    assert [record.training["epsilon"] for record in whole.history] == expected
    assert [record.training["epsilon"] for record in resumed.history] == expected
    assert [r.clients for r in resumed.history] == [r.clients for r in whole.history]
    for one, other in zip(
        resumed.state.weights.trainable, whole.state.weights.trainable, strict=True
    ):
        assert one.tobytes() == other.tobytes()


def test_runs_without_noise_record_an_infinite_epsilon(
    clients: list[Any], linear_model: Model, tmp_path: pathlib.Path
) -> None:
    noiseless = aggregators.dp_mean(0.5, 0.0, 4, NUM_CLIENTS, 1e-5)
    optimizer = keras.optimizers.SGD(0.05)
    process = learning.build_fed_avg(linear_model, optimizer, aggregator=noiseless)

    learning.run(process, clients, num_rounds=1, storage_path=tmp_path)
    resumed = learning.run(process, clients, num_rounds=2, storage_path=tmp_path)

    assert resumed.history.values("epsilon") == [np.inf, np.inf]


def test_size_of_cohorts_with_noise_is_refused(
    process: LearningProcess, clients: list[Any]
) -> None:
    with pytest.raises(errors.ConfigError, match="Expected no `cohort_size`"):
        learning.run(process, clients, num_rounds=1, cohort_size=4)


@pytest.mark.slow
def test_state_of_rounds_with_other_noise_is_refused(
    process: LearningProcess, clients: list[Any], linear_model: Model
) -> None:
    def build(noise_multiplier: float, delta: float = 1e-5) -> LearningProcess:
        noisy = aggregators.dp_mean(0.5, noise_multiplier, 4, NUM_CLIENTS, delta)
        clipped = aggregators.clipped(0.5, noisy)
        optimizer = keras.optimizers.SGD(0.05)
        return learning.build_fed_avg(linear_model, optimizer, aggregator=clipped)

    begun = learning.run(build(0.8), clients, num_rounds=1)

    with pytest.raises(errors.ConfigError, match=r"noise of this process, \(20"):
        learning.run(build(20.0), clients, num_rounds=2, state=begun.state)
    gone_on = learning.run(build(0.8, 1e-6), clients, num_rounds=2, state=begun.state)
    expected = SampledGaussian(0.8, 1e-6, 4 / NUM_CLIENTS).epsilon(2)
    assert gone_on.history.values("epsilon") == [expected]


def test_other_number_of_clients_is_refused(
    process: LearningProcess, clients: list[Any], linear_model: Model
) -> None:
    scaffold = learning.build_scaffold(linear_model, 0.1, num_clients=3)

    for built, found in ((process, clients[:5]), (scaffold, clients)):
        with pytest.raises(errors.ConfigError, match=f"found {len(found)}: the size"):
            learning.run(built, found, num_rounds=1)


def test_accountant_says_nothing_of_orders_without_a_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert SampledGaussian(1.0, 1e-5, 8 / 30).epsilon(1) > 0

    assert not caplog.records


def test_cohorts_are_poisson_samples_of_the_rate_that_noise_is_counted_for() -> None:
    cohorts = PrivateSampler(SampledGaussian(1.0, 1e-5, 0.25), seed=3)
    plain = PoissonSampler(0.25, seed=3)

    found = [cohorts.sample(index, NUM_CLIENTS, None) for index in range(9)]

    assert found == [plain.sample(index, NUM_CLIENTS, None) for index in range(9)]


def test_each_pass_of_a_tree_has_each_client_once() -> None:
    cohorts = PrivateSampler(TreeGaussian(1.0, 1e-5, 5), seed=3)

    passes = [
        [cohorts.sample(5 * index + step, NUM_CLIENTS, None) for step in range(5)]
        for index in (0, 1)
    ]

    for cohorts_of_pass in passes:
        together = [client for cohort in cohorts_of_pass for client in cohort]
        assert sorted(together) == list(range(NUM_CLIENTS))
    assert passes[0] != passes[1]

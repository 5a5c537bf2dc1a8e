"""Samplers draw by seed and round, with the probabilities that they say."""

from typing import Any, cast

import numpy as np
import pytest
import scipy.stats

import ray_fed.errors as errors
from ray_fed.program import (
    AvailabilitySampler,
    PoissonSampler,
    Sampler,
    UniformSampler,
    WeightedSampler,
)

SAMPLERS: dict[str, Sampler] = {
    "uniform": UniformSampler(3),
    "poisson": PoissonSampler(seed=3),
    "weighted": WeightedSampler(np.arange(1.0, 21.0), seed=3),
    "availability": AvailabilitySampler([range(24)] * 20, seed=3),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_round_and_seed_alone_decide(kind: str) -> None:
    sampler = SAMPLERS[kind]

    forwards = [sampler.sample(index, 20, 8) for index in range(6)]
    backwards = [sampler.sample(index, 20, 8) for index in reversed(range(6))]

    assert forwards == backwards[::-1]
    assert len({tuple(cohort) for cohort in forwards}) == 6
    assert all(cohort == sorted(set(cohort)) for cohort in forwards)
    assert all(set(cohort) <= set(range(20)) for cohort in forwards)


def chi_square(found: Any, expected: Any) -> float:
    return float(((found - expected) ** 2 / expected).sum())


def test_clients_of_a_poisson_sample_take_part_by_themselves() -> None:
    rounds, clients, rate = 4000, 12, 0.3
    sampler = PoissonSampler(rate, seed=5)

    drawn = np.zeros((rounds, clients))
    for index in range(rounds):
        drawn[index, sampler.sample(index, clients, None)] = 1

    sizes = np.bincount(drawn.sum(1).astype(int), minlength=clients + 1)
    binomial = rounds * scipy.stats.binom.pmf(np.arange(clients + 1), clients, rate)
    found = np.array([*sizes[:8], sizes[8:].sum()])  # each rare one beside others
    expected = np.array([*binomial[:8], binomial[8:].sum()])
    assert chi_square(found, expected) < 26.1  # 8 degrees of freedom, 0.001
    together = np.corrcoef(drawn.T) - np.eye(clients)
    assert np.abs(together).max() < 5 / np.sqrt(rounds)
    assert np.abs(drawn.mean(0) - rate).max() < 0.05


def test_uniform_draws_every_set_alike() -> None:
    sampler = UniformSampler(9)
    counts: dict[tuple[int, ...], int] = {}

    for index in range(1000):
        cohort = tuple(sampler.sample(index, 5, 2))
        counts[cohort] = counts.get(cohort, 0) + 1

    assert len(counts) == 10
    assert chi_square(np.array([*counts.values()]), 100) < 27.9  # 9 degrees, 0.001


def test_weights_decide_how_often_a_client_is_drawn() -> None:
    sampler = WeightedSampler([1, 2, 0, 5], seed=4)

    drawn = [sampler.sample(index, 4, 1)[0] for index in range(2400)]

    found = np.bincount(drawn, minlength=4)
    assert found[2] == 0
    assert chi_square(found[[0, 1, 3]], np.array([300, 600, 1500])) < 13.8  # 2 degrees
    assert sampler.sample(0, 4, 3) == [0, 1, 3]


def test_only_clients_that_are_there_are_drawn() -> None:
    sampler = AvailabilitySampler([[0, 1], [1], [1, 2], [2]], period=3)

    cohorts = [sampler.sample(index, 4, None) for index in range(4)]

    assert cohorts == [[0], [0, 1, 2], [2, 3], [0]]
    assert len(sampler.sample(1, 4, 2)) == 2
    assert sampler.sample(0, 4, 3) == [0]


@pytest.mark.parametrize(
    ("make", "k", "message"),
    [
        (UniformSampler, 5, "`k` from 1 to 4"),
        (PoissonSampler, None, "either the `rate`"),
        (lambda: PoissonSampler(0.5), 2, "either the `rate`"),
        (lambda: PoissonSampler(1.5), 2, "`rate` above 0"),
        (lambda: UniformSampler(-1), 2, "`seed`"),
        (lambda: WeightedSampler([1.0]), 1, "one weight for each of 4"),
        (lambda: WeightedSampler([-1.0]), 1, "at least 0"),
        (lambda: WeightedSampler(cast("Any", None)), 1, "found None: pass a list"),
        (lambda: WeightedSampler([1, 0, 0, 1]), 3, "from 1 to 2"),
        (lambda: AvailabilitySampler(cast("Any", [0, 1])), 1, r"found \[0, 1\]"),
        (lambda: AvailabilitySampler([[1]]), 1, "hours for each of 4"),
        (lambda: AvailabilitySampler([[24]]), 1, "from 0 to 23"),
    ],
)
def test_impossible_draws_are_refused(make: Any, k: int | None, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        make().sample(0, 4, k)

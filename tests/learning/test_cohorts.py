from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.learning import CohortSampler, split_by_label


def test_cohort_is_that_of_seed_and_round_alone() -> None:
    sampler = CohortSampler(num_clients=50, cohort_size=10, seed=7)
    in_order = [sampler.sample(index) for index in range(5)]

    backwards = [CohortSampler(50, 10, 7).sample(index) for index in (4, 3, 2, 1, 0)]

    assert in_order == backwards[::-1]
    assert len({tuple(cohort) for cohort in in_order}) == 5
    assert CohortSampler(50, 10, 8).sample(0) != in_order[0]


@hypothesis.given(
    num_clients=st.integers(1, 40), data=st.data(), seed=st.integers(0, 2**32)
)
@hypothesis.settings(deadline=None)
def test_cohort_has_no_client_twice(num_clients: int, data: Any, seed: int) -> None:
    size = data.draw(st.integers(1, num_clients))

    cohort = CohortSampler(num_clients, size, seed).sample(3)

    assert cohort == sorted(set(cohort))
    assert len(cohort) == size
    assert set(cohort) <= set(range(num_clients))


def test_every_client_is_drawn_in_time() -> None:
    sampler = CohortSampler(num_clients=12, cohort_size=3, seed=0)

    drawn = {client for index in range(60) for client in sampler.sample(index)}

    assert drawn == set(range(12))


@pytest.mark.parametrize("size", [0, 4])
def test_cohort_of_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(errors.ConfigError, match=f"from 1 to 3.*found {size}"):
        CohortSampler(num_clients=3, cohort_size=size, seed=0)


def test_negative_seed_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="`seed`"):
        CohortSampler(num_clients=3, cohort_size=1, seed=-1)


@hypothesis.given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=80),
    alpha=st.sampled_from([1e-6, 0.1, 1.0, 1e6]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_split_gives_each_example_to_one_client(
    labels: list[int], alpha: float, seed: int, data: Any
) -> None:
    num_clients = data.draw(st.integers(1, len(labels)))

    parts = split_by_label(np.array(labels), num_clients, alpha, seed)

    sizes = [len(part) for part in parts]
    assert len(parts) == num_clients
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))


def test_split_is_that_of_its_seed() -> None:
    labels = np.arange(100) % 10

    one, same, other = (split_by_label(labels, 7, 0.5, seed) for seed in (1, 1, 2))

    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_small_alpha_gives_few_labels_a_client() -> None:
    labels = np.arange(1000) % 10

    few, many = (
        np.mean([len(set(labels[part])) for part in split_by_label(labels, 10, a, 0)])
        for a in (0.05, 1e4)
    )

    assert few < 4
    assert many > 9.5  # the last clients get what is left


@pytest.mark.parametrize(
    ("num_clients", "alpha", "message"),
    [
        pytest.param(4, 1.0, "from 1 to 3", id="more clients than examples"),
        pytest.param(0, 1.0, "from 1 to 3", id="no client"),
        pytest.param(2, 0.0, "`alpha` above 0", id="no spread"),
    ],
)
def test_impossible_splits_are_refused(
    num_clients: int, alpha: float, message: str
) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        split_by_label(np.zeros(3), num_clients, alpha, 0)

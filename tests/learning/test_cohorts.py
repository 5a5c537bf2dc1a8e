from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.learning import split_by_label


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

"""Partitions deal every example to one client, by their seed."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.learning import partition, split_by_label

LABELS = np.random.default_rng(0).permutation(np.arange(600) % 6)

BUILDERS: dict[str, Callable[[int], Sequence[Any]]] = {
    "dirichlet": lambda seed: partition.dirichlet(LABELS, 9, 0.5, seed=seed),
    "shards": lambda seed: partition.shards(LABELS, 9, 2, seed=seed),
    "log_normal": lambda seed: partition.log_normal(600, 9, 1.5, seed=seed),
    "split_by_label": lambda seed: split_by_label(LABELS, 9, 0.5, seed=seed),
}


@pytest.mark.parametrize("kind", BUILDERS)
def test_each_example_goes_to_one_client_by_the_seed(kind: str) -> None:
    build = BUILDERS[kind]

    parts, same, other = build(1), build(1), build(2)

    assert len(parts) == 9
    assert sorted(np.concatenate(parts)) == list(range(600))
    assert min(map(len, parts)) >= 1
    assert all(np.array_equal(a, b) for a, b in zip(parts, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


@hypothesis.given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=80),
    alpha=st.sampled_from([1e-6, 0.1, 1.0, 1e6]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
@hypothesis.settings(max_examples=30)
def test_split_by_label_gives_each_example_to_one_client(
    labels: list[int], alpha: float, seed: int, data: Any
) -> None:
    num_clients = data.draw(st.integers(1, len(labels)))

    parts = split_by_label(np.array(labels), num_clients, alpha, seed=seed)

    sizes = [len(part) for part in parts]
    assert len(parts) == num_clients
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))


def num_labels(parts: Sequence[Any]) -> float:
    return float(np.mean([len(np.unique(LABELS[part])) for part in parts]))


def test_alpha_says_how_alike_clients_are() -> None:
    few = partition.dirichlet(LABELS, 6, 0.05, min_examples=0)
    many = partition.dirichlet(LABELS, 6, 1e4)

    assert num_labels(few) < 3.5
    assert num_labels(many) == 6
    assert np.std([len(part) for part in many]) < 5
    assert num_labels(split_by_label(LABELS, 10, 0.05)) < 4
    assert num_labels(split_by_label(LABELS, 10, 1e4)) > 5.7  # the last get the rest


def test_shards_are_of_few_labels_and_one_size() -> None:
    parts = partition.shards(LABELS, 10, 2)

    assert {len(part) for part in parts} == {60}
    assert num_labels(parts) <= 4


def test_sizes_are_log_normal() -> None:
    parts = partition.log_normal(2_000_000, 2000, 1.5, seed=3)

    logs = np.log([len(part) - 1 for part in parts if len(part) > 1])
    assert np.std(logs) == pytest.approx(1.5, rel=0.1)
    assert abs(np.mean(logs) - np.median(logs)) < 0.15


def test_natural_clients_are_owners() -> None:
    parts = partition.natural(np.array(["b", "a", "b", "c"]))

    assert {name: part.tolist() for name, part in parts.items()} == {
        "a": [1],
        "b": [0, 2],
        "c": [3],
    }


def test_a_partition_is_drawn(tmp_path: pathlib.Path) -> None:
    parts = partition.shards(LABELS, 5)

    partition.draw_labels(parts, LABELS, tmp_path / "parts.png")

    assert (tmp_path / "parts.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: partition.dirichlet(LABELS, 601, 1.0), "from 1 to 600"),
        (lambda: partition.dirichlet(np.zeros((4, 3)), 2, 1.0), r"shape \[4, 3\]"),
        (lambda: partition.dirichlet(LABELS, 3, 0.0), "`alpha` above 0"),
        (lambda: partition.dirichlet(LABELS, 500, 0.01), "fewer in each of 100 draws"),
        (lambda: partition.shards(LABELS, 3, 0), "found 0"),
        (lambda: partition.shards(LABELS, 301), "from 1 to 300"),
        (lambda: partition.shards(LABELS[:1], 1), "from 1 to 0"),
        (lambda: partition.natural(np.array(["a", None])), "of one type"),
        (lambda: partition.natural(np.array([None])), "found missing labels"),
        (lambda: partition.natural([7, "7"]), "of one type"),  # pyright: ignore[reportArgumentType]
        (lambda: partition.natural(np.array([1.0, np.nan])), "found missing labels"),
        (lambda: partition.log_normal(5, 3, -1.0), "`sigma` above 0"),
        (lambda: partition.log_normal(5, 3, 1.0, seed=-1), "`seed`"),
        (lambda: split_by_label(np.zeros(3), 4, 1.0), "from 1 to 3"),
        (lambda: split_by_label(np.zeros(3), 0, 1.0), "from 1 to 3"),
        (lambda: split_by_label(np.zeros(3), 2, 0.0), "`alpha` above 0"),
    ],
)
def test_impossible_partitions_are_refused(build: Any, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        build()

"""Multi-Krum and the geometric median, against loops of numpy."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.contexts.factory import ExecutionContext
from ray_fed.learning import aggregators

UPDATE_TYPE = fl.to_type((fl.TensorType(np.float32, [3, 2]), fl.TensorType(np.float32)))
WEIGHT_TYPE = fl.TensorType(np.float32)
WEIGHTS = np.array([1, 3, 2, 0, 5, 1, 4, 2, 2], np.float32)
PRESENT = np.flatnonzero(WEIGHTS)
BROKEN = (1, 6)


def make_vectors() -> Any:
    vectors = np.random.default_rng(0).normal(size=(len(WEIGHTS), 7)).astype("f")
    vectors[BROKEN, :] = [[1e6] * 7, [-1e9] * 7]
    return vectors


VECTORS = make_vectors()
UPDATES = [(row[:6].reshape(3, 2), row[6]) for row in VECTORS]


def aggregate(aggregator: Any, context: ExecutionContext) -> Any:
    """Return the aggregate as one vector, and metrics."""
    part = aggregator.build(UPDATE_TYPE, WEIGHT_TYPE)
    _, merged, metrics = part.next(part.initialize(), UPDATES, list(WEIGHTS))
    assert context.last_report is not None
    assert context.last_report.no_kernel == ()
    return np.array([*merged[0].ravel(), merged[1]]), metrics


def select_by_krum(vectors: Any, num_broken: int, num_selected: int) -> list[int]:
    """Return the rows that Multi-Krum selects (Blanchard et al., 2017)."""
    scores: list[float] = []
    for one in vectors:
        distances = sorted(((vectors - one) ** 2).sum(axis=1))[1:]  # not to itself
        scores.append(sum(distances[: len(vectors) - num_broken - 2]))
    return [int(index) for index in np.argsort(scores)[:num_selected]]


@pytest.mark.parametrize(("num_broken", "num_selected"), [(2, 1), (2, 4), (0, 7)])
def test_multi_krum_is_the_loop_of_the_paper(
    thread_context: ExecutionContext, num_broken: int, num_selected: int
) -> None:
    made = aggregators.multi_krum(num_broken, num_selected, max_clients=10)

    found, metrics = aggregate(made, thread_context)

    present = VECTORS[PRESENT].astype(np.float64)
    chosen = select_by_krum(present, num_broken, num_selected)
    np.testing.assert_allclose(found, present[chosen].mean(axis=0), rtol=1e-5)
    assert metrics == {"num_aggregated": 8, "num_selected": num_selected}
    if num_broken:
        assert not {*PRESENT[chosen]} & {*BROKEN}


def find_geometric_median(
    vectors: Any, alphas: Any, num_iterations: int, smoothing: float
) -> Any:
    """Return a point by the smoothed Weiszfeld algorithm (Pillutla et al., 2022)."""
    point = np.zeros(vectors.shape[1])
    for _ in range(num_iterations):
        betas = [
            alpha / max(smoothing, np.linalg.norm(point - vector))
            for vector, alpha in zip(vectors, alphas, strict=True)
        ]
        weighted = [b * vector for b, vector in zip(betas, vectors, strict=True)]
        point = sum(weighted) / sum(betas)
    return point


@pytest.mark.parametrize(
    ("num_iterations", "smoothing"), [(1, 1e-6), (3, 1e-6), (3, 2.0), (100, 1e-6)]
)
def test_geometric_median_is_the_loop_of_the_paper(
    thread_context: ExecutionContext, num_iterations: int, smoothing: float
) -> None:
    made = aggregators.geometric_median(
        max_clients=8, num_iterations=num_iterations, smoothing=smoothing
    )

    found, metrics = aggregate(made, thread_context)

    vectors, alphas = VECTORS.astype(np.float64), WEIGHTS / WEIGHTS.sum()
    expected = find_geometric_median(vectors, alphas, num_iterations, smoothing)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert metrics == {"num_aggregated": 8}


def test_geometric_median_stays_at_an_update_that_is_there_most_often() -> None:
    part = aggregators.geometric_median(max_clients=5).build(WEIGHT_TYPE, WEIGHT_TYPE)
    updates = [np.float32(value) for value in (2, 2, 2, -50, 1e30)]

    merged = part.next(part.initialize(), updates, [np.float32(1)] * 5)[1]

    assert merged == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("name", ["multi_krum", "geometric_median"])
def test_rounds_without_clients_have_zeros(name: str) -> None:
    made = {
        "multi_krum": aggregators.multi_krum(1, max_clients=5),
        "geometric_median": aggregators.geometric_median(max_clients=5),
    }[name]
    part = made.build(UPDATE_TYPE, WEIGHT_TYPE)

    for updates in ([], UPDATES[:2]):
        nothing = [np.float32(0)] * len(updates)
        merged = part.next(part.initialize(), updates, nothing)[1]
        assert not np.any(merged[0])


def test_rounds_of_too_few_clients_for_the_broken_ones_are_an_error() -> None:
    part = aggregators.multi_krum(3, max_clients=20).build(UPDATE_TYPE, WEIGHT_TYPE)

    with pytest.raises(errors.ComputationError, match="at least 9 clients in a round"):
        part.next(part.initialize(), UPDATES, list(WEIGHTS))


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: aggregators.multi_krum(4, max_clients=10), "of at least 11, which"),
        (lambda: aggregators.multi_krum(1, 7, max_clients=6), "of at least 7, which"),
        (lambda: aggregators.multi_krum(-1, max_clients=6), "`num_broken`"),
        (lambda: aggregators.multi_krum(1, 0, max_clients=6), "`num_selected`"),
        (lambda: aggregators.geometric_median(max_clients=0), "`max_clients`"),
        (
            lambda: aggregators.geometric_median(max_clients=2, num_iterations=0),
            "`num_iterations`",
        ),
        (
            lambda: aggregators.geometric_median(max_clients=2, smoothing=0.0),
            "`smoothing` above 0",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_out_of_range_are_refused(build: Any, match: str) -> None:
    with pytest.raises(errors.ConfigError, match=match):
        build()

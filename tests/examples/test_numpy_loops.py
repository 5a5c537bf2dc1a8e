"""Examples that are algorithms equal loops of NumPy over the same clients."""

import pathlib
import runpy
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest
from numpy.typing import NDArray

_EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def load(local_contexts: Callable[..., Any]) -> Callable[[str], dict[str, Any]]:
    """Return what an example defines, with a context on threads."""

    def run(name: str) -> dict[str, Any]:
        fl.framework.set_default_context(local_contexts(workers=1))
        return runpy.run_path(str(_EXAMPLES / name))

    return run


def test_k_means_is_lloyds_algorithm_over_all_points(
    load: Callable[[str], dict[str, Any]],
) -> None:
    example = load("k_means.py")
    clients = example["draw_clients"](6)

    centers, costs = example["train"](clients, num_rounds=5)

    points = np.concatenate(clients).astype(np.float64)
    expected = points[: example["NUM_CLUSTERS"]].copy()
    expected_costs: list[float] = []
    for _ in range(5):
        distances = ((points[:, np.newaxis] - expected) ** 2).sum(axis=2)
        nearest = distances.argmin(axis=1)
        expected_costs.append(distances.min(axis=1).sum())
        for cluster in set(nearest.tolist()):
            expected[cluster] = points[nearest == cluster].mean(axis=0)
    np.testing.assert_allclose(centers, expected, rtol=1e-4)
    np.testing.assert_allclose(costs, expected_costs, rtol=1e-4)
    assert costs[-1] < costs[0]


def test_reconstruction_is_algorithm_1_of_its_paper(
    load: Callable[[str], dict[str, Any]],
) -> None:
    example = load("reconstruction.py")
    model, users = example["build_model"](), example["draw_users"]()[:4]
    process = example["build_process"](model)
    state = process.initialize()
    items = np.array(state.weights.trainable[0], np.float64)

    for _ in range(2):
        state, metrics = process.next(state, users)
        loss, items = _run_round(example, users, items)

        assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
        np.testing.assert_allclose(state.weights.trainable[0], items, atol=1e-5)
        assert not np.any(state.weights.trainable[1])  # the server knows no user


def _run_round(
    example: dict[str, Any], users: list[Any], items: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64]]:
    """Return the mean loss of a round, and the items' vectors after it."""
    losses: list[float] = []
    moves: list[NDArray[np.float64]] = []
    for support, query in users:
        seen, rating = items[support["x"]], support["y"]
        user = np.zeros(items.shape[1])
        for _ in range(example["LOCAL_EPOCHS"]):
            error = seen @ user - rating
            user -= example["LOCAL_RATE"] * 2 * error @ seen / len(error)
        error = items[query["x"]] @ user - query["y"]
        losses.append(np.mean(error**2))
        gradient = np.zeros_like(items)
        np.add.at(gradient, query["x"], 2 * np.outer(error, user) / len(error))
        moves.append(-example["GLOBAL_RATE"] * gradient)
    return float(np.mean(losses)), items + np.mean(moves, axis=0)

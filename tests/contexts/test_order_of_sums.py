"""Sums are added up as they were written, however clients' work is run."""

# pyright: reportUnknownLambdaType=false

from collections.abc import Callable, Mapping
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

from ray_fed import tensorflow as rtf
from tests.fixtures import ContextFactory
from tests.result_bits import bits

Work = Callable[[Any], Any]

VECTOR = fl.TensorType(np.float32, [2])
NUM_CLIENTS = 40
VECTORS = list(
    np.random.default_rng(0).normal(size=(NUM_CLIENTS, 2)).astype(np.float32)
)

WAYS: Mapping[str, Mapping[str, Any]] = {
    "kernels": {"kernels": {"jit": "off"}},
    "all at once": {"kernels": {"jit": "off"}, "subrounds": 1, "clients_per_leaf": 40},
    "nothing kept": {"kernels": {"jit": "off"}, "kept_bytes": 0},
    "interpreter": {"kernels": {"enabled": False}},
    "debugging": {"debug": True},
}


def drawn() -> Any:
    return tf.random.normal([2])


def loop(x: Any) -> Any:
    def step(index: Any, held: Any) -> tuple[Any, Any]:
        return index + 1, held * 0.3 * 0.7 + (0.1 + held) / 3.0 + (held + (held + x))

    return tf.while_loop(lambda index, _: index < 3, step, [0, x])[1]


def product(x: Any) -> Any:
    weights = tf.constant([[0.1, 0.2], [0.3, 0.4]])
    return tf.linalg.matvec(weights * 0.3, x * 0.7) + (x + tf.constant([0.1, 0.2]))


WORK: Mapping[str, Work] = {
    "sum of a sum": lambda x: x + (drawn() + drawn()),
    "sum of products": lambda x: x * x[0] + (drawn() * x[1] + drawn()),
    "average": lambda x: (x + drawn() + (drawn() + x * 2.0)) / 3.0,
    "loop": loop,
    "product of matrices": product,
    "constants": lambda x: (x * 0.3 + 0.1) * 0.7 + (0.3 - x) * 0.1 + (x / 3.0) * 0.7,
    "powers": lambda x: tf.pow(x, 2.0) + 1.0 / tf.sqrt(x * x + 0.5) + x / (x + 9.0),
}


def round_of(work: Work) -> Any:
    computation = rtf.computation(work, VECTOR)

    @fl.federated_computation(fl.FederatedType(VECTOR, fl.CLIENTS))
    def run(vectors: Any) -> Any:
        worked = fl.federated_map(computation, vectors)
        return worked, fl.federated_sum(worked)

    return run


@pytest.mark.parametrize("name", WORK)
def test_each_way_has_the_same_bits(local_contexts: ContextFactory, name: str) -> None:
    run = round_of(WORK[name])
    found: dict[str, list[bytes]] = {}

    for way, settings in WAYS.items():
        given = {"workers": 1, "clients_per_leaf": 8, **settings}
        context = local_contexts(seed=5, **given)
        context.resume_at(0)
        found[way] = bits(context.invoke(run, VECTORS))

    one_leaf = found.pop("all at once")  # sums in another order, over clients
    assert one_leaf[:NUM_CLIENTS] == found["kernels"][:NUM_CLIENTS]
    assert all(each == found["kernels"] for each in found.values())


def test_a_sum_is_that_of_numpy_in_the_order_in_which_it_was_written(
    local_contexts: ContextFactory,
) -> None:
    def work(x: Any) -> Any:
        first, second = drawn(), drawn()
        return {"first": first, "second": second, "sum": x + (first + second)}

    computation = rtf.computation(work, VECTOR)

    @fl.federated_computation(fl.FederatedType(VECTOR, fl.CLIENTS))
    def run(vectors: Any) -> Any:
        return fl.federated_map(computation, vectors)

    for settings in WAYS.values():
        context = local_contexts(**{"workers": 1, "clients_per_leaf": 8, **settings})
        for x, found in zip(VECTORS, context.invoke(run, VECTORS), strict=True):
            expected = x + (found["first"] + found["second"])
            assert found["sum"].tobytes() == expected.tobytes()

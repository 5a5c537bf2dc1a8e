"""Records of a run say the bytes that clients of a federation would move."""

from collections.abc import Callable
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest

from ray_fed import learning
from ray_fed.learning import LearningProcess, Model, aggregators, run
from tests.learning.counting import CLIENTS, build_counter

SGD = keras.optimizers.SGD
INPUTS, UNITS = 50, 40
BODY = 4 * (INPUTS + 1) * UNITS
HEAD = 4 * (UNITS + 1) * 2
ALL = BODY + HEAD
EXTRA = 100
"""The most bytes of a client's weight, seeds, round index and metric sums."""


def build_model(*, is_body_frozen: bool = False, normalizes: bool = False) -> Model:
    body = keras.layers.Dense(UNITS, name="body")
    body.trainable = not is_body_frozen
    layers = [keras.Input((INPUTS,)), body]
    if normalizes:
        layers.append(keras.layers.BatchNormalization(center=False, scale=False))
    keras_model = keras.Sequential([*layers, keras.layers.Dense(2, name="head")])
    return Model.from_keras(
        keras_model, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )


def fed_avg(aggregator: Any = None, **model: bool) -> LearningProcess:
    return learning.build_fed_avg(build_model(**model), SGD(0.1), aggregator=aggregator)


def eighth(num_tensors: int) -> int:
    return ALL // 4 + 8 * num_tensors


CASES: dict[str, tuple[Callable[[], LearningProcess], int, int]] = {
    "fed_avg": (fed_avg, ALL, ALL),
    "a server's optimizer": (
        lambda: learning.build_fed_avg(
            build_model(), SGD(0.1), server_optimizer=keras.optimizers.Adam(0.1)
        ),
        ALL,
        ALL,
    ),
    "scaffold": (
        lambda: learning.build_scaffold(build_model(), 0.1, num_clients=3),
        2 * ALL,
        2 * ALL,
    ),
    "fed_dyn": (
        lambda: learning.build_fed_dyn(
            build_model(), SGD(0.1), alpha=0.1, num_clients=3
        ),
        ALL,
        ALL,
    ),
    "fed_per": (
        lambda: learning.build_fed_per(build_model(), SGD(0.1), personal=["head"]),
        BODY,
        BODY,
    ),
    "ditto": (
        lambda: learning.build_ditto(build_model(), SGD(0.1), proximal=0.1),
        ALL,
        ALL,
    ),
    "a frozen body": (lambda: fed_avg(is_body_frozen=True), HEAD, HEAD),
    "running statistics": (
        lambda: fed_avg(normalizes=True),
        ALL + 8 * UNITS,
        ALL + 8 * UNITS,
    ),
    "quantized": (lambda: fed_avg(aggregators.quantized(8)), ALL, eighth(4)),
    "clipped, quantized": (
        lambda: fed_avg(aggregators.clipped(1.0, aggregators.quantized(8))),
        ALL,
        eighth(4),
    ),
    "sparsified": (
        lambda: fed_avg(aggregators.sparsified(0.1)),
        ALL,
        round(ALL / 4 * 0.1) * 8,
    ),
    "sparsified with error feedback": (
        lambda: fed_avg(aggregators.sparsified(0.1, error_feedback=True)),
        ALL,
        round(ALL / 4 * 0.1) * 8,
    ),
    "quantized, sparsified": (
        lambda: fed_avg(aggregators.quantized(8, aggregators.sparsified(0.1))),
        ALL,
        round(ALL / 4 * 0.1) * 8,
    ),
    "secure": (
        lambda: fed_avg(aggregators.secure_mean(bound=1.0, bits=8, max_clients=256)),
        ALL,
        ALL // 2,
    ),
    "median": (lambda: fed_avg(aggregators.median(max_clients=5)), ALL, ALL),
}


@pytest.mark.parametrize("name", CASES)
def test_each_client_moves_what_its_algorithm_says(name: str) -> None:
    build, sent, returned = CASES[name]

    found = build().client_bytes

    assert found is not None
    assert sent <= found.sent <= sent + EXTRA
    assert returned <= found.returned <= returned + EXTRA


def batches(value: float) -> list[Any]:
    x = np.full((2, INPUTS), value, np.float32)
    return [{"x": x, "y": np.zeros(2, np.int32)}]


def test_records_count_the_clients_of_a_round(local_contexts: Any) -> None:
    process = fed_avg(aggregators.quantized(8))
    fl.framework.set_default_context(local_contexts(workers=2, max_dropped_clients=1))
    clients = [batches(1.0), batches(np.inf), batches(2.0)]

    history = run(process, clients, num_rounds=1, validation_data=batches(1.0)).history

    assert process.client_bytes is not None
    assert history[0].dropped == (1,)
    assert history[0].bytes_sent == 3 * process.client_bytes.sent
    assert history[0].bytes_returned == 2 * process.client_bytes.returned


def test_a_process_that_does_not_say_it_has_no_bytes() -> None:
    process = build_counter()

    (record,) = run(process, CLIENTS, num_rounds=1).history

    assert (record.bytes_sent, record.bytes_returned) == (None, None)

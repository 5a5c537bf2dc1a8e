"""Weights of 16 and of 64 bits train as those of 32 do, however many examples count."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from ray_fed import learning
from ray_fed.learning import LearningProcess, Model

NUM_CLIENTS, ROWS = 200, 500
"""100,000 examples: float16 ends at 65,504."""

ALGORITHMS: dict[str, Callable[[Model], LearningProcess]] = {
    "fed_avg": lambda m: learning.build_fed_avg(m, sgd()),
    "fed_sgd": lambda m: learning.build_fed_sgd(m, sgd()),
    "mime_lite": lambda m: learning.build_mime_lite(m, sgd()),
    "scaffold": lambda m: learning.build_scaffold(m, 0.25, num_clients=NUM_CLIENTS),
}

QUICK = ("fed_avg", "fed_sgd")


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.25, momentum=0.5)


def build_model(policy: str, units: int) -> Model:
    """Return a model with weights of zero and a penalty, in a dtype policy."""
    dense = keras.layers.Dense(
        1,
        kernel_initializer="zeros",
        kernel_regularizer="l2",
        dtype=keras.dtype_policies.DTypePolicy(policy),
    )
    keras_model = keras.Sequential([keras.Input((units,)), dense])
    return Model.from_keras(keras_model, loss="mse")


def equal_clients(model: Model, rows: int, units: int, label: float) -> list[Any]:
    x = np.ones((rows, units)).astype(model.batch_type["x"].dtype)
    y = np.full(rows, label).astype(model.batch_type["y"].dtype)
    return [{"x": x, "y": y}]


CASES = [
    pytest.param(
        policy,
        name,
        marks=() if policy == "float16" and name in QUICK else pytest.mark.slow,
    )
    for policy, names in (("float16", ALGORITHMS), ("mixed_bfloat16", ["fed_avg"]))
    for name in names
]


@pytest.mark.parametrize(("policy", "name"), CASES)
def test_many_examples_move_weights_as_far_as_few(policy: str, name: str) -> None:
    model = build_model(policy, units=3)
    clients = [equal_clients(model, ROWS, 3, 0.5)] * NUM_CLIENTS
    process = ALGORITHMS[name](model)
    kept = process.initial_client_state
    middle = () if kept is None else ([kept] * NUM_CLIENTS,)

    state, *_, metrics = process.next(process.initialize(), *middle, clients)

    # By hand: the gradient is 2 (0 - 0.5), the rate 0.25. Without AVX-512, Keras' own
    # step in bfloat16 is one last place off as well.
    last_place = 2.0**-8 if policy == "mixed_bfloat16" else 1e-6
    moved = float(state.weights.trainable[0][0, 0])
    assert moved == pytest.approx(0.25, rel=last_place)
    if name == "scaffold":  # the mean of what clients keep
        assert float(state.server[0][0][0, 0]) == pytest.approx(-1, abs=0.01)
    assert metrics["num_examples"] == NUM_CLIENTS * ROWS
    assert metrics["loss"] == pytest.approx(0.25, abs=1e-3)


def test_large_tensors_of_small_floats_are_finite() -> None:
    units = 70_000
    model = build_model("float16", units)
    process = learning.build_fed_sgd(model, keras.optimizers.SGD(1.0))

    state, _ = process.next(process.initialize(), [equal_clients(model, 1, units, 0.5)])

    assert np.all(state.weights.trainable[0] == 1)


def build_adapted_model(policy: str) -> keras.Model:
    """Return a model with adapters on large kernels, in a dtype policy."""
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(160, "relu", dtype=policy) for _ in range(2)]
    keras_model = keras.Sequential(
        [keras.Input((160,)), *layers, keras.layers.Dense(1, dtype=policy)]
    )
    for layer in layers:
        layer.enable_lora(2)
    return keras_model


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_adapters_with_accumulated_gradients_train_as_in_keras(policy: str) -> None:
    rng = np.random.default_rng(0)
    batches = [
        {"x": rng.normal(size=(8, 160)).astype("f"), "y": rng.random(8).astype("f")}
        for _ in range(4)
    ]

    def accumulating() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(
            0.05, gradient_accumulation_steps=2, loss_scale_factor=64.0
        )

    reference: Any = build_adapted_model(policy)
    reference.compile(accumulating(), "mse", auto_scale_loss=False)
    model = Model.from_keras(build_adapted_model(policy), loss="mse")
    process = learning.build_fed_avg(model, accumulating())
    initial = model.initial_weights().trainable
    types = {key: model.batch_type[key].dtype for key in ("x", "y")}
    client = [{key: b[key].astype(types[key]) for key in b} for b in batches]

    state, _ = process.next(process.initialize(), [client])
    for batch in batches:
        reference.train_on_batch(batch["x"], batch["y"])

    found, wanted, before = (
        np.concatenate([np.ravel(weight) for weight in weights])
        for weights in (
            state.weights.trainable,
            [variable.numpy() for variable in reference.trainable_variables],
            initial,
        )
    )
    # One number alone can differ by more: processors round bfloat16 in other places.
    assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted - before)

"""Models of several inputs and outputs, losses and metrics by their names."""

import functools
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed import learning
from ray_fed.learning import Model, build_fed_avg, build_fed_eval


def build_two_towers(*, as_dict: bool = True, two_outputs: bool = False) -> keras.Model:
    keras.utils.set_random_seed(0)
    user = keras.Input((), dtype="int32", name="user")
    item = keras.Input((2,), name="item")
    embedded = keras.layers.Embedding(5, 3)(user)
    joined = keras.layers.Concatenate()([embedded, item])
    joined = keras.layers.Dropout(0.1)(joined)
    rating = keras.layers.Dense(1, name="rating")(joined)
    outputs: Any = rating
    if two_outputs:
        kind = keras.layers.Dense(4, activation="softmax", name="kind")(joined)
        outputs = {"rating": rating, "kind": kind}
    inputs: Any = {"user": user, "item": item} if as_dict else [user, item]
    return keras.Model(inputs, outputs)


def batches_of(sizes: list[int], seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [
        {
            "x": {
                "user": rng.integers(0, 5, size).astype(np.int32),
                "item": rng.normal(size=(size, 2)).astype(np.float32),
            },
            "y": rng.normal(size=size).astype(np.float32),
        }
        for size in sizes
    ]


def test_model_of_two_inputs_learns_and_is_measured() -> None:
    keras_model: Any = build_two_towers()
    model = Model.from_keras(keras_model, loss="mse", metrics=["mae"])
    training = build_fed_avg(model, keras.optimizers.SGD(0.1))
    evaluation = build_fed_eval(model, training)
    clients = [batches_of([4, 4], 1), batches_of([4], 2)]

    state = training.initialize()
    before = evaluation.next(state, clients)
    for _ in range(3):
        state, _ = training.next(state, clients)
    after = evaluation.next(state, clients)

    batches = [batch for client in clients for batch in client]
    errors_of_rows = np.concatenate(
        [keras_model(b["x"]).numpy()[:, 0] - b["y"] for b in batches]
    )
    np.testing.assert_allclose(before["loss"], np.mean(errors_of_rows**2), rtol=1e-5)
    np.testing.assert_allclose(before["mae"], np.abs(errors_of_rows).mean(), rtol=1e-5)
    assert after["loss"] < before["loss"]


@pytest.mark.parametrize("as_dict", [True, False], ids=["keys", "layers"])
def test_inputs_have_the_names_of_keys_or_layers(as_dict: bool) -> None:
    model = Model.from_keras(build_two_towers(as_dict=as_dict), loss="mse")

    assert str(model.batch_type) == (
        "<x=<user=int32[?],item=float32[?,2]>,y=float32[?]>"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mean_squire"}, "name of a Keras loss"),
        ({"loss": "mse", "metrics": ["acuracy"]}, "name of a Keras metric"),
        ({"loss": "mse", "metrics": "mae"}, "a list of metrics"),
        ({"loss": "mse", "metrics": [3]}, r"such as keras\.metrics"),
        (
            {"loss": "mse", "metrics": [keras.metrics.MeanSquaredError("loss")]},
            "other names",
        ),
        ({"loss": 3}, "Expected a Keras Loss"),
    ],
)
def test_losses_and_metrics_that_cannot_be_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.ValueMismatchError, match=message):
        Model.from_keras(build_two_towers(), **options)


def test_each_output_needs_a_loss() -> None:
    two = build_two_towers(two_outputs=True)

    for loss in ("mse", {"rating": "mse"}):
        with pytest.raises(errors.ValueMismatchError, match=r"`loss`.*'rating'"):
            Model.from_keras(two, loss=loss)


def test_batch_of_two_numbers_of_rows_names_client_and_batch() -> None:
    model = Model.from_keras(build_two_towers(), loss="mse")
    training = build_fed_avg(model, keras.optimizers.SGD(0.1))
    clients = [batches_of([2]), batches_of([3, 3])]
    clients[1][1]["y"] = clients[1][1]["y"][:2]

    with pytest.raises(
        errors.ValueMismatchError, match=r"batch 1 of the client `data\[1\]`.*`y` 2"
    ):
        learning.run(training, clients, num_rounds=1)


@pytest.mark.parametrize(
    ("units", "loss", "given", "labels"),
    [
        (1, keras.losses.MeanSquaredError(), None, "float32[?]"),
        (1, keras.losses.Huber(), None, "float32[?]"),
        (1, keras.losses.mean_squared_error, None, "float32[?]"),
        (1, functools.partial(keras.losses.huber, delta=0.5), None, "float32[?]"),
        (1, keras.losses.BinaryCrossentropy(), None, "int32[?]"),
        (3, "mse", None, "float32[?,3]"),
        (3, "mse", fl.TensorType(np.float64, [None, 3]), "float64[?,3]"),
    ],
    ids=["object", "huber", "function", "partial", "binary", "name", "type"],
)
def test_labels_are_as_the_output_unless_they_are_classes(
    units: int, loss: Any, given: Any, labels: str
) -> None:
    keras_model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)])

    model = Model.from_keras(keras_model, loss=loss, label_type=given)

    assert str(model.batch_type) == f"<x=float32[?,3],y={labels}>"

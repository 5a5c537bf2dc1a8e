import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.learning import Model, build_fed_avg


def build_keras_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3),
        ]
    )


def build_model(keras_model: keras.Model, metrics: Any = ()) -> Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Model.from_keras(keras_model, loss=loss, metrics=metrics)


def test_types_follow_the_keras_model() -> None:
    model = build_model(build_keras_model())

    assert str(model.data_type) == "{<x=float32[?,4],y=int32[?]>*}@CLIENTS"
    assert str(model.weights_type) == (
        "<trainable=<float32[4,5],float32[5],float32[5],float32[5],float32[5,3],"
        "float32[3]>,non_trainable=<float32[5],float32[5],int64[2]>>"
    )
    assert model.statistics_indices == (0, 1)
    assert model.seed_indices == (2,)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_trained_model_is_saved_and_loaded(tmp_path: pathlib.Path) -> None:
    keras_model = build_keras_model()
    untrained = [weight.copy() for weight in keras_model.get_weights()]
    model = build_model(keras_model)
    process = build_fed_avg(model, keras.optimizers.SGD(0.1))
    generator = np.random.default_rng(0)
    x = generator.normal(size=(6, 4)).astype(np.float32)
    data = [[{"x": x, "y": np.arange(6, dtype=np.int32) % 3}]]
    state, _ = process.next(process.initialize(), data)

    model.to_keras(state).save(tmp_path / "x.keras")

    loaded: Any = keras.models.load_model(tmp_path / "x.keras")
    for variable, weight in zip(
        loaded.trainable_variables, state.weights.trainable, strict=True
    ):
        np.testing.assert_array_equal(variable.numpy(), weight)
    np.testing.assert_array_equal(loaded(x), model.to_keras(state.weights)(x))
    np.testing.assert_equal(keras_model.get_weights(), untrained)


def _raise(labels: Any, predictions: Any) -> Any:
    raise KeyError("my own mistake")


def _to_numpy(labels: Any, predictions: Any) -> Any:
    return np.mean((labels - predictions) ** 2)


@pytest.mark.parametrize("function", [_raise, _to_numpy])
def test_a_loss_of_the_users_that_raises_is_told_by_its_line(function: Any) -> None:
    model = Model.from_keras(build_keras_model(), loss=function)
    line = function.__code__.co_firstlineno + 1

    with pytest.raises(errors.ValueMismatchError) as caught:
        build_fed_avg(model, "sgd")

    message = str(caught.value)
    assert f"At test_models.py:{line}, in `{function.__name__}`. Mend" in message
    assert f"that `{function.__name__[1:]}` raises" in message
    assert "label_type" not in message


def test_a_metric_of_the_users_that_raises_is_told_by_its_line() -> None:
    with pytest.raises(errors.ValueMismatchError, match=r"At test_models\.py:\d+, in"):
        build_model(build_keras_model(), [_raise])


def test_model_without_weights_is_refused() -> None:
    with pytest.raises(errors.ValueMismatchError, match="that is built"):
        build_model(keras.Sequential([keras.layers.Dense(3)]))


class Subclassed(keras.Model):
    """A model whose inputs Keras does not know."""

    @override
    def call(self, inputs: Any) -> Any:
        return inputs


@pytest.mark.parametrize("is_built", [False, True])
def test_model_that_is_not_functional_is_refused(*, is_built: bool) -> None:
    subclassed = Subclassed()
    if is_built:
        subclassed.build((None, 2))

    with pytest.raises(
        errors.ValueMismatchError, match=r"functional Keras model.*Model\(x, model\(x"
    ):
        build_model(subclassed)

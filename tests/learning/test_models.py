import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.learning import Model, ModelWeights, build_fed_avg


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


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_compiled_model_brings_loss_metrics_and_optimizer() -> None:
    keras_model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(errors.ValueMismatchError, match="neither: pass the loss, or"):
        Model.from_keras(keras_model)
    with pytest.raises(errors.ValueMismatchError, match="for the clients, found none"):
        build_fed_avg(Model.from_keras(keras_model, loss="mse"))
    keras_model.compile(keras.optimizers.SGD(0.25), "mse", metrics=["mae"])

    compiled = build_fed_avg(Model.from_keras(keras_model))

    model = Model.from_keras(keras_model, loss="mse", metrics=["mae"])
    said = build_fed_avg(model, keras.optimizers.SGD(0.25))
    assert rtf.identify_computation(compiled.next) == rtf.identify_computation(
        said.next
    )
    assert compiled.facts == said.facts
    keras_model.compile("sgd", "mse", loss_weights=[2.0])
    with pytest.raises(errors.ValueMismatchError, match="without `loss_weights`"):
        Model.from_keras(keras_model)


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
    assert f"At test_models.py:{line}, in `{function.__name__}`. Fix" in message
    assert f"that `{function.__name__[1:]}` raises" in message
    assert "label_type" not in message


def test_a_metric_of_the_users_that_raises_is_told_by_its_line() -> None:
    with pytest.raises(errors.ValueMismatchError, match=r"At test_models\.py:\d+, in"):
        build_model(build_keras_model(), [_raise])


class Subclassed(keras.Model):
    """A model whose inputs Keras does not know."""

    @override
    def call(self, inputs: Any) -> Any:
        return inputs


class OwnStep(keras.Sequential):
    @override
    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args)


class OwnLoss(keras.Sequential):
    @override
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def build_subclassed() -> keras.Model:
    subclassed = Subclassed()
    subclassed.build((None, 2))
    return subclassed


LAYERS = [keras.Input((6,)), keras.layers.Dense(1)]
IS_NOT_FUNCTIONAL = r"functional Keras model.*Model\(x, model\(x"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: keras.Sequential([keras.layers.Dense(3)]), "that is built"),
        (Subclassed, IS_NOT_FUNCTIONAL),
        (build_subclassed, IS_NOT_FUNCTIONAL),
        (lambda: OwnStep(LAYERS), r"`OwnStep` with a `train_step` of its own"),
        (lambda: OwnLoss(LAYERS), r"`OwnLoss` with a `compute_loss` of its own"),
        (
            lambda: keras.Sequential(
                [
                    keras.Input(batch_shape=(4, 6, 4)),
                    keras.layers.Bidirectional(keras.layers.GRU(3, stateful=True)),
                ]
            ),
            "stateful=True",
        ),
    ],
    ids=["no weights", "subclass", "built", "own step", "own loss", "stateful"],
)
def test_models_that_clients_cannot_train_as_keras_does_are_refused(
    build: Callable[[], keras.Model], message: str
) -> None:
    keras_model = build()

    with pytest.raises(errors.ValueMismatchError, match=message):
        build_model(keras_model)


def test_differentiate_returns_a_dense_gradient_for_each_weight() -> None:
    words = keras.Input((2,), dtype="int32")
    embedded = keras.layers.Embedding(5, 3, embeddings_initializer="ones")(words)
    scale = keras.layers.Dense(1, kernel_initializer="ones")
    unused: Any = keras.layers.Dense(1)(embedded)
    outputs = scale(keras.layers.Flatten()(embedded))
    keras_model = keras.Model(words, outputs + keras.ops.stop_gradient(unused[:, 0]))
    model = Model.from_keras(keras_model, loss="mse")

    @rtf.computation(model.batch_type)
    def differentiate(batch: Any) -> Any:
        weights = model.initial_weights()
        weights = ModelWeights(*(tuple(map(tf.constant, part)) for part in weights))
        return model.differentiate(weights, batch, model.totals.zero())[0]

    batch = {"x": np.array([[1, 3]], np.int32), "y": np.zeros(1, np.float32)}
    gradients = differentiate(batch)

    shapes = [v.shape for v in keras_model.trainable_variables]
    assert [gradient.shape for gradient in gradients] == shapes
    by_shape = {gradient.shape: gradient for gradient in gradients}
    assert np.array_equal(np.unique(np.nonzero(by_shape[5, 3])[0]), [1, 3])
    assert not by_shape[3, 1].any()


def test_initial_weights_are_constants_of_computations() -> None:
    model = build_model(build_keras_model())

    copied = rtf.computation(lambda: tuple(model.initial_weights().trainable))()

    assert all(map(np.array_equal, copied, model.initial_weights().trainable))

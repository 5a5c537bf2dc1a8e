"""Every layer of Keras that a functional model can have trains as Keras' own `fit`."""

# pyright: reportUnknownLambdaType=false

import functools
import inspect
import math
import pathlib
from collections.abc import Callable
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import learning
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.learning import callbacks

K = keras.layers
RNG = np.random.default_rng(5)
NUM_ROWS = 3

VECTORS = RNG.normal(size=(2, NUM_ROWS, 6)).astype(np.float32)
SEQUENCES = RNG.normal(size=(2, NUM_ROWS, 8, 4)).astype(np.float32)
IMAGES = RNG.integers(0, 256, (2, NUM_ROWS, 8, 8, 3)).astype(np.float32)
VOLUMES = RNG.normal(size=(2, NUM_ROWS, 4, 4, 4, 2)).astype(np.float32)
NUMBERS = RNG.integers(0, 7, (2, NUM_ROWS, 5)).astype(np.int32)
WORDS = RNG.choice(["a b", "b", "c a", "café"], (2, NUM_ROWS, 1))
SOUNDS = RNG.normal(size=(2, NUM_ROWS, 256)).astype(np.float32)
LABELS = RNG.normal(size=(2, NUM_ROWS)).astype(np.float32)


def adapted(layer: Any, data: Any) -> Any:
    layer.adapt(data)
    return layer


def two(layer: Any) -> Callable[[Any], Any]:
    """Return a layer of two inputs as one of a single input."""
    return lambda x: layer([x, K.Rescaling(0.5, 0.1)(x)])


def attending(layer: Any) -> Callable[[Any], Any]:
    return lambda x: layer(x, x)


def embedded(layer: Any) -> Callable[[Any], Any]:
    return lambda x: K.Embedding(12, 2)(layer(x))


def masked(x: Any) -> Any:
    return K.GRU(2)(K.Masking(0.1)(x))


def with_time(layer: Any, *shape: int) -> Callable[[Any], Any]:
    return lambda x: layer(K.Reshape(shape)(x))


def named(names: str) -> dict[str, Callable[[], Any]]:
    """Return layers that need no argument."""
    return {name: getattr(K, name) for name in names.split()}


ON_VECTORS: dict[str, Callable[[], Any]] = {
    **named(
        "ELU Flatten Identity LayerNormalization LeakyReLU RMSNormalization "
        "Softmax UnitNormalization"
    ),
    "Activation": lambda: K.Activation("gelu"),
    "BatchNormalization": lambda: K.BatchNormalization(momentum=0.6),
    "EinsumDense": lambda: K.EinsumDense("ab,bc->ac", output_shape=2, bias_axes="c"),
    "GroupNormalization": lambda: K.GroupNormalization(2),
    "PReLU": lambda: K.PReLU(alpha_initializer="ones"),
    "ReLU": lambda: K.ReLU(0.5),
    "RepeatVector": lambda: K.RepeatVector(2),
    "Rescaling": lambda: K.Rescaling(0.1, 1.0),
    "Reshape": lambda: K.Reshape((2, 3)),
    "ActivityRegularization": lambda: (
        lambda x: K.ActivityRegularization(l2=0.1)(K.Dense(2)(x))
    ),
    "Add": lambda: two(K.Add()),
    "Average": lambda: two(K.Average()),
    "Concatenate": lambda: two(K.Concatenate()),
    "Dense": lambda: K.Dense(
        3,
        kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02),
        kernel_constraint="max_norm",
    ),
    "Discretization": lambda: embedded(adapted(K.Discretization(num_bins=4), VECTORS)),
    "Discretization_given": lambda: embedded(K.Discretization(bin_boundaries=[0, 1.5])),
    "Dot": lambda: two(K.Dot(1)),
    "Lambda": lambda: K.Lambda(lambda x: x / 255.0),
    "Maximum": lambda: two(K.Maximum()),
    "Minimum": lambda: two(K.Minimum()),
    "Multiply": lambda: two(K.Multiply()),
    "Normalization": lambda: adapted(K.Normalization(), VECTORS[0] * 3 + 1000),
    "SpectralNormalization": lambda: K.SpectralNormalization(K.Dense(3)),
    "Subtract": lambda: two(K.Subtract()),
}
ON_SEQUENCES: dict[str, Callable[[], Any]] = {
    **named(
        "Cropping1D GlobalAveragePooling1D GlobalMaxPooling1D UpSampling1D "
        "ZeroPadding1D"
    ),
    "AdaptiveAveragePooling1D": lambda: K.AdaptiveAveragePooling1D(3),
    "AdaptiveMaxPooling1D": lambda: K.AdaptiveMaxPooling1D(3),
    "AveragePooling1D": lambda: K.AveragePooling1D(2),
    "Conv1D": lambda: K.Conv1D(2, 3, dilation_rate=2, padding="causal"),
    "Conv1DTranspose": lambda: K.Conv1DTranspose(2, 3, 2),
    "DepthwiseConv1D": lambda: K.DepthwiseConv1D(3),
    "MaxPooling1D": lambda: K.MaxPooling1D(2),
    "Permute": lambda: K.Permute((2, 1)),
    "SeparableConv1D": lambda: K.SeparableConv1D(2, 3),
    "AdditiveAttention": lambda: two(K.AdditiveAttention()),
    "Attention": lambda: two(K.Attention(use_scale=True)),
    "GroupedQueryAttention": lambda: attending(K.GroupQueryAttention(2, 4, 2)),
    "MultiHeadAttention": lambda: attending(K.MultiHeadAttention(2, 3)),
}
ON_TIMES: dict[str, Callable[[], Any]] = {
    "GRU": lambda: K.GRU(2, return_sequences=True),
    "LSTM": lambda: K.LSTM(2, go_backwards=True),
    "SimpleRNN": lambda: K.SimpleRNN(2),
    "Bidirectional": lambda: K.Bidirectional(K.GRU(2)),
    "Masking": lambda: masked,
    "RNN": lambda: K.RNN(K.LSTMCell(2)),
    "StackedRNNCells": lambda: K.RNN(
        K.StackedRNNCells([K.GRUCell(2), K.SimpleRNNCell(3)])
    ),
    "TimeDistributed": lambda: K.TimeDistributed(K.Dense(2)),
}
ON_IMAGES: dict[str, Callable[[], Any]] = {
    **named(
        "Cropping2D GlobalAveragePooling2D GlobalMaxPooling2D UpSampling2D "
        "ZeroPadding2D"
    ),
    "AdaptiveAveragePooling2D": lambda: K.AdaptiveAveragePooling2D(3),
    "AdaptiveMaxPooling2D": lambda: K.AdaptiveMaxPooling2D(3),
    "AveragePooling2D": lambda: K.AveragePooling2D(2),
    "CenterCrop": lambda: K.CenterCrop(4, 4),
    "Conv2D": lambda: K.Conv2D(2, 3, 2, groups=1),
    "Conv2DTranspose": lambda: K.Conv2DTranspose(2, 3),
    "ConvLSTM1D": lambda: K.ConvLSTM1D(2, 3),
    "DepthwiseConv2D": lambda: K.DepthwiseConv2D(3),
    "MaxPooling2D": lambda: K.MaxPooling2D(2),
    "Resizing": lambda: K.Resizing(5, 6),
    "SeparableConv2D": lambda: K.SeparableConv2D(2, 3),
}
ON_VOLUMES: dict[str, Callable[[], Any]] = {
    **named("Cropping3D GlobalAveragePooling3D GlobalMaxPooling3D ZeroPadding3D"),
    "AdaptiveAveragePooling3D": lambda: K.AdaptiveAveragePooling3D(2),
    "AdaptiveMaxPooling3D": lambda: K.AdaptiveMaxPooling3D(2),
    "AveragePooling3D": lambda: K.AveragePooling3D(2),
    "Conv3D": lambda: K.Conv3D(2, 2),
    "Conv3DTranspose": lambda: K.Conv3DTranspose(2, 2),
    "ConvLSTM2D": lambda: K.ConvLSTM2D(2, 2),
    "MaxPooling3D": lambda: K.MaxPooling3D(2),
    "UpSampling3D": lambda: K.UpSampling3D(2),
    "ConvLSTM3D": lambda: with_time(K.ConvLSTM3D(1, 2), 2, 4, 4, 2, 2),
}
ON_NUMBERS: dict[str, Callable[[], Any]] = {
    "CategoryEncoding": lambda: K.CategoryEncoding(8, "multi_hot"),
    "Embedding": lambda: K.Embedding(8, 3),
    "ReversibleEmbedding": lambda: K.ReversibleEmbedding(8, 3),
    "HashedCrossing": lambda: (
        lambda x: K.Embedding(12, 2)(K.HashedCrossing(12)([x[:, :1], x[:, 1:2]]))
    ),
    "Hashing": lambda: embedded(K.Hashing(8)),
    "IntegerLookup": lambda: embedded(adapted(K.IntegerLookup(), NUMBERS[0])),
    "IntegerLookup_given": lambda: embedded(K.IntegerLookup(vocabulary=[4, 1, 3])),
}
ON_WORDS: dict[str, Callable[[], Any]] = {
    "Hashing_of_words": lambda: embedded(K.Hashing(5)),
    "HashedCrossing_of_words": lambda: (
        lambda x: K.HashedCrossing(4, output_mode="one_hot")([x, x])
    ),
    "StringLookup": lambda: embedded(adapted(K.StringLookup(), WORDS[0])),
    "StringLookup_several_unknown": lambda: embedded(
        adapted(K.StringLookup(num_oov_indices=3), WORDS[0][:1])
    ),
    "StringLookup_given": lambda: K.StringLookup(
        vocabulary=["b", "café"], output_mode="one_hot"
    ),
    "TextVectorization": lambda: embedded(
        adapted(K.TextVectorization(output_sequence_length=3), WORDS[0])
    ),
    "TextVectorization_weighed": lambda: adapted(
        K.TextVectorization(output_mode="tf_idf"), WORDS[0]
    ),
}
ON_SOUNDS: dict[str, Callable[[], Any]] = {
    "MelSpectrogram": lambda: K.MelSpectrogram(64, 32, num_mel_bins=8),
    "STFTSpectrogram": lambda: (
        lambda x: K.STFTSpectrogram("log", 32, 16, 32)(K.Reshape((256, 1))(x))
    ),
}
ON_PICTURES: dict[str, Callable[[], Any]] = {
    **named("AutoContrast Equalization"),
    "ContrastLimitedAdaptiveHistogramEqualization": lambda: (
        K.ContrastLimitedAdaptiveHistogramEqualization(tile_grid_size=(2, 2))
    ),
}
RANDOM_VECTORS: dict[str, Callable[[], Any]] = {
    "AlphaDropout": lambda: K.AlphaDropout(0.5),
    "Dropout": lambda: K.Dropout(0.5),
    "GaussianDropout": lambda: K.GaussianDropout(0.5),
    "GaussianNoise": lambda: K.GaussianNoise(1.0),
}
RANDOM_SEQUENCES: dict[str, Callable[[], Any]] = {
    "SpatialDropout1D": lambda: K.SpatialDropout1D(0.5),
}
RANDOM_VOLUMES: dict[str, Callable[[], Any]] = {
    "SpatialDropout3D": lambda: K.SpatialDropout3D(0.5),
}
RANDOM_IMAGES: dict[str, Callable[[], Any]] = {
    **named(
        "AugMix RandAugment RandomElasticTransform RandomErasing RandomFlip "
        "RandomGaussianBlur RandomGrayscale RandomInvert RandomPerspective "
        "Solarization"
    ),
    "RandomBrightness": lambda: K.RandomBrightness(0.2),
    "RandomColorDegeneration": lambda: K.RandomColorDegeneration(0.5),
    "RandomColorJitter": lambda: K.RandomColorJitter(brightness_factor=0.2),
    "RandomContrast": lambda: K.RandomContrast(0.2),
    "RandomHue": lambda: K.RandomHue(0.2),
    "RandomPosterization": lambda: K.RandomPosterization(4),
    "RandomRotation": lambda: K.RandomRotation(0.2),
    "RandomSaturation": lambda: K.RandomSaturation(0.2),
    "RandomSharpness": lambda: K.RandomSharpness(0.2),
    "RandomTranslation": lambda: K.RandomTranslation(0.2, 0.2),
    "RandomZoom": lambda: K.RandomZoom(0.2),
    "SpatialDropout2D": lambda: K.SpatialDropout2D(0.5),
    "Pipeline": lambda: K.Pipeline([K.RandomFlip(), K.RandomBrightness(0.2)]),
    # Outside of training Keras leaves images as large as they are.
    "RandomCrop": lambda: lambda x: K.GlobalMaxPooling2D()(K.RandomCrop(4, 4)(x)),
}
LEFT_OUT = {
    "FlaxLayer": "of JAX",
    "JaxLayer": "of JAX",
    "TorchModuleWrapper": "of PyTorch",
    "TFSMLayer": "a saved model: not to be trained",
    "GRUCell": "in StackedRNNCells",
    "LSTMCell": "in RNN",
    "SimpleRNNCell": "in StackedRNNCells",
    "CutMix": "of images with labels, in a pipeline of data",
    "MixUp": "of images with labels, in a pipeline of data",
    "MaxNumBoundingBoxes": "of boxes, in a pipeline of data",
    "InputLayer": "in all",
    "Layer": "a base class",
    "Wrapper": "a base class",
    "RandomShear": "its config cannot be read, by Keras 3.15 itself",
}
GROUPS: dict[str, tuple[Any, dict[str, Callable[[], Any]]]] = {
    "vectors": (VECTORS, ON_VECTORS),
    "sequences": (SEQUENCES, ON_SEQUENCES),
    "times": (SEQUENCES, ON_TIMES),
    "images": (IMAGES / 255, ON_IMAGES),
    "pictures": (IMAGES, ON_PICTURES),
    "volumes": (VOLUMES, ON_VOLUMES),
    "numbers": (NUMBERS, ON_NUMBERS),
    "words": (WORDS, ON_WORDS),
    "sounds": (SOUNDS, ON_SOUNDS),
}
RANDOM_GROUPS: dict[str, tuple[Any, dict[str, Callable[[], Any]]]] = {
    "vectors": (VECTORS, RANDOM_VECTORS),
    "sequences": (SEQUENCES, RANDOM_SEQUENCES),
    "volumes": (VOLUMES, RANDOM_VOLUMES),
    "images": (IMAGES, RANDOM_IMAGES),
}
"""Layers on each kind of input, by the names of their classes, with `_` and more."""
QUICK = ["words"]


def test_table_has_every_layer() -> None:
    classes = {
        value.__name__
        for value in vars(keras.layers).values()
        if inspect.isclass(value) and issubclass(value, keras.layers.Layer)
    }

    tables = [table for _, table in [*GROUPS.values(), *RANDOM_GROUPS.values()]]

    names = {name.partition("_")[0] for table in tables for name in table}
    assert names | set(LEFT_OUT) == classes


def build_keras_model(data: Any, makers: dict[str, Callable[[], Any]]) -> keras.Model:
    """Return a model with a branch for each layer, and weights that see its outputs."""
    keras.utils.set_random_seed(3)
    dtype = "string" if data.dtype.kind == "U" else str(data.dtype)
    inputs = keras.Input(data.shape[2:], dtype=dtype)
    # Small numbers for the last activation: at its ends nothing would be trained.
    scale = 1 / np.max(data) if data.dtype.kind == "f" else 1.0
    branches: list[Any] = []
    for name, make in makers.items():
        outputs = K.Rescaling(scale)(K.Flatten()(make()(inputs)))
        branches.append(K.Dense(1, name=f"behind_{name}")(outputs))
    mean = branches[0] if len(branches) == 1 else K.Average()(branches)
    return keras.Model(inputs, K.Activation("tanh")(mean))


def train(keras_model: keras.Model, data: Any) -> tuple[learning.Model, Any]:
    """Return the state after a round of one client with a row of batches."""
    model = learning.Model.from_keras(keras_model, loss="mse")
    process = learning.build_fed_avg(model, "sgd")
    state, _ = process.next(process.initialize(), [batches_of(data)])
    return model, state


def batches_of(data: Any) -> list[Any]:
    return [{"x": x, "y": y} for x, y in zip(data, LABELS, strict=True)]


def to_tensor(keras_model: Any, x: Any) -> Any:
    return keras.ops.convert_to_tensor(x, dtype=keras_model.inputs[0].dtype)


def predict(keras_model: Any, data: Any, batch: int = 0) -> Any:
    return np.asarray(keras_model(to_tensor(keras_model, data[batch]), training=False))


def expect_equal(found: keras.Model, expected: keras.Model) -> None:
    """Raise, and name them, if weights of two models differ, but for seeds."""
    differing = [
        f"{wanted.path}: {np.max(np.abs(np.subtract(weight, wanted))):.2g}"
        for weight, wanted in zip(found.variables, expected.variables, strict=True)
        if wanted.name != "seed_generator_state"
        and not np.allclose(weight, wanted, rtol=1e-5, atol=1e-6)
    ]
    assert not differing


def each_group(groups: Any) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in groups
    ]


@pytest.mark.parametrize("group", each_group(GROUPS))
def test_layers_train_as_keras_fits(
    group: str, thread_context: ExecutionContext
) -> None:
    data, makers = GROUPS[group]
    reference = build_keras_model(data, makers)
    reference.compile("sgd", "mse", run_eagerly=True)
    for x, y in zip(data, LABELS, strict=True):
        reference.train_on_batch(to_tensor(reference, x), y[:, None])

    keras_model = build_keras_model(data, makers)
    model, state = train(keras_model, data)

    report = thread_context.last_report
    assert report is not None
    assert (report.no_kernel, report.unlowered) == ((), ())
    trained = model.to_keras(state)
    expect_equal(trained, reference)
    np.testing.assert_allclose(
        predict(trained, data), predict(reference, data), rtol=1e-5, atol=1e-6
    )
    untrained = model.to_keras(model.initial_weights())
    np.testing.assert_array_equal(predict(untrained, data), predict(keras_model, data))
    if group in QUICK:
        evaluation = learning.build_fed_eval(model)
        found = evaluation.next(state.weights, [batches_of(data)])
        predicted = [predict(reference, data, batch)[:, 0] for batch in range(2)]
        expected = np.mean((np.stack(predicted) - LABELS) ** 2)
        np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("group", each_group(RANDOM_GROUPS))
def test_random_layers_train_and_are_given_back(group: str) -> None:
    data, makers = RANDOM_GROUPS[group]
    keras_model = build_keras_model(data, makers)

    model, state = train(keras_model, data)

    trained = model.to_keras(state)
    for weight, initial in zip(
        trained.trainable_variables, keras_model.trainable_variables, strict=True
    ):
        assert np.all(np.isfinite(weight.numpy()))
        assert np.any(weight.numpy() != initial.numpy())
    keras_model.set_weights(trained.get_weights())
    np.testing.assert_array_equal(predict(trained, data), predict(keras_model, data))


class Counting(K.Layer):
    """Counts batches in a whole number, and in a flag, as a layer of one's own may."""

    @override
    def build(self, input_shape: Any) -> None:
        self.count = self.add_weight(
            shape=(2,), dtype="int32", initializer="ones", trainable=False, name="count"
        )
        self.flag = self.add_weight(
            shape=(), dtype="bool", initializer="zeros", trainable=False, name="flag"
        )

    @override
    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.count.assign_add([1, 3])
            self.flag.assign(True)
        return inputs * keras.ops.cast(self.count[0], "float32")


class Scaling(K.Layer):
    """Has a weight, and an argument that its config lacks."""

    def __init__(self, factor: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    @override
    def build(self, input_shape: Any) -> None:
        self.bias = self.add_weight(shape=(), name="bias")

    @override
    def call(self, inputs: Any) -> Any:
        return inputs * self.factor + self.bias

    @override
    def get_config(self) -> dict[str, Any]:
        return {"name": self.name}


def build_stack(*layers: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((6,)), *layers, K.Dense(1)])


def fit(keras_model: Any) -> keras.Model:
    keras_model.compile("sgd", "mse", run_eagerly=True)
    for x, y in zip(VECTORS, LABELS, strict=True):
        keras_model.train_on_batch(x, y[:, None])
    return keras_model


def build_counting() -> keras.Model:
    return build_stack(Counting())


def build_shifting() -> keras.Model:
    """Return a model whose first bias is not trained, alone among its layer's."""
    first: Any = K.Dense(4, kernel_initializer="ones")
    second = K.Dense(4, kernel_initializer="ones")
    keras_model = build_stack(first, second)
    first.bias.trainable = False
    first.bias.assign([9.0] * 4)
    return keras_model


def build_called() -> keras.Model:
    """Return a model that a call built: it takes batches of any size."""
    keras.utils.set_random_seed(3)
    keras_model = keras.Sequential([K.Dense(4), K.BatchNormalization(), K.Dense(1)])
    keras_model(VECTORS[0, :2])
    return keras_model


@pytest.mark.parametrize(
    "build",
    [
        build_counting,
        pytest.param(build_shifting, marks=pytest.mark.slow),
        pytest.param(build_called, marks=pytest.mark.slow),
    ],
)
def test_weights_of_other_kinds_are_those_of_fit(build: Any) -> None:
    reference = fit(build())

    model, state = train(build(), VECTORS)

    trained: Any = model.to_keras(state)
    expect_equal(trained, reference)
    if build is build_shifting:
        np.testing.assert_array_equal(trained.layers[0].bias.numpy(), [9.0] * 4)
    if build is build_counting:
        assert state.weights.non_trainable[0].tolist() == [3, 7]


def build_unreached() -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    unused: Any = K.Dense(2, name="unused")(inputs)
    outputs = K.Dense(1)(K.Add()([inputs, keras.ops.stop_gradient(unused[:, :1])]))
    return keras.Model(inputs, outputs)


ALGORITHMS: dict[str, Callable[[learning.Model], Any]] = {
    "FedProx": lambda m: learning.build_fed_prox(
        m, keras.optimizers.AdamW(0.1), proximal=0.5
    ),
    "Mime Lite": lambda m: learning.build_mime_lite(m, "sgd"),
}


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "FedProx" else pytest.mark.slow)
        for name in ALGORITHMS
    ],
)
def test_weight_that_the_loss_does_not_reach_stays(name: str) -> None:
    keras_model = build_unreached()
    model = learning.Model.from_keras(keras_model, loss="mse")

    result = learning.run(ALGORITHMS[name](model), [batches_of(VECTORS)], num_rounds=1)

    trained: Any = model.to_keras(result.state)
    for weight, initial in zip(trained.weights, keras_model.weights, strict=True):
        same = np.array_equal(weight.numpy(), initial.numpy())
        assert same == ("unused" in weight.path)


def test_loss_that_reaches_no_weight_is_refused() -> None:
    inputs = keras.Input((6,))
    outputs = keras.ops.stop_gradient(K.Dense(1)(inputs))
    model = learning.Model.from_keras(keras.Model(inputs, outputs), loss="mse")

    with pytest.raises(errors.ValueMismatchError, match="depends on none of them"):
        learning.build_fed_avg(model, "sgd")


def test_layer_whose_config_lacks_an_argument_is_named(
    tmp_path: pathlib.Path,
) -> None:
    keras_model = build_stack(Scaling(3.0))
    model = learning.Model.from_keras(keras_model, loss="mse")
    checkpoint = callbacks.ModelCheckpoint(tmp_path / "best.keras", model)

    with pytest.raises(errors.ValueMismatchError, match="`Scaling` named"):
        checkpoint.on_start(learning.History())

    with pytest.raises(
        errors.ValueMismatchError, match=r"`factor` of `1.0`, not `3.0`"
    ):
        model.to_keras(model.initial_weights())


def shifted(x: Any) -> Any:
    return x + 1.0


def test_functions_and_classes_need_not_be_registered_to_be_given_back() -> None:
    class Local(Counting):
        pass

    keras_model = build_stack(
        Local(), K.Dense(2, activation=shifted), K.Lambda(shifted)
    )
    model = learning.Model.from_keras(keras_model, loss="mse")

    given_back = model.to_keras(model.initial_weights())

    expected = predict(keras_model, VECTORS)
    np.testing.assert_array_equal(predict(given_back, VECTORS), expected)


@pytest.mark.parametrize("build", [learning.build_fed_sgd, learning.build_mime_lite])
def test_layers_that_write_weights_are_refused_where_weights_are_fixed(
    build: Any,
) -> None:
    keras_model = build_stack(K.SpectralNormalization(K.Dense(2)))
    model = learning.Model.from_keras(keras_model, loss="mse")

    with pytest.raises(errors.ValueMismatchError, match="SpectralNormalization"):
        build(model, "sgd")


class Keeping(Scaling):
    """Computes with anything, and has a config that lacks it."""

    def __init__(self, setting: Any = (1.0, 1.0), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._setting = setting

    @override
    def call(self, inputs: Any) -> Any:
        return inputs + self.bias


def scale_by(factor: float) -> Any:
    return lambda x: x * factor


@pytest.mark.parametrize(
    "setting",
    [
        [1.0, 2.0], (1.0, 2.0), np.ones(3), tf.zeros(2), {"a": 2}, {"a": [{1, 2}]}, {3},
        shifted, scale_by(2.0), functools.partial(scale_by, 3.0), b"text", 2 + 1j,
        keras.initializers.Constant(2.0), fl.TensorType(np.int32),
    ],
    ids=lambda setting: type(setting).__name__,
)  # fmt: skip
def test_settings_that_a_config_lacks_are_refused(setting: Any) -> None:
    keras_model = build_stack(Keeping(setting))
    model = learning.Model.from_keras(keras_model, loss="mse")

    with pytest.raises(errors.ValueMismatchError, match=r"`_setting` of `\(1\.0, 1\.0"):
        model.to_keras(model.initial_weights())


class Saying(Keeping):
    """Has a config with its setting, as Keras reads it back."""

    @override
    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "setting": self._setting}


@pytest.mark.parametrize(
    "setting",
    [
        [1.0, (2, "a")], np.float32(1.5), 1, math.nan, {"a": np.arange(3)}, shifted,
        scale_by(2.0), None, keras.initializers.Constant(2.0),
    ],
    ids=lambda setting: type(setting).__name__,
)  # fmt: skip
def test_settings_of_a_config_are_given_back(setting: Any) -> None:
    keras_model = build_stack(Saying(setting))
    model = learning.Model.from_keras(keras_model, loss="mse")

    given_back = model.to_keras(model.initial_weights())

    expected = predict(keras_model, VECTORS)
    np.testing.assert_array_equal(predict(given_back, VECTORS), expected)


def test_speech_models_train_by_ctc() -> None:
    def build() -> keras.Model:
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((5, 4)), K.Dense(4)])

    generator = np.random.default_rng(0)
    x = generator.normal(size=(4, 5, 4)).astype(np.float32)
    y = generator.integers(1, 4, (4, 2)).astype(np.int32)
    loss: Any = keras.losses.CTC()
    keras_model: Any = build()
    label_type = fl.TensorType(np.int32, [None, 2])
    model = learning.Model.from_keras(build(), loss=loss, label_type=label_type)
    process = learning.build_fed_avg(model, keras.optimizers.SGD(0.1))

    state, _ = process.next(process.initialize(), [[{"x": x, "y": y}]])

    with tf.GradientTape() as tape:
        value = loss(y, keras_model(x))
    variables = [variable.value for variable in keras_model.trainable_variables]
    gradients: Any = tape.gradient(value, variables)
    for weight, before, gradient in zip(
        state.weights.trainable, variables, gradients, strict=True
    ):
        np.testing.assert_allclose(weight, before - 0.1 * gradient, atol=1e-6)

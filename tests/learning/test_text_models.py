"""Models that take strings and categories train as Keras trains them."""

from collections.abc import Callable
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed import learning
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.program import ClientData

pd: Any = pytest.importorskip("pandas")
layers: Any = keras.layers

WORDS = np.array(["ann", "bob", "cat", "dog", "eel", "café"])
LABELS = fl.TensorType(np.float32, [None, 1])
RATE = 0.1
LAYERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "vocabulary": ("str", lambda: layers.StringLookup(vocabulary=["ann", "bob"])),
    "adapted": ("str", lambda: _adapted(layers.StringLookup(num_oov_indices=3))),
    "hashed": ("str", lambda: layers.Hashing(5)),
    "text": (
        "str",
        lambda: _adapted(layers.TextVectorization(output_sequence_length=2)),
    ),
    "numbers": ("int64", lambda: layers.IntegerLookup(vocabulary=[4, 1, 3])),
    "bins": ("float32", lambda: layers.Discretization(bin_boundaries=[0.0, 1.5])),
}
"""By input: its dtype, and a layer that makes indices of it."""
ENCODERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "one-hot": (
        "str",
        lambda: layers.StringLookup(vocabulary=["ann", "café"], output_mode="one_hot"),
    ),
    "tf-idf": ("str", lambda: _adapted(layers.TextVectorization(output_mode="tf_idf"))),
    "encoded": ("int32", lambda: layers.CategoryEncoding(6, output_mode="one_hot")),
}
"""By input: its dtype, and a layer that makes rows of numbers of it."""
DTYPES = {name: dtype for name, (dtype, _) in (LAYERS | ENCODERS).items()}


def _adapted(layer: Any) -> Any:
    layer.adapt(np.array(["dog cat", "ann bob", "cat"]))
    return layer


def build_model() -> Any:
    """Return a Keras model with an input for each of the layers."""
    keras.utils.set_random_seed(0)
    inputs = {
        name: keras.Input((1,), dtype="string" if dtype == "str" else dtype, name=name)
        for name, dtype in DTYPES.items()
    }
    parts = [
        layers.Flatten()(make()(inputs[name])) for name, (_, make) in ENCODERS.items()
    ]
    for name, (_, make) in LAYERS.items():
        embedded = layers.Embedding(9, 2)(make()(inputs[name]))
        parts.append(layers.Flatten()(embedded))
    pair = [inputs["vocabulary"], inputs["hashed"]]
    parts.append(layers.HashedCrossing(4, output_mode="one_hot")(pair))
    return keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(parts)))


def draw_batch(random: np.random.Generator, num_rows: int) -> Any:
    shape = num_rows, 1
    values: dict[str, Callable[[], Any]] = {
        "str": lambda: random.choice(WORDS, shape),
        "int64": lambda: random.integers(0, 6, shape),
        "int32": lambda: random.integers(0, 6, shape, np.int32),
        "float32": lambda: random.normal(size=shape).astype(np.float32),
    }
    return {
        "x": {name: values[dtype]() for name, dtype in DTYPES.items()},
        "y": random.normal(size=shape).astype(np.float32),
    }


@pytest.mark.slow
def test_round_and_evaluation_are_those_of_keras(
    thread_context: ExecutionContext,
) -> None:
    keras_model = build_model()
    model = learning.Model.from_keras(keras_model, loss="mse", label_type=LABELS)
    training = learning.build_fed_avg(model, keras.optimizers.SGD(RATE))
    evaluation = learning.build_fed_eval(model, training)
    random = np.random.default_rng(0)
    batches = [draw_batch(random, 4) for _ in range(3)]

    state, metrics = training.next(training.initialize(), [batches])
    report = thread_context.last_report
    evaluated = evaluation.next(state, [batches])

    assert report is not None
    assert (report.no_kernel, report.unlowered) == ((), ())
    x = {
        name: keras.ops.convert_to_tensor(  # Keras refuses strings of numpy
            np.concatenate([batch["x"][name] for batch in batches])
        )
        for name in DTYPES
    }
    y = np.concatenate([batch["y"] for batch in batches])
    keras_model.compile(keras.optimizers.SGD(RATE), "mse")
    told = keras_model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    np.testing.assert_allclose(metrics["loss"], told.history["loss"][0], rtol=1e-6)
    for found, wanted in zip(
        state.weights.trainable, keras_model.trainable_variables, strict=True
    ):
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6, atol=1e-6)
    expected = keras_model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(evaluated["loss"], expected, rtol=1e-6)


WORDS_OF_CLIENTS = pd.DataFrame(
    {
        "client": list("aabbccca"),
        "word": [*WORDS, *WORDS[:2]],
        "y": np.arange(8, dtype=np.float32),
    }
)


def run_on_words(context: ExecutionContext, frame: Any) -> Any:
    keras.utils.set_random_seed(0)
    lookup = layers.StringLookup(vocabulary=["ann", "bob"], output_mode="one_hot")
    keras_model = keras.Sequential(
        [keras.Input((), dtype="string"), lookup, layers.Dense(1)]
    )
    model = learning.Model.from_keras(keras_model, loss="mse")
    data = ClientData.from_table(frame, client="client", x="word", y="y").batch(2)
    process = learning.build_fed_avg(model, keras.optimizers.SGD(RATE))
    with fl.framework.get_context_stack().install(context):
        result = learning.run(process, data, num_rounds=2, cohort_size=3, seed=0)
    return [np.asarray(part).tobytes() for part in result.state.weights.trainable]


@pytest.mark.slow
def test_columns_of_strings_train_alike_whatever_their_dtype(
    thread_context: ExecutionContext,
) -> None:
    found = [
        run_on_words(thread_context, WORDS_OF_CLIENTS.astype({"word": dtype}))
        for dtype in (object, "string", "category")
    ]

    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("layer", [layers.StringLookup, layers.TextVectorization])
def test_layer_without_vocabulary_is_refused(layer: Callable[[], Any]) -> None:
    keras_model = keras.Sequential(
        [keras.Input((1,), dtype="string"), layer(), layers.Embedding(9, 2),
         layers.GlobalAveragePooling1D(), layers.Dense(1)]
    )  # fmt: skip
    model = learning.Model.from_keras(keras_model, loss="mse", label_type=LABELS)

    with pytest.raises(errors.CompileError, match="vocabulary, or call `adapt`"):
        learning.build_fed_avg(model, keras.optimizers.SGD(RATE))

"""Weights that are not trained: in graphs alone, and as Keras itself treats them."""

# pyright: reportUnknownLambdaType=false

import gc
from collections.abc import Callable
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import framework, learning
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.learning import Model
from ray_fed.learning.processes import LearningProcess
from ray_fed.tensorflow.traced_graph import Constant
from ray_fed.values import frozen_arrays
from tests.learning.test_keras_layers import Counting

BATCH = {
    "x": np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32),
    "y": np.arange(6, dtype=np.int32) % 3,
}

TOKENS = {
    "x": np.random.default_rng(1).integers(0, 9, (6, 4)).astype(np.int32),
    "y": BATCH["y"],
}


def build_keras_model() -> keras.Model:
    """Return a model with a frozen base that normalizes, and a head."""
    keras.utils.set_random_seed(5)
    base = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
        ],
        name="base",
    )
    base.trainable = False
    inputs = keras.Input((4,))
    hidden = keras.layers.BatchNormalization()(base(inputs))
    return keras.Model(inputs, keras.layers.Dense(3)(hidden))


def build_counting_model() -> keras.Model:
    """Return a model with a layer that is not trained, and writes."""
    keras.utils.set_random_seed(5)
    counting = Counting(trainable=False)
    return keras.Sequential([keras.Input((4,)), counting, keras.layers.Dense(3)])


def build_lora_model() -> keras.Model:
    """Return a model whose kernels have adapters, some in a layer of layers."""
    keras.utils.set_random_seed(5)
    tokens = keras.Input((4,), dtype="int32")
    embedded = keras.layers.Embedding(9, 6)(tokens)
    attended = keras.layers.MultiHeadAttention(2, 3)(embedded, embedded)
    hidden = keras.layers.EinsumDense("abc,cd->abd", (None, 6))(attended)
    pooled = keras.layers.GlobalAveragePooling1D()(hidden)
    return enable_lora(keras.Model(tokens, keras.layers.Dense(3)(pooled)))


WIDTH, BIG_WIDTH = 400, 1024


def build_wide_model(width: int = WIDTH, dtype: str = "float32") -> keras.Model:
    """Return a model of two large kernels with adapters, and a head that is trained."""
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(width, dtype=dtype) for _ in range(2)]
    head = keras.layers.Dense(3)
    keras_model = keras.Sequential([keras.Input((width,)), *layers, head])
    for layer in layers:
        layer.enable_lora(1)
    return keras_model


def batch_of(width: int) -> dict[str, Any]:
    x = np.random.default_rng(1).normal(size=(6, width)).astype(np.float32)
    return {"x": x, "y": BATCH["y"]}


WIDE_BATCH = batch_of(WIDTH)


def enable_lora(keras_model: Any) -> keras.Model:
    for layer in keras_model._flatten_layers():
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(1)
    return keras_model


def build_model(keras_model: keras.Model) -> Model:
    return Model.from_keras(
        keras_model,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def run_rounds(process: LearningProcess, data: Any, num_rounds: int) -> Any:
    state = process.initialize()
    for _ in range(num_rounds):
        state, _ = process.next(state, data)
    return state


def test_state_and_updates_have_no_frozen_weights() -> None:
    model = build_model(build_keras_model())

    assert str(model.weights_type) == (
        "<trainable=<float32[8],float32[8],float32[8,3],float32[3]>,"
        "non_trainable=<float32[8],float32[8]>>"
    )
    assert model.statistics_indices == (0, 1)
    initial = model.initial_weights()
    assert [len(initial.trainable), len(initial.non_trainable)] == [4, 2]


def test_kernels_under_adapters_are_constants() -> None:
    keras_model = build_lora_model()

    model = build_model(keras_model)

    names = [variable.name for variable in model.trainable_variables]
    assert set(names) == {
        "bias",
        *(f"lora_{of}_{half}" for of in ("kernel", "embeddings") for half in "ab"),
    }
    weights_type: Any = model.weights_type
    assert len(weights_type.trainable) == len(names)
    assert list(weights_type.non_trainable) == []


def test_constants_of_layers_are_no_part_of_the_state_but_their_seeds_are() -> None:
    scaled = keras.layers.Normalization(mean=[1.0] * 4, variance=[4.0] * 4)
    adapted = keras.layers.Normalization()
    adapted.adapt(BATCH["x"])
    frozen = keras.layers.Dropout(0.5, trainable=False)
    batch = keras.layers.BatchNormalization()
    layers = [keras.Input((4,)), scaled, adapted, frozen, batch, keras.layers.Dense(3)]

    model = build_model(keras.Sequential(layers))

    assert sorted(v.shape for v in model.initial_weights().non_trainable) == [
        (2,), (4,), (4,),
    ]  # fmt: skip
    assert len(model.statistics_indices) == 2
    assert len(model.initial_weights().non_trainable) == 3


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        pytest.param(build_keras_model, BATCH, id="frozen layers"),
        pytest.param(build_counting_model, BATCH, id="a frozen layer that writes"),
        pytest.param(build_lora_model, TOKENS, id="adapters", marks=pytest.mark.slow),
        pytest.param(build_wide_model, WIDE_BATCH, id="adapters on large kernels"),
    ],
)
def test_training_is_that_of_keras(
    build: Callable[[], keras.Model], batch: dict[str, Any]
) -> None:
    reference = build()
    model = build_model(build())
    process = learning.build_fed_avg(model, keras.optimizers.SGD(0.1))
    reference.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

    state = run_rounds(process, [[batch, batch]], 3)
    for _ in range(6):
        reference.train_on_batch(batch["x"], batch["y"])

    found = model.to_keras(state)
    assert [v.name for v in found.variables] == [v.name for v in reference.variables]
    for weight, expected in zip(
        found.get_weights(), reference.get_weights(), strict=True
    ):
        np.testing.assert_allclose(weight, expected, atol=1e-5)
    np.testing.assert_allclose(
        found(batch["x"]), reference(batch["x"], training=False), atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.ray
def test_adapters_alone_travel(
    ray_contexts: Callable[..., ExecutionContext],
) -> None:
    layers = [keras.Input((4,)), keras.layers.Dense(2000), keras.layers.Dense(3)]
    keras_model = enable_lora(keras.Sequential(layers))
    model = build_model(keras_model)
    process = learning.build_fed_avg(model, keras.optimizers.SGD(0.1))
    context = ray_contexts(workers=1, subrounds=1)
    fl.framework.set_default_context(context)

    state = run_rounds(process, [[BATCH], [BATCH]], 2)

    report = context.last_report
    assert report is not None
    trained = sum(value.nbytes for value in state.weights.trainable)
    others = sum(v.value.numpy().nbytes for v in keras_model.non_trainable_variables)
    assert others > trained
    assert trained <= report.bytes_broadcast < 1.1 * trained
    assert trained <= report.bytes_returned < 1.1 * trained


def test_another_base_is_another_process() -> None:
    layer = keras.layers.Dense(3)
    keras_model = enable_lora(keras.Sequential([keras.Input((4,)), layer]))
    first, again = (
        learning.build_fed_avg(build_model(keras_model), "sgd") for _ in range(2)
    )
    kernel = layer.non_trainable_variables[0]
    kernel.assign(kernel + 1)

    other = learning.build_fed_avg(build_model(keras_model), "sgd")

    names = [rtf.identify_computation(p.next) for p in (first, again, other)]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda model: learning.build_scaffold(model, 0.1, num_clients=2),
            id="scaffold",
        ),
        pytest.param(
            lambda model: learning.build_mime_lite(
                model, keras.optimizers.SGD(0.1, momentum=0.9)
            ),
            id="mime lite",
        ),
    ],
)
@pytest.mark.slow
def test_every_part_leaves_the_base_as_it_is(build: Any) -> None:
    keras_model = build_keras_model()
    model = build_model(keras_model)
    process = build(model)
    evaluation = learning.build_fed_eval(model)

    result = learning.run(process, [[BATCH], [BATCH]], num_rounds=2, cohort_size=2)

    found = model.to_keras(result.state)
    base: Any = keras_model.get_layer("base")
    trained: Any = found.get_layer("base")
    np.testing.assert_equal(base.get_weights(), trained.get_weights())
    assert not np.array_equal(
        keras_model.layers[-1].get_weights()[0], found.layers[-1].get_weights()[0]
    )
    metrics = evaluation.next(result.state.weights, [[BATCH]])
    logits = found(BATCH["x"], training=False)
    accuracy = np.mean(np.argmax(logits, axis=1) == BATCH["y"])
    np.testing.assert_allclose(metrics["accuracy"], accuracy, atol=1e-6)


def test_values_are_those_when_the_model_was_made() -> None:
    keras_model = build_keras_model()
    model = build_model(keras_model)
    base: Any = keras_model.get_layer("base")
    before, initial = base.get_weights()[0], model.initial_weights()

    base.set_weights([weight + 1 for weight in base.get_weights()])

    found: Any = model.to_keras(initial).get_layer("base")
    np.testing.assert_array_equal(found.get_weights()[0], before)


def load_other_weights(keras_model: Any) -> None:
    keras_model.set_weights([weight + 1 for weight in keras_model.get_weights()])


def train_the_base(keras_model: Any) -> None:
    keras_model.get_layer("base").trainable = True


@pytest.mark.parametrize("change", [load_other_weights, train_the_base])
def test_changes_after_the_model_was_made_are_refused(change: Any) -> None:
    keras_model = build_keras_model()
    model = build_model(keras_model)

    change(keras_model)

    with pytest.raises(errors.ValueMismatchError, match="call `from_keras` after it"):
        learning.build_fed_avg(model, "sgd")


def test_large_constants_are_no_part_of_graphs() -> None:
    process = learning.build_fed_avg(build_model(build_wide_model()), "sgd")

    serialized = framework.serialize_computation(process.next)

    names = frozen_arrays.names_in(serialized)
    assert len(names) == 2
    assert len(serialized) < WIDTH * WIDTH * 4


def test_values_of_a_variable_are_not_copied() -> None:
    keras_model = build_wide_model()
    variable = keras_model.non_trainable_variables[0]
    variable.assign(variable + 1)  # no other test has these values
    value = tf.convert_to_tensor(variable)

    constant = Constant(value)

    found = frozen_arrays.get(constant.digest)
    assert np.shares_memory(found.content, value._numpy())


def test_process_outlives_its_model(local_contexts: Any) -> None:
    process = learning.build_fed_avg(build_model(build_wide_model()), "sgd")
    gc.collect()

    state, _ = process.next(process.initialize(), [[WIDE_BATCH]])

    assert np.any(state.weights.trainable[-1] != 0)


def freeze(keras_model: Any) -> keras.Model:
    keras_model.trainable = False
    return keras_model


def test_adapters_of_frozen_layers_are_refused_before_the_first_round() -> None:
    model = build_model(freeze(build_wide_model()))

    with pytest.raises(errors.ValueMismatchError, match="does not train its adapters"):
        learning.build_fed_avg(model, "sgd")


def test_keras_refuses_adapters_on_a_layer_that_has_none() -> None:
    layer: Any = keras.layers.LayerNormalization()

    with pytest.raises(AttributeError, match="no attribute 'enable_lora'"):
        layer.enable_lora(1)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("enabled", [True, False], ids=["kernels", "interpreted"])
def test_workers_share_a_base_and_find_the_weights_of_threads(
    ray_contexts: Callable[..., ExecutionContext],
    local_contexts: Callable[..., ExecutionContext],
    ray_memory: Any,
    enabled: bool,
) -> None:
    width = BIG_WIDTH + enabled  # a base that no other test stored
    process = learning.build_fed_avg(
        build_model(build_wide_model(width)), keras.optimizers.SGD(0.1)
    )
    data = [[batch_of(width)]] * 3
    settings = {"workers": 2, "clients_per_leaf": 1, "kernels": {"enabled": enabled}}
    fl.framework.set_default_context(local_contexts(**settings))
    expected = run_rounds(process, data, 2)
    fl.framework.set_default_context(ray_contexts(**settings, subrounds=2))
    gc.collect()
    before = ray_memory.rest(ray_memory.stored_bytes)

    found = run_rounds(process, data, 2)

    keras.tree.map_structure(np.testing.assert_array_equal, found, expected)
    base = 2 * width * width * 4
    assert base <= ray_memory.stored_bytes() - before < 1.5 * base

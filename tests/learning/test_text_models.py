"""Models of strings: columns of any dtype, and layers that know no words.

That they train as Keras trains them is in `test_keras_layers`.
"""

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

LABELS = fl.TensorType(np.float32, [None, 1])
RATE = 0.1
WORDS_OF_CLIENTS = pd.DataFrame(
    {
        "client": list("aabbccca"),
        "word": ["ann", "bob", "cat", "dog", "eel", "café", "ann", "bob"],
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

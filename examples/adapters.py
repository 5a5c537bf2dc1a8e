"""LoRA adapters on a Transformer: clients train and send 2% of its weights.

The data are the source files of Python's standard library. Half of its modules train a
Transformer of ten million weights, the base. Each of the other modules is a client.
Clients train adapters of low rank beside the frozen kernels of attention. The workers
of a machine share one copy of the base, and only adapters are sent.

Source:
    Edward Hu, Yelong Shen, Phillip Wallis, Zeyuan Allen-Zhu, Yuanzhi Li, Shean Wang, Lu
    Wang, Weizhu Chen: LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022,
    https://arxiv.org/abs/2106.09685.

python examples/adapters.py              a few minutes on two CPUs
python examples/adapters.py --rounds 20
"""

# ray_fed comes first: it keeps TensorFlow's start-up lines off the screen.
# ruff: noqa: I001
import argparse
import pathlib
import sysconfig
import time
from typing import Any

import ray_fed
from ray_fed import learning

import federated_language as fl
import keras
import numpy as np
from typing_extensions import override

VOCABULARY, LENGTH, BLOCKS, RANK, SEED = 128, 64, 3, 8, 0
BATCHES, BATCH_SIZE, COHORT_SIZE, LEARNING_RATE = 2, 8, 8, 0.003


def read_modules() -> list[np.ndarray[Any, Any]]:
    """Return the source of each module or package of the standard library, as bytes."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    sources: dict[str, bytes] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).parts[0]
        if name not in ("site-packages", "test"):
            sources[name] = sources.get(name, b"") + path.read_bytes()
    texts = [np.frombuffer(source, np.uint8) for source in sources.values()]
    smallest = BATCHES * BATCH_SIZE * LENGTH
    return [np.minimum(t, VOCABULARY - 1) for t in texts if len(t) > smallest]


def cut(text: np.ndarray[Any, Any], count: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return evenly spaced pieces of a text, and the character after each character."""
    starts = np.linspace(0, len(text) - LENGTH - 1, count).astype(int)
    pieces = text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)
    return {"x": pieces[:, :-1], "y": pieces[:, 1:]}


def cut_batches(text: np.ndarray[Any, Any]) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Return the batches of a client."""
    pieces = cut(text, BATCHES * BATCH_SIZE)
    parts = [np.split(pieces[key], BATCHES) for key in ("x", "y")]
    return [{"x": x, "y": y} for x, y in zip(*parts, strict=True)]


class Positions(keras.layers.Layer):
    """Adds a trained vector for each position in a piece of text."""

    @override
    def build(self, input_shape: Any) -> None:
        """Create the vectors."""
        self.vectors = self.add_weight(shape=input_shape[1:], name="vectors")

    @override
    def call(self, inputs: Any) -> Any:
        """Return the inputs plus the vectors."""
        return inputs + self.vectors


def build_base(width: int) -> Any:
    """Return a Transformer that predicts the next character."""
    keras.utils.set_random_seed(SEED)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = Positions()(keras.layers.Embedding(VOCABULARY, width)(tokens))
    for _ in range(BLOCKS):
        normed = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(8, width // 8, use_bias=False)
        x += attention(normed, normed, use_causal_mask=True)
        hidden = keras.layers.LayerNormalization()(x)
        hidden = keras.layers.Dense(4 * width, activation="relu")(hidden)
        x += keras.layers.Dense(width)(hidden)
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY)(x), name="transformer")


def add_adapters(keras_model: Any) -> None:
    """Freeze all weights, and add adapters to the queries and values of attention."""
    for layer in keras_model.layers:
        if isinstance(layer, keras.layers.MultiHeadAttention):
            attention: Any = layer
            attention.key_dense.trainable = attention.output_dense.trainable = False
            attention.query_dense.enable_lora(RANK)
            attention.value_dense.enable_lora(RANK)
        else:
            layer.trainable = False


def measure_keras_loop(keras_model: Any, clients: list[Any]) -> float:
    """Return the clients a second of a Keras loop that trains the same adapters."""
    keras_model.compile(keras.optimizers.Adam(LEARNING_RATE), loss())
    adapters = keras_model.trainable_variables
    initial = [variable.numpy() for variable in adapters]
    begun = time.monotonic()
    for index, batches in enumerate([clients[0], *clients]):
        for variable, value in zip(adapters, initial, strict=True):
            variable.assign(value)
        for batch in batches:
            keras_model.train_on_batch(batch["x"], batch["y"])
        if index == 0:  # the first client included the compilation
            begun = time.monotonic()
    return len(clients) / (time.monotonic() - begun)


def loss() -> keras.losses.Loss:
    """Return the loss for the prediction of the next character."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def main(num_rounds: int, width: int, base_steps: int) -> None:
    """Train the base with Keras and adapters on clients. Print losses and costs."""
    with ray_fed.init():
        modules = read_modules()
        keras_model = build_base(width)
        keras_model.compile(keras.optimizers.Adam(0.001), loss())
        pieces = cut(np.concatenate(modules[::2]), base_steps * 2 * BATCH_SIZE)
        fitted = keras_model.fit(
            pieces["x"], pieces["y"], batch_size=2 * BATCH_SIZE, verbose=0
        )
        count = keras_model.count_params()
        print(
            f"base: {count / 1e6:.1f} million weights,"
            f" mean loss {fitted.history['loss'][0]:.2f} in {base_steps} steps"
        )
        add_adapters(keras_model)
        model = learning.Model.from_keras(
            keras_model,
            loss=loss(),
            label_type=fl.TensorType(np.int32, [None, LENGTH]),
        )
        clients = [cut_batches(text) for text in modules[1::2]]
        result = learning.run(
            learning.build_fed_avg(model, keras.optimizers.Adam(LEARNING_RATE)),
            clients,
            num_rounds=num_rounds,
            cohort_size=COHORT_SIZE,
            seed=SEED,
        )
    first, last = result.history[0], result.history[-1]
    print(
        f"{len(clients)} clients, loss {first.training['loss']:.2f} in round 1,", end=""
    )
    print(f" {last.training['loss']:.2f} in round {last.round}")
    for verb, num_bytes in (
        ("receives", last.bytes_sent),
        ("returns", last.bytes_returned),
    ):
        print(f"a client {verb} {(num_bytes or 0) / COHORT_SIZE / 1e3:.0f} kB a round")
    seconds = float(
        np.median([record.seconds for record in result.history[1:] or [last]])
    )
    cohort = [clients[index] for index in last.clients]
    print(
        f"clients a second: {COHORT_SIZE / seconds:.2f}, and"
        f" {measure_keras_loop(keras_model, cohort):.2f} in a loop of Keras"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--width", type=int, default=520, help="a multiple of 8")
    parser.add_argument("--base-steps", type=int, default=20)
    parsed = parser.parse_args()
    main(parsed.rounds, parsed.width, parsed.base_steps)

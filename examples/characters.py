"""The next character of Python's own standard library, one client a module.

Nothing is downloaded: the clients are the files of this interpreter's library, some of
a hundred bytes and some of hundreds of thousands. Each is read where its work is.

python examples/characters.py                 joins your Ray, or starts one
python examples/characters.py local 5 40      a Ray of its own, five rounds, 40 modules
"""

# ray_fed comes first: it keeps TensorFlow's start-up lines off the screen.
# ruff: noqa: I001
import pathlib
import sys
import sysconfig
from typing import Any

import ray_fed
from ray_fed import learning
from ray_fed.data import ClientData

import federated_language as fl
import keras
import numpy as np

LENGTH, COHORT_SIZE, SEED = 32, 20, 0
PRINTABLE = range(32, 127)
NUM_CHARACTERS = len(PRINTABLE) + 2
"""Printable ASCII, the end of a line, and one for every other byte."""

CODES = np.full(256, NUM_CHARACTERS - 1, np.int32)
CODES[PRINTABLE] = np.arange(len(PRINTABLE))
CODES[ord("\n")] = NUM_CHARACTERS - 2


def list_modules() -> list[str]:
    """Return the library's modules by path, tests and packages of others left out."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    found = (path.relative_to(library) for path in library.rglob("*.py"))
    others = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    return sorted(str(path) for path in found if not others & set(path.parts))


def read_module(name: str) -> list[Any]:
    """Return windows of a module's text, each with the character that comes next."""
    path = pathlib.Path(sysconfig.get_path("stdlib")) / name
    code = CODES[np.frombuffer(path.read_bytes(), np.uint8)]
    ends = range(LENGTH, len(code), LENGTH // 2)
    return [{"x": code[end - LENGTH : end], "y": code[end]} for end in ends]


def build_model() -> learning.Model:
    """Return a small network over the characters of a window."""
    keras.utils.set_random_seed(SEED)
    layers = [
        keras.Input((LENGTH,), dtype="int32"),
        keras.layers.Embedding(NUM_CHARACTERS, 8),
        keras.layers.Conv1D(32, 5, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(NUM_CHARACTERS),
    ]
    return learning.Model.from_keras(
        keras.Sequential(layers),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


class Show:
    """Prints what each round came to."""

    def on_round(self, record: learning.RoundRecord) -> None:
        """Print the numbers of a round."""
        numbers = record.evaluation or {}
        print(
            f"round {record.round}: loss {numbers['loss']:.3f}, accuracy"
            f" {numbers['accuracy']:.3f}, {record.seconds:.2f} s"
        )


def main(
    address: str | None = None, num_rounds: str = "30", num_modules: str = "all"
) -> None:
    """Train, and print how well modules that took no part are read."""
    with ray_fed.init(
        address or None
    ):  # before the model: it sets TensorFlow's threads
        names = list_modules()
        if num_modules != "all":
            names = names[:: max(1, len(names) // int(num_modules))][: int(num_modules)]
        row = {
            "x": fl.TensorType(np.int32, [LENGTH]),
            "y": fl.TensorType(np.int32),
        }
        data = ClientData.from_function(
            names, read_module, fl.SequenceType(list(row.items()))
        )
        modules, held_out = data.hold_out_clients(0.1, seed=SEED)
        clients = modules.take(512).shuffle().batch(16)
        tests = held_out.take(512).batch(64)
        print(f"{len(modules)} modules train, {len(held_out)} are held out")

        model = build_model()
        training = learning.build_fed_avg(
            model,
            client_optimizer=keras.optimizers.SGD(0.3),
            server_optimizer=keras.optimizers.SGD(1.0, momentum=0.5),
        )
        evaluation = learning.build_fed_eval(model, training)

        learning.run(
            training,
            clients,
            num_rounds=int(num_rounds),
            cohort_size=min(COHORT_SIZE, len(clients)),
            seed=SEED,
            evaluate=lambda state: evaluation.next(state, tests),
            callbacks=[Show()],
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What `ray-fed demo` does, written out: federated averaging on handwritten digits.

python examples/fed_avg_digits.py                 joins your Ray, or starts one
python examples/fed_avg_digits.py local 5         a Ray of its own, five rounds
python examples/fed_avg_digits.py local 5 runs/a  the same, saved in runs/a: stopped
                                                  anywhere, it goes on there
"""

# ray_fed comes first: it keeps TensorFlow's start-up lines off the screen.
# ruff: noqa: I001
import sys
from typing import Any

import ray_fed
from ray_fed import learning

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

NUM_CLIENTS, COHORT_SIZE, BATCH_SIZE, SEED = 30, 20, 8, 0


def load_clients() -> tuple[list[Any], list[Any]]:
    """Return each client's batches, and the test set as those of one client."""
    digits: Any = load_digits()
    split: Any = train_test_split(
        (digits.images / 16).astype(np.float32),
        digits.target.astype(np.int32),
        test_size=0.2,
        random_state=SEED,
        stratify=digits.target,
    )
    x_train, x_test, y_train, y_test = split
    clients = [
        [
            {"x": x_train[batch], "y": y_train[batch]}
            for batch in np.split(part, range(BATCH_SIZE, len(part), BATCH_SIZE))
        ]
        for part in learning.split_by_label(y_train, NUM_CLIENTS, alpha=1.0, seed=SEED)
    ]
    return clients, [{"x": x_test, "y": y_test}]


def build_model() -> learning.Model:
    """Return a small perceptron."""
    keras.utils.set_random_seed(SEED)
    layers = [
        keras.Input((8, 8)),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ]
    return learning.Model.from_keras(
        keras.Sequential(layers),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
    )


class Printer:
    """Prints what the model makes of the test set after each round."""

    def on_round(self, record: learning.RoundRecord) -> None:
        """Print a line."""
        numbers = record.evaluation or {}
        print(
            f"round {record.round}: test loss {numbers['loss']:.4f},"
            f" accuracy {numbers['accuracy']:.4f}"
        )


def main(
    address: str | None = None, num_rounds: str = "30", storage_path: str | None = None
) -> None:
    """Train, and print what the model makes of the test set after each round."""
    with ray_fed.init(address or None):  # before the model: it sets its threads
        clients, test = load_clients()
        model = build_model()
        training = learning.build_fed_avg(
            model,
            client_optimizer=keras.optimizers.SGD(0.4),
            server_optimizer=keras.optimizers.SGD(1.0, momentum=0.8),
        )
        evaluation = learning.build_fed_eval(model, training)

        result = learning.run(
            training,
            clients,
            num_rounds=int(num_rounds),
            cohort_size=COHORT_SIZE,
            seed=SEED,
            evaluate=lambda state: evaluation.next(state, [test]),
            storage_path=storage_path,
            callbacks=[Printer()],
        )
        print(f"{len(result.history)} rounds in all, {result.reason}")
        model.to_keras(result.state).summary()
    if result.reason == "interrupted":
        sys.exit("Run the same command again: it goes on from what is saved.")


if __name__ == "__main__":
    main(*sys.argv[1:])

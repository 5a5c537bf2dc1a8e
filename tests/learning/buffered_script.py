"""Asynchronous steps as a program of its own, for tests that kill it.

python buffered_script.py BACKEND WORKERS STORAGE NUM_STEPS
"""

# ray_fed comes first: it keeps TensorFlow's start-up lines off the screen.
# ruff: noqa: I001
import hashlib
import sys
from typing import Any

import ray_fed
from ray_fed import learning

import federated_language as fl
import keras
import numpy as np


def digest(result: Any) -> str:
    """Return the sha256 of weights and history, without what was measured."""
    found = hashlib.sha256()
    for each in result.state.weights.trainable:
        found.update(np.asarray(each).tobytes())
    for record in result.history:
        clock = record.simulated_time, record.wasted_seconds, record.live_versions
        said = record.clients, record.versions, clock, record.training
        found.update(repr(said).encode())
    return found.hexdigest()


class Line:
    """Writes a line a step."""

    def on_round(self, record: learning.RoundRecord) -> None:
        """Write it."""
        sys.stdout.write(f"step {record.round}\n")
        sys.stdout.flush()


def train(num_steps: int, storage: str | None, *callbacks: Any) -> Any:
    """Run steps with dropout at clients and Adam at the server."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((3,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    model = learning.Model.from_keras(
        keras.Sequential(layers),
        loss=keras.losses.MeanSquaredError(),
        label_type=fl.TensorType(np.float32, [None, 1]),
    )
    adam = keras.optimizers.Adam(0.01)
    process = learning.build_fed_avg(model, keras.optimizers.SGD(0.05), adam)
    generator = np.random.default_rng(0)
    clients = [
        [
            {
                "x": generator.normal(size=(size, 3)).astype(np.float32),
                "y": generator.normal(size=(size, 1)).astype(np.float32),
            }
            for size in generator.integers(1, 5, 2)
        ]
        for _ in range(30)
    ]
    speeds = learning.devices.LogNormal(1.0, 1.0)
    return learning.run(
        process,
        clients,
        num_rounds=num_steps,
        seed=3,
        storage_path=storage,
        callbacks=callbacks,
        devices=learning.devices.Devices(speeds, drop_out=0.1),
        schedule=learning.Buffered(concurrency=20, buffer=5),
    )


def main(backend: Any, workers: str, storage: str, num_steps: str) -> None:
    """Run, and write a line a step and the digest."""
    config = ray_fed.Config(backend=backend, workers=int(workers))
    with ray_fed.init("local" if backend == "ray" else None, config=config):
        result = train(int(num_steps), storage, Line())
    sys.stdout.write(f"{digest(result)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Asynchronous steps as a program of its own, which kills its workers and itself.

python buffered_script.py STORAGE ADDRESS WORKERS FIRST_KILL NUM_KILLS LAST_STEP

ADDRESS is "local" for threads, or the address of a Ray. The program begins when it has
read a line. After step FIRST_KILL it kills a worker with SIGKILL, and then more, one
after each step, until it has killed NUM_KILLS. After step LAST_STEP it kills itself, or
later, once it has killed these. Steps are counted over the whole run.
"""

# ray_fed comes first: it keeps TensorFlow's start-up lines off the screen.
# ruff: noqa: I001
import dataclasses
import hashlib
import os
import signal
import sys
from typing import Any

import ray_fed
from ray_fed import learning
from ray_fed.learning.history import to_json
from ray_fed.program.managers import flatten_state

import federated_language as fl
import keras
import numpy as np


NUM_STEPS = 200


def digest(result: Any) -> str:
    """Return the sha256 of state and history, without the fields that are measured."""
    found = hashlib.sha256()
    for _, each in flatten_state(result.state):
        found.update(np.asarray(each).tobytes())
    measured = {"seconds": 0.0, "started_at": 0.0, "retries": 0, "bytes_read": 0}
    for record in result.history:
        found.update(to_json(dataclasses.replace(record, spans=(), **measured)))
    return found.hexdigest()


class Kills:
    """A callback that kills workers, and then perhaps this process.

    Args:
        context: The context of the run.
        first: The step after which the first worker is killed.
        count: The number of workers to kill.
        last: The step after which this process is killed, 0 for never.
    """

    def __init__(self, context: Any, first: int, count: int, last: int) -> None:
        self._context, self._first, self._count = context, first, count
        self._last = last
        self._killed: set[int] = set()

    def on_round(self, record: learning.RoundRecord) -> None:
        """Kill, while the next step runs."""
        told = self._context.last_report.subrounds
        alive = {each.worker_pid for each in told if each.num_clients} - self._killed
        if record.round >= self._first and len(self._killed) < self._count and alive:
            self._killed.add(pid := min(alive))
            os.kill(pid, signal.SIGKILL)
            sys.stdout.write(f"killed {pid}\n")
            sys.stdout.flush()
        if 0 < self._last <= record.round and len(self._killed) == self._count:
            os.kill(os.getpid(), signal.SIGKILL)


def train(storage: str | None, *callbacks: Any) -> Any:
    """Run all steps, with dropout at clients and Adam at the server."""
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
        num_rounds=NUM_STEPS,
        seed=3,
        storage_path=storage,
        checkpoint_every=5,
        callbacks=callbacks,
        devices=learning.devices.Devices(speeds, drop_out=0.1),
        schedule=learning.Buffered(concurrency=20, buffer=5),
    )


def main(storage: str, address: str, workers: str, *kills: str) -> None:
    """Run, and write the workers that were killed, the number of steps and a digest."""
    backend, count = "local" if address == "local" else "ray", int(workers)
    each = {"count": count, "num_cpus": 0.5}
    config = ray_fed.Config.load(backend=backend, workers=each, subrounds=count)
    sys.stdin.readline()
    with ray_fed.init(
        None if backend == "local" else address, config=config
    ) as context:
        result = train(storage, Kills(context, *map(int, kills)))
    sys.stdout.write(f"{len(result.history)} {digest(result)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

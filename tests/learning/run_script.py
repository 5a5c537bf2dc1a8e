"""A run as a program of its own, for tests that kill it or send it signals.

python run_script.py BACKEND FOLDER NUM_ROUNDS PAUSE_S [STORAGE]
"""

# ray_fed comes first: it keeps TensorFlow's start-up lines off the screen.
# ruff: noqa: I001
import hashlib
import pathlib
import sys
import time
from typing import Any

import ray_fed
from ray_fed import learning
from ray_fed import tensorflow as rtf

import federated_language as fl
import numpy as np
import tensorflow as tf

SIZE = 8


@rtf.computation
def initial() -> Any:
    return {"model": tf.zeros([SIZE])}


STATE = initial.type_signature.result


KEPT = fl.TensorType(np.float32, [SIZE])


@rtf.computation(STATE, KEPT, np.float32)
def work(state: Any, kept: Any, x: Any) -> Any:
    found = tf.math.tanh(state["model"] * x - kept) + tf.random.normal([SIZE])
    return found, kept / 2 + found


@rtf.computation(STATE, fl.TensorType(np.float32, [SIZE]))
def update(state: Any, mean: Any) -> Any:
    return {"model": state["model"] + mean}


@rtf.computation(STATE)
def measure(state: Any) -> Any:
    return {"norm": tf.norm(state["model"])}


@fl.federated_computation
def initialize() -> Any:
    return fl.federated_eval(initial, fl.SERVER)


@fl.federated_computation(
    fl.FederatedType(STATE, fl.SERVER),
    fl.FederatedType(KEPT, fl.CLIENTS),
    fl.FederatedType(np.float32, fl.CLIENTS),
)
def run_round(state: Any, kept: Any, data: Any) -> Any:
    worked = fl.federated_map(work, (fl.federated_broadcast(state), kept, data))
    new_state = fl.federated_map(update, (state, fl.federated_mean(worked[0])))
    return new_state, worked[1], fl.federated_map(measure, new_state)


class Line:
    """Writes a line a round, and takes its time."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def on_round(self, record: learning.RoundRecord) -> None:
        sys.stdout.write(f"round {record.round_index}\n")
        sys.stdout.flush()
        time.sleep(self._pause_s)


def main(
    backend: Any, folder: str, num_rounds: str, pause_s: str, storage: str = ""
) -> None:
    """Run, and write how it ended and a digest of states and history."""
    place = pathlib.Path(folder)
    data: Any = [np.float32(n) for n in range(1, 7)]
    config = ray_fed.Config(backend=backend, workers=1)
    with ray_fed.init("local" if backend == "ray" else None, config=config):
        result = learning.run(
            learning.LearningProcess(
                initialize, run_round, initial_client_state=np.zeros(SIZE, np.float32)
            ),
            data,
            num_rounds=int(num_rounds),
            cohort_size=3,
            storage_path=storage or place / "states",
            checkpoint_every=2,
            callbacks=[
                learning.callbacks.JSONLines(place / "rounds.jsonl"),
                Line(float(pause_s)),
            ],
        )
    digest = hashlib.sha256(result.state["model"].tobytes())
    assert result.client_states is not None
    for kept in result.client_states.take(range(len(data))):
        digest.update(kept.tobytes())
    for record in result.history:
        digest.update(repr((record.clients, dict(record.training))).encode())
    sys.stdout.write(f"{result.reason} {len(result.history)} {digest.hexdigest()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

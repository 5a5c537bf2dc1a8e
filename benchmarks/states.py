"""SCAFFOLD with a value kept for each of many clients: memory, and bits after kills.

    python -m benchmarks.states --clients 100000 --rounds 300 --cohort 1000

A client keeps 10 kB. One run is left alone; of another one a worker is killed, then the
driver and with it its Ray, and it is resumed. Prints one line of JSON.
"""

import argparse
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.hosting import MemoryWatch

_WIDTH, _LABELS = 255, 10  # with biases 2,560 weights of four bytes
_KILL_AFTER_S = 0.1
_RUN_AT_MOST_S = 900


class WorkerKiller:
    """A callback that kills a worker during the round after a given one.

    Args:
        context: whose worker.
        after: index of a round.
    """

    def __init__(self, context: Any, after: int) -> None:
        self._context, self._after = context, after

    def on_round(self, record: Any) -> None:
        """Kill a worker soon, once the round has come."""
        if record.round_index == self._after:
            worker = self._context.last_report.subrounds[0].worker_pid
            threading.Timer(_KILL_AFTER_S, os.kill, (worker, signal.SIGKILL)).start()


class Ticker:
    """A callback that says on standard output which rounds have ended."""

    def on_round(self, record: Any) -> None:
        """Print the index of the round."""
        print(f"round {record.round_index}", flush=True)


def run(given: argparse.Namespace) -> None:
    """Run all rounds, or the rest of them; print a digest and how memory grew."""
    import ray_fed  # isort: skip  # first: TensorFlow says less then

    import keras

    from ray_fed import learning
    from ray_fed.program import ClientData

    config = ray_fed.Config(backend="ray", workers=2)
    with ray_fed.init("local", config=config) as context:
        keras.utils.set_random_seed(0)
        model = learning.Model.from_keras(
            keras.Sequential([keras.Input((_WIDTH,)), keras.layers.Dense(_LABELS)]),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )

        def read(client: int) -> Any:
            rng = np.random.default_rng(client)
            x = rng.random((2, _WIDTH), np.float32)
            return [{"x": x, "y": rng.integers(0, _LABELS, 2, np.int32)}]

        data = ClientData.from_function(
            range(given.clients), read, model.data_type.member
        )
        process = learning.build_scaffold(model, 0.05, num_clients=given.clients)
        learning.run(process, data, num_rounds=1, cohort_size=100)  # loads libraries
        killer = [WorkerKiller(context, given.kill_after)] if given.kill_after else []
        started = time.perf_counter()
        own, shared = (MemoryWatch(os.getpid(), of) for of in ("RssAnon", "RssShmem"))
        with own, shared:
            result = learning.run(
                process,
                data,
                num_rounds=given.rounds,
                cohort_size=given.cohort,
                storage_path=given.folder,
                callbacks=[*killer, Ticker()],
            )
        seconds = time.perf_counter() - started
        states = result.client_states
        assert states is not None
        digest = hashlib.sha256()
        for array in _arrays(result.state, states, given.clients):
            digest.update(array.tobytes())
        found = {
            "digest": digest.hexdigest()[:16],
            "driver_grew_mb": round(own.peak - own.before),
            "store_shared_mb": round(shared.peak),
            "kept_by": len(states),
            "in_memory_mb": round(states.memory_bytes / 2**20),
            "seconds": round(seconds, 1),
            "retries": sum(record.retries for record in result.history),
        }
    print(json.dumps(found), flush=True)


def _arrays(state: Any, states: Any, num_clients: int) -> Iterator[Any]:
    import tensorflow as tf

    yield from (np.asarray(leaf) for leaf in tf.nest.flatten(state))
    for start in range(0, num_clients, 1000):
        kept = states.take(range(start, min(num_clients, start + 1000)))
        yield from tf.nest.flatten(kept)


def start(given: argparse.Namespace, folder: str, kill_after: int) -> Any:
    """Start a run as a process in a session of its own."""
    sizes = [str(n) for n in (given.clients, given.rounds, given.cohort, kill_after)]
    names = ["--clients", "--rounds", "--cohort", "--kill-after"]
    options = [word for pair in zip(names, sizes, strict=True) for word in pair]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.states", "--folder", folder, *options],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: Any) -> dict[str, Any]:
    """Wait for a run and return what it printed."""
    printed, _ = process.communicate(timeout=_RUN_AT_MOST_S)
    return json.loads(printed.splitlines()[-1])


def kill_in_round(process: Any, index: int) -> None:
    """End a driver and all processes that it started while round `index` runs."""
    for line in process.stdout:
        if line.strip() == f"round {index - 1}":
            break
    time.sleep(_KILL_AFTER_S)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    """Run, kill, resume, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--cohort", type=int, default=1_000)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--kill-after", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder:
        run(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        alone = finish(start(given, str(pathlib.Path(folder, "alone")), 0))
        print(json.dumps(alone), file=sys.stderr)
        killed = str(pathlib.Path(folder, "killed"))
        kill_in_round(start(given, killed, given.rounds // 4), given.rounds // 2)
        resumed = finish(start(given, killed, 3 * given.rounds // 4))
    same = alone["digest"] == resumed["digest"]
    print(json.dumps({"alone": alone, "resumed": resumed, "same_bits": same}))


if __name__ == "__main__":
    main()

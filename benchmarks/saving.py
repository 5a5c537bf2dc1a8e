"""What storage, a CSV file and progress cost a run of short rounds.

python -m benchmarks.saving local 200     the backend, and the number of rounds
python -m benchmarks.saving long 20000    what a round costs late in a run of threads
"""

import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
import psutil

import ray_fed
from ray_fed import learning

_REPEATS = 3


def build_job() -> tuple[learning.LearningProcess, list[Any]]:
    """Return federated averaging of a tiny model, and ten clients of 8 examples."""
    import keras

    rng = np.random.default_rng(0)
    clients = [
        [
            {
                "x": rng.normal(size=(8, 4)).astype(np.float32),
                "y": rng.integers(0, 3, 8).astype(np.int32),
            }
        ]
        for _ in range(10)
    ]
    model = learning.Model.from_keras(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return learning.build_fed_avg(model, keras.optimizers.SGD(0.3)), clients


def time_run(num_rounds: int, *, saves: bool) -> float:
    """Return the seconds of a run, with or without all that follows its rounds."""
    training, clients = build_job()
    learning.run(training, clients, num_rounds=1)  # compiles
    with tempfile.TemporaryDirectory() as folder:
        kept: dict[str, Any] = {
            "storage_path": pathlib.Path(folder, "run"),
            "callbacks": [learning.callbacks.CSV(pathlib.Path(folder, "rounds.csv"))],
            "progress": True,
        }
        started = time.perf_counter()
        learning.run(
            training, clients, num_rounds=num_rounds, **(kept if saves else {})
        )
        return time.perf_counter() - started


class Meter:
    """Notes time, bytes that were written and resident memory at some rounds."""

    def __init__(self) -> None:
        self.notes: dict[int, tuple[float, int, int]] = {}

    def on_round(self, record: learning.RoundRecord) -> None:
        """Note a round before or at which a window ends."""
        if record.round % 50 == 0:
            process = psutil.Process()
            written = process.io_counters().write_chars
            memory = process.memory_info().rss
            self.notes[record.round] = time.perf_counter(), written, memory

    def cost(self, start: int, end: int) -> dict[str, float]:
        """Return what a round costs on average between two rounds."""
        spent = zip(self.notes[start], self.notes[end], strict=True)
        seconds, written, memory = ((b - a) / (end - start) for a, b in spent)
        return {
            "ms": round(1e3 * seconds, 2),
            "bytes_written": round(written),
            "bytes_resident": round(memory),
        }


def measure_long_run(num_rounds: int) -> None:
    """Print what a saved round costs around round 100, 1,000 and the last one."""
    training, clients = build_job()
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder:
        learning.run(
            training,
            clients,
            num_rounds=num_rounds,
            storage_path=folder,
            checkpoint_every=1,
            callbacks=[meter],
        )
    last = num_rounds - num_rounds % 50
    for start, end in ((50, 150), (500, 1000), (last - 500, last)):
        print(json.dumps({"rounds": [start, end], **meter.cost(start, end)}))


def main(backend: str = "local", num_rounds: str = "200") -> None:
    """Print a line of JSON: seconds of each run, and the ratio of their medians."""
    if backend == "long":
        with ray_fed.init(config=ray_fed.Config.load(backend="local")):
            measure_long_run(int(num_rounds))
        return
    config = ray_fed.Config.load(backend=backend)
    with ray_fed.init("local" if backend == "ray" else None, config=config):
        found = [
            (
                time_run(int(num_rounds), saves=False),
                time_run(int(num_rounds), saves=True),
            )
            for _ in range(_REPEATS)
        ]
    plain, saved = zip(*found, strict=True)
    ratio = statistics.median(saved) / statistics.median(plain)
    print(json.dumps({"plain_s": plain, "saved_s": saved, "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What storage, a CSV file and progress cost a run of short rounds.

python -m benchmarks.saving local 200     the backend, and the number of rounds
"""

import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np

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


def main(backend: str = "local", num_rounds: str = "200") -> None:
    """Print a line of JSON: seconds of each run, and the ratio of their medians."""
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

"""Memory of two workers that share a frozen base under adapters.

    python -m benchmarks.frozen --megabytes 400
    python -m benchmarks.frozen --megabytes 4096

The base is a stack of dense layers of up to 256 MiB. The first layer has LoRA adapters.
Keras adds adapters to their kernel in each step, so a step takes memory for copies of
that one kernel. Each worker trains two clients a round. Prints one line of JSON. Memory
is in MB, from `/proc`: `pss` counts a page that n processes share as one nth, `uss`
counts what a process shares with none, and `peak_own` is the most anonymous memory
while rounds ran.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import time
from typing import Any

import numpy as np

from benchmarks.hosting import MemoryWatch

_WORKERS, _RANK, _ROUNDS, _LAYER_MEGABYTES = 2, 4, 3, 256


def measure(pid: int) -> dict[str, int]:
    """Return the memory of a process in MB."""
    text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    kbytes = {key: int(kb) for key, kb in re.findall(r"(\w+): +(\d+) kB", text)}
    own = kbytes["Private_Clean"] + kbytes["Private_Dirty"]
    sizes = {"rss": kbytes["Rss"], "pss": kbytes["Pss"], "uss": own}
    return {name: kb * 1024 // 10**6 for name, kb in sizes.items()}


def build(megabytes: int) -> Any:
    """Return a model with a frozen base of about this size."""
    import keras

    count = max(1, round(megabytes / _LAYER_MEGABYTES))
    width = int((megabytes / count * 2**20 / 4) ** 0.5)
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, use_bias=False) for _ in range(count)]
    head = keras.layers.Dense(1)
    keras_model = keras.Sequential([keras.Input((width,)), *layers, head])
    for layer in layers[1:]:
        layer.trainable = False
    layers[0].enable_lora(_RANK)
    return keras_model


def run(megabytes: int) -> dict[str, Any]:
    """Run rounds and return the figures."""
    import ray_fed  # isort: skip  # first: TensorFlow says less then

    from ray_fed import learning

    config = ray_fed.Config(backend="ray", workers=_WORKERS, progress="off")
    with ray_fed.init("local", config=config) as context:
        keras_model = build(megabytes)
        base: Any = keras_model.non_trainable_variables
        begun = time.monotonic()
        model = learning.Model.from_keras(keras_model, loss="mse")
        read_s = time.monotonic() - begun
        process = learning.build_fed_avg(model, "sgd")
        rng = np.random.default_rng(0)
        width = keras_model.input_shape[1]
        client = [{"x": rng.random((2, width), np.float32), "y": np.ones(2, "f")}]
        clients = [client] * 2 * _WORKERS
        first = learning.run(process, clients, num_rounds=1).history[0]
        report = context.last_report
        assert report is not None
        pids = sorted({part.worker_pid for part in report.subrounds})
        with contextlib.ExitStack() as stack:
            watches = [stack.enter_context(MemoryWatch(pid)) for pid in pids]
            history = learning.run(process, clients, num_rounds=_ROUNDS).history
        return {
            "base_bytes": sum(4 * v.value.shape.num_elements() for v in base),
            "from_keras_s": round(read_s, 1),
            "first_round_s": round(first.seconds, 1),
            "round_s": round(min(record.seconds for record in history), 2),
            "bytes_sent": first.bytes_sent,
            "bytes_returned": first.bytes_returned,
            "driver": measure(os.getpid()),
            "workers": [
                {**measure(pid), "peak_own": round(watch.peak)}
                for pid, watch in zip(pids, watches, strict=True)
            ],
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=400)
    print(json.dumps(run(parser.parse_args().megabytes)))

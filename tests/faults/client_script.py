"""A program that joins by Ray's client: prints what it found, as JSON."""

import json
import os
import signal
import sys
from typing import Any

import federated_language as fl
import numpy as np
import ray

import ray_fed
from ray_fed import tensorflow as rtf

CONFIG = ray_fed.Config(workers=1, progress="off")
LARGE = fl.TensorType(np.float32, [100_000])
NUM_TRIES = 4


@rtf.computation(LARGE)
def half(x: Any) -> Any:
    return x / 2


@fl.federated_computation(fl.FederatedType(LARGE, fl.CLIENTS))
def halves_and_mean(values: Any) -> Any:
    halves = fl.federated_map(half, values)
    return halves, fl.federated_mean(halves)


def init(address: str) -> ray_fed.ExecutionContext:
    """Join; again, where Ray's server crashed as it forked, as it does at times."""
    for _ in range(NUM_TRIES - 1):
        try:
            return ray_fed.init(address, config=CONFIG)
        except ray_fed.errors.ClusterError as error:
            if "Starting Ray client server failed" not in str(error):
                raise
    return ray_fed.init(address, config=CONFIG)


def report_of(context: ray_fed.ExecutionContext) -> ray_fed.RoundReport:
    assert context.last_report is not None
    return context.last_report


def run() -> list[float]:
    values = [np.full(100_000, n, np.float32) for n in (1.0, 3.0)]
    halves, mean = halves_and_mean(values)
    return [float(half[0]) for half in halves] + [float(mean[-1])]


def main(address: str) -> dict[str, Any]:
    context = init(address)
    told: dict[str, Any] = {"context": repr(context), "first": run()}
    os.kill(report_of(context).subrounds[0].worker_pid, signal.SIGKILL)
    told |= {"second": run(), "retries": report_of(context).retries.get("crash", 0)}
    ray_fed.shutdown()
    init(address)
    ray.shutdown()
    try:
        run()
    except ray_fed.errors.ContextStateError as error:
        told["left"] = str(error)
    ray_fed.shutdown()
    return told


if __name__ == "__main__":
    json.dump(main(sys.argv[1]), sys.stdout)

"""A process with a context on threads forks: prints what its child is told, as JSON."""

import json
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np

import ray_fed
from ray_fed import tensorflow as rtf

CONFIG = ray_fed.Config(backend="local", workers=1, progress="off")
VALUES = [1.0, 3.0]
WAIT_S = 120.0


@rtf.computation(np.float32)
def half(x: Any) -> Any:
    return x / 2


@fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
def mean(values: Any) -> Any:
    return fl.federated_mean(fl.federated_map(half, values))


def on_ray() -> float:
    with ray_fed.init("local", config=ray_fed.Config(workers=1, progress="off")):
        return float(mean(VALUES))


def tell(queue: Any) -> None:
    steps: dict[str, Callable[[], Any]] = {
        "call": lambda: float(mean(VALUES)),
        "init": lambda: str(ray_fed.init(config=CONFIG)),
        "shutdown": ray_fed.shutdown,
        "on Ray": on_ray,
    }
    for name, step in steps.items():
        try:
            queue.put((name, step()))
        except ray_fed.errors.ContextStateError as error:
            queue.put((name, str(error)))
    queue.put(None)


if __name__ == "__main__":
    ray_fed.init(config=CONFIG)
    before = float(mean(VALUES))
    processes = multiprocessing.get_context("fork")
    queue = processes.Queue()
    child = processes.Process(target=tell, args=(queue,))
    child.start()
    told = dict(iter(lambda: queue.get(timeout=WAIT_S), None))
    child.join(WAIT_S)
    told |= {"before": before, "after": float(mean(VALUES))}
    ray_fed.shutdown()
    json.dump(told, sys.stdout)

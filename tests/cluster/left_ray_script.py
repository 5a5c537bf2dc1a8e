"""`ray.shutdown` while work runs: prints what that and what comes after it raise."""

# pyright: reportUnknownLambdaType=false

import json
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pyarrow as pa
import ray
import ray.data
import tensorflow as tf

import ray_fed
from ray_fed import framework
from ray_fed import tensorflow as rtf
from ray_fed.program import ClientData

WORKERS = ray_fed.Workers(count=1, num_cpus=0.5)
CONFIG = ray_fed.Config(workers=WORKERS, progress="off")
BEGUN = pathlib.Path(tempfile.mkdtemp())
VALUES = [1.0, 3.0]


@rtf.computation(np.float32)
def endless(x: Any) -> Any:
    with tf.control_dependencies([tf.io.write_file(f"{BEGUN}/call", "")]):
        start = np.int64(0), tf.identity(x)
    return tf.while_loop(lambda i, _: i >= 0, lambda i, y: (i * 1, y / 2), start)[1]


@rtf.computation(np.float32)
def half(x: Any) -> Any:
    return x / 2


@fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
def mean(values: Any) -> Any:
    return fl.federated_mean(fl.federated_map(half, values))


def start_ray() -> None:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)


def make_dataset() -> Any:
    return ray.data.from_arrow(pa.table({"who": ["a", "b"], "x": VALUES}))


def read_clients(dataset: Any) -> Any:
    return ClientData.from_ray(dataset, client="who", x="x")


def hold(batch: Any) -> Any:
    (BEGUN / "dataset").touch()
    time.sleep(600)
    return batch


def outcome(work: Callable[[], object]) -> str:
    try:
        return str(work())
    except BaseException as error:  # noqa: BLE001 (told)
        return f"{type(error).__name__}: {error}"


def leave_during(name: str, work: Callable[[], object]) -> str:
    """Run work; leave Ray once it has begun; return what it raised."""

    def leave() -> None:
        while not (BEGUN / name).exists():
            time.sleep(0.1)
        ray.shutdown()

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    return outcome(work)


def count_starts() -> list[None]:
    """Return a list that has an element for each Ray that is started from now on."""
    started: list[None] = []
    init: Any = ray.init

    def counted(*args: Any, **options: Any) -> Any:
        started.append(None)
        return init(*args, **options)

    setattr(ray, "init", counted)  # noqa: B010
    return started


def main() -> dict[str, Any]:
    started = count_starts()
    start_ray()
    clients = read_clients(make_dataset())
    factory = framework.RayExecutorFactory(CONFIG)
    context = fl.framework.SyncExecutionContext(factory)
    told: dict[str, Any] = {
        "call": leave_during("call", lambda: context.invoke(endless, 1.0)),
        "next call": outcome(lambda: context.invoke(half, 1.0)),
        "close": outcome(factory.close),
        "clients read": outcome(lambda: list(next(iter(clients)).read())),
    }
    start_ray()
    held = make_dataset().map_batches(hold)
    told["dataset"] = leave_during("dataset", lambda: read_clients(held))
    told["Ray runs"] = ray.is_initialized()

    told["context"] = repr(ray_fed.init("local", config=CONFIG))
    total = fl.federated_computation(
        lambda values: fl.federated_sum(fl.federated_map(count_of(clients), values)),
        fl.FederatedType(clients.type_signature, fl.CLIENTS),
    )
    told["clients used"] = outcome(lambda: total(clients))
    told["mean"] = float(mean(VALUES))
    ray_fed.shutdown()
    told["starts"] = len(started)
    return told


def count_of(clients: Any) -> Any:
    @rtf.computation(clients.type_signature)
    def count(rows: Any) -> Any:
        return rows.reduce(np.int64(0), lambda total, _: total + 1)

    return count


if __name__ == "__main__":
    json.dump(main(), sys.stdout)

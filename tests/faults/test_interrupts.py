"""A driver that is interrupted in the middle of a round leaves nothing behind."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(300)]

_DRIVER = """
import pathlib, sys
import federated_language as fl, numpy as np, tensorflow as tf
import ray_fed
from ray_fed import tensorflow as rtf

folder = pathlib.Path(sys.argv[1])

@rtf.computation(np.int32)
def never_ends(x):
    with tf.control_dependencies([tf.io.write_file(str(folder / "runs"), "")]):
        x = tf.identity(x)
    def goes_on(n):
        return tf.timestamp() > 0.0
    return tf.while_loop(goes_on, lambda n: [n + 1], [x])[0]

@fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
def total(clients):
    return fl.federated_sum(fl.federated_map(never_ends, clients))

%s
total([1, 2, 3])
"""
_ON_RAY = """
environment = {"env_vars": {"JOB_MARK": str(folder)}}
ray_fed.init("local", config=ray_fed.Config(workers=1, runtime_env=environment))
"""
_ON_THREADS = """
ray_fed.init(config=ray_fed.Config(backend="local"))
"""


def _marked(mark: str) -> list[int]:
    """Return the processes that run with a mark in the environment they were given."""
    found: list[int] = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def test_interrupted_driver_leaves_with_nothing_behind(
    tmp_path: pathlib.Path,
) -> None:
    mark = f"MARK={tmp_path}"
    name, value = mark.split("=")
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER % _ON_RAY, str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, name: value},
    )
    try:
        while not (tmp_path / "runs").exists():
            assert driver.poll() is None
            time.sleep(0.1)
        num_running = len(_marked(mark))
        num_of_job = len(_marked(f"JOB_MARK={tmp_path}"))
        driver.send_signal(signal.SIGINT)
        _, told = driver.communicate(timeout=120)
        behind = _marked(mark)
    finally:
        for pid in _marked(mark):
            os.kill(pid, signal.SIGKILL)

    assert num_running > 4  # Ray's own, the worker and its coordinator
    assert 2 <= num_of_job < num_running  # `runtime_env` is theirs, not Ray's
    assert told.rstrip().endswith("KeyboardInterrupt")
    assert driver.returncode != 0
    assert behind == []


def test_interrupted_threads_are_not_killed_inside_of_tensorflow(
    tmp_path: pathlib.Path,
) -> None:
    """Python aborts where it ends a thread that is there."""
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER % _ON_THREADS, str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        while not (tmp_path / "runs").exists():
            assert driver.poll() is None
            time.sleep(0.1)
        driver.send_signal(signal.SIGINT)
        _, told = driver.communicate(timeout=60)

    assert told.rstrip().endswith("KeyboardInterrupt")
    assert driver.returncode == -signal.SIGINT


_STOPPED = """
import os, pathlib, signal, sys, threading, time
import federated_language as fl, numpy as np, ray
import ray_fed
from ray_fed import tensorflow as rtf
from ray_fed.data import ClientData

folder, address = sys.argv[1:]
numbers = fl.SequenceType(np.float32)

@rtf.computation(numbers)
def add(data):
    return data.reduce(np.float32(0), lambda a, b: a + b)

@fl.federated_computation(fl.FederatedType(numbers, fl.CLIENTS))
def total(clients):
    return fl.federated_sum(fl.federated_map(add, clients))

def load(name):
    import pathlib, time
    pathlib.Path(folder, name).touch()
    time.sleep(0.2)
    return [1.0]

def interrupt():
    while len(os.listdir(folder)) < 3:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

config = ray_fed.Config(workers=2, subrounds=2, clients_per_leaf=1)
ray_fed.init(address, config=config)
threading.Thread(target=interrupt, daemon=True).start()
names = [f"client {i}" for i in range(400)]
try:
    total(ClientData.from_function(names, load, numbers))
except KeyboardInterrupt:
    print("interrupted")
ray_fed.shutdown()
time.sleep(3)  # for what Ray may still have to say
"""


def test_graceful_stop_on_a_joined_ray_says_nothing_of_retries(
    tmp_path: pathlib.Path,
) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False},
    )
    arguments = str(tmp_path), str(cluster.address)
    try:
        stopped = subprocess.run(
            [sys.executable, "-c", _STOPPED, *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
    finally:
        cluster.shutdown()

    assert stopped.stdout.splitlines()[-1] == "interrupted"
    assert "retries remaining" not in stopped.stdout + stopped.stderr
    assert len(list(tmp_path.iterdir())) < 400

"""A driver that is interrupted in the middle of a round leaves nothing behind."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

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

"""Asynchronous steps whose workers and drivers are killed: the same bits in the end."""

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import federated_language as fl
import pytest
from ray.cluster_utils import Cluster

import ray_fed
from tests.faults import buffered_script

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(1500)]

DRIVERS = [
    ("local", 2, 0, 0, 30),
    ("ray", 3, 50, 3, 50),
    ("local", 3, 0, 0, 90),
    ("ray", 2, 110, 2, 110),
    ("local", 1, 0, 0, 150),
    ("ray", 3, 160, 5, 0),
]
"""Backend, workers, the step of the first kill of a worker, the number of such kills,
and the step after which the driver is killed. The last driver ends by itself."""


@pytest.fixture
def address() -> Iterator[Any]:
    """The address of a Ray that outlives its drivers."""
    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster.address
    cluster.shutdown()


def start(place: pathlib.Path, *arguments: object) -> "subprocess.Popen[str]":
    """Start a driver, which waits for a line after its imports."""
    command = [sys.executable, buffered_script.__file__, str(place)]
    settings = {"RAY_FED_PROGRESS": "off", "RAY_FED_GRAPH_CACHE": f"{place}-graphs"}
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | settings,
    )


def test_killed_workers_and_drivers_do_not_change_200_steps(
    tmp_path: pathlib.Path, address: str
) -> None:
    drivers = [(backend.replace("ray", address), *rest) for backend, *rest in DRIVERS]
    lines: list[str] = []
    codes: list[int] = []
    following = start(tmp_path, *drivers[0])
    config = ray_fed.Config.load(backend="local", workers=1)
    with ray_fed.create_context(config) as context:
        fl.framework.set_default_context(context)
        expected = buffered_script.digest(buffered_script.train(None))

    for index in range(len(drivers)):
        driver = following
        if drivers[index + 1 :]:  # it imports while this driver runs
            following = start(tmp_path, *drivers[index + 1])
        lines += driver.communicate("go\n")[0].splitlines()
        codes.append(driver.returncode)

    # Ray writes its own lines to standard output, too.
    ends = [line for line in lines if line.startswith("200 ")]
    assert ends == [f"200 {expected}"]
    assert codes == [-signal.SIGKILL] * 5 + [0]
    assert len({line for line in lines if line.startswith("killed ")}) == 10

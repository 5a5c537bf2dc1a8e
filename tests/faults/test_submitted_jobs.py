"""`ray job submit` to a Ray that asks for a token: exit status, SIGTERM, resumed."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

HAS_DASHBOARD = all(map(importlib.util.find_spec, ("aiohttp_cors", "opencensus")))
pytestmark = [
    pytest.mark.skipif(not HAS_DASHBOARD, reason="needs the extra `cluster`"),
    pytest.mark.ray,
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(550),
]

ROOT = pathlib.Path(__file__).parents[2]
DEMO = ["-m", "ray_fed.cli", "demo", "--address", "auto", "--rounds"]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
WAIT_S = 180.0


@dataclasses.dataclass(frozen=True)
class Head:
    """A Ray with a dashboard that takes jobs.

    Attributes:
        dashboard: its URL.
        environment: of processes that have the token.
    """

    dashboard: str
    environment: dict[str, str]

    def submit(self, *argv: str) -> subprocess.Popen[str]:
        """Start `ray job submit` of a Python script."""
        variables = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        variables |= {"RAY_FED_WORKERS": "1"}
        return subprocess.Popen(
            [
                *RAY, "job", "submit", "--address", self.dashboard,
                "--runtime-env-json", json.dumps({"env_vars": variables}),
                "--", sys.executable, *argv,
            ],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        servers = [
            opened.enter_context(socket.create_server(("", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="rj"))  # sockets need a short path
    token_path = folder / "token"
    token_path.write_text(secrets.token_hex(16))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment = inherited | {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
    }
    port, client_port, agent_port, dashboard_port = free_ports(4)
    command = [
        *RAY, "start", "--head", "--block", f"--port={port}",
        f"--ray-client-server-port={client_port}", f"--dashboard-port={dashboard_port}",
        f"--dashboard-agent-listen-port={agent_port}", "--include-dashboard=true",
        "--num-cpus=2", "--disable-usage-stats",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + WAIT_S
        while not (is_listening(dashboard_port) and is_listening(agent_port)):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield Head(f"http://127.0.0.1:{dashboard_port}", environment)
    finally:
        process.terminate()
        process.wait(WAIT_S)
        shutil.rmtree(folder)


def driver_of(place: pathlib.Path) -> int:
    """Return the process of the job that saves itself to a place."""
    for process in psutil.process_iter(["cmdline"]):
        found: list[str] = process.info["cmdline"] or []
        if found[1:6] == DEMO[:5] and found[-1] == str(place):
            return process.pid
    raise AssertionError(f"no process saves to {place}")


def read_until(job: subprocess.Popen[str], text: str) -> str:
    assert job.stdout is not None
    read = ""
    for line in job.stdout:
        read += line
        if text in line:
            return read
    raise AssertionError(read)


def finish(job: subprocess.Popen[Any]) -> str:
    out, _ = job.communicate(timeout=WAIT_S)
    return out


def test_exit_status_is_that_of_the_script(head: Head, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "three.py"
    script.write_text("import sys\nsys.exit(3)\n")

    job = head.submit(str(script))
    out = finish(job)

    assert job.returncode != 0
    assert "exit code 3" in out


def test_job_that_is_told_to_leave_is_resumed_by_a_second_one(
    head: Head, tmp_path: pathlib.Path
) -> None:
    place = tmp_path / "run"
    stored = ["--storage-path", str(place)]

    first = head.submit(*DEMO, "400", *stored)
    read_until(first, "round 1/400")
    os.kill(driver_of(place), signal.SIGTERM)
    told = finish(first)
    (saved,) = re.findall(r"interrupted after round (\d+), saved in", told)
    rounds = int(saved)
    second = head.submit(*DEMO, str(rounds + 2), *stored)
    out = finish(second)

    assert first.returncode != 0
    assert second.returncode == 0, out
    assert f"round {rounds + 1}/{rounds + 2}" in out
    assert f"round {rounds}/" not in out
    assert f"after {rounds + 2} rounds" in out

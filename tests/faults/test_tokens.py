"""A Ray whose head asks for a token: with it, without, with another, by its client."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(300)]

SCRIPT = pathlib.Path(__file__).with_name("token_script.py")
CLIENT_SCRIPT = pathlib.Path(__file__).with_name("client_script.py")
WAIT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Head:
    """A Ray that asks for a token.

    Attributes:
        address: host:port.
        client: ray://host:port.
        folder: of its own, which processes that look for a Ray of this user look into.
        token_path: file with its token.
    """

    address: str
    client: str
    folder: pathlib.Path
    token_path: pathlib.Path


def _write_token(path: pathlib.Path) -> pathlib.Path:
    path.write_text(secrets.token_hex(16))
    return path


def _environment(folder: pathlib.Path, token_path: pathlib.Path | None) -> Any:
    """Return what a process is started with: no address, no token but that one."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    found = inherited | {"RAY_TMPDIR": str(folder), "HOME": str(folder / "home")}
    if token_path is not None:
        found |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path)}
    return found


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        servers = [
            opened.enter_context(socket.create_server(("", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="rf"))  # sockets need a short path
    (folder / "home").mkdir()
    token_path = _write_token(folder / "token")
    port, client_port, agent_port = _free_ports(3)
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        f"--port={port}", f"--ray-client-server-port={client_port}",
        f"--dashboard-agent-listen-port={agent_port}",
        "--include-dashboard=false", "--num-cpus=1", "--disable-usage-stats",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            env=_environment(folder, token_path),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        current = folder / "ray" / "ray_current_cluster"
        deadline = time.monotonic() + WAIT_S
        while not (current.exists() and current.read_text().strip()):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        client = f"ray://127.0.0.1:{client_port}"
        yield Head(current.read_text().strip(), client, folder, token_path)
    finally:
        process.terminate()
        process.wait(WAIT_S)
        shutil.rmtree(folder)


def _join(head: Head, token_path: pathlib.Path | None, arguments: list[str]) -> Any:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env=_environment(head.folder, token_path),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def refused(head: Head, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What processes are told, by whether they have a token and know the address.

    Ray takes its time to give up, which all of them spend at once.
    """
    other = _write_token(tmp_path_factory.mktemp("other") / "token")
    cases = list(itertools.product([False, True], [False, True]))

    def join(case: tuple[bool, bool]) -> Any:
        has_token, named = case
        return _join(head, other if has_token else None, [head.address] * named)

    with concurrent.futures.ThreadPoolExecutor(len(cases)) as threads:
        told = threads.map(join, cases)
        return dict(zip(cases, told, strict=True))


@pytest.mark.parametrize("named", [True, False], ids=["address", "this user's"])
@pytest.mark.parametrize("has_token", [False, True], ids=["no token", "another token"])
def test_process_without_the_token_is_told_so(
    head: Head, refused: Any, named: bool, has_token: bool
) -> None:
    told = refused[has_token, named]

    assert told["error"] == "ClusterError"
    assert f"`{head.address}`" in told["message"]
    assert "refuses it" in told["message"]
    assert "RAY_AUTH_TOKEN_PATH" in told["message"]


@pytest.mark.parametrize("to", ["address", "this user's", "auto"])
def test_process_with_the_token_joins(head: Head, to: str) -> None:
    arguments = {"address": [head.address], "this user's": [], "auto": ["auto"]}[to]

    assert _join(head, head.token_path, arguments) == {"joined": head.address}


@pytest.fixture(scope="module")
def by_client(head: Head) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", CLIENT_SCRIPT, head.client],
        env=_environment(head.folder, head.token_path),
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(550)
def test_rounds_run_by_rays_client_in_silence(
    head: Head, by_client: subprocess.CompletedProcess[str]
) -> None:
    told = json.loads(by_client.stdout.splitlines()[-1])

    assert f"joined the Ray at {head.address}" in told["context"]
    assert told["first"] == told["second"] == [0.5, 1.5, 1.0]
    assert told["retries"] == 1
    assert "`ray.shutdown` was called" in told["left"]
    assert "Traceback" not in by_client.stderr


STRANGER = """
import sys, ray
ray.init(num_cpus=1, include_dashboard=False)
one = ray.remote(lambda: 1)
print(ray.get_runtime_context().gcs_address, flush=True)
for _ in sys.stdin:
    print(ray.get(one.remote()), flush=True)
"""
DOCTOR = "import sys; from ray_fed import cli; sys.argv[1:] = ['doctor']; cli.main()"


@pytest.fixture
def stranger(
    tmp_path: pathlib.Path,
) -> Iterator[tuple[Head, subprocess.Popen[str]]]:
    """A Ray that a program started for itself, and the program."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="rf"))
    (folder / "home").mkdir()
    token_path = _write_token(tmp_path / "token")
    process = subprocess.Popen(
        [sys.executable, "-c", STRANGER],
        env=_environment(folder, token_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:  # its standard input is closed at the end, and it leaves
        assert process.stdout is not None
        yield Head(process.stdout.readline().strip(), "", folder, token_path), process
    shutil.rmtree(folder)


@pytest.mark.slow
def test_ray_that_another_program_started_is_left_alone(
    stranger: tuple[Head, subprocess.Popen[str]],
) -> None:
    head, process = stranger

    joined = _join(head, None, [])
    doctor = subprocess.run(
        [sys.executable, "-c", DOCTOR],
        env=_environment(head.folder, None),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()

    assert head.address
    assert joined["joined"] != head.address
    assert head.address not in doctor.stdout + doctor.stderr
    assert process.stdout.readline() == "1\n"

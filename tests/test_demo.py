"""The demo as users start it: in a process of its own, with a Ray of its own."""

import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

import keras
import numpy as np
import pytest

_COMMAND = [sys.executable, "-c", "from ray_fed.cli import main; main()", "demo"]
_SMALL = ["--rounds", "2", "--clients", "6", "--workers", "2", "--json"]
_MARK = "MARK_OF_THE_DEMO_TEST"
_DEADLINE_S = 90.0


def run_demo(*args: str) -> dict[str, Any]:
    finished = subprocess.run(
        [*_COMMAND, *_SMALL, *args], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def load_weights(path: pathlib.Path) -> list[Any]:
    model: Any = keras.models.load_model(path)
    return model.get_weights()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_local_and_ray_end_with_the_same_bits(tmp_path: pathlib.Path) -> None:
    local, remote = tmp_path / "local.keras", tmp_path / "ray.keras"
    picture = tmp_path / "curve.png"

    on_threads = run_demo(
        "--backend", "local", "--save", str(local), "--plot", str(picture)
    )
    on_ray = run_demo("--backend", "ray", "--subrounds", "3", "--save", str(remote))

    assert list(on_ray) == [
        "accuracy",
        "loss",
        "rounds",
        "clients_per_second",
        "retries",
        "seconds",
    ]
    for name in ("accuracy", "loss", "rounds", "retries"):
        assert on_ray[name] == on_threads[name]
    assert (on_ray["rounds"], on_ray["retries"]) == (2, 0)
    assert on_ray["clients_per_second"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    for one, other in zip(load_weights(local), load_weights(remote), strict=True):
        np.testing.assert_array_equal(one, other)


def read_until(screen: int, pattern: str) -> str:
    """Read what a process writes to a terminal until it shows a pattern."""
    seen = ""
    deadline = time.monotonic() + _DEADLINE_S
    while not re.search(pattern, seen):
        ready, _, _ = select.select([screen], [], [], deadline - time.monotonic())
        assert ready, f"no {pattern!r} within {_DEADLINE_S} s: {seen[-2000:]!r}"
        try:
            seen += os.read(screen, 4096).decode(errors="replace")
        except OSError:
            pytest.fail(f"ended without {pattern!r}: {seen[-2000:]!r}")
    return seen


def processes_with(mark: str) -> list[str]:
    """Return the command lines of all processes whose environment holds a mark."""
    found: list[str] = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it ended, or is another user's
            continue
    return found


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_interrupted_demo_leaves_nothing_behind() -> None:
    mark = uuid.uuid4().hex
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [*_COMMAND, "--rounds", "60", "--clients", "6", "--workers", "1"],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        env=os.environ | {_MARK: mark, "COLUMNS": "120", "TERM": "xterm"},
    )
    os.close(terminal)
    try:
        read_until(screen, r"[1-9]\d*/60")
        assert any("raylet" in command for command in processes_with(mark))

        os.killpg(process.pid, signal.SIGINT)

        read_until(screen, "ray-fed: interrupted")
        assert process.wait(timeout=15) == 130
        pause, deadline = threading.Event(), time.monotonic() + 15
        while processes_with(mark) and time.monotonic() < deadline:
            pause.wait(0.1)
        assert processes_with(mark) == []
    finally:
        process.kill()
        os.close(screen)

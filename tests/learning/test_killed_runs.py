"""Runs whose program is killed, or told to leave: the same bits in the end."""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

_SCRIPT = pathlib.Path(__file__).parent / "run_script.py"
NUM_ROUNDS = 20
PAUSE_S = 60
KILLS_VARIABLE = "PROOF_KILLS"
"""Kills of program, Ray and folder in a run; 10 for the whole proof."""


def start(
    backend: str,
    folder: pathlib.Path,
    num_rounds: int = NUM_ROUNDS,
    pause_s: float = 0,
    storage: str = "",
) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(_SCRIPT), backend, str(folder)]
    return subprocess.Popen(
        [*command, str(num_rounds), str(pause_s), storage],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"RAY_FED_PROGRESS": "off"},
    )


def finish(
    backend: str,
    folder: pathlib.Path,
    num_rounds: int = NUM_ROUNDS,
    storage: str = "",
) -> str:
    """Return the last line of a run that nothing disturbs."""
    with start(backend, folder, num_rounds, storage=storage) as script:
        assert script.stdout is not None
        lines = script.stdout.read().splitlines()
    assert script.returncode == 0
    return lines[-1]


def released(folder: pathlib.Path) -> list[tuple[int, float]]:
    """Return what the rounds released, without what they cost."""
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["round"], row["training.norm"]) for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, pathlib.Path]:
    """The last line of a run that nothing disturbs, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return finish("local", folder), folder


def wait_for(script: "subprocess.Popen[str]", line: str) -> None:
    assert script.stdout is not None
    for found in script.stdout:
        if found == line:
            return
    pytest.fail(f"the script ended before `{line!r}`")


def kill(script: "subprocess.Popen[str]", *, with_ray: bool) -> None:
    """Kill a program, and all processes that it started first, where asked to."""
    started = psutil.Process(script.pid).children(recursive=True)
    for process in started if with_ray else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    script.send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(590)
def test_run_on_ray_survives_kills_of_program_ray_and_folder(
    tmp_path: pathlib.Path, s3_server: str, whole: tuple[str, pathlib.Path]
) -> None:
    generator = random.Random(11)
    num_kills = int(os.environ.get(KILLS_VARIABLE, "2"))
    expected, lived = whole
    storage = f"s3://bucket/{uuid.uuid4().hex}"
    folder = tmp_path / "killed"

    for number, last in enumerate(range(0, NUM_ROUNDS, NUM_ROUNDS // num_kills)):
        with start("ray", folder, NUM_ROUNDS, 0.05, storage) as script:
            wait_for(script, f"round {last}\n")
            time.sleep(generator.uniform(0, 0.1))
            kill(script, with_ray=number % 4 == 1)
        assert script.returncode == -signal.SIGKILL
        if number == num_kills // 2:
            shutil.rmtree(folder)

    assert finish("ray", folder, NUM_ROUNDS, storage) == expected
    assert expected.startswith(f"finished {NUM_ROUNDS} ")
    assert released(folder) == released(lived)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)]
)
def test_signal_saves_and_leaves(
    tmp_path: pathlib.Path,
    whole: tuple[str, pathlib.Path],
    number: signal.Signals,
    code: int,
) -> None:
    with start("local", tmp_path / "told", pause_s=0.2) as script:
        wait_for(script, "round 4\n")
        script.send_signal(number)
        assert script.stdout is not None
        *_, last = ["round 4", *script.stdout.read().splitlines()]

    assert script.returncode == code
    rounds = int(last.removeprefix("round ")) + 1
    saved = list((tmp_path / "told" / "states").glob("round_*.zip"))
    assert f"round_{rounds}.zip" in [path.name for path in saved]
    assert finish("local", tmp_path / "told") == whole[0]


@pytest.mark.slow
def test_second_signal_leaves_at_once(tmp_path: pathlib.Path) -> None:
    with start("local", tmp_path / "told", pause_s=PAUSE_S) as script:
        wait_for(script, "round 0\n")
        script.send_signal(signal.SIGINT)
        time.sleep(0.5)  # the first one is seen
        since = time.monotonic()
        script.send_signal(signal.SIGTERM)
        script.wait()

    assert script.returncode == -signal.SIGTERM
    assert time.monotonic() - since < PAUSE_S / 2

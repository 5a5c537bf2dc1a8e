"""The demo as users start it: in a process of its own; `.ci/run` runs it on Ray."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import keras
import pytest

_COMMAND = [sys.executable, "-c", "from ray_fed.cli import main; main()", "demo"]
_SMALL = ["--rounds", "2", "--clients", "6", "--workers", "2", "--json"]


def run_demo(*args: str) -> dict[str, Any]:
    finished = subprocess.run(
        [*_COMMAND, *_SMALL, *args], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_demo_leaves_figures_a_model_and_a_picture(tmp_path: pathlib.Path) -> None:
    saved, picture = tmp_path / "model.keras", tmp_path / "curve.png"

    told = run_demo("--backend", "local", "--save", str(saved), "--plot", str(picture))

    assert list(told) == [
        "accuracy",
        "loss",
        "rounds",
        "clients_per_second",
        "retries",
        "seconds",
    ]
    assert (told["rounds"], told["retries"]) == (2, 0)
    assert told["clients_per_second"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    model: Any = keras.models.load_model(saved)
    assert model.count_params() > 0

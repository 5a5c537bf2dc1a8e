"""Every example, run as a user runs it; some of them in the process of the tests."""

import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
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


@pytest.fixture
def run_on_threads(
    run_here: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    monkeypatch.setenv("RAY_FED_BACKEND", "local")
    return run_here


def execute_notebook(name: str, folder: pathlib.Path) -> Any:
    """Return a notebook with what its cells put out, run in a kernel in a folder."""
    notebook = nbformat.read(_EXAMPLES / name, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
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
@pytest.mark.timeout(1800)  # processes of TensorFlow, one after the other
def test_sweep_finds_the_better_learning_rate() -> None:
    pytest.importorskip("ray.tune")

    # Its `ray.init` would join the Ray of a test beside it, which may end any time.
    out = run_example("tune_learning_rates.py", RAY_ADDRESS="local")

    assert out.splitlines()[-1] == "best learning rate: 0.3"


@pytest.mark.slow
def test_fed_avg_digits_learns_and_goes_on_where_it_was_saved(
    tmp_path: pathlib.Path,
    run_here: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, place = "fed_avg_digits.py", str(tmp_path)
    out = run_example(name, "local", "2", place, RAY_FED_PROGRESS="on")
    monkeypatch.setenv("RAY_FED_BACKEND", "local")
    resumed = run_here(name, "", "3", place)

    assert "2 rounds in all, finished" in out
    assert re.findall(r"^round (\d+):", resumed, re.MULTILINE) == ["3"]
    assert "3 rounds in all, finished" in resumed
    losses = [float(loss) for loss in re.findall(r"test loss ([\d.]+)", out + resumed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "Total params: 9,610" in out


@pytest.mark.slow
def test_ratings_learn_from_a_table(run_on_threads: Callable[..., str]) -> None:
    out = run_on_threads("ratings.py", "", "3", "100")

    found = [float(loss) for loss in re.findall(r"squared error ([\d.]+)", out)]
    assert out.startswith("90 people train, 10 are held out")
    assert len(found) == 3
    assert found[-1] < found[0]


@pytest.mark.slow
def test_characters_of_the_library_are_learned(
    run_on_threads: Callable[..., str],
) -> None:
    out = run_on_threads("characters.py", "", "3", "20")

    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert out.startswith("18 modules train, 2 are held out")
    assert len(losses) == 3
    assert losses[-1] < losses[0]


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

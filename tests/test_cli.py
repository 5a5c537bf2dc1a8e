import importlib.metadata
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
import ray
import tensorflow as tf

import ray_fed
from ray_fed import cli, demo, errors, learning
from ray_fed.cluster import joining
from tests.learning.counting import CLIENTS, build_tally

NOBODY = "127.0.0.1:1"
"""An address at which nothing listens."""

COMMAND = "from ray_fed.cli import main; main()"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process; returns exit code, output and errors."""

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ray-fed", *args])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return call


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    heavy = {"ray", "tensorflow", "keras", "numpy", "pydantic", "federated_language"}
    script = f"from ray_fed import cli; import sys; print({heavy} & set(sys.modules))"

    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert found.stdout.strip() == "set()"


def test_version_is_that_of_the_package(run: Run) -> None:
    version = importlib.metadata.version("ray-fed")

    assert ray_fed.__version__ == version
    assert run("--version")[:2] == (0, f"ray-fed {version}\n")


def test_help_names_all_commands(run: Run) -> None:
    code, out, _ = run("--help")

    assert code == 0
    assert all(name in out for name in ("demo", "doctor", "status", "runs", "config"))


def test_config_check_prints_what_settings_come_to(
    run: Run, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("workers: 2\nretry: {crash: 7}\n")

    code, out, _ = run("config", "check", str(path))

    assert code == 0
    assert "backend: ray\n" in out
    assert "  count: 2\n" in out
    assert "  crash: 7\n" in out


def test_config_check_says_what_is_wrong_on_one_line(
    run: Run, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("workers: [\n")

    code, out, err = run("config", "check", str(path))

    assert (code, out) == (2, "")
    assert "a YAML file" in err
    assert len(err.splitlines()) == 1


def test_status_of_no_cluster_is_an_error_at_once(run: Run) -> None:
    code, out, err = run("status", "--address", NOBODY)

    assert (code, out) == (2, "")
    assert err == (
        f"ray-fed: Expected a Ray at `{NOBODY}`, found none: start one with"
        " `ray start --head`, or pass its address.\n"
    )


@pytest.mark.ray
def test_status_shows_the_nodes_of_a_cluster(ray_cluster: None) -> None:
    address = ray.get_runtime_context().gcs_address
    found = subprocess.run(
        [sys.executable, "-c", COMMAND, "status", "--address", address],
        capture_output=True,
        text=True,
        check=True,
    )

    lines = found.stdout.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(address.rpartition(":")[0])
    assert lines[1].startswith("all")
    assert all("CPUs, 0 GPUs" in line for line in lines)


@pytest.mark.parametrize("place", ["", "digits"], ids=["folder", "run"])
def test_runs_are_listed_with_rounds_metrics_and_size(
    run: Run, tmp_path: pathlib.Path, place: str
) -> None:
    arguments: dict[str, Any] = {"num_rounds": 3, "checkpoint_every": 1}
    learning.run(build_tally(), CLIENTS, storage_path=tmp_path / "digits", **arguments)
    learning.run(build_tally(), CLIENTS, storage_path=tmp_path / "cut", **arguments)
    (tmp_path / "none").mkdir()
    for path in (tmp_path / "cut").glob("history_*"):
        path.write_bytes(b"cut")

    code, out, _ = run("runs", str(tmp_path / place))

    found = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0
    assert list(found) == [
        *([str(tmp_path / "cut")] if not place else []),
        str(tmp_path / "digits"),
    ]
    pattern = r"3 rounds, training.loss -976\.1, [\d.]+ kB, states after 1, 2, 3"
    assert re.fullmatch(pattern, found[str(tmp_path / "digits")])
    if not place:
        assert "cannot be read: Expected the records" in found[str(tmp_path / "cut")]


def test_run_hides_no_others_in_its_folder(run: Run, tmp_path: pathlib.Path) -> None:
    for path in (tmp_path, tmp_path / "other"):
        learning.run(build_tally(), CLIENTS, num_rounds=1, storage_path=path)

    _, out, _ = run("runs", f"{tmp_path}/")

    places, shown = zip(
        *(line.split(maxsplit=1) for line in out.splitlines()), strict=True
    )
    assert places == (f"{tmp_path}/", f"{tmp_path}/other")
    assert all(line.startswith("1 round, ") for line in shown)


@pytest.mark.parametrize("place", ["", "none"], ids=["empty", "missing"])
def test_place_without_runs_is_told(
    run: Run, tmp_path: pathlib.Path, place: str
) -> None:
    code, _, err = run("runs", str(tmp_path / place))

    assert code == cli.USER_ERROR
    assert "Expected runs that `learning.run` saved" in err


def test_doctor_works_without_a_cluster(run: Run) -> None:
    code, out, _ = run("doctor", "--address", NOBODY)

    facts = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0
    assert {"python", "ray-fed", "ray", "tensorflow", "keras", "numpy"} <= set(facts)
    assert facts["CPU:0"] == "CPU"
    assert "found none" in facts["Ray"]


@pytest.mark.parametrize("is_there", [True, False])
def test_doctor_says_whether_tensorflow_is_compiled(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, is_there: bool
) -> None:
    compiled = tmp_path / "tensorflow.pyc"
    if is_there:
        compiled.touch()
    monkeypatch.setattr(tf.__spec__, "cached", str(compiled))

    _, out, _ = run("doctor", "--address", NOBODY)

    (told,) = (line for line in out.splitlines() if line.startswith("bytecode"))
    folder = pathlib.Path(tf.__file__).parent.parent
    assert ("compiled" in told.split()) == is_there
    assert (f"`python -m compileall -q {folder}`" in told) != is_there


@pytest.mark.parametrize(
    ("is_there", "told"),
    [
        (False, "none to join: `ray_fed.init()` starts one"),
        (True, "Expected a Ray of this version"),
    ],
)
def test_doctor_says_whether_a_cluster_is_needed(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_there: bool, told: str
) -> None:
    looked: list[str | None] = []

    def look(address: str | None) -> None:
        looked.append(address)
        if is_there:
            raise errors.ClusterError("Expected a Ray of this version.")

    monkeypatch.setattr(joining, "find", look)

    code, out, _ = run("doctor")

    (ray,) = [line for line in out.splitlines() if line.startswith("Ray ")]
    assert code == 0
    assert told in ray
    assert looked == [None]  # as `ray_fed.init()`


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--save", "x.h5"], "ray-fed: .*ends with .keras"),
        (["--plot", "no/such/x.png"], "ray-fed: .*a folder that exists"),
        (["--backend", "local", "--address", "auto"], "ray-fed: .*no address"),
        (["--rounds", "0"], "--rounds"),
        (["--backend", "cloud"], "--backend"),
    ],
)
def test_demo_refuses_what_cannot_be(run: Run, args: list[str], message: str) -> None:
    code, out, err = run("demo", *args)

    assert (code, out) == (2, "")
    assert re.search(message, err)


def test_missing_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast("dict[str, Any]", sys.modules), "sklearn", None)

    code, _, err = run("demo")

    assert code == 2
    assert re.search(
        "found it missing in .*: run `pip install scikit-learn` there", err
    )


def test_interrupt_ends_with_its_own_code(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupt)

    code, out, err = run("demo", "--backend", "local")

    assert (code, out) == (130, "")
    assert err.strip() == "ray-fed: interrupted, all that was started is stopped"

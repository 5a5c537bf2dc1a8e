"""Importing the front end prints nothing, unless the user asked for it.

Standard error belongs to a process, so each test has one of its own; all but one
import a stand-in for TensorFlow, which is quick.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from ray_fed.tensorflow import quiet

NOISE = "written by native code while it is imported"
LOAD = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("quiet", {quiet.__file__!r})
quiet = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quiet)
"""
REPORT = f"""
print(os.environ.get("{quiet.LOG_LEVEL_VARIABLE}"), "tensorflow" in sys.modules)
os.write(2, b"after")
"""


def run(
    script: str, path: pathlib.Path | None = None, level: str | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != quiet.LOG_LEVEL_VARIABLE}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    if level is not None:
        environment[quiet.LOG_LEVEL_VARIABLE] = level
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.fixture
def stand_in(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a package `tensorflow` that writes to standard error."""
    package = tmp_path / "tensorflow.py"
    package.write_text(f"import os\nos.write(2, b'{NOISE}')\n")
    return tmp_path


@pytest.mark.slow
def test_tensorflow_itself_is_imported_without_a_word() -> None:
    done = run("import ray_fed.tensorflow, tensorflow as tf; tf.constant(1) + 1")

    assert done.returncode == 0
    assert (done.stdout, done.stderr) == ("", "")


def test_lines_of_the_import_are_set_aside_and_later_ones_are_not(
    stand_in: pathlib.Path,
) -> None:
    done = run(f"{LOAD}quiet.import_tensorflow(){REPORT}", stand_in)

    assert done.stdout == "3 True\n"
    assert done.stderr == "after"


@pytest.mark.parametrize("level", ["0", "3"])
def test_a_log_level_of_the_user_is_respected(
    stand_in: pathlib.Path, level: str
) -> None:
    script = f"{LOAD}quiet.import_tensorflow(); import tensorflow{REPORT}"

    done = run(script, stand_in, level)

    assert done.stdout == f"{level} True\n"
    assert done.stderr == f"{NOISE}after"


def test_tensorflow_that_is_imported_already_is_left_alone(
    stand_in: pathlib.Path,
) -> None:
    done = run(f"import tensorflow{LOAD}quiet.import_tensorflow(){REPORT}", stand_in)

    assert done.stdout == "None True\n"
    assert done.stderr == f"{NOISE}after"


def test_lines_are_shown_when_the_import_fails(stand_in: pathlib.Path) -> None:
    with (stand_in / "tensorflow.py").open("a") as package:
        package.write("raise ImportError('broken')\n")

    done = run(f"{LOAD}quiet.import_tensorflow()", stand_in)

    assert done.returncode == 1
    assert done.stderr.startswith(NOISE)
    assert done.stderr.endswith("ImportError: broken\n")

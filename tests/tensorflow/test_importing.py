"""The front end imports TensorFlow without a word, and without Keras.

Standard error and modules belong to a process, so each test has one of its own; those
that are not slow import a stand-in for TensorFlow.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from ray_fed.tensorflow import importing

NOISE = "written by native code while it is imported"
LOAD = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("importing", {importing.__file__!r})
importing = importlib.util.module_from_spec(spec)
spec.loader.exec_module(importing)
"""
REPORT = f"""
print(os.environ.get("{importing.LOG_LEVEL_VARIABLE}"), "tensorflow" in sys.modules)
os.write(2, b"after")
"""


def run(
    script: str, path: pathlib.Path | None = None, level: str | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {
        k: v for k, v in os.environ.items() if k != importing.LOG_LEVEL_VARIABLE
    }
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    if level is not None:
        environment[importing.LOG_LEVEL_VARIABLE] = level
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
    package = tmp_path / "tensorflow" / "__init__.py"
    package.parent.mkdir()
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
    done = run(f"{LOAD}importing.import_tensorflow(){REPORT}", stand_in)

    assert done.stdout == "3 True\n"
    assert done.stderr == "after"


@pytest.mark.parametrize("level", ["0", "3"])
def test_a_log_level_of_the_user_is_respected(
    stand_in: pathlib.Path, level: str
) -> None:
    script = f"{LOAD}importing.import_tensorflow(); import tensorflow{REPORT}"

    done = run(script, stand_in, level)

    assert done.stdout == f"{level} True\n"
    assert done.stderr == f"{NOISE}after"


def test_tensorflow_that_is_imported_already_is_left_alone(
    stand_in: pathlib.Path,
) -> None:
    done = run(
        f"import tensorflow{LOAD}importing.import_tensorflow(){REPORT}", stand_in
    )

    assert done.stdout == "None True\n"
    assert done.stderr == f"{NOISE}after"


def test_lines_are_shown_when_the_import_fails(stand_in: pathlib.Path) -> None:
    with (stand_in / "tensorflow" / "__init__.py").open("a") as package:
        package.write("raise ImportError('broken')\n")

    done = run(f"{LOAD}importing.import_tensorflow()", stand_in)

    assert done.returncode == 1
    assert done.stderr.startswith(NOISE)
    assert done.stderr.endswith("ImportError: broken\n")


def test_tensorflow_is_imported_without_keras(stand_in: pathlib.Path) -> None:
    package = stand_in / "tensorflow" / "__init__.py"
    package.write_text(
        "try:\n    import keras\nexcept ImportError:\n    found = False\n"
    )

    done = run(
        f"{LOAD}importing.import_tensorflow()\n"
        "import tensorflow; print(tensorflow.found, 'keras' in sys.modules)",
        stand_in,
    )

    assert (done.stdout, done.stderr) == ("False False\n", "")


def test_keras_that_is_imported_already_is_left_alone(stand_in: pathlib.Path) -> None:
    (stand_in / "keras.py").write_text("is_users = True\n")
    package = stand_in / "tensorflow" / "__init__.py"
    package.write_text("import keras\nfound = keras.is_users\n")

    done = run(
        f"import keras{LOAD}importing.import_tensorflow()\n"
        "import tensorflow; print(tensorflow.found, 'keras' in sys.modules)",
        stand_in,
    )

    assert (done.stdout, done.stderr) == ("True True\n", "")


KERAS_LATER = ["import ray_fed.learning", "from tensorflow.keras import layers"]


@pytest.mark.slow
@pytest.mark.parametrize("use", KERAS_LATER)
def test_keras_works_after_the_front_end(use: str) -> None:
    script = f"""
import sys, ray_fed.tensorflow, tensorflow as tf
before = 'keras' in sys.modules
{use}
import keras, numpy as np, tensorflow.keras.layers
dense = keras.layers.Dense(1, kernel_initializer='ones')
model = tf.keras.Sequential([dense])
model.compile('sgd', 'mse')
model.fit(np.ones([4, 2]), np.zeros([4, 1]), verbose=0)
print(before, tf.keras.Model is keras.Model, model.count_params())
"""

    done = run(script)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "False True 3\n"

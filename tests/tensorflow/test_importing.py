"""The front end imports TensorFlow without Keras.

Modules belong to a process, so each test has one of its own; those that are not slow
import a stand-in for TensorFlow.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from ray_fed.tensorflow import importing

LOAD = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("importing", {importing.__file__!r})
importing = importlib.util.module_from_spec(spec)
spec.loader.exec_module(importing)
"""


def run(
    script: str, path: pathlib.Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
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
    """A folder with a package `tensorflow` that does nothing."""
    package = tmp_path / "tensorflow" / "__init__.py"
    package.parent.mkdir()
    package.touch()
    return tmp_path


def test_tensorflow_that_is_imported_already_is_left_alone(
    stand_in: pathlib.Path,
) -> None:
    done = run(
        f"import tensorflow{LOAD}importing.import_tensorflow()\n"
        "print(sys.modules['tensorflow'] is tensorflow, 'keras' in sys.modules)",
        stand_in,
    )

    assert (done.stdout, done.stderr) == ("True False\n", "")


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

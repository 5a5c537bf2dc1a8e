"""What TensorFlow and Ray write as they are imported stays off standard error.

Standard error belongs to a process, so each test has one of its own; those that are not
slow import stand-ins for the packages.
"""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

from ray_fed import quiet_imports

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
LOGGED = """\
WARNING: All log messages before absl::InitializeLog() is called are on STDERR
I0000 00:00:1795572011.185 8 port.cc:153] custom operations are on.
2026-11-25 01:02:03.456: W tensorflow/a.cc:1] a warning
over two lines
E0000 00:00:1795572011.186 8 cuda.cc:52] an error
"""
FOREIGN = "I was written by something else\n"
LOAD = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("quiet", {quiet_imports.__file__!r})
quiet = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quiet)
quiet.install()
"""
USE = """
import tensorflow
assert tensorflow.__loader__ is tensorflow.__spec__.loader
os.write(2, b"after")
"""


def run(
    *argv: str,
    path: pathlib.Path | None = None,
    level: str | None = None,
    **settings: str,
) -> subprocess.CompletedProcess[str]:
    name = quiet_imports.LOG_LEVEL_VARIABLE
    environment = {k: v for k, v in os.environ.items() if k != name}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    if level is not None:
        environment[name] = level
    return subprocess.run(
        [sys.executable, *argv],
        env=environment | settings,
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture
def stand_in(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a package `tensorflow` that writes to standard error."""
    package = tmp_path / "tensorflow" / "__init__.py"
    package.parent.mkdir()
    written = FOREIGN + LOGGED
    package.write_text(f"import os\nos.write(2, {written.encode()!r})\n")
    return tmp_path


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        (None, FOREIGN),
        ("3", FOREIGN),
        ("2", FOREIGN + "".join(LOGGED.splitlines(keepends=True)[4:])),
        ("1", FOREIGN + "".join(LOGGED.splitlines(keepends=True)[2:])),
        ("0", FOREIGN + LOGGED),
    ],
    ids=["by default", "fatal", "errors", "warnings", "all"],
)
def test_lines_of_the_import_follow_the_log_level(
    stand_in: pathlib.Path, level: str | None, shown: str
) -> None:
    done = run("-c", LOAD + USE, path=stand_in, level=level)

    assert done.returncode == 0, done.stderr
    assert done.stderr == f"{shown}after"


def test_all_lines_are_shown_when_the_import_fails(stand_in: pathlib.Path) -> None:
    with (stand_in / "tensorflow" / "__init__.py").open("a") as package:
        package.write("raise ImportError('broken')\n")

    done = run("-c", LOAD + USE, path=stand_in)

    assert done.returncode == 1
    assert done.stderr.startswith(FOREIGN + LOGGED)
    assert done.stderr.endswith("ImportError: broken\n")


def test_looking_for_tensorflow_neither_imports_nor_unquiets_it(
    stand_in: pathlib.Path,
) -> None:
    look = "print(importlib.util.find_spec('tensorflow').origin in sys.modules)"

    done = run("-c", f"{LOAD}{look}{USE}", path=stand_in)

    assert (done.stdout, done.stderr) == ("False\n", f"{FOREIGN}after")


def test_ray_does_not_say_what_its_widgets_lack(tmp_path: pathlib.Path) -> None:
    package = tmp_path / "ray" / "__init__.py"
    package.parent.mkdir()
    package.write_text(
        textwrap.dedent(
            """
            import logging, warnings
            logging.basicConfig(level="INFO")
            logger = logging.getLogger("ray.widgets.util")
            logger.info("Missing packages")
            warnings.warn("IProgress not found. Please update")
            """
        )
    )
    later = "import ray; ray.logger.info('after')"

    done = run("-c", LOAD + later, path=tmp_path)

    assert done.returncode == 0
    assert done.stderr == "INFO:ray.widgets.util:after\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "import ray_fed.tensorflow, tensorflow as tf; tf.constant(1) + 1",
        "import ray_fed, keras, tensorflow as tf; tf.constant(1) + 1",
        "import ray_fed.learning, tensorflow as tf; tf.constant(1) + 1",
    ],
    ids=["the front end", "keras after ray_fed", "learning"],
)
def test_tensorflow_itself_is_imported_without_a_word(script: str) -> None:
    done = run("-c", script)

    assert done.returncode == 0
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(250)
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_run_writes_nothing_but_its_own_lines(backend: str) -> None:
    address = "" if backend == "local" else "local"

    done = run(
        str(EXAMPLES / "fed_avg_digits.py"),
        address,
        "2",
        RAY_FED_BACKEND=backend,
        RAY_FED_WORKERS="1",
        RAY_FED_PROGRESS="on",
    )

    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines
    assert all(re.match("ray_fed: ", line) for line in lines), done.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_init_in_another_thread_writes_nothing() -> None:
    script = """
import threading, ray_fed

def use():
    ray_fed.init("local", config=ray_fed.Config(workers=1))
    ray_fed.shutdown()

thread = threading.Thread(target=use)
thread.start()
thread.join()
"""

    done = run("-c", script)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.ray
def test_script_that_ends_after_a_call_writes_nothing() -> None:
    script = """
import federated_language as fl, numpy as np, ray_fed
ray_fed.init("local", config=ray_fed.Config(workers=1, progress="off"))

@fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
def total(x):
    return fl.federated_sum(x)

print(total([1, 2, 3]))
"""

    done = run("-c", script)

    assert (done.returncode, done.stdout, done.stderr) == (0, "6\n", "")

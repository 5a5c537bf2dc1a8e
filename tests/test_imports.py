"""TensorFlow and Ray are imported quietly, TensorFlow without Keras, names lazily.

Standard error and modules belong to a process, so each test has one of its own; those
that are not slow import stand-ins for the packages.
"""

import itertools
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import tomllib
import types
from typing import Any, cast

import pytest

import ray_fed
from ray_fed import imports
from ray_fed import tensorflow as rtf
from ray_fed.imports import install_command

ROOT = pathlib.Path(__file__).parents[1]
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
spec = importlib.util.spec_from_file_location("quiet", {imports.__file__!r})
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
    name = imports.LOG_LEVEL_VARIABLE
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


WITHOUT_STREAMS = {
    "None": "sys.stdin = sys.stdout = sys.stderr = None",
    "closed": "sys.stdout.close(), sys.stderr.close()",
    "descriptors": "[os.close(number) for number in (0, 1, 2)]",
}


@pytest.mark.parametrize("way", WITHOUT_STREAMS)
def test_standard_streams_need_not_be_there(
    stand_in: pathlib.Path, tmp_path: pathlib.Path, way: str
) -> None:
    script = f"""
import os, sys
{WITHOUT_STREAMS[way]}
sys.path.append({str(pathlib.Path(ray_fed.__file__).parents[1])!r})
import ray_fed
with open({str(tmp_path / "mine")!r}, "w") as mine:
    import tensorflow
    from ray_fed.observability.progress import RoundProgress, WaitLine
    with WaitLine.create("on") as line, RoundProgress(2) as progress:
        line.say("waiting")
        progress.advance("loss 1")
    mine.write("done")
os._exit(7)
"""

    done = run("-c", script, path=stand_in)

    assert done.returncode == 7, done.stderr
    assert (tmp_path / "mine").read_text() == "done"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("way", WITHOUT_STREAMS)
def test_ray_starts_without_standard_streams(tmp_path: pathlib.Path, way: str) -> None:
    script = f"""
import os, sys
{WITHOUT_STREAMS[way]}
import federated_language as fl, numpy as np, ray_fed

@fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
def total(x):
    return fl.federated_sum(x)

with ray_fed.init("local", config=ray_fed.Config(workers=1, progress="on")):
    result = total([1, 2, 3])
with open({str(tmp_path / "result")!r}, "w") as file:
    file.write(str(result))
"""

    run("-c", script)

    assert (tmp_path / "result").read_text() == "6"


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


@pytest.fixture
def curious(tmp_path: pathlib.Path) -> pathlib.Path:
    """A `tensorflow` that says whether it found Keras and garbage is collected."""
    package = tmp_path / "tensorflow" / "__init__.py"
    package.parent.mkdir()
    package.write_text(
        "import gc\ncollects = gc.isenabled()\n"
        "try:\n    import keras\n    found = keras.is_users\n"
        "except ImportError:\n    found = False\n"
    )
    return tmp_path


REPORT = """
import gc, sys, tensorflow
print(tensorflow.found, "keras" in sys.modules, tensorflow.collects, gc.isenabled())
"""


def test_tensorflow_is_imported_without_keras(curious: pathlib.Path) -> None:
    done = run("-c", f"{LOAD}{REPORT}", path=curious)

    assert (done.stdout, done.stderr) == ("False False False True\n", "")


def test_keras_that_is_imported_already_is_left_alone(curious: pathlib.Path) -> None:
    (curious / "keras.py").write_text("is_users = True\n")

    done = run("-c", f"import keras{LOAD}{REPORT}", path=curious)

    assert (done.stdout, done.stderr) == ("True True False True\n", "")


@pytest.mark.slow
def test_keras_works_after_tensorflow() -> None:
    script = """
import sys, ray_fed, tensorflow as tf
before = 'keras' in sys.modules
import ray_fed.learning
import keras, numpy as np, tensorflow.keras.layers
dense = keras.layers.Dense(1, kernel_initializer='ones')
model = tf.keras.Sequential([dense])
model.compile('sgd', 'mse')
model.fit(np.ones([4, 2]), np.zeros([4, 1]), verbose=0)
print(before, tf.keras.Model is keras.Model, model.count_params())
"""

    done = run("-c", script)

    assert (done.returncode, done.stdout) == (0, "False True 3\n"), done.stderr


PUBLIC = {"ray_fed": ray_fed, "ray_fed.tensorflow": rtf}


@pytest.mark.parametrize("package", PUBLIC.values(), ids=PUBLIC.keys())
def test_public_names_are_imported_as_they_are_used(package: types.ModuleType) -> None:
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match=f"{package.__name__}.*no attribute.*nix"):
        package.nix  # noqa: B018


@pytest.mark.slow
def test_front_end_is_imported_before_tensorflow_and_all_without_a_word() -> None:
    done = run(
        "-c",
        "import sys\nfrom ray_fed import tensorflow as rtf\n"
        "print('tensorflow' in sys.modules)\nrtf.computation\n"
        "print('tensorflow' in sys.modules, 'keras' in sys.modules)\n"
        "import keras, tensorflow as tf\ntf.constant(1) + 1",
    )

    assert done.returncode == 0
    assert (done.stdout, done.stderr) == ("False\nTrue False\n", "")


def _read_requirements() -> set[str]:
    """Return the names of all packages that ray_fed and its extras require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"].values()
    requirements = [*project["project"]["dependencies"], *itertools.chain(*extras)]
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


@pytest.mark.parametrize(
    "module",
    [
        *("dp_accounting", "fsspec.core", "matplotlib.figure", "mlflow", "pandas"),
        *("pyarrow.compute", "s3fs", "sklearn", "tensorboard.compat", "wandb"),
    ],
)
def test_missing_module_names_packages_that_the_extras_have(module: str) -> None:
    command, packages = install_command(module).split("install ")

    assert command == "pip "
    assert set(packages.split()) <= _read_requirements()


def test_missing_package_of_an_extra_is_an_error_of_its_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package: Any = imports.LazyPackage("pyarrow", "reading a table")
    monkeypatch.setitem(cast("dict[str, Any]", sys.modules), "pyarrow", None)

    with pytest.raises(ray_fed.errors.UnsupportedError, match=r"`pip install pyarrow`"):
        _ = package.Table


def test_nothing_installs_ray_fed_by_a_name_that_no_index_has() -> None:
    files = [ROOT / "cluster.yaml", ROOT / "README.md"]
    for folder in ("ray_fed", "docs", "examples"):
        for pattern in ("*.py", "*.md", "*.yaml", "*.ipynb"):
            files += (ROOT / folder).rglob(pattern)

    named = re.compile(r"pip install [\"']*ray-fed\b")
    assert [f for f in files if named.search(f.read_text(encoding="utf-8"))] == []

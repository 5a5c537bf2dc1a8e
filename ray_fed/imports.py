"""How packages are imported: TensorFlow and Ray quietly, extras when they are used.

TensorFlow's native code writes lines before its log level applies. Ray writes that a
notebook lacks packages for widgets, which ray_fed does not use. Once `ray_fed` is
imported, all later imports of TensorFlow and Ray are quiet, also an import by Keras.
Lines that do not belong to a log, or that the user's `TF_CPP_MIN_LOG_LEVEL` asks for,
are shown after the import. If the import fails, all lines are shown. Set this variable
to 0 to see every line.

`import tensorflow` would import Keras, and the packages that Keras looks for, such as
scikit-learn and matplotlib. This takes a third of the time and a fifth of the memory of
the import, and graphs run without Keras. So it is left out. Keras can be imported
afterwards, also as `tensorflow.keras`.
"""

import contextlib
import functools
import gc
import importlib
import importlib.abc
import importlib.util
import logging
import os
import pathlib
import re
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from typing import Any, cast

from typing_extensions import override

LOG_LEVEL_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
_FATAL_ONLY = "3"  # errors too: one says that there is no GPU driver
_STANDARD_ERROR = 2

_LOGGED = re.compile(rb"([IWEF])\d{4} |[-\d]+ [\d:.]+: ([IWEF]) ")
"""The start of an entry in TensorFlow's log, in the format of absl or an older one."""

_FIRST_OF_LOG = b"WARNING: All log messages before absl::InitializeLog()"
_LEVELS = b"IWEF"
_WIDGETS_LOGGER = "ray.widgets.util"


@contextlib.contextmanager
def _import_tensorflow() -> Generator[None]:
    """Import TensorFlow without log lines, without Keras and without garbage checks."""
    with _without_log(), _without_garbage_collection():
        if "keras" in sys.modules:
            yield
        else:
            with _without_keras():
                yield


@contextlib.contextmanager
def _without_keras() -> Generator[None]:
    """Make imports of Keras fail with an ImportError, which TensorFlow expects.

    An `import keras` in another thread fails at the same time.
    """
    cast("dict[str, Any]", sys.modules)["keras"] = None
    try:
        yield
    finally:
        del sys.modules["keras"]
    # Let `import tensorflow.keras` find Keras, as TensorFlow's own import would.
    found = importlib.util.find_spec("keras")
    for location in (found and found.submodule_search_locations) or ():
        folder = pathlib.Path(location) / "_tf_keras"
        if folder.is_dir():
            sys.modules["tensorflow"].__path__.insert(0, str(folder))


@contextlib.contextmanager
def _without_garbage_collection() -> Generator[None]:
    """Turn off garbage collection, which takes a seventh of an import's time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _without_log() -> Generator[None]:
    """Redirect standard error, then show the lines at or above the log level."""
    level = os.environ.setdefault(LOG_LEVEL_VARIABLE, _FATAL_ONLY)
    least = int(level) if level.isdecimal() else 0
    if not least:
        yield
        return
    open_standard_streams()
    _flush_standard_error()
    kept = os.dup(_STANDARD_ERROR)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), _STANDARD_ERROR)
        try:
            yield
        except BaseException:
            least = 0
            raise
        finally:
            _flush_standard_error()
            os.dup2(kept, _STANDARD_ERROR)
            os.close(kept)
            written.seek(0)
            os.write(_STANDARD_ERROR, b"".join(_lines_to_show(written, least)))


def open_standard_streams() -> None:
    """Open /dev/null for standard descriptors that are closed, as in a daemon.

    Otherwise the next file or socket gets the number of standard error, and then the
    lines that TensorFlow and Ray write to it.
    """
    for number in range(_STANDARD_ERROR + 1):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)  # also inherited by the processes of Ray
            if null != number:
                os.close(null)


def _flush_standard_error() -> None:
    with contextlib.suppress(AttributeError, ValueError):
        sys.stderr.flush()


def _lines_to_show(lines: Iterable[bytes], least: int) -> Iterator[bytes]:
    """Return the lines at or above a log level, and the lines outside of a log.

    A line that does not start an entry belongs to the entry before it.
    """
    is_shown = True
    for line in lines:
        logged = _LOGGED.match(line)
        if logged is not None:
            is_shown = _LEVELS.index(logged[logged.lastindex or 0]) >= least
        elif line.startswith(_FIRST_OF_LOG):
            is_shown = not least
        if is_shown:
            yield line


@contextlib.contextmanager
def _import_ray() -> Generator[None]:
    """Hide the warning that packages for widgets are missing."""
    logger = logging.getLogger(_WIDGETS_LOGGER)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="IProgress not found")
            yield
    finally:
        logger.setLevel(level)


_QUIET: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "tensorflow": _import_tensorflow,
    "ray": _import_ray,
}


class _QuietFinder(importlib.abc.MetaPathFinder):
    """Finds the packages in `_QUIET` as Python does, and loads them quietly."""

    def __init__(self) -> None:
        self._finding = threading.local()

    @override
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in _QUIET or getattr(self._finding, "is_on", False):
            return None
        self._finding.is_on = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.is_on = False
        if spec is not None and spec.loader is not None:
            execute = functools.partial(_execute, spec.loader.exec_module)
            spec.loader.exec_module = execute  # of this loader alone
        return spec


def _execute(
    execute: Callable[[types.ModuleType], None], module: types.ModuleType
) -> None:
    with _QUIET[module.__name__]():
        execute(module)


def install() -> None:
    """Make later imports of TensorFlow and Ray quiet. A second call does nothing."""
    open_standard_streams()
    if not any(isinstance(finder, _QuietFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _QuietFinder())


def import_lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports a name when it is first used.

    `modules` maps each name to the module that defines it. If this module is
    `package.name`, the module itself is the value.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name])
        if modules[name] == f"{package}.{name}":
            return module
        return getattr(module, name)

    return get


_PACKAGES = {
    "dp_accounting": "dp-accounting",
    "mlflow": "mlflow-skinny alembic sqlalchemy",
    "sklearn": "scikit-learn",
}
"""Names of the packages to install, for modules whose package has another name."""


def install_command(module: str) -> str:
    """Return the command that installs the package of a module.

    It does not name an extra of ray_fed, which needs a checkout or a wheel.
    """
    name = module.partition(".")[0]
    return f"pip install {_PACKAGES.get(name, name)}"


def import_extra(module: str, purpose: str) -> Any:
    """Import a module that ray_fed needs for one feature, or raise UnsupportedError.

    `purpose` names the feature in the error.
    """
    import ray_fed.errors as errors  # this module is loaded by itself, too
    from ray_fed.error_texts import describe_process

    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise errors.UnsupportedError(
            f"Expected the package `{package}`, which {purpose} needs, found it"
            f" missing in {describe_process()}: run `{install_command(module)}` there."
        ) from error


class LazyPackage:
    """Stands for a package, which is imported when a name in it is first used.

    Submodules count as names. `purpose` is as in `import_extra`.
    """

    def __init__(self, package: str, purpose: str) -> None:
        self._package, self._purpose = package, purpose

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by whoever looks through a module's globals
            raise AttributeError(name)
        package = import_extra(self._package, self._purpose)
        if not hasattr(package, name):
            import_extra(f"{self._package}.{name}", self._purpose)
        found = getattr(package, name)
        setattr(self, name, found)  # so that the next look-up is as fast as a module's
        return found


pyarrow: Any = LazyPackage("pyarrow", "reading a table")

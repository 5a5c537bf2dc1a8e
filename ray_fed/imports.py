"""How packages are imported: TensorFlow and Ray quietly, TensorFlow without Keras.

TensorFlow's native code writes lines before its log level applies; Ray writes that a
notebook lacks packages for widgets that ray_fed does not use. Whoever imports them once
`ray_fed` is imported, such as Keras, does so quietly. Lines that are not of a log, or
that the user's `TF_CPP_MIN_LOG_LEVEL` asks for, are shown after the import; should it
fail, all are. Set that variable to 0 to have every line.

`import tensorflow` would import Keras, and with it whatever Keras looks for:
scikit-learn, matplotlib. That is a third of the time and a fifth of the memory of the
import, and graphs run without it. Keras stays importable afterwards, also as
`tensorflow.keras`.
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
"""The start of an entry of TensorFlow's log: as absl writes it, and the older way."""

_FIRST_OF_LOG = b"WARNING: All log messages before absl::InitializeLog()"
_LEVELS = b"IWEF"
_WIDGETS_LOGGER = "ray.widgets.util"


@contextlib.contextmanager
def _import_tensorflow() -> Generator[None]:
    """Leave out lines below the log level, Keras, and collections of garbage."""
    with _without_log(), _without_garbage_collection():
        if "keras" in sys.modules:
            yield
        else:
            with _without_keras():
                yield


@contextlib.contextmanager
def _without_keras() -> Generator[None]:
    """Refuse imports of Keras inside; TensorFlow expects an ImportError there.

    An `import keras` in another thread fails meanwhile.
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
    """Collect none inside, a seventh of the time: modules drop nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _without_log() -> Generator[None]:
    """Set standard error aside, then show what is not below the log level."""
    level = os.environ.setdefault(LOG_LEVEL_VARIABLE, _FATAL_ONLY)
    least = int(level) if level.isdecimal() else 0
    if not least:
        yield
        return
    sys.stderr.flush()
    kept = os.dup(_STANDARD_ERROR)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), _STANDARD_ERROR)
        try:
            yield
        except BaseException:
            least = 0
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, _STANDARD_ERROR)
            os.close(kept)
            written.seek(0)
            os.write(_STANDARD_ERROR, b"".join(_lines_to_show(written, least)))


def _lines_to_show(lines: Iterable[bytes], least: int) -> Iterator[bytes]:
    """Return the lines of a log that are of some level, and those of no log.

    A line that is no start of an entry belongs to the entry before it.
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
    """Leave out that packages for widgets are missing."""
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
    """Finds these packages as Python does, and has them load quietly."""

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
    """Make later imports of TensorFlow and Ray quiet; a second call does nothing."""
    if not any(isinstance(finder, _QuietFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _QuietFinder())


def import_lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports a name as it is first used.

    Args:
        package: its name.
        modules: the module that has each name; that which ends in the name is itself
            what the name means.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name])
        if modules[name] == f"{package}.{name}":
            return module
        return getattr(module, name)

    return get


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Return a module of an extra of ray_fed.

    Args:
        module: its name.
        extra: that installs it.
        purpose: what needs it, as the user calls it.

    Raises:
        UserError: it is not installed.
    """
    import ray_fed.errors as errors  # this module is loaded by itself, too

    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise errors.UserError(
            f"Expected the package `{package}`, which {purpose} needs, found it"
            f' missing: pip install "ray-fed[{extra}]".'
        ) from error

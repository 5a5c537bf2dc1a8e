"""Imports TensorFlow without Keras, and without TensorFlow's own start-up lines.

`import tensorflow` imports Keras, and with it whatever Keras looks for: scikit-learn,
matplotlib. That is a third of the time and a fifth of the memory of the import, and
graphs run without it. Keras stays importable afterwards, also as `tensorflow.keras`.

TensorFlow writes some start-up lines before its log level applies, so the process's
standard error is set aside during the import; should the import fail, the lines are
shown. Set `TF_CPP_MIN_LOG_LEVEL` (0 shows everything) or import TensorFlow first to
have them.
"""

import contextlib
import importlib.util
import os
import pathlib
import sys
import tempfile
from collections.abc import Generator
from typing import Any, cast

LOG_LEVEL_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
_FATAL_ONLY = "3"  # errors too: one says that there is no GPU driver
_STANDARD_ERROR = 2
_KERAS = "keras"


def import_tensorflow() -> None:
    """Import TensorFlow without Keras, quietly unless the user chose a log level.

    Does nothing where TensorFlow was imported before. While it runs, an `import keras`
    in another thread fails.
    """
    if "tensorflow" in sys.modules:
        return
    is_quiet = LOG_LEVEL_VARIABLE not in os.environ
    os.environ.setdefault(LOG_LEVEL_VARIABLE, _FATAL_ONLY)
    with contextlib.ExitStack() as stack:
        if is_quiet:
            stack.enter_context(_set_aside_stderr())
        if _KERAS not in sys.modules:
            stack.enter_context(_without_keras())
        import tensorflow as tf  # noqa: F401  # pyright: ignore[reportUnusedImport]


@contextlib.contextmanager
def _set_aside_stderr() -> Generator[None]:
    sys.stderr.flush()
    kept = os.dup(_STANDARD_ERROR)
    with tempfile.TemporaryFile() as lines:
        os.dup2(lines.fileno(), _STANDARD_ERROR)
        try:
            yield
        except Exception:
            lines.seek(0)
            os.write(kept, lines.read())
            raise
        finally:
            os.dup2(kept, _STANDARD_ERROR)
            os.close(kept)


@contextlib.contextmanager
def _without_keras() -> Generator[None]:
    """Refuse imports of Keras inside; TensorFlow expects an ImportError there."""
    cast("dict[str, Any]", sys.modules)[_KERAS] = None
    try:
        yield
    finally:
        del sys.modules[_KERAS]
    _find_keras_below_tensorflow()


def _find_keras_below_tensorflow() -> None:
    """Let `import tensorflow.keras` find Keras, as TensorFlow's own import would."""
    found = importlib.util.find_spec(_KERAS)
    for location in (found and found.submodule_search_locations) or ():
        folder = pathlib.Path(location) / "_tf_keras"
        if folder.is_dir():
            sys.modules["tensorflow"].__path__.insert(0, str(folder))

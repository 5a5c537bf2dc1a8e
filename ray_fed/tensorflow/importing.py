"""Imports TensorFlow without Keras.

`import tensorflow` imports Keras, and with it whatever Keras looks for: scikit-learn,
matplotlib. That is a third of the time and a fifth of the memory of the import, and
graphs run without it. Keras stays importable afterwards, also as `tensorflow.keras`.
"""

import contextlib
import importlib.util
import pathlib
import sys
from collections.abc import Generator
from typing import Any, cast

_KERAS = "keras"


def import_tensorflow() -> None:
    """Import TensorFlow without Keras.

    Does nothing where TensorFlow was imported before. While it runs, an `import keras`
    in another thread fails.
    """
    if "tensorflow" in sys.modules:
        return
    with contextlib.nullcontext() if _KERAS in sys.modules else _without_keras():
        import tensorflow as tf  # noqa: F401  # pyright: ignore[reportUnusedImport]


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

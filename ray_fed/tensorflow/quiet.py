"""Imports TensorFlow without its own start-up lines, which drown what a user prints.

TensorFlow writes some of them before its log level applies, so the process's standard
error is set aside while it is imported; should the import fail, they are shown. Set
`TF_CPP_MIN_LOG_LEVEL` (0 shows everything) or import TensorFlow first to have them.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Generator

LOG_LEVEL_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
_FATAL_ONLY = "3"  # errors too: one says that there is no GPU driver
_STANDARD_ERROR = 2


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


def import_tensorflow() -> None:
    """Import TensorFlow, quietly unless the user chose a log level."""
    if "tensorflow" in sys.modules or LOG_LEVEL_VARIABLE in os.environ:
        return
    os.environ[LOG_LEVEL_VARIABLE] = _FATAL_ONLY
    with _set_aside_stderr():
        import tensorflow as tf  # noqa: F401  # pyright: ignore[reportUnusedImport]

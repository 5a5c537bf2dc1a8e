"""Files of callbacks that are there whole or not at all."""

import contextlib
import pathlib
import uuid
from collections.abc import Generator

import ray_fed.errors as errors


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Generator[pathlib.Path]:
    """Yield a path to write to; what is there at the end becomes the file.

    Args:
        path: of the file; its folder is made.

    Raises:
        StorageError: the file cannot be written.
    """
    name = f".{path.stem}.{uuid.uuid4().hex}{path.suffix}"
    temporary = path.with_name(name)
    with telling(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def telling(path: pathlib.Path) -> Generator[None]:
    """Raise StorageError, with the name of the file, where it cannot be written."""
    try:
        yield
    except OSError as error:
        # The text of the error may name the temporary file.
        cause = f" ({error.strerror})" if error.strerror else ""
        raise errors.StorageError(
            f"Expected to write the file `{path}`, found {type(error).__name__}{cause}:"
            " make room for it, or name another one."
        ) from error


def check_place(path: pathlib.Path) -> None:
    """Raise unless a file can be written; one that is there is left alone.

    Raises:
        StorageError: it cannot.
    """
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    with telling(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(0, "a folder has that name")
        temporary.touch()
        temporary.unlink()

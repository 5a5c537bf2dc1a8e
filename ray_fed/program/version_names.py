"""Names of versions in a folder, and errors of the place that they are in."""

import contextlib
import errno
import re
from collections.abc import Generator, Iterable

import ray_fed.errors as errors

MAX_VERSION = 2**63
"""One past the latest version; names of files have an end, too."""

OF_THIS_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What opening a file fails with however whole the file is."""


def versions_in(names: Iterable[str], prefix: str, suffix: str) -> list[int]:
    """Return the versions that names stand for, ascending; other names are left out."""
    pattern = re.compile(
        re.escape(prefix) + r"(0|[1-9]\d{0,18})" + re.escape(suffix), re.ASCII
    )
    found = sorted(int(match[1]) for match in map(pattern.fullmatch, names) if match)
    return [version for version in found if version < MAX_VERSION]


@contextlib.contextmanager
def telling_storage(
    where: str, *kinds: type[Exception], verb: str = "save state in"
) -> Generator[None]:
    """Raise what a file system raises as an error that says what to do.

    Args:
        where: state is read or written.
        *kinds: of errors to tell so.
        verb: what was tried there.

    Raises:
        StorageError: an error of one of the kinds came up.
    """
    try:
        yield
    except errors.RayFedError:
        raise
    except kinds as error:
        if isinstance(error, OSError) and error.errno in OF_THIS_PROCESS:
            raise
        raise _told(where, error, verb) from error


@contextlib.contextmanager
def telling_read(where: str, *kinds: type[Exception]) -> Generator[None]:
    """Raise what reading raises as `telling_storage` does, but for what is not there.

    Args:
        where: state is read.
        *kinds: of errors to tell so.

    Raises:
        FileNotFoundError: there is nothing.
        StorageError: another error of one of the kinds came up.
    """
    absent: FileNotFoundError | None = None
    with telling_storage(where, *kinds, verb="read"):
        try:
            yield
        except FileNotFoundError as error:
            absent = error
    if absent is not None:
        raise absent


def _told(where: str, error: Exception, verb: str) -> errors.StorageError:
    found = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return errors.StorageError(
        f"Expected to {verb} `{where}`, found {type(error).__name__} ({found}): see"
        " that the place exists, has room and may be read and written by this process."
        " What was saved before is left as it is."
    )


def unlisted(where: str, error: Exception) -> errors.StorageError:
    """Return the error that a place of saved state cannot be listed."""
    found = getattr(error, "strerror", None) or str(error)
    return errors.StorageError(
        f"Expected a folder of saved state, or nothing yet, at `{where}`, found that it"
        f" cannot be listed ({found}): name another folder, or move away what is there."
    )

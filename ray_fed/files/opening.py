"""Files that computations name: what a name says, and how a file is opened.

    /data/a.npz        file:///data/a.parquet#label        s3://bucket/a.tfrecord

A name is a path, or a URI that fsspec knows, in the file system of the process that
reads the file; the text behind the last `#` names one column. Nothing here is cached:
files may change, and `DataFile.stamp` says whether one has.
"""

import contextlib
import dataclasses
import errno
import importlib
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Generator
from typing import IO, Any, Self

import ray_fed.errors as errors
from ray_fed.values import read_limits


def describe_executor() -> str:
    """Return where this code runs, as an error says it."""
    return f"process {os.getpid()} on node `{platform.node()}`"


def import_extra(module: str) -> Any:
    """Return a module of the extra `data`.

    Raises:
        UnsupportedError: it is not installed where this code runs.
    """
    if (found := sys.modules.get(module)) is not None:
        return found  # asked for with every client: ten times as fast as an import
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise errors.UnsupportedError(
            f"Expected the package `{module.partition('.')[0]}`, which reads external"
            f" data, found it missing in {describe_executor()}: pip install"
            " 'ray-fed[data]' there."
        ) from error


_OTHER_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file to read bytes, and nothing else that a path may name.

    To open a FIFO or a device can wait for ever, or has effects.

    Raises:
        TypeError: `path` is none.
        FileNotFoundError: there is nothing at the path.
        OSError: what is there cannot be opened, or is no regular file.
    """
    try:
        status = os.stat(os.fspath(path))  # noqa: PTH116 (it names what `os.open` would open)
    except ValueError as error:  # a NUL in it, or no text
        raise OSError(errno.EINVAL, f"no path: {error}") from error
    _check_regular(status)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _check_regular(os.fstat(descriptor))  # it may have been replaced in between
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _OTHER_KINDS.get(stat.S_IFMT(status.st_mode), "no file")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file")


def expand_home(path: str | os.PathLike[str]) -> str:
    """Return a local path with `~` or `~name` at its begin as the folder of that user.

    A name that no user has is left as it is.

    Raises:
        ConfigError: it is no path.
    """
    given: Any = path
    if not isinstance(given, str | os.PathLike):
        raise errors.ConfigError(
            "Expected a path as a string or a `pathlib.Path`, found"
            f" {errors.describe(given)}."
        )
    return os.path.expanduser(os.fspath(path))  # noqa: PTH111 (pathlib refuses the name)


_COARSE_S = 2.0
"""File systems' times have at most this step: that of FAT."""

_OPEN_PROTOCOLS = ("file", "local", "memory")
"""Those that may be read without a setting."""


def _protocols_of(uri: str) -> list[str]:
    """Return the protocols of a URI, of each part of a chain; none for a path."""
    parts, found = uri.split("::"), list[str]()
    for part in parts:
        protocol, has_protocol, _ = part.partition("://")
        # As in zip::memory://a.zip
        is_name = len(parts) > 1 and "/" not in part and "." not in part
        if has_protocol or is_name:
            found.append(protocol)
        elif part.startswith("data:"):
            found.append("data")
    return found


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file that a computation names.

    Attributes:
        uri: a path, or a URI; without the column.
        column: the one to read; None: those that the declared type names.
    """

    uri: str
    column: str | None

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return the file, and the column, that a name says.

        Raises:
            UnsupportedError: files of the name's protocol may not be read here.
        """
        uri, _, column = name.rpartition("#") if "#" in name else (name, "", "")
        legal = [*_OPEN_PROTOCOLS, *read_limits.limits().protocols]
        for protocol in _protocols_of(uri):
            if protocol not in legal:
                named = f'Config(data={{"protocols": ["{protocol}"]}})'
                raise errors.UnsupportedError(
                    f"Expected a path, or a URI of one of the protocols {legal}, found"
                    f" `{protocol}` in `{uri}`: to let computations open others, name"
                    f" them in {named}."
                )
        return cls(uri, column or None)

    @property
    def suffix(self) -> str:
        """The end of the name that tells the format, as `.npz`."""
        return os.path.splitext(self.uri)[1].lower()  # noqa: PTH122 (no path: a URI)

    def open(self) -> Any:
        """Return the file, opened to read bytes.

        Raises:
            MissingFileError: it is not there, or may not be read.
            UnsupportedError: fsspec, or what it needs for the URI, is not installed.
        """
        try:
            filesystem, path = locate(self.uri)
            if is_local(filesystem):
                return open_regular(path)
            return filesystem.open(path, "rb")
        except OSError as error:
            raise self._missing(error) from error

    @contextlib.contextmanager
    def on_disk(self) -> Generator[str]:
        """Give the path of the file on this machine, or of a copy that goes with it."""
        filesystem, path = locate(self.uri)
        with self.open() as opened:
            if is_local(filesystem):
                yield path
                return
            with tempfile.NamedTemporaryFile() as copy:
                shutil.copyfileobj(opened, copy, 2**20)
                copy.flush()
                yield copy.name

    def stamp(self) -> tuple[int, ...] | None:
        """Return what changes with the content of a local file; None: nobody knows.

        So it is with a file of another protocol, with one that cannot be opened, and
        with one that changed just now: as times are coarse, it may change once more
        within the same one.
        """
        if not {"file", "local"}.issuperset(_protocols_of(self.uri)):
            return None
        path = self.uri.removeprefix("file://").removeprefix("local://")
        try:
            # To open it has a network file system ask for the newest times.
            with open_regular(expand_home(path)) as opened:
                found = os.fstat(opened.fileno())
        except OSError:
            return None
        changed_s = max(found.st_mtime, found.st_ctime)
        if time.time() - changed_s < _COARSE_S:
            return None
        times = found.st_mtime_ns, found.st_ctime_ns
        return found.st_dev, found.st_ino, found.st_size, *times

    def _missing(self, error: OSError) -> errors.MissingFileError:
        return errors.MissingFileError(
            f"Expected the file `{self.uri}`, found {type(error).__name__}"
            f" ({error.strerror or error}) in {describe_executor()}: put the file where"
            " its name says, on every machine that runs its clients."
        )

    def mismatch(self, expected: str, found: str) -> errors.ValueMismatchError:
        """Return the error that the file does not hold what was declared."""
        return errors.ValueMismatchError(
            f"Expected {expected} in `{self.uri}`, found {found} (read by"
            f" {describe_executor()}): change the declared type or the file; nothing"
            " is cast."
        )

    def damaged(self, found: str) -> errors.ValueMismatchError:
        """Return the error that the file is not as it was written."""
        return errors.ValueMismatchError(
            f"Expected the whole of `{self.uri}` as it was written, found {found} (read"
            f" by {describe_executor()}): write or copy the file anew."
        )


def locate(uri: str) -> tuple[Any, str]:
    """Return the file system of a path or a URI, as fsspec has it, and the path.

    Raises:
        UnsupportedError: fsspec, or what it needs for the URI, is not installed.
    """
    fsspec = import_extra("fsspec.core")
    try:
        return fsspec.url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise errors.UnsupportedError(
            f"Expected a path, or a URI that fsspec knows, found `{uri}` ({error}) in"
            f" {describe_executor()}: install what it names there, such as `pip install"
            " 'ray-fed[s3]'` for s3://."
        ) from error


def advise(error: Exception) -> str:
    """Return a sentence on credentials where an error is about these; else ""."""
    if "Credential" not in type(error).__name__:
        return ""
    return (
        " Credentials come from the environment, such as AWS_ACCESS_KEY_ID and"
        " AWS_SECRET_ACCESS_KEY for s3://, or from what `aws configure` writes."
    )


def is_local(filesystem: Any) -> bool:
    """Return whether a file system of fsspec is that of this machine."""
    protocols = filesystem.protocol
    return "file" in ([protocols] if isinstance(protocols, str) else protocols)

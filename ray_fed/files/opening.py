"""How users name files, and how files are opened.

    /data/a.npz        file:///data/a.parquet#label        s3://bucket/a.tfrecord

A name is a path, or a URI that fsspec knows, in the file system of the process that
reads the file. The text after the last `#` is the name of a column. Nothing is cached,
because files may change. `DataFile.stamp` says whether a file has changed.
"""

import contextlib
import dataclasses
import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Generator
from typing import IO, Any, Self

import ray_fed.errors as errors
from ray_fed.error_texts import describe_process
from ray_fed.imports import install_command
from ray_fed.values import read_limits

_OTHER_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file to read bytes, or raise OSError if it is another kind.

    Opening a FIFO or a device can wait forever, or have effects.
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
    """Return a local path with `~` or `~name` replaced by the user's home folder.

    The name of an unknown user is not replaced.
    """
    given: Any = path
    if not isinstance(given, str | os.PathLike):
        raise errors.ConfigError(
            "Expected a path as a string or a `pathlib.Path`, found"
            f" {errors.describe(given)}."
        )
    return os.path.expanduser(os.fspath(path))  # noqa: PTH111 (pathlib refuses the name)


_COARSE_S = 2.0
"""Coarsest resolution of file times, in seconds. The file system FAT has it."""

_OPEN_PROTOCOLS = ("file", "local", "memory")
"""Protocols of URIs that may be read without a setting."""


def _protocols_of(uri: str) -> list[str]:
    """Return the protocols in a URI, which `::` may chain. A path has no protocol."""
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
    """A file that a computation reads, and the column of it.

    `uri` is the name without the column. If `column` is None, the declared type decides
    which columns are read.
    """

    uri: str
    column: str | None

    @classmethod
    def parse(cls, name: str) -> Self:
        """Parse a name such as `a.parquet#label`.

        Raises UnsupportedError if its protocol is not in the current `read_limits`.
        """
        uri, _, column = name.rpartition("#") if "#" in name else (name, "", "")
        legal = [*_OPEN_PROTOCOLS, *read_limits.limits().protocols]
        for protocol in _protocols_of(uri):
            if protocol not in legal:
                named = f'Config(data={{"protocols": ["{protocol}"]}})'
                raise errors.UnsupportedError(
                    f"Expected a path, or a URI of one of the protocols {legal}, found"
                    f" `{protocol}` in `{uri}`: to allow it, pass {named}."
                )
        return cls(uri, column or None)

    @property
    def suffix(self) -> str:
        """The ending of the name that tells the format, such as `.npz`."""
        return os.path.splitext(self.uri)[1].lower()  # noqa: PTH122 (no path: a URI)

    def open(self) -> Any:
        """Open the file to read bytes.

        Raises MissingFileError if it cannot be opened, and UnsupportedError if fsspec
        needs a package that is not installed.
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
        """Yield the path of the file, or of a temporary copy if it is remote."""
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
        """Return a tuple that changes with the content of a local file, or None.

        It is None for other protocols, for a file that cannot be opened, and for a file
        that changed in the last two seconds: another change may get the same time.
        """
        if not {"file", "local"}.issuperset(_protocols_of(self.uri)):
            return None
        path = self.uri.removeprefix("file://").removeprefix("local://")
        try:
            # Opening makes a network file system ask for the newest times.
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
            f" ({error.strerror or error}) in {describe_process()}: put the file where"
            " its name says, on every machine that runs its clients."
        )

    def mismatch(self, expected: str, found: str) -> errors.ValueMismatchError:
        """Return the error for a file that does not have the declared type."""
        return errors.ValueMismatchError(
            f"Expected {expected} in `{self.uri}`, found {found} (read by"
            f" {describe_process()}): change the declared type or the file; nothing"
            " is cast."
        )

    def damaged(self, found: str) -> errors.ValueMismatchError:
        """Return the error for a damaged file."""
        return errors.ValueMismatchError(
            f"Expected the whole of `{self.uri}` as it was written, found {found} (read"
            f" by {describe_process()}): write or copy the file anew."
        )


def locate(uri: str) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URI, and the path in that system."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise errors.UnsupportedError(
            f"Expected a path, or a URI that fsspec knows, found `{uri}` ({error}) in"
            f" {describe_process()}: install what it names there, such as"
            f" `{install_command('s3fs')}` for s3://."
        ) from error


def expand_pattern(uri: str) -> list[str]:
    """Return the sorted URIs that match a glob pattern, or `[uri]` without a pattern.

    Raises FileNotFoundError if no file matches.
    """
    if not set("*?[").intersection(uri) or "::" in uri:
        return [uri]
    filesystem, path = locate(uri)
    if filesystem.exists(path):  # such characters may be part of a name
        return [uri]
    matches = sorted(filesystem.glob(path))
    if not matches:
        raise FileNotFoundError("no file matches the pattern")
    return [filesystem.unstrip_protocol(match) for match in matches]


def advise(error: Exception) -> str:
    """Return advice for an error about missing credentials, or "" for other errors."""
    if "Credential" not in type(error).__name__:
        return ""
    return (
        " Credentials come from the environment, such as AWS_ACCESS_KEY_ID and"
        " AWS_SECRET_ACCESS_KEY for s3://, or from what `aws configure` writes."
    )


def is_local(filesystem: Any) -> bool:
    """Return whether a file system of fsspec is local."""
    protocols = filesystem.protocol
    return "file" in ([protocols] if isinstance(protocols, str) else protocols)

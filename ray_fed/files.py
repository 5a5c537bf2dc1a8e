"""Files that computations name: what a name says, and how a file is opened.

    /data/a.npz        file:///data/a.parquet#label        s3://bucket/a.tfrecord

A name is a path, or a URI that fsspec knows, in the file system of whoever reads it;
what follows the last `#` names one column. Nothing here is cached: files may change.
"""

import dataclasses
import importlib
import os
import platform
from typing import Any, Self

import ray_fed.errors as errors


def describe_executor() -> str:
    """Return where this code runs, as an error says it."""
    return f"process {os.getpid()} on node `{platform.node()}`"


def import_extra(module: str) -> Any:
    """Return a module of the extra `data`.

    Raises:
        UnsupportedError: it is not installed where this code runs.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise errors.UnsupportedError(
            f"Expected the package `{module.partition('.')[0]}`, which reads external"
            f" data, found it missing in {describe_executor()}: pip install"
            " 'ray-fed[data]' there."
        ) from error


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
        """Return the file, and the column, that a name says."""
        uri, _, column = name.rpartition("#") if "#" in name else (name, "", "")
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
            filesystem, path = self._locate()
            return filesystem.open(path, "rb")
        except OSError as error:
            raise self._missing(error) from error

    def local_path(self) -> str | None:
        """Return the path of a local file, None for one elsewhere.

        Raises:
            MissingFileError: there is no such local file.
            UnsupportedError: as `open`.
        """
        filesystem, path = self._locate()
        protocols = filesystem.protocol
        if "file" not in ([protocols] if isinstance(protocols, str) else protocols):
            return None
        if not filesystem.exists(path):
            raise self._missing(FileNotFoundError("no such file"))
        return path

    def _locate(self) -> tuple[Any, str]:
        fsspec = import_extra("fsspec.core")
        try:
            return fsspec.url_to_fs(self.uri)
        except (ImportError, ValueError) as error:
            raise errors.UnsupportedError(
                f"Expected a path, or a URI that fsspec knows, found `{self.uri}`"
                f" ({error}) in {describe_executor()}."
            ) from error

    def _missing(self, error: OSError) -> errors.MissingFileError:
        return errors.MissingFileError(
            f"Expected the file `{self.uri}`, found {type(error).__name__} in"
            f" {describe_executor()}: put the file where its name says, on every"
            " machine that runs its clients."
        )

    def mismatch(self, expected: str, found: str) -> errors.ValueMismatchError:
        """Return the error that the file does not hold what was declared."""
        return errors.ValueMismatchError(
            f"Expected {expected} in `{self.uri}`, found {found} (read by"
            f" {describe_executor()}): change the declared type or the file; nothing"
            " is cast."
        )

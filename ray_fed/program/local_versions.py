"""Versions of state as files of a folder of this machine, renamed into place."""

import glob
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import ray_fed.program.state_files as state_files
import ray_fed.program.version_names as version_names

_SUFFIX = ".zip"


class LocalVersions:
    """One file a version; see `versions.Versions`.

    Args:
        folder: made when it is first written to.
        prefix: of file names.
    """

    def __init__(self, folder: pathlib.Path, prefix: str) -> None:
        self._folder = folder
        self._prefix = prefix

    def find(self) -> list[int]:
        """Return the versions that are there, ascending."""
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 (3.11 passes over loops)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise version_names.unlisted(str(self._folder), error) from error
        return version_names.versions_in(names, self._prefix, _SUFFIX)

    def removable(self) -> list[int]:
        """Return the versions that are files."""
        return [v for v in self.find() if _is_file(self._path(v))]

    def read(self, version: int) -> dict[str, Any]:
        """Return the values of a version, by name."""
        self.find()  # says so where the folder is none
        return state_files.read_values(self._path(version))

    def write(self, version: int, values: Mapping[str, object]) -> None:
        """Write a version, and remove what a program that was killed left half."""
        self.find()  # says so where the folder is none
        path = self._path(version)
        with version_names.telling_storage(str(path), OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            pattern = f".{glob.escape(self._prefix)}*{state_files.TEMPORARY_SUFFIX}"
            for leftover in filter(_is_file, self._folder.glob(pattern)):
                leftover.unlink(missing_ok=True)
            state_files.write_values(path, values)

    def remove(self, versions: Sequence[int]) -> None:
        """Remove versions that are files."""
        for path in map(self._path, versions):
            if _is_file(path):
                with version_names.telling_storage(str(path), OSError, verb="remove"):
                    path.unlink(missing_ok=True)

    def where(self, version: int) -> str:
        """Return the path of a version."""
        return str(self._path(version))

    def _path(self, version: int) -> pathlib.Path:
        return self._folder / f"{self._prefix}{version}{_SUFFIX}"


def _is_file(path: pathlib.Path) -> bool:
    return path.is_symlink() or not path.is_dir()

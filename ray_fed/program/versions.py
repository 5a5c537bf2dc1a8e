"""Where versions of program state are: a seam of five verbs, and what chooses a side.

a path, file://...           LocalVersions     one file a version, renamed into place
any other URI of fsspec      RemoteVersions    parts first, a manifest last
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import ray_fed.errors as errors
from ray_fed.files.opening import expand_home
from ray_fed.language import structs
from ray_fed.program.local_versions import LocalVersions
from ray_fed.program.remote_versions import RemoteVersions

_LOCAL = ("file://", "local://")


class Versions(Protocol):
    """Versions of one program's state, each there whole or not at all."""

    def find(self) -> list[int]:
        """Return the versions that are there, ascending, whole or damaged.

        Raises:
            SavedStateError: the place cannot be listed.
        """
        ...

    def removable(self) -> list[int]:
        """Return those of `find` that `remove` would remove."""
        ...

    def read(self, version: int) -> dict[str, Any]:
        """Return the values of a version, by name.

        Raises:
            FileNotFoundError: there is no such version.
            StorageError: it cannot be read now.
            StateFormatError: another version of ray_fed wrote it.
            SavedStateError: it is damaged.
        """
        ...

    def write(self, version: int, values: Mapping[str, object]) -> None:
        """Write a version, over a damaged one if need be.

        Raises:
            ValueMismatchError: a value is of a kind that cannot be saved.
            StorageError: it cannot be written.
        """
        ...

    def remove(self, versions: Sequence[int]) -> None:
        """Remove versions."""
        ...

    def where(self, version: int) -> str:
        """Return the place of a version, as an error says it."""
        ...


def open_versions(root_dir: object, prefix: object) -> Versions:
    """Return the versions at a path or URI; nothing is read or made yet.

    Raises:
        UnsupportedError: `root_dir` is neither, its protocol is unknown or needs a
            package that is missing, or `prefix` is no beginning of a name.
        StorageError: it names an archive that cannot be opened.
    """
    beginning = _check_prefix(prefix)
    place = _check_place(root_dir)
    for protocol in _LOCAL:
        place = place.removeprefix(protocol)
    if "://" in place:
        return RemoteVersions(place, beginning)
    return LocalVersions(pathlib.Path(expand_home(place)), beginning)


def _check_place(root_dir: object) -> str:
    is_path = isinstance(root_dir, str | os.PathLike)
    path = os.fspath(cast("Any", root_dir)) if is_path else None
    if not isinstance(path, str) or not _names_a_file(path):
        raise errors.UnsupportedError(
            "Expected the path or URI of a folder as `root_dir`, found"
            f" {structs.show(root_dir)}."
        )
    return path


def _check_prefix(prefix: object) -> str:
    if not isinstance(prefix, str) or "/" in prefix or not _names_a_file(f"{prefix}0"):
        raise errors.UnsupportedError(
            "Expected the beginning of a file name as `prefix`, without `/`, found"
            f" {structs.show(prefix)}."
        )
    return prefix


def _names_a_file(path: str) -> bool:
    try:
        return bool(path) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False

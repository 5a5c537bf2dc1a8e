"""Saved program state: one file a version, the last few kept."""

import asyncio
import glob
import logging
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, cast

import federated_language as fl
import numpy as np
from federated_language.program import structure_utils
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.program.state_encoding as state_encoding
import ray_fed.program.state_files as state_files
from ray_fed.executors.fanout import gather_by_index
from ray_fed.language import structs

_logger = logging.getLogger(__name__)

_MAX_VERSION = 2**63
"""One past the latest version; names of files have an end, too."""


class FileProgramStateManager(fl.program.ProgramStateManager[Any]):
    """Saves program state to files of a folder, one a version.

    A version appears complete or not at all, with a checksum of each value, and is read
    without pickle. References are read into this process when they are saved, and only
    then. A folder belongs to one program at a time.

    Args:
        root_dir: the folder; made when it is first needed.
        prefix: of file names.
        keep_total: versions to keep, the latest ones; 0 or less keeps all.

    Raises:
        UnsupportedError: `root_dir` is no path, or `prefix` no beginning of a name.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        prefix: str = "program_state_",
        keep_total: int = 5,
    ) -> None:
        self._folder = _check_folder(root_dir)
        self._prefix = _check_prefix(prefix)
        self._keep_total = keep_total

    @override
    async def get_versions(self) -> list[int] | None:
        """Return the saved versions, ascending; None if there is none."""
        return await asyncio.to_thread(self._find_versions) or None

    @override
    async def load(self, version: int, structure: Any) -> Any:
        """Return the state of a version.

        Args:
            version: that was saved.
            structure: of that state, such as `initialize` returns: its containers are
                filled, its `fl.Serializable` objects say what class to restore. Other
                leaves are not looked at.

        Raises:
            ProgramStateNotFoundError: there is no such version.
            SavedStateError: its file is damaged, or is no regular file.
            UnsupportedError: no version can be that.
            ValueMismatchError: what was saved has another structure.
        """
        path = self._path(version)
        try:
            saved = await asyncio.to_thread(state_files.read_values, path)
        except FileNotFoundError as error:
            raise fl.program.ProgramStateNotFoundError(version) from error
        return _restore(saved, structure, path)

    @override
    async def load_latest(self, structure: Any) -> tuple[Any, int]:
        """Return the latest state that can be read, and its version.

        A version that cannot be read is passed over with a warning, for the one before:
        its file is damaged, or something that is no regular file has its name.

        Returns:
            (state, version); (None, 0) where nothing was saved.

        Raises:
            SavedStateError: no version can be read, or the folder cannot.
            ValueMismatchError: what was saved has another structure.
        """
        damage: errors.SavedStateError | None = None
        for version in reversed(await self.get_versions() or []):
            try:
                return await self.load(version, structure), version
            except errors.SavedStateError as error:
                _logger.warning("Version %d is passed over. %s", version, error)
                damage = damage or error
            except fl.program.ProgramStateNotFoundError:
                continue  # removed since the folder was read
        if damage is not None:
            raise damage
        return None, 0

    @override
    async def save(self, program_state: Any, version: int) -> None:
        """Save a state, then remove versions beyond those to keep.

        Args:
            program_state: a structure of references and of values that
                `state_encoding` describes.
            version: strictly increasing, >= 0.

        Raises:
            ProgramStateExistsError: the version is there, and not damaged.
            ValueMismatchError: a value is of a kind that cannot be saved.
            Exception: the failure of a call that should have made one of the values.
        """
        path = self._path(version)
        if await asyncio.to_thread(_is_whole, path):
            raise fl.program.ProgramStateExistsError(version=version, path=str(path))
        named = _flatten(program_state)
        materialised = await gather_by_index(_read(value) for _, value in named)
        names = [name for name, _ in named]
        if len(set(names)) < len(names):
            raise errors.ValueMismatchError(
                "Expected values with a name each to save, found two of one name in"
                f" {structs.show(names)}: `/` parts the names of keys, leave it out."
            )
        content = dict(zip(names, materialised, strict=True))
        await asyncio.to_thread(self._write, path, content)

    async def remove_all(self) -> None:
        """Remove all versions."""
        await asyncio.to_thread(self._remove, self._find_versions())

    def _write(self, path: pathlib.Path, content: dict[str, Any]) -> None:
        self._find_versions()  # says so where the folder is none
        self._folder.mkdir(parents=True, exist_ok=True)
        # What a program that was killed left half-written.
        pattern = f".{glob.escape(self._prefix)}*{state_files.TEMPORARY_SUFFIX}"
        for leftover in filter(_is_file, self._folder.glob(pattern)):
            leftover.unlink(missing_ok=True)
        state_files.write_values(path, content)
        if self._keep_total > 0:
            removable = [v for v in self._find_versions() if _is_file(self._path(v))]
            # What was just written stays, also where later versions lie about.
            before = [v for v in removable if self._path(v) != path]
            self._remove(before[: max(0, len(before) + 1 - self._keep_total)])

    def _remove(self, versions: Sequence[int]) -> None:
        for path in map(self._path, versions):
            if _is_file(path):
                path.unlink(missing_ok=True)

    def _path(self, version: object) -> pathlib.Path:
        is_whole = isinstance(version, int | np.integer) and type(version) is not bool
        if not is_whole or not 0 <= int(cast("Any", version)) < _MAX_VERSION:
            raise errors.UnsupportedError(
                f"Expected a whole number as a version, of at least 0 and below 2**63,"
                f" found {structs.show(version)}."
            )
        return self._folder / f"{self._prefix}{version}.zip"

    def _find_versions(self) -> list[int]:
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 (3.11 passes over loops)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise errors.SavedStateError(
                "Expected a folder of saved state, or nothing yet, at"
                f" `{self._folder}`, found that it cannot be listed ({error.strerror}):"
                " name another folder, or move away what is there."
            ) from error
        pattern = re.compile(
            re.escape(self._prefix) + r"(0|[1-9]\d{0,18})\.zip", re.ASCII
        )
        found = sorted(
            int(match[1]) for match in map(pattern.fullmatch, names) if match
        )
        return [version for version in found if version < _MAX_VERSION]


def _check_folder(root_dir: object) -> pathlib.Path:
    is_path = isinstance(root_dir, str | os.PathLike)
    path = os.fspath(cast("Any", root_dir)) if is_path else None
    if not isinstance(path, str) or not _names_a_file(path):
        raise errors.UnsupportedError(
            f"Expected the path of a folder as `root_dir`, found"
            f" {structs.show(root_dir)}."
        )
    return pathlib.Path(path)


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


def _is_file(path: pathlib.Path) -> bool:
    return path.is_symlink() or not path.is_dir()


def _flatten(structure: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a structure, each with its name.

    Raises:
        ValueMismatchError: it cannot be taken apart.
    """
    try:
        return structure_utils.flatten_with_name(structure)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.ValueMismatchError(
            "Expected a structure of lists, tuples and mappings, whose keys can be"
            f" ordered, found {structs.show(structure)} ({type(error).__name__})."
        ) from error


async def _read(value: Any) -> Any:
    if isinstance(value, fl.program.MaterializableValueReference):
        return await value.get_value()
    return value


def _is_whole(path: pathlib.Path) -> bool:
    try:
        state_files.read_values(path)
    except (FileNotFoundError, errors.SavedStateError):
        return False
    return True


def _restore(saved: dict[str, Any], structure: Any, path: pathlib.Path) -> Any:
    named = _flatten(structure)
    names = [name for name, _ in named]
    if set(names) != set(saved):
        raise errors.ValueMismatchError(
            f"Expected a structure with the values that `{path}` has,"
            f" {sorted(saved)}, found one with {sorted(names)}."
        )
    leaves = [_revive(saved[name], leaf, name) for name, leaf in named]
    return structure_utils.unflatten_as(structure, leaves)


def _revive(value: Any, template: Any, name: str) -> Any:
    if not isinstance(value, state_encoding.SavedObject):
        return value
    if value.class_name != state_encoding.class_name(type(template)):
        raise errors.ValueMismatchError(
            f"Expected a `{value.class_name}` as `{name}` of the structure, found a"
            f" `{state_encoding.class_name(type(template))}`."
        )
    return cast("fl.Serializable", template).from_bytes(value.content)

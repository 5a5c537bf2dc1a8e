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
from federated_language.program import structure_utils
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.program.state_encoding as state_encoding
import ray_fed.program.state_files as state_files
from ray_fed.executors.fanout import gather_by_index

_logger = logging.getLogger(__name__)


class FileProgramStateManager(fl.program.ProgramStateManager[Any]):
    """Saves program state to files of a folder, one a version.

    A version appears complete or not at all, with a checksum of each value, and is read
    without pickle. References are read into this process when they are saved, and only
    then. A folder belongs to one program at a time.

    Args:
        root_dir: the folder; made when it is first needed.
        prefix: of file names.
        keep_total: versions to keep, the latest ones; 0 or less keeps all.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        prefix: str = "program_state_",
        keep_total: int = 5,
    ) -> None:
        self._folder = pathlib.Path(root_dir)
        self._prefix = prefix
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
            SavedStateError: its file is damaged.
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

        A damaged file is passed over with a warning, for the version before it.

        Returns:
            (state, version); (None, 0) where nothing was saved.

        Raises:
            SavedStateError: all files are damaged.
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
        named = structure_utils.flatten_with_name(program_state)
        materialised = await gather_by_index(_read(value) for _, value in named)
        names = [name for name, _ in named]
        content = dict(zip(names, materialised, strict=True))
        await asyncio.to_thread(self._write, path, content)

    async def remove_all(self) -> None:
        """Remove all versions."""
        await asyncio.to_thread(self._remove, self._find_versions())

    def _write(self, path: pathlib.Path, content: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # What a program that was killed left half-written.
        pattern = f".{glob.escape(self._prefix)}*{state_files.TEMPORARY_SUFFIX}"
        for leftover in self._folder.glob(pattern):
            leftover.unlink(missing_ok=True)
        state_files.write_values(path, content)
        if self._keep_total > 0:
            self._remove(self._find_versions()[: -self._keep_total])

    def _remove(self, versions: Sequence[int]) -> None:
        for version in versions:
            self._path(version).unlink(missing_ok=True)

    def _path(self, version: int) -> pathlib.Path:
        if version < 0:
            raise errors.UnsupportedError(
                f"Expected a version of at least 0, found {version}."
            )
        return self._folder / f"{self._prefix}{version}.zip"

    def _find_versions(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        pattern = re.compile(re.escape(self._prefix) + r"(0|[1-9]\d*)\.zip")
        found = (pattern.fullmatch(entry.name) for entry in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)


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
    named = structure_utils.flatten_with_name(structure)
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

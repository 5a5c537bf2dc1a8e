"""Saved program state: one version after another, the last few kept."""

import os
from typing import Any, cast

import federated_language as fl
import numpy as np
from federated_language.program import structure_utils
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.executors.loops import gather_by_index
from ray_fed.language import structs
from ray_fed.observability import reprs
from ray_fed.program.checkpoint_store import (
    MAX_VERSION,
    SavedObject,
    Versions,
    call_on_daemon,
    class_name,
    name_place,
)


class FileProgramStateManager(fl.program.ProgramStateManager[Any]):
    """Saves program state to a folder of this machine, or of any that fsspec knows.

    A version appears complete or not at all, with a checksum of each value, and is read
    without pickle. References are read into this process when they are saved, and only
    then. A folder belongs to one program at a time.

    Args:
        root_dir: the folder, as a path, where `~` is the user's home, or as a URI such
            as `s3://bucket/runs/a`; made when it is first needed, but never a bucket.
        prefix: of file names.
        keep_total: versions to keep, the latest ones; 0 or less keeps all.

    Raises:
        UnsupportedError: `root_dir` is neither a path nor a URI that fsspec can use
            here, or `prefix` no beginning of a name.
        ValueMismatchError: `keep_total` is no whole number.
        StorageError: `root_dir` names an archive that cannot be opened.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        prefix: str = "program_state_",
        keep_total: int = 5,
    ) -> None:
        self._keep_total = _check_keep_total(keep_total)
        self._versions = Versions(root_dir, prefix)
        self._names = f"{os.fspath(root_dir)}/{prefix}*"

    @override
    def __repr__(self) -> str:
        kept = f"the last {self._keep_total}" if self._keep_total > 0 else "all"
        return (
            f"<program state in {reprs.shorten(self._names)}, {kept} of its versions>"
        )

    @override
    @tracebacks.shorten
    async def get_versions(self) -> list[int] | None:
        """Return the saved versions, ascending; None if there is none."""
        return await call_on_daemon(self._versions.find) or None

    @override
    @tracebacks.shorten
    async def load(self, version: int, structure: Any) -> Any:
        """Return the state of a version.

        Args:
            version: that was saved.
            structure: of that state, such as `initialize` returns: its containers are
                filled, its `fl.Serializable` objects say what class to restore. Other
                leaves are not looked at.

        Raises:
            ProgramStateNotFoundError: there is no such version.
            StateFormatError: another version of ray_fed wrote it.
            StorageError: it cannot be read now.
            SavedStateError: its file is damaged, or is no regular file.
            UnsupportedError: no version can be that.
            ValueMismatchError: what was saved has another structure.
        """
        version = _check_version(version)
        try:
            saved = await call_on_daemon(self._versions.read, version)
        except errors.StorageError:
            raise
        except FileNotFoundError as error:
            raise fl.program.ProgramStateNotFoundError(version) from error
        return _restore(saved, structure, self._versions.where(version))

    @override
    @tracebacks.shorten
    async def load_latest(self, structure: Any) -> tuple[Any, int]:
        """Return the latest state that is not damaged, and its version.

        A version whose file is damaged, or is no regular file, is passed over with a
        warning, for the one before. What cannot be read now is no damage.

        Returns:
            (state, version); (None, 0) where nothing was saved.

        Raises:
            StateFormatError: another version of ray_fed wrote the latest.
            StorageError: the folder, or a version, cannot be read now.
            SavedStateError: all versions are damaged.
            ValueMismatchError: what was saved has another structure.
        """
        saved, version = await call_on_daemon(self._versions.read_latest)
        if saved is None:
            return None, 0
        return _restore(saved, structure, self._versions.where(version)), version

    @override
    @tracebacks.shorten
    async def save(self, program_state: Any, version: int) -> None:
        """Save a state, then remove versions beyond those to keep.

        Args:
            program_state: a structure of references and of values that
                `checkpoint_store.Encoder` describes.
            version: strictly increasing, >= 0.

        Raises:
            ProgramStateExistsError: the version is there, and not damaged.
            StorageError: it cannot be written: no room, no right, no such bucket.
            ValueMismatchError: a value is of a kind that cannot be saved.
            Exception: the failure of a call that should have made one of the values.
        """
        version = _check_version(version)
        if await call_on_daemon(self._is_whole, version):
            path = self._versions.where(version)
            raise fl.program.ProgramStateExistsError(version=version, path=path)
        named = _flatten(program_state)
        materialised = await gather_by_index(_read(value) for _, value in named)
        names = [name for name, _ in named]
        if len(set(names)) < len(names):
            raise errors.ValueMismatchError(
                "Expected values with a name each to save, found two of one name in"
                f" {structs.show(names)}: `/` parts the names of keys, leave it out."
            )
        content = dict(zip(names, materialised, strict=True))
        await call_on_daemon(self._write, version, content)

    @tracebacks.shorten
    async def remove_all(self) -> None:
        """Remove all versions."""
        versions = await call_on_daemon(self._versions.find)
        await call_on_daemon(self._versions.remove, versions)

    def _write(self, version: int, content: dict[str, Any]) -> None:
        self._versions.write(version, content)
        if self._keep_total > 0:
            # What was just written stays, also where later versions lie about.
            before = [v for v in self._versions.removable() if v != version]
            self._versions.remove(before[: max(0, len(before) + 1 - self._keep_total)])

    def _is_whole(self, version: int) -> bool:
        try:
            self._versions.read(version)
        except errors.StorageError:
            raise
        except errors.StateFormatError:
            return True  # for the version of ray_fed that wrote it
        except (FileNotFoundError, errors.SavedStateError):
            return False
        return True


def _check_keep_total(keep_total: object) -> int:
    if isinstance(keep_total, bool) or not isinstance(keep_total, int | np.integer):
        raise errors.ValueMismatchError(
            "Expected a whole number of versions to keep as `keep_total`, found"
            f" {structs.show(keep_total)}: 0 keeps all."
        )
    return int(keep_total)


def _check_version(version: object) -> int:
    is_whole = isinstance(version, int | np.integer) and type(version) is not bool
    if not is_whole or not 0 <= int(cast("Any", version)) < MAX_VERSION:
        raise errors.UnsupportedError(
            f"Expected a whole number as a version, of at least 0 and below 2**63,"
            f" found {structs.show(version)}."
        )
    return int(cast("Any", version))


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


def _restore(saved: dict[str, Any], structure: Any, where: str) -> Any:
    named = _flatten(structure)
    names = [name for name, _ in named]
    if set(names) != set(saved):
        raise errors.ValueMismatchError(
            f"Expected a structure with the values that `{where}` has,"
            f" {sorted(saved)}, found one with {sorted(names)}."
        )
    leaves = [_revive(saved[name], leaf, name) for name, leaf in named]
    return structure_utils.unflatten_as(structure, leaves)


def _revive(value: Any, template: Any, name: str) -> Any:
    if not isinstance(value, SavedObject):
        return value
    if value.class_name != class_name(type(template)):
        raise errors.ValueMismatchError(
            f"Expected a `{value.class_name}` as {name_place(name)} in"
            f" `structure`, found a `{class_name(type(template))}`."
        )
    return cast("fl.Serializable", template).from_bytes(value.content)

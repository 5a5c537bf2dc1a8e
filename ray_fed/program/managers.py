"""Saves and loads the state of federated programs, in numbered versions."""

import os
from typing import Any, cast

import federated_language as fl
from federated_language.program import structure_utils
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.executors.fan_out import gather_by_index
from ray_fed.language import structs
from ray_fed.language.type_checks import is_whole
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
    """Saves versions of program state to a local folder, or to a store of fsspec.

    A version is complete or absent. It has a checksum of each value and is read without
    pickle. `save` reads references into this process. Only one program may use a folder
    at a time.

    Args:
        root_dir: The folder, as a path or as a URI such as `s3://bucket/runs/a`. In a
            path, `~` is the user's home. The first save makes the folder. A bucket must
            exist.
        prefix: Prefix of the names of files.
        keep_total: Number of versions to keep, the latest ones. 0 or less keeps all.

    Raises:
        UnsupportedError: `root_dir` is neither a path nor a URI that fsspec can use
            here, or names of files cannot begin with `prefix`.
        ValueMismatchError: `keep_total` is not a whole number.
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
        """Return the saved versions in ascending order, or None without a version."""
        return await call_on_daemon(self._versions.find) or None

    @override
    @tracebacks.shorten
    async def load(self, version: int, structure: Any) -> Any:
        """Return the state of a version.

        Args:
            version: The saved version, >= 0.
            structure: A state with the same structure, such as the result of
                `initialize`, or `{"state": process.initialize()}` for a checkpoint of
                `learning.run`. The saved values are returned in its containers. Its
                `fl.Serializable` objects tell the classes of saved objects. Its other
                leaves are ignored.

        Raises:
            ProgramStateNotFoundError: There is no such version.
            StateFormatError: Another version of ray_fed wrote the file.
            StorageError: The file cannot be read now.
            SavedStateError: The file is damaged, or is not a regular file.
            UnsupportedError: `version` is not a whole number from 0 to 2**63 - 1.
            ValueMismatchError: The saved state has another structure.
        """
        version = _check_version(version)
        try:
            saved = await call_on_daemon(self._versions.read, version)
        except errors.StorageError:
            raise
        except FileNotFoundError as error:
            raise fl.program.ProgramStateNotFoundError(version) from error
        return restore_state(saved, structure, self._versions.where(version))

    @override
    @tracebacks.shorten
    async def load_latest(self, structure: Any) -> tuple[Any, int]:
        """Return the latest state that is not damaged, and its version.

        A version whose file is damaged, or is not a regular file, is skipped with a
        warning. A file that cannot be read now does not count as damaged.

        Returns:
            The pair (state, version), or (None, 0) if nothing was saved.

        Raises:
            StateFormatError: Another version of ray_fed wrote the latest version.
            StorageError: The folder, or a version, cannot be read now.
            SavedStateError: All versions are damaged.
            ValueMismatchError: The saved state has another structure.
        """
        saved, version = await call_on_daemon(self._versions.read_latest)
        if saved is None:
            return None, 0
        return restore_state(saved, structure, self._versions.where(version)), version

    @override
    @tracebacks.shorten
    async def save(self, program_state: Any, version: int) -> None:
        """Save a state, then remove the oldest versions beyond `keep_total`.

        Args:
            program_state: A structure of references, arrays, numbers, strings, bytes
                and `fl.Serializable` objects.
            version: Number of the version, >= 0, larger than all earlier numbers.

        Raises:
            ProgramStateExistsError: The version exists and is not damaged.
            StorageError: The version cannot be written, for example because the disk
                is full, a permission is missing, or there is no such bucket.
            ValueMismatchError: A value has a type that cannot be saved.
            Exception: The error of a call that computes one of the values.
        """
        version = _check_version(version)
        if await call_on_daemon(self._is_whole, version):
            path = self._versions.where(version)
            raise fl.program.ProgramStateExistsError(version=version, path=path)
        named = name_values(program_state)
        values = await gather_by_index(map(_read, named.values()))
        content = dict(zip(named, values, strict=True))
        await call_on_daemon(
            self._versions.write_and_keep, version, content, self._keep_total
        )

    @tracebacks.shorten
    async def remove_all(self) -> None:
        """Remove all versions."""
        versions = await call_on_daemon(self._versions.find)
        await call_on_daemon(self._versions.remove, versions)

    def _is_whole(self, version: int) -> bool:
        try:
            self._versions.read(version)
        except errors.StorageError:
            raise
        except errors.StateFormatError:
            return True  # the version of ray_fed that wrote it can read it
        except (FileNotFoundError, errors.SavedStateError):
            return False
        return True


def _check_keep_total(keep_total: object) -> int:
    if not is_whole(keep_total):
        raise errors.ValueMismatchError(
            "Expected a whole number of versions to keep as `keep_total`, found"
            f" {structs.show(keep_total)}: 0 keeps all."
        )
    return int(keep_total)


def _check_version(version: object) -> int:
    if not is_whole(version) or not 0 <= version < MAX_VERSION:
        raise errors.UnsupportedError(
            f"Expected a whole number as a version, of at least 0 and below 2**63,"
            f" found {structs.show(version)}."
        )
    return int(version)


RUN_PREFIX = "run:"
"""The beginning of names of values that `learning.run` saves beside its state, such as
its clock. A structure without these values loads the state alone."""


def name_values(structure: Any) -> dict[str, Any]:
    """Return the leaves of a structure by name, to be saved.

    Raises:
        ValueMismatchError: The structure has an unsupported type, its keys have no
            order, or two leaves have the same name.
    """
    named = flatten_state(structure)
    if len({name for name, _ in named}) < len(named):
        raise errors.ValueMismatchError(
            "Expected a different name for each saved value, found two equal names in"
            f" {structs.show([name for name, _ in named])}: leave `/` out of keys,"
            " because `/` joins the keys in a name."
        )
    return dict(named)


def flatten_state(structure: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a structure, each with its name.

    Raises:
        ValueMismatchError: The structure has an unsupported type, or unordered keys.
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


def restore_state(saved: dict[str, Any], structure: Any, where: str) -> Any:
    """Return values that were saved by name, in the containers of a structure.

    `saved` is a result of `name_values`, from the file `where`. Raises
    ValueMismatchError if the saved state has another structure.
    """
    named = flatten_state(structure)
    names = [name for name, _ in named]
    needed = {name for name in saved if not name.startswith(RUN_PREFIX)}
    if not needed <= set(names) <= set(saved):
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

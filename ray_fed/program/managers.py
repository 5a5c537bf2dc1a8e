"""Saved program state: one version after another, the last few kept.

Versions of state as files of a folder of this machine, renamed into place.

Versions of state on any file system that fsspec knows, such as an object store.

Those have no rename that happens at once, and a killed program may leave any object
behind. So what makes a version is written last:

    program_state_7.3f0c....part     the state's archive, under a name of its own
    program_state_7.json             its name, size and SHA-256: now version 7 is there

A version is removed in the other order. A part that no manifest names is removed by the
next write.

Where versions of program state are: a seam of five verbs, and what chooses a side.

a path, file://...           LocalVersions     one file a version, renamed into place
any other URI of fsspec      RemoteVersions    parts first, a manifest last
"""

import glob
import hashlib
import json
import logging
import os
import pathlib
import re
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol, cast

import federated_language as fl
import numpy as np
from federated_language.program import structure_utils
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.program.state_files as state_files
import ray_fed.tracebacks as tracebacks
from ray_fed.executors.loops import gather_by_index
from ray_fed.files import opening
from ray_fed.files.opening import expand_home
from ray_fed.language import structs
from ray_fed.observability import reprs
from ray_fed.program.daemon_calls import call_on_daemon

_ZIP_SUFFIX = ".zip"


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
            raise state_files.unlisted(str(self._folder), error) from error
        return state_files.versions_in(names, self._prefix, _ZIP_SUFFIX)

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
        with state_files.telling_storage(str(path), OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            pattern = f".{glob.escape(self._prefix)}*{state_files.TEMPORARY_SUFFIX}"
            for leftover in filter(_is_file, self._folder.glob(pattern)):
                leftover.unlink(missing_ok=True)
            state_files.write_values(path, values)

    def remove(self, versions: Sequence[int]) -> None:
        """Remove versions that are files."""
        for path in map(self._path, versions):
            if _is_file(path):
                with state_files.telling_storage(str(path), OSError, verb="remove"):
                    path.unlink(missing_ok=True)

    def where(self, version: int) -> str:
        """Return the path of a version."""
        return str(self._path(version))

    def _path(self, version: int) -> pathlib.Path:
        return self._folder / f"{self._prefix}{version}{_ZIP_SUFFIX}"


def _is_file(path: pathlib.Path) -> bool:
    return path.is_symlink() or not path.is_dir()


_FORMAT = 1
_MANIFEST_SUFFIX = ".json"
_CHUNK_BYTES = 2**20
_MEMORY_BYTES = 2**26
"""A larger archive is on the local disk while it is written or read."""

_OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"))
"""Those without folders: to make one would make a bucket, which is not ours to do."""


def has_folders(uri: str) -> bool:
    """Return whether folders of a place, given as a path or URI, are to be made."""
    return uri.partition("://")[0] not in _OBJECT_STORES


class RemoteVersions:
    """An archive and a manifest a version; see `versions.Versions`.

    Args:
        uri: of the folder.
        prefix: of names.

    Raises:
        UnsupportedError: fsspec does not know the URI, or lacks a package for it.
        StorageError: the archive that the URI names cannot be opened.
    """

    def __init__(self, uri: str, prefix: str) -> None:
        self._uri = uri.rstrip("/")
        self._prefix = prefix
        self._files, self._root = _locate(self._uri)

    def find(self) -> list[int]:
        """Return the versions that have a manifest, ascending."""
        return state_files.versions_in(self._names(), self._prefix, _MANIFEST_SUFFIX)

    def removable(self) -> list[int]:
        """Return all of them."""
        return self.find()

    def _names(self) -> list[str]:
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:  # what fsspec raises has no base of its own
            raise state_files.unlisted(self._uri, error) from error
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def read(self, version: int) -> dict[str, Any]:
        """Return the values of a version, by name."""
        where = self.where(version)
        with state_files.telling_read(where, Exception):
            return self._read(version, where)

    def _read(self, version: int, where: str) -> dict[str, Any]:
        manifest = _Manifest.parse(
            self._files.cat_file(
                self._path(f"{self._prefix}{version}{_MANIFEST_SUFFIX}")
            ),
            where,
        )
        if not self._is_part(manifest.part, version):
            raise state_files.damage(where, f"the part `{manifest.part}`")
        with tempfile.SpooledTemporaryFile(_MEMORY_BYTES) as content:
            try:
                with self._files.open(self._path(manifest.part), "rb") as part:
                    found = _copy(part, content)
            except FileNotFoundError as error:
                raise state_files.damage(where, "its part is not there") from error
            if found != (manifest.num_bytes, manifest.sha256):
                raise state_files.damage(where, "its part is not as it was written")
            return state_files.read_archive(content, where)

    def write(self, version: int, values: Mapping[str, object]) -> None:
        """Write a version: its part, then its manifest; then remove parts of none."""
        part = f"{self._prefix}{version}.{uuid.uuid4().hex}.part"
        with (
            tempfile.SpooledTemporaryFile(_MEMORY_BYTES) as content,
            state_files.telling_storage(self.where(version), Exception),
        ):
            state_files.write_archive(content, values)
            content.seek(0)
            if has_folders(self._uri):
                self._files.makedirs(self._root, exist_ok=True)
            with self._files.open(self._path(part), "wb") as file:
                manifest = _Manifest(part, *_copy(content, file))
            self._files.pipe_file(
                self._path(f"{self._prefix}{version}{_MANIFEST_SUFFIX}"),
                manifest.dump(),
            )
            self._remove_parts(version, part)

    def _remove_parts(self, version: int, kept: str) -> None:
        """Remove the parts of a version but one, and those that no manifest names."""
        names = self._names()
        whole = state_files.versions_in(names, self._prefix, _MANIFEST_SUFFIX)
        others = set(whole) - {version}
        for name in names:
            of_version = self._version_of_part(name)
            if of_version is not None and of_version not in others and name != kept:
                self._delete(name)

    def remove(self, versions: Sequence[int]) -> None:
        """Remove the manifests of versions, then their parts."""
        removed = set(versions)
        names = self._names()
        with state_files.telling_storage(self._uri, Exception, verb="remove from"):
            for version in set(self.find()) & removed:
                self._delete(f"{self._prefix}{version}{_MANIFEST_SUFFIX}")
            for name in names:
                if self._version_of_part(name) in removed:
                    self._delete(name)

    def where(self, version: int) -> str:
        """Return the URI of a version's manifest."""
        return f"{self._uri}/{self._prefix}{version}{_MANIFEST_SUFFIX}"

    def _is_part(self, name: str, version: int) -> bool:
        return self._version_of_part(name) == version

    def _version_of_part(self, name: str) -> int | None:
        stem, _, ending = name.partition(".")
        if not re.fullmatch(r"[0-9a-f]{32}\.part", ending):
            return None
        found = state_files.versions_in([stem], self._prefix, "")
        return found[0] if found else None

    def _delete(self, name: str) -> None:
        self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class _Manifest:
    """What makes a version of a part.

    Attributes:
        part: its name.
        num_bytes: of it.
        sha256: of it, in hexadecimal digits.
    """

    def __init__(self, part: str, num_bytes: int, sha256: str) -> None:
        self.part = part
        self.num_bytes = num_bytes
        self.sha256 = sha256

    def dump(self) -> bytes:
        """Return it as JSON."""
        return json.dumps({"format": _FORMAT, **vars(self)}).encode()

    @classmethod
    def parse(cls, content: bytes, where: str) -> "_Manifest":
        """Return the manifest that JSON describes.

        Raises:
            StateFormatError: another version of ray_fed wrote it.
            SavedStateError: it is cut or damaged.
        """
        try:
            fields = dict(json.loads(content))
            state_files.check_format(fields.pop("format"), _FORMAT, where)
            manifest = cls(**fields)
        except errors.SavedStateError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise state_files.damage(where, f"no manifest: {error}") from error
        if not isinstance(manifest.part, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise state_files.damage(where, "a manifest without the name of a part")
        return manifest


def _copy(source: IO[bytes] | Any, target: IO[bytes] | Any) -> tuple[int, str]:
    """Copy the rest of a file; return its number of bytes and their SHA-256."""
    digest, num_bytes = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        target.write(chunk)
        digest.update(chunk)
        num_bytes += len(chunk)
    return num_bytes, digest.hexdigest()


def _locate(uri: str) -> tuple[Any, str]:
    fsspec = opening.import_extra("fsspec.core")
    # Only a chain, such as zip://a::b.zip, has a file opened at once.
    with state_files.telling_storage(uri, Exception, verb="open"):
        try:
            files, root = fsspec.url_to_fs(uri)
        except (ImportError, ValueError) as error:
            raise errors.UnsupportedError(
                f"Expected a path, or a URI that fsspec knows, found `{uri}` ({error}):"
                " install what it names, such as `pip install 'ray-fed[s3]'` for s3://."
            ) from error
    return files, root.rstrip("/")


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


_logger = logging.getLogger(__name__)


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
        self._versions = open_versions(root_dir, prefix)
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
        damage: errors.SavedStateError | None = None
        for version in reversed(await self.get_versions() or []):
            try:
                return await self.load(version, structure), version
            except (errors.StorageError, errors.StateFormatError):
                raise
            except errors.SavedStateError as error:
                _logger.warning("Version %d is passed over. %s", version, error)
                damage = damage or error
            except fl.program.ProgramStateNotFoundError:
                continue  # removed since the folder was read
        if damage is not None:
            raise damage
        return None, 0

    @override
    @tracebacks.shorten
    async def save(self, program_state: Any, version: int) -> None:
        """Save a state, then remove versions beyond those to keep.

        Args:
            program_state: a structure of references and of values that
                `state_encoding` describes.
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
    if not is_whole or not 0 <= int(cast("Any", version)) < state_files.MAX_VERSION:
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
    if not isinstance(value, state_files.SavedObject):
        return value
    if value.class_name != state_files.class_name(type(template)):
        raise errors.ValueMismatchError(
            f"Expected a `{value.class_name}` as {state_files.name_place(name)} in"
            f" `structure`, found a `{state_files.class_name(type(template))}`."
        )
    return cast("fl.Serializable", template).from_bytes(value.content)

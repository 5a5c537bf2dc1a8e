"""Saves versions of named values. Each version is an archive, complete or absent.

    program_state_7.zip
        manifest.json      descriptions of all values, by name, and small values
        0.npy, 1.npy ...   large arrays and bytes, read without pickle

This module writes all saved state, on any file system that fsspec knows. A version is
written to a temporary file beside its place and renamed. In an object store, one upload
writes it. All sizes and checksums of an archive are checked before its values are read.
Members are not compressed, so reading takes no more memory than the archive has bytes.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import errno
import functools
import json
import logging
import os
import pathlib
import re
import shutil
import sys
import tempfile
import threading
import types
import uuid
import zipfile
from collections.abc import Callable, Collection, Generator, Mapping
from typing import IO, Any, NoReturn, ParamSpec, TypeVar, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.files import npy, opening
from ray_fed.language import structs

_T = TypeVar("_T")
_P = ParamSpec("_P")

_logger = logging.getLogger(__name__)


class ReadOnlyDict(dict[str, Any]):
    """A dictionary that cannot be changed, such as the metrics of a record."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise errors.UnsupportedError(
            "Expected the metrics of a record as they are, found a change: make a copy"
            " by `dict(metrics)`, and change that."
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = _refuse
    setdefault: Any = _refuse
    update: Any = _refuse

    @override
    def __reduce__(self) -> Any:  # to be copied and pickled
        return ReadOnlyDict, (dict(self),)


_CONTAINERS: Mapping[str, type[Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "ReadOnlyDict": ReadOnlyDict,
}
_JSON_TYPES = (types.NoneType, bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class SavedObject:
    """The bytes of a `fl.Serializable` object, until its class is known.

    Attributes:
        class_name: The module and the name of the object's class, joined by a dot.
        content: The result of the object's `to_bytes`.
    """

    class_name: str
    content: bytes


def class_name(cls: type[Any]) -> str:
    """Return the name that saved files have for the class of an object."""
    return f"{cls.__module__}.{cls.__qualname__}"


def name_place(name: str) -> str:
    """Return what errors call a saved value: its name, or "the whole state" for ""."""
    return f"`{name}`" if name else "the whole state"


def _check_digits(value: Any, label: str) -> Any:
    most = sys.get_int_max_str_digits()
    if isinstance(value, int) and most and value.bit_length() > 3 * most:
        raise errors.ValueMismatchError(
            f"Expected a number of fewer than {most} digits as {label}, found one of"
            f" {value.bit_length()} bits: save its bytes."
        )
    return value


_INLINE_BYTES = 256
"""Arrays with more bytes are members of the archive. A member costs about 250 bytes in
addition to its array."""


class Encoder:
    """Describes values as JSON, and writes large arrays to members of an archive.

    The caller owns the archive. Without an archive, the JSON has all values.
    """

    def __init__(self, archive: zipfile.ZipFile | None = None) -> None:
        self._archive = archive
        self._num_members = 0

    def describe(self, value: Any, label: str) -> dict[str, Any]:
        """Return JSON that a `Decoder` reads. Errors call the value `label`."""
        match value:
            case np.ndarray() | np.generic():
                described = self._describe_array(value, label)
            case complex():
                described = {"kind": "complex", "value": [value.real, value.imag]}
            case bytes():
                described = {"kind": "bytes", "member": self._add_bytes(value)}
            case fl.Serializable():
                member = self._add_bytes(value.to_bytes())
                name = class_name(type(value))
                described = {"kind": "object", "class": name, "member": member}
            case _ if type(value) in _JSON_TYPES:
                described = {"kind": "json", "value": _check_digits(value, label)}
            case _:
                described = self._describe_container(value, label)
        return described

    def _describe_container(self, value: Any, label: str) -> dict[str, Any]:
        kind = type(value).__name__
        if _CONTAINERS.get(kind) is not type(value):
            raise errors.ValueMismatchError(
                "Expected numbers, strings, bytes, arrays, lists, tuples, dicts or"
                f" fl.Serializable objects to save, found {label} of Python type"
                f" `{kind}`: convert it, or give it `to_bytes` and `from_bytes`."
            )
        keys = list(value) if isinstance(value, dict) else None
        if keys is not None and not all(type(key) is str for key in keys):
            raise errors.ValueMismatchError(
                f"Expected strings as keys of {label}, found {keys}."
            )
        members = list(value.values() if isinstance(value, dict) else value)
        inside = f"an element of {label}"
        if all(type(member) in _JSON_TYPES for member in members):
            plain = [_check_digits(member, inside) for member in members]
            return {"kind": kind, "keys": keys, "plain": plain}
        described = [self.describe(member, inside) for member in members]
        return {"kind": kind, "keys": keys, "values": described}

    def _describe_array(self, value: Any, label: str) -> dict[str, Any]:
        if isinstance(value, np.ma.MaskedArray):
            raise errors.ValueMismatchError(
                f"Expected an array without a mask as {label}, found a masked one: save"
                " its data and its mask."
            )
        array = np.asarray(value)
        scalar = isinstance(value, np.generic)
        if array.dtype.kind == "O":
            return self._describe_strings(array, label)
        dtype = None
        if array.dtype.kind == "V":
            # numpy's format forgets the name of a dtype that is not its own: bfloat16.
            if not array.dtype.isbuiltin:
                raise errors.ValueMismatchError(
                    f"Expected a dtype of numbers or strings as {label}, found"
                    f" {array.dtype}."
                )
            dtype = array.dtype.name
            array = array.view(f"V{array.dtype.itemsize}")
        member = self._add(array)
        return {"kind": "array", "member": member, "dtype": dtype, "scalar": scalar}

    def _describe_strings(self, array: NDArray[Any], label: str) -> dict[str, Any]:
        items: list[Any] = array.ravel().tolist()
        if not all(type(item) is bytes for item in items):
            found = sorted({type(item).__name__ for item in items})
            raise errors.ValueMismatchError(
                f"Expected bytes in the array of objects {label}, found {found}."
            )
        lengths = np.array([len(item) for item in items], np.int64)
        return {
            "kind": "strings",
            "shape": array.shape,
            "lengths": self._add(lengths),
            "member": self._add_bytes(b"".join(items)),
        }

    def _add_bytes(self, content: bytes) -> str | dict[str, Any]:
        return self._add(np.frombuffer(content, np.uint8))

    def _add(self, array: NDArray[Any]) -> str | dict[str, Any]:
        if self._archive is None or array.nbytes <= _INLINE_BYTES:
            content = array.tobytes().hex()
            return {"dtype": array.dtype.str, "shape": array.shape, "hex": content}
        member = f"{self._num_members}.npy"
        self._num_members += 1
        with self._archive.open(member, "w", force_zip64=True) as file:
            np.lib.format.write_array(file, array, allow_pickle=False)
        return member


class Decoder:
    """Returns values that an `Encoder` described. Reads each member at most once.

    The caller owns the archive, and has checked its sizes and checksums.
    """

    def __init__(self, archive: zipfile.ZipFile | None = None) -> None:
        self._archive = archive
        self._unread = set[str]() if archive is None else set(archive.namelist())

    def decode(self, described: Mapping[str, Any]) -> Any:
        """Return a value from its description by `Encoder.describe`.

        An `fl.Serializable` object is returned as a `SavedObject`. Raises one of
        npy.DAMAGES if no `Encoder` wrote the JSON or a member.
        """
        kind = described["kind"]
        if kind == "json":
            return _check_plain(described["value"])
        if kind == "complex":
            return complex(*described["value"])
        if kind in _CONTAINERS:
            if "plain" in described:
                members: list[Any] = list(map(_check_plain, described["plain"]))
            else:
                members = [self.decode(member) for member in described["values"]]
            if described["keys"] is not None:
                members = list(zip(described["keys"], members, strict=True))
            return _CONTAINERS[kind](members)
        if kind == "array":
            return _decode_array(self._read(described["member"]), described)
        return self._decode_bytes(kind, described)

    def _decode_bytes(self, kind: str, described: Mapping[str, Any]) -> Any:
        array = self._read(described["member"])
        if array.dtype != np.uint8 or array.ndim != 1:
            raise ValueError(f"bytes that are {array.dtype}{list(array.shape)}")
        content = array.tobytes()
        match kind:
            case "bytes":
                return content
            case "object":
                return SavedObject(described["class"], content)
            case "strings":
                strings = _decode_strings(content, self._read(described["lengths"]))
                return strings.reshape(tuple(described["shape"]))
            case _:
                raise ValueError(f"a value of the kind `{kind}`")

    def _read(self, member: Any) -> NDArray[Any]:
        if isinstance(member, dict):
            return _decode_inline(cast("dict[str, Any]", member))
        self._unread.remove(member)
        assert self._archive is not None  # or no member is unread
        return npy.read_member(self._archive, member)


def _check_plain(value: Any) -> Any:
    if type(value) not in _JSON_TYPES:
        raise ValueError(f"a {type(value).__name__} as a plain value")
    return value


def _decode_inline(member: Mapping[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(member["dtype"])
    if dtype.hasobject:
        raise ValueError(f"an array of {dtype}, which need allow_pickle=True")
    return np.ndarray(member["shape"], dtype, bytes.fromhex(member["hex"])).copy()


def _decode_array(array: NDArray[Any], described: Mapping[str, Any]) -> Any:
    if described["dtype"] is not None:
        array = array.view(np.dtype(described["dtype"]))
    return array[()] if described["scalar"] else array


def _decode_strings(content: bytes, lengths: NDArray[Any]) -> NDArray[Any]:
    if lengths.dtype != np.int64 or lengths.ndim != 1 or (lengths < 0).any():
        raise ValueError(f"lengths of strings that are {lengths.dtype}")
    ends = np.cumsum(lengths)
    if sum(lengths.tolist()) != len(content):
        raise ValueError(f"{len(content)} bytes of strings, not as many as declared")
    strings = np.empty(len(lengths), object)
    for index, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        strings[index] = content[end - length : end]
    return strings


MAX_VERSION = 2**63
"""Versions are below this number, so that names of files have a bounded length."""

OF_THIS_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Error numbers of a failed `open` for which the process is the reason, not the
file."""


@contextlib.contextmanager
def telling_storage(
    where: str,
    *kinds: type[Exception],
    verb: str = "save state in",
    lets_through: type[Exception] = errors.RayFedError,
) -> Generator[None]:
    """Raise errors of a file system as a `StorageError` that says what to do.

    `kinds` are the exceptions that become a `StorageError`. Errors of ray_fed and of
    the class `lets_through` are raised unchanged. The message says that the program
    expected to `verb` the place `where`.
    """
    try:
        yield
    except (errors.RayFedError, lets_through):
        raise
    except kinds as error:
        if isinstance(error, OSError) and error.errno in OF_THIS_PROCESS:
            raise
        found = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise errors.StorageError(
            f"Expected to {verb} `{where}`, found {type(error).__name__} ({found}):"
            " check that the place exists, has room, and lets this process read and"
            f" write. Earlier saved state is unchanged.{opening.advise(error)}"
        ) from error


def unlisted(where: str, error: OSError) -> errors.StorageError:
    """Return the error for a place of saved state that is not a folder."""
    found = error.strerror or str(error)
    return errors.StorageError(
        f"Expected a folder of saved state, or nothing yet, at `{where}`, found that it"
        f" cannot be listed ({found}): use another folder, or move the file there away."
    )


_FORMAT = 2

_MANIFEST = "manifest.json"

_NO_REGULAR_FILE = (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""Error numbers of a failed `open` of anything other than a regular file."""

_NO_ARCHIVE = (None, errno.EINVAL)
"""Error numbers of reading a regular file that is not an archive: EINVAL for positions
outside of the file, and None for errors of decoders, which have no number."""


def write_archive(file: IO[bytes], values: Mapping[str, object]) -> None:
    """Write named values as an archive to an open, empty file that can seek."""
    with zipfile.ZipFile(file, "w") as archive:
        encoder = Encoder(archive)
        described = [
            {
                "name": name,
                "value": encoder.describe(value, name_place(name)),
            }
            for name, value in values.items()
        ]
        manifest = {"format": _FORMAT, "values": described}
        archive.writestr(_MANIFEST, json.dumps(manifest))


def sync_folder(folder: str) -> None:
    """Make renames in a folder survive a power failure, if the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_archive(file: IO[bytes], where: str) -> dict[str, Any]:
    """Return the values, by name, of an archive in an open file that can seek.

    Raises:
        StateFormatError: Another version of ray_fed wrote the file.
        SavedStateError: The file is damaged.
        OSError: The file cannot be read now.
    """
    try:
        return _read(file, where)
    except errors.SavedStateError:
        raise
    except npy.DAMAGES as error:
        failure = _find_failure(error)
        if failure is not None:
            raise failure from None
        raise damage(where, error) from error


def _find_failure(error: Exception) -> OSError | None:
    """Return the `OSError` behind an error of zipfile, or None for a damaged file."""
    for each in (error, error.__context__):
        if isinstance(each, OSError) and each.errno not in _NO_ARCHIVE:
            return each
    return None


def damage(where: object, found: object) -> errors.SavedStateError:
    """Return the error for a version that is damaged."""
    return errors.SavedStateError(
        f"Expected whole saved state in `{where}`, found it damaged ({found}): delete"
        " it, or load another version."
    )


def _read(file: IO[bytes], where: str) -> dict[str, Any]:
    with zipfile.ZipFile(file) as archive:
        _check_sizes(archive, file.seek(0, os.SEEK_END))
        damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"bad checksum of `{damaged}`")
        manifest = json.loads(archive.read(_MANIFEST))
        found = manifest["format"]
        if found != _FORMAT:
            raise errors.StateFormatError(
                f"Expected saved state of format {_FORMAT} in `{where}`, found format"
                f" {errors.describe(found)}: read it with the version of ray_fed that"
                " wrote it."
            )
        decoder = Decoder(archive)
        return {
            described["name"]: decoder.decode(described["value"])
            for described in manifest["values"]
        }


def _check_sizes(archive: zipfile.ZipFile, num_bytes: int) -> None:
    """Raise if members would take more memory than the file has bytes."""
    members = archive.infolist()
    for member in members:
        is_stored = member.compress_type == zipfile.ZIP_STORED
        if not is_stored or member.file_size != member.compress_size:
            raise zipfile.BadZipFile(f"`{member.filename}` is larger than it says")
    if sum(member.file_size for member in members) > num_bytes:
        raise zipfile.BadZipFile(f"members larger than the file of {num_bytes} bytes")


_LOCAL = ("file://", "local://")
_ZIP = ".zip"
_TEMPORARY = ".tmp"

_OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"))
"""Protocols of object stores, where an upload appears as a whole. There are no folders:
making a folder would make a bucket, which is left to the user."""

_MEMORY_BYTES = 2**26
"""Largest size of an archive on another machine that is read into memory. A larger
archive is copied to the local disk while it is read."""


class Folder:
    """A folder of saved files, on any file system, with one writer at a time.

    The constructor neither reads nor makes the folder. `root_dir` is a path or a URI of
    fsspec. Names of files begin with `prefix`. Raises UnsupportedError if fsspec cannot
    use the folder, and StorageError if it is in an archive that cannot be opened.
    """

    def __init__(self, root_dir: object, prefix: object) -> None:
        self._prefix = _check_prefix(prefix)
        place = _check_place(root_dir)
        for protocol in _LOCAL:
            place = place.removeprefix(protocol)
        is_uri = "://" in place
        self._uri = place.rstrip("/") if is_uri else opening.expand_home(place)
        self._system, self._root = _locate(self._uri)
        self._is_local = opening.is_local(self._system)
        self._renames = place.partition("://")[0] not in _OBJECT_STORES

    @property
    def local_path(self) -> str | None:
        """The folder as a path, or None if its file system is not local."""
        return self._root if self._is_local else None

    def list_names(self) -> list[tuple[str, bool]]:
        """Return each name in the folder, and whether the name is a folder."""
        self._system.invalidate_cache()
        try:
            if self._is_local:
                # fsspec leaves out files that are removed while it looks at each file,
                # so it could miss the latest version of a program that saves.
                with os.scandir(self._root) as found:
                    return [(e.name, e.is_dir(follow_symlinks=False)) for e in found]
            entries = self._system.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise unlisted(self._uri, error) from error
        except Exception:  # what fsspec raises has no base of its own
            with telling_storage(self._uri, Exception, verb="list"):
                raise
        if [each["name"].rstrip("/") for each in entries] == [self._root]:
            raise unlisted(self._uri, NotADirectoryError(errno.ENOTDIR, "it is a file"))
        return [
            (each["name"].rstrip("/").rpartition("/")[2], each["type"] == "directory")
            for each in entries
        ]

    def write_file(
        self, name: str, content: bytes | Callable[[IO[bytes]], None]
    ) -> None:
        """Write a file that appears whole or not at all.

        `content` may be a function that writes to an open file. Raises SavedStateError
        if a folder has the name, or an error of the file system.
        """

        def write(file: IO[bytes]) -> None:
            if callable(content):
                content(file)
            else:
                file.write(content)

        path = f"{self._root}/{name}"
        if self._renames:
            self._replace(path, write)
            return
        with tempfile.NamedTemporaryFile() as file:
            write(cast("IO[bytes]", file))
            file.flush()
            self._system.put_file(file.name, path)

    def _replace(self, path: str, write: Callable[[IO[bytes]], None]) -> None:
        """Write a temporary file beside the place of a file, then rename it.

        Half-written files of a killed program are removed.
        """
        names = self.list_names()  # raises if the place is not a folder
        if self._system.isdir(path):
            raise errors.SavedStateError(
                f"Expected to save state to the file `{path}`, found a folder of that"
                " name: move it away."
            )
        self._system.makedirs(self._root, exist_ok=True)
        for name, is_folder in names:
            is_ours = name.startswith(f".{self._prefix}") and name.endswith(_TEMPORARY)
            if is_ours and not is_folder:
                self._system.rm_file(f"{self._root}/{name}")
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/.{name}.{uuid.uuid4().hex}{_TEMPORARY}"
        try:
            with self._system.open(temporary, "wb") as file:
                write(file)
                file.flush()
                if self._is_local:
                    os.fsync(file.fileno())
            self._system.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):  # it may not be there
                self._system.rm_file(temporary)
            raise
        if self._is_local:
            sync_folder(folder)

    def remove_file(self, name: str) -> None:
        """Remove a file if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")

    @contextlib.contextmanager
    def open_file(self, name: str, where: str) -> Generator[IO[bytes]]:
        """Yield a file, open for reading bytes, that can seek. Errors name `where`."""
        path = f"{self._root}/{name}"
        if not self._is_local:
            with (
                self._system.open(path, "rb") as file,
                tempfile.SpooledTemporaryFile(_MEMORY_BYTES) as content,
            ):
                shutil.copyfileobj(file, content)
                content.seek(0)
                yield cast("IO[bytes]", content)
            return
        try:
            file = opening.open_regular(pathlib.Path(path))
        except FileNotFoundError as error:
            if os.path.islink(path):  # noqa: PTH114 (no path of this module)
                raise damage(where, "a link to nothing") from error
            raise
        except NotADirectoryError as error:
            raise unlisted(self._uri, error) from error
        except OSError as error:
            if error.errno in _NO_REGULAR_FILE:
                raise damage(where, error.strerror) from error
            raise
        with file:
            yield file


class Versions(Folder):
    """The versions of one saved state, in a folder of one program at a time.

    See `Folder` for the arguments and errors.
    """

    def __init__(self, root_dir: object, prefix: object) -> None:
        super().__init__(root_dir, prefix)
        pattern = re.escape(self._prefix) + r"(0|[1-9]\d{0,18})\.zip"
        self._name = re.compile(pattern, re.ASCII)

    def find(self) -> list[int]:
        """Return the numbers of all versions, ascending, including damaged versions.

        Raises:
            StorageError: The place cannot be listed.
        """
        return sorted({version for version, _, _ in self._list()})

    def removable(self) -> list[int]:
        """Return the numbers of versions that are files, ascending, for `remove`."""
        return sorted(
            {version for version, _, is_folder in self._list() if not is_folder}
        )

    def read(self, version: int) -> dict[str, Any]:
        """Return the values of a version by name. Objects are `SavedObject`.

        Raises:
            FileNotFoundError: There is no such version.
            StorageError: The file cannot be read now.
            StateFormatError: Another version of ray_fed wrote the file.
            SavedStateError: The file is damaged, or is not a regular file.
        """
        self._system.invalidate_cache()
        where = self.where(version)
        try:
            return self._read(self._name_of(version), where)
        except FileNotFoundError:
            names = {
                name: is_folder for v, name, is_folder in self._list() if v == version
            }
            if not names:
                raise
        name, is_folder = names.popitem()
        where = f"{self._uri}/{name}"
        if is_folder:
            raise damage(where, "a folder")
        return self._read(name, where)

    def _read(self, name: str, where: str) -> dict[str, Any]:
        telling = telling_storage(
            where, Exception, verb="read", lets_through=FileNotFoundError
        )
        with telling, self.open_file(name, where) as file:
            return read_archive(file, where)

    def read_latest(
        self, at_most: int = MAX_VERSION
    ) -> tuple[dict[str, Any] | None, int]:
        """Return the latest undamaged version up to `at_most`, and its number.

        The result is (None, 0) if there is no version.

        Raises:
            StateFormatError: Another version of ray_fed wrote the latest version.
            StorageError: The place, or a version, cannot be read now.
            SavedStateError: All versions are damaged.
        """
        failure: errors.SavedStateError | None = None
        for version in reversed([v for v in self.find() if v <= at_most]):
            try:
                return self.read(version), version
            except (errors.StorageError, errors.StateFormatError):
                raise
            except errors.SavedStateError as error:
                _logger.warning("Version %d is passed over. %s", version, error)
                failure = failure or error
            except FileNotFoundError:
                continue  # removed since the folder was read
        if failure is not None:
            raise failure
        return None, 0

    def write(self, version: int, values: Mapping[str, object]) -> None:
        """Write a version. It replaces a damaged file of the same version.

        Half-written files of a killed program are removed.

        Raises:
            ValueMismatchError: A value has a type that cannot be saved.
            StorageError: The version cannot be written.
            SavedStateError: A folder has the name of the file.
        """
        with telling_storage(self.where(version), Exception):
            self.write_file(
                self._name_of(version), lambda file: write_archive(file, values)
            )

    def write_and_keep(
        self, version: int, values: Mapping[str, object], num_to_keep: int | None
    ) -> None:
        """Write a version, then remove the oldest versions beyond `num_to_keep`.

        If `num_to_keep` is None or below 1, all versions stay.
        """
        self.write(version, values)
        if num_to_keep is not None and num_to_keep > 0:
            # The version that was just written stays, also if there are later ones.
            before = [v for v in self.removable() if v != version]
            self.remove(before[: max(0, len(before) + 1 - num_to_keep)])

    def remove(self, versions: Collection[int]) -> None:
        """Remove versions. Folders are left as they are.

        Raises:
            StorageError: A version cannot be removed.
        """
        if not versions:
            return
        with telling_storage(self._uri, Exception, verb="remove state in"):
            for version, name, is_folder in self._list():
                if version in versions and not is_folder:
                    self.remove_file(name)

    def where(self, version: int) -> str:
        """Return the place of a version, for errors."""
        return f"{self._uri}/{self._name_of(version)}"

    def _name_of(self, version: int) -> str:
        return f"{self._prefix}{version}{_ZIP}"

    def _list(self) -> list[tuple[int, str, bool]]:
        """Return each version's number and name, and whether it is a folder."""
        matches = [
            (self._name.fullmatch(name), name, folder)
            for name, folder in self.list_names()
        ]
        found = [
            (int(match[1]), name, folder) for match, name, folder in matches if match
        ]
        return [each for each in found if each[0] < MAX_VERSION]


def _locate(uri: str) -> tuple[Any, str]:
    # Only a chain, such as zip://a::b.zip, has a file opened at once.
    with telling_storage(uri, Exception, verb="open"):
        system, root = opening.locate(uri)
    return system, root.rstrip("/")


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


async def call_on_daemon(
    function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """Call a blocking function on a new daemon thread, and return its result.

    The event loop continues meanwhile. If the caller is cancelled or the process ends,
    nothing waits for the call. `asyncio.to_thread` is not used because the interpreter
    waits for its threads, so a program whose storage hangs would never end.
    """
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()
    call = functools.partial(context.run, function, *args, **kwargs)

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 (told by the future)
            future.set_exception(error)

    threading.Thread(target=work, name="ray_fed storage", daemon=True).start()
    return await asyncio.wrap_future(future)

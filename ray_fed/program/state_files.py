"""A file of values: a zip of arrays with checksums, written whole or not at all.

    manifest.json     what each value is, by name; small values themselves
    0.npy, 1.npy ...  arrays and bytes, read without pickle

All sizes and checksums of a file are checked before anything of it is read; members are
not compressed, so reading takes no more memory than the file has bytes.

Values as JSON and arrays, without pickle: what saved state can hold, and how.

number, string, None        JSON
bytes, numpy scalar, array  a member of the archive, in numpy's own format
list, tuple, dict           JSON of their elements
fl.Serializable             its bytes and the name of its class

Names of versions in a folder, and errors of the place that they are in.
"""

import collections
import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import re
import sys
import types
import uuid
import zipfile
from collections.abc import Generator, Iterable, Mapping
from typing import IO, Any

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
import ray_fed.files.tables as tables
from ray_fed.files import opening

_CONTAINERS: Mapping[str, type[Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
}
_JSON_TYPES = (types.NoneType, bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class SavedObject:
    """What `to_bytes` of a `fl.Serializable` returned, until its class is known.

    Attributes:
        class_name: module and name of its class.
        content: what it returned.
    """

    class_name: str
    content: bytes


def class_name(cls: type[Any]) -> str:
    """Return the name by which a file remembers the class of an object."""
    return f"{cls.__module__}.{cls.__qualname__}"


def name_place(name: str) -> str:
    """Return what an error calls a value: a state that is one value has no name."""
    return f"`{name}`" if name else "the whole state"


def _check_digits(value: Any, label: str) -> Any:
    most = sys.get_int_max_str_digits()
    if isinstance(value, int) and most and value.bit_length() > 3 * most:
        raise errors.ValueMismatchError(
            f"Expected a number of fewer than {most} digits as {label}, found one of"
            f" {value.bit_length()} bits: save its bytes."
        )
    return value


class Encoder:
    """Describes values as JSON; what is large goes to members of an archive.

    Args:
        archive: open for writing; not owned.
    """

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._num_members = 0

    def describe(self, value: Any, label: str) -> dict[str, Any]:
        """Return a value as JSON that a `Decoder` understands.

        Raises:
            ValueMismatchError: the value is of a kind that cannot be saved.
        """
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
        members = value.values() if isinstance(value, dict) else value
        inside = f"an element of {label}"
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

    def _add_bytes(self, content: bytes) -> str:
        return self._add(np.frombuffer(content, np.uint8))

    def _add(self, array: NDArray[Any]) -> str:
        member = f"{self._num_members}.npy"
        self._num_members += 1
        with self._archive.open(member, "w", force_zip64=True) as file:
            np.lib.format.write_array(file, array, allow_pickle=False)
        return member


class Decoder:
    """Returns values that an `Encoder` described, each member of an archive once.

    Args:
        archive: open for reading, its sizes and checksums checked; not owned.
    """

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._unread = set(archive.namelist())

    def decode(self, described: Mapping[str, Any]) -> Any:
        """Return the value that is described.

        Args:
            described: the JSON.

        Returns:
            The value; a `SavedObject` for one that was an `fl.Serializable`.

        Raises:
            One of npy.DAMAGES: the JSON or a member is not what an `Encoder` wrote.
        """
        kind = described["kind"]
        if kind == "json" and type(described["value"]) in _JSON_TYPES:
            return described["value"]
        if kind == "complex":
            return complex(*described["value"])
        if kind in _CONTAINERS:
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

    def _read(self, member: str) -> NDArray[Any]:
        self._unread.remove(member)
        return tables.read_member(self._archive, member)


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
"""One past the latest version; names of files have an end, too."""

OF_THIS_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What opening a file fails with however whole the file is."""


def versions_in(names: Iterable[str], prefix: str, suffix: str) -> list[int]:
    """Return the versions that names stand for, ascending; other names are left out."""
    pattern = re.compile(
        re.escape(prefix) + r"(0|[1-9]\d{0,18})" + re.escape(suffix), re.ASCII
    )
    found = sorted(int(match[1]) for match in map(pattern.fullmatch, names) if match)
    return [version for version in found if version < MAX_VERSION]


@contextlib.contextmanager
def telling_storage(
    where: str, *kinds: type[Exception], verb: str = "save state in"
) -> Generator[None]:
    """Raise what a file system raises as an error that says what to do.

    Args:
        where: state is read or written.
        *kinds: of errors to tell so.
        verb: what was tried there.

    Raises:
        StorageError: an error of one of the kinds came up.
    """
    try:
        yield
    except errors.RayFedError:
        raise
    except kinds as error:
        if isinstance(error, OSError) and error.errno in OF_THIS_PROCESS:
            raise
        raise _told(where, error, verb) from error


@contextlib.contextmanager
def telling_read(where: str, *kinds: type[Exception]) -> Generator[None]:
    """Raise what reading raises as `telling_storage` does, but for what is not there.

    Args:
        where: state is read.
        *kinds: of errors to tell so.

    Raises:
        FileNotFoundError: there is nothing.
        StorageError: another error of one of the kinds came up.
    """
    absent: FileNotFoundError | None = None
    with telling_storage(where, *kinds, verb="read"):
        try:
            yield
        except FileNotFoundError as error:
            absent = error
    if absent is not None:
        raise absent


def _told(where: str, error: Exception, verb: str) -> errors.StorageError:
    found = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return errors.StorageError(
        f"Expected to {verb} `{where}`, found {type(error).__name__} ({found}): see"
        " that the place exists, has room and may be read and written by this process."
        " What was saved before is left as it is."
    )


def unlisted(where: str, error: Exception) -> errors.StorageError:
    """Return the error that a place of saved state cannot be listed."""
    found = getattr(error, "strerror", None) or str(error)
    return errors.StorageError(
        f"Expected a folder of saved state, or nothing yet, at `{where}`, found that it"
        f" cannot be listed ({found}): name another folder, or move away what is there."
    )


TEMPORARY_SUFFIX = ".tmp"
_FORMAT = 1
_MANIFEST = "manifest.json"

_NO_REGULAR_FILE = (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""What opening anything but a regular file fails with."""

_NO_ARCHIVE = (None, errno.EINVAL)
"""What reading a regular file that is no archive fails with: places in it that cannot
be, and errors of decoders, which have no number."""


def write_values(path: pathlib.Path, values: Mapping[str, object]) -> None:
    """Write named values to a file, which appears complete or not at all.

    Args:
        path: replaced if it is there; its folder exists.
        values: of the kinds that `state_encoding.Encoder` takes.

    Raises:
        ValueMismatchError: a value is of another kind.
        SavedStateError: there is a folder at the path.
    """
    if path.is_dir() and not path.is_symlink():
        raise errors.SavedStateError(
            f"Expected to save state to the file `{path}`, found a folder of that name:"
            " move it away."
        )
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            write_archive(file, values)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_archive(file: IO[bytes], values: Mapping[str, object]) -> None:
    """Write named values to a file that is open, empty and can seek.

    Raises:
        ValueMismatchError: a value is of a kind that cannot be saved.
    """
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


def _sync_folder(folder: pathlib.Path) -> None:
    """Have the rename survive a power failure, where the file system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_values(path: pathlib.Path) -> dict[str, Any]:
    """Return the values of a file by name; a `SavedObject` for each serialised object.

    Raises:
        StateFormatError: another version of ray_fed wrote it.
        StorageError: the file cannot be opened or read now.
        SavedStateError: it is damaged, or no regular file.
        FileNotFoundError: there is no such file.
    """
    with telling_read(str(path), OSError), _open(path) as file:
        return read_archive(file, str(path))


def read_archive(file: IO[bytes], where: str) -> dict[str, Any]:
    """Return the values of a file that is open and can seek, by name.

    Args:
        file: to read bytes; not owned.
        where: it is, as an error says it.

    Raises:
        StateFormatError: another version of ray_fed wrote it.
        SavedStateError: the file is damaged.
        OSError: it cannot be read now.
    """
    try:
        return _read(file, where)
    except errors.SavedStateError:
        raise
    except tables.DAMAGES as error:
        failure = _find_failure(error)
        if failure is not None:
            raise failure from None
        raise damage(where, error) from error


def _find_failure(error: Exception) -> OSError | None:
    """Return the failure to read that an error is, or that zipfile took for damage."""
    for each in (error, error.__context__):
        if isinstance(each, OSError) and each.errno not in _NO_ARCHIVE:
            return each
    return None


def _open(path: pathlib.Path) -> IO[bytes]:
    try:
        return opening.open_regular(path)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise damage(path, "a link to nothing") from error
        raise
    except OSError as error:
        if error.errno in _NO_REGULAR_FILE:
            raise damage(path, error.strerror) from error
        raise


def damage(where: object, found: object) -> errors.SavedStateError:
    """Return the error that a version is not as it was written."""
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
        check_format(manifest["format"], _FORMAT, where)
        decoder = Decoder(archive)
        return {
            described["name"]: decoder.decode(described["value"])
            for described in manifest["values"]
        }


def _check_sizes(archive: zipfile.ZipFile, num_bytes: int) -> None:
    """Refuse members that would take more memory than the file has bytes."""
    members = archive.infolist()
    for member in members:
        is_stored = member.compress_type == zipfile.ZIP_STORED
        if not is_stored or member.file_size != member.compress_size:
            raise zipfile.BadZipFile(f"`{member.filename}` is larger than it says")
    if sum(member.file_size for member in members) > num_bytes:
        raise zipfile.BadZipFile(f"members larger than the file of {num_bytes} bytes")


def check_format(found: object, known: int, where: str) -> None:
    """Refuse what another version of ray_fed wrote.

    Raises:
        StateFormatError: it is not of the format that is known.
    """
    if found != known:
        raise errors.StateFormatError(
            f"Expected saved state of format {known} in `{where}`, found format"
            f" {errors.describe(found)}: read it with the version of ray_fed that wrote"
            " it."
        )

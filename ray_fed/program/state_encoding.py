"""Values as JSON and arrays, without pickle: what saved state can hold, and how.

number, string, None        JSON
bytes, numpy scalar, array  a member of the archive, in numpy's own format
list, tuple, dict           JSON of their elements
fl.Serializable             its bytes and the name of its class
"""

import collections
import dataclasses
import sys
import types
import zipfile
from collections.abc import Mapping
from typing import Any

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.files import npy

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
        return npy.read_member(self._archive, member)


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

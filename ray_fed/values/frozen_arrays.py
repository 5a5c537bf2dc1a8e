"""Large arrays that graphs refer to by name instead of containing them.

A graph names an array by a hash of its content. Each process has a table from names to
arrays, in which its graphs find them. In the user's process, the owner of an array adds
it to the table. A worker adds an array that Ray maps from the shared memory of its
machine, so all workers of a machine use one copy.
"""

import functools
import hashlib
import re
import weakref
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors

PREFIX = "ray_fed_frozen_"
"""Prefix of the name of each array. The name is a valid argument name of a graph."""

_NAME = re.compile(PREFIX.encode() + rb"[0-9a-f]{64}")


class FrozenArray:
    """The bytes of an array. The table has the array while code refers to it.

    Args:
        name: Name of the array.
        content: The bytes, u8[bytes]. Nothing may change them.
    """

    def __init__(self, name: str, content: NDArray[np.uint8]) -> None:
        self.name, self.content = name, content

    @classmethod
    def of(cls, array: NDArray[Any]) -> "FrozenArray":
        """Add a contiguous array to the table of this process, without a copy."""
        content = array.reshape(-1).view(np.uint8)
        digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
        digest.update(memoryview(cast("Any", content)))
        return add(PREFIX + digest.hexdigest(), content)


_arrays: weakref.WeakValueDictionary[str, FrozenArray] = weakref.WeakValueDictionary()


def add(name: str, content: NDArray[np.uint8]) -> FrozenArray:
    """Return the array `name` of the table. If it is new, add it with `content`."""
    return _arrays.setdefault(name, FrozenArray(name, content))


def find(name: str) -> FrozenArray | None:
    """Return the array `name` of the table, or None if it is not there."""
    return _arrays.get(name)


def get(name: str) -> FrozenArray:
    """Return the array `name` of the table.

    Raises:
        ContextStateError: The table does not have the array.
    """
    found = find(name)
    if found is None:
        raise errors.ContextStateError(
            "Expected the model's frozen weights in"
            f" {error_texts.describe_process()}, found that they are gone: keep the"
            " `learning.Model` for as long as you run computations made from it."
        )
    return found


@functools.lru_cache(maxsize=16)
def names_in(serialized: bytes) -> tuple[str, ...]:
    """Return the names of the arrays that a serialized computation refers to."""
    return tuple(dict.fromkeys(name.decode() for name in _NAME.findall(serialized)))

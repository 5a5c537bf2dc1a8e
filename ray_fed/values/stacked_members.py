"""Many clients' values as one array for each of their tensors: few objects to pickle.

A pickler takes about 10 us an array. The values of 1,000 clients with four tensors each
would take it longer than it takes to train them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from ray_fed.language.structs import Plain
from ray_fed.values.tensor_structures import flatten

_MOST_BYTES = 64 * 1024
"""Of a tensor; to copy a larger one into an array takes longer than to pickle it."""


@dataclasses.dataclass(frozen=True)
class StackedMembers:
    """The plain values of two or more clients, all of one structure.

    Attributes:
        template: nested tuples as in each of them, with the tensors' indices.
        arrays: for each tensor those of all clients, along the first dimension.
    """

    template: Any
    arrays: tuple[NDArray[Any], ...]

    @classmethod
    def of(cls, value: Plain) -> "Self | None":
        """Return the same values; None where they are no list of alike ones."""
        if not isinstance(value, list):
            return None
        members = cast("list[Plain]", value)
        if len(members) <= 1:
            return None
        template, count = _number(members[0], 0)
        columns = list(zip(*map(flatten, members), strict=False))
        if (
            not count
            or len(columns) != count
            or any(_number(member, 0) != (template, count) for member in members)
        ):
            return None
        if not all(map(_are_alike, columns)):
            return None
        return cls(template, tuple(map(np.stack, columns)))

    @property
    def num_bytes(self) -> int:
        """The bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def members(self) -> list[Plain]:
        """Return the plain values, in order: views of the arrays."""
        columns = list(map(list, self.arrays))
        return _nest(self.template, columns, len(self.arrays[0]))


def _number(plain: Plain, start: int) -> tuple[Any, int]:
    """Return nested tuples with the numbers of their tensors, and the next number."""
    if type(plain) is not tuple:
        return start, start + 1
    numbered: list[Any] = []
    for element in cast("tuple[Any, ...]", plain):
        inside, start = _number(element, start)
        numbered.append(inside)
    return tuple(numbered), start


def _are_alike(tensors: Sequence[Any]) -> bool:
    """Return whether tensors are numbers of one dtype and shape, each a small one."""
    first = tensors[0]
    kind = type(first)
    if not isinstance(first, np.ndarray | np.generic):
        return False
    if first.dtype.hasobject or first.nbytes > _MOST_BYTES:
        return False
    return all(
        type(tensor) is kind
        and tensor.dtype == first.dtype
        and tensor.shape == first.shape
        for tensor in tensors
    )


def _nest(template: Any, columns: list[list[Any]], count: int) -> list[Plain]:
    if not isinstance(template, tuple):
        return columns[template]
    inside = [_nest(t, columns, count) for t in cast("tuple[Any, ...]", template)]
    return list(zip(*inside, strict=True)) if inside else [()] * count

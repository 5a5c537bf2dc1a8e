"""Sequences as columns: one array for each tensor of the element type.

As columns, a client's dataset is sent, sliced and passed to a graph without copies. The
federated type of a tensor decides its layout:

    element shape fixed           f32[784]      rows f32[n, 784]        splits None
    leading dimension unknown     f32[?, 784]   rows f32[sum, 784]      splits i64[n+1]
    any other unknown dimension   f32[?, ?]     rows object[n]          splits None
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

Dims = tuple[int | None, ...] | None
"""A shape in a federated type. None is an unknown dimension, or an unknown rank."""


def lock(array: NDArray[Any]) -> NDArray[Any]:
    """Make an array read-only and return it. No other code may refer to it."""
    array.flags.writeable = False
    return array


def own(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array if no code can write to it, otherwise a read-only copy."""
    return array if _is_locked(array) else lock(array.copy())


def _is_locked(array: NDArray[Any]) -> bool:
    """Return whether the array and all memory below it are read-only."""
    memory: Any = array
    while isinstance(memory, np.ndarray):
        if memory.flags.writeable:
            return False
        memory = cast("Any", memory).base
    try:
        return memory is None or memoryview(memory).readonly
    except TypeError:
        return False


def bytes_of(array: NDArray[Any]) -> int:
    """Return the bytes of an array, including the strings and arrays in it."""
    if array.dtype != object:
        return array.nbytes
    held = (
        bytes_of(member) if isinstance(member, np.ndarray) else len(member)
        for member in array.flat
    )
    return array.nbytes + sum(held)


@dataclasses.dataclass(frozen=True, eq=False)
class Column:
    """One tensor of every element of a sequence, in element order.

    Attributes:
        rows: The rows of all elements, in the layout of the module's table.
        splits: i64[n + 1]: element i is `rows[splits[i]:splits[i + 1]]`. If None,
            element i is `rows[i]`.
    """

    rows: NDArray[np.generic]
    splits: NDArray[np.int64] | None = None

    @property
    def length(self) -> int:
        """The number of elements."""
        return len(self.rows) if self.splits is None else len(self.splits) - 1

    @property
    def num_bytes(self) -> int:
        """The bytes of both arrays."""
        return bytes_of(self.rows) + (0 if self.splits is None else self.splits.nbytes)

    def __getitem__(self, index: int) -> np.generic | NDArray[np.generic]:
        if self.splits is None:
            return self.rows[index]
        return self.rows[self.splits[index] : self.splits[index + 1]]

    def with_splits(self) -> "Column":
        """Return the same column with splits. Its elements must not be scalars."""
        if self.splits is not None:
            return self
        length, size, *rest = self.rows.shape
        rows = self.rows.reshape(length * size, *rest)
        return Column(rows, np.arange(length + 1, dtype=np.int64) * size)

    def copy(self) -> "Column":
        """Return an equal column that shares no memory with this one."""
        rows = self.rows.copy()
        if rows.dtype == object:  # of arrays, or of strings, which are immutable
            for index, member in enumerate(self.rows):
                if isinstance(member, np.ndarray):
                    rows[index] = member.copy()
        return Column(rows, self.splits)

    @property
    def batch_size(self) -> int | None:
        """The number of rows of each element but the last, or None if it differs."""
        if self.splits is None or not len(self.splits[1:]):
            return None
        sizes = np.diff(self.splits)
        regular = (sizes[:-1] == sizes[0]).all() and 0 < sizes[-1] <= sizes[0]
        return int(sizes[0]) if regular else None


@dataclasses.dataclass(frozen=True, eq=False)
class ColumnarSequence:
    """A sequence of structures of tensors: the plain value of a `SequenceType`.

    `columns` has a column for each tensor of the element type, in the type's order.
    """

    columns: tuple[Column, ...]
    length: int

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[np.generic | NDArray[np.generic], ...]]:
        for index in range(self.length):
            yield tuple(column[index] for column in self.columns)

    def copy(self) -> "ColumnarSequence":
        """Return an equal sequence that shares no memory with this one."""
        return ColumnarSequence(tuple(c.copy() for c in self.columns), self.length)

    def own(self) -> "ColumnarSequence":
        """Return an equal sequence whose columns are read-only."""
        columns = (dataclasses.replace(c, rows=own(c.rows)) for c in self.columns)
        return ColumnarSequence(tuple(columns), self.length)

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays, including splits."""
        return sum(column.num_bytes for column in self.columns)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a sequence whose elements all have the same shapes.

    `batches` has the first dimension of the elements, for each column. It is None for
    columns whose type fixes this dimension.
    """

    length: int
    batches: tuple[int | None, ...]


def lay_column(
    tensors: Sequence[np.generic | NDArray[np.generic]],
    dtype: np.dtype[np.generic],
    shape: Dims,
) -> Column:
    """Build a column from one tensor for each element of a sequence.

    The tensors fit `dtype` (object for strings) and `shape`. The result is read-only if
    it is a copy. A single tensor with an unknown first dimension is not copied.
    """
    fixed = [] if shape is None else [size for size in shape if size is not None]
    if shape is not None and len(fixed) == len(shape):
        rows = np.empty((len(tensors), *fixed), dtype)
        for index, tensor in enumerate(tensors):
            rows[index] = tensor
        return Column(lock(rows))
    if shape is not None and None not in shape[1:]:
        arrays = [np.asarray(tensor, dtype) for tensor in tensors]
        ends = itertools.accumulate((len(array) for array in arrays), initial=0)
        splits = np.fromiter(ends, np.int64, len(arrays) + 1)
        if len(arrays) == 1:
            return Column(arrays[0], splits)
        laid = np.concatenate(arrays) if arrays else np.empty((0, *fixed), dtype)
        return Column(lock(laid), splits)
    rows = np.empty(len(tensors), object)
    for index, tensor in enumerate(tensors):
        rows[index] = np.array(tensor)
    return Column(lock(rows))


def join_columns(parts: Sequence[Column]) -> Column:
    """Concatenate one or more columns that have the same layout."""
    if len(parts) == 1:
        return parts[0]
    laid = lock(np.concatenate([part.rows for part in parts]))
    if parts[0].splits is None:
        return Column(laid)
    starts = itertools.accumulate((len(part.rows) for part in parts), initial=0)
    ends = [
        cast("NDArray[np.int64]", part.splits)[1:] + start
        for part, start in zip(parts, starts, strict=False)
    ]
    return Column(laid, np.concatenate([np.zeros(1, np.int64), *ends]))

"""A sequence as columns: one array for each tensor of its elements, laid end to end.

A client's dataset is many small tensors. As columns it travels without copies, is
sliced at no cost, and becomes the input of a graph as it is. There are three layouts,
by what the federated type says of a tensor's shape:

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
"""A shape as a federated type writes it: None is unknown."""


def bytes_of(array: NDArray[Any]) -> int:
    """Return the bytes that an array holds, those of strings and rows in it too."""
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
        rows: the layout that the module's table gives.
        splits: i64[n + 1], element i is `rows[splits[i]:splits[i + 1]]`; None where
            element i is `rows[i]`.
    """

    rows: NDArray[np.generic]
    splits: NDArray[np.int64] | None = None

    @property
    def length(self) -> int:
        """The number of elements."""
        return len(self.rows) if self.splits is None else len(self.splits) - 1

    def __getitem__(self, index: int) -> np.generic | NDArray[np.generic]:
        if self.splits is None:
            return self.rows[index]
        return self.rows[self.splits[index] : self.splits[index + 1]]

    def with_splits(self) -> "Column":
        """Return the column laid as for elements of unknown leading dimension.

        Itself where it is; else `rows` is of elements of one shape, not scalars.
        """
        if self.splits is not None:
            return self
        length, size, *rest = self.rows.shape
        rows = self.rows.reshape(length * size, *rest)
        return Column(rows, np.arange(length + 1, dtype=np.int64) * size)

    @property
    def batch_size(self) -> int | None:
        """The size of all elements but the last, which may be smaller; or None."""
        if self.splits is None or not len(self.splits[1:]):
            return None
        sizes = np.diff(self.splits)
        regular = (sizes[:-1] == sizes[0]).all() and 0 < sizes[-1] <= sizes[0]
        return int(sizes[0]) if regular else None


@dataclasses.dataclass(frozen=True, eq=False)
class ColumnarSequence:
    """The plain value of a `SequenceType`.

    Attributes:
        columns: one for each tensor of the element type, in the order of the type.
        length: how many elements there are.
    """

    columns: tuple[Column, ...]
    length: int

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[np.generic | NDArray[np.generic], ...]]:
        for index in range(self.length):
            yield tuple(column[index] for column in self.columns)

    @property
    def num_bytes(self) -> int:
        """The size of the arrays, splits included, in bytes."""
        return sum(
            bytes_of(column.rows)
            + (0 if column.splits is None else column.splits.nbytes)
            for column in self.columns
        )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is known of a sequence whose elements are all of the same shapes.

    Attributes:
        length: number of elements.
        batches: leading dimension of each column's elements; None where their shape is
            that of the type.
    """

    length: int
    batches: tuple[int | None, ...]


def lay_column(
    tensors: Sequence[np.generic | NDArray[np.generic]],
    dtype: np.dtype[np.generic],
    shape: Dims,
) -> Column:
    """Lay the tensors of one column end to end.

    Args:
        tensors: one an element, each of `dtype` and compatible with `shape`.
        dtype: of the tensors; object for strings.
        shape: of one tensor, as the federated type declares it.

    Returns:
        The column in the tightest of the module's layouts.
    """
    fixed = [] if shape is None else [size for size in shape if size is not None]
    if shape is not None and len(fixed) == len(shape):
        rows = np.empty((len(tensors), *fixed), dtype)
        for index, tensor in enumerate(tensors):
            rows[index] = tensor
        return Column(rows)
    if shape is not None and None not in shape[1:]:
        arrays = [np.asarray(tensor, dtype) for tensor in tensors]
        ends = itertools.accumulate((len(array) for array in arrays), initial=0)
        splits = np.fromiter(ends, np.int64, len(arrays) + 1)
        if len(arrays) == 1:
            return Column(arrays[0], splits)
        return Column(
            np.concatenate(arrays) if arrays else np.empty((0, *fixed), dtype), splits
        )
    rows = np.empty(len(tensors), object)
    for index, tensor in enumerate(tensors):
        rows[index] = np.asarray(tensor)
    return Column(rows)


def join_columns(parts: Sequence[Column]) -> Column:
    """Return columns of one layout, at least one, as the column of all elements."""
    if len(parts) == 1:
        return parts[0]
    laid = np.concatenate([part.rows for part in parts])
    if parts[0].splits is None:
        return Column(laid)
    starts = itertools.accumulate((len(part.rows) for part in parts), initial=0)
    ends = [
        cast("NDArray[np.int64]", part.splits)[1:] + start
        for part, start in zip(parts, starts, strict=False)
    ]
    return Column(laid, np.concatenate([np.zeros(1, np.int64), *ends]))


def count_column_bytes(column: Column) -> int:
    """Return about how many bytes a column holds, those of its objects included."""
    splits = 0 if column.splits is None else column.splits.nbytes
    if column.rows.dtype != object:
        return column.rows.nbytes + splits
    held = (getattr(row, "nbytes", None) or _length(row) for row in column.rows.flat)
    return column.rows.nbytes + splits + sum(held)


def _length(row: object) -> int:
    return len(row) if isinstance(row, bytes) else 0

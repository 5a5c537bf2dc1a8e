"""Rows of clients in plain files, one client's behind the other's: read exactly.

    fixed shape               values: a row has a fixed number of them
    leading size unknown      splits i64[rows + 1], counted in values; values
    strings, in both          offsets i64[values + 1], counted in bytes; bytes
    behind all tensors        ends i64[clients + 1], counted in rows; failures

The files have no names: they vanish with the last process that holds them open.
"""

import contextlib
import dataclasses
import json
import math
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Self, cast

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.files.features import Leaf
from ray_fed.values import tensor_structures
from ray_fed.values.columnar_sequence import Column, ColumnarSequence

_END = np.dtype(np.int64)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How one tensor of rows lies in files.

    Attributes:
        dtype: of its values; object for strings.
        cell: the shape of a row; None where rows have different numbers of values.
    """

    dtype: np.dtype[Any]
    cell: tuple[int, ...] | None

    @classmethod
    def of(cls, leaf: Leaf) -> Self:
        shape = tuple(leaf.type_signature.shape or ())
        cell = None if None in shape else cast("tuple[int, ...]", shape)
        return cls(tensor_structures.storage_dtype(leaf.type_signature), cell)

    @property
    def is_text(self) -> bool:
        return self.dtype.kind == "O"

    @property
    def num_files(self) -> int:
        return 1 + (self.cell is None) + self.is_text


def count_laid_bytes(leaves: Sequence[Leaf]) -> int | None:
    """Return the bytes of a laid row; None where rows differ."""
    layouts = [_Layout.of(leaf) for leaf in leaves]
    if any(layout.is_text or layout.cell is None for layout in layouts):
        return None
    return sum(lay.dtype.itemsize * math.prod(lay.cell or ()) for lay in layouts)


def open_unnamed(stack: contextlib.ExitStack) -> IO[bytes]:
    """Return a file without a name, to write and read, that a stack closes."""
    return stack.enter_context(tempfile.TemporaryFile())


class LaidWriter:
    """Writes rows behind one another; a context manager, which closes its files.

    Args:
        leaves: the tensors of a row.

    Attributes:
        num_bytes: written so far.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._layouts = [_Layout.of(leaf) for leaf in leaves]
        self._stack = contextlib.ExitStack()
        count = sum(layout.num_files for layout in self._layouts)
        self._files = [open_unnamed(self._stack) for _ in range(count)]
        self._ends: list[int | None] = [None] * count
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def append(self, rows: ColumnarSequence) -> None:
        """Write rows behind those that were written before."""
        place = 0
        for layout, column in zip(self._layouts, rows.columns, strict=True):
            inner = place
            if column.splits is not None:
                self._append_sizes(inner, np.diff(column.splits))
                inner += 1
            values = column.rows.ravel()
            if layout.is_text:
                held = cast("list[bytes]", values.tolist())
                self._append_sizes(inner, np.array(list(map(len, held)), np.int64))
                self._write(inner + 1, b"".join(held))
            else:
                self._write(inner, np.ascontiguousarray(values, layout.dtype))
            place += layout.num_files

    def finish(
        self, counts: NDArray[np.int64], failures: Mapping[int, str]
    ) -> list[int]:
        """Return descriptors of the files, for `LaidColumns`.

        Args:
            counts: rows of each client, in the order in which they were written.
            failures: why clients cannot be read, by position.
        """
        ends = np.append(0, np.cumsum(counts)).astype(_END)
        for content in (ends.tobytes(), json.dumps(failures).encode()):
            file = open_unnamed(self._stack)
            file.write(content)
            self._files.append(file)
        for file in self._files:
            file.flush()
        return [os.dup(file.fileno()) for file in self._files]

    def _append_sizes(self, place: int, sizes: NDArray[np.int64]) -> None:
        before = self._ends[place]
        if before is None:
            before = 0
            self._write(place, np.zeros(1, _END))
        ends = np.cumsum(sizes, dtype=_END) + before
        self._ends[place] = int(ends[-1]) if len(ends) else before
        self._write(place, ends)

    def _write(self, place: int, content: NDArray[Any] | bytes) -> None:
        held = content if isinstance(content, bytes) else content.data.cast("B")
        self.num_bytes += self._files[place].write(held)


class LaidColumns:
    """Rows by client, in files that are held open.

    Args:
        leaves: the tensors of a row.
        files: descriptors, in the order of the module's table; closed with this.

    Attributes:
        num_bytes_read: of rows, so far.
    """

    def __init__(self, leaves: Sequence[Leaf], files: list[int]) -> None:
        self._layouts = [_Layout.of(leaf) for leaf in leaves]
        self._files = files
        self._closer = weakref.finalize(self, _close, files)
        self.num_bytes_read = 0
        ends, failures = (self._read(f, 0, os.fstat(f).st_size) for f in files[-2:])
        self._ends = np.frombuffer(ends, _END)
        self._failures: dict[str, str] = json.loads(failures)
        self.num_bytes_read = 0

    def close(self) -> None:
        """Close the files."""
        self._closer()

    def read(self, position: int) -> ColumnarSequence:
        """Return the rows of a client.

        Raises:
            ValueMismatchError: a cell of it did not fit.
        """
        if str(position) in self._failures:
            raise errors.ValueMismatchError(self._failures[str(position)])
        start, stop = int(self._ends[position]), int(self._ends[position + 1])
        files = iter(self._files)
        columns = tuple(
            self._read_column(layout, files, start, stop) for layout in self._layouts
        )
        return ColumnarSequence(columns, stop - start)

    def _read_column(
        self, layout: _Layout, files: Iterator[int], start: int, stop: int
    ) -> Column:
        if layout.cell is None:
            splits = self._read_ends(next(files), start, stop)
            first, last = int(splits[0]), int(splits[-1])
            values = self._read_values(layout, files, first, last)
            return Column(values, splits - first)
        size = math.prod(layout.cell)
        values = self._read_values(layout, files, start * size, stop * size)
        return Column(values.reshape(stop - start, *layout.cell))

    def _read_values(
        self, layout: _Layout, files: Iterator[int], first: int, last: int
    ) -> NDArray[Any]:
        if not layout.is_text:
            width = layout.dtype.itemsize
            content = self._read(next(files), first * width, (last - first) * width)
            return np.frombuffer(content, layout.dtype)
        ends = self._read_ends(next(files), first, last).tolist()
        file = next(files)
        content = self._read(file, ends[0], ends[-1] - ends[0])
        values = np.empty(last - first, object)
        for index in range(last - first):
            values[index] = content[ends[index] - ends[0] : ends[index + 1] - ends[0]]
        return values

    def _read_ends(self, file: int, start: int, stop: int) -> NDArray[np.int64]:
        if start == stop:
            return np.zeros(1, _END)
        width = _END.itemsize
        content = self._read(file, start * width, (stop - start + 1) * width)
        return np.frombuffer(content, _END)

    def _read(self, file: int, start: int, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            found = os.pread(file, count, start)
            if not found:
                raise OSError(f"a laid file ends {count} bytes early")
            parts.append(found)
            start, count = start + len(found), count - len(found)
            self.num_bytes_read += len(found)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)

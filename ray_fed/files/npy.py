"""Reads rows of arrays in npy files and npz archives. Nothing is unpickled."""

import contextlib
import lzma
import math
import os
import shutil
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

DAMAGES = (
    zipfile.BadZipFile,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    IndexError,
    KeyError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that zipfile, NumPy and json raise for content they cannot read."""

_PARSING = threading.Lock()
"""Lets one thread at a time parse a header. NumPy parses it as a Python literal. Before
CPython 3.11.8, threads that parse literals share a counter, which can end in a
SystemError (github.com/python/cpython/issues/106905)."""

_STEP_BYTES = 2**20


class ArrayReader:
    """An array in a file, whose rows are read when they are requested.

    The constructor raises ValueError if the file is no NumPy array, or if it has
    another size than its header says.

    Args:
        file: A file that is open for reading bytes, at the beginning of the array. The
            array ends where the file ends.
        num_bytes: Bytes of the array with its header. None to measure the file.

    Attributes:
        dtype: Dtype of the elements, object if they were pickled.
        num_bytes: Bytes of all elements.
        row_bytes: Bytes of the elements in one row.
    """

    def __init__(self, file: IO[bytes], num_bytes: int | None = None) -> None:
        self._file = file
        if num_bytes is None:
            num_bytes = file.seek(0, os.SEEK_END)
            file.seek(0)
        self.shape, self._is_by_columns, self.dtype = _read_header(file)
        self.num_bytes = math.prod(self.shape) * self.dtype.itemsize
        self.row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        self._start = file.tell()
        found = num_bytes - self._start
        if found != self.num_bytes and not self.dtype.hasobject:
            raise ValueError(
                f"{found} bytes for {self.num_bytes} of the shape {self.shape} of"
                f" {self.dtype}: it is cut short, or has more than it says"
            )

    def read(self) -> NDArray[Any]:
        """Read the whole array, or raise ValueError if it is damaged or pickled."""
        (found,) = self._read_rows([math.prod(self.shape[:1])], self.shape)
        return found

    def read_rows(self, count: int) -> Iterator[NDArray[Any]]:
        """Yield pieces of at most `count` rows, or raise the errors of `read`."""
        length = self.shape[0]
        is_across = self._is_by_columns and len(self.shape) > 1 and self.num_bytes > 0
        if is_across and length > count:
            yield from self._read_across(count)
        elif length:
            counts = [min(count, length - at) for at in range(0, length, count)]
            yield from self._read_rows(counts, self.shape)
        else:
            yield self.read()

    def _read_rows(
        self, counts: Sequence[int], shape: tuple[int, ...]
    ) -> Iterator[NDArray[Any]]:
        if self.dtype.hasobject:
            raise ValueError("pickled objects, which need allow_pickle=True")
        order = "F" if self._is_by_columns else "C"
        for count in counts:
            rows = (count, *shape[1:]) if shape else ()
            content = bytearray(math.prod(rows) * self.dtype.itemsize)
            if self._file.readinto(content) != len(content):  # pyright: ignore[reportAttributeAccessIssue]
                raise ValueError("it is cut short")
            try:
                yield np.ndarray(rows, self.dtype, content, order=order)
            except (TypeError, OverflowError) as error:  # sizes that no array can have
                raise ValueError(f"the shape {rows}: {error}") from error
        self._file.read(1)  # so that zipfile compares the checksum

    def _read_across(self, count: int) -> Iterator[NDArray[Any]]:
        """Yield pieces of a column-major array, with one read for each column.

        An array in an archive is copied to disk, because it can only be read in order.
        """
        length, width = self.shape[0], self.dtype.itemsize
        with contextlib.ExitStack() as stack:
            file, origin = self._file, self._start
            if isinstance(file, zipfile.ZipExtFile):
                file, origin = stack.enter_context(tempfile.TemporaryFile()), 0
                shutil.copyfileobj(self._file, file, _STEP_BYTES)
            for first in range(0, length, count):
                rows = min(count, length - first)
                content = np.empty((math.prod(self.shape[1:]), rows), self.dtype)
                for number, column in enumerate(content):
                    file.seek(origin + (number * length + first) * width)
                    if file.readinto(column.data) != column.nbytes:  # pyright: ignore[reportAttributeAccessIssue]
                        raise ValueError("it is cut short")
                yield np.ndarray(
                    (rows, *self.shape[1:]), self.dtype, content, order="F"
                )


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        with _PARSING:
            version = np.lib.format.read_magic(file)
            parse = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, by_columns, dtype = parse(file)
    except Exception as error:  # numpy lets through what Python's own parser raises
        raise ValueError(f"no header of numpy's format: {error}") from error
    if any(size < 0 for size in shape) or dtype.subdtype is not None:
        raise ValueError(f"the shape {shape} of {dtype}")
    return shape, by_columns, dtype


def read_member(archive: zipfile.ZipFile, member: str) -> NDArray[Any]:
    """Read an array such as `x.npy` of an archive, or raise one of DAMAGES."""
    with archive.open(member) as file:
        return ArrayReader(file, archive.getinfo(member).file_size).read()

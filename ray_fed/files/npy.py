"""Arrays in numpy's own format, whose headers one thread reads at a time.

numpy parses a header as a Python literal. Before CPython 3.11.8, all threads count the
depth of what they parse together: two at once can end in a SystemError, where the
garbage collector lets the other one run (https://github.com/python/cpython/issues/106905).
"""

import contextlib
import io
import lzma
import math
import shutil
import threading
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ray_fed.files.laid_columns import open_unnamed

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
"""What zipfile, numpy and json raise for content that they cannot read."""

_PARSING = threading.Lock()
_MAGIC_BYTES = 8
_MAX_HEADER_BYTES = 10_000
"""What numpy reads of a header at most."""

_STEP_BYTES = 2**20
"""Read at a time, so that memory follows what is there and not what a header claims."""


_ACROSS = 2
"""How many times as many rows are read at once where an array lies by columns."""


class ArrayReader:
    """An array in a file, whose rows are read when asked for; nothing is unpickled.

    Args:
        file: opened to read bytes, where the array begins and nothing follows it; of
            this process alone, and read to its end before it is closed.
        num_bytes: of the array with its header, where that is known: compared with what
            the header claims before elements are read.

    Attributes:
        shape: of the array.
        dtype: of its elements; object dtype where they were pickled.
        num_bytes: of the elements.
        row_bytes: of the elements of a row.

    Raises:
        ValueError: this is no array in numpy's format, or is shorter or longer than its
            header claims.
    """

    def __init__(self, file: IO[bytes], num_bytes: int | None = None) -> None:
        start = file.tell()
        self._file = file
        self.shape, self._is_by_columns, self.dtype = _read_header(file)
        self._start = file.tell()
        self.num_bytes = math.prod(self.shape) * self.dtype.itemsize
        self.row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        found = None if num_bytes is None else num_bytes - (self._start - start)
        if found is not None and found != self.num_bytes and not self.dtype.hasobject:
            raise ValueError(f"{found} bytes for {self.num_bytes} of {self}")

    @override
    def __str__(self) -> str:
        return f"the shape {self.shape} of {self.dtype}"

    def read(self) -> NDArray[Any]:
        """Return the array.

        Raises:
            ValueError: it is shorter or longer than its header claims, or its elements
                were pickled.
        """
        found = self._lay(_read_bytes(self._file, self.num_bytes), self.shape)
        self._check_end()
        return found

    def read_rows(self, count: int) -> Iterator[NDArray[Any]]:
        """Yield the rows, so many at a time; see `read`."""
        length = self.shape[0]
        if length <= count:
            yield self.read()
            return
        if self._is_by_columns and len(self.shape) > 1:
            yield from self._read_across(count)
            return
        for start in range(0, length, count):
            found = min(count, length - start)
            content = _read_bytes(self._file, found * self.row_bytes)
            yield self._lay(content, (found, *self.shape[1:]))
        self._check_end()

    def _read_across(self, count: int) -> Iterator[NDArray[Any]]:
        """Yield rows of an array that lies by columns, of which each read has a piece.

        Elements of an archive are copied to disk: it is not read in another order.
        """
        length, width = self.shape[0], self.dtype.itemsize
        num_columns, step = math.prod(self.shape[1:]), _ACROSS * count
        with contextlib.ExitStack() as stack:
            file, origin = self._file, self._start
            if isinstance(file, zipfile.ZipExtFile):
                copied = open_unnamed(stack)
                shutil.copyfileobj(file, copied, _STEP_BYTES)
                file, origin = copied, 0
            for start in range(0, length, step):
                found = min(step, length - start)
                # At its size from the start: one that grows leaves holes in the heap.
                content = bytearray(found * num_columns * width)
                for column in range(num_columns):
                    file.seek(origin + (column * length + start) * width)
                    at = slice(column * found * width, (column + 1) * found * width)
                    content[at] = _read_bytes(file, found * width)
                rows = self._lay(content, (found, *self.shape[1:]))
                for first in range(0, found, count):
                    yield rows[first : first + count]
                del rows, content  # before there are the next
            file.seek(origin + self.num_bytes)
            if file.read(1):
                raise self._is_longer()

    def _lay(self, content: bytearray, shape: tuple[int, ...]) -> NDArray[Any]:
        if self.dtype.hasobject:
            raise ValueError("pickled objects, which need allow_pickle=True")
        order = "F" if self._is_by_columns else "C"
        try:
            return np.ndarray(shape, self.dtype, buffer=content, order=order)
        except (TypeError, OverflowError) as error:  # sizes that no array can have
            raise ValueError(f"{self}: {error}") from error

    def _check_end(self) -> None:
        # Which has zipfile compare the checksum, too.
        if self._file.read(1):
            raise self._is_longer()

    def _is_longer(self) -> ValueError:
        return ValueError(f"more than {self.num_bytes} bytes of {self}")


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, whether elements lie by columns, and dtype."""
    version = np.lib.format.read_magic(io.BytesIO(_read_bytes(file, _MAGIC_BYTES)))
    is_first = version == (1, 0)
    length_field = _read_bytes(file, 2 if is_first else 4)
    length = int.from_bytes(length_field, "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header = io.BytesIO(length_field + _read_bytes(file, length))
    parse = (
        np.lib.format.read_array_header_1_0
        if is_first
        else np.lib.format.read_array_header_2_0
    )
    try:
        with _PARSING:
            shape, by_columns, dtype = parse(header)
    except Exception as error:  # numpy lets through what Python's own parser raises
        raise ValueError(f"no header of numpy's format: {error}") from error
    if any(size < 0 for size in shape) or dtype.subdtype is not None:
        raise ValueError(f"the shape {shape} of {dtype}")
    return shape, by_columns, dtype


def _read_bytes(file: IO[bytes], count: int) -> bytearray:
    content = bytearray()
    while len(content) < count:
        step = file.read(min(count - len(content), _STEP_BYTES))
        if not step:
            raise ValueError(f"{len(content)} bytes of {count}: it is cut short")
        content += step
    return content


def read_member(archive: zipfile.ZipFile, member: str) -> NDArray[Any]:
    """Read an array of an archive; nothing is unpickled.

    Args:
        archive: opened to read.
        member: the array's whole name in it, as `x.npy`.

    Raises:
        One of DAMAGES: the archive has no such member, or it is not an array, whole.
    """
    with archive.open(member) as file:
        return ArrayReader(file, archive.getinfo(member).file_size).read()

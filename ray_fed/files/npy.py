"""Arrays in numpy's own format, whose headers one thread reads at a time.

numpy parses a header as a Python literal. Before CPython 3.11.8, all threads count the
depth of what they parse together: two at once can end in a SystemError, where the
garbage collector lets the other one run (https://github.com/python/cpython/issues/106905).
"""

import io
import lzma
import math
import threading
import zipfile
import zlib
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
"""What zipfile, numpy and json raise for content that they cannot read."""

_PARSING = threading.Lock()
_MAGIC_BYTES = 8
_MAX_HEADER_BYTES = 10_000
"""What numpy reads of a header at most."""

_STEP_BYTES = 2**20
"""Read at a time, so that memory follows what is there and not what a header claims."""


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the header of an array, and no more.

    Args:
        file: opened to read bytes, where the array begins.

    Returns:
        The array's shape and dtype; object dtype where its elements were pickled.

    Raises:
        ValueError: this is no array in numpy's format.
    """
    shape, _, dtype = _read_header(file)
    return shape, dtype


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


def read_array(file: IO[bytes], num_bytes: int | None = None) -> NDArray[Any]:
    """Read an array; nothing is unpickled.

    Args:
        file: opened to read bytes, where the array begins and nothing follows it.
        num_bytes: of the array with its header, where that is known: compared with what
            the header claims before the elements are read.

    Raises:
        ValueError: this is no array in numpy's format, it is shorter or longer than its
            header claims, or its elements were pickled.
    """
    start = file.tell()
    shape, by_columns, dtype = _read_header(file)
    if dtype.hasobject:
        raise ValueError("pickled objects, which need allow_pickle=True")
    claimed = math.prod(shape) * dtype.itemsize
    found = claimed if num_bytes is None else num_bytes - (file.tell() - start)
    if found != claimed:
        raise ValueError(f"{found} bytes for {claimed} of the shape {shape} of {dtype}")
    content = _read_bytes(file, claimed)
    if file.read(1):
        raise ValueError(f"more than {claimed} bytes of the shape {shape} of {dtype}")
    order = "F" if by_columns else "C"
    try:
        return np.ndarray(shape, dtype, buffer=content, order=order)
    except (TypeError, OverflowError) as error:  # sizes that no array can have
        raise ValueError(f"the shape {shape} of {dtype}: {error}") from error


def read_member(archive: zipfile.ZipFile, member: str) -> NDArray[Any]:
    """Read an array of an archive; nothing is unpickled.

    Args:
        archive: opened to read.
        member: the array's whole name in it, as `x.npy`.

    Raises:
        One of DAMAGES: the archive has no such member, or it is not an array, whole.
    """
    with archive.open(member) as file:
        return read_array(file, archive.getinfo(member).file_size)

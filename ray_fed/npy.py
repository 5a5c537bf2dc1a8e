"""Arrays in numpy's own format, whose headers one thread reads at a time.

numpy parses a header as a Python literal. Before CPython 3.11.8, all threads count the
depth of what they parse together: two at once can end in a SystemError, where the
garbage collector lets the other one run (https://github.com/python/cpython/issues/106905).
"""

import io
import threading
import zipfile
import zlib
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

DAMAGES = (
    zipfile.BadZipFile,
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


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the header of an array, and no more.

    Args:
        file: opened to read bytes, where the array begins.

    Returns:
        The array's shape and dtype; object dtype where its elements were pickled.

    Raises:
        ValueError: this is no array in numpy's format.
    """
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    with _PARSING:
        shape, _, dtype = read(file)
    return shape, dtype


def read_array(file: IO[bytes]) -> NDArray[Any]:
    """Read an array; nothing is unpickled.

    Args:
        file: opened to read bytes, where the array begins and nothing follows it.

    Raises:
        ValueError: this is no array in numpy's format, it is cut short, or its elements
            were pickled.
    """
    content = io.BytesIO(file.read())  # from wherever it lies: no thread waits for that
    with _PARSING:
        return np.lib.format.read_array(content, allow_pickle=False)


def read_member(archive: zipfile.ZipFile, member: str) -> NDArray[Any]:
    """Read an array of an archive; nothing is unpickled.

    Args:
        archive: opened to read.
        member: the array's whole name in it, as `x.npy`.

    Raises:
        One of DAMAGES: the archive has no such member, or it is not an array, whole.
    """
    with archive.open(member) as file:
        return read_array(file)

"""Rows of clients in plain files, one client's behind the other's: read exactly.

    fixed shape               values: a row has a fixed number of them
    leading size unknown      splits i64[rows + 1], counted in values; values
    strings, in both          offsets i64[values + 1], counted in bytes; bytes
    behind all tensors        ends i64[clients + 1], counted in rows; failures

The files have no names: they vanish with the last process that holds them open.

Files without names that the processes of one machine share: made by one of them.

    <temporary folder>/ray_fed-<user>/<name>     who has them open, and as what

A process that comes later opens them by way of `/proc`; where that is not to be, it
makes its own. The kernel frees them when the last process is gone, however it ended:
what may stay behind is a line of text, which the next process to make files removes.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import pathlib
import tempfile
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import IO, Any, Self, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.files.features import Leaf
from ray_fed.values import read_limits, tensor_structures
from ray_fed.values.columnar_sequence import Column, ColumnarSequence

_POLL_S = 0.02

Opened: TypeAlias = list[int]
"""Descriptors of files, open for reading."""


def share(name: str, make: Callable[[], Opened]) -> Opened:
    """Return files of a name, made by this process if no other one has them.

    Args:
        name: of letters and digits; decides what is in the files.
        make: returns the files, which must stay open for others to come.

    Raises:
        ClusterError: nobody waits for them any more.
    """
    path = _folder() / name
    with _locked(path) as register:
        found = _open_shared(register.read())
        if found is not None:
            return found
        register.truncate(0)
        _sweep(path.parent)
        made = make()
        json.dump({"process": os.getpid(), "files": _describe(made)}, register)
        register.flush()
        return made


def forget(name: str) -> None:
    """Let no other process of this machine find the files any more."""
    (_place() / name).unlink(missing_ok=True)


def _place() -> pathlib.Path:
    return pathlib.Path(tempfile.gettempdir()) / f"ray_fed-{os.getuid()}"


def _folder() -> pathlib.Path:
    folder = _place()
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise errors.ResourceError(
            f"Expected the folder `{folder}` to be this user's, found another owner:"
            " remove it, or set TMPDIR."
        )
    return folder


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Generator[Any]:
    """Open a file that one process at a time has, for as long as it lives."""
    with path.open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                read_limits.check()
                time.sleep(_POLL_S)
        file.seek(0)
        yield file


def _describe(files: Sequence[int]) -> list[list[int]]:
    found = [(file, os.fstat(file)) for file in files]
    return [[file, status.st_dev, status.st_ino] for file, status in found]


def _open_shared(register: str) -> Opened | None:
    """Return the files that a register names, where its process still has them."""
    try:
        said = json.loads(register)
    except json.JSONDecodeError:  # nobody made them, or died while it wrote
        return None
    opened: Opened = []
    try:
        for number, device, inode in said["files"]:
            file = os.open(f"/proc/{said['process']}/fd/{number}", os.O_RDONLY)
            opened.append(file)
            status = os.fstat(file)
            if (status.st_dev, status.st_ino) != (device, inode):
                raise FileNotFoundError
    except OSError:
        for file in opened:
            os.close(file)
        return None
    return opened


def _sweep(folder: pathlib.Path) -> None:
    """Remove what processes left behind that are gone."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError, ValueError, KeyError):
            said = json.loads(path.read_text())
            if not pathlib.Path(f"/proc/{said['process']}").exists():
                path.unlink()


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

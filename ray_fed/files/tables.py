"""Tables in files as columns of numpy arrays: parquet, arrow, npz and npy.

A file is opened and its schema read first; rows follow in chunks of bounded size, when
asked for: at least one row, and of arrow and feather a record batch is in memory.
Strings are objects of bytes, as everywhere in plain values.

Arrays in numpy's own format, whose headers one thread reads at a time.

numpy parses a header as a Python literal. Before CPython 3.11.8, all threads count the
depth of what they parse together: two at once can end in a SystemError, where the
garbage collector lets the other one run (https://github.com/python/cpython/issues/106905).
"""

import contextlib
import dataclasses
import io
import itertools
import lzma
import math
import shutil
import threading
import zipfile
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import IO, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.files.parquet as parquet
from ray_fed.files import arrow_types, opening
from ray_fed.files.laid_columns import open_unnamed
from ray_fed.files.opening import DataFile
from ray_fed.values.columnar_sequence import Dims

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


Cells: TypeAlias = Any
"""One value a row: an array whose first dimension is rows, or a list of arrays."""

CHUNK_ROWS = 4096
"""The most rows in memory at a time, of parquet and arrow."""

CHUNK_BYTES = 4 * 2**20
"""Rows in memory at a time, of a sequence that is read as it goes."""

_NPY = ".npy"  # how a member of an npz file ends


@dataclasses.dataclass(frozen=True)
class ColumnSpec:
    """What a file says of a column before its rows are read.

    Attributes:
        dtype: of the cells; object for strings; None for what no tensor holds.
        shape: rows first, None where unknown.
        is_flat: cells are lists, to be laid in the declared shape in row-major order.
        label: what the file calls the column's type.
    """

    dtype: np.dtype[Any] | None
    shape: Dims
    is_flat: bool
    label: str


class Table(Protocol):
    """A file of columns."""

    @property
    def specs(self) -> Mapping[str, ColumnSpec]:
        """What the file says of each column, by name."""
        ...

    def count_bytes(self, names: Sequence[str]) -> int:
        """Return about how many bytes the cells of columns take; 0: not known."""
        ...

    def read(self, names: Sequence[str], max_bytes: float) -> Iterator[list[Cells]]:
        """Open the file anew and yield chunks: the cells of each column named.

        Args:
            names: of the columns.
            max_bytes: of a chunk; infinite: columns may have different numbers of rows.
        """
        ...


class NpzTable:
    """Arrays of an npz file; the first dimension is rows."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        with self._archive() as archive:
            members = [name for name in archive.namelist() if name.endswith(_NPY)]
            names = [member.removesuffix(_NPY) for member in members]
            self.specs = {name: self._spec(archive, name) for name in names}
            self._sizes = {n: archive.getinfo(f"{n}{_NPY}").file_size for n in names}

    def count_bytes(self, names: Sequence[str]) -> int:
        """Return how many bytes the arrays take."""
        return sum(self._sizes[name] for name in names)

    def read(self, names: Sequence[str], max_bytes: float) -> Iterator[list[Cells]]:
        """Yield rows of the arrays named."""
        with self._archive() as archive, contextlib.ExitStack() as stack:
            opened = [
                stack.enter_context(archive.open(f"{name}{_NPY}")) for name in names
            ]
            arrays = [
                ArrayReader(file, self._sizes[name])
                for file, name in zip(opened, names, strict=True)
            ]
            yield from _read_arrays(arrays, max_bytes)

    @contextlib.contextmanager
    def _archive(self) -> Generator[zipfile.ZipFile]:
        with self._file.open() as opened, _numpy_errors(self._file):
            yield zipfile.ZipFile(opened)

    def _spec(self, archive: zipfile.ZipFile, name: str) -> ColumnSpec:
        with archive.open(f"{name}{_NPY}") as array:
            return _npy_spec(self._file, ArrayReader(array), name)


class NpyTable:
    """The one array of an npy file, as a column without a name of its own."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        with file.open() as opened, _numpy_errors(file):
            array = ArrayReader(opened)
            self.specs = {"array": _npy_spec(file, array, "array")}
            self._num_bytes = array.num_bytes

    def count_bytes(self, names: Sequence[str]) -> int:
        """Return how many bytes the array takes."""
        del names
        return self._num_bytes

    def read(self, names: Sequence[str], max_bytes: float) -> Iterator[list[Cells]]:
        """Yield rows of the array."""
        with self._file.open() as opened, _numpy_errors(self._file):
            for (cells,) in _read_arrays([ArrayReader(opened)], max_bytes):
                yield [cells for _ in names]


def _read_arrays(
    arrays: Sequence[ArrayReader], max_bytes: float
) -> Iterator[list[Cells]]:
    if math.isinf(max_bytes):
        yield [_without_unicode(array.read()) for array in arrays]
        return
    row_bytes = sum(array.row_bytes for array in arrays)
    count = max(1, int(max_bytes) // max(1, row_bytes))
    runs = zip(*(array.read_rows(count) for array in arrays), strict=True)
    yield from (list(map(_without_unicode, rows)) for rows in runs)


@contextlib.contextmanager
def _numpy_errors(file: DataFile) -> Generator[None]:
    """Say which file it is that numpy's formats are not read from."""
    try:
        yield
    except errors.ValueMismatchError:
        raise
    except DAMAGES as error:
        found = f"{type(error).__name__} ({error})"
        raise file.mismatch("arrays of numpy", found) from error


def _npy_spec(file: DataFile, array: ArrayReader, name: str) -> ColumnSpec:
    shape, dtype = array.shape, array.dtype
    if dtype.kind == "O":
        raise file.mismatch(f"numbers or strings as `{name}`", "pickled objects")
    is_string = dtype.kind in "US"
    dtype = np.dtype(object) if is_string else dtype
    return ColumnSpec(dtype, shape, is_flat=False, label=f"{dtype}{list(shape)}")


def _without_unicode(array: Any) -> Any:
    if array.dtype.kind not in "US":
        return array
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    return array.astype(object)


@contextlib.contextmanager
def _arrow_errors(file: DataFile) -> Generator[None]:
    """Say which file it is that arrow does not read."""
    pyarrow: Any = opening.import_extra("pyarrow")
    try:
        yield
    except errors.RayFedError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise file.damaged(f"what {file.suffix} files do not have ({error})") from error


class ArrowTable:
    """Record batches of a parquet, arrow or feather file.

    Elements of struct columns are columns, named with dots.
    """

    def __init__(self, file: DataFile, *, is_parquet: bool) -> None:
        self._file = file
        self._is_parquet = is_parquet
        with file.open() as opened, _arrow_errors(file):
            source = self._source(opened)
            schema = source.schema_arrow if is_parquet else source.schema
            pyarrow: Any = opening.import_extra("pyarrow")
            empty = _flat_table(pyarrow.Table.from_batches([], schema))
            self._metadata = source.metadata if is_parquet else None
        self.specs = {field.name: _arrow_spec(field.type) for field in empty.schema}

    def count_bytes(self, names: Sequence[str]) -> int:
        """Return how many bytes the columns of a parquet file take, by its footer."""
        if self._metadata is None:
            return 0
        return int(parquet.count_group_bytes(self._metadata, names).sum())

    def _source(self, opened: Any) -> Any:
        if self._is_parquet:
            return parquet.open_bounded(opened)
        return opening.import_extra("pyarrow.ipc").open_file(opened)

    def _batches(
        self, source: Any, names: Sequence[str], max_bytes: float
    ) -> Iterator[Any]:
        if self._is_parquet:
            row_bytes = parquet.count_row_bytes(source.metadata, names)
            count = max(1, int(min(CHUNK_ROWS, max_bytes // row_bytes)))
            yield from source.iter_batches(count, columns=list(names))
            return
        for index in range(source.num_record_batches):
            batch = source.get_batch(index)
            batch.validate(full=True)  # a damaged offset would be followed
            row_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
            count = max(1, int(min(CHUNK_ROWS, max_bytes // row_bytes)))
            for start in range(0, batch.num_rows, count):
                yield batch.slice(start, count)

    def read(self, names: Sequence[str], max_bytes: float) -> Iterator[list[Cells]]:
        """Yield the columns named of some rows."""
        pyarrow: Any = opening.import_extra("pyarrow")
        with self._file.open() as opened, _arrow_errors(self._file):
            for batch in self._batches(self._source(opened), names, max_bytes):
                table = _flat_table(pyarrow.Table.from_batches([batch]))
                columns = [table.column(name).combine_chunks() for name in names]
                yield [
                    self._cells(column, name)
                    for column, name in zip(columns, names, strict=True)
                ]

    def _cells(self, array: Any, name: str) -> Cells:
        """Return an arrow array as one value a row."""
        array = arrow_types.decoded(array)
        if array.null_count:
            raise self._file.mismatch(f"a value in every row of `{name}`", "nulls")
        if not arrow_types.is_list(array.type):
            return arrow_types.to_numpy(array)
        values = self._cells(array.flatten(), name)
        size = getattr(array.type, "list_size", None)
        if size is not None:
            return values.reshape(len(array), size)
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        splits = np.cumsum([0, *lengths], dtype=np.int64)
        return [values[a:b] for a, b in itertools.pairwise(splits)]


def _flat_table(table: Any) -> Any:
    """Return a table whose struct columns are taken apart, at all depths."""
    while any(
        hasattr(field.type, "num_fields") and _is_struct(field.type)
        for field in table.schema
    ):
        table = table.flatten()
    return table


def _is_struct(arrow_type: Any) -> bool:
    return opening.import_extra("pyarrow.types").is_struct(arrow_type)


def _arrow_spec(arrow_type: Any) -> ColumnSpec:
    label, arrow_type = str(arrow_type), arrow_types.value_type(arrow_type)
    if not arrow_types.is_list(arrow_type):
        dtype = arrow_types.dtype_of(arrow_type)
        return ColumnSpec(dtype, (None,), is_flat=False, label=label)
    size = getattr(arrow_type, "list_size", None)
    dtype = arrow_types.dtype_of(arrow_type.value_type)
    return ColumnSpec(dtype, (None, size), is_flat=True, label=label)

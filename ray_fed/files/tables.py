"""Tables in files as columns of numpy arrays: parquet, arrow, npz and npy.

A file is opened and its schema read first; rows follow in chunks of bounded size, when
asked for: at least one row, and of arrow and feather a record batch is in memory.
Strings are objects of bytes, as everywhere in plain values.
"""

import contextlib
import dataclasses
import itertools
import math
import zipfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

import ray_fed.errors as errors
from ray_fed.files import arrow_types, npy, opening, parquet_files
from ray_fed.files.opening import DataFile
from ray_fed.values.columnar_sequence import Dims

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
                npy.ArrayReader(file, self._sizes[name])
                for file, name in zip(opened, names, strict=True)
            ]
            yield from _read_arrays(arrays, max_bytes)

    @contextlib.contextmanager
    def _archive(self) -> Generator[zipfile.ZipFile]:
        with self._file.open() as opened, _numpy_errors(self._file):
            yield zipfile.ZipFile(opened)

    def _spec(self, archive: zipfile.ZipFile, name: str) -> ColumnSpec:
        with archive.open(f"{name}{_NPY}") as array:
            return _npy_spec(self._file, npy.ArrayReader(array), name)


class NpyTable:
    """The one array of an npy file, as a column without a name of its own."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        with file.open() as opened, _numpy_errors(file):
            array = npy.ArrayReader(opened)
            self.specs = {"array": _npy_spec(file, array, "array")}
            self._num_bytes = array.num_bytes

    def count_bytes(self, names: Sequence[str]) -> int:
        """Return how many bytes the array takes."""
        del names
        return self._num_bytes

    def read(self, names: Sequence[str], max_bytes: float) -> Iterator[list[Cells]]:
        """Yield rows of the array."""
        with self._file.open() as opened, _numpy_errors(self._file):
            for (cells,) in _read_arrays([npy.ArrayReader(opened)], max_bytes):
                yield [cells for _ in names]


def _read_arrays(
    arrays: Sequence[npy.ArrayReader], max_bytes: float
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
    except npy.DAMAGES as error:
        found = f"{type(error).__name__} ({error})"
        raise file.mismatch("arrays of numpy", found) from error


def _npy_spec(file: DataFile, array: npy.ArrayReader, name: str) -> ColumnSpec:
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
        return int(parquet_files.count_group_bytes(self._metadata, names).sum())

    def _source(self, opened: Any) -> Any:
        if self._is_parquet:
            return parquet_files.open_bounded(opened)
        return opening.import_extra("pyarrow.ipc").open_file(opened)

    def _batches(
        self, source: Any, names: Sequence[str], max_bytes: float
    ) -> Iterator[Any]:
        if self._is_parquet:
            row_bytes = parquet_files.count_row_bytes(source.metadata, names)
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

"""Tables in files as columns of numpy arrays: of arrow's formats, npz and npy.

A file is opened and its schema read first; rows follow in chunks of bounded size, when
asked for: at least one row, and of arrow and feather a record batch is in memory.
Strings are objects of bytes, as everywhere in plain values.
"""

import contextlib
import dataclasses
import itertools
import lzma
import math
import os
import shutil
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import IO, Any, TypeAlias

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
import ray_fed.files.parquet as parquet
from ray_fed.files import arrow_types, opening
from ray_fed.files.opening import DataFile
from ray_fed.values.columnar_sequence import Dims
from ray_fed.values.tensor_structures import storage_dtype

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
"""numpy parses a header as a Python literal. Before CPython 3.11.8, all threads count
the depth of what they parse together: two at once can end in a SystemError, where the
garbage collector lets the other one run (github.com/python/cpython/issues/106905)."""

_STEP_BYTES = 2**20


class ArrayReader:
    """An array in a file, whose rows are read when asked for; nothing is unpickled.

    Args:
        file: opened to read bytes, where the array begins and nothing follows it; of
            this process alone, and read to its end before it is closed.
        num_bytes: of the array with its header; None: the file can say it.

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
        """Return the array.

        Raises:
            ValueError: it is damaged, or its elements were pickled.
        """
        (found,) = self._read_rows([math.prod(self.shape[:1])], self.shape)
        return found

    def read_rows(self, count: int) -> Iterator[NDArray[Any]]:
        """Yield the rows, so many at a time; see `read`."""
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
        self._file.read(1)  # has zipfile compare the checksum, too

    def _read_across(self, count: int) -> Iterator[NDArray[Any]]:
        """Yield rows of an array that lies by columns, of which each read has a piece.

        Elements of an archive are copied to disk: it is not read in another order.
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
    """Return shape, whether elements lie by columns, and dtype."""
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


class NumpyTable:
    """Arrays of an npz file, or the one of an npy file; the first dimension is rows.

    Attributes:
        specs: what the file says of each column, by name.
    """

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._is_packed = file.suffix != _NPY
        with self._arrays(None) as arrays:
            self.specs = {name: self._spec(name, a) for name, a in arrays.items()}
            self._sizes = {name: array.num_bytes for name, array in arrays.items()}

    def count_bytes(self, names: Sequence[str]) -> int:
        """Return how many bytes the arrays take."""
        return sum(self._sizes[name] for name in names)

    def read(self, names: Sequence[str], max_bytes: float) -> Iterator[list[Cells]]:
        """Open the file anew and yield chunks: the cells of each column named.

        Args:
            names: of the columns.
            max_bytes: of a chunk; infinite: columns may have different numbers of rows.
        """
        with self._arrays(names) as found:
            arrays = [found[name] for name in names]
            if math.isinf(max_bytes):
                yield [_without_unicode(array.read()) for array in arrays]
                return
            row_bytes = sum(array.row_bytes for array in arrays)
            count = max(1, int(max_bytes) // max(1, row_bytes))
            runs = zip(*(array.read_rows(count) for array in arrays), strict=True)
            yield from (list(map(_without_unicode, rows)) for rows in runs)

    @contextlib.contextmanager
    def _arrays(self, names: Sequence[str] | None) -> Generator[dict[str, ArrayReader]]:
        """Open arrays, None: all; say which file it is that is not read."""
        try:
            with self._file.open() as opened, contextlib.ExitStack() as stack:
                if not self._is_packed:
                    yield {"array": ArrayReader(opened)}
                    return
                archive = zipfile.ZipFile(opened)
                if names is None:
                    found = [n for n in archive.namelist() if n.endswith(_NPY)]
                    names = [name.removesuffix(_NPY) for name in found]
                yield {
                    name: ArrayReader(
                        stack.enter_context(archive.open(f"{name}{_NPY}")),
                        archive.getinfo(f"{name}{_NPY}").file_size,
                    )
                    for name in names
                }
        except errors.RayFedError:
            raise
        except DAMAGES as error:
            found = f"{type(error).__name__} ({error})"
            raise self._file.mismatch("arrays of numpy", found) from error

    def _spec(self, name: str, array: ArrayReader) -> ColumnSpec:
        shape, dtype = array.shape, array.dtype
        if dtype.kind == "O":
            raise self._file.mismatch(
                f"numbers or strings as `{name}`", "pickled objects"
            )
        dtype = np.dtype(object) if dtype.kind in "US" else dtype
        return ColumnSpec(dtype, shape, is_flat=False, label=f"{dtype}{list(shape)}")


def _without_unicode(array: Any) -> Any:
    if array.dtype.kind not in "US":
        return array
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    return array.astype(object)


class ArrowTable:
    """Rows of a parquet, arrow, feather, CSV or JSON lines file.

    Elements of struct columns are columns, named with dots. Text is read as the types
    that are declared of its columns.

    Args:
        file: to read.
        kind: what it is.
        leaves: name and type of each declared column; "" is the only column.
    """

    def __init__(
        self, file: DataFile, kind: parquet.Format, leaves: Mapping[str, fl.TensorType]
    ) -> None:
        self._file = file
        self._kind: parquet.Format = kind
        with self._reading() as opened:
            schema = parquet.read_schema(opened, kind)
            if kind in ("csv", "json"):
                schema = _declared_schema(schema, leaves)
            self._schema = schema
            empty = _flat_table(schema.empty_table())
        self.specs = {field.name: _arrow_spec(field.type) for field in empty.schema}

    def count_bytes(self, names: Sequence[str]) -> int:
        """Return about how many bytes the columns take; 0: not known."""
        if self._kind != "parquet":
            return 0
        with self._reading() as opened, parquet.open_bounded(opened) as found:
            return int(parquet.count_group_bytes(found.metadata, names).sum())

    def read(self, names: Sequence[str], max_bytes: float) -> Iterator[list[Cells]]:
        """Open the file anew and yield chunks; see `NumpyTable`."""
        pyarrow: Any = opening.import_extra("pyarrow")
        is_parquet = self._kind == "parquet"
        # Other formats than parquet know no parts of structs.
        tops = [n if n in self._schema.names else n.split(".")[0] for n in names]
        with self._reading() as opened:
            batches = parquet.iterate(
                parquet.open_bounded(opened) if is_parquet else opened,
                self._kind,
                names if is_parquet else list(dict.fromkeys(tops)),
                min(max_bytes, _WHOLE_BYTES),
                schema=self._schema,
            )
            for batch in batches:
                table = _flat_table(pyarrow.Table.from_batches([batch]))
                yield [
                    self._cells(table.column(name).combine_chunks(), name)
                    for name in names
                ]

    @contextlib.contextmanager
    def _reading(self) -> Generator[Any]:
        """Open the file; say which one it is that arrow does not read."""
        pyarrow: Any = opening.import_extra("pyarrow")
        try:
            with self._file.open() as opened:
                yield opened
        except errors.RayFedError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            found = f"what {self._file.suffix} files do not have ({error})"
            raise self._file.damaged(found) from error

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


Table: TypeAlias = NumpyTable | ArrowTable
"""A file of columns."""

_WHOLE_BYTES = 64 * 2**20
"""Rows of arrow that are read at once, where all are wanted."""


def _declared_schema(schema: Any, leaves: Mapping[str, fl.TensorType]) -> Any:
    """Return the schema of text with the types that are declared of its columns."""
    pyarrow: Any = opening.import_extra("pyarrow")
    for index, field in enumerate(schema):
        leaf = leaves.get(field.name, leaves.get("") if len(schema) == 1 else None)
        dtype = None if leaf is None else storage_dtype(leaf)
        if dtype is None:
            continue
        is_list = arrow_types.is_list(field.type)
        inside = (
            pyarrow.string() if dtype.hasobject else pyarrow.from_numpy_dtype(dtype)
        )
        wanted = pyarrow.list_(inside) if is_list else inside
        schema = schema.set(index, pyarrow.field(field.name, wanted))
    return schema


def _flat_table(table: Any) -> Any:
    """Return a table whose struct columns are taken apart, at all depths."""
    types = opening.import_extra("pyarrow.types")
    while any(types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return table


def _arrow_spec(arrow_type: Any) -> ColumnSpec:
    label, arrow_type = str(arrow_type), arrow_types.value_type(arrow_type)
    if not arrow_types.is_list(arrow_type):
        dtype = arrow_types.dtype_of(arrow_type)
        return ColumnSpec(dtype, (None,), is_flat=False, label=label)
    size = getattr(arrow_type, "list_size", None)
    dtype = arrow_types.dtype_of(arrow_type.value_type)
    return ColumnSpec(dtype, (None, size), is_flat=True, label=label)

"""Reads tables from Arrow's file formats, npz and npy, as columns of NumPy arrays.

The schema of a file is read first. Rows follow in chunks of bounded size, of at least
one row. Strings become object arrays of bytes.
"""

import contextlib
import dataclasses
import itertools
import math
import zipfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import federated_language as fl
import numpy as np

import ray_fed.errors as errors
from ray_fed.files import arrow_types, npy
from ray_fed.files.formats import Format, Wanted
from ray_fed.files.opening import DataFile
from ray_fed.imports import pyarrow
from ray_fed.values.columnar_sequence import Dims
from ray_fed.values.tensor_structures import storage_dtype

Cells: TypeAlias = Any
"""One value per row: an array whose first dimension is rows, or a list of arrays."""

CHUNK_BYTES = 4 * 2**20
"""Bytes of the rows that are in memory at once while a sequence is read."""

_NPY = ".npy"  # how a member of an npz file ends


@dataclasses.dataclass(frozen=True)
class ColumnSpec:
    """The type of a column, from the schema of a file.

    Attributes:
        dtype: Dtype of the cells, object for strings. None if no tensor can hold them.
        shape: Shape of the column, rows first. A size is None if it is not known.
        is_flat: Whether cells are lists, which fill the declared shape in row-major
            order.
        label: Name of the column's type, for errors.
    """

    dtype: np.dtype[Any] | None
    shape: Dims
    is_flat: bool
    label: str


class NumpyTable:
    """An npz or npy file whose arrays are columns. Their first dimension is rows."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._is_packed = file.suffix != _NPY
        with self._arrays(None) as arrays:
            self.specs = {name: self._spec(name, a) for name, a in arrays.items()}
            self._sizes = {name: array.num_bytes for name, array in arrays.items()}

    def count_bytes(self, names: Sequence[str]) -> int:
        """Return how many bytes the columns `names` take in memory."""
        return sum(self._sizes[name] for name in names)

    def read(self, names: Sequence[str], max_bytes: float) -> Iterator[list[Cells]]:
        """Open the file again and yield chunks of rows: the cells of each column.

        A chunk has about `max_bytes`. If `max_bytes` is infinite, there is one chunk,
        and columns may have different numbers of rows.
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
    def _arrays(
        self, names: Sequence[str] | None
    ) -> Generator[dict[str, npy.ArrayReader]]:
        try:
            with self._file.open() as opened, contextlib.ExitStack() as stack:
                if not self._is_packed:
                    yield {"array": npy.ArrayReader(opened)}
                    return
                archive = zipfile.ZipFile(opened)
                if names is None:
                    found = [n for n in archive.namelist() if n.endswith(_NPY)]
                    names = [name.removesuffix(_NPY) for name in found]
                yield {
                    name: npy.ArrayReader(
                        stack.enter_context(archive.open(f"{name}{_NPY}")),
                        archive.getinfo(f"{name}{_NPY}").file_size,
                    )
                    for name in names
                }
        except errors.RayFedError:
            raise
        except npy.DAMAGES as error:
            found = f"{type(error).__name__} ({error})"
            raise self._file.mismatch("arrays of numpy", found) from error

    def _spec(self, name: str, array: npy.ArrayReader) -> ColumnSpec:
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
    """A file in one of the formats that Arrow reads.

    Each element of a struct column is a column, such as `user.age`. `leaves` has the
    declared types of columns by name, or of the only column by "". A text file is read
    by these types.
    """

    def __init__(
        self, file: DataFile, kind: Format, leaves: Mapping[str, fl.TensorType]
    ) -> None:
        self._file = file
        self._kind = kind
        with self._reading() as opened:
            schema = kind.look(opened).schema
            if kind.is_text:
                schema = _declared_schema(schema, leaves)
            self._schema = schema
            empty = _flat_table(schema.empty_table())
        self.specs = {field.name: _arrow_spec(field.type) for field in empty.schema}

    def count_bytes(self, names: Sequence[str]) -> int:
        """Return about how many bytes the columns `names` take in memory."""
        with self._reading() as opened:
            return self._kind.look(opened, names).num_bytes

    def read(self, names: Sequence[str], max_bytes: float) -> Iterator[list[Cells]]:
        """Open the file again and yield chunks of rows, as `NumpyTable.read` does."""
        is_parquet = self._kind.name == "parquet"
        # Other formats than parquet know no parts of structs.
        tops = [n if n in self._schema.names else n.split(".")[0] for n in names]
        with self._reading() as file, self._kind.open(file) as opened:
            columns = names if is_parquet else list(dict.fromkeys(tops))
            wanted = Wanted(columns, min(max_bytes, _WHOLE_BYTES), self._schema)
            for batch in self._kind.batches(opened, wanted):
                table = _flat_table(pyarrow.Table.from_batches([batch]))
                yield [
                    self._cells(table.column(name).combine_chunks(), name)
                    for name in names
                ]

    @contextlib.contextmanager
    def _reading(self) -> Generator[Any]:
        try:
            with self._file.open() as opened:
                yield opened
        except errors.RayFedError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            found = f"content that {self._file.suffix} files cannot have ({error})"
            raise self._file.damaged(found) from error

    def _cells(self, array: Any, name: str) -> Cells:
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

_WHOLE_BYTES = 16 * 2**20
"""Largest size of the rows that are read at once from Arrow's formats."""


def _declared_schema(schema: Any, leaves: Mapping[str, fl.TensorType]) -> Any:
    """Return the schema of a text file with the declared types of its columns."""
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
    """Return a table with a column for each element of structs, at all depths."""
    while any(pyarrow.types.is_struct(field.type) for field in table.schema):
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

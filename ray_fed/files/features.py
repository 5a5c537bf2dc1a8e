"""Which columns of a table are inputs and labels, and their types.

    x="d"                   one column                         f32[] in each row
    x=["d", "dept"]         columns of one dtype, stacked      f32[2] in each row
    x={"user": "s", ...}    named inputs                       <user=...> in each row

The federated type follows from the table's schema. If no tensor can hold a column, an
error names the column at once. If a cell is missing, an error names the column and the
client when the cell is read. Cells become NumPy arrays, without a copy if possible.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, Union, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.files import arrow_types
from ray_fed.files.arrow_types import is_list, is_text, to_numpy
from ray_fed.imports import pyarrow
from ray_fed.values.columnar_sequence import Column, ColumnarSequence, Dims

ColumnNames: TypeAlias = Union[str, Sequence[str], Mapping[str, "ColumnNames"]]  # noqa: UP007 (it names itself)
"""A column's name, a list of columns to stack, or a dictionary of these by input."""

Missing: TypeAlias = Literal["refuse", "drop", "keep"]
"""How rows with a null or a NaN are treated."""

MISSING: tuple[Missing, ...] = ("refuse", "drop", "keep")

_KINDS = "numbers, booleans, strings, bytes, and lists of them whose length is fixed"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor of a row.

    Attributes:
        columns: Columns of the table that the tensor is made of.
        is_stacked: Whether the columns are stacked in a new dimension.
        type_signature: Type of the tensor in one row.
        shape: Shape of one cell.
        cast_to: Dtype that cells are cast to, or None without a cast.
    """

    columns: tuple[str, ...]
    is_stacked: bool
    type_signature: fl.TensorType
    shape: Dims
    cast_to: np.dtype[Any] | None


@dataclasses.dataclass(frozen=True)
class Features:
    """How rows of a table become elements of a client's sequence.

    Attributes:
        element: Type of one row, `<x=..., y=...>`.
        leaves: Tensors of a row, in the order of the type.
        missing: How rows with a null or a NaN in one of the columns are treated.
        table: Name of the table in errors.
    """

    element: fl.Type
    leaves: tuple[Leaf, ...]
    missing: Missing
    table: str

    @classmethod
    def of(
        cls,
        schema: Any,
        x: ColumnNames,
        y: ColumnNames | None,
        dtypes: Mapping[str, Any] | None,
        missing: Missing,
        table: str,
    ) -> "Features":
        """Return the features for a user's choice of columns.

        `schema` is the table's Arrow schema. Raises ConfigError for an illegal value of
        `dtypes` or `missing`, and ValueMismatchError if no tensor can hold the values
        of a column, or columns of different types are stacked.
        """
        if missing not in MISSING:
            raise errors.ConfigError(
                f"Expected `missing` to be one of {list(MISSING)}, found {missing!r}."
            )
        if cast("object", x) is None:
            raise _no_columns(x)
        casts = _read_dtypes(dtypes)
        unused = sorted(casts.keys() - {*columns_of(x), *columns_of(y)})
        if unused:
            raise errors.ConfigError(
                f"Expected `dtypes` for columns of `x` and `y`, found"
                f" {unused}{_name_columns(unused[0], x, y)}"
            )
        found = _Columns(schema, casts, table)
        leaves: list[Leaf] = []
        named = [("x", x)] if y is None else [("x", x), ("y", y)]
        members = [(name, found.type_of(names, leaves)) for name, names in named]
        element = fl.StructWithPythonType(members, dict)
        return cls(element, tuple(leaves), missing, table)

    def describe(self) -> dict[str, Any]:
        """Return the columns, their casts and `missing`, as JSON values by name."""
        leaves = [[list(one.columns), str(one.cast_to)] for one in self.leaves]
        return {"columns": leaves, "missing": self.missing}

    @property
    def columns(self) -> list[str]:
        """The columns to read, without repetitions."""
        return list(dict.fromkeys(n for leaf in self.leaves for n in leaf.columns))


def _name_columns(name: str, x: ColumnNames, y: ColumnNames | None) -> str:
    """Return advice for a key of `dtypes` that is no column, but an input or a typo."""
    groups: dict[str, Any] = {"x": x, "y": y}
    for named in (x, y):
        groups |= named if isinstance(named, Mapping) else {}
    columns = list(columns_of(groups.get(name)))
    if columns:
        return f": name the columns of `{name}`, {columns}."
    return f".{errors.suggest(name, [*columns_of(x), *columns_of(y)])}"


def _read_dtypes(given: object) -> dict[str, np.dtype[Any]]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise errors.ConfigError(
            "Expected `dtypes` as a dictionary from columns to dtypes, such as"
            f' `{{"x": np.float32}}`, found {errors.describe(given)}.'
        )
    found: dict[str, np.dtype[Any]] = {}
    for name, dtype in cast("Mapping[str, Any]", given).items():
        try:
            # numpy takes None for float64
            found[name] = np.dtype("None" if dtype is None else dtype)
        except TypeError as error:
            raise errors.ConfigError(
                f"Expected a dtype of numpy, such as `np.float32`, in `dtypes` for the"
                f" column `{name}`, found {errors.describe(dtype)}."
            ) from error
    return found


class _Columns:
    def __init__(
        self, schema: Any, casts: Mapping[str, np.dtype[Any]], table: str
    ) -> None:
        self._schema = schema
        self._casts = casts
        self._table = table

    def type_of(self, names: ColumnNames, leaves: list[Leaf]) -> fl.Type:
        """Return the type of the columns in a row, and add its tensors to `leaves`."""
        if isinstance(names, str):
            dtype, shape = self._cell(names)
            leaves.append(self._leaf((names,), dtype, shape, is_stacked=False))
        elif isinstance(names, Mapping):
            members = [(n, self.type_of(inside, leaves)) for n, inside in names.items()]
            return fl.StructWithPythonType(members, dict)
        else:
            leaves.append(self._stack(tuple(names)))
        return leaves[-1].type_signature

    def _stack(self, names: tuple[str, ...]) -> Leaf:
        cells = {name: self._cell(name) for name in names}
        if len(set(map(str, cells.values()))) != 1 or () not in {
            shape for _, shape in cells.values()
        }:
            raise self._cannot_stack(cells)
        return self._leaf(names, cells[names[0]][0], (), is_stacked=True)

    def _cannot_stack(
        self, cells: Mapping[str, tuple[np.dtype[Any], Dims]]
    ) -> Exception:
        dtypes = {name: dtype for name, (dtype, _) in cells.items()}
        shown = ", ".join(
            f"`{name}` {'str' if dtype.kind == 'O' else dtype}{list(shape or [])}"
            for name, (dtype, shape) in cells.items()
        )
        texts = [name for name, dtype in dtypes.items() if dtype.kind == "O"]
        floats = [dtype for dtype in dtypes.values() if dtype.kind == "f"]
        then = "name inputs by a dictionary."
        if texts:
            then = (
                f"name inputs by a dictionary, such as `{{{texts[0]!r}: {texts[0]!r},"
                " ...}`, and look strings up in the model"
                " (`keras.layers.StringLookup`), or make a column of numbers of them,"
                f' such as `frame["{texts[0]}"].astype("category").cat.codes`.'
            )
        elif cells and not any(shape for _, shape in cells.values()):
            widest = max(dtypes.values(), key=lambda dtype: dtype.itemsize)
            wanted = np.dtype(np.float32) if floats else widest  # as models take it
            casts = {n: wanted.name for n, dtype in dtypes.items() if dtype != wanted}
            then = f"pass `dtypes={casts}`, or {then}"
        return errors.ValueMismatchError(
            f"Expected columns of one dtype to stack, one value a row, in"
            f" {self._table}, found {shown or 'none'}: {then}"
        )

    def _leaf(
        self,
        names: tuple[str, ...],
        dtype: np.dtype[Any],
        shape: Dims,
        *,
        is_stacked: bool,
    ) -> Leaf:
        declared = np.str_ if dtype.kind == "O" else dtype.type
        whole = (len(names),) if is_stacked else shape
        of_row = fl.TensorType(declared, whole)
        return Leaf(names, is_stacked, of_row, shape, self._casts.get(names[0]))

    def _cell(self, name: str) -> tuple[np.dtype[Any], Dims]:
        inside, shape = arrow_types.cell_of(self._schema.field(name).type)
        dtype, cast = arrow_types.dtype_of(inside), self._casts.get(name)
        if dtype is None and (cast is None or not arrow_types.is_castable(inside)):
            raise errors.ValueMismatchError(
                f"Expected {_KINDS} in the column `{name}` of {self._table}, found"
                f" `{self._schema.field(name).type}`:"
                f" {arrow_types.describe_cast(name, inside)}"
            )
        if cast is None or (dtype == np.dtype(object) and cast.kind in "OUS"):
            return dtype or np.dtype(object), shape
        if cast.kind not in ("iuf" if dtype == np.dtype(object) else "biuf"):
            raise errors.ConfigError(
                f"Expected a dtype of numbers in `dtypes` for the column `{name}` of"
                f" `{inside}`, found {cast}."
            )
        return cast, shape


def check_columns(names: Sequence[str], found: Sequence[str], table: str) -> None:
    """Raise ConfigError unless a table has exactly one column of each name."""
    for name in names:
        if name not in found:
            raise missing_column(name, found, table)
        if (count := list(found).count(name)) > 1:
            raise errors.ConfigError(
                f"Expected one column `{name}` in {table}, found {count} of that name:"
                " rename all but one."
            )


def missing_column(name: str, found: Sequence[str], table: str) -> errors.ConfigError:
    """Return the error that a table has no column of a name."""
    hint = errors.suggest(name, found)
    return errors.ConfigError(
        f"Expected a column `{name}` in {table}, found {list(found)}.{hint}"
    )


def columns_of(names: ColumnNames | None) -> Iterator[str]:
    """Yield all columns in a user's `x` or `y`, or raise ConfigError."""
    if isinstance(names, str):
        yield names
    elif isinstance(names, Mapping):
        for inside in names.values():
            yield from columns_of(inside)
    elif isinstance(cast("object", names), Sequence):
        yield from names or ()
    elif names is not None:
        raise _no_columns(names)


def _no_columns(found: object) -> errors.ConfigError:
    return errors.ConfigError(
        "Expected a column, a list of columns or a dictionary of them as `x` and `y`,"
        f" found {errors.describe(found)}."
    )


def decode(features: Features, table: Any, client: object) -> ColumnarSequence:
    """Convert a client's rows from Arrow to a plain value, without a copy if possible.

    `table` is a result of `decoded_table`. Raises ValueMismatchError, which names
    `client`, if a cell does not fit its dtype, or is null or NaN and may not be.
    """
    if features.missing == "drop":
        table = table.filter(find_whole(table))
    reader = _Cells(features, table, client)
    columns = tuple(map(reader.read, features.leaves))
    return ColumnarSequence(columns, table.num_rows)


def find_whole(table: Any) -> NDArray[np.bool_]:
    """Return a mask of the rows that have no null or NaN, not even inside lists."""
    whole = np.ones(table.num_rows, np.bool_)
    for column in table.columns:
        whole &= ~_find_missing(column)
    return whole


def _find_missing(column: Any) -> NDArray[np.bool_]:
    array = _combined(column)
    is_float = pyarrow.types.is_floating(array.type)
    missing = np.array(pyarrow.compute.is_null(array, nan_is_null=is_float))
    if is_list(array.type):
        inside = _find_missing(array.flatten())
        missing[pyarrow.compute.list_parent_indices(array).to_numpy()[inside]] = True
    return missing


def _combined(column: Any) -> Any:
    array = column
    if isinstance(array, pyarrow.ChunkedArray):
        is_one = array.num_chunks == 1  # `combine_chunks` would copy it
        array = array.chunk(0) if is_one else array.combine_chunks()
    return array.storage if hasattr(array, "storage") else array


def _find_changed(before: NDArray[Any], after: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the values that a cast changed without an error of arrow.

    Arrow casts floats beyond the dtype's range to infinity, and all but 0 to True.
    """
    match after.dtype.kind:
        case "f":
            return np.isinf(after) & ~np.isinf(before)
        case "b":
            return after != before
        case _:
            return np.zeros(len(after), np.bool_)


class _Cells:
    def __init__(self, features: Features, table: Any, client: object) -> None:
        self._features = features
        self._table = table
        self._client = client

    def read(self, leaf: Leaf) -> Column:
        if leaf.shape == (None,):
            return self._ragged(leaf.columns[0], leaf)
        arrays = [self._fixed(name, leaf) for name in leaf.columns]
        return Column(np.stack(arrays, axis=1) if leaf.is_stacked else arrays[0])

    def _fixed(self, name: str, leaf: Leaf) -> NDArray[Any]:
        array = _combined(self._table.column(name))
        while is_list(array.type):
            self._check_nulls(name, array)
            array = array.flatten()
        values = self._values(name, array, leaf)
        return values.reshape(self._table.num_rows, *(leaf.shape or ()))

    def _ragged(self, name: str, leaf: Leaf) -> Column:
        array = _combined(self._table.column(name))
        self._check_nulls(name, array)
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return Column(self._values(name, array.flatten(), leaf), splits)

    def _check_nulls(self, name: str, array: Any) -> None:
        if not (count := array.null_count):
            return
        then = 'fill them, or leave such rows out with `missing="drop"`'
        if is_text(array.type):
            then += ', or take each as `""` with `missing="keep"`'
        elif not is_list(array.type):
            # Whole numbers of a date's unit have no room in float32.
            is_time = pyarrow.types.is_temporal(array.type)
            dtype = "np.float64" if is_time else "np.float32"
            then += (
                f', or as NaN with `dtypes={{"{name}": {dtype}}}` and `missing="keep"`'
            )
        raise self._mismatch(name, f"{count} null{'s' * (count > 1)}", f"{then}.")

    def _values(self, name: str, array: Any, leaf: Leaf) -> NDArray[Any]:
        keeps = self._features.missing == "keep"
        if leaf.cast_to is not None and leaf.cast_to.kind in "biuf":
            array = self._cast(name, array, leaf.cast_to)
        elif keeps and is_text(array.type):
            array = array.cast(pyarrow.large_binary()).fill_null(b"")
        if not (keeps and pyarrow.types.is_floating(array.type)):
            self._check_nulls(name, array)
        values = to_numpy(array)
        if values.dtype.kind == "f" and not keeps:
            self._check_nan(name, values)
        return values

    def _cast(self, name: str, array: Any, dtype: np.dtype[Any]) -> Any:
        """Cast numbers, text or times to `dtype`. Times become counts of their unit."""
        then = f"name a dtype other than {dtype}."
        if is_text(array.type):
            then = (
                "leave it out of `dtypes` and look strings up in the model"
                " (`keras.layers.StringLookup`), or make a column of numbers of them,"
                f' such as `frame["{name}"].astype("category").cat.codes`.'
            )
        if pyarrow.types.is_temporal(array.type):
            is_wide = array.type.bit_width == pyarrow.int64().bit_width
            array = array.view(pyarrow.int64() if is_wide else pyarrow.int32())
        try:
            cast = array.cast(pyarrow.from_numpy_dtype(dtype))
            whole = array.cast(pyarrow.float64(), safe=False)
        except pyarrow.ArrowException as error:
            raise self._mismatch(name, f"`{error}`", then) from error
        before = whole.to_numpy(zero_copy_only=False)
        changed = before[_find_changed(before, cast.to_numpy(zero_copy_only=False))]
        if len(changed):
            found = f"{len(changed)} that {dtype} cannot hold, such as {changed[0]}"
            raise self._mismatch(name, found, then)
        return cast

    def _check_nan(self, name: str, values: NDArray[Any]) -> None:
        count = int(np.isnan(values).sum())
        if count:
            raise self._mismatch(
                name,
                f"{count} values that are not a number (NaN)",
                'fill them, leave such rows out with `missing="drop"`, or let them'
                ' through with `missing="keep"`: weights trained on them are NaN.',
            )

    def _mismatch(self, column: str, found: str, then: str) -> Exception:
        return errors.ValueMismatchError(
            f"Expected values that fit in the column `{column}` of"
            f" {self._features.table} for the client {self._client!r}, found {found}:"
            f" {then}"
        )

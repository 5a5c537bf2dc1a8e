"""Which columns of a table are inputs and labels of a client's rows, and their type.

    x="d"                   one column         f32[]        a row
    x=["d", "dept"]         columns, stacked   f32[2]       a row; of one dtype
    x={"user": "s", ...}    named inputs       <user=...>   a row

The federated type follows from the table's schema. What no tensor holds is refused
there, by column; what a cell lacks is refused where it is read, by column and client.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, Union, cast

import federated_language as fl
import numpy as np

import ray_fed.errors as errors
from ray_fed.files import opening
from ray_fed.values.columnar_sequence import Dims

ColumnNames: TypeAlias = Union[str, Sequence[str], Mapping[str, "ColumnNames"]]  # noqa: UP007 (it names itself)
"""One column, columns to stack, or named inputs of these."""

Missing: TypeAlias = Literal["refuse", "drop", "keep"]
"""What becomes of rows with a null or a NaN."""

MISSING: tuple[Missing, ...] = ("refuse", "drop", "keep")

_KINDS = "numbers, booleans, strings, bytes, and lists of them whose length is fixed"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor of a row.

    Attributes:
        columns: that it comes from.
        is_stacked: whether these are laid beside one another in a new dimension.
        type_signature: of one row.
        shape: of one cell.
        cast_to: the dtype that its cells are cast to; None: they are as they are.
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
        element: the type of one row, `<x=..., y=...>`.
        leaves: its tensors, in the order of the type.
        missing: what becomes of rows with a null or a NaN in one of the columns.
        table: what the table is called in an error.
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
        """Return the features that a user names, by the schema of their table.

        Args:
            schema: of arrow.
            x: the columns of the inputs.
            y: the columns of the labels; None: rows have none.
            dtypes: the dtype to cast a column to, by its name.
            missing: one of `MISSING`.
            table: what the table is called in an error.

        Raises:
            ConfigError: a column is not there, `dtypes` or `missing` is none of those.
            ValueMismatchError: no tensor holds what a column has, or columns of
                different types are to be stacked.
        """
        if missing not in MISSING:
            raise errors.ConfigError(
                f"Expected `missing` to be one of {list(MISSING)}, found {missing!r}."
            )
        if cast("object", x) is None:
            raise _no_columns(x)
        casts = {name: np.dtype(dtype) for name, dtype in (dtypes or {}).items()}
        found = _Columns(schema, casts, table)
        leaves: list[Leaf] = []
        named = [("x", x)] if y is None else [("x", x), ("y", y)]
        members = [(name, found.type_of(names, leaves)) for name, names in named]
        unused = set(casts) - {name for leaf in leaves for name in leaf.columns}
        if unused:
            raise errors.ConfigError(
                f"Expected `dtypes` for columns of `x` and `y`, found {sorted(unused)}."
            )
        element = fl.StructWithPythonType(members, dict)
        return cls(element, tuple(leaves), missing, table)

    @property
    def columns(self) -> list[str]:
        """The columns that are read, each once."""
        return list(dict.fromkeys(n for leaf in self.leaves for n in leaf.columns))


class _Columns:
    """Finds the types of columns in a schema."""

    def __init__(
        self, schema: Any, casts: Mapping[str, np.dtype[Any]], table: str
    ) -> None:
        self._schema = schema
        self._casts = casts
        self._table = table

    def type_of(self, names: ColumnNames, leaves: list[Leaf]) -> fl.Type:
        """Return the type of a row of columns, whose leaves are appended."""
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
            shown = ", ".join(
                f"`{name}` {dtype}{list(shape or [])}"
                for name, (dtype, shape) in cells.items()
            )
            raise errors.ValueMismatchError(
                f"Expected columns of one dtype to stack, one value a row, in"
                f" {self._table}, found {shown or 'none'}: cast some by `dtypes`, or"
                " name inputs by a dictionary."
            )
        return self._leaf(names, cells[names[0]][0], (), is_stacked=True)

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
        """Return dtype and shape of a column's cells."""
        if name not in self._schema.names:
            raise missing_column(name, self._schema.names, self._table)
        field_type = value_type(self._schema.field(name).type)
        dtype, shape = _cell_of(field_type)
        if dtype is None:
            raise errors.ValueMismatchError(
                f"Expected {_KINDS} in the column `{name}` of {self._table}, found"
                f" `{field_type}`: convert it, or leave the column out."
            )
        cast = self._casts.get(name, dtype)
        if (cast.kind in "OUS") != (dtype.kind == "O"):
            raise errors.ConfigError(
                f"Expected a dtype of numbers for the column `{name}` of numbers,"
                f" found {cast} for {dtype}."
            )
        return dtype if dtype.kind == "O" else cast, shape


def check_columns(names: Sequence[str], found: Sequence[str], table: str) -> None:
    """Raise unless a table has columns of some names, each once.

    Raises:
        ConfigError: a column is not there, or there twice.
    """
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
    near = difflib.get_close_matches(name, found, 1)
    hint = f" Did you mean `{near[0]}`?" if near else ""
    return errors.ConfigError(
        f"Expected a column `{name}` in {table}, found {list(found)}.{hint}"
    )


def value_type(arrow_type: Any) -> Any:
    """Return the arrow type of a column's values, of dictionaries and extensions."""
    types = opening.import_extra("pyarrow.types")
    return arrow_type.value_type if types.is_dictionary(arrow_type) else arrow_type


def _cell_of(arrow_type: Any) -> tuple[np.dtype[Any] | None, Dims]:
    types = opening.import_extra("pyarrow.types")
    shape: list[int] = []
    if hasattr(arrow_type, "shape") and hasattr(arrow_type, "storage_type"):
        shape = list(arrow_type.shape)
        inside = getattr(arrow_type, "value_type", None)  # Ray's tensors say it so:
        arrow_type = inside or arrow_type.scalar_type
    while types.is_fixed_size_list(arrow_type):
        shape.append(arrow_type.list_size)
        arrow_type = arrow_type.value_type
    ragged = types.is_list(arrow_type) or types.is_large_list(arrow_type)
    if ragged and not shape:
        return _dtype(arrow_type.value_type), (None,)
    return _dtype(arrow_type), tuple(shape)


def is_list(arrow_type: Any) -> bool:
    """Return whether a column's cells are lists, of a fixed length or not."""
    types = opening.import_extra("pyarrow.types")
    return (
        types.is_list(arrow_type)
        or types.is_large_list(arrow_type)
        or types.is_fixed_size_list(arrow_type)
    )


def _dtype(arrow_type: Any) -> np.dtype[Any] | None:
    types = opening.import_extra("pyarrow.types")
    if types.is_integer(arrow_type) or types.is_floating(arrow_type):
        return np.dtype(arrow_type.to_pandas_dtype())
    if types.is_boolean(arrow_type):
        return np.dtype(np.bool_)
    is_bytes = (
        types.is_string(arrow_type)
        or types.is_large_string(arrow_type)
        or types.is_binary(arrow_type)
        or types.is_large_binary(arrow_type)
    )
    return np.dtype(object) if is_bytes else None


def columns_of(names: ColumnNames | None) -> Iterator[str]:
    """Yield the columns that a user names."""
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

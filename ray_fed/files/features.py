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
from ray_fed.files import arrow_types
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
            ConfigError: a column is not there, or `dtypes` or `missing` is none that a
                column can have.
            ValueMismatchError: no tensor holds what a column has, or columns of
                different types are to be stacked.
        """
        if missing not in MISSING:
            raise errors.ConfigError(
                f"Expected `missing` to be one of {list(MISSING)}, found {missing!r}."
            )
        if cast("object", x) is None:
            raise _no_columns(x)
        casts = _read_dtypes(dtypes)
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


def _read_dtypes(given: object) -> dict[str, np.dtype[Any]]:
    """Return dtypes by column, of what numpy takes for one.

    Raises:
        ConfigError: they are not by column, or numpy has no such dtype.
    """
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
            wanted = max(floats or dtypes.values(), key=lambda dtype: dtype.itemsize)
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
        """Return dtype and shape of a column's cells."""
        if name not in self._schema.names:
            raise missing_column(name, self._schema.names, self._table)
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
    near = difflib.get_close_matches(str(name), found, 1)
    hint = f" Did you mean `{near[0]}`?" if near else ""
    return errors.ConfigError(
        f"Expected a column `{name}` in {table}, found {list(found)}.{hint}"
    )


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

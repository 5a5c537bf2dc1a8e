"""Rows of a table in memory: of arrow, or of pandas."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.files import opening
from ray_fed.files.arrow_types import decoded_table
from ray_fed.files.features import check_columns
from ray_fed.files.parquet import take_rows
from ray_fed.files.table_rows import IdCoder, TableRows


class ArrowRows(TableRows):
    """The rows of a table in memory.

    Args:
        table: a `pyarrow.Table`, a `pandas.DataFrame`, or columns by name.
        columns: that must be there.

    Raises:
        ValueMismatchError: it is no table, or arrow has no type for a column.
        ConfigError: a column is not there, or there twice.
    """

    label = "the table"

    def __init__(self, table: object, columns: Sequence[str]) -> None:
        names = list(dict.fromkeys(columns))
        found = _column_names(table)
        check_columns(names, found, self.label)
        self._table = decoded_table(_to_arrow(table, names))
        self.schema = self._table.schema

    @override
    def add_ids(self, column: str, coder: IdCoder) -> None:
        for chunk in self._table.column(column).chunks:
            coder.add(chunk)

    @override
    def take(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        return take_rows(self._table.select(list(columns)), rows)

    def take_in_order(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        """Return columns of rows in any order; those in order are not copied."""
        table = self._table.select(list(columns))
        if (np.diff(rows) == 1).all() and len(rows) == table.num_rows:
            return table
        return table.take(rows)


def _column_names(table: Any) -> list[str]:
    names: Any = getattr(table, "column_names", None)  # of arrow
    if names is None:
        names = table if isinstance(table, Mapping) else getattr(table, "columns", None)
    if names is None:
        raise errors.ValueMismatchError(
            "Expected a pyarrow.Table, a pandas.DataFrame or a dictionary of columns,"
            f" found {errors.describe(table)}."
        )
    return [str(name) for name in names]


def _to_arrow(table: Any, names: list[str]) -> Any:
    pyarrow: Any = opening.import_extra("pyarrow")
    try:
        if isinstance(table, pyarrow.Table):
            return table.select(names)
        if isinstance(table, Mapping):
            return pyarrow.table({name: table[name] for name in names})
        named = table.rename(columns=str)[names]
        return pyarrow.Table.from_pandas(named, preserve_index=False)
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise errors.ValueMismatchError(
            f"Expected columns that arrow has types for, found that they are not"
            f" ({error}): give every column values of one type."
        ) from error

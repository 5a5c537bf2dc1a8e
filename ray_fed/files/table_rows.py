"""Who a table's clients are, and where their rows lie.

    column of ids --> index_clients --> ids, ascending; sizes; whether rows are in order
    rows by number --> TableRows.take --> Arrow

Rows are numbered so that those of the first client come first, then those of the next.
`ClientIndex` says which rows of the table these are.
"""

import abc
import dataclasses
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.files import opening
from ray_fed.files.arrow_types import decoded, decoded_table, is_text
from ray_fed.files.features import check_columns

_MERGED_IDS = 2**18
"""Ids of chunks that are counted, at least, before their counts are added up."""


def _check_ids(chunk: Any, column: str, table: str, num_before: int) -> None:
    """Raise unless each row has an id; `num_before` rows were checked before."""
    types = opening.import_extra("pyarrow.types")
    is_float = types.is_floating(chunk.type)  # pandas' for numbers with gaps
    if count := chunk.null_count:
        first = int(np.argmax(chunk.is_null().to_numpy(zero_copy_only=False)))
        then = f'.astype({{"{column}": "int64"}})' * is_float
        raise errors.ValueMismatchError(
            f"Expected a client in every row of the column `{column}` of {table},"
            f" found {count} null{'s' * (count > 1)} from row {num_before + first} on:"
            " leave such rows out, such as by"
            f' `frame.dropna(subset=["{column}"]){then}`.'
        )
    if not (types.is_integer(chunk.type) or is_text(chunk.type)):
        kind = "int64" if is_float else "str"
        raise errors.ValueMismatchError(
            f"Expected whole numbers or strings, an id for each client, in the column"
            f" `{column}` of {table}, found `{chunk.type}`: make it one, such as by"
            f' `frame.astype({{"{column}": "{kind}"}})`.'
        )


def no_rows(table: str) -> errors.ValueMismatchError:
    """Return the error that a table has no clients."""
    return errors.ValueMismatchError(
        f"Expected rows of clients in {table}, found none."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class ClientIndex:
    """The clients of a table, in the order of their ids, and their rows.

    Attributes:
        ids: of the clients.
        arrow_ids: the same as an array of arrow.
        sizes: i64[clients], the number of rows of each.
        is_sorted: whether rows are in the order of the ids.
        order: i64[rows], which rows are the first client's, the second's and so on;
            None: where rows are sorted, and where nobody asked.
    """

    ids: Sequence[Any]
    arrow_ids: Any
    sizes: NDArray[np.int64]
    is_sorted: bool
    order: NDArray[np.int64] | None = None

    @property
    def ends(self) -> NDArray[np.int64]:
        """i64[clients + 1]: client i has the rows from `ends[i]` to `ends[i + 1]`."""
        return np.append(0, np.cumsum(self.sizes))

    def positions_of(self, column: Any) -> NDArray[np.int32] | None:
        """Return the client of each row, by position; None: one is not among these.

        Args:
            column: the ids of rows, as arrow's, `decoded`.
        """
        compute: Any = opening.import_extra("pyarrow.compute")
        found = compute.index_in(column, value_set=self.arrow_ids)
        return None if found.null_count else found.to_numpy()

    def with_order(self, chunks: Iterable[Any]) -> "ClientIndex":
        """Return the index with `order`, from the ids of all rows."""
        if self.is_sorted:
            return self
        pyarrow: Any = opening.import_extra("pyarrow")
        column = pyarrow.chunked_array([decoded(chunk) for chunk in chunks])
        positions = self.positions_of(column)
        assert positions is not None  # its ids are those that were counted
        order = np.argsort(positions, kind="stable")
        return dataclasses.replace(self, order=order)


def index_clients(chunks: Iterable[Any], name: str, table: str) -> ClientIndex:
    """Return the clients of a column of ids, with the number of rows of each.

    Args:
        chunks: arrays of arrow, one after another.
        name: of the column, for errors.
        table: what the table is called in an error.

    Raises:
        ValueMismatchError: a row has no client, the column holds no ids, or there is no
            row.
    """
    pyarrow: Any = opening.import_extra("pyarrow")
    compute: Any = opening.import_extra("pyarrow.compute")
    counts: list[Any] = []
    num_rows, num_ids, most_ids = 0, 0, _MERGED_IDS
    is_sorted, last = True, None
    for chunk in map(decoded, chunks):
        _check_ids(chunk, name, table, num_rows)
        if not len(chunk):
            continue
        num_rows += len(chunk)
        if is_sorted:
            begins = last is None or compute.less_equal(last, chunk[0])
            ordered = compute.all(compute.less_equal(chunk[:-1], chunk[1:]))
            is_sorted = bool(begins) and ordered.as_py() is not False
            last = chunk[-1]
        ids, rows = chunk.value_counts().flatten()
        counts.append(pyarrow.table({"id": ids, "rows": rows}))
        num_ids += len(ids)
        if num_ids > most_ids:
            counts = [_add_up(counts)]
            num_ids = len(counts[0])
            most_ids = max(_MERGED_IDS, 2 * num_ids)
    if not counts:
        raise no_rows(table)
    added = _add_up(counts).sort_by("id")
    ids = added.column("id").combine_chunks()
    sizes = added.column("rows").to_numpy().astype(np.int64)
    return ClientIndex(ids.to_pylist(), ids, sizes, is_sorted)


def _add_up(counts: Sequence[Any]) -> Any:
    pyarrow: Any = opening.import_extra("pyarrow")
    added = pyarrow.concat_tables(counts).group_by("id").aggregate([("rows", "sum")])
    return added.rename_columns(["id", "rows"])


class Opened:
    """What one process holds open, and the lock of it; pickled as nothing.

    Attributes:
        lock: of the value.
        value: None until it is opened.
        end: removes what this process makes of it; None: it makes nothing.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: Any = None
        self.end: weakref.finalize[..., Any] | None = None

    @override
    def __reduce__(self) -> Any:
        return Opened, ()


class TableRows(abc.ABC):
    """Rows of a table, by their number; pickled without what it holds open."""

    @abc.abstractmethod
    def take(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        """Return columns of rows, ascending, as a table of arrow."""


def take_rows(table: Any, rows: NDArray[np.int64]) -> Any:
    """Return rows of a table, by number; those in a range without a copy."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows) and (np.diff(rows) == 1).all():
        return table.slice(int(rows[0]), len(rows))
    return table.take(rows)


TABLE = "the table"
"""What a table in memory is called in an error."""


def to_arrow(table: Any, columns: Iterable[str]) -> Any:
    """Return columns of a table in memory as arrow's, `decoded_table`.

    Args:
        table: a `pyarrow.Table`, a `pandas.DataFrame`, or columns by name.
        columns: that must be there.

    Raises:
        ValueMismatchError: it is no table, or arrow has no type for a column.
        ConfigError: a column is not there, or there twice.
    """
    pyarrow: Any = opening.import_extra("pyarrow")
    names = list(dict.fromkeys(columns))
    check_columns(names, _column_names(table), TABLE)
    try:
        if isinstance(table, pyarrow.Table):
            found = table.select(names)
        elif isinstance(table, Mapping):
            found = pyarrow.table({name: table[name] for name in names})
        else:
            named = table.rename(columns=str)[names]
            found = pyarrow.Table.from_pandas(named, preserve_index=False)
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise errors.ValueMismatchError(
            f"Expected columns that arrow has types for, found that they are not"
            f" ({error}): give every column values of one type."
        ) from error
    return decoded_table(found)


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

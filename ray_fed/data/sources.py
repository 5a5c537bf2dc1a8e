"""Sources of clients' data: laid by client, mapped, in tables, in SQLite.

A source of clients whose rows each machine lays by client, once.

A source whose rows a TensorFlow function makes of another one's.

A source of clients whose rows lie in one table.

A source of clients in an SQLite file of `tf.train.Example`.
"""

import threading
import uuid
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import federated_language as fl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
import ray_fed.files.laid_columns as laid_columns
from ray_fed.files import cells, laying
from ray_fed.files.arrow_rows import ArrowRows
from ray_fed.files.features import Features
from ray_fed.files.laid_columns import LaidColumns
from ray_fed.files.sqlite_rows import SqliteRows
from ray_fed.files.table_rows import (
    ClientCounter,
    IndexBuilder,
    RowIndex,
    TableRows,
    sorted_by_id,
)
from ray_fed.language.structs import Plain
from ray_fed.values import read_limits
from ray_fed.values.client_references import ClientSource
from ray_fed.values.columnar_sequence import Column, ColumnarSequence


class LaidSource(ClientSource):
    """Clients' rows; the first process of a machine that reads lays those of all.

    Args:
        table: of the rows.
    """

    is_resident = False

    def __init__(self, table: laying.ClientTable) -> None:
        self.token = uuid.uuid4().hex
        self._table = table
        self._prepare()
        # Workers of this machine may be killed before they can do so.
        weakref.finalize(self, laid_columns.forget, self.token)

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._laid: LaidColumns | None = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {"token": self.token, "_table": self._table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    @override
    def read(self, position: int) -> Plain:
        read_limits.check()
        return self.laid.read(position)

    @property
    def laid(self) -> LaidColumns:
        """The rows of all clients, in files of this machine."""
        with self._lock:
            if self._laid is None:
                files = laid_columns.share(self.token, self._lay)
                self._laid = LaidColumns(self._table.features.leaves, files)
            return self._laid

    def _lay(self) -> list[int]:
        files = laying.lay(self._table)
        weakref.finalize(self, laid_columns.forget, self.token)
        return files


if TYPE_CHECKING:
    from ray_fed.tensorflow.front.row_maps import RowMap


class MappedSource(ClientSource):
    """Rows of another source, mapped.

    Args:
        base: its clients have a sequence of rows each.
        ids: of the clients, by position.
        row_map: of the rows.
    """

    is_resident = False

    def __init__(
        self, base: ClientSource, ids: Sequence[Hashable], row_map: "RowMap"
    ) -> None:
        self.token = uuid.uuid4().hex
        self.base: ClientSource | None = base
        self.ids = ids
        self.row_map = row_map

    @property
    @override
    def function(self) -> Callable[[Any], Any]:
        return self.row_map.function

    @override
    def over(self, base: ClientSource) -> "MappedSource":
        made = MappedSource(base, self.ids, self.row_map)
        made.token = self.token
        return made

    @override
    def read(self, position: int) -> Plain:
        return self.arrange(self.read_base(position), position)

    @override
    def arrange(self, value: Plain, position: int) -> Plain:
        label = f"what the function makes of the rows of {self.ids[position]!r}"
        try:
            return self.row_map.apply(value, label)
        except errors.RayFedError:
            raise
        except Exception as error:
            raise errors.ComputationError(
                f"Expected rows for the client with the id {self.ids[position]!r},"
                " found that the mapped function raised"
                f" {error_texts.summarize(error)}",
                cause_text=error_texts.traceback_of(error),
            ) from error


def map_rows(function: Callable[[Any], Any], row: fl.Type) -> "RowMap":
    """Return a function over rows, traced to learn the type of what it returns."""
    from ray_fed.tensorflow.front.row_maps import RowMap

    return RowMap(function, row)


class TableSource(ClientSource):
    """Clients' rows, found by an index.

    Args:
        rows: of the table.
        features: how rows become elements.
        ids: of the clients, by position.
        index: of their rows.
    """

    is_resident = False

    def __init__(
        self,
        rows: TableRows,
        features: Features,
        ids: Sequence[Hashable],
        index: RowIndex,
    ) -> None:
        self.token = uuid.uuid4().hex
        self._rows = rows
        self._features = features
        self._ids = ids
        self._index = index

    @override
    def read(self, position: int) -> Plain:
        read_limits.check()
        rows = self._index.rows_of(position)
        table = self._rows.take(rows, self._features.columns)
        return cells.decode(self._features, table, self._ids[position])


def index_clients(rows: TableRows, column: str) -> tuple[list[Any], RowIndex]:
    """Return the ids of a table's clients, ascending, and the index of their rows.

    Raises:
        ValueMismatchError: a row has no client, or there is no row.
    """
    builder = IndexBuilder(column, rows.label)
    rows.add_ids(column, builder)
    ids, index = sorted_by_id(builder.ids, builder.finish())
    if not ids:
        raise _no_rows(rows)
    return ids, index


def count_clients(
    rows: TableRows, column: str
) -> tuple[list[Any], NDArray[np.int64], bool]:
    """Return ids, ascending; the rows of each; whether rows are in this order.

    Raises:
        ValueMismatchError: a row has no client, or there is no row.
    """
    counter = ClientCounter(column, rows.label)
    rows.add_ids(column, counter)
    if not counter.ids:
        raise _no_rows(rows)
    return counter.finish()


def _no_rows(rows: TableRows) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f"Expected rows of clients in {rows.label}, found none."
    )


def hold_clients(
    rows: ArrowRows, features: Features, client: str
) -> tuple[list[Any], NDArray[np.float64], list[Plain]]:
    """Return ids, numbers of rows and values of the clients of a table in memory.

    Values are slices of columns of the whole table, in the order of the clients.

    Raises:
        ValueMismatchError: a cell does not fit; its column and client are named.
    """
    ids, index = index_clients(rows, client)
    order = np.concatenate([index.rows_of(position) for position in range(len(ids))])
    table = rows.take_in_order(order, features.columns)
    ends = np.cumsum(index.sizes)
    bounds = list(zip(ends - index.sizes, ends, strict=True))
    if features.missing != "drop":
        try:
            whole = cells.decode(features, table, None)
        except errors.ValueMismatchError:
            whole = None  # the client's own rows will say whose they are
        if whole is not None:
            held = [slice_rows(whole, int(a), int(b)) for a, b in bounds]
            return ids, index.sizes.astype(np.float64), held
    held = [
        cells.decode(features, table.slice(int(a), int(b - a)), name)
        for name, (a, b) in zip(ids, bounds, strict=True)
    ]
    # As `dropna().groupby(...)`: a client without a whole row is none.
    whole = [i for i, value in enumerate(held) if value.length]
    if not whole:
        raise _no_rows(rows)
    sizes = np.array([held[i].length for i in whole], np.float64)
    return [ids[i] for i in whole], sizes, [held[i] for i in whole]


def slice_rows(rows: ColumnarSequence, start: int, stop: int) -> ColumnarSequence:
    """Return some neighbouring rows, without a copy."""
    columns = tuple(_slice(column, start, stop) for column in rows.columns)
    return ColumnarSequence(columns, stop - start)


def _slice(column: Column, start: int, stop: int) -> Column:
    if column.splits is None:
        return Column(column.rows[start:stop])
    splits = column.splits[start : stop + 1]
    return Column(column.rows[splits[0] : splits[-1]], splits - splits[0])


class SqliteSource(ClientSource):
    """Clients' examples, parsed where they are read.

    Args:
        rows: of the file.
        features: of an example, and their types: see `examples.to_features`.

    Attributes:
        element: the type of an example.
    """

    is_resident = False

    def __init__(self, rows: SqliteRows, features: Mapping[str, Any]) -> None:
        from ray_fed.tensorflow.external import examples

        self.token = uuid.uuid4().hex
        self._rows = rows
        self._features = examples.to_features(features)
        self.element = fl.StructWithPythonType(list(self._features.items()), dict)

    @override
    def read(self, position: int) -> Plain:
        from ray_fed.tensorflow.external import examples

        read_limits.check()
        label = f"the rows of the client {self._rows.ids[position]!r}"
        return examples.parse(
            self._rows.read(position), self._features, f"{label} in {self._rows.label}"
        )

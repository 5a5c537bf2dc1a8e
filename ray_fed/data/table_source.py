"""A source of clients whose rows lie in one table."""

import uuid
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.files import cells
from ray_fed.files.arrow_rows import ArrowRows
from ray_fed.files.features import Features
from ray_fed.files.row_index import (
    ClientCounter,
    IndexBuilder,
    RowIndex,
    sorted_by_id,
)
from ray_fed.files.table_rows import TableRows
from ray_fed.language.structs import Plain
from ray_fed.values import read_limits
from ray_fed.values.client_references import ClientSource
from ray_fed.values.columnar_sequence import Column, ColumnarSequence


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

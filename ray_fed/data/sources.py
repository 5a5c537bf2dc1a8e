"""Sources of clients' data, from which a worker reads one client at a time."""

import itertools
import threading
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import federated_language as fl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
from ray_fed.files.features import Features, decode
from ray_fed.files.sqlite_rows import SqliteRows
from ray_fed.files.table_rows import (
    TABLE,
    ClientIndex,
    TableRows,
    index_clients,
    no_rows,
)
from ray_fed.language.structs import Plain
from ray_fed.values import read_limits
from ray_fed.values.client_references import ClientSource, HeldSource, check_rows
from ray_fed.values.columnar_sequence import Column, ColumnarSequence

if TYPE_CHECKING:
    from ray_fed.tensorflow.tracing import RowMap


class FunctionSource(ClientSource):
    """A source that calls the user's function `load` for the value of a client.

    `load` takes a client's id and returns the same value each time, in any process.
    """

    def __init__(
        self, load: Callable[[Any], Any], ids: Sequence[Hashable], type_spec: fl.Type
    ) -> None:
        self.token = uuid.uuid4().hex
        self._load = load
        self._ids = ids
        self._type_spec = type_spec
        self._checks_batches = False

    @property
    @override
    def function(self) -> Callable[[Any], Any]:
        return self._load

    @override
    def check_batches(self, position: int, client: Hashable) -> None:
        del position, client
        self._checks_batches = True

    @override
    def read(self, position: int) -> Plain:
        client = self._ids[position]
        read_limits.check()
        try:
            value = self._load(client)
        except BaseException as error:
            raise _failure(client, "the function that loads it", error) from error
        try:
            label = f"the data of the client with the id {client!r}"
            # The function may load each client into the same array.
            plain = plain_values.own(
                plain_values.to_plain(value, self._type_spec, label)
            )
        except errors.RayFedError:
            raise
        except BaseException as error:
            raise _failure(client, "reading its value", error) from error
        if self._checks_batches:
            check_rows(plain, client)
        return plain


def _failure(
    client: object, raising: str, error: BaseException
) -> errors.ComputationError:
    """Return the ComputationError for an error in user code, including `sys.exit`.

    A KeyboardInterrupt on the main thread is raised again: the user pressed Ctrl-C.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if isinstance(error, KeyboardInterrupt) and is_main:
        raise error
    return errors.ComputationError(
        f"Expected a value for the client with the id {client!r}, found that {raising}"
        f" raised {error_texts.summarize(error)}",
        cause_text=error_texts.traceback_of(error),
    )


class MappedSource(ClientSource):
    """A source that applies the function of `ClientData.map` to each row of `base`."""

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
    def describe(self) -> dict[str, Any]:
        before = super().describe()
        return {**before, "map": [*before.get("map", []), self.row_map.identity]}

    @override
    def over(self, base: ClientSource) -> "MappedSource":
        made = MappedSource(base, self.ids, self.row_map)
        made.token = self.token
        return made

    @override
    def arrange(self, value: Plain, position: int) -> Plain:
        label = f"the result of `map` for the client {self.ids[position]!r}"
        try:
            return self.row_map.apply(value, label)
        except errors.RayFedError:
            raise
        except Exception as error:
            client = self.ids[position]
            raise _failure(client, "the function of `map`", error) from error


class TableSource(ClientSource):
    """A source that reads a client's rows from a table by their row numbers."""

    def __init__(self, rows: TableRows, features: Features, index: ClientIndex) -> None:
        self.token = uuid.uuid4().hex
        self._rows, self._features = rows, features
        self._ids, self._ends, self._order = index.ids, index.ends, index.order

    @override
    def describe(self) -> dict[str, Any]:
        return self._features.describe()

    @override
    def read(self, position: int) -> Plain:
        read_limits.check()
        rows = np.arange(self._ends[position], self._ends[position + 1])
        if self._order is not None:
            rows = self._order[rows]
        table = self._rows.take(rows, self._features.columns)
        return decode(self._features, table, self._ids[position])


def hold_clients(
    table: Any, features: Features, client: str
) -> tuple[Sequence[Any], NDArray[np.int64], list[Plain]]:
    """Return ids, numbers of rows and values of the clients of a table in memory.

    `client` names the column of ids. Values share no memory with the table. Raises
    ValueMismatchError, which names column and client, if a cell does not fit.
    """
    chunks = table.column(client).chunks
    index = index_clients(chunks, client, TABLE).with_order(chunks)
    rows = table.select(features.columns)
    rows = rows if index.order is None else rows.take(index.order)
    bounds = list(itertools.pairwise(index.ends.tolist()))
    if features.missing != "drop":
        try:
            whole = decode(features, rows, None)
        except errors.ValueMismatchError:
            whole = None  # below, the error names the client
        if whole is not None:
            # The owner of the table may write to it later.
            whole = whole.copy() if index.order is None else whole
            return index.ids, index.sizes, [slice_rows(whole, a, b) for a, b in bounds]
    held = {
        name: decode(features, rows.slice(a, b - a), name)
        for name, (a, b) in zip(index.ids, bounds, strict=True)
    }
    # A client without complete rows is left out, like in `dropna().groupby(...)`.
    held = {name: value.copy() for name, value in held.items() if value.length}
    if not held:
        raise no_rows(TABLE)
    sizes = np.array([value.length for value in held.values()], np.int64)
    return list(held), sizes, list(held.values())


def slice_rows(rows: ColumnarSequence, start: int, stop: int) -> ColumnarSequence:
    """Return the rows from `start` to `stop`, without a copy."""
    columns = tuple(_slice(column, start, stop) for column in rows.columns)
    return ColumnarSequence(columns, stop - start)


def _slice(column: Column, start: int, stop: int) -> Column:
    if column.splits is None:
        return Column(column.rows[start:stop])
    splits = column.splits[start : stop + 1]
    return Column(column.rows[splits[0] : splits[-1]], splits - splits[0])


def join(parts: Sequence[tuple[ClientSource, NDArray[np.int64]]]) -> ClientSource:
    """Return one source of the clients at the given positions of several sources."""
    held = [source for source, _ in parts if isinstance(source, HeldSource)]
    if len(held) < len(parts):
        return JoinedSource(parts)
    places = [positions.tolist() for _, positions in parts]
    pairs = zip(held, places, strict=True)
    return HeldSource([source.held[i] for source, inside in pairs for i in inside])


class JoinedSource(ClientSource):
    """A source of clients from several sources, which need not be in memory."""

    def __init__(self, parts: Sequence[tuple[ClientSource, NDArray[np.int64]]]) -> None:
        self.token = uuid.uuid4().hex
        self.num_bytes = sum(source.num_bytes for source, _ in parts)
        self._clients = [
            (source, int(position)) for source, places in parts for position in places
        ]

    @property
    @override
    def function(self) -> Callable[[Any], Any] | None:
        found = (source.function for source, _ in self._clients)
        return next((one for one in found if one is not None), None)

    @override
    def describe(self) -> dict[str, Any]:
        sources = {source.token: source for source, _ in self._clients}
        described = [source.describe() for source in sources.values()]
        is_alike = all(one == described[0] for one in described)
        return described[0] if is_alike else {"concat": described}

    @override
    def read(self, position: int) -> Plain:
        source, inside = self._clients[position]
        return source.read(inside)

    @override
    def check_batches(self, position: int, client: Hashable) -> None:
        source, inside = self._clients[position]
        source.check_batches(inside, client)


class SqliteSource(ClientSource):
    """A source of the clients of an SQLite file, whose examples each worker parses."""

    def __init__(self, rows: SqliteRows, features: Mapping[str, Any]) -> None:
        from ray_fed.tensorflow import external_data

        self.token = uuid.uuid4().hex
        self._rows = rows
        self._features = external_data.to_features(features)
        self.element = fl.StructWithPythonType(list(self._features.items()), dict)

    @override
    def describe(self) -> dict[str, Any]:
        return {"split": self._rows.split_name}

    @override
    def read(self, position: int) -> Plain:
        from ray_fed.tensorflow import external_data

        read_limits.check()
        label = f"the rows of the client {self._rows.ids[position]!r}"
        return external_data.parse_examples(
            self._rows.read(position), self._features, f"{label} in {self._rows.label}"
        )

"""Data of clients, placed once: on the workers that need it, for as long as it fits.

Values at hand: checked within the bounds of the installed context, and counted.

Clients by reference with their ids, and what is done with the rows of each.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeAlias, TypedDict, Unpack

import federated_language as fl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
import ray_fed.values.plain_values as plain_values
from ray_fed.data.arguments import (
    check_callable,
    check_ids,
    check_number,
    read_ids,
    read_member_type,
    read_weights,
)
from ray_fed.data.arrangement import (
    ArrangedSource,
    Arrangement,
    Part,
    check_fraction,
    seed_of,
)
from ray_fed.data.sources import (
    FunctionSource,
    MappedSource,
    SqliteSource,
    TableSource,
    hold_clients,
    join,
)
from ray_fed.files.features import ColumnNames, Features, Missing, columns_of
from ray_fed.files.parquet import Format, RowGroups, TableFiles
from ray_fed.files.sorted_rows import SortedRows
from ray_fed.files.sqlite_rows import SqliteRows
from ray_fed.files.table_rows import TABLE, index_clients, to_arrow
from ray_fed.observability import reprs
from ray_fed.values import read_limits, stored
from ray_fed.values.client_references import (
    ClientReference,
    ClientRun,
    ClientSource,
    HeldSource,
)


def _installed_limits() -> read_limits.Limits:
    """Return what may be read, by the context that is installed in this thread."""
    context: Any = fl.framework.get_context_stack().current
    context = getattr(context, "execution_context", context)  # of a federated context
    limits = getattr(context, "read_limits", None)
    return limits if isinstance(limits, read_limits.Limits) else read_limits.limits()


@dataclasses.dataclass(frozen=True)
class TableFacts:
    """What is known of the rows of a table, to be shown.

    Attributes:
        columns: the dtypes of those that rows are made of, by name; none after `map`.
        drops: whether a client may have fewer rows than were counted, as those with a
            missing cell are dropped where they are read.
    """

    columns: Mapping[str, str]
    drops: bool = False


COPY_BYTES = 4 * 2**30
"""The most bytes of disk that a machine sorts a table's rows in, unless told."""

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file or a folder, or several; URIs that fsspec knows."""


class TableOptions(TypedDict, total=False):
    """Options of tables in files.

    Attributes:
        y: the labels, in the ways of `x`; None, the default: there are none.
        batch_size: rows of a batch; None, the default: each row is an element.
        dtypes: what columns are cast to, by name; else nothing is cast.
        missing: what becomes of rows with a null or NaN: "refuse", the default, raises,
            naming column and client; "drop" leaves them out; "keep" lets NaN through.
        copy_bytes: the most bytes of disk that a machine sorts rows in, 4 GiB by
            default; 0: none.
    """

    y: ColumnNames | None
    batch_size: int | None
    dtypes: Mapping[str, Any] | None
    missing: Missing
    copy_bytes: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ClientData(ClientRun):
    """What clients have, by reference: an argument placed at clients that stays put.

        data = ClientData.from_function(ids, read_file, dataset_type)
        state = training.next(state, data.select(["anna", "bert"]))

    A sequence of `ClientReference`s. It, a slice, a selection, or a list of its
    elements may stand wherever a value placed at clients is expected. Nothing of it is
    read on the way: each worker reads the clients that it is given, lays them out once,
    and keeps them between rounds, up to `Config.workers.client_bytes`.

    Made by one of its `from_` functions. Rows that are sequences are arranged by
    `take`, `shuffle`, `epochs` and `batch`, in this order whatever the order of the
    calls, on the worker.

    Attributes:
        ids: one a client, in order.
        table: of their rows; None: they are of none, and weights count no rows.
    """

    ids: tuple[Hashable, ...] = ()
    table: TableFacts | None = None

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"clients": len(self)}
        weights = self._row_weights()
        if self.table is not None and weights is not None:
            arrangement = dataclasses.replace(self._rows()[2], epochs=1)
            rows = reprs.show_number(arrangement.weigh(weights).sum())
            facts["rows"] = f"at most {rows}" if self.table.drops else rows
        if self.table is not None and self.table.columns:
            named = self.table.columns.items()
            facts["columns"] = ", ".join(f"{name} {dtype}" for name, dtype in named)
        return {**facts, "type": self.type_signature}

    @override
    def __repr__(self) -> str:
        facts = self._facts()
        kind = facts.pop("type")
        rows = f", {facts['rows']} rows" if "rows" in facts else ""
        of = f", columns {facts['columns']}" if "columns" in facts else f" of {kind}"
        return f"<{reprs.shorten(f'{len(self):,} clients{rows}{of}')}>"

    def _repr_html_(self) -> str:
        return reprs.draw_facts(type(self).__name__, self._facts())

    @classmethod
    def _of(
        cls,
        source: ClientSource,
        member: fl.Type,
        ids: Sequence[Hashable],
        weights: Sequence[float] | NDArray[np.float64] | None,
        table: TableFacts | None = None,
    ) -> Self:
        check_ids(ids)
        of_clients = None if weights is None else read_weights(weights, ids)
        positions = np.arange(len(ids), dtype=np.int64)
        return cls(source, member, positions, of_clients, tuple(ids), table)

    @override
    @tracebacks.shorten
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.pick(range(len(self))[index])
        if not isinstance(index, int | np.integer):
            (index,) = self._places([index])
        weight = None if self.weights is None else float(self.weights[index])
        return ClientReference(
            self.source,
            int(self.positions[index]),
            self.type_signature,
            self.ids[index],
            weight,
        )

    @tracebacks.shorten
    def select(self, ids: Iterable[Any]) -> Self:
        """Return the clients of these ids, in this order; an id may stand there twice.

        `data[id]` is one client; but a whole number is its place.

        Raises:
            ConfigError: there is no client of an id, or one id is given, not several.
        """
        if isinstance(ids, str | bytes):
            raise errors.ConfigError(
                f"Expected a list of ids, found {ids!r}: pass it in a list, or take"
                " `data[id]`, which is one client."
            )
        return self.pick(self._places(list(ids)))

    @tracebacks.shorten
    def read(self, client: Any) -> Any:
        """Return what a client has, read in this process, to look at it.

        Args:
            client: its id, or its place, where `data[client]` takes that.

        Returns:
            numpy values in Python containers: of a sequence, a list of its elements.

        Raises:
            ConfigError: there is no client of the id.
            ValueMismatchError: what is read is not of the client's type.
            ComputationError: reading it raised.
        """
        return plain_values.from_plain(self[client].read(), self.type_signature)

    def _places(self, ids: Sequence[Any]) -> list[int]:
        unknown = [client for client in ids if client not in self._indices]
        if unknown:
            raise errors.ConfigError(
                f"Expected ids of these {len(self)} clients, found {unknown[:5]}."
                f"{errors.suggest(unknown[0], self.ids)}"
            )
        return [self._indices[client] for client in ids]

    @tracebacks.shorten
    def filter(self, *, min_rows: int) -> Self:
        """Return the clients that have at least so many rows.

        Rows count as `take` and `hold_out_rows` leave them, in one epoch. Of a table in
        files, those that `missing="drop"` leaves out count, too.

        Raises:
            ConfigError: it is below 0, or nobody knows how many rows clients have.
        """
        check_number(min_rows, "min_rows")
        rows = self._row_weights()
        if rows is None:
            raise errors.ConfigError(
                "Expected clients whose numbers of rows are known, to filter, found"
                " none: pass them as `weights`."
            )
        left = dataclasses.replace(self._rows()[2], epochs=1).weigh(rows)
        return self.pick(np.flatnonzero(left >= min_rows).tolist())

    @tracebacks.shorten
    def concat(self, *others: "ClientData") -> Self:
        """Return these clients and those of others, in this order.

        Raises:
            ConfigError: two clients have one id.
            ValueMismatchError: clients have values of several types, or rows that are
                arranged in several ways.
        """
        parts = [self, *others]
        bases = [part._base() for part in parts]  # noqa: SLF001 (of this class)
        types = {str(part.type_signature): None for part in parts}
        if len(types) > 1:
            raise errors.ValueMismatchError(
                "Expected clients that have values of one type, found"
                f" {' and '.join(f'`{one}`' for one in types)}."
            )
        _, member, arrangement = bases[0]
        if any(other != arrangement for _, _, other in bases):
            raise errors.ValueMismatchError(
                "Expected clients whose rows are arranged in one way, found several:"
                " call `take`, `shuffle`, `epochs` and `batch` of what `concat` gives."
            )
        ids = [client for part in parts for client in part.ids]
        counts = [part._row_weights() for part in parts]  # noqa: SLF001 (of this class)
        known = [count for count in counts if count is not None]
        weights = np.concatenate(known) if len(known) == len(counts) else None
        source = join(
            [(base, p.positions) for (base, _, _), p in zip(bases, parts, strict=True)]
        )
        table = self.table if all(part.table for part in parts) else None
        if table is not None and any(p.table and p.table.drops for p in parts):
            table = dataclasses.replace(table, drops=True)
        made = self._of(source, member, ids, weights, table)
        if not isinstance(member, fl.SequenceType):
            return made
        return made._over(source, member.element, arrangement)  # noqa: SLF001

    def _base(self) -> tuple[ClientSource, fl.Type, Arrangement]:
        """Return what has the values, the type of one, and how rows are arranged."""
        source = self.source
        if isinstance(source, ArrangedSource):
            return source.rows, fl.SequenceType(source.row), source.arrangement
        return source, self.type_signature, Arrangement()

    @tracebacks.shorten
    def take(self, count: int) -> Self:
        """Return the clients with their first `count` rows at most.

        Of those that an earlier `take` left.

        Raises:
            ConfigError: it is below 1.
            UnsupportedError: clients have no sequences of rows.
        """
        check_number(count, "take", 1)
        before = self._rows()[2].take
        return self._arranged(take=count if before is None else min(count, before))

    @tracebacks.shorten
    def shuffle(self, seed: int | None = None) -> Self:
        """Return the clients with rows in another order in each call and epoch.

        The order depends on the seed, on the calls of the context before, on the
        client's id and on the epoch, and not on the worker or the attempt.

        Args:
            seed: >= 0; None: the seed of the configuration.

        Raises:
            ConfigError: it is no such number.
        """
        if seed is not None:
            check_number(seed, "seed")
        return self._arranged(shuffles=True, seed=seed)

    @tracebacks.shorten
    def epochs(self, count: int) -> Self:
        """Return the clients with rows that are gone through `count` times.

        Raises:
            ConfigError: it is below 1.
        """
        return self._arranged(epochs=count)

    @tracebacks.shorten
    def batch(self, size: int | None, *, drop_remainder: bool = False) -> Self:
        """Return the clients with batches of rows, a smaller one at an epoch's end.

        Args:
            size: rows of a batch, >= 1; None: each row is an element.
            drop_remainder: whether the smaller batch is left out.

        Raises:
            ConfigError: the size is below 1.
            ValueMismatchError: rows cannot be batched.
        """
        return self._arranged(batch_size=size, drop_remainder=drop_remainder)

    @tracebacks.shorten
    def map(self, function: Callable[[Any], Any]) -> Self:
        """Return the clients with rows that a TensorFlow function makes of theirs.

        It takes rows as they are before `take`, `shuffle`, `epochs` and `batch`, is
        pickled, and is called again after a failure.

        Args:
            function: from a row, in the containers of its type, to another one.

        Raises:
            ConfigError: it is no function.
            ValueMismatchError: a shape of a row, before or after, is not known.
            UnsupportedError: it draws random numbers.
        """
        check_callable(function, "function")
        base, row, arrangement = self._rows()
        from ray_fed.tensorflow.tracing import RowMap

        row_map = RowMap(function, row)
        mapped = MappedSource(base, self._by_position(self.ids), row_map)
        made = self._over(mapped, row_map.result, arrangement)
        unnamed = self.table and dataclasses.replace(self.table, columns={})
        return dataclasses.replace(made, table=unnamed)

    @tracebacks.shorten
    def hold_out_rows(
        self, fraction: float, seed: int = 0, *, last: bool = False
    ) -> tuple[Self, Self]:
        """Return the clients with most of their rows, and with the rows held out.

        Args:
            fraction: of each client's rows to hold out, above 0 and below 1; rounded,
                so that a client of few rows may hold out none. Of the rows that an
                earlier call left.
            seed: of the rows, >= 0.
            last: hold out the last rows, those of the latest time in a table that is
                sorted by it, and none by the seed.

        Raises:
            ConfigError: an argument is out of its range.
        """
        check_fraction(fraction, seed)
        before = self._rows()[2].parts
        kept, held = (
            Part(fraction, None if last else seed, is_held_out=is_held_out)
            for is_held_out in (False, True)
        )
        return (
            self._arranged(parts=(*before, kept)),
            self._arranged(parts=(*before, held)),
        )

    @tracebacks.shorten
    def hold_out_clients(self, fraction: float, seed: int = 0) -> tuple[Self, Self]:
        """Return most of the clients, and those held out, each in order.

        Args:
            fraction: of the clients to hold out, above 0 and below 1; rounded, at
                least one and not all.
            seed: of the clients, >= 0.

        Raises:
            ConfigError: an argument is out of its range, or there are too few clients.
        """
        check_fraction(fraction, seed)
        count = len(self)
        if count < 2:  # noqa: PLR2004 (one for each side)
            raise errors.ConfigError(
                f"Expected at least 2 clients to hold some out, found {count}."
            )
        held_count = min(max(1, round(fraction * count)), count - 1)
        order = np.random.default_rng(seed_of("clients", seed)).permutation(count)
        kept, held = np.sort(order[held_count:]), np.sort(order[:held_count])
        return self.pick(kept.tolist()), self.pick(held.tolist())

    @functools.cached_property
    def _indices(self) -> dict[Hashable, int]:
        return {client: index for index, client in enumerate(self.ids)}

    @tracebacks.shorten
    def pick(self, indices: Sequence[int]) -> Self:
        """Return the clients at some places, in this order."""
        taken = np.array(indices, np.int64)
        weights = None if self.weights is None else self.weights[taken]
        ids = tuple(self.ids[index] for index in indices)
        return dataclasses.replace(
            self, positions=self.positions[taken], weights=weights, ids=ids
        )

    def _rows(self) -> tuple[ClientSource, fl.Type, Arrangement]:
        """Return what has the rows, the type of one, and how they are arranged.

        Raises:
            UnsupportedError: clients have no sequences.
        """
        base, member, arrangement = self._base()
        if not isinstance(member, fl.SequenceType):
            raise errors.UnsupportedError(
                "Expected clients that have a sequence of rows each, to arrange, found"
                f" that each has a value of `{member}`."
            )
        return base, member.element, arrangement

    def _arranged(self, **changes: Any) -> Self:
        base, row, arrangement = self._rows()
        return self._over(base, row, dataclasses.replace(arrangement, **changes))

    def _over(self, base: ClientSource, row: fl.Type, arrangement: Arrangement) -> Self:
        member = fl.SequenceType(arrangement.element_type(row))
        rows = self._row_weights()
        weights = None if rows is None else arrangement.weigh(rows)
        source = base
        if arrangement != Arrangement():
            ids = self._by_position(self.ids)
            source = ArrangedSource(base, ids, row, arrangement)
            source.row_weights = None if rows is None else self._by_position(rows)
        return dataclasses.replace(
            self, source=source, type_signature=member, weights=weights
        )

    def _row_weights(self) -> NDArray[np.float64] | None:
        if not isinstance(self.source, ArrangedSource):
            return self.weights
        found = self.source.row_weights
        if found is None:
            return None
        return np.array([found[position] for position in self.positions], np.float64)

    def _by_position(self, values: Sequence[Any] | NDArray[Any]) -> list[Any]:
        """Return values of these clients by their position in the source."""
        found: list[Any] = [None] * (int(self.positions.max(initial=-1)) + 1)
        for position, value in zip(self.positions, values, strict=True):
            found[position] = value
        return found

    @classmethod
    @tracebacks.shorten
    def from_values(
        cls,
        clients: Mapping[Any, Any] | Sequence[Any],
        type_spec: Any,
        weights: Sequence[float] | None = None,
    ) -> Self:
        """Return clients whose values are at hand; they are checked now, sent once.

        Args:
            clients: value of each client by id, or a sequence of values, whose ids are
                their indices.
            type_spec: of one client's value.
            weights: what each client's work costs, finite, >= 0; None: as many as the
                elements of its sequences.

        Raises:
            ValueMismatchError: a value is not of the type, or an iterable has more than
                `data.sequence_bytes` of the context that is installed.
            ConfigError: there are more or fewer weights than clients, one is not such a
                number, or ids cannot be hashed or are not distinct.
        """
        ids: list[Any]
        if isinstance(clients, Mapping):
            ids, given = list(clients.keys()), list(clients.values())
        else:
            ids, given = list(range(len(clients))), list(clients)
        member = read_member_type(type_spec)
        with read_limits.limited(_installed_limits()):
            held = [
                plain_values.to_plain(
                    value, member, f"the data of the client with the id {client!r}"
                )
                for client, value in zip(ids, given, strict=True)
            ]
        if weights is None:
            weights = stored.count_rows_of_each(held)
        return cls._of(HeldSource(held), member, ids, weights)

    @classmethod
    @tracebacks.shorten
    def from_function(
        cls,
        ids: Iterable[Any],
        load: Callable[[Any], Any],
        type_spec: Any,
        weights: Sequence[float] | None = None,
    ) -> Self:
        """Return clients whose values a function reads, on the worker that needs them.

        Args:
            ids: of the clients, in order.
            load: takes an id, returns what the client has: the same each time, as it is
                called again after a failure, or when what it returned was dropped. It
                is pickled.
            type_spec: of what it returns.
            weights: what each client's work costs, finite, >= 0; None: not known.

        Raises:
            ConfigError: there are more or fewer weights than clients, one is not such a
                number, ids cannot be hashed or are not distinct, or `load` is no
                function.
            ValueMismatchError: clients cannot have values of the type.
        """
        ids, member = read_ids(ids), read_member_type(type_spec)
        check_callable(load, "load")
        return cls._of(FunctionSource(load, ids, member), member, ids, weights)

    @classmethod
    @tracebacks.shorten
    def from_parquet(
        cls,
        path: Paths,
        *,
        client: str,
        x: ColumnNames,
        **options: Unpack[TableOptions],
    ) -> Self:
        """Return the clients of a table in parquet files, by the column that has them.

        The column of clients is read now, once. The first worker of a machine that is
        given clients sorts all rows by client, once, into an Arrow file of its
        temporary folder, which the processes of the machine share; from then on a
        client is read there, and nothing else is. A table of more than `copy_bytes` is
        not sorted: a client's rows are read by the row groups that have them, so that a
        table that is sorted by client, with row groups of a few clients, costs least.

        Args:
            path: of a file or a folder, or several; a URI that fsspec knows. In a
                folder, names as `client=anna` (hive) are a column.
            client: the column of ids, whole numbers or strings.
            x: the inputs: a column; a list of columns of one dtype, to be stacked; or
                a dictionary of these, for named inputs.
            **options: `y`, `batch_size`, `dtypes`, `missing` and `copy_bytes`, see
                `TableOptions`.

        Returns:
            Clients in the order of their ids, with sequences of `<x=..., y=...>`.

        Raises:
            MissingFileError: there is no file, or none that may be read.
            ConfigError: a column is not there, or an argument is out of its range.
            ValueMismatchError: a column has what no tensor holds, its type changes
                between files, or a row has no client.
        """
        return cls._from_files("parquet", path, client=client, x=x, **options)

    @classmethod
    @tracebacks.shorten
    def from_csv(
        cls,
        path: Paths,
        *,
        client: str,
        x: ColumnNames,
        **options: Unpack[TableOptions],
    ) -> Self:
        """Return the clients of a table in CSV files, whose first line has the names.

        As `from_parquet`, but that columns have the types that the first file looks
        like: whole numbers, floats, booleans, times and strings. A table of more than
        `copy_bytes` is refused.

        Args:
            path: of a file or a folder, or several; a URI that fsspec knows.
            client: the column of ids, whole numbers or strings.
            x: the inputs.
            **options: as those of `from_parquet`.

        Raises:
            MissingFileError: there is no file, or none that may be read.
            ConfigError: a column is not there, or an argument is out of its range.
            ValueMismatchError: a column has what no tensor holds, or a row has no
                client.
        """
        return cls._from_files("csv", path, client=client, x=x, **options)

    @classmethod
    @tracebacks.shorten
    def from_json(
        cls,
        path: Paths,
        *,
        client: str,
        x: ColumnNames,
        **options: Unpack[TableOptions],
    ) -> Self:
        """Return the clients of a table in files with a JSON object on each line.

        See `from_csv`.
        """
        return cls._from_files("json", path, client=client, x=x, **options)

    @classmethod
    @tracebacks.shorten
    def from_arrow(
        cls,
        path: Paths,
        *,
        client: str,
        x: ColumnNames,
        **options: Unpack[TableOptions],
    ) -> Self:
        """Return the clients of a table in Arrow (or Feather) files.

        See `from_parquet`, but that a table of more than `copy_bytes` is refused.
        """
        return cls._from_files("arrow", path, client=client, x=x, **options)

    @classmethod
    def _from_files(
        cls,
        kind: Format,
        path: Paths,
        *,
        client: str,
        x: ColumnNames,
        y: ColumnNames | None = None,
        batch_size: int | None = None,
        dtypes: Mapping[str, Any] | None = None,
        missing: Missing = "refuse",
        copy_bytes: int = COPY_BYTES,
    ) -> Self:
        if hasattr(path, "columns"):
            raise errors.ConfigError(
                "Expected a file or a folder, or several, as `path`, found a table of"
                f" `{type(path).__name__}`: pass it to `ClientData.from_table`."
            )
        given = [path] if isinstance(path, str | os.PathLike) else path
        if not given:
            raise errors.ConfigError(
                "Expected a file or a folder, or several, as `path`, found none."
            )
        check_number(copy_bytes, "copy_bytes")
        uris = [os.fspath(uri) for uri in given]
        columns = [client, *columns_of(x), *columns_of(y)]
        files = TableFiles(uris, kind, columns)
        features = Features.of(files.schema, x, y, dtypes, missing, files.label)
        index = index_clients(files.read_column(client), client, files.label)
        if files.num_bytes <= copy_bytes:
            source = SortedRows(files, features, client, index)
        elif kind == "parquet":
            index = index.with_order(files.read_column(client))
            source = TableSource(RowGroups(files), features, index)
        else:
            raise errors.ConfigError(
                f"Expected at most {copy_bytes} bytes of rows in {files.label}, found"
                f" about {files.num_bytes}: raise `copy_bytes`, or write parquet files,"
                " which are read by `from_parquet` where they are."
            )
        return cls._of_rows(source, features, index.ids, index.sizes, batch_size)

    @classmethod
    def _of_rows(
        cls,
        source: ClientSource,
        features: Features,
        ids: Sequence[Hashable],
        sizes: NDArray[np.int64],
        batch_size: int | None,
    ) -> Self:
        columns = {
            name: str(fl.TensorType(leaf.type_signature.dtype, leaf.shape))
            for leaf in features.leaves
            for name in leaf.columns
        }
        is_counted = isinstance(source, HeldSource)  # after rows were dropped
        drops = features.missing == "drop" and not is_counted
        facts = TableFacts(columns, drops=drops)
        member = fl.SequenceType(features.element)
        made = cls._of(source, member, ids, sizes.astype(np.float64), facts)
        return made.batch(batch_size)

    @classmethod
    @tracebacks.shorten
    def from_table(
        cls,
        table: Any,
        *,
        client: str,
        x: ColumnNames,
        y: ColumnNames | None = None,
        batch_size: int | None = None,
        dtypes: Mapping[str, Any] | None = None,
        missing: Missing = "refuse",
    ) -> Self:
        """Return the clients of a table in memory; their values are sent once.

        Columns of numbers without nulls are not copied where the table is grouped by
        client; else its rows are grouped, once.

        Args:
            table: a `pyarrow.Table`, a `pandas.DataFrame`, or columns by name.
            client: as the others, as `from_parquet` takes it.
            x: the inputs.
            y: the labels.
            batch_size: rows of a batch.
            dtypes: what columns are cast to.
            missing: what becomes of rows with a null or NaN.

        Raises:
            ConfigError: a column is not there, or an argument is out of its range.
            ValueMismatchError: a cell does not fit; column and client are named.
        """
        found = to_arrow(table, [client, *columns_of(x), *columns_of(y)])
        features = Features.of(found.schema, x, y, dtypes, missing, TABLE)
        ids, sizes, held = hold_clients(found, features, client)
        return cls._of_rows(HeldSource(held), features, ids, sizes, batch_size)

    @classmethod
    @tracebacks.shorten
    def from_ray(
        cls,
        dataset: Any,
        *,
        client: str,
        x: ColumnNames,
        y: ColumnNames | None = None,
        batch_size: int | None = None,
        dtypes: Mapping[str, Any] | None = None,
        missing: Missing = "refuse",
    ) -> Self:
        """Return the clients of a Ray dataset, grouped once, by Ray.

        Its columns that are named are sorted by client, and stay in the object store
        until this is gone. Rows of a client are in the order in which Ray has them.
        To read and sort takes Ray a CPU that no worker holds.

        Args:
            dataset: a `ray.data.Dataset`.
            client: as the others, as `from_parquet` takes it.
            x: the inputs.
            y: the labels.
            batch_size: rows of a batch.
            dtypes: what columns are cast to.
            missing: what becomes of rows with a null or NaN.

        Raises:
            ConfigError: a column is not there, or an argument is out of its range.
            ValueMismatchError: a column has what no tensor holds.
            ResourceError: workers hold all CPUs.
        """
        from ray_fed.cluster.datasets import DatasetBlocks

        columns = [client, *columns_of(x), *columns_of(y)]
        rows = DatasetBlocks(dataset, client, columns)
        features = Features.of(rows.schema, x, y, dtypes, missing, rows.label)
        chunks = rows.read_ids(client)
        index = index_clients(chunks, client, rows.label).with_order(chunks)
        source = TableSource(rows, features, index)
        return cls._of_rows(source, features, index.ids, index.sizes, batch_size)

    @classmethod
    @tracebacks.shorten
    def from_sqlite(
        cls,
        path: str | os.PathLike[str],
        *,
        features: Mapping[str, Any],
        split: str | None = None,
        batch_size: int | None = None,
    ) -> Self:
        """Return the clients of an SQLite file in TensorFlow Federated's schema.

        Args:
            path: of the file, decompressed, which every worker opens.
            features: of a `tf.train.Example`: what converts to a tensor's type, by
                name; int64, float32 or strings.
            split: such as "train"; None: all.
            batch_size: rows of a batch; None: each example is an element.

        Returns:
            Clients in the order of their ids, with sequences of a value for each
            feature. `map` makes inputs and labels of these.

        Raises:
            MissingFileError: there is no file.
            ConfigError: there is no client of the split.
            ValueMismatchError: the file has another schema, or an example cannot hold
                a feature.
        """
        rows = SqliteRows(os.fspath(path), split)
        source = SqliteSource(rows, features)
        member = fl.SequenceType(source.element)
        sizes = rows.sizes.astype(np.float64)
        dtypes = {str(name): str(leaf) for name, leaf in source.element.items()}
        facts = TableFacts(dtypes)
        return cls._of(source, member, rows.ids, sizes, facts).batch(batch_size)

"""`ClientData`: where clients' data is, by id, and how rows become batches.

Workers read this data, not the user's process. See the class.
"""

import dataclasses
import functools
import hashlib
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
    expect_ids,
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
from ray_fed.files.arrow_files import ArrowFormat
from ray_fed.files.features import ColumnNames, Features, Missing, columns_of
from ray_fed.files.formats import Format
from ray_fed.files.parquet import ParquetFormat
from ray_fed.files.sorted_rows import SortedRows
from ray_fed.files.sqlite_rows import SqliteRows
from ray_fed.files.table_files import RowGroups, TableFiles
from ray_fed.files.table_rows import TABLE, IdColumn, index_clients, to_arrow
from ray_fed.files.text import TextFormat
from ray_fed.language.type_checks import is_whole, read_whole
from ray_fed.observability import reprs
from ray_fed.values import read_limits, stored
from ray_fed.values.client_references import (
    ClientReference,
    ClientRun,
    ClientSource,
    HeldSource,
)


def _installed_limits() -> read_limits.Limits:
    context: Any = fl.framework.get_context_stack().current
    context = getattr(context, "execution_context", context)  # of a federated context
    limits = getattr(context, "read_limits", None)
    return limits if isinstance(limits, read_limits.Limits) else read_limits.limits()


@dataclasses.dataclass(frozen=True)
class TableFacts:
    """Facts about the rows of a table, for its repr.

    Attributes:
        columns: The dtype of each column in `x` and `y`, by name. Empty after `map`.
        drops: Whether a client may have fewer rows than were counted, because rows with
            missing cells are dropped when they are read.
    """

    columns: Mapping[str, str]
    drops: bool = False


COPY_BYTES = 4 * 2**30
"""Default of `TableOptions.copy_bytes`."""

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file, a folder or a glob pattern, as a path or fsspec URI, or a list of these."""


class TableOptions(TypedDict, total=False):
    """Options of `ClientData.from_parquet`, `from_csv`, `from_json` and `from_arrow`.

    Attributes:
        y: The labels, in the same forms as `x`. None, the default, means no labels.
        batch_size: Number of rows in a batch. None, the default, makes each row an
            element.
        dtypes: Dtypes to cast columns to, by column. Other columns are not cast.
        missing: How to treat rows with a null or NaN. "refuse", the default, raises an
            error that names the column and the client. "drop" leaves the rows out.
            "keep" lets NaN through.
        copy_bytes: Largest size of the sorted copy of the rows that each machine keeps
            on disk, 4 GiB by default. With 0, no copy is made.
        id_type: How ids are read. `str` reads text, so `007` and `7` are two clients.
            `int` reads whole numbers, so `007` and `7` are one client. None, the
            default, uses the type of the column. Ids in CSV files and in names of
            folders have no type: they are whole numbers if all ids look like whole
            numbers. If both `007` and `7` occur, this is an error.
    """

    y: ColumnNames | None
    batch_size: int | None
    dtypes: Mapping[str, Any] | None
    missing: Missing
    copy_bytes: int
    id_type: type[Any] | None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ClientData(ClientRun):
    """The data of clients, by reference.

        data = ClientData.from_function(ids, read_file, dataset_type)
        state = training.next(state, data.select(["anna", "bert"]))

    Create a `ClientData` with one of its `from_` methods. It is a sequence of
    `ClientReference`s. Pass it where a computation takes a value placed at clients. You
    can also pass a slice, a selection, or a list of elements. The process that passes
    them reads no data. Each worker reads the clients whose work it does, and keeps
    their data for later rounds in up to `Config.workers.client_bytes` of memory.

    If clients have sequences of rows, workers apply `take`, `shuffle`, `epochs` and
    `batch` in this order, whatever the order of the calls.

    Attributes:
        ids: One id for each client, in order.
        table: Facts about the table that has the clients' rows. None if clients do not
            come from a table. Then `weights` may count something other than rows.
    """

    table: TableFacts | None = None

    def __post_init__(self) -> None:
        for array in (self.positions, self.weights):
            if array is not None:
                array.flags.writeable = False

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
        if not is_whole(index):
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
        """Return the clients with these ids, in this order. An id may occur twice.

        For one client, use `data[id]`. There, a whole number is a position, not an id.

        Raises:
            ConfigError: An id belongs to no client, or `ids` is one string.
        """
        if isinstance(ids, str | bytes):
            raise errors.ConfigError(
                f"Expected a list of ids, found {ids!r}: pass it in a list, or take"
                " `data[id]`, which is one client."
            )
        return self.pick(self._places(read_ids(ids)))

    @tracebacks.shorten
    def read(self, client: Any) -> Any:
        """Read the data of a client in this process, to look at it.

        Args:
            client: Id of the client. A whole number is the client's position instead.

        Returns:
            NumPy values in Python containers. A sequence is a list of its elements. The
            values are copies that you can write to.

        Raises:
            ConfigError: No client has the id.
            ValueMismatchError: The data does not have the client's type.
            ComputationError: The function that reads the data raised an error.
        """
        plain = plain_values.copy_plain(self[client].read())
        return plain_values.from_plain(plain, self.type_signature)

    @tracebacks.shorten
    def describe(self) -> dict[str, Any]:
        """Return facts about the clients' data, without reading the data.

        A resumed run compares them with the saved facts, to notice other data.

        Returns:
            JSON values by name: steps such as `take` and `batch`, the columns of a
            table, hashes of the functions passed to `map`, and a hash of the clients'
            numbers of rows. For values in memory, the hash includes batch sizes.
        """
        base, _, arrangement = self._base()
        counts = None if self.table is None else self._row_weights()
        if isinstance(base, HeldSource):
            held = (base.held[position] for position in self.positions)
            sizes = map(stored.sizes_of_sequences, held)
            counts = [size for each in sizes for size in (len(each), *each)]
        described = {**base.describe(), **arrangement.describe()}
        if self.table is not None and self.table.columns:
            described.setdefault("columns", list(self.table.columns.items()))
        if counts is not None:
            content = np.asarray(counts, np.float64).tobytes()
            described["numbers of rows"] = hashlib.sha256(content).hexdigest()[:16]
        return described

    def _places(self, ids: Sequence[Any]) -> list[int]:
        expect_ids(ids, self.ids)
        unknown = [client for client in ids if client not in self._indices]
        if unknown:
            raise errors.ConfigError(
                f"Expected ids of these {len(self)} clients, found {unknown[:5]}."
                f"{errors.suggest(unknown[0], self.ids)}"
            )
        return [self._indices[client] for client in ids]

    @tracebacks.shorten
    def filter(self, *, min_rows: int) -> Self:
        """Return the clients that have at least `min_rows` rows.

        Rows are counted after `hold_out_rows` and `take`, in one epoch. For tables in
        files, the count includes rows that `missing="drop"` leaves out later.

        Raises:
            ConfigError: `min_rows` is below 0, or the numbers of rows are not known.
        """
        read_whole("min_rows", min_rows, 0)
        rows = self._row_weights()
        if rows is None:
            raise errors.ConfigError(
                "Expected clients whose numbers of rows are known, as `filter` needs,"
                " found unknown numbers: pass them as `weights`."
            )
        left = dataclasses.replace(self._rows()[2], epochs=1).weigh(rows)
        return self.pick(np.flatnonzero(left >= min_rows).tolist())

    @tracebacks.shorten
    def concat(self, *others: "ClientData") -> Self:
        """Return these clients, followed by the clients of `others`.

        Raises:
            ConfigError: Two clients have the same id.
            ValueMismatchError: Types of clients differ, or steps such as `batch` do.
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
                "Expected clients with the same `take`, `shuffle`, `epochs` and"
                " `batch`, found different ones: call these methods on the result of"
                " `concat`."
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
        """Return the unarranged source, the type of its values, and the arrangement."""
        source = self.source
        if isinstance(source, ArrangedSource):
            return source.rows, fl.SequenceType(source.row), source.arrangement
        return source, self.type_signature, Arrangement()

    @tracebacks.shorten
    def take(self, count: int) -> Self:
        """Return the clients with at most their first `count` rows.

        If `take` is called twice, the smaller count applies.

        Raises:
            ConfigError: `count` is below 1.
            UnsupportedError: Clients do not have sequences of rows.
        """
        read_whole("take", count, 1)
        before = self._rows()[2].take
        return self._arranged(take=count if before is None else min(count, before))

    @tracebacks.shorten
    def shuffle(self, seed: int | None = None) -> Self:
        """Return the clients with rows in a new random order in each call and epoch.

        The order depends on the seed, the number of earlier calls of the context, the
        client's id and the epoch. It does not depend on the worker or the attempt.

        Args:
            seed: Seed of the order, >= 0. If None, the seed of `Config` is used.

        Raises:
            ConfigError: The seed is not a whole number of at least 0.
        """
        if seed is not None:
            read_whole("seed", seed, 0)
        return self._arranged(shuffles=True, seed=seed)

    @tracebacks.shorten
    def epochs(self, count: int) -> Self:
        """Return the clients with their rows repeated `count` times.

        Raises:
            ConfigError: `count` is below 1.
        """
        return self._arranged(epochs=count)

    @tracebacks.shorten
    def batch(self, size: int | None, *, drop_remainder: bool = False) -> Self:
        """Return the clients with their rows grouped into batches.

        Args:
            size: Number of rows in a batch, >= 1. None makes each row an element.
            drop_remainder: Whether to leave out an epoch's last batch if it is smaller.

        Raises:
            ConfigError: The size is below 1.
            ValueMismatchError: Rows have a type that cannot be batched.
        """
        return self._arranged(batch_size=size, drop_remainder=drop_remainder)

    @tracebacks.shorten
    def map(self, function: Callable[[Any], Any]) -> Self:
        """Return the clients with a TensorFlow function applied to each row.

        The function is applied before `take`, `shuffle`, `epochs` and `batch`. It is
        traced now, and again on each worker: do not write to arrays that it uses.

        Args:
            function: Function from a row to a new row. Rows are tensors, in the
                containers of the row's type, such as dictionaries.

        Raises:
            ConfigError: `function` cannot be called.
            ValueMismatchError: A tensor of a row, or of a new row, has unknown sizes.
            UnsupportedError: The function draws random numbers.
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
        """Return the clients twice: with the rows that stay, and with held-out rows.

        If you call this again on one of the results, it divides the rows of the result.

        Args:
            fraction: Fraction of each client's rows to hold out, above 0 and below 1.
                The number is rounded, so a client with few rows may hold out none.
            seed: Seed of the random choice of rows, >= 0.
            last: Whether to hold out the last rows instead of random rows. In a table
                that is sorted by time, the last rows are the latest.

        Raises:
            ConfigError: An argument is out of its range.
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
        """Return the clients that stay, and the held-out clients, each in order.

        Args:
            fraction: Fraction of the clients to hold out, above 0 and below 1. The
                number is rounded. At least one client is held out, and one stays.
            seed: Seed of the random choice of clients, >= 0.

        Raises:
            ConfigError: An argument is out of its range, or there is only one client.
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
        """Return the clients at the positions `indices`, in this order.

        Raises:
            ConfigError: An index is not a whole number, or is out of range.
        """
        taken = np.asarray(indices)
        is_whole = taken.dtype.kind in "iu" or not taken.size
        if not is_whole or np.any((taken < 0) | (taken >= len(self))):
            raise errors.ConfigError(
                "Expected positions of clients, whole numbers from 0 to"
                f" {len(self) - 1}, found {errors.describe(indices)}."
            )
        taken = taken.astype(np.int64)
        weights = None if self.weights is None else self.weights[taken]
        ids = tuple(self.ids[index] for index in indices)
        return dataclasses.replace(
            self, positions=self.positions[taken], weights=weights, ids=ids
        )

    def _rows(self) -> tuple[ClientSource, fl.Type, Arrangement]:
        """Return the source of the rows, the type of a row, and the arrangement.

        Raises UnsupportedError if clients do not have sequences of rows.
        """
        base, member, arrangement = self._base()
        if not isinstance(member, fl.SequenceType):
            raise errors.UnsupportedError(
                "Expected clients that have a sequence of rows each, found that each"
                f" client has a value of type `{member}`."
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
        """Return clients from values in memory, which are checked now and sent once.

        Arrays are copied unless they are read-only, so later writes to them do not
        change the clients.

        Args:
            clients: Values of the clients by id, or a sequence of values. In a
                sequence, the index of a value is the client's id.
            type_spec: Type of one client's value.
            weights: Costs of the clients' work, in order, finite, >= 0. If None, the
                numbers of rows in clients' sequences are used.

        Raises:
            ValueMismatchError: A value does not have the type, or an iterable takes
                more bytes than `Config.data.sequence_bytes`.
            ConfigError: The number of weights is not the number of clients, a weight is
                negative or not finite, or ids cannot be hashed or are not distinct.
        """
        ids: list[Any]
        given: Iterable[Any]
        if isinstance(clients, Mapping):
            ids, given = read_ids(clients.keys()), clients.values()
        else:
            ids, given = list(range(len(clients))), clients
        member = read_member_type(type_spec)
        with read_limits.limited(_installed_limits()):
            held = [
                plain_values.own(
                    plain_values.to_plain(
                        value, member, f"the data of the client with the id {client!r}"
                    )
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
            ids: Ids of the clients, in order.
            load: Function from a client's id to its value. It must return the same
                value each time, because a worker calls it again after a failure or
                after it dropped the value. The function is pickled when it is sent to
                workers: do not write to arrays that it uses.
            type_spec: Type of the values that `load` returns.
            weights: Costs of the clients' work, in order, finite, >= 0. None if they
                are not known.

        Raises:
            ConfigError: The number of weights is not the number of clients, a weight is
                negative or not finite, ids cannot be hashed or are not distinct, or
                `load` cannot be called.
            ValueMismatchError: `type_spec` is not a type of clients' values.
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
        """Return the clients of a table in Parquet files.

        The column of ids is read now. On each machine, the first worker that needs a
        client sorts all rows by client, once, into an Arrow file in the temporary
        folder. All processes of the machine read clients' rows from this file. A table
        of more than `copy_bytes` is not sorted. Workers then read the row groups that
        contain a client's rows. This is fast if the table is sorted by client and each
        row group has few clients.

        Args:
            path: A file, a folder or a glob pattern, or a list of these. Each is a path
                or an fsspec URI. A folder named `client=anna` (Hive partitioning) adds
                a column `client` with the value `anna`.
            client: Name of the column of ids, which are whole numbers or strings.
            x: Columns of the inputs: a name, a list of names whose columns are stacked
                and have one dtype, or a dictionary of these for named inputs.
            **options: `y`, `batch_size`, `dtypes`, `missing`, `copy_bytes` and
                `id_type`. See `TableOptions`.

        Returns:
            Clients in the order of their ids. Rows have the type `<x=..., y=...>`.

        Raises:
            MissingFileError: There is no file, or it cannot be read.
            ConfigError: A column is missing, or an argument is out of its range.
            ValueMismatchError: A column has values that no tensor can hold, its type
                changes between files, or a row has no id.
        """
        return cls._from_files(ParquetFormat(), path, client=client, x=x, **options)

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
        """Return the clients of a table in CSV files whose first line names columns.

        This works like `from_parquet`, with two differences. The first MiB of the first
        file decides the types of columns: whole numbers, floats, booleans, times or
        strings. A table of more than `copy_bytes` is an error. Files may be compressed
        by gzip, bzip2, zstd or lz4. Each read decompresses them into the temporary
        folder.

        Args:
            path: Files, as in `from_parquet`.
            client: Name of the column of ids, which are whole numbers or strings.
            x: Columns of the inputs, as in `from_parquet`.
            **options: Options, as in `from_parquet`.

        Raises:
            MissingFileError: There is no file, or it cannot be read.
            ConfigError: A column is missing, or an argument is out of its range.
            ValueMismatchError: A column has values that no tensor can hold, or a row
                has no id.
        """
        return cls._from_files(TextFormat("csv"), path, client=client, x=x, **options)

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

        The arguments, compression and errors are as in `from_csv`.
        """
        return cls._from_files(TextFormat("json"), path, client=client, x=x, **options)

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

        This works like `from_parquet`, but a table of more than `copy_bytes` is an
        error.
        """
        return cls._from_files(ArrowFormat(), path, client=client, x=x, **options)

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
        id_type: type[Any] | None = None,
    ) -> Self:
        if hasattr(path, "columns"):
            raise errors.ConfigError(
                "Expected a file or a folder, or several, as `path`, found a"
                f" `{type(path).__name__}`: pass it to `ClientData.from_table`."
            )
        given = [path] if isinstance(path, str | os.PathLike) else path
        if not given:
            raise errors.ConfigError(
                "Expected a file or a folder, or several, as `path`, found none."
            )
        read_whole("copy_bytes", copy_bytes, 0)
        uris = [os.fspath(uri) for uri in given]
        columns = [*columns_of(x), *columns_of(y)]
        files = TableFiles(uris, kind, columns, IdColumn(client, id_type))
        features = Features.of(files.schema, x, y, dtypes, missing, files.label)
        index = files.index()
        if files.num_bytes <= copy_bytes:
            source = SortedRows(files, features, client, index)
        elif kind.name == "parquet":
            index = index.with_order(files.read_column(client))
            source = TableSource(RowGroups(files), features, index)
        else:
            raise errors.ConfigError(
                f"Expected at most {copy_bytes} bytes of rows in {files.label}, found"
                f" about {files.num_bytes}: raise `copy_bytes`, or write Parquet files,"
                " which `from_parquet` reads without a copy."
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
        id_type: type[Any] | None = None,
    ) -> Self:
        """Return the clients of a table in memory, whose rows are sent once.

        The columns in `client`, `x` and `y` are copied, so later writes to the table do
        not change the clients. See `from_parquet` and `TableOptions` for the arguments.

        Args:
            table: A `pyarrow.Table`, a `pandas.DataFrame`, or a dictionary of columns.
                In the last two, lists of the same length in all rows become vectors.
            client: Name of the column of ids.
            x: Columns of the inputs.
            y: Columns of the labels, or None without labels.
            batch_size: Number of rows in a batch.
            dtypes: Dtypes to cast columns to, by column.
            missing: How to treat rows with a null or NaN.
            id_type: How ids are read: `str` as text, `int` as whole numbers. None uses
                the type of the column.

        Raises:
            ConfigError: A column is missing, or an argument is out of its range.
            ValueMismatchError: A cell does not fit. The error names column and client.
        """
        found = to_arrow(table, [client, *columns_of(x), *columns_of(y)])
        found = IdColumn(client, id_type).cast(found, TABLE)
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
        id_type: type[Any] | None = None,
    ) -> Self:
        """Return the clients of a Ray dataset, which Ray sorts by client once.

        The sorted columns stay in the object store as long as this object lives. The
        rows of a client have no particular order. To read and sort the dataset, Ray
        needs a CPU that no worker occupies. See `from_table` for the arguments.

        Args:
            dataset: A `ray.data.Dataset`.
            client: Name of the column of ids.
            x: Columns of the inputs.
            y: Columns of the labels, or None without labels.
            batch_size: Number of rows in a batch.
            dtypes: Dtypes to cast columns to, by column.
            missing: How to treat rows with a null or NaN.
            id_type: How ids are read.

        Raises:
            ConfigError: A column is missing, or an argument is out of its range.
            ValueMismatchError: A column has values that no tensor can hold.
            ResourceError: Workers occupy all CPUs.
        """
        from ray_fed.cluster.datasets import DatasetBlocks

        columns = [client, *columns_of(x), *columns_of(y)]
        rows = DatasetBlocks(dataset, IdColumn(client, id_type), columns)
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
            path: Path of the decompressed file. Every worker opens it.
            features: Types of the features in a `tf.train.Example`, by name: int64,
                float32 or strings.
            split: Name of a split, such as "train". None reads all splits.
            batch_size: Number of rows in a batch. None makes each example an element.

        Returns:
            Clients in the order of their ids. Each row is a dictionary of features. Use
            `map` to turn rows into inputs and labels.

        Raises:
            MissingFileError: There is no file.
            ConfigError: No client has the split.
            ValueMismatchError: The file has another schema, or an example does not have
                a feature.
        """
        rows = SqliteRows(os.fspath(path), split)
        source = SqliteSource(rows, features)
        member = fl.SequenceType(source.element)
        sizes = rows.sizes.astype(np.float64)
        dtypes = {str(name): str(leaf) for name, leaf in source.element.items()}
        facts = TableFacts(dtypes)
        return cls._of(source, member, rows.ids, sizes, facts).batch(batch_size)

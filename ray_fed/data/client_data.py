"""Data of clients, placed once: on the workers that need it, for as long as it fits."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import federated_language as fl
import numpy as np

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.data.arguments import (
    check_callable,
    check_number,
    read_ids,
    read_member_type,
)
from ray_fed.data.client_rows import ClientRows, TableFacts
from ray_fed.data.held_values import hold_values, weigh_values
from ray_fed.data.laid_source import LaidSource
from ray_fed.data.sqlite_source import SqliteSource
from ray_fed.data.table_source import (
    TableSource,
    count_clients,
    hold_clients,
    index_clients,
)
from ray_fed.files.arrow_rows import ArrowRows
from ray_fed.files.features import ColumnNames, Features, Missing, columns_of
from ray_fed.files.laying import ClientTable
from ray_fed.files.parquet_rows import ParquetRows
from ray_fed.files.sqlite_rows import SqliteRows
from ray_fed.files.table_rows import TableRows
from ray_fed.values.client_sources import FunctionSource, HeldSource

COPY_BYTES = 4 * 2**30
"""The most bytes of disk that a machine lays a table's rows in, unless told."""


class ClientData(ClientRows):
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

    """

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
        held = hold_values(ids, given, member)
        weights = weigh_values(held) if weights is None else weights
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
    def from_parquet(  # noqa: PLR0913 (keywords that say what a table's columns are)
        cls,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        client: str,
        x: ColumnNames,
        y: ColumnNames | None = None,
        batch_size: int | None = None,
        dtypes: Mapping[str, Any] | None = None,
        missing: Missing = "refuse",
        copy_bytes: int = COPY_BYTES,
    ) -> Self:
        """Return the clients of a table in parquet files, by the column that has them.

        The column of clients is read now, once. The first worker of a machine that is
        given clients lays the columns of all rows by client, in files of its temporary
        folder that vanish with the last process that has them open; from then on a
        client is read there, and nothing else is. A table of more than `copy_bytes` is
        not laid: a client's rows are read by the row groups that have them, so that a
        table that is sorted by client, with row groups of a few clients, costs least.

        Args:
            path: of a file or a folder, or several; a URI that fsspec knows. In a
                folder, names as `client=anna` (hive) are a column.
            client: the column of ids, whole numbers or strings.
            x: the inputs: a column; a list of columns of one dtype, to be stacked; or
                a dictionary of these, for named inputs.
            y: the labels, in the same ways; None: there are none.
            batch_size: rows of a batch; None: each row is an element.
            dtypes: what columns are cast to, by name; else nothing is cast.
            missing: what becomes of rows with a null or NaN: "refuse" raises, naming
                column and client; "drop" leaves them out; "keep" lets NaN through.
            copy_bytes: the most bytes of disk that a machine lays rows in; 0: none.

        Returns:
            Clients in the order of their ids, with sequences of `<x=..., y=...>`.

        Raises:
            MissingFileError: there is no file.
            ConfigError: a column is not there, or an argument is out of its range.
            ValueMismatchError: a column has what no tensor holds, its type changes
                between files, or a row has no client.
        """
        given = [path] if isinstance(path, str | os.PathLike) else path
        if not given:
            raise errors.ConfigError(
                "Expected a file or a folder, or several, as `path`, found none."
            )
        check_number(copy_bytes, "copy_bytes")
        uris = [os.fspath(uri) for uri in given]
        columns = [client, *columns_of(x), *columns_of(y)]
        rows = ParquetRows(uris, columns)
        features = Features.of(rows.schema, x, y, dtypes, missing, rows.label)
        if rows.count_bytes(features.leaves) > copy_bytes:
            return cls._of_table(rows, features, client, batch_size)
        ids, sizes, is_sorted = count_clients(rows, client)
        table = ClientTable(rows, features, client, ids, sizes, is_sorted)
        member = fl.SequenceType(features.element)
        weights = sizes.astype(np.float64)
        source, facts = LaidSource(table), _facts_of(features, drops=True)
        return cls._of(source, member, ids, weights, facts).batch(batch_size)

    @classmethod
    @tracebacks.shorten
    def from_table(  # noqa: PLR0913 (as from_parquet)
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
        rows = ArrowRows(table, [client, *columns_of(x), *columns_of(y)])
        features = Features.of(rows.schema, x, y, dtypes, missing, rows.label)
        ids, sizes, held = hold_clients(rows, features, client)
        member = fl.SequenceType(features.element)
        source, facts = HeldSource(held), _facts_of(features, drops=False)
        return cls._of(source, member, ids, sizes, facts).batch(batch_size)

    @classmethod
    @tracebacks.shorten
    def from_ray(  # noqa: PLR0913 (as from_parquet)
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
        from ray_fed.cluster.driver.dataset_blocks import DatasetBlocks

        columns = [client, *columns_of(x), *columns_of(y)]
        rows = DatasetBlocks(dataset, client, columns)
        features = Features.of(rows.schema, x, y, dtypes, missing, rows.label)
        return cls._of_table(rows, features, client, batch_size)

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

    @classmethod
    def _of_table(
        cls, rows: TableRows, features: Features, client: str, batch_size: int | None
    ) -> Self:
        ids, index = index_clients(rows, client)
        source = TableSource(rows, features, ids, index)
        member = fl.SequenceType(features.element)
        sizes = index.sizes.astype(np.float64)
        facts = _facts_of(features, drops=True)
        return cls._of(source, member, ids, sizes, facts).batch(batch_size)


def _facts_of(features: Features, *, drops: bool) -> TableFacts:
    """Return what is shown of a table.

    Args:
        features: of its rows.
        drops: whether rows that are to be dropped are counted.
    """
    columns = {
        name: str(fl.TensorType(leaf.type_signature.dtype, leaf.shape))
        for leaf in features.leaves
        for name in leaf.columns
    }
    return TableFacts(columns, drops=drops and features.missing == "drop")

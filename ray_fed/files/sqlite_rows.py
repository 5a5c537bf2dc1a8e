"""Clients in an SQLite file, in the schema of TensorFlow Federated's client data.

    examples           split_name TEXT, client_id TEXT, serialized_example_proto
    client_metadata    client_id TEXT, split_name TEXT, num_examples INTEGER

The documentation of `tff.simulation.datasets.SqlClientData` describes the schema:
https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets/SqlClientData
"""

import contextlib
import pathlib
import sqlite3
import urllib.parse
from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.error_texts import describe_process

_SCHEMA = {
    "examples": ("split_name", "client_id", "serialized_example_proto"),
    "client_metadata": ("client_id", "split_name", "num_examples"),
}


_CLIENT = "client_id"

_ID = "client_id COLLATE BINARY"
"""The id in queries. A column's own collation may treat `A` and `a` as equal."""

_KINDS = {"INT": "INTEGER", "CHAR": "TEXT", "CLOB": "TEXT", "TEXT": "TEXT"}
"""How SQLite compares values of a column, by what the column's type contains."""


class SqliteRows:
    """Reads the serialized examples of a client, in one split or in all splits.

    A client's rows are found by the file's index. If the file has no index, the ids of
    all rows are read once. Every worker opens `path`. The constructor raises
    MissingFileError, ValueMismatchError for another schema, and ConfigError for a split
    without clients.

    Attributes:
        split_name: The split of the clients, or None for all splits.
        ids: Ids of the clients, in ascending order.
        sizes: i64[clients], numbers of examples, as `client_metadata` says.
    """

    def __init__(self, path: str, split_name: str | None) -> None:
        self._path, self.split_name = path, split_name
        self.label = f"`{path}`"
        with self._connect() as connection:
            self._check_schema(connection)
            found = connection.execute(
                "SELECT client_id, SUM(num_examples) FROM client_metadata"
                f"{self._where()} GROUP BY {_ID} ORDER BY {_ID}",
                self._arguments(),
            ).fetchall()
            if not found:
                raise self._no_client(connection)
            self.ids = [client for client, _ in found]
            self.sizes: NDArray[np.int64] = np.array([n for _, n in found], np.int64)
            is_indexed = self._finds_clients(connection)
            self._row_ids = None if is_indexed else self._index_rows(connection)

    def read(self, position: int) -> list[bytes]:
        """Return the serialized examples of a client, in the order of the file.

        Raises ValueMismatchError if an example is not bytes, or if `examples` and
        `client_metadata` differ in the number of examples.
        """
        with self._connect() as connection:
            if self._row_ids is None:
                arguments = self._arguments(self.ids[position])
                rows = connection.execute(self._client_query, arguments).fetchall()
            else:
                query = "SELECT serialized_example_proto FROM examples WHERE rowid = ?"
                rows = [
                    connection.execute(query, (int(row),)).fetchone()
                    for row in self._row_ids[position]
                ]
        found: list[Any] = [row for (row,) in rows]
        wrong = [row for row in found if not isinstance(row, bytes)]
        if wrong:
            raise errors.ValueMismatchError(
                f"Expected bytes as each `serialized_example_proto` of the client"
                f" {self.ids[position]!r} in {self.label}, found"
                f" {errors.describe(wrong[0])}: write or copy the file anew."
            )
        if len(found) != self.sizes[position]:
            raise errors.ValueMismatchError(
                f"Expected {self.sizes[position]} examples of the client"
                f" {self.ids[position]!r} in {self.label}, as its `client_metadata`"
                f" says, found {len(found)}."
            )
        return found

    @contextlib.contextmanager
    def _connect(self) -> Generator[sqlite3.Connection]:
        if not pathlib.Path(self._path).is_file():
            raise errors.MissingFileError(
                f"Expected an SQLite file {self.label}, found none in"
                f" {describe_process()}: put it there, on every machine that"
                " runs its clients."
            )
        quoted = urllib.parse.quote(str(pathlib.Path(self._path).resolve()))
        connection = sqlite3.connect(f"file:{quoted}?mode=ro", uri=True)
        try:
            yield connection
        except sqlite3.Error as error:
            raise errors.ValueMismatchError(
                f"Expected an SQLite file {self.label}, whole and decompressed, found"
                f" that it cannot be read ({error})."
            ) from error
        finally:
            connection.close()

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        kinds = set[str]()
        for table, columns in _SCHEMA.items():
            rows = connection.execute(f"PRAGMA table_info({table})").fetchall()
            types = {row[1]: row[2].upper() for row in rows}
            missing = set(columns) - types.keys()
            if missing:
                raise errors.ValueMismatchError(
                    f"Expected a table `{table}` with the columns {list(columns)} in"
                    f" {self.label}, found it without {sorted(missing)}."
                )
            kind = next((k for part, k in _KINDS.items() if part in types[_CLIENT]), "")
            kinds.add(kind or types[_CLIENT])
        if len(kinds) > 1:  # `007` of one table would be 7 of the other
            raise errors.ValueMismatchError(
                f"Expected one type of the columns `client_id` of {self.label}, found"
                f" {sorted(kinds)}: write the file with ids of the type TEXT."
            )

    def _no_client(self, connection: sqlite3.Connection) -> errors.ConfigError:
        rows = connection.execute("SELECT DISTINCT split_name FROM client_metadata")
        splits = sorted(str(name) for (name,) in rows)
        return errors.ConfigError(
            f"Expected clients of the split {self.split_name!r} in {self.label}, found"
            f" the splits {splits}."
        )

    def _where(self, *more: str) -> str:
        split = [] if self.split_name is None else ["split_name = ?"]
        conditions = [*split, *more]
        return f" WHERE {' AND '.join(conditions)}" if conditions else ""

    def _arguments(self, *more: object) -> list[object]:
        return [*([] if self.split_name is None else [self.split_name]), *more]

    @property
    def _client_query(self) -> str:
        where = self._where(f"{_ID} = ?")
        return f"SELECT serialized_example_proto FROM examples{where}"

    def _finds_clients(self, connection: sqlite3.Connection) -> bool:
        plan = connection.execute(
            f"EXPLAIN QUERY PLAN {self._client_query}", self._arguments("")
        ).fetchall()
        return all("SEARCH" in row[3] and "client_id=" in row[3] for row in plan)

    def _index_rows(self, connection: sqlite3.Connection) -> list[NDArray[np.int64]]:
        positions = {client: index for index, client in enumerate(self.ids)}
        rows = connection.execute(
            f"SELECT rowid, client_id FROM examples{self._where()} ORDER BY rowid",
            self._arguments(),
        )
        found: list[list[int]] = [[] for _ in self.ids]
        for row, client in rows:
            if client not in positions:
                raise errors.ValueMismatchError(
                    f"Expected every client of `examples` in `client_metadata` of"
                    f" {self.label}, found {client!r} missing."
                )
            found[positions[client]].append(row)
        return [np.array(rows, np.int64) for rows in found]

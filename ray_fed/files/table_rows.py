"""The seam between an index of rows and where the rows lie.

Which rows of a table are a client's: an index made once, from one column.

Rows are counted through the whole table. Neighbouring rows of one client are a range;
a sorted table has about one for each client, an unsorted one up to one for each row.
"""

import abc
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.files import opening
from ray_fed.files.arrow_types import decoded, is_text


@dataclasses.dataclass(frozen=True, eq=False)
class RowIndex:
    """The rows of each client.

    Attributes:
        splits: i64[clients + 1], the ranges of client i are those from `splits[i]` on,
            up to `splits[i + 1]`.
        starts: i64[ranges], the first row of each range.
        counts: i64[ranges], the number of its rows.
    """

    splits: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]

    def ranges_of(self, position: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first rows and the sizes of a client's ranges, ascending."""
        inside = slice(self.splits[position], self.splits[position + 1])
        return self.starts[inside], self.counts[inside]

    def rows_of(self, position: int) -> NDArray[np.int64]:
        """Return the rows of a client, ascending."""
        starts, counts = self.ranges_of(position)
        offsets = np.cumsum(counts) - counts
        return np.arange(counts.sum()) + np.repeat(starts - offsets, counts)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of rows of each client."""
        total = np.concatenate([[0], np.cumsum(self.counts)])
        return np.diff(total[self.splits]).astype(np.int64)


class IdCoder(abc.ABC):
    """Gives ids of clients codes, chunk after chunk of their column.

    Args:
        column: its name, for errors.
        table: what the table is called in an error.
    """

    def __init__(self, column: str, table: str) -> None:
        self._column, self._table = column, table
        self._codes: dict[Hashable, int] = {}
        self._num_rows = 0

    @property
    def ids(self) -> list[Hashable]:
        """The ids so far, in the order in which they were met first: of the codes."""
        return list(self._codes)

    def add(self, chunk: Any) -> None:
        """Add the ids of the rows that come next.

        Args:
            chunk: an array of arrow.

        Raises:
            ValueMismatchError: a row has no client, or the column holds no ids.
        """
        chunk = decoded(chunk)
        self._check(chunk)
        if len(chunk):
            encoded = chunk.dictionary_encode()
            codes = np.array([self._code(i) for i in encoded.dictionary.to_pylist()])
            self._add_rows(codes[encoded.indices.to_numpy(zero_copy_only=False)])
        self._num_rows += len(chunk)

    def add_range(self, client: Hashable, count: int) -> None:
        """Add rows that come next, all of one client; see `add`."""
        if client is None:
            raise self._no_client(count, 0)
        if count:
            self._add_range(self._code(client), count)
        self._num_rows += count

    @abc.abstractmethod
    def _add_rows(self, codes: NDArray[np.int64]) -> None:
        """Add rows, at least one, by their clients' codes."""

    @abc.abstractmethod
    def _add_range(self, code: int, count: int) -> None:
        """Add rows, at least one, all of one client."""

    def _code(self, client: Hashable) -> int:
        return self._codes.setdefault(client, len(self._codes))

    def _check(self, chunk: Any) -> None:
        types = opening.import_extra("pyarrow.types")
        is_float = types.is_floating(chunk.type)  # pandas' for numbers with gaps
        if chunk.null_count:
            first = int(np.argmax(chunk.is_null().to_numpy(zero_copy_only=False)))
            then = f'.astype({{"{self._column}": "int64"}})' * is_float
            raise self._no_client(chunk.null_count, first, then)
        if not (types.is_integer(chunk.type) or is_text(chunk.type)):
            kind = "int64" if is_float else "str"
            raise errors.ValueMismatchError(
                f"Expected whole numbers or strings, an id for each client, in the"
                f" column `{self._column}` of {self._table}, found `{chunk.type}`: make"
                f' it one, such as by `frame.astype({{"{self._column}": "{kind}"}})`.'
            )

    def _no_client(
        self, count: int, first: int, then: str = ""
    ) -> errors.ValueMismatchError:
        return errors.ValueMismatchError(
            f"Expected a client in every row of the column `{self._column}` of"
            f" {self._table}, found {count} nulls from row {self._num_rows + first} on:"
            " leave such rows out, such as by"
            f' `frame.dropna(subset=["{self._column}"]){then}`.'
        )


class IndexBuilder(IdCoder):
    """Makes an index of chunks of a column of ids; see `IdCoder`."""

    def __init__(self, column: str, table: str) -> None:
        super().__init__(column, table)
        self._parts: list[tuple[NDArray[Any], ...]] = []

    def finish(self) -> RowIndex:
        """Return the index of all rows, with clients in the order of `ids`."""
        parts = [np.concatenate(p) for p in zip(*self._parts, strict=True)]
        codes, starts, counts = parts or [np.zeros(0, np.int64)] * 3
        self._parts.clear()
        order = np.argsort(codes, kind="stable")
        codes, starts, counts = codes[order], starts[order], counts[order]
        if len(codes):  # ranges that chunks cut in two
            begins = np.ones(len(codes), bool)
            begins[1:] = (codes[1:] != codes[:-1]) | (
                starts[1:] != starts[:-1] + counts[:-1]
            )
            firsts = np.flatnonzero(begins)
            counts = np.add.reduceat(counts, firsts).astype(np.int64)
            codes, starts = codes[firsts], starts[firsts]
        splits = np.searchsorted(codes, np.arange(len(self._codes) + 1))
        return RowIndex(splits.astype(np.int64), starts.astype(np.int64), counts)

    @override
    def _add_rows(self, codes: NDArray[np.int64]) -> None:
        ends = np.flatnonzero(codes[1:] != codes[:-1]) + 1
        starts = np.concatenate([[0], ends])
        counts = np.diff(np.concatenate([starts, [len(codes)]]))
        self._keep(codes[starts], starts, counts)

    @override
    def _add_range(self, code: int, count: int) -> None:
        self._keep(np.array([code]), np.zeros(1, np.int64), np.array([count]))

    def _keep(
        self, codes: NDArray[Any], starts: NDArray[Any], counts: NDArray[Any]
    ) -> None:
        small = codes.astype(np.int32), counts.astype(np.int32)
        self._parts.append((small[0], starts + self._num_rows, small[1]))


class ClientCounter(IdCoder):
    """Counts the rows of clients, in memory that follows the clients alone."""

    def __init__(self, column: str, table: str) -> None:
        super().__init__(column, table)
        self._counts = np.zeros(0, np.int64)
        self._num_runs, self._last = 0, -1

    def finish(self) -> tuple[list[Hashable], NDArray[np.int64], bool]:
        """Return ids, ascending; the rows of each; whether rows are in this order."""
        ids = self.ids
        order = order_by_id(ids)
        is_sorted = self._num_runs == len(ids) and order == list(range(len(ids)))
        return [ids[i] for i in order], self._counts[order], is_sorted

    @override
    def _add_rows(self, codes: NDArray[np.int64]) -> None:
        self._num_runs += int((codes[1:] != codes[:-1]).sum())
        self._meet(int(codes[0]), int(codes[-1]))
        self._counts[: codes.max() + 1] += np.bincount(codes)

    @override
    def _add_range(self, code: int, count: int) -> None:
        self._meet(code, code)
        self._counts[code] += count

    def _meet(self, first: int, last: int) -> None:
        self._num_runs += first != self._last
        self._last = last
        if len(self._codes) > len(self._counts):
            more = max(len(self._codes), 2 * len(self._counts)) - len(self._counts)
            self._counts = np.append(self._counts, np.zeros(more, np.int64))


def order_by_id(ids: Sequence[Any]) -> list[int]:
    """Return the order that sorts ids, numbers before strings."""
    return sorted(range(len(ids)), key=lambda i: (str(type(ids[i])), ids[i]))


def sorted_by_id(
    ids: Sequence[Hashable], index: RowIndex
) -> tuple[list[Hashable], RowIndex]:
    """Return clients in the order of their ids, whatever the order of their rows."""
    order = order_by_id(ids)
    lengths = np.diff(index.splits)[order]
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    offsets = np.repeat(index.splits[:-1][order] - splits[:-1], lengths)
    taken = np.arange(len(index.starts)) + offsets
    in_order = RowIndex(splits, index.starts[taken], index.counts[taken])
    return [ids[i] for i in order], in_order


class TableRows(abc.ABC):
    """Rows of a table, by their number; pickled without what it holds open.

    Attributes:
        label: what the table is called in an error.
        schema: of arrow.
    """

    label: str
    schema: Any

    @abc.abstractmethod
    def add_ids(self, column: str, coder: IdCoder) -> None:
        """Add the ids of all rows, in order, a bounded number at a time."""

    @abc.abstractmethod
    def take(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        """Return columns of rows, ascending, as a table of arrow."""

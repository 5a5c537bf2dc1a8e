"""Rows of parquet files by their number: read by row groups, in bounded memory.

    files (pyarrow.dataset) --> row groups --> rows, counted through all of them

A folder of the name `client=anna` (hive) gives all its rows to one client, unread.
"""

import collections
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ray_fed.files import opening
from ray_fed.files.arrow_types import decoded_table
from ray_fed.files.features import Leaf
from ray_fed.files.laid_columns import count_laid_bytes
from ray_fed.files.parquet_files import (
    count_group_bytes,
    count_row_bytes,
    list_files,
    locate,
    open_bounded,
    reading,
)
from ray_fed.files.row_index import IdCoder
from ray_fed.files.table_rows import TableRows

_CHUNK_ROWS = 65_536
"""Ids in memory at a time, while the index is made."""

_BATCH_BYTES = 16 * 2**20
"""Rows in memory at a time, while all are read."""

_EXPANSION = 2
"""How many times as large strings and lists are taken to be as they are encoded."""

_HELD_BYTES = 64 * 2**20
"""Row groups that a reader keeps: the next client's rows are often in the same."""

_LARGE_BYTES = 256 * 2**20
"""A row group that has more is not kept: it is read in pieces for each client."""

_HELD_FILES = 16
"""Files whose footer a reader keeps."""


_PROCESS_STATE = (
    "_filesystem", "_lock", "_opened", "_held", "_held_bytes", "num_groups_read",
    "num_bytes_read",
)  # fmt: skip
"""What a reader holds that stays in its process."""


class ParquetRows(TableRows):
    """The rows of one file, of many, or of folders.

    Args:
        uris: of files and folders; one table.
        columns: that must be there, and of one type in all files.

    Attributes:
        schema: of arrow; of files and folders.
        num_groups_read: row groups that `take` read, so far.
        num_bytes_read: of files, compressed, for these.

    Raises:
        MissingFileError: there is nothing.
        ValueMismatchError: a file is no parquet file, or the type of a column changes
            between files.
        ConfigError: a column is not there.
    """

    def __init__(self, uris: Sequence[str], columns: Sequence[str]) -> None:
        self._uri = uris[0]
        self.label = f"`{uris[0]}`" + f" and {len(uris) - 1} more" * (len(uris) > 1)
        columns = list(dict.fromkeys(columns))
        self.schema, self._files = list_files(uris, columns, self.label)
        sizes = [size for file in self._files for size in file.group_sizes]
        self._group_ends = np.cumsum(sizes, dtype=np.int64)
        self._num_bytes = sum(file.num_bytes for file in self._files)
        self._groups = [
            (number, group)
            for number, file in enumerate(self._files)
            for group in range(len(file.group_sizes))
        ]
        self._prepare()

    def _prepare(self) -> None:
        self._filesystem: Any = None
        self._lock = threading.Lock()
        self._opened: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._held: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._held_bytes = 0
        self.num_groups_read, self.num_bytes_read = 0, 0

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _PROCESS_STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    @override
    def add_ids(self, column: str, coder: IdCoder) -> None:
        for number, file in enumerate(self._files):
            if column in file.keys:
                coder.add_range(file.keys[column], sum(file.group_sizes))
                continue
            opened = self._open(number)
            with reading(self._files[number].path):
                for group, size in enumerate(file.group_sizes):
                    only = _only_value(opened.metadata, group, column)
                    if only is not None:
                        coder.add_range(only, size)
                        continue
                    for batch in opened.iter_batches(
                        _CHUNK_ROWS, row_groups=[group], columns=[column]
                    ):
                        coder.add(batch.column(0))
        while self._opened:
            self._opened.popitem()[1].close(force=True)

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yield columns of all rows, in order, as tables of bounded size."""
        pyarrow: Any = opening.import_extra("pyarrow")
        columns = list(dict.fromkeys(columns))
        for number, file in enumerate(self._files):
            read = [name for name in columns if name not in file.keys]
            with self._lock:
                opened = self._open(number)
            row_bytes = count_row_bytes(opened.metadata, read)
            count = min(_CHUNK_ROWS, max(1, _BATCH_BYTES // row_bytes))
            with reading(file.path):
                for group in range(len(file.group_sizes)):
                    for batch in opened.iter_batches(
                        count, row_groups=[group], columns=read
                    ):
                        table = pyarrow.Table.from_batches([batch])
                        yield self._with_keys(table, columns, file.keys)

    def count_bytes(self, leaves: Sequence[Leaf]) -> int:
        """Return about how many bytes the tensors of all rows take."""
        row_bytes = count_laid_bytes(leaves)
        if row_bytes is None:
            return _EXPANSION * self._num_bytes
        return row_bytes * int(self._group_ends[-1])

    def _open(self, number: int) -> Any:
        """Return a file, opened; one more than are kept closes the oldest."""
        if number in self._opened:
            self._opened.move_to_end(number)
            return self._opened[number]
        if self._filesystem is None:
            self._filesystem, _ = locate(self._uri)
        looked_at = self._files[number]
        with reading(looked_at.path):
            modified_ns = self._filesystem.get_file_info(looked_at.path).mtime_ns
            file = self._filesystem.open_input_file(looked_at.path)
            opened = open_bounded(file)
        looked_at.check(opened.metadata, modified_ns)
        self._opened[number] = opened
        if len(self._opened) > _HELD_FILES:
            _, oldest = self._opened.popitem(last=False)
            oldest.close(force=True)
        return opened

    @override
    def take(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        pyarrow: Any = opening.import_extra("pyarrow")
        groups = np.searchsorted(self._group_ends, rows, side="right")
        parts: list[Any] = []
        with self._lock:
            for group in np.unique(groups):
                number, inside = self._groups[group]
                size = self._files[number].group_sizes[inside]
                found = rows[groups == group] - self._group_ends[group] + size
                if self._is_large(int(group), columns):
                    parts.extend(self._pick_rows(int(group), found, columns))
                else:
                    table = self._read_group(int(group), columns)
                    parts.append(take_rows(table, found))
        if parts:
            return pyarrow.concat_tables(parts)
        fields = [self.schema.field(name) for name in columns]
        return decoded_table(pyarrow.schema(fields).empty_table())

    def _is_large(self, group: int, columns: Sequence[str]) -> bool:
        """Return whether a row group is read piece by piece, each time."""
        if group in self._held:
            return False
        number, inside = self._groups[group]
        metadata = self._open(number).metadata
        return count_group_bytes(metadata, columns, [inside])[0] > _LARGE_BYTES

    def _pick_rows(
        self, group: int, rows: NDArray[np.int64], columns: Sequence[str]
    ) -> Iterator[Any]:
        """Yield columns of some rows of a row group, copied, as tables of arrow."""
        pyarrow: Any = opening.import_extra("pyarrow")
        number, inside = self._groups[group]
        file, opened, start = self._files[number], self._open(number), 0
        read = [name for name in columns if name not in file.keys]
        count = max(1, _BATCH_BYTES // count_row_bytes(opened.metadata, read))
        self.num_groups_read += 1
        self.num_bytes_read += _count_compressed(opened.metadata, inside, read)
        with reading(file.path):
            for batch in opened.iter_batches(
                count, row_groups=[inside], columns=read, use_threads=False
            ):
                found = rows[(rows >= start) & (rows < start + len(batch))] - start
                start += len(batch)
                if len(found):
                    table = pyarrow.Table.from_batches([batch]).take(found)
                    yield self._with_keys(table, columns, file.keys)

    def _read_group(self, group: int, columns: Sequence[str]) -> Any:
        if group in self._held:
            self._held.move_to_end(group)
            return self._held[group]
        number, inside = self._groups[group]
        file = self._files[number]
        opened = self._open(number)
        with reading(self._files[number].path):
            read = [name for name in columns if name not in file.keys]
            table = opened.read_row_group(inside, columns=read, use_threads=False)
        table = self._with_keys(table, columns, file.keys)
        self.num_groups_read += 1
        self.num_bytes_read += _count_compressed(opened.metadata, inside, read)
        self._held[group] = table
        self._held_bytes += table.nbytes
        while len(self._held) > 1 and self._held_bytes > _HELD_BYTES:
            self._held_bytes -= self._held.popitem(last=False)[1].nbytes
        return table

    def _with_keys(
        self, table: Any, columns: Sequence[str], keys: dict[str, Any]
    ) -> Any:
        """Return the columns in order, those that folders say among them."""
        pyarrow: Any = opening.import_extra("pyarrow")
        for name in columns:
            if name in keys:
                values = pyarrow.array([keys[name]] * table.num_rows)
                field = self.schema.field(name)
                table = table.append_column(field, values.cast(field.type))
        return decoded_table(table.select(list(columns)))


def take_rows(table: Any, rows: NDArray[np.int64]) -> Any:
    """Return rows of a table, by ascending number; a range without a copy."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return table.slice(int(rows[0]), len(rows))
    return table.take(rows)


def _count_compressed(metadata: Any, group: int, columns: Sequence[str]) -> int:
    """Return the bytes of some columns of a row group, in the file."""
    found = metadata.row_group(group)
    chunks = (found.column(index) for index in range(found.num_columns))
    return sum(
        chunk.total_compressed_size
        for chunk in chunks
        if chunk.path_in_schema.partition(".")[0] in columns
    )


def _only_value(metadata: Any, group: int, column: str) -> Any:
    """Return the one value that statistics give for a column of a row group, or None.

    Of strings, statistics may be cut short, so that only numbers are believed.
    """
    found = metadata.row_group(group)
    for index in range(found.num_columns):
        chunk = found.column(index)
        if chunk.path_in_schema == column and chunk.is_stats_set:
            statistics = chunk.statistics
            is_one = statistics.has_min_max and statistics.min == statistics.max
            no_nulls = statistics.has_null_count and statistics.null_count == 0
            if is_one and no_nulls and type(statistics.min) is int:
                return statistics.min
    return None

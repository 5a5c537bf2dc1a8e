"""Rows of parquet files by their number: read by row groups, in bounded memory.

    files (pyarrow.dataset) --> row groups --> rows, counted through all of them

A folder of the name `client=anna` (hive) gives all its rows to one client, unread.
"""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.files import opening
from ray_fed.files.features import missing_column
from ray_fed.files.row_index import IndexBuilder
from ray_fed.files.table_rows import TableRows

_CHUNK_ROWS = 65_536
"""Ids in memory at a time, while the index is made."""

_HELD_BYTES = 64 * 2**20
"""Row groups that a reader keeps: the next client's rows are often in the same."""

_HELD_FILES = 16
"""Files whose footer a reader keeps."""


_PROCESS_STATE = (
    "_filesystem", "_lock", "_opened", "_held", "_whole", "num_groups_read",
)  # fmt: skip
"""What a reader holds that stays in its process."""


@dataclasses.dataclass(frozen=True)
class _File:
    """One file.

    Attributes:
        path: in its file system.
        keys: what its folders say (hive).
        group_sizes: rows of each of its row groups.
    """

    path: str
    keys: dict[str, Any]
    group_sizes: tuple[int, ...]


def _locate(uri: str) -> tuple[Any, str]:
    """Return the file system of a path or a URI, as arrow takes it, and the path."""
    fsspec = opening.import_extra("fsspec.core")
    arrow_fs: Any = opening.import_extra("pyarrow.fs")
    try:
        filesystem, path = fsspec.url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise errors.UnsupportedError(
            f"Expected a path, or a URI that fsspec knows, found `{uri}` ({error}) in"
            f" {opening.describe_executor()}."
        ) from error
    if opening.is_local(filesystem):
        return arrow_fs.LocalFileSystem(), path
    return arrow_fs.PyFileSystem(arrow_fs.FSSpecHandler(filesystem)), path


class ParquetRows(TableRows):
    """The rows of one file, of many, or of folders.

    Args:
        uris: of files and folders; one table.
        columns: that must be there, and of one type in all files.

    Attributes:
        schema: of arrow; of files and folders.

    Raises:
        MissingFileError: there is nothing.
        ValueMismatchError: a file is no parquet file, or the type of a column changes
            between files.
        ConfigError: a column is not there.
    """

    def __init__(self, uris: Sequence[str], columns: Sequence[str]) -> None:
        self._uri = uris[0]
        self.label = f"`{uris[0]}`" + f" and {len(uris) - 1} more" * (len(uris) > 1)
        self._columns = list(dict.fromkeys(columns))
        dataset = self._open_dataset(uris)
        self.schema = dataset.schema
        for name in self._columns:
            if name not in self.schema.names:
                raise missing_column(name, self.schema.names, self.label)
        self._files = list(self._list_files(dataset))
        sizes = [size for file in self._files for size in file.group_sizes]
        self._group_ends = np.cumsum(sizes, dtype=np.int64)
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
        self._whole: Any = None
        self.num_groups_read = 0

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _PROCESS_STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    def _open_dataset(self, uris: Sequence[str]) -> Any:
        datasets: Any = opening.import_extra("pyarrow.dataset")
        pyarrow: Any = opening.import_extra("pyarrow")
        located = [_locate(uri) for uri in uris]
        paths = [path for _, path in located]
        try:
            return datasets.dataset(
                paths if len(paths) > 1 else paths[0],
                filesystem=located[0][0],
                format="parquet",
                partitioning="hive",
            )
        except FileNotFoundError as error:
            raise errors.MissingFileError(
                f"Expected parquet files at {self.label}, found none in"
                f" {opening.describe_executor()} ({error})."
            ) from error
        except (pyarrow.ArrowException, OSError) as error:
            raise self._damaged(self.label, error) from error

    def _damaged(self, path: str, error: Exception) -> errors.ValueMismatchError:
        return errors.ValueMismatchError(
            f"Expected whole parquet files in {path}, found what is none ({error})."
        )

    def _list_files(self, dataset: Any) -> Iterator[_File]:
        datasets: Any = opening.import_extra("pyarrow.dataset")
        pyarrow: Any = opening.import_extra("pyarrow")
        fragments = sorted(dataset.get_fragments(), key=lambda f: f.path)
        if not fragments:
            raise errors.MissingFileError(
                f"Expected parquet files at {self.label}, found an empty folder."
            )
        for fragment in fragments:
            keys = datasets.get_partition_keys(fragment.partition_expression)
            try:
                self._check_types(fragment.path, fragment.physical_schema, keys)
                metadata = fragment.metadata
            except (pyarrow.ArrowException, OSError) as error:
                raise self._damaged(f"`{fragment.path}`", error) from error
            sizes = (metadata.row_group(i) for i in range(metadata.num_row_groups))
            yield _File(fragment.path, keys, tuple(group.num_rows for group in sizes))

    def _check_types(self, path: str, found: Any, keys: dict[str, Any]) -> None:
        for name in self._columns:
            if name in keys:
                continue
            if name not in found.names:
                raise missing_column(name, found.names, f"`{path}`")
            wanted = self.schema.field(name).type
            if found.field(name).type != wanted:
                raise errors.ValueMismatchError(
                    f"Expected one type of the column `{name}` in all files of"
                    f" {self.label}, found `{wanted}` and, in `{path}`,"
                    f" `{found.field(name).type}`: write the files with one schema."
                )

    @override
    def add_ids(self, column: str, builder: IndexBuilder) -> None:
        for number, file in enumerate(self._files):
            if column in file.keys:
                builder.add_range(file.keys[column], sum(file.group_sizes))
                continue
            opened = self._open(number)
            with _reading(self._files[number].path):
                for group, size in enumerate(file.group_sizes):
                    only = _only_value(opened.metadata, group, column)
                    if only is not None:
                        builder.add_range(only, size)
                        continue
                    for batch in opened.iter_batches(
                        _CHUNK_ROWS, row_groups=[group], columns=[column]
                    ):
                        builder.add(batch.column(0))
        while self._opened:
            self._opened.popitem()[1].close(force=True)

    def _open(self, number: int) -> Any:
        """Return a file, opened; one more than are kept closes the oldest."""
        if number in self._opened:
            self._opened.move_to_end(number)
            return self._opened[number]
        parquet: Any = opening.import_extra("pyarrow.parquet")
        if self._filesystem is None:
            self._filesystem, _ = _locate(self._uri)
        with _reading(self._files[number].path):
            file = self._filesystem.open_input_file(self._files[number].path)
            opened = parquet.ParquetFile(file, page_checksum_verification=True)
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
            self._join_held()
            if self._whole is not None:
                return take_rows(self._whole, rows)
            for group in np.unique(groups):
                inside = rows[groups == group]
                table = self._read_group(int(group), columns)
                parts.append(
                    take_rows(table, inside - self._group_ends[group] + table.num_rows)
                )
        if parts:
            return pyarrow.concat_tables(parts)
        return pyarrow.schema([self.schema.field(n) for n in columns]).empty_table()

    def _join_held(self) -> None:
        """Make one of all row groups, if all are held: rows are taken at once of it."""
        pyarrow: Any = opening.import_extra("pyarrow")
        if self._held and len(self._held) == len(self._groups):
            tables = [self._held[group] for group in range(len(self._groups))]
            self._held.clear()
            self._whole = pyarrow.concat_tables(tables).combine_chunks()

    def _read_group(self, group: int, columns: Sequence[str]) -> Any:
        if group in self._held:
            self._held.move_to_end(group)
            return self._held[group]
        number, inside = self._groups[group]
        file = self._files[number]
        opened = self._open(number)
        with _reading(self._files[number].path):
            read = [name for name in columns if name not in file.keys]
            table = opened.read_row_group(inside, columns=read, use_threads=False)
        table = self._with_keys(table, columns, file.keys)
        self.num_groups_read += 1
        self._held[group] = table
        while len(self._held) > 1 and _bytes_of(self._held) > _HELD_BYTES:
            self._held.popitem(last=False)
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
        return table.select(list(columns))


def take_rows(table: Any, rows: NDArray[np.int64]) -> Any:
    """Return rows of a table, by ascending number; a range without a copy."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return table.slice(int(rows[0]), len(rows))
    return table.take(rows)


def _bytes_of(held: "collections.OrderedDict[int, Any]") -> int:
    return sum(table.nbytes for table in held.values())


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


@contextlib.contextmanager
def _reading(path: str) -> Generator[None]:
    """Say which file it is that arrow does not read."""
    pyarrow: Any = opening.import_extra("pyarrow")
    try:
        yield
    except FileNotFoundError as error:
        raise errors.MissingFileError(
            f"Expected the file `{path}`, found it missing in"
            f" {opening.describe_executor()}: put it there, on every machine that runs"
            " its clients."
        ) from error
    except (pyarrow.ArrowException, OSError) as error:
        raise errors.ValueMismatchError(
            f"Expected the whole of `{path}` as it was written, found what parquet"
            f" files do not have ({error}, read by {opening.describe_executor()}):"
            " write or copy the file anew."
        ) from error

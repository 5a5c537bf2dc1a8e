"""Parquet files of one table: found by pyarrow, read by row groups.

The parquet files of one table: found and looked at by pyarrow.dataset, unread.

Rows of parquet files by their number: read by row groups, in bounded memory.

    files (pyarrow.dataset) --> row groups --> rows, counted through all of them

A folder of the name `client=anna` (hive) gives all its rows to one client, unread.
"""

import collections
import contextlib
import dataclasses
import hashlib
import platform
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.files import opening
from ray_fed.files.arrow_types import decoded_table
from ray_fed.files.features import Leaf, check_columns, missing_column
from ray_fed.files.laid_columns import count_laid_bytes
from ray_fed.files.table_rows import IdCoder, TableRows


@dataclasses.dataclass(frozen=True)
class ParquetFile:
    """One file.

    Attributes:
        path: in its file system.
        keys: what its folders say (hive).
        group_sizes: rows of each of its row groups.
        num_bytes: of all its columns, decompressed and as encoded.
        footer: the digest of what the file says of itself; see `digest_footer`.
        modified_ns: when it was changed last; None: its file system does not say.
        host: the machine that looked.
    """

    path: str
    keys: dict[str, Any]
    group_sizes: tuple[int, ...]
    num_bytes: int
    footer: bytes
    modified_ns: int | None
    host: str

    def check(self, metadata: Any, modified_ns: int | None) -> None:
        """Raise unless the file is the one that was looked at.

        Times are compared on the machine that looked: other ones may have copies.

        Args:
            metadata: of what is at the path now.
            modified_ns: when it was changed last.

        Raises:
            ValueMismatchError: another file is there.
        """
        is_here = self.host == platform.node()
        is_changed = is_here and modified_ns != self.modified_ns
        if is_changed or digest_footer(metadata) != self.footer:
            raise errors.ValueMismatchError(
                f"Expected the file that was at `{self.path}` when the data was named,"
                f" found another one (read by {opening.describe_executor()}): name the"
                " data again after files change, and have the same file on every"
                " machine."
            )


def digest_footer(metadata: Any) -> bytes:
    """Return a digest of a footer: of schema, sizes, places and statistics."""
    pyarrow: Any = opening.import_extra("pyarrow")
    with pyarrow.BufferOutputStream() as written:
        metadata.write_metadata_file(written)
        return hashlib.sha256(written.getvalue()).digest()


_READ_BYTES = 2**20
"""Of a column that are read from a file at once."""

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
"""Bytes of a value in memory, by its physical type."""

_OFFSET_BYTES = 8


def open_bounded(file: Any) -> Any:
    """Return a parquet file whose columns are read piece by piece, and verified."""
    parquet: Any = opening.import_extra("pyarrow.parquet")
    return parquet.ParquetFile(
        file,
        page_checksum_verification=True,
        pre_buffer=False,  # a row group may be the whole file
        buffer_size=_READ_BYTES,
    )


def count_group_bytes(
    metadata: Any, columns: Sequence[str], groups: Sequence[int] | None = None
) -> NDArray[np.int64]:
    """Return how many bytes some columns of row groups take in memory.

    As encoded, a column of zeros takes none, whatever the number of its values. Strings
    count as they are encoded.

    Args:
        metadata: of the file.
        columns: by name; parts of structs with dots.
        groups: of which row groups, by number; None: all.
    """
    groups = range(metadata.num_row_groups) if groups is None else groups
    schema = metadata.schema
    indices = [
        index
        for index in range(metadata.num_columns)
        if any(_is_of(schema.column(index).path, name) for name in columns)
    ]
    found = np.zeros(len(groups), np.int64)
    for place, number in enumerate(groups):
        group = metadata.row_group(number)
        for index in indices:
            chunk, kind = group.column(index), schema.column(index).physical_type
            if kind == "BYTE_ARRAY":
                found[place] += chunk.total_uncompressed_size
            width = _WIDTHS.get(kind, max(_OFFSET_BYTES, schema.column(index).length))
            found[place] += chunk.num_values * width
    return found


def _is_of(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def count_row_bytes(metadata: Any, columns: Sequence[str]) -> int:
    """Return about how many bytes a row takes in memory, where it takes most."""
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    found = count_group_bytes(metadata, columns) // np.maximum(sizes, 1)
    return int(found.max(initial=1))


def locate(uri: str) -> tuple[Any, str]:
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


def list_files(
    uris: Sequence[str], columns: Sequence[str], label: str
) -> tuple[Any, list[ParquetFile]]:
    """Return the schema of a table, and its files in the order of their paths.

    Args:
        uris: of files and folders, at least one, in one file system.
        columns: that must be there, and of one type in all files.
        label: what the table is called in an error.

    Raises:
        MissingFileError: there is nothing.
        ValueMismatchError: a file is no parquet file, or the type of a column changes
            between files.
        ConfigError: a column is not there.
    """
    datasets = [found for found in _open_datasets(uris, label) if found.files]
    if not datasets:
        raise errors.MissingFileError(
            f"Expected parquet files at {label}, found an empty folder."
        )
    schema = datasets[0].schema
    check_columns(columns, schema.names, label)
    files = [
        file
        for dataset in datasets
        for file in _look_at_files(dataset, schema, columns, label)
    ]
    return schema, files


def _open_datasets(uris: Sequence[str], label: str) -> list[Any]:
    arrow_datasets: Any = opening.import_extra("pyarrow.dataset")
    pyarrow: Any = opening.import_extra("pyarrow")
    located = [locate(uri) for uri in uris]
    filesystem, paths = located[0][0], [path for _, path in located]
    try:
        are_files = all(info.is_file for info in filesystem.get_file_info(paths))
        sources: list[Any] = [paths] if are_files else list(paths)
        return [
            arrow_datasets.dataset(
                source, filesystem=filesystem, format="parquet", partitioning="hive"
            )
            for source in sources
        ]
    except FileNotFoundError as error:
        raise errors.MissingFileError(
            f"Expected parquet files at {label}, found none in"
            f" {opening.describe_executor()} ({error})."
        ) from error
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(label, error) from error


def _unreadable(label: str, error: Exception) -> errors.UserError:
    if "duplicate field names" in str(error):
        return errors.ConfigError(
            f"Expected columns of different names in {label}, found some of one name:"
            " rename all but one, and write the files anew."
        )
    return _damaged(label, error)


def _damaged(path: str, error: Exception) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f"Expected whole parquet files in {path}, found what is none ({error})."
    )


def _look_at_files(
    dataset: Any, schema: Any, columns: Sequence[str], label: str
) -> Iterator[ParquetFile]:
    arrow_datasets: Any = opening.import_extra("pyarrow.dataset")
    pyarrow: Any = opening.import_extra("pyarrow")
    for fragment in sorted(dataset.get_fragments(), key=lambda found: found.path):
        keys = arrow_datasets.get_partition_keys(fragment.partition_expression)
        try:
            found, metadata = fragment.physical_schema, fragment.metadata
        except (pyarrow.ArrowException, OSError) as error:
            raise _damaged(f"`{fragment.path}`", error) from error
        for name in columns:
            if name not in keys:
                _check_type(name, fragment.path, found, schema, label)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        sizes = tuple(group.num_rows for group in groups)
        num_bytes = sum(group.total_byte_size for group in groups)
        yield ParquetFile(
            fragment.path,
            keys,
            sizes,
            num_bytes,
            digest_footer(metadata),
            dataset.filesystem.get_file_info(fragment.path).mtime_ns,
            platform.node(),
        )


def _check_type(name: str, path: str, found: Any, schema: Any, label: str) -> None:
    if name not in found.names:
        raise missing_column(name, found.names, f"`{path}`")
    wanted = schema.field(name).type
    if found.field(name).type != wanted:
        raise errors.ValueMismatchError(
            f"Expected one type of the column `{name}` in all files of {label}, found"
            f" `{wanted}` and, in `{path}`, `{found.field(name).type}`: write the files"
            " with one schema."
        )


@contextlib.contextmanager
def reading(path: str) -> Generator[None]:
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

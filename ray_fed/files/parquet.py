"""Files of tables, read by pyarrow: parquet, Arrow, CSV and JSON lines.

    one file      --> batches of bounded size (`iterate`)
    files, folders --> one table (`TableFiles`) --> its batches, in order
                                               --> row groups, in place (`RowGroups`)

A folder of the name `client=anna` (hive) gives all its rows to one client, unread.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import platform
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.files import opening
from ray_fed.files.arrow_types import decoded_table
from ray_fed.files.features import check_columns, missing_column
from ray_fed.files.table_rows import (
    Opened,
    TableRows,
    take_rows,
)
from ray_fed.values.lru_cache import LruCache

Format: TypeAlias = Literal["parquet", "arrow", "csv", "json"]
"""What a file is; Feather is Arrow, and JSON has an object on each line."""

_READ_BYTES = 2**20
"""Of a column that are read from a parquet file at once."""

_BATCH_BYTES = 16 * 2**20
"""Rows in memory at a time, while all are read."""

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
"""Bytes of a value in memory, by its physical type."""

_OFFSET_BYTES = 8

_MOST_ROWS = 2**22
"""Of a batch, however narrow."""

_OPEN_FILES = 16
"""Parquet files whose footers a reader of row groups keeps."""

_EXPANSION = 2
"""How many times as large rows are in memory as in a file without a footer."""


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


def _format_of(kind: Format) -> Any:
    arrow_datasets: Any = opening.import_extra("pyarrow.dataset")
    return {
        "parquet": arrow_datasets.ParquetFileFormat,
        "arrow": arrow_datasets.IpcFileFormat,
        "csv": arrow_datasets.CsvFileFormat,
        "json": arrow_datasets.JsonFileFormat,
    }[kind]()


def read_schema(file: Any, kind: Format) -> Any:
    """Return what a file says of its columns; closes it."""
    if kind == "parquet":
        with open_bounded(file) as opened:
            return opened.schema_arrow
    return _format_of(kind).make_fragment(file).physical_schema


def iterate(
    file: Any,
    kind: Format,
    columns: Sequence[str],
    num_bytes: float = _BATCH_BYTES,
    *,
    schema: Any = None,
    groups: Sequence[int] | None = None,
) -> Iterator[Any]:
    """Yield columns of a file's rows, in order, as record batches of bounded size.

    Args:
        file: opened to read bytes, of parquet by `open_bounded`.
        kind: what it is.
        columns: by name; those of parquet may be parts of structs, with dots.
        num_bytes: of a batch; one row is the least.
        schema: that rows of other formats are read by.
        groups: which row groups of parquet, by number; None: all.
    """
    if kind == "parquet":
        groups = range(file.num_row_groups) if groups is None else groups
        rows = [file.metadata.row_group(number).num_rows for number in groups]
        sizes = count_group_bytes(file.metadata, columns, groups)
        row_bytes = (sizes // np.maximum(rows, 1)).max(initial=1)
        count = int(max(1, min(num_bytes // row_bytes, _MOST_ROWS)))
        yield from file.iter_batches(
            count, row_groups=list(groups), columns=list(columns)
        )
        return
    scanner = (
        _format_of(kind)
        .make_fragment(file)
        .scanner(
            schema=schema,
            columns=list(columns),
            use_threads=False,
            batch_readahead=0,
            fragment_readahead=0,
        )
    )
    for batch in scanner.to_batches():
        batch.validate(full=True)  # a damaged offset would be followed
        row_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
        count = int(max(1, min(num_bytes // row_bytes, batch.num_rows)))
        for start in range(0, batch.num_rows, count):
            yield batch.slice(start, count)


def locate(uri: str) -> tuple[Any, str]:
    """Return the file system of a path or a URI, as arrow takes it, and the path."""
    arrow_fs: Any = opening.import_extra("pyarrow.fs")
    filesystem, path = opening.locate(uri)
    if opening.is_local(filesystem):
        return arrow_fs.LocalFileSystem(), path
    return arrow_fs.PyFileSystem(arrow_fs.FSSpecHandler(filesystem)), path


@contextlib.contextmanager
def reading(path: str, kind: Format) -> Generator[None]:
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
            f"Expected the whole of `{path}` as it was written, found what {kind}"
            f" files do not have ({error}, read by {opening.describe_executor()}):"
            " write or copy the file anew."
        ) from error


@dataclasses.dataclass(frozen=True)
class _File:
    """One file of a table.

    Attributes:
        path: in its file system.
        keys: what its folders say (hive).
        num_bytes: of the table's columns in memory, about.
        group_sizes: rows of each row group; empty where the format has none.
        footer: a digest of what a parquet file says of itself, with schema, sizes,
            places and statistics; of another one its size.
        modified_ns: when it was changed last; None: its file system does not say.
        host: the machine that looked.
    """

    path: str
    keys: dict[str, Any]
    num_bytes: int
    group_sizes: tuple[int, ...]
    footer: bytes | int
    modified_ns: int | None
    host: str


class TableFiles:
    """The rows of one file, of many, or of folders: one table.

    Args:
        uris: of files and folders, in one file system.
        kind: what the files are.
        columns: that must be there, and of one type in all files.

    Attributes:
        kind: what the files are.
        label: what the table is called in an error.
        schema: of arrow; of files and folders.
        files: in the order of their paths.
        num_bytes: that the columns of all rows take in memory, about.

    Raises:
        MissingFileError: there is nothing, or nothing that may be read.
        ValueMismatchError: a file is none of its kind, or the type of a column changes
            between files.
        ConfigError: a column is not there.
    """

    def __init__(
        self, uris: Sequence[str], kind: Format, columns: Sequence[str]
    ) -> None:
        self.kind: Format = kind
        self._uri = uris[0]
        self.label = f"`{uris[0]}`" + f" and {len(uris) - 1} more" * (len(uris) > 1)
        self._columns = list(dict.fromkeys(columns))
        datasets = [found for found in self._find(uris) if found.files]
        if not datasets:
            raise errors.MissingFileError(
                f"Expected {kind} files at {self.label}, found an empty folder."
            )
        self.schema = datasets[0].schema
        check_columns(self._columns, self.schema.names, self.label)
        self.files = [
            self._look_at(fragment, dataset.filesystem)
            for dataset in datasets
            for fragment in sorted(dataset.get_fragments(), key=lambda f: f.path)
        ]
        self.num_bytes = sum(file.num_bytes for file in self.files)

    def _find(self, uris: Sequence[str]) -> list[Any]:
        arrow_datasets: Any = opening.import_extra("pyarrow.dataset")
        pyarrow: Any = opening.import_extra("pyarrow")
        located = [locate(uri) for uri in uris]
        filesystem, paths = located[0][0], [path for _, path in located]
        try:
            are_files = all(info.is_file for info in filesystem.get_file_info(paths))
            sources: list[Any] = [paths] if are_files else list(paths)
            return [
                arrow_datasets.dataset(
                    source,
                    filesystem=filesystem,
                    format=_format_of(self.kind),
                    partitioning="hive",
                )
                for source in sources
            ]
        except FileNotFoundError as error:
            raise errors.MissingFileError(
                f"Expected {self.kind} files at {self.label}, found none in"
                f" {opening.describe_executor()} ({error})."
            ) from error
        except (pyarrow.ArrowException, OSError) as error:
            if "duplicate field names" in str(error):
                raise errors.ConfigError(
                    f"Expected columns of different names in {self.label}, found some"
                    " of one name: rename all but one, and write the files anew."
                ) from error
            raise self._damaged(self.label, error) from None  # it may show bytes
        except Exception as error:  # what s3:// is built on has no base of its own
            raise errors.MissingFileError(
                f"Expected to read {self.label}, found {type(error).__name__} ({error})"
                f" in {opening.describe_executor()}: see that it exists, and that this"
                f" process may read it.{opening.advise(error)}"
            ) from error

    def _damaged(self, path: str, error: Exception) -> errors.ValueMismatchError:
        found = "".join(itertools.takewhile(str.isprintable, str(error)))
        return errors.ValueMismatchError(
            f"Expected whole {self.kind} files in {path}, found what is none ({found}):"
            " write them anew, or read them by the method for what they are, such as"
            " `ClientData.from_parquet` or `from_csv`."
        )

    def _look_at(self, fragment: Any, filesystem: Any) -> _File:
        arrow_datasets: Any = opening.import_extra("pyarrow.dataset")
        pyarrow: Any = opening.import_extra("pyarrow")
        keys = arrow_datasets.get_partition_keys(fragment.partition_expression)
        info = filesystem.get_file_info(fragment.path)
        footer, sizes, num_bytes = info.size, (), _EXPANSION * info.size
        try:
            found = fragment.physical_schema
            if self.kind == "parquet":
                footer = _digest(fragment.metadata)
                sizes = tuple(group.num_rows for group in fragment.row_groups)
                read = count_group_bytes(fragment.metadata, self._columns)
                num_bytes = int(read.sum())
        except (pyarrow.ArrowException, OSError) as error:
            raise self._damaged(f"`{fragment.path}`", error) from error
        for name in self._columns:
            if name not in keys:
                self._check_column(name, fragment.path, found)
        return _File(
            fragment.path,
            keys,
            num_bytes,
            sizes,
            footer,
            info.mtime_ns,
            platform.node(),
        )

    def _check_column(self, name: str, path: str, found: Any) -> None:
        if name not in found.names:
            raise missing_column(name, found.names, f"`{path}`")
        wanted = self.schema.field(name).type
        is_typed = self.kind in ("parquet", "arrow")  # text is read as the first file's
        if is_typed and found.field(name).type != wanted:
            raise errors.ValueMismatchError(
                f"Expected one type of the column `{name}` in all files of"
                f" {self.label}, found `{wanted}` and, in `{path}`,"
                f" `{found.field(name).type}`: write the files with one schema."
            )

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yield columns of all rows, in order, as tables of bounded size.

        Raises:
            MissingFileError: a file is gone.
            ValueMismatchError: a file is damaged, or not the one that was looked at.
        """
        for number in range(len(self.files)):
            with self.open(number) as opened:
                yield from self.read(opened, number, columns)

    def open(self, number: int) -> Any:
        """Return a file, opened; see `batches`.

        Times are compared on the machine that looked: other ones may have copies.
        """
        file, (filesystem, _) = self.files[number], locate(self._uri)
        with reading(file.path, self.kind):
            info = filesystem.get_file_info(file.path)
            opened = filesystem.open_input_file(file.path)
            footer: bytes | int = info.size
            if self.kind == "parquet":
                opened = open_bounded(opened)
                footer = _digest(opened.metadata)
        is_changed = file.host == platform.node() and info.mtime_ns != file.modified_ns
        if is_changed or footer != file.footer:
            raise changed(f"the file that was at `{file.path}`")
        return opened

    def read(
        self,
        opened: Any,
        number: int,
        columns: Sequence[str],
        groups: Sequence[int] | None = None,
    ) -> Iterator[Any]:
        """Yield columns of a file's rows, in order, as tables of bounded size."""
        pyarrow: Any = opening.import_extra("pyarrow")
        file, columns = self.files[number], list(dict.fromkeys(columns))
        names = [name for name in columns if name not in file.keys]
        if not names and self.kind != "parquet":  # to know how many rows there are
            names = [name for name in self.schema.names if name not in file.keys][:1]
        schema = pyarrow.schema([self.schema.field(name) for name in names])
        with reading(file.path, self.kind):
            for batch in iterate(
                opened, self.kind, names, schema=schema, groups=groups
            ):
                table = pyarrow.Table.from_batches([batch])
                for name in [name for name in columns if name in file.keys]:
                    field = self.schema.field(name)
                    key = pyarrow.scalar(file.keys[name], field.type)
                    table = table.append_column(
                        field, pyarrow.repeat(key, batch.num_rows)
                    )
                yield decoded_table(table.select(columns))

    def read_column(self, name: str) -> Iterator[Any]:
        """Yield the arrays of one column, in order."""
        for rows in self.batches([name]):
            yield from rows.column(0).chunks


def _digest(metadata: Any) -> bytes:
    pyarrow: Any = opening.import_extra("pyarrow")
    with pyarrow.BufferOutputStream() as written:
        metadata.write_metadata_file(written)
        return hashlib.sha256(written.getvalue()).digest()


def changed(expected: str) -> errors.ValueMismatchError:
    """Return the error that files are not what they were."""
    return errors.ValueMismatchError(
        f"Expected {expected} when the data was named, found another one (read by"
        f" {opening.describe_executor()}): name the data again after files change, and"
        " have the same file on every machine."
    )


class RowGroups(TableRows):
    """Rows of parquet files, read where they are, by row groups.

    Args:
        files: of the table.
    """

    def __init__(self, files: TableFiles) -> None:
        self._files = files
        sizes = [size for file in files.files for size in file.group_sizes]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._groups = [
            (number, group, size)
            for number, file in enumerate(files.files)
            for group, size in enumerate(file.group_sizes)
        ]
        self._opened = Opened()

    @override
    def take(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        pyarrow: Any = opening.import_extra("pyarrow")
        parts: list[Any] = []
        groups = np.searchsorted(self._ends, rows, side="right")
        for group in np.unique(groups):
            number, inside, size = self._groups[group]
            start, wanted = self._ends[group] - size, rows[groups == group]
            with self._opened.lock:
                if self._opened.value is None:
                    self._opened.value = LruCache[int, Any](
                        _OPEN_FILES, lambda file: file.close()
                    )
                opened = self._opened.value.get(
                    number, functools.partial(self._files.open, number)
                )
                for part in self._files.read(opened, number, columns, [inside]):
                    found = wanted[(wanted >= start) & (wanted < start + len(part))]
                    if len(found):
                        parts.append(take_rows(part, found - start))
                    start += len(part)
        return pyarrow.concat_tables(parts)

"""Reads one file, several files, or folders of files as one table.

    files, folders --> `TableFiles` --> batches of all rows, in order
                                    --> `RowGroups` --> rows by number (Parquet)

All rows in a folder named `client=anna` (Hive partitioning) belong to the client
`anna`. The column `client` comes from the name of the folder, not from the files.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import platform
import re
import urllib.parse
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.error_texts import describe_process
from ray_fed.files import opening
from ray_fed.files.arrow_types import decoded_table
from ray_fed.files.features import check_columns, missing_column
from ray_fed.files.formats import EXPANSION, Format, Wanted
from ray_fed.files.table_rows import (
    ClientIndex,
    IdColumn,
    Opened,
    Spellings,
    TableRows,
    index_clients,
    take_rows,
)
from ray_fed.imports import pyarrow
from ray_fed.values.lru_cache import LruCache

_BATCH_BYTES = 16 * 2**20
"""Bytes of the rows that are in memory at a time while all rows are read."""

_OPEN_FILES = 16
"""Number of Parquet files that a `RowGroups` keeps open."""
_CONVERSION = re.compile(
    r"CSV column #(\d+): .*conversion error to (\S+): (.*)", re.DOTALL
)
"""Arrow's error message for a CSV cell that has another type than the first rows."""


@dataclasses.dataclass(frozen=True)
class _File:
    """One file of a table.

    Attributes:
        keys: Values of the columns that come from names of the file's folders.
        num_bytes: About how many bytes the columns of the table take in memory.
        group_sizes: See `FileFacts`.
        digest: See `FileFacts`.
        modified_ns: Time of the last change. None if the file system does not have it.
        host: Name of the machine that read these facts.
    """

    path: str
    keys: dict[str, Any]
    num_bytes: int
    group_sizes: tuple[int, ...]
    digest: bytes
    size: int
    modified_ns: int | None
    host: str


class TableFiles:
    """The rows of one file, of several, or of folders, as one table.

    The constructor raises MissingFileError, ValueMismatchError for another format or a
    type that changes between files, and ConfigError for a missing column.

    Args:
        uris: Files, folders and glob patterns, in one file system.
        kind: Format of all files.
        columns: Columns that each file must have, with one type in all files.
        ids: The column of ids, and how they are read.

    Attributes:
        schema: Arrow schema of the columns in files and in names of folders.
        files: The files, in the order of their paths.
    """

    def __init__(
        self, uris: Sequence[str], kind: Format, columns: Sequence[str], ids: IdColumn
    ) -> None:
        self.kind = kind
        self._uri, self._ids = uris[0], ids
        self.label = f"`{uris[0]}`" + f" and {len(uris) - 1} more" * (len(uris) > 1)
        self._columns = list(dict.fromkeys([ids.name, *columns]))
        datasets = [dataset for dataset in self._find(uris) if dataset.files]
        if not datasets:
            raise self._missing("an empty folder")
        schemas: list[Any] = []
        self.files: list[_File] = []
        for dataset in datasets:
            for fragment in sorted(dataset.get_fragments(), key=lambda f: f.path):
                file, schema = self._look_at(fragment, dataset.filesystem)
                self.files.append(file)
                schemas.append(schema)
        self._as_read = self._unify([schemas[0], datasets[0].schema])
        check_columns(self._columns, self._as_read.names, self.label)
        for file, schema in zip(self.files, schemas, strict=True):
            self._check_columns(file, schema)
        self._is_key = any(ids.name in file.keys for file in self.files)
        self._as_read = self._with_text_ids(self._as_read)
        place = self._as_read.names.index(ids.name)
        field = self._as_read.field(place)
        self.schema = self._as_read.set(place, field.with_type(ids.type_of(field.type)))
        self._check_keys()

    @property
    def num_bytes(self) -> int:
        """About how many bytes the columns of all rows take in memory.

        Compressed text is counted with its compressed size until `index` reads it.
        """
        return sum(file.num_bytes for file in self.files)

    def _find(self, uris: Sequence[str]) -> list[Any]:
        """Return Arrow datasets, which list files and the columns of folder names."""
        try:
            expanded = [path for uri in uris for path in opening.expand_pattern(uri)]
            located = [_locate(uri) for uri in expanded]
            filesystem, paths = located[0][0], [path for _, path in located]
            infos = filesystem.get_file_info(paths)
            if all(info.is_file for info in infos):
                return [_discover(filesystem, paths)]
            return [
                _discover(
                    filesystem,
                    [info.path]
                    if info.is_file
                    else pyarrow.fs.FileSelector(info.path, recursive=True),
                )
                for info in infos
            ]
        except FileNotFoundError as error:
            raise self._missing(f"none ({error})") from error
        except errors.RayFedError:
            raise
        except Exception as error:  # what s3:// is built on has no base of its own
            raise errors.MissingFileError(
                f"Expected to read {self.label}, found {type(error).__name__} ({error})"
                f" in {describe_process()}: see that it exists, and that this process"
                f" may read it.{opening.advise(error)}"
            ) from error

    def _missing(self, found: str) -> errors.MissingFileError:
        return errors.MissingFileError(
            f"Expected {self.kind.name} files at {self.label}, found {found} in"
            f" {describe_process()}."
        )

    def _look_at(self, fragment: Any, filesystem: Any) -> tuple[_File, Any]:
        """Return facts about a file, and the Arrow schema of its columns."""
        path = fragment.path
        keys = pyarrow.dataset.get_partition_keys(fragment.partition_expression)
        if (name := self._ids.name) in keys:
            text = _read_keys(path)[name]
            keys[name] = self._ids.key_of(keys[name], text, self.label)
        with self._reading(path):
            info = filesystem.get_file_info(path)
            opened = filesystem.open_input_file(path)
            facts = self.kind.look(opened, self._columns)
        found = facts.num_bytes, facts.group_sizes, facts.digest
        changed = info.size, info.mtime_ns, platform.node()
        return _File(path, keys, *found, *changed), facts.schema

    def _unify(self, schemas: Sequence[Any]) -> Any:
        try:
            return pyarrow.unify_schemas(schemas)
        except pyarrow.ArrowException as error:
            raise errors.ConfigError(
                f"Expected columns of different names in {self.label}, found some of"
                " one name: rename all but one, and write the files again."
            ) from error

    def _check_columns(self, file: _File, schema: Any) -> None:
        for name in self._columns:
            if name in file.keys:
                continue
            if name not in schema.names:
                raise missing_column(name, schema.names, f"`{file.path}`")
            wanted, found = self._as_read.field(name).type, schema.field(name).type
            # All text files are read by the types of the first one.
            if not self.kind.is_text and found != wanted:
                raise errors.ValueMismatchError(
                    f"Expected one type of the column `{name}` in all files of"
                    f" {self.label}, found `{wanted}` and, in `{file.path}`,"
                    f" `{found}`: write the files with one schema."
                )

    def _with_text_ids(self, schema: Any) -> Any:
        """Return `schema` with ids as text, if `id_type` needs the text of the file.

        Every id in a CSV file can be read as text. In JSON, some ids are numbers.
        """
        place = schema.names.index(self._ids.name)
        found = schema.field(place).type
        is_text = self.kind.name == "csv" or pyarrow.types.is_temporal(found)
        is_whole = self._ids.id_type is int and pyarrow.types.is_integer(found)
        if not self.kind.is_text or self._ids.id_type is None or self._is_key:
            return schema
        if is_whole or not is_text:
            return schema
        return schema.set(place, schema.field(place).with_type(pyarrow.string()))

    def _check_keys(self) -> None:
        """Raise if ids in folder names, such as `007` and `7`, are one number."""
        if self._ids.id_type is not None or not self._is_key:
            return
        texts: dict[Any, str] = {}
        for file in self.files:
            key, text = file.keys[self._ids.name], _read_keys(file.path)
            known = texts.setdefault(key, text[self._ids.name])
            if known != text[self._ids.name]:
                raise self._ids.ambiguous(self.label, known, text[self._ids.name])

    @contextlib.contextmanager
    def _reading(self, path: str) -> Generator[None]:
        """Replace Arrow's errors in the `with` block by errors that name the file.

        A missing file raises MissingFileError. A damaged file or a cell of another type
        raises ValueMismatchError.
        """
        try:
            yield
        except FileNotFoundError as error:
            raise errors.MissingFileError(
                f"Expected the file `{path}`, found it missing in"
                f" {describe_process()}: put it there, on every machine that runs"
                " its clients."
            ) from error
        except (pyarrow.ArrowException, OSError) as error:
            # Its text may have bytes of the file.
            found = "".join(itertools.takewhile(str.isprintable, str(error)))
            raise self._damaged(path, found) from None

    def _damaged(self, path: str, found: str) -> errors.ValueMismatchError:
        if "changed from" in found:  # what arrow says of JSON
            return errors.ValueMismatchError(
                f"Expected values of one type in each column of `{path}`, found that"
                f" one changes ({found}): write a column, such as ids, as numbers or as"
                " text in all rows."
            )
        if (cell := _CONVERSION.search(found)) is not None:
            name = self._as_read.names[int(cell[1])]
            then = "write values of one type in all rows"
            if name == self._ids.name:
                then = "pass `id_type=str` to read all ids as text"
            return errors.ValueMismatchError(
                f"Expected values of `{cell[2]}` in the column `{name}` of `{path}`, as"
                f" in its first rows, found {cell[3]}: {then}."
            )
        name = self.kind.name
        return errors.ValueMismatchError(
            f"Expected whole {name} files, found that `{path}` cannot be read as {name}"
            f" ({found}, read by {describe_process()}): write or copy the file again,"
            " or use the method of its format, such as `ClientData.from_parquet` or"
            " `from_csv`."
        )

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yield columns of all rows, in order, as Arrow tables of bounded size.

        Raises MissingFileError, or ValueMismatchError for a damaged or changed file.
        """
        for number in range(len(self.files)):
            with self.open(number) as opened:
                yield from self.read(opened, number, columns)

    def open(self, number: int) -> Any:
        """Open the file with the index `number`. It raises the errors of `batches`.

        The time of the last change is checked only on the machine that listed the file.
        Another machine may have a copy with another time.
        """
        file, (filesystem, _) = self.files[number], _locate(self._uri)
        with self._reading(file.path):
            info = filesystem.get_file_info(file.path)
            raw = filesystem.open_input_file(file.path)
            opened = self.kind.open(raw)
            digest = self.kind.digest(opened)
            if self.kind.is_text and opened is not raw:  # it was decompressed
                size = EXPANSION * opened.seek(0, os.SEEK_END)
                self.files[number] = dataclasses.replace(file, num_bytes=size)
                opened.seek(0)
        is_changed = file.host == platform.node() and info.mtime_ns != file.modified_ns
        if is_changed or (info.size, digest) != (file.size, file.digest):
            raise changed(f"the file that was at `{file.path}`")
        return opened

    def read(
        self,
        opened: Any,
        number: int,
        columns: Sequence[str],
        groups: Sequence[int] | None = None,
        schema: Any = None,
    ) -> Iterator[Any]:
        """Yield columns of one file's rows, in order, as Arrow tables of bounded size.

        `opened` is the result of `open` for the file with the index `number`. `groups`
        are the row groups to read, or None for all. If `schema` is set, columns are
        read with its types instead of the types of the table.
        """
        file, columns = self.files[number], list(dict.fromkeys(columns))
        names = [name for name in columns if name not in file.keys]
        if not names and self.kind.name != "parquet":  # to count the rows
            names = [name for name in self.schema.names if name not in file.keys][:1]
        as_read = self._as_read if schema is None else schema
        read_by = pyarrow.schema([as_read.field(name) for name in names])
        with self._reading(file.path):
            wanted = Wanted(names, _BATCH_BYTES, read_by, groups)
            for batch in self.kind.batches(opened, wanted):
                table = pyarrow.Table.from_batches([batch])
                for name in [name for name in columns if name in file.keys]:
                    field = self.schema.field(name)
                    key = pyarrow.scalar(file.keys[name], field.type)
                    table = table.append_column(
                        field, pyarrow.repeat(key, batch.num_rows)
                    )
                table = decoded_table(table.select(columns))
                yield table if schema is not None else self._ids.cast(table, self.label)

    def read_column(self, name: str) -> Iterator[Any]:
        """Yield one column of all rows as Arrow arrays, in order."""
        for rows in self.batches([name]):
            yield from rows.column(0).chunks

    def index(self) -> ClientIndex:
        """Read the column of ids and return the clients with their numbers of rows.

        Raises ValueMismatchError if a row has no id, or if two ids that differ as text
        are one whole number.
        """
        name, field = self._ids.name, self.schema.field(self._ids.name)
        chunks: Iterator[Any] = self.read_column(name)
        if self.kind.name != "csv" or self._is_key:
            return index_clients(chunks, name, self.label)
        if not pyarrow.types.is_integer(field.type) or self._ids.id_type is not None:
            chunks = (self._ids.check_filled(each, self.label) for each in chunks)
            return index_clients(chunks, name, self.label)
        spellings = Spellings(self._ids, self.label)
        numbers = map(spellings.to_numbers, self._read_texts(name))
        index = index_clients(numbers, name, self.label)
        spellings.check(index)
        return index

    def _read_texts(self, name: str) -> Iterator[Any]:
        schema = pyarrow.schema([(name, pyarrow.string())])
        for number in range(len(self.files)):
            with self.open(number) as opened:
                for rows in self.read(opened, number, [name], schema=schema):
                    yield from rows.column(0).chunks


def _read_keys(path: str) -> dict[str, str]:
    """Return the values, by column, in folder names such as `client=anna` of a path."""
    pairs = (folder.partition("=") for folder in path.split("/")[:-1])
    return {name: urllib.parse.unquote(text) for name, is_key, text in pairs if is_key}


def _locate(uri: str) -> tuple[Any, str]:
    filesystem, path = opening.locate(uri)
    if opening.is_local(filesystem):
        return pyarrow.fs.LocalFileSystem(), path
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(filesystem)), path


def _discover(filesystem: Any, source: Any) -> Any:
    factory = pyarrow.dataset.FileSystemDatasetFactory(
        filesystem,
        source,
        pyarrow.dataset.ParquetFileFormat(),  # of any format, as none is opened
        pyarrow.dataset.FileSystemFactoryOptions(
            partitioning=pyarrow.dataset.HivePartitioning.discover()
        ),
    )
    return factory.finish(factory.inspect(fragments=0))


def changed(expected: str) -> errors.ValueMismatchError:
    """Return the error for files that changed after the `ClientData` was made."""
    return errors.ValueMismatchError(
        f"Expected {expected} when the `ClientData` was made, found a change (read by"
        f" {describe_process()}): make it again after files change, and have the same"
        " file on every machine."
    )


class RowGroups(TableRows):
    """Reads rows of Parquet files by number, from the row groups that have them."""

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

"""The parquet files of one table: found and looked at by pyarrow.dataset, unread."""

import contextlib
import dataclasses
import hashlib
import platform
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.files import opening
from ray_fed.files.features import check_columns, missing_column


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

"""Reads Parquet files in batches of bounded size, and verifies the pages' checksums.

https://parquet.apache.org/docs/file-format/
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ray_fed.files.formats import FileFacts, Format, Wanted
from ray_fed.imports import pyarrow

_BUFFER_BYTES = 2**20
"""Bytes of a column that are read at once, unless there are many columns."""

_LEAST_BUFFER_BYTES = 2**13

_ALL_BUFFERS_BYTES = 16 * 2**20

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
"""Bytes of a value in memory, by its physical type."""

_OFFSET_BYTES = 8

_MOST_ROWS = 2**22
"""Largest number of rows in a batch, however narrow they are."""


class ParquetFormat(Format):
    """The format of Parquet files."""

    name = "parquet"

    @override
    def look(self, file: Any, columns: Sequence[str] = ()) -> FileFacts:
        with self.open(file) as opened:
            metadata = opened.metadata
            groups = range(metadata.num_row_groups)
            return FileFacts(
                opened.schema_arrow,
                int(_count_group_bytes(metadata, columns, groups).sum()),
                tuple(metadata.row_group(group).num_rows for group in groups),
                self.digest(opened),
            )

    @override
    def open(self, file: Any) -> Any:
        opened = _open_with(file, _BUFFER_BYTES)
        num_columns = opened.metadata.num_columns
        # Each column has a buffer of its own.
        if num_columns * _BUFFER_BYTES > _ALL_BUFFERS_BYTES:
            size = max(_LEAST_BUFFER_BYTES, _ALL_BUFFERS_BYTES // num_columns)
            opened = _open_with(file, size, opened.metadata)
        return opened

    @override
    def digest(self, opened: Any) -> bytes:
        with pyarrow.BufferOutputStream() as written:
            opened.metadata.write_metadata_file(written)
            return hashlib.sha256(written.getvalue()).digest()

    @override
    def batches(self, opened: Any, wanted: Wanted) -> Iterator[Any]:
        groups, columns = wanted.groups, list(wanted.columns)
        groups = range(opened.num_row_groups) if groups is None else groups
        rows = [opened.metadata.row_group(number).num_rows for number in groups]
        sizes = _count_group_bytes(opened.metadata, columns, groups)
        row_bytes = (sizes // np.maximum(rows, 1)).max(initial=1)
        count = int(max(1, min(wanted.num_bytes // row_bytes, _MOST_ROWS)))
        return opened.iter_batches(count, row_groups=list(groups), columns=columns)


def _open_with(file: Any, buffer_size: int, metadata: Any = None) -> Any:
    return pyarrow.parquet.ParquetFile(
        file,
        metadata=metadata,
        page_checksum_verification=True,
        pre_buffer=False,  # a row group may be the whole file
        buffer_size=buffer_size,
    )


def _count_group_bytes(
    metadata: Any, columns: Sequence[str], groups: Sequence[int]
) -> NDArray[np.int64]:
    """Estimate how many bytes some columns of each row group take in memory.

    The size in the file says little, because zeros take almost no bytes there. Strings
    count with their size before compression.
    """
    schema = metadata.schema
    indices = [
        index
        for index in range(metadata.num_columns)
        if any(_is_part_of(schema.column(index).path, name) for name in columns)
    ]
    sizes = np.zeros(len(groups), np.int64)
    for place, number in enumerate(groups):
        group = metadata.row_group(number)
        for index in indices:
            chunk, kind = group.column(index), schema.column(index).physical_type
            if kind == "BYTE_ARRAY":
                sizes[place] += chunk.total_uncompressed_size
            width = _WIDTHS.get(kind, max(_OFFSET_BYTES, schema.column(index).length))
            sizes[place] += chunk.num_values * width
    return sizes


def _is_part_of(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")

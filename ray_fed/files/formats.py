"""The interface of file formats that have tables.

    file --look--> columns, size in memory, row groups
         --open--> --batches--> record batches of bounded size, in order

The formats are in `parquet.py`, `arrow_files.py` and `text.py`. A new format needs a
subclass of `Format`, a suffix in `tensorflow/external_data.py`, and a `from_` method of
`ClientData`.
"""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

EXPANSION = 2
"""Estimated ratio of bytes in memory to bytes of a text file, which has no sizes."""


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """Facts about a file that are known before its rows are read.

    Attributes:
        schema: Arrow schema of the file's columns.
        num_bytes: Approximate bytes that the requested columns take in memory.
        group_sizes: Number of rows in each row group. Empty if there are no row groups.
        digest: Hash of the file's footer, which has the places, sizes and statistics of
            the rows. Empty if the format has no footer.
    """

    schema: Any
    num_bytes: int
    group_sizes: tuple[int, ...] = ()
    digest: bytes = b""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The part of a file to read.

    Attributes:
        columns: Names of the columns. In Parquet, `a.b` is the part `b` of a struct.
        num_bytes: Largest size of a batch, unless a single row is larger.
        schema: Arrow schema with the types of a text file's columns.
        groups: Indices of the row groups to read. None reads all.
    """

    columns: Sequence[str]
    num_bytes: float
    schema: Any = None
    groups: Sequence[int] | None = None


class Format(abc.ABC):
    """A file format that has tables.

    Files are open for reading bytes. For damaged files, methods raise pyarrow's errors.

    Attributes:
        name: Name of the format in errors.
        is_text: Whether files are text, which does not say the types of columns.
    """

    name: str
    is_text: ClassVar[bool] = False

    @abc.abstractmethod
    def look(self, file: Any, columns: Sequence[str] = ()) -> FileFacts:
        """Return facts about a file without reading all of it. This may close the file.

        Args:
            file: The file.
            columns: Columns that `FileFacts.num_bytes` counts.
        """

    def open(self, file: Any) -> Any:
        """Return a reader that owns the file, for `batches`. The caller closes it."""
        return file

    def digest(self, opened: Any) -> bytes:
        """Return a hash of an opened file's footer, or b"" if there is no footer."""
        del opened
        return b""

    @abc.abstractmethod
    def batches(self, opened: Any, wanted: Wanted) -> Iterator[Any]:
        """Yield columns of a file's rows, in order, as record batches.

        Args:
            opened: Reader that `open` returned.
            wanted: Part of the file to read.
        """


def cut_batch(batch: Any, num_bytes: float) -> Iterator[Any]:
    """Yield the rows of a record batch in pieces of bounded size."""
    row_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
    count = int(max(1, min(num_bytes // row_bytes, batch.num_rows)))
    for start in range(0, batch.num_rows, count):
        piece = batch.slice(start, count)
        piece.validate(full=True)  # otherwise a damaged offset would be followed
        yield piece

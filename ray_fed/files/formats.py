"""The seam of formats of files with tables.

    file --look--> columns, size in memory, row groups
         --open--> --batches--> record batches of bounded size, in order

The formats are in `parquet.py`, `arrow_files.py` and `text.py`. A new one needs a
subclass of `Format`, a suffix in `tensorflow/external_data.py`, and a `from_` function
of `ClientData`.
"""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

EXPANSION = 2
"""Estimated ratio of bytes in memory to bytes of the file, if a file has no sizes."""


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """The facts about its rows that a file has, before the rows are read.

    Attributes:
        schema: The columns, as a schema of arrow.
        num_bytes: About how many bytes the columns that were asked for take in memory.
        group_sizes: Number of rows in each row group. Empty if the format has none.
        digest: Hash of the file's footer, which has the places, sizes and statistics of
            its rows. Empty if the format has no footer.
    """

    schema: Any
    num_bytes: int
    group_sizes: tuple[int, ...] = ()
    digest: bytes = b""


class Format(abc.ABC):
    """A format of files with tables.

    Files are opened to read bytes. Methods raise what pyarrow raises for damaged files.

    Attributes:
        name: Name of the format in errors.
        is_text: Whether files do not say the types of their columns.
    """

    name: str
    is_text: ClassVar[bool] = False

    @abc.abstractmethod
    def look(self, file: Any, columns: Sequence[str] = ()) -> FileFacts:
        """Return the facts that a file has about its rows. This may close the file.

        Args:
            file: The file.
            columns: Columns whose size is asked for. Parts of structs have dots.
        """

    def open(self, file: Any) -> Any:
        """Return a reader for `batches`, which owns the file. The caller closes it."""
        return file

    def digest(self, opened: Any) -> bytes:
        """Return the hash of an opened file's footer; see `FileFacts`."""
        del opened
        return b""

    @abc.abstractmethod
    def batches(
        self,
        opened: Any,
        columns: Sequence[str],
        num_bytes: float,
        *,
        schema: Any = None,
        groups: Sequence[int] | None = None,
    ) -> Iterator[Any]:
        """Yield columns of a file's rows, in order, as record batches.

        Args:
            opened: What `open` returned.
            columns: Names of the columns. Parquet takes parts of structs, with dots.
            num_bytes: Largest size of a batch, unless a single row is larger.
            schema: Types to read the columns of text by.
            groups: Indices of the row groups to read; None reads all.
        """


def cut_batch(batch: Any, num_bytes: float) -> Iterator[Any]:
    """Yield the rows of a record batch in pieces of bounded size."""
    row_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
    count = int(max(1, min(num_bytes // row_bytes, batch.num_rows)))
    for start in range(0, batch.num_rows, count):
        piece = batch.slice(start, count)
        piece.validate(full=True)  # otherwise a damaged offset would be followed
        yield piece

"""Lays a table's rows by client, once, in bounded memory and on this machine's disk.

    batches --decode--> laid columns                          rows in order of clients
    batches --> parts of clients, on disk --sort, decode--> laid columns     any order

A cell that does not fit is that client's failure, kept for whoever reads the client.
"""

import contextlib
import dataclasses
import itertools
import logging
import shutil
import tempfile
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import IO, Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.files import cells, opening
from ray_fed.files.features import Features
from ray_fed.files.laid_columns import LaidWriter, open_unnamed
from ray_fed.files.parquet import ParquetRows
from ray_fed.values import read_limits

_PART_BYTES = 32 * 2**20
"""Rows that are sorted at once."""

_MAX_PARTS = 256
"""Files open at once."""

_POSITION = "ray_fed.position"
"""The column of clients' positions, in parts."""

_logger = logging.getLogger(__name__)

_Block: TypeAlias = tuple[NDArray[np.int64], Any]
"""The positions of rows' clients, and the rows."""


@dataclasses.dataclass(frozen=True, eq=False)
class ClientTable:
    """The rows of clients in files, and who they are.

    Attributes:
        rows: of the files.
        features: how rows become elements.
        client: the column of ids.
        ids: of clients, by position, ascending.
        sizes: i64[clients], the number of their rows.
        is_sorted: whether rows are in the order of the ids.
    """

    rows: ParquetRows
    features: Features
    client: str
    ids: Sequence[Hashable]
    sizes: NDArray[np.int64]
    is_sorted: bool

    @property
    def num_bytes(self) -> int:
        """About how many bytes all rows take, laid."""
        return self.rows.count_bytes(self.features.leaves)


def lay(table: ClientTable) -> list[int]:
    """Return the files of all clients' rows, laid; see `LaidColumns`.

    Raises:
        ResourceError: the temporary folder has no room.
        ValueMismatchError: the files are not what they were.
        ClusterError: nobody waits for it any more.
    """
    _check_room(table)
    started = time.monotonic()
    layer = _Layer(table)
    try:
        files = layer.lay()
    except errors.RayFedError:
        raise
    except OSError as error:
        raise _no_room(table, str(error)) from error
    _logger.info(
        "Laid %d clients of %s by client in %.1f s",
        len(table.ids),
        table.rows.label,
        time.monotonic() - started,
    )
    return files


def _check_room(table: ClientTable) -> None:
    needed = table.num_bytes * (1 if table.is_sorted else 2)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if needed > free:
        raise _no_room(table, f"{free} bytes")


def _no_room(table: ClientTable, found: str) -> errors.ResourceError:
    return errors.ResourceError(
        f"Expected room for about {table.num_bytes} bytes in"
        f" `{tempfile.gettempdir()}`, where {opening.describe_executor()} lays the rows"
        f" of {table.rows.label} by client, found {found}: set TMPDIR to a folder with"
        " more, or pass `copy_bytes=0` to read the files in each round."
    )


class _Layer:
    """Lays the rows of a table."""

    def __init__(self, table: ClientTable) -> None:
        self._table, self._features = table, table.features
        self._counts = np.zeros(len(table.ids), np.int64)
        self._failures: dict[int, str] = {}

    def lay(self) -> list[int]:
        with LaidWriter(self._features.leaves) as writer, _Parts(self._table) as parts:
            for positions, rows in self._blocks(parts):
                read_limits.check()
                self._append(writer, positions, rows)
            return writer.finish(self._counts, self._failures)

    def _blocks(self, parts: "_Parts") -> Iterator[_Block]:
        """Yield rows in the order of clients."""
        table, columns = self._table, self._features.columns
        positions = _Positions(table)
        for rows in table.rows.batches([table.client, *columns]):
            found = positions.find(rows.column(table.client))
            block = found, rows.select(columns)
            if table.is_sorted:
                yield block
            else:
                parts.add(*block)
        yield from parts.sorted()

    def _append(
        self, writer: LaidWriter, positions: NDArray[np.int64], rows: Any
    ) -> None:
        """Write rows; where one does not fit, client by client."""
        if self._features.missing == "drop":
            kept = cells.find_whole(rows)
            positions, rows = positions[kept], rows.filter(kept)
        try:
            self._write(writer, positions, rows, None)
        except errors.ValueMismatchError:
            starts = np.flatnonzero(np.diff(positions, prepend=-1))
            for start, stop in itertools.pairwise([*starts, len(positions)]):
                one = slice(int(start), int(stop))
                client = int(positions[start])
                try:
                    part = rows.slice(one.start, one.stop - one.start)
                    self._write(writer, positions[one], part, self._table.ids[client])
                except errors.ValueMismatchError as error:
                    self._failures[client] = str(error)

    def _write(
        self,
        writer: LaidWriter,
        positions: NDArray[np.int64],
        rows: Any,
        client: Hashable,
    ) -> None:
        writer.append(cells.decode(self._features, rows, client))
        if len(positions):
            counts = np.bincount(positions - positions[0])
            self._counts[positions[0] : positions[0] + len(counts)] += counts


class _Positions:
    """Finds the positions of clients by their ids."""

    def __init__(self, table: ClientTable) -> None:
        self._table = table
        ids = np.array(table.ids, object)
        are_small = all(type(i) is int and i < 2**63 for i in table.ids)
        self._numbers = ids.astype(np.int64) if are_small else None
        self._named = {client: index for index, client in enumerate(table.ids)}

    def find(self, column: Any) -> NDArray[np.int64]:
        """Return the positions of the clients of rows."""
        pyarrow: Any = opening.import_extra("pyarrow")
        numbers = self._numbers
        if numbers is not None and pyarrow.types.is_signed_integer(column.type):
            given = column.to_numpy()
            places = np.searchsorted(numbers, given)
            if not (numbers[np.minimum(places, len(numbers) - 1)] == given).all():
                raise self._changed()
            return places.astype(np.int64)
        named = column.dictionary_encode()
        encoded = pyarrow.chunked_array(named).combine_chunks()
        try:
            names = [self._named[client] for client in encoded.dictionary.to_pylist()]
        except KeyError as error:
            raise self._changed() from error
        return np.array(names, np.int64)[encoded.indices.to_numpy(zero_copy_only=False)]

    def _changed(self) -> errors.ValueMismatchError:
        table = self._table
        return errors.ValueMismatchError(
            f"Expected the clients that the column `{table.client}` of"
            f" {table.rows.label} had when the data was named, found another one (read"
            f" by {opening.describe_executor()}): name it again after files change."
        )


class _Parts:
    """Rows on disk, by part of the clients; a context manager, which frees them."""

    def __init__(self, table: ClientTable) -> None:
        row_bytes = table.num_bytes / max(1, int(table.sizes.sum()))
        part_bytes = max(_PART_BYTES, table.num_bytes // _MAX_PARTS)
        ends = np.cumsum(table.sizes) * row_bytes
        self._part_of = ((ends - ends[0]) // part_bytes).astype(np.int64)
        self._stack = contextlib.ExitStack()
        self._files: dict[int, tuple[IO[bytes], Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, positions: NDArray[np.int64], rows: Any) -> None:
        """Keep rows of clients in any order."""
        pyarrow: Any = opening.import_extra("pyarrow")
        rows = rows.append_column(_POSITION, pyarrow.array(positions))
        parts = self._part_of[positions]
        order = np.argsort(parts, kind="stable")
        rows, parts = rows.take(order), parts[order]
        starts = np.flatnonzero(np.diff(parts, prepend=-1))
        for start, stop in itertools.pairwise([*starts.tolist(), len(parts)]):
            writer = self._open(int(parts[start]), rows.schema)
            writer.write_table(rows.slice(start, stop - start))

    def _open(self, part: int, schema: Any) -> Any:
        if part not in self._files:
            ipc: Any = opening.import_extra("pyarrow.ipc")
            file = open_unnamed(self._stack)
            self._files[part] = file, ipc.new_stream(file, schema)
        return self._files[part][1]

    def sorted(self) -> Iterator[_Block]:
        """Yield all rows in the order of clients, those of each as they came."""
        ipc: Any = opening.import_extra("pyarrow.ipc")
        for part in sorted(self._files):
            file, writer = self._files.pop(part)
            writer.close()
            file.seek(0)
            rows = ipc.open_stream(file).read_all()
            file.close()
            positions = rows.column(_POSITION).to_numpy()
            order = np.argsort(positions, kind="stable")
            yield positions[order], rows.drop_columns([_POSITION]).take(order)

"""Which rows of clients in which segments count.

Of several segments with a client's row, the one written last counts.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeAlias

import ray_fed.errors as errors
from ray_fed.learning.segment_files import ClientId, Row, Segment, SegmentFiles

_WASTED_SHARE = 0.5
"""Of the rows of segments that may be old before the others are written anew."""

_MOST_SEGMENTS = 256
"""With rows that count: the smaller half of more than these becomes one."""

_ROWS_BYTES = 2**24
"""Of rows that are read to be written anew at a time."""

_Place: TypeAlias = tuple[Segment, int]
"""A segment, and which of its rows."""


class Segments:
    """The segments of a folder, and which of their rows count.

    One thread writes at a time; others may look for rows meanwhile.

    Args:
        folder: of any file system that fsspec knows; made by the first segment.
        row_bytes: of each row.
        removes: whether a segment is removed as soon as none of its rows counts;
            otherwise `collect` removes it.

    Attributes:
        lock: held while it changes which rows count.
    """

    def __init__(self, folder: str, row_bytes: int, *, removes: bool) -> None:
        self.lock = threading.RLock()
        self._files = SegmentFiles(folder, row_bytes)
        self._row_bytes = row_bytes
        self._removes = removes
        self._segments: dict[str, Segment] = {}  # in the order of their writing
        self._places: dict[ClientId, _Place] = {}
        self._others: set[str] = set()

    @property
    def clients(self) -> list[ClientId]:
        """All that have a row."""
        with self.lock:
            return list(self._places)

    @property
    def names(self) -> tuple[str, ...]:
        """The segments with rows that count, in the order of their writing."""
        with self.lock:
            return tuple(s.name for s in self._segments.values() if s.num_live)

    def read(self, clients: Iterable[ClientId]) -> dict[ClientId, bytes]:
        """Return the rows of those clients that have one.

        Raises:
            StorageError: a segment cannot be read.
            SavedStateError: it is damaged.
        """
        wanted = list(clients)
        while True:
            places = self._find(wanted)
            try:
                return self._read(places)
            except errors.StorageError:
                # Segments may be written anew, and the old ones removed, meanwhile.
                if places == self._find(wanted):
                    raise

    def write(
        self, rows: Sequence[Row], is_current: Callable[[ClientId, bytes], bool]
    ) -> str:
        """Write rows to a new segment and return its name.

        Args:
            rows: at least one, of different clients.
            is_current: tells, under `lock`, which of them count.

        Raises:
            StorageError: it cannot be written.
        """
        name = self._write_segment(rows, is_current)
        with self.lock:
            used = [s for s in self._segments.values() if s.num_live]
            num_rows = sum(len(s.checks) for s in used)
            wasted = num_rows - sum(s.num_live for s in used)
        if wasted > max(len(rows), _WASTED_SHARE * num_rows):
            self._write_anew(
                [s for s in used if s.num_live < _WASTED_SHARE * len(s.checks)]
            )
        elif len(used) > _MOST_SEGMENTS:
            used.sort(key=lambda segment: segment.num_live)
            self._write_anew(used[: len(used) // 2])
        return name

    def forget(self, client: ClientId) -> None:
        """Let the row of a client, if there is one, count no more."""
        with self.lock:
            place = self._places.pop(client, None)
            if place is None:
                return
            segment, _ = place
            segment.num_live -= 1
            is_old = self._removes and not segment.num_live
            if is_old:
                del self._segments[segment.name]
        if is_old:
            self._files.remove([segment.name])

    def take_over(self, names: Sequence[str]) -> None:
        """Take the rows of segments that were written before.

        Args:
            names: in the order of their writing.

        Raises:
            StorageError: one cannot be read.
            SavedStateError: one is damaged, or is not there.
        """
        self._others = self._files.names() - {*names}
        for name in names:
            segment, clients = self._files.read_header(name)
            with self.lock:
                self._segments[name] = segment
                for index, client in enumerate(clients):
                    self._place(client, segment, index)

    def collect(self, keep: AbstractSet[str]) -> None:
        """Remove segments without a row that counts, but for those to keep."""
        with self.lock:
            old = [s.name for s in self._segments.values() if not s.num_live]
            removed = [n for n in (*old, *self._others) if n not in keep]
            for name in removed:
                self._segments.pop(name, None)
            self._others -= {*removed}
        self._files.remove(removed)

    def clear(self) -> None:
        """Remove all segments."""
        with self.lock:
            self._places.clear()
            self._segments.clear()
        self._files.clear()

    def _find(self, clients: Iterable[ClientId]) -> dict[ClientId, _Place]:
        """Return where the rows of those clients are that have one."""
        with self.lock:
            return {c: self._places[c] for c in clients if c in self._places}

    def _read(self, places: Mapping[ClientId, _Place]) -> dict[ClientId, bytes]:
        by_segment: dict[Segment, list[tuple[int, ClientId]]] = {}
        for client, (segment, index) in places.items():
            by_segment.setdefault(segment, []).append((index, client))
        return {
            client: row
            for segment, found in by_segment.items()
            for client, row in self._files.read(segment, found)
        }

    def _write_segment(
        self, rows: Sequence[Row], is_current: Callable[[ClientId, bytes], bool]
    ) -> str:
        segment = self._files.write(rows)
        with self.lock:
            self._segments[segment.name] = segment
            for index, (client, row) in enumerate(rows):
                if is_current(client, row):
                    self._place(client, segment, index)
        return segment.name

    def _place(self, client: ClientId, segment: Segment, index: int) -> None:
        self.forget(client)
        segment.num_live += 1
        self._places[client] = (segment, index)

    def _write_anew(self, segments: Sequence[Segment]) -> None:
        """Write the rows of segments that count to new ones."""
        with self.lock:
            chosen = set(segments)
            moved = {c: p for c, p in self._places.items() if p[0] in chosen}
        at_once = max(1, _ROWS_BYTES // max(1, self._row_bytes))
        clients = list(moved)
        for start in range(0, len(clients), at_once):
            rows = self.read(clients[start : start + at_once])

            def stayed(client: ClientId, _: bytes) -> bool:
                return self._places.get(client) == moved[client]

            if rows:
                self._write_segment(list(rows.items()), stayed)

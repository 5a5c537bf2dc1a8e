"""Rows of bytes by client: in memory up to a bound, the rest in segments.

put --> memory --> evicted, those used least recently first --> segments
          |
          +--> freeze --> write, on another thread, at a time of its own
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from ray_fed.learning.segment_files import ClientId, Row
from ray_fed.learning.segments import Segments

_EVICTED_SHARE = 0.25
"""Of the rows in memory, at a time: a file for each row would be slow."""


class ClientRows:
    """Rows by client.

    One thread reads, puts and freezes; another one may write what is frozen.

    Args:
        max_rows: in memory, >= 1; those of a `put` come on top while it runs.
        segments: have the others; None keeps all rows in memory.
    """

    def __init__(self, max_rows: int, segments: Segments | None) -> None:
        self._max_rows = max_rows
        self._segments = segments
        self._rows: OrderedDict[ClientId, bytes] = OrderedDict()
        self._unwritten: set[ClientId] = set()
        self._lock = threading.Lock() if segments is None else segments.lock
        self._writing = threading.RLock()
        self._num_frozen = 0
        self._frozen: weakref.WeakSet[FrozenRows] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def clients(self) -> list[ClientId]:
        """All that have a row."""
        written = [] if self._segments is None else self._segments.clients
        return list(dict.fromkeys([*self._rows, *written]))

    @property
    def num_in_memory(self) -> int:
        """How many rows are in memory."""
        return len(self._rows)

    def read(self, clients: Sequence[ClientId], *, uses: bool) -> list[bytes | None]:
        """Return the rows of clients; None for one that has none.

        Args:
            clients: any, in any order.
            uses: whether those in memory count as used.
        """
        absent = [client for client in clients if client not in self._rows]
        read = self._segments.read(absent) if self._segments and absent else {}
        if uses:
            for client in clients:
                if client in self._rows:
                    self._rows.move_to_end(client)
        return [self._rows.get(client, read.get(client)) for client in clients]

    def put(self, rows: Sequence[Row]) -> None:
        """Keep new rows of clients, each once."""
        with self._lock:
            for client, row in rows:
                self._rows[client] = row
                self._rows.move_to_end(client)
                self._unwritten.add(client)
                if self._segments is not None:
                    self._segments.forget(client)
        if self._segments is not None and len(self._rows) > self._max_rows:
            self._evict(self._segments)

    def _evict(self, segments: Segments) -> None:
        room = self._max_rows - int(self._max_rows * _EVICTED_SHARE)
        with self._writing:
            self._write_frozen(segments, self._num_frozen)
            oldest = list(self._rows)[: len(self._rows) - room]
            rows = [(c, self._rows[c]) for c in oldest if c in self._unwritten]
            if rows:
                segments.write(rows, self._is_current)
            with self._lock:
                for client in oldest:
                    del self._rows[client]
                    self._unwritten.discard(client)

    def freeze(self) -> "FrozenRows":
        """Return all rows as they are now, to be written at any time; segments only."""
        segments = self._segments
        assert segments is not None
        with self._lock:
            rows = [(client, self._rows[client]) for client in self._unwritten]
            self._num_frozen += 1
            frozen = FrozenRows(self, self._num_frozen, rows, segments.names)
            self._frozen.add(frozen)
        return frozen

    def write(self, frozen: "FrozenRows") -> tuple[str, ...]:
        """Return the segments with all frozen rows, in the order of their writing.

        Raises:
            StorageError: they cannot be written.
        """
        segments = self._segments
        assert segments is not None
        with self._writing:
            self._write_frozen(segments, frozen.number)
            return frozen.names

    def _write_frozen(self, segments: Segments, last: int) -> None:
        """Write what was frozen up to a number, older rows first."""
        with self._lock:
            held = sorted(self._frozen, key=lambda frozen: frozen.number)
        for frozen in held:
            if frozen.rows and frozen.number <= last:
                name = segments.write(frozen.rows, self._is_current)
                with self._lock:
                    for client, row in frozen.rows:
                        if self._is_current(client, row):
                            self._unwritten.discard(client)
                    frozen.names, frozen.rows = (*frozen.names, name), ()

    def _is_current(self, client: ClientId, row: bytes) -> bool:
        return self._rows.get(client) is row

    def collect(self, keep: AbstractSet[str]) -> None:
        """Remove segments that neither these rows, frozen ones, nor `keep` have."""
        if self._segments is not None:
            with self._lock:
                frozen = {name for each in self._frozen for name in each.names}
            self._segments.collect(keep | frozen)


class FrozenRows:
    """The rows of a moment: some in segments, the others in memory until `write`."""

    def __init__(
        self,
        owner: ClientRows,
        number: int,
        rows: Sequence[Row],
        names: tuple[str, ...],
    ) -> None:
        self._owner = owner
        self.number, self.rows, self.names = number, rows, names

    def write(self) -> tuple[str, ...]:
        """See `ClientRows.write`."""
        return self._owner.write(self)

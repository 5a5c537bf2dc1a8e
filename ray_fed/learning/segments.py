"""Rows of bytes in files, of clients that memory has no room for."""

import uuid
from collections.abc import Sequence
from typing import Any

import ray_fed.errors as errors

_WASTED_SHARE = 0.5
"""Of the rows in segments that may be old before all are written anew."""

ClientId = str | int


class Segments:
    """Rows in files: which file and place a client's is at.

    Attributes:
        places: of each client whose row is in a file: its name, and which row.
    """

    def __init__(self, path: str, row_bytes: int) -> None:
        self._system, folder = import_fsspec().core.url_to_fs(path)
        # A folder of its own: two stores may share a path.
        self._folder = f"{folder}/client-states-{uuid.uuid4().hex}"
        self._row_bytes = row_bytes
        self._live: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._num_written = 0
        self.places: dict[ClientId, tuple[str, int]] = {}

    def read(self, client: ClientId) -> bytes | None:
        """Return the row of a client; None where no file has it."""
        place = self.places.get(client)
        if place is None:
            return None
        name, index = place
        with self._system.open(name, "rb") as file:
            file.seek(index * self._row_bytes)
            return file.read(self._row_bytes)

    def write(self, rows: Sequence[tuple[ClientId, bytes]]) -> None:
        """Write rows to a new file."""
        self._write_segment(rows)
        wasted = self._num_written - len(self.places)
        if wasted > max(len(rows), _WASTED_SHARE * self._num_written):
            self._compact(len(rows))

    def forget(self, client: ClientId) -> None:
        """Drop the row of a client, if there is one."""
        place = self.places.pop(client, None)
        if place is None:
            return
        name = place[0]
        self._live[name] -= 1
        if not self._live[name]:
            self._remove(name)

    def clear(self) -> None:
        """Remove all files."""
        self.places.clear()
        self._live.clear()
        self._sizes.clear()
        self._num_written = 0
        if self._system.exists(self._folder):
            self._system.rm(self._folder, recursive=True)

    def _write_segment(self, rows: Sequence[tuple[ClientId, bytes]]) -> None:
        self._system.makedirs(self._folder, exist_ok=True)
        name = f"{self._folder}/{uuid.uuid4().hex}"
        with self._system.open(name, "wb") as file:
            for _, row in rows:
                file.write(row)
        self.places |= {c: (name, i) for i, (c, _) in enumerate(rows)}
        self._live[name] = len(rows)
        self._num_written += len(rows)
        self._sizes[name] = len(rows)

    def _compact(self, at_once: int) -> None:
        """Write the rows that count to new segments, a few at a time."""
        clients = list(self.places)
        for start in range(0, len(clients), at_once):
            rows: list[tuple[ClientId, bytes]] = []
            for client in clients[start : start + at_once]:
                row = self.read(client)
                if row is not None:
                    rows.append((client, row))
            for client, _ in rows:
                self.forget(client)
            self._write_segment(rows)

    def _remove(self, name: str) -> None:
        del self._live[name]
        self._num_written -= self._sizes.pop(name)
        self._system.rm(name)


def import_fsspec() -> Any:
    """Return the module `fsspec`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import fsspec
    except ImportError as error:
        raise errors.ConfigError(
            "Expected fsspec to keep client states in files, found none:"
            ' pip install "ray-fed[data]".'
        ) from error
    return fsspec

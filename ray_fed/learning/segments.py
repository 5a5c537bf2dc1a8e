"""Rows of bytes in files that are written once: segments.

    segment     length of the header | header: clients, CRC-32 of each row | rows

A segment's name is a digest of its header: who knows the name can tell whether the file
is whole. Of several segments with a client's row, the one written last counts.
"""

import contextlib
import dataclasses
import hashlib
import json
import threading
import uuid
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import ray_fed.errors as errors
from ray_fed.program.remote_versions import has_folders

_WASTED_SHARE = 0.5
"""Of the rows of segments that may be old before the others are written anew."""

_MOST_SEGMENTS = 256
"""With rows that count: the smaller half of more than these becomes one."""

_ROWS_BYTES = 2**24
"""Of rows that are read to be written anew at a time."""

_FORMAT = 1
_LENGTH_BYTES = 8

ClientId = str | int
Row = tuple[ClientId, bytes]


@dataclasses.dataclass(eq=False)
class _Segment:
    """A file.

    Attributes:
        name: in its folder.
        first_byte: of its first row.
        checks: the CRC-32 of each row.
        num_live: rows that count.
    """

    name: str
    first_byte: int
    checks: Sequence[int]
    num_live: int = 0


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
        self._where = folder
        self._system, self._folder = import_fsspec().core.url_to_fs(folder)
        self._row_bytes = row_bytes
        self._removes = removes
        self._segments: dict[str, _Segment] = {}  # in the order of their writing
        self._places: dict[ClientId, tuple[_Segment, int]] = {}
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
        with self.lock:
            places = {c: self._places[c] for c in clients if c in self._places}
        by_segment: dict[_Segment, list[tuple[int, ClientId]]] = {}
        for client, (segment, index) in places.items():
            by_segment.setdefault(segment, []).append((index, client))
        rows: dict[ClientId, bytes] = {}
        for segment, wanted in by_segment.items():
            with self._open(segment.name, "rb") as file:
                for index, client in sorted(wanted, key=lambda place: place[0]):
                    file.seek(segment.first_byte + index * self._row_bytes)
                    row = file.read(self._row_bytes)
                    if len(row) != self._row_bytes or (
                        zlib.crc32(row) != segment.checks[index]
                    ):
                        raise self._damage(segment.name, f"the row of `{client}`")
                    rows[client] = row
        return rows

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
            self._remove([segment.name])

    def take_over(self, names: Sequence[str]) -> None:
        """Take the rows of segments that were written before.

        Args:
            names: in the order of their writing.

        Raises:
            StorageError: one cannot be read.
            SavedStateError: one is damaged, or is not there.
        """
        with self._telling("read"):
            there = self._system.exists(self._folder)
            paths = self._system.ls(self._folder, detail=False) if there else []
        self._others = {str(path).rpartition("/")[2] for path in paths} - {*names}
        for name in names:
            segment, clients = self._read_header(name)
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
        self._remove(removed)

    def clear(self) -> None:
        """Remove all segments."""
        with self.lock:
            self._places.clear()
            self._segments.clear()
        with self._telling("remove from"):
            if self._system.exists(self._folder):
                self._system.rm(self._folder, recursive=True)

    def _write_segment(
        self, rows: Sequence[Row], is_current: Callable[[ClientId, bytes], bool]
    ) -> str:
        clients = [client for client, _ in rows]
        checks = [zlib.crc32(row) for _, row in rows]
        fields = {
            "format": _FORMAT,
            "row_bytes": self._row_bytes,
            "nonce": uuid.uuid4().hex,  # no two segments have one name
            "clients": clients,
            "crc32": checks,
        }
        header = json.dumps(fields).encode()
        name = _name_of(header)
        if has_folders(self._where):
            with self._telling("write to"):
                self._system.makedirs(self._folder, exist_ok=True)
        with self._open(name, "wb") as file:
            file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
            for _, row in rows:
                file.write(row)
        segment = _Segment(name, _LENGTH_BYTES + len(header), checks)
        with self.lock:
            self._segments[name] = segment
            for index, (client, row) in enumerate(rows):
                if is_current(client, row):
                    self._place(client, segment, index)
        return name

    def _place(self, client: ClientId, segment: _Segment, index: int) -> None:
        self.forget(client)
        segment.num_live += 1
        self._places[client] = (segment, index)

    def _write_anew(self, segments: Sequence[_Segment]) -> None:
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

    def _read_header(self, name: str) -> tuple[_Segment, Sequence[ClientId]]:
        try:
            with self._open(name, "rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                file.seek(0, 2)
                num_bytes = file.tell()
                if length > num_bytes:
                    raise self._damage(name, "its header")
                file.seek(_LENGTH_BYTES)
                header = file.read(length)
        except errors.StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise self._damage(name, "it is not there") from None
            raise
        if _name_of(header) != name:
            raise self._damage(name, "its header")
        found: Mapping[str, Any] = json.loads(header)
        if found["format"] != _FORMAT or found["row_bytes"] != self._row_bytes:
            raise self._damage(name, "rows of another kind")
        first = _LENGTH_BYTES + length
        if num_bytes != first + len(found["clients"]) * self._row_bytes:
            raise self._damage(name, "it is cut off")
        return _Segment(name, first, found["crc32"]), found["clients"]

    @contextlib.contextmanager
    def _open(self, name: str, mode: str) -> Generator[Any]:
        verb = "read" if mode == "rb" else "write to"
        with (
            self._telling(verb),
            self._system.open(f"{self._folder}/{name}", mode) as file,
        ):
            yield file

    @contextlib.contextmanager
    def _telling(self, verb: str) -> Generator[None]:
        try:
            yield
        except errors.SavedStateError:
            raise
        except Exception as error:  # what fsspec raises has no base of its own
            raise errors.StorageError(
                f"Expected to {verb} the folder `{self._where}` of client states, found"
                f" {type(error).__name__} ({error}): there must be room and rights."
            ) from error

    def _damage(self, name: str, what: str) -> errors.SavedStateError:
        return errors.SavedStateError(
            f"Expected client states as they were written in `{self._where}/{name}`,"
            f" found damage: {what}."
        )

    def _remove(self, names: Sequence[str]) -> None:
        with self._telling("remove from"):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm_file(f"{self._folder}/{name}")


def _name_of(header: bytes) -> str:
    return hashlib.sha256(header).hexdigest()[:32]


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

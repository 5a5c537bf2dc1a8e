"""What belongs to clients over rounds: in memory up to a bound, the rest in files.

    take(ids) --> values of a cohort --> process.next --> put(ids, values)

A client's value is a row of bytes of one size.

Files with rows of clients, each written once: segments.

    segment     length of the header | header: clients, CRC-32 of each row | rows

A segment's name is a digest of its header: who knows the name can tell whether the file
is whole.

Which rows of clients in which segments count.

Of several segments with a client's row, the one written last counts.

Rows of bytes by client: in memory up to a bound, the rest in segments.

put --> memory --> evicted, those used least recently first --> segments
          |
          +--> freeze --> write, on another thread, at a time of its own

All values of clients in one file, which is there whole or not at all.

length of the header | header: clients, types | rows | CRC-32 of header and rows

Values of clients in a run that is saved: a checkpoint names the segments it has.

What clients of a run keep from round to round: taken, put, and put back.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import threading
import uuid
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Self, TypeAlias

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.learning.checks import read_whole
from ray_fed.program.managers import has_folders
from ray_fed.program.state_files import telling_storage

_FORMAT = 1
_LENGTH_BYTES = 8

ClientId = str | int
Row = tuple[ClientId, bytes]


@dataclasses.dataclass(eq=False)
class Segment:
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


class SegmentFiles:
    """The segments of a folder, as files.

    Args:
        folder: of any file system that fsspec knows; made by the first segment.
        row_bytes: of each row.
    """

    def __init__(self, folder: str, row_bytes: int) -> None:
        self._where = folder
        with self._telling("open"):
            self._system, self._folder = import_fsspec().core.url_to_fs(folder)
        self._row_bytes = row_bytes

    def names(self) -> set[str]:
        """Return the names of all files that are there."""
        with self._telling("read"):
            there = self._system.exists(self._folder)
            paths = self._system.ls(self._folder, detail=False) if there else []
        return {str(path).rpartition("/")[2] for path in paths}

    def write(self, rows: Sequence[Row]) -> Segment:
        """Write rows, at least one, to a new file."""
        checks = [zlib.crc32(row) for _, row in rows]
        fields = {
            "format": _FORMAT,
            "row_bytes": self._row_bytes,
            "nonce": uuid.uuid4().hex,  # no two segments have one name
            "clients": [client for client, _ in rows],
            "crc32": checks,
        }
        header = json.dumps(fields).encode()
        name = _name_of(header)
        if has_folders(self._where):
            with self._telling("write"):
                self._system.makedirs(self._folder, exist_ok=True)
        with self._open(name, "wb") as file:
            file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
            for _, row in rows:
                file.write(row)
        return Segment(name, _LENGTH_BYTES + len(header), checks)

    def read(
        self, segment: Segment, wanted: Iterable[tuple[int, ClientId]]
    ) -> list[Row]:
        """Return rows of a file.

        Args:
            segment: the file.
            wanted: which row, and whose it is.
        """
        rows: list[Row] = []
        with self._open(segment.name, "rb") as file:
            for index, client in sorted(wanted, key=lambda place: place[0]):
                file.seek(segment.first_byte + index * self._row_bytes)
                row = file.read(self._row_bytes)
                is_whole = len(row) == self._row_bytes
                if not is_whole or zlib.crc32(row) != segment.checks[index]:
                    raise self._damage(segment.name, f"the row of `{client}`")
                rows.append((client, row))
        return rows

    def read_header(self, name: str) -> tuple[Segment, Sequence[ClientId]]:
        """Return a file that was written before, and whose its rows are."""
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
        return Segment(name, first, found["crc32"]), found["clients"]

    @contextlib.contextmanager
    def _open(self, name: str, mode: str) -> Generator[Any]:
        verb = "read" if mode == "rb" else "write"
        with (
            self._telling(verb),
            self._system.open(f"{self._folder}/{name}", mode) as file,
        ):
            yield file

    def _telling(self, verb: str) -> contextlib.AbstractContextManager[None]:
        return telling_states(self._where, verb)

    def _damage(self, name: str, what: str) -> errors.SavedStateError:
        return errors.SavedStateError(
            f"Expected client states as they were written in `{self._where}/{name}`,"
            f" found damage: {what}."
        )

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; one that is not there is no error."""
        with self._telling("remove"):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm_file(f"{self._folder}/{name}")

    def clear(self) -> None:
        """Remove the folder."""
        with self._telling("remove"):
            if self._system.exists(self._folder):
                self._system.rm(self._folder, recursive=True)


def _name_of(header: bytes) -> str:
    return hashlib.sha256(header).hexdigest()[:32]


def telling_states(where: str, verb: str) -> contextlib.AbstractContextManager[None]:
    """Tell what a file system raises as StorageError, see `telling_storage`.

    Args:
        where: client states are.
        verb: what is done there, such as "read".
    """
    # What fsspec raises has no base of its own.
    return telling_storage(where, Exception, verb=f"{verb} client states in")


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


_CHECK_BYTES = 4


def write_states(
    path: str, types: Sequence[Any], clients: Sequence[ClientId], rows: Iterable[bytes]
) -> None:
    """Write rows of clients to a file.

    Args:
        path: of any file system that fsspec knows; its folder is made.
        types: what rows hold, as JSON has it.
        clients: whose rows they are, in order.
        rows: one for each.

    Raises:
        StorageError: it cannot be written.
    """
    header = json.dumps({"clients": list(clients), "types": types}).encode()
    system, place = import_fsspec().core.url_to_fs(path)
    unfinished = f"{place}.{uuid.uuid4().hex}"
    with telling_states(path, "write"):
        system.makedirs(place.rpartition("/")[0] or ".", exist_ok=True)
        try:
            with system.open(unfinished, "wb") as file:
                file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
                check = zlib.crc32(header)
                for row in rows:
                    check = zlib.crc32(row, check)
                    file.write(row)
                file.write(check.to_bytes(_CHECK_BYTES, "little"))
            system.mv(unfinished, place)
        except BaseException:
            with contextlib.suppress(Exception):  # it may not be there
                system.rm_file(unfinished)
            raise


def read_states(path: str, types: Sequence[Any], row_bytes: int) -> Iterator[Row]:
    """Yield clients and their rows of a file, and check the file at its end.

    Args:
        path: of the file.
        types: what rows are to hold, as JSON has it.
        row_bytes: of each.

    Raises:
        StorageError: it cannot be read.
        SavedStateError: it is damaged, or of other values.
    """
    with (
        telling_states(path, "read"),
        import_fsspec().open(path, "rb") as file,
    ):
        content, header = _read_header(file, path)
        if header["types"] != types:
            raise errors.SavedStateError(
                f"Expected values of types {types} in `{path}`, found"
                f" {header['types']}."
            )
        check = zlib.crc32(content)
        for client in header["clients"]:
            row = file.read(row_bytes)
            if len(row) != row_bytes:
                raise errors.SavedStateError(
                    f"Expected {row_bytes} bytes of client `{client}` in `{path}`,"
                    f" found {len(row)}: the file is cut off."
                )
            check = zlib.crc32(row, check)
            yield client, row
        if file.read() != check.to_bytes(_CHECK_BYTES, "little"):
            raise errors.SavedStateError(
                f"Expected client states as they were saved in `{path}`, found another"
                " checksum: the file is damaged."
            )


def _read_header(file: Any, path: str) -> tuple[bytes, Any]:
    try:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        content = file.read(size)
        return content, json.loads(content)
    except (ValueError, OverflowError, MemoryError) as error:
        raise errors.SavedStateError(
            f"Expected a file that ClientStates saved, found `{path}`, whose header"
            " cannot be read."
        ) from error


_AT_ONCE = 1000
"""Clients whose values are copied or saved at a time."""


class ClientStates:
    """Values of clients by id: numpy arrays in one structure for all of them.

    Not safe for several threads at once. Equal calls leave equal values, however much
    is in memory.

    Args:
        initial: of a client that has put none, such as
            `process.initial_client_state`.
        path: a folder for what does not fit, of any file system that fsspec knows; what
            is there from others is left alone. None: all stays in memory.
        memory_bytes: of values in memory, >= those of a cohort; Python's own objects
            come on top, about 300 bytes for each client.

    Attributes:
        max_memory_bytes: `memory_bytes`.

    Raises:
        ConfigError: `memory_bytes` is too small for a value.
    """

    def __init__(
        self, initial: Any, path: str | None = None, *, memory_bytes: int = 2**28
    ) -> None:
        self._initial = tf.nest.map_structure(np.asarray, initial)
        arrays: list[NDArray[Any]] = tf.nest.flatten(self._initial)
        self._types = [(array.dtype, array.shape) for array in arrays]
        self._sizes = [(array.size, array.nbytes) for array in arrays]
        self._nest = _build_nest(self._initial)
        self._row_bytes = sum(array.nbytes for array in arrays)
        memory_bytes = read_whole("memory_bytes", memory_bytes, 0)
        self._path, self.max_memory_bytes = path, memory_bytes
        self._max_rows = memory_bytes // max(1, self._row_bytes)
        if self._max_rows < 1:
            raise errors.ConfigError(
                f"Expected `memory_bytes` to be at least {self._row_bytes}, the"
                f" bytes of one client, found {memory_bytes}."
            )
        # A folder of its own: two may share a path.
        folder = f"{path}/client-states-{uuid.uuid4().hex}"
        made = None if path is None else Segments(folder, self._row_bytes, removes=True)
        self._segments, self._rows = made, ClientRows(self._max_rows, made)

    @override
    def __repr__(self) -> str:
        return f"<states of {len(self)} clients, {self.memory_bytes} bytes in memory>"

    def __len__(self) -> int:
        """Return how many clients have put a value."""
        return len(self._rows)

    @property
    def ids(self) -> list[ClientId]:
        """The clients that have put a value, in no order that can be relied on."""
        return self._rows.clients

    @property
    def memory_bytes(self) -> int:
        """The bytes of values that are in memory now."""
        return self._rows.num_in_memory * self._row_bytes

    def take(self, client_ids: Iterable[ClientId]) -> list[Any]:
        """Return the values of clients, in the order of their ids.

        Args:
            client_ids: any; those that put none have the initial value.

        Raises:
            StorageError: values in files cannot be read.
            SavedStateError: these are damaged.
        """
        rows = self._rows.read(list(client_ids), uses=True)
        return [self._initial if row is None else self._unpack(row) for row in rows]

    def put(self, client_ids: Sequence[ClientId], values: Sequence[Any]) -> None:
        """Keep new values of clients.

        Args:
            client_ids: each once.
            values: one for each, of the initial value's structure, dtypes and shapes.

        Raises:
            ValueMismatchError: a value is of another kind, or an id comes twice.
            CardinalityError: there is another number of values.
            StorageError: values that memory has no room for cannot be written.
        """
        if len(client_ids) != len(values):
            raise errors.CardinalityError(
                f"Expected a value for each of {len(client_ids)} clients, found"
                f" {len(values)}."
            )
        if len(set(client_ids)) != len(client_ids):
            raise errors.ValueMismatchError(
                "Expected each client once, found an id that comes twice: one of its"
                " values would be lost."
            )
        rows = [self._pack(value) for value in values]  # all are checked first
        self._rows.put(list(zip(client_ids, rows, strict=True)))

    def emptied(self, initial: Any) -> "ClientStates":
        """Return another one without values, within the same bounds.

        Args:
            initial: its clients' initial value.

        Raises:
            ValueMismatchError: it is of another structure, dtype or shape than those of
                these clients.
        """
        self._pack(initial)
        return ClientStates(initial, self._path, memory_bytes=self.max_memory_bytes)

    def fill_from(self, other: "ClientStates") -> None:
        """Put all values that another one has."""
        for ids in _chunks(other.ids):
            self.put(ids, other.take(ids))

    def save(self, path: str) -> None:
        """Write all values to one file, which is there whole or not at all.

        Args:
            path: of any file system that fsspec knows.

        Raises:
            StorageError: it cannot be written.
        """
        clients = sorted(self.ids, key=lambda client: (str(type(client)), client))
        rows = (
            row
            for ids in _chunks(clients)
            for row in self._rows.read(ids, uses=False)
            if row is not None
        )
        write_states(path, self._described, clients, rows)

    @classmethod
    def load(
        cls,
        saved: str,
        initial: Any,
        path: str | None = None,
        *,
        memory_bytes: int = 2**28,
    ) -> Self:
        """Return the values that `save` wrote.

        Args:
            saved: path that they were saved to.
            initial: as when they were saved.
            path: as of the class.
            memory_bytes: as of the class.

        Raises:
            StorageError: the file cannot be read.
            SavedStateError: it is damaged, or of other values.
        """
        states = cls(initial, path, memory_bytes=memory_bytes)
        for row in read_states(saved, states._described, states._row_bytes):
            states._rows.put([row])
        return states

    @property
    def _described(self) -> list[Any]:
        """The types, as JSON has them."""
        return [[dtype.str, list(shape)] for dtype, shape in self._types]

    def close(self) -> None:
        """Remove what was written for want of memory."""
        if self._segments:
            self._segments.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pack(self, value: Any) -> bytes:
        try:
            tf.nest.assert_same_structure(self._initial, value)
        except (ValueError, TypeError) as error:
            raise errors.ValueMismatchError(
                "Expected a value of the structure of the initial one,"
                f" {errors.describe(self._initial)}, found {errors.describe(value)}."
            ) from error
        arrays = [np.asarray(array) for array in tf.nest.flatten(value)]
        found = [(array.dtype, array.shape) for array in arrays]
        if found != self._types:
            raise errors.ValueMismatchError(
                f"Expected arrays of dtypes and shapes {self._types}, found {found}."
            )
        return b"".join(array.tobytes() for array in arrays)

    def _unpack(self, row: bytes) -> Any:
        arrays: list[NDArray[Any]] = []
        start = 0
        for (dtype, shape), (count, num_bytes) in zip(
            self._types, self._sizes, strict=True
        ):
            arrays.append(np.frombuffer(row, dtype, count, start).reshape(shape))
            start += num_bytes
        return self._nest(arrays)


def _build_nest(initial: Any) -> Callable[[list[NDArray[Any]]], Any]:
    """Return what packs arrays into the structure of a value."""
    if type(initial) in (list, tuple) and not any(map(tf.nest.is_nested, initial)):
        return type(initial)  # takes a fiftieth of the time
    return functools.partial(tf.nest.pack_sequence_as, initial)


def _chunks(clients: Sequence[ClientId]) -> Iterator[Sequence[ClientId]]:
    for start in range(0, len(clients), _AT_ONCE):
        yield clients[start : start + _AT_ONCE]


class SavedClientStates(ClientStates):
    """Values of clients, none yet, that are saved from time to time.

    Args:
        initial: as of `ClientStates`.
        folder: of this run alone: what memory has no room for is written where values
            are saved, and stays there until `collect`.
        memory_bytes: as of `ClientStates`.
    """

    def __init__(self, initial: Any, folder: str, *, memory_bytes: int) -> None:
        super().__init__(initial, memory_bytes=memory_bytes)
        self._segments = Segments(folder, self._row_bytes, removes=False)
        self._rows = ClientRows(self._max_rows, self._segments)

    def take_over(self, names: Sequence[str]) -> None:
        """Take the values that a run saved, as `FrozenRows.write` named them.

        Raises:
            StorageError: they cannot be read.
            SavedStateError: they are damaged, or not there.
        """
        assert self._segments is not None
        self._segments.take_over(names)

    def freeze(self) -> FrozenRows:
        """Return what clients have now, to be saved at any time."""
        return self._rows.freeze()

    def collect(self, keep: AbstractSet[str]) -> None:
        """Remove what neither these values nor saved ones need.

        Args:
            keep: names that `FrozenRows.write` returned for those.
        """
        self._rows.collect(keep)

    @override
    def close(self) -> None:
        """Do nothing: what is saved stays."""


_MAX_NAMED = 10


def check_client_states(given: object, initial: Any, num_clients: int) -> None:
    """Raise unless a run can begin with values of clients.

    Args:
        given: `client_states` of `learning.run`, not None.
        initial: of a client of its process that has put none.
        num_clients: in its `data`.

    Raises:
        ValueMismatchError: they are of another process, or of other clients.
    """
    if not isinstance(given, ClientStates):
        raise errors.ValueMismatchError(
            "Expected a `ClientStates` as `client_states`, found"
            f" {errors.describe(given)}."
        )
    try:
        given.emptied(initial)
    except errors.ValueMismatchError as error:
        cause = str(error).rstrip(".")
        raise errors.ValueMismatchError(
            "Expected `client_states` of a run of this process, found those of another"
            f" one ({cause}): pass those of a result of this one."
        ) from error
    known = range(num_clients)
    unknown = [each for each in given.ids if isinstance(each, str) or each not in known]
    if unknown:
        shown = ", ".join(map(repr, unknown[:_MAX_NAMED]))
        others = f" and {len(unknown) - _MAX_NAMED} others" * (
            len(unknown) > _MAX_NAMED
        )
        raise errors.ValueMismatchError(
            f"Expected `client_states` by index in `data`, from 0 to {num_clients - 1},"
            f" found values of {shown}{others}: pass those of a run of these clients."
        )


@dataclasses.dataclass(frozen=True)
class _Taken:
    """What clients of a round had kept before it.

    Attributes:
        round_index: of the round.
        cohort: its clients.
        values: theirs, in order.
    """

    round_index: int
    cohort: Sequence[int]
    values: Sequence[Any]


class RunClients:
    """Takes and puts the values of one round after another.

    Args:
        states: hold the values; None where clients keep nothing.
    """

    def __init__(self, states: ClientStates | None) -> None:
        self._states = states
        self._taken = self._put = _Taken(-1, (), ())

    def take(self, round_index: int, cohort: Sequence[int]) -> list[list[Any]]:
        """Return what `next` takes before the cohort's data: a list of values, or none.

        Args:
            round_index: of the round that takes them.
            cohort: its clients.
        """
        if self._states is None:
            return []
        values = self._states.take(cohort)
        self._taken = _Taken(round_index, cohort, values)
        return [values]

    def put(self, kept: "concurrent.futures.Future[Any] | None") -> FrozenRows | None:
        """Put what the round returned that took last, and freeze it to be saved.

        Args:
            kept: what it returned for its clients.

        Returns:
            None where no run is saved, or clients keep nothing.
        """
        if self._states is None or kept is None:
            return None
        self._states.put(self._taken.cohort, kept.result())
        self._put = self._taken
        if isinstance(self._states, SavedClientStates):
            return self._states.freeze()
        return None

    def put_back(self, num_rounds: int) -> None:
        """Put what clients had after some rounds, if one more round was put."""
        put = self._put
        if self._states is not None and put.round_index >= num_rounds:
            self._states.put(put.cohort, put.values)

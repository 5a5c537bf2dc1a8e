"""Values that clients keep between rounds, in memory up to a bound and then in a file.

    take(ids) --> values of a cohort --> process.next --> put(ids, values)

A client's value is a row of bytes of fixed size. When a run is saved, each checkpoint
writes the changed rows as one archive of `program.checkpoint_store`. The checkpoint
names all archives that have current rows. If several have a client's row, the latest
archive counts.

    clients/7.zip, clients/9.zip    named by round_12.zip, or by all_1.zip of `save`
"""

# pyright: reportPrivateUsage=false

import concurrent.futures
import functools
import hashlib
import logging
import os
import tempfile
import weakref
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import IO, Any, Self

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.data import NamedClients
from ray_fed.data.arguments import expect_ids, read_ids
from ray_fed.files.opening import expand_home
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.checks import expect_kind
from ray_fed.program.checkpoint_store import Versions, telling_storage

_logger = logging.getLogger("ray_fed.learning.run_loop")

ClientId = str | int
Rows = Mapping[ClientId, bytes]


class _SpillFile:
    """Rows of clients in a nameless file, which ends with this process.

    The first row makes the folder. Each row has `row_bytes`.
    """

    def __init__(self, folder: str, row_bytes: int) -> None:
        self._folder, self._row_bytes = folder, row_bytes
        self._file: IO[bytes] | None = None
        self._checks: dict[ClientId, tuple[int, int]] = {}  # place and CRC-32

    @property
    def clients(self) -> Iterable[ClientId]:
        """Clients that have a row."""
        return self._checks

    def write(self, rows: Rows) -> None:
        """Write rows, each over the former row of its client, or raise StorageError."""
        with telling_storage(self._folder, OSError, verb="write client states in"):
            if self._file is None:
                os.makedirs(self._folder, exist_ok=True)  # noqa: PTH103
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            for client, row in rows.items():
                place, _ = self._checks.get(client, (len(self._checks), 0))
                self._file.seek(place * self._row_bytes)
                self._file.write(row)
                self._checks[client] = place, zlib.crc32(row)
            self._file.flush()

    def read(self, client: ClientId) -> bytes | None:
        """Return the row of a client, or None.

        Raises StorageError if it cannot be read, and SavedStateError if it is damaged.
        """
        if client not in self._checks or self._file is None:
            return None
        place, check = self._checks[client]
        with telling_storage(self._folder, OSError, verb="read client states in"):
            self._file.seek(place * self._row_bytes)
            row = self._file.read(self._row_bytes)
        if zlib.crc32(row) != check:
            raise errors.SavedStateError(
                f"Expected the value of the client `{client}` as it was written in"
                f" `{self._folder}`, found damage: see to its disk."
            )
        return row

    def close(self) -> None:
        self._checks.clear()
        if self._file is not None:
            self._file.close()


_WASTED_SHARE = 0.5
"""Of the rows of archives that may be old before the others are written anew."""

_MOST_ARCHIVES = 256
"""With rows that count: the smaller half of more than these is written anew."""

_ARCHIVE_BYTES = 2**24
"""Of the rows of an archive: of what is written, or written anew, at a time."""

_PIECE_BYTES = 2**20
"""Of an array of rows. With larger ones the C library keeps some 30 MB for each of the
threads that save (a driver grew by 431 MB, `benchmarks.states`, 2026-11-28)."""


class ClientArchives:
    """Saved rows of clients: one archive for each save, with the rows that changed.

    The first archive makes the folder, on any file system of fsspec.
    """

    def __init__(self, folder: str, row_bytes: int) -> None:
        self._versions, self._row_bytes = Versions(folder, ""), row_bytes
        self._latest: dict[ClientId, int] = {}
        self._sizes: dict[int, int] = {}
        self._num_live: Counter[int] = Counter()
        self._next = 0

    def begin(self) -> None:
        """Number new archives after the existing ones."""
        self._next = max(self._versions.find(), default=-1) + 1

    def load(self, numbers: Sequence[int]) -> Iterator[Rows]:
        """Yield the rows of archives, older ones first; then write others after them.

        Raises StorageError, or SavedStateError for a damaged or missing archive.
        """
        self.begin()
        for number in numbers:
            rows = self._read(number)
            self._note(number, rows)
            yield rows

    def save(self, changed: Rows) -> list[int]:
        """Write rows, and return the numbers of the archives that now have all rows."""
        self._write(changed)
        live = list(self._num_live)
        num_rows = sum(self._sizes[number] for number in live)
        num_old = num_rows - len(self._latest)
        if num_old > max(len(changed), _WASTED_SHARE * num_rows):
            self._write_anew(
                [n for n in live if self._num_live[n] < _WASTED_SHARE * self._sizes[n]]
            )
        elif len(live) > _MOST_ARCHIVES:
            fewest_first = sorted(live, key=lambda number: self._num_live[number])
            self._write_anew(fewest_first[: len(live) // 2])
        return sorted(self._num_live)

    def collect(self, keep: AbstractSet[int]) -> None:
        """Remove archives without a row that counts, but for those to keep."""
        old = {*self._versions.find()} - self._num_live.keys() - keep
        if old:
            self._versions.remove(old)

    def _write_anew(self, numbers: Sequence[int]) -> None:
        """Write the latest rows of some archives to new archives."""
        rows: dict[ClientId, bytes] = {}
        for number in numbers:
            found = self._read(number).items()
            rows |= {c: row for c, row in found if self._latest[c] == number}
            if len(rows) * self._row_bytes >= _ARCHIVE_BYTES:
                self._write(rows)
                rows = {}
        self._write(rows)

    def _write(self, rows: Rows) -> None:
        most, piece = (
            max(1, size // max(1, self._row_bytes))
            for size in (_ARCHIVE_BYTES, _PIECE_BYTES)
        )
        for clients in _chunks(list(rows), most):
            values = {
                "clients": list(clients),
                "rows": [
                    np.frombuffer(b"".join(rows[c] for c in chosen), np.uint8)
                    for chosen in _chunks(clients, piece)
                ],
            }
            self._versions.write(self._next, values)
            self._note(self._next, clients)
            self._next += 1

    def _note(self, number: int, clients: Iterable[ClientId]) -> None:
        """Count the rows of an archive as the latest ones of their clients."""
        for client in clients:
            former = self._latest.get(client)
            if former is not None:
                self._num_live[former] -= 1
                if not self._num_live[former]:
                    del self._num_live[former]
            self._latest[client] = number
            self._num_live[number] += 1
        self._sizes[number] = self._num_live[number]

    def _read(self, number: int) -> Rows:
        where = self._versions.where(number)
        try:
            values = self._versions.read(number)
        except errors.StorageError:
            raise
        except FileNotFoundError as error:
            raise errors.SavedStateError(
                f"Expected values that clients keep in `{where}`, found no such file."
            ) from error
        size, clients = self._row_bytes, values["clients"]
        if not size:
            return dict.fromkeys(clients, b"")
        rows = [
            content[start : start + size].tobytes()
            for content in values["rows"]
            for start in range(0, len(content), size)
        ]
        if len(rows) != len(clients) or any(len(row) != size for row in rows):
            raise errors.SavedStateError(
                f"Expected values of {size} bytes for {len(clients)} clients in"
                f" `{where}`, found others: pass another `storage_path`."
            )
        return dict(zip(clients, rows, strict=True))


def _chunks(clients: Sequence[ClientId], size: int) -> Iterator[Sequence[ClientId]]:
    for start in range(0, len(clients), size):
        yield clients[start : start + size]


_AT_ONCE = 1000
"""Clients whose values are copied at a time."""

_ALL = "all_"
"""Begins the name of what says which archives `ClientStates.save` wrote."""


class ClientStates:
    """Values of clients by id: NumPy arrays in the same structure for all clients.

    It is not safe for several threads at once. The results do not depend on the bound
    of memory.

    Args:
        initial: The value of a client before its first `put`, such as
            `process.initial_client_state`.
        path: A folder of this machine for values beyond `memory_bytes`. They are in an
            unnamed file there, which disappears with this object or the process. None:
            all values stay in memory.
        memory_bytes: The bound of the values in memory, at least the size of a cohort's
            values. Python's objects take about 300 bytes more for each client.

    Attributes:
        max_memory_bytes: The value of `memory_bytes`.

    Raises:
        ConfigError: `memory_bytes` is too small for one value, or `path` is a URI.
    """

    def __init__(
        self, initial: Any, path: str | None = None, *, memory_bytes: int = 2**28
    ) -> None:
        self._initial = tf.nest.map_structure(_lock, initial)
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
        if path is not None and "://" in path:
            raise errors.ConfigError(
                f"Expected a folder of this machine as `path`, found `{path}`: values"
                " that memory has no room for are read in every round."
            )
        self._ids: Sequence[Any] | None = None
        self._places: dict[Any, int] = {}
        self._rows: OrderedDict[ClientId, bytes] = OrderedDict()
        self._spilled = (
            None if path is None else _SpillFile(expand_home(path), self._row_bytes)
        )

    @override
    def __repr__(self) -> str:
        return f"<states of {len(self)} clients, {self.memory_bytes} bytes in memory>"

    def __len__(self) -> int:
        """Return the number of clients with a value."""
        return len(self.ids)

    @property
    def ids(self) -> list[ClientId]:
        """The ids of the clients with a value, in no particular order."""
        spilled = () if self._spilled is None else self._spilled.clients
        keys: list[Any] = list(dict.fromkeys([*self._rows, *spilled]))
        return self._ids_of(keys)

    @property
    def memory_bytes(self) -> int:
        """The current size of the values in memory."""
        return len(self._rows) * self._row_bytes

    @tracebacks.shorten
    def take(self, client_ids: Iterable[ClientId]) -> NamedClients:
        """Return the values of clients, in the order of the given ids.

        The result is a list that knows these ids. A computation that takes it together
        with `ClientData` refuses other clients, or another order.

        Args:
            client_ids: The ids of clients. A client without a value has the initial
                one. The client states of a run have the ids of its `data`, or indices
                if its clients have no ids. An integer that is not an id in `data` is
                read as an index, with a warning.

        Raises:
            ConfigError: The run had no client of this id, or an id is a bool or a
                float although the clients have other ids.
            StorageError: Values in the file cannot be read.
            SavedStateError: Values in the file are damaged.
        """
        keys = self._keys_of(list(client_ids))
        return NamedClients(self._take_keys(keys), self._ids_of(keys))

    def _take_keys(self, keys: Iterable[ClientId]) -> list[Any]:
        """Return the values of clients by their keys. In a run, keys are indices."""
        rows = map(self._find, keys)
        return [self._initial if row is None else self._unpack(row) for row in rows]

    def _limit_to(self, ids: Sequence[Any]) -> None:
        """Store values by index in a run's data, and accept only its clients.

        `ids` has each client's id, or its index without an id. Raises ConfigError if a
        client occurs twice.
        """
        self._ids = ids
        self._places = {client: index for index, client in enumerate(ids)}
        if len(self._places) < len(ids):
            twice = next(c for index, c in enumerate(ids) if self._places[c] != index)
            raise errors.ConfigError(
                "Expected each client once in `data`, as clients of this process keep"
                f" values between rounds, found the id {errors.describe(twice)} twice."
            )

    def _ids_of(self, keys: Iterable[ClientId]) -> list[Any]:
        return list(keys) if self._ids is None else [self._ids[int(k)] for k in keys]

    def _keys_of(self, client_ids: Sequence[Any]) -> list[Any]:
        """Return the keys of clients. An id takes precedence over an index."""
        expect_ids(client_ids, self._places)
        if self._ids is None:
            return read_ids(client_ids)
        found: list[int] = []
        for client in client_ids:
            key = self._places.get(client) if isinstance(client, Hashable) else None
            if key is None and isinstance(client, int | np.integer):
                key = int(client) if 0 <= client < len(self._ids) else None
                if key is not None:
                    _logger.warning(
                        "No client has the id %s: it is read as an index in `data` of"
                        " the run, of the client %r. Pass the client's id.",
                        client,
                        self._ids[key],
                    )
            if key is None:
                raise errors.ConfigError(
                    f"Expected the id of one of the {len(self._ids)} clients in `data`"
                    f" of the run, found {errors.describe(client)}."
                    f"{errors.suggest(client, self._ids)}"
                )
            found.append(key)
        return found

    def _find(self, client: ClientId) -> bytes | None:
        if client in self._rows:
            self._rows.move_to_end(client)
            return self._rows[client]
        return None if self._spilled is None else self._spilled.read(client)

    def put(self, client_ids: Sequence[ClientId], values: Sequence[Any]) -> None:
        """Store new values of clients.

        Args:
            client_ids: The ids of the clients, each once; see `take`.
            values: One value for each client, in the structure, dtypes and shapes of
                the initial value.

        Raises:
            ConfigError: As for `take`.
            ValueMismatchError: A value has another structure or type, or an id comes
                twice.
            CardinalityError: The number of values differs.
            StorageError: Values beyond the bound of memory cannot be written.
        """
        if len(client_ids) != len(values):
            raise errors.CardinalityError(
                f"Expected a value for each of {len(client_ids)} clients, found"
                f" {len(values)}."
            )
        keys = self._keys_of(client_ids)
        if len(set(keys)) != len(keys):
            raise errors.ValueMismatchError(
                "Expected each client once, found an id that comes twice: one of its"
                " values would be lost."
            )
        self._put_keys(keys, values)

    def _put_keys(self, keys: Sequence[ClientId], values: Sequence[Any]) -> None:
        """Store new values of clients by their keys; see `_take_keys`."""
        rows = [self._pack(value) for value in values]  # all are checked first
        self._put_rows(dict(zip(keys, rows, strict=True)))

    def _put_rows(self, rows: Rows) -> None:
        """Store rows of bytes. The oldest rows are moved from memory to the file."""
        for client, row in rows.items():
            self._rows[client] = row
            self._rows.move_to_end(client)
        if self._spilled is not None and len(self._rows) > self._max_rows:
            oldest = list(self._rows)[: len(self._rows) - self._max_rows]
            self._spilled.write({client: self._rows[client] for client in oldest})
            for client in oldest:
                del self._rows[client]

    def _emptied(self, initial: Any) -> "ClientStates":
        """Return client states without values, with the same bound.

        Raises ValueMismatchError if `initial` has another structure, dtype or shape.
        """
        self._pack(initial)
        return ClientStates(initial, self._path, memory_bytes=self.max_memory_bytes)

    def _fill_from(self, other: "ClientStates") -> None:
        for ids in _chunks(other.ids, _AT_ONCE):
            self.put(ids, other.take(ids))

    def save(self, folder: str) -> None:
        """Write all values to a folder, and replace earlier saved values.

        Until all values are written, `load` returns the earlier ones.

        Args:
            folder: A folder for these values alone, on any file system of fsspec.

        Raises:
            StorageError: The values cannot be written.
        """
        archives = ClientArchives(folder, self._row_bytes)
        archives.begin()
        index = Versions(folder, _ALL)
        former = index.find()
        numbers: list[int] = []
        for ids in _chunks(self.ids, max(1, _ARCHIVE_BYTES // max(1, self._row_bytes))):
            found = zip(ids, map(self._find, self._keys_of(ids)), strict=True)
            rows = {client: row for client, row in found if row is not None}
            numbers = archives.save(rows)
        described = {"archives": numbers, "arrays": self._described}
        index.write(max(former, default=0) + 1, described)
        index.remove(former)
        archives.collect(frozenset())

    @staticmethod
    def load(
        folder: str,
        initial: Any,
        path: str | None = None,
        *,
        memory_bytes: int = 2**28,
    ) -> "ClientStates":
        """Return the values that `save` wrote.

        Args:
            folder: The folder of `save`.
            initial: The initial value, as for the class, with the saved structure.
            path: As for the class.
            memory_bytes: As for the class.

        Raises:
            StorageError: The values cannot be read.
            SavedStateError: The values are missing or damaged, or have another
                structure.
        """
        states = ClientStates(initial, path, memory_bytes=memory_bytes)
        saved, _ = Versions(folder, _ALL).read_latest()
        if saved is None or saved["arrays"] != states._described:
            found = "none" if saved is None else f"arrays {saved['arrays']}"
            raise errors.SavedStateError(
                f"Expected values of clients in `{folder}`, of arrays"
                f" {states._described}, found {found}: pass the folder and the initial"
                " value of `save`."
            )
        for rows in ClientArchives(folder, states._row_bytes).load(saved["archives"]):
            states._put_rows(rows)
        return states

    @property
    def _described(self) -> list[Any]:
        return [[dtype.str, list(shape)] for dtype, shape in self._types]

    def close(self) -> None:
        """Remove the file of values beyond the bound of memory."""
        if self._spilled is not None:
            self._spilled.close()

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


def _lock(value: Any) -> NDArray[Any]:
    """Return a value as a read-only array of its own."""
    array = np.array(value)
    array.flags.writeable = False
    return array


def _build_nest(initial: Any) -> Callable[[list[NDArray[Any]]], Any]:
    """Return a function that packs arrays into the structure of a value."""
    if type(initial) in (list, tuple) and not any(map(tf.nest.is_nested, initial)):
        return type(initial)  # takes a fiftieth of the time
    return functools.partial(tf.nest.pack_sequence_as, initial)


class SavedClientStates(ClientStates):
    """Values of clients that are saved from time to time.

    It begins empty.

    For `initial` and `memory_bytes` see `ClientStates`.
    """

    def __init__(self, initial: Any, storage_path: str, *, memory_bytes: int) -> None:
        place = storage_path.removeprefix("file://").removeprefix("local://")
        # Rounds read these values, and an object store would be slow.
        spilled = tempfile.gettempdir() if "://" in place else place
        super().__init__(initial, spilled, memory_bytes=memory_bytes)
        self._archives = ClientArchives(f"{storage_path}/clients", self._row_bytes)
        self._changed: dict[ClientId, bytes] = {}
        self._unsaved: dict[ClientId, bytes] = {}

    @override
    def _put_rows(self, rows: Rows) -> None:
        super()._put_rows(rows)
        self._changed |= rows

    @override
    def _fill_from(self, other: ClientStates) -> None:
        for ids in _chunks(other.ids, _AT_ONCE):
            self.put(ids, other.take(ids))
            self._archives.save(self.take_changed())

    def read_archives(self, numbers: Sequence[int]) -> None:
        """Put the values of a saved run.

        `numbers` are its archives, as `write_archives` returned them.
        """
        for rows in self._archives.load(numbers):
            super()._put_rows(rows)

    def take_changed(self) -> dict[ClientId, bytes]:
        """Return the rows that were put since the last call."""
        changed, self._changed = self._changed, {}
        return changed

    def is_large(self, changed: Rows) -> bool:
        """Return whether rows that are to be saved take as much memory as all may."""
        return len(changed) >= self._max_rows

    def add_unsaved(self, changed: Rows) -> None:
        """Have the next `write_archives` write rows that a failed save did not."""
        self._unsaved |= changed

    def write_archives(self) -> list[int]:
        """Write the rows since the last save. Return the archives of all rows."""
        numbers = self._archives.save(self._unsaved)
        self._unsaved = {}
        return numbers

    def collect(self, keep: AbstractSet[int]) -> None:
        """Remove archives that neither these values nor saved states need."""
        self._archives.collect(keep)


_MAX_NAMED = 10


def check_client_states(given: Any, initial: Any, ids: Sequence[Any]) -> None:
    """Raise ValueMismatchError unless a run can begin with values of clients.

    The values must belong to this process, and all their clients to the `ids` of the
    run.
    """
    expect_kind("client_states", given, ClientStates)
    try:
        given._emptied(initial)
    except errors.ValueMismatchError as error:
        cause = str(error).rstrip(".")
        raise errors.ValueMismatchError(
            "Expected `client_states` of a run of this process, found those of another"
            f" one ({cause}): pass those of a result of this one."
        ) from error
    known = frozenset(ids)
    unknown = [each for each in given.ids if each not in known]
    if unknown:
        shown = ", ".join(map(errors.describe, unknown[:_MAX_NAMED]))
        others = f" and {len(unknown) - _MAX_NAMED} others" * (
            len(unknown) > _MAX_NAMED
        )
        raise errors.ValueMismatchError(
            f"Expected `client_states` of clients in `data`, found values of {shown}"
            f"{others}: pass those of a run of these clients."
            f"{errors.suggest(unknown[0], ids)}"
        )


def digest_client_states(states: ClientStates) -> str:
    """Return a digest of all values and their ids, the same for equal ones."""
    digest = hashlib.sha256()
    for name, client in sorted((repr(client), client) for client in states.ids):
        (key,) = states._keys_of([client])
        check = zlib.crc32(states._find(key) or b"")
        digest.update(f"{name} {check}\n".encode())
    return digest.hexdigest()


class RunClients:
    """Takes and puts the values of one round after another.

    `states` holds the values, or is None if clients keep nothing.
    """

    def __init__(self, states: ClientStates | None) -> None:
        self._states = states
        # For the rounds that took and put last: index, clients, and their earlier
        # values.
        self._taken: tuple[int, Sequence[int], Sequence[Any]] = -1, (), ()
        self._put = self._taken

    def take(self, round_index: int, cohort: Sequence[int]) -> list[list[Any]]:
        """Return the arguments of `next` for a round before the data: the kept values.

        The list is empty if clients keep nothing.
        """
        if self._states is None:
            return []
        values = self._states._take_keys(cohort)
        self._taken = round_index, cohort, values
        return [values]

    def put(self, kept: "concurrent.futures.Future[Any] | None") -> Rows:
        """Put the values that the last taken round returned for its clients.

        Return the changed rows to be saved, or nothing if the run is not saved.
        """
        if self._states is None or kept is None:
            return {}
        _, cohort, _ = self._taken
        self._states._put_keys(cohort, kept.result())
        self._put = self._taken
        if isinstance(self._states, SavedClientStates):
            return self._states.take_changed()
        return {}

    def is_large(self, changed: Rows) -> bool:
        """Return whether changes are large enough to be saved before a save is due."""
        states = self._states
        return isinstance(states, SavedClientStates) and states.is_large(changed)

    def put_back(self, num_rounds: int) -> None:
        """Put back the values after some rounds, if one more round was put."""
        round_index, cohort, values = self._put
        if self._states is not None and round_index >= num_rounds:
            self._states._put_keys(cohort, values)

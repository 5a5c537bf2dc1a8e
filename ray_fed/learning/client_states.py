"""Values that clients keep between rounds, in memory up to a bound and then in a file.

    take(ids) --> values of a cohort --> process.next --> put(ids, values)

A client's value is stored as one row of bytes, and all rows have the same size. Each
checkpoint of a run writes the rows that changed as one archive, a file of
`program.checkpoint_store`. The checkpoint names all archives that have current rows. If
several archives have a row of one client, the row in the latest archive is current.

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
    """Values of clients, as rows of bytes, in an unnamed file of this process.

    The first write creates the folder. Each row has `row_bytes` bytes.
    """

    def __init__(self, folder: str, row_bytes: int) -> None:
        self._folder, self._row_bytes = folder, row_bytes
        self._file: IO[bytes] | None = None
        self._checks: dict[ClientId, tuple[int, int]] = {}  # place and CRC-32

    @property
    def clients(self) -> Iterable[ClientId]:
        return self._checks

    def write(self, rows: Rows) -> None:
        """Write rows by client, over the clients' old rows, or raise StorageError."""
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
        """Return the row of a client, or None if it has no row.

        Raises StorageError if the file cannot be read, and SavedStateError if the row
        is damaged.
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
                f" `{self._folder}`, found damage: check the disk, or pass another"
                " folder."
            )
        return row

    def close(self) -> None:
        self._checks.clear()
        if self._file is not None:
            self._file.close()


_WASTED_SHARE = 0.5
"""Share of outdated rows above which rows are copied to new archives."""

_MOST_ARCHIVES = 256
"""Number of archives above which the half with the fewest rows is merged."""

_ARCHIVE_BYTES = 2**24
"""Largest size of the rows in one archive."""

_PIECE_BYTES = 2**20
"""Largest size of one array of rows in an archive. With larger arrays the C library
keeps some 30 MB for each thread that saves (a driver grew by 431 MB,
`benchmarks.states`, 2026-11-28)."""


class ClientArchives:
    """Saved values of clients, as rows of bytes. Each save writes the changed rows.

    The rows of one save are an archive. The first archive creates the folder, on any
    file system of fsspec.
    """

    def __init__(self, folder: str, row_bytes: int) -> None:
        self._versions, self._row_bytes = Versions(folder, ""), row_bytes
        self._latest: dict[ClientId, int] = {}
        self._sizes: dict[int, int] = {}
        self._num_live: Counter[int] = Counter()
        self._next = 0

    def begin(self) -> None:
        """Number new archives after the archives that exist in the folder."""
        self._next = max(self._versions.find(), default=-1) + 1

    def load(self, numbers: Sequence[int]) -> Iterator[Rows]:
        """Yield the values in archives, as bytes by client, older archives first.

        `numbers` are the archives that a checkpoint names. Later saves write new
        archives. Raises StorageError, or SavedStateError if an archive is damaged or
        missing.
        """
        self.begin()
        for number in numbers:
            rows = self._read(number)
            self._note(number, rows)
            yield rows

    def save(self, changed: Rows) -> list[int]:
        """Write changed values. Return the numbers of all archives to load later."""
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
        """Remove archives without current values, except the archives in `keep`."""
        old = {*self._versions.find()} - self._num_live.keys() - keep
        if old:
            self._versions.remove(old)

    def _write_anew(self, numbers: Sequence[int]) -> None:
        """Copy the current rows of some archives to new archives."""
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
        """Record that the current rows of `clients` are in the archive `number`."""
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
                f" `{where}`, found other sizes: pass another `storage_path`."
            )
        return dict(zip(clients, rows, strict=True))


def _chunks(clients: Sequence[ClientId], size: int) -> Iterator[Sequence[ClientId]]:
    for start in range(0, len(clients), size):
        yield clients[start : start + size]


_AT_ONCE = 1000
"""Number of clients whose values are copied at a time."""

_ALL = "all_"
"""Prefix of the files that name the archives of `ClientStates.save`."""


class ClientStates:
    """Values that clients keep between rounds, by client id.

    Each value is a structure of NumPy arrays, and all clients have the same structure.
    The store is not safe for several threads at once. Results do not depend on the
    bound of memory.

    Args:
        initial: Value of a client before its first `put`, such as
            `process.initial_client_state`.
        path: Local folder for the values beyond `memory_bytes`. An unnamed file there
            has them and disappears with this object or the process. None: all values
            stay in memory.
        memory_bytes: Bound of the values in memory, at least the size of a cohort's
            values. Python's objects take about 300 bytes more for each client.

    Attributes:
        max_memory_bytes: Bound of the values in memory, as passed.

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
                f"Expected a folder of this machine as `path`, found `{path}`: rounds"
                " read the values that exceed `memory_bytes` from there."
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
        """Ids of the clients that have a value, in no particular order."""
        spilled = () if self._spilled is None else self._spilled.clients
        keys: list[Any] = list(dict.fromkeys([*self._rows, *spilled]))
        return self._ids_of(keys)

    @property
    def memory_bytes(self) -> int:
        """Current size of the values in memory."""
        return len(self._rows) * self._row_bytes

    @tracebacks.shorten
    def take(self, client_ids: Iterable[ClientId]) -> NamedClients:
        """Return the values of clients, in the order of `client_ids`.

        The result is a list that knows the ids of its clients. A computation that
        receives it together with `ClientData` refuses other clients, or another order.

        Args:
            client_ids: Ids of clients. A client without a value has the initial value.
                In the client states of a run, these are the ids of the run's `data`, or
                indices if its clients have no ids. An integer that is not an id in
                `data` is read as an index, with a warning.

        Raises:
            ConfigError: The run had no client of this id, or an id is a bool or a float
                although the clients have other ids.
            StorageError: Values in the file cannot be read.
            SavedStateError: Values in the file are damaged.
        """
        keys = self._keys_of(list(client_ids))
        return NamedClients(self._take_keys(keys), self._ids_of(keys))

    def _take_keys(self, keys: Iterable[ClientId]) -> list[Any]:
        """Return the values of clients by keys, which are ids, or indices in a run."""
        rows = map(self._find, keys)
        return [self._initial if row is None else self._unpack(row) for row in rows]

    def _limit_to(self, ids: Sequence[Any]) -> None:
        """Accept only the clients of a run, and store values by index in its data.

        `ids` has the id of each client, or its index if it has no id. Raises
        ConfigError if an id occurs twice.
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
        """Return the keys of clients. An id takes precedence over an equal index."""
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
            client_ids: Ids of the clients, each once, as for `take`.
            values: One value for each client, with the structure, dtypes and shapes of
                the initial value.

        Raises:
            ConfigError: An id is unknown, as for `take`.
            ValueMismatchError: A value has another structure or type, or an id comes
                twice.
            CardinalityError: The numbers of ids and values differ.
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
        rows = [self._pack(value) for value in values]  # checks all before any is put
        self._put_rows(dict(zip(keys, rows, strict=True)))

    def _put_rows(self, rows: Rows) -> None:
        """Store rows of bytes, and move rows that exceed the bound to the file."""
        for client, row in rows.items():
            self._rows[client] = row
            self._rows.move_to_end(client)
        if self._spilled is not None and len(self._rows) > self._max_rows:
            oldest = list(self._rows)[: len(self._rows) - self._max_rows]
            self._spilled.write({client: self._rows[client] for client in oldest})
            for client in oldest:
                del self._rows[client]

    def _emptied(self, initial: Any) -> "ClientStates":
        """Return an empty store with the same bound.

        Raises ValueMismatchError if `initial` has another structure, dtype or shape.
        """
        self._pack(initial)
        return ClientStates(initial, self._path, memory_bytes=self.max_memory_bytes)

    def _fill_from(self, other: "ClientStates") -> None:
        for ids in _chunks(other.ids, _AT_ONCE):
            self.put(ids, other.take(ids))

    def save(self, folder: str) -> None:
        """Write all values to a folder, where they replace earlier saved values.

        Until all values are written, `load` returns the earlier values.

        Args:
            folder: Folder for these values alone, on any file system of fsspec.

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
        """Return a new store with the values that `save` wrote.

        Args:
            folder: Folder that was passed to `save`.
            initial: Initial value, as for the class, with the saved structure.
            path: Local folder for values beyond the bound, as for the class.
            memory_bytes: Bound of the values in memory, as for the class.

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
    array = np.array(value)
    array.flags.writeable = False
    return array


def _build_nest(initial: Any) -> Callable[[list[NDArray[Any]]], Any]:
    if type(initial) in (list, tuple) and not any(map(tf.nest.is_nested, initial)):
        return type(initial)  # 50 times as fast as pack_sequence_as
    return functools.partial(tf.nest.pack_sequence_as, initial)


class SavedClientStates(ClientStates):
    """Values that clients keep in a run that is saved at `storage_path`.

    The store is empty at first. `initial` and `memory_bytes` are as for `ClientStates`.
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
        """Read the values of a saved run from the archives with these numbers."""
        for rows in self._archives.load(numbers):
            super()._put_rows(rows)

    def take_changed(self) -> dict[ClientId, bytes]:
        """Return the values that were put since the last call, as bytes by client."""
        changed, self._changed = self._changed, {}
        return changed

    def is_large(self, changed: Rows) -> bool:
        """Return whether unsaved values reach the bound of memory for all values."""
        return len(changed) >= self._max_rows

    def add_unsaved(self, changed: Rows) -> None:
        """Add changed values to the values that the next `write_archives` writes."""
        self._unsaved |= changed

    def write_archives(self) -> list[int]:
        """Write unsaved values. Return the numbers of all archives to load later."""
        numbers = self._archives.save(self._unsaved)
        self._unsaved = {}
        return numbers

    def collect(self, keep: AbstractSet[int]) -> None:
        """Remove archives without current values, except the archives in `keep`."""
        self._archives.collect(keep)


_MAX_NAMED = 10


def check_client_states(given: Any, initial: Any, ids: Sequence[Any]) -> None:
    """Raise ValueMismatchError unless a run can begin with the client states `given`.

    The states must have the structure of `initial`, and only clients of the run, whose
    ids are `ids`.
    """
    expect_kind("client_states", given, ClientStates)
    try:
        given._emptied(initial)
    except errors.ValueMismatchError as error:
        cause = str(error).rstrip(".")
        raise errors.ValueMismatchError(
            "Expected `client_states` of a run of this process, found states of another"
            f" process ({cause}): pass the `client_states` of a result of this process."
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
            f"{others}: pass the `client_states` of a run of these clients."
            f"{errors.suggest(unknown[0], ids)}"
        )


def digest_client_states(states: ClientStates) -> str:
    """Return a digest of all ids and values. Equal states have equal digests."""
    digest = hashlib.sha256()
    for name, client in sorted((repr(client), client) for client in states.ids):
        (key,) = states._keys_of([client])
        check = zlib.crc32(states._find(key) or b"")
        digest.update(f"{name} {check}\n".encode())
    return digest.hexdigest()


class RunClients:
    """Reads and stores the values that clients keep, for one round after another.

    `states` has the values, or is None if clients keep nothing.
    """

    def __init__(self, states: ClientStates | None) -> None:
        self._states = states
        # For the last take and the last put: round, clients and their earlier values.
        self._taken: tuple[int, Sequence[int], Sequence[Any]] = -1, (), ()
        self._put = self._taken

    def take(self, round_index: int, cohort: Sequence[int]) -> list[list[Any]]:
        """Return the values of a cohort, as the arguments of `next` before the data.

        The list has one argument, or none if clients keep nothing.
        """
        if self._states is None:
            return []
        values = self._states._take_keys(cohort)
        self._taken = round_index, cohort, values
        return [values]

    def put(self, kept: "concurrent.futures.Future[Any] | None") -> Rows:
        """Store the values that a round returned for the clients of the last `take`.

        Return the changed values, as bytes by client, or {} if the run is not saved.
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
        """Return whether changes are too large to wait until a save is due."""
        states = self._states
        return isinstance(states, SavedClientStates) and states.is_large(changed)

    def put_back(self, num_rounds: int) -> None:
        """Restore the values after `num_rounds` rounds, if one more round was put."""
        round_index, cohort, values = self._put
        if self._states is not None and round_index >= num_rounds:
            self._states._put_keys(cohort, values)

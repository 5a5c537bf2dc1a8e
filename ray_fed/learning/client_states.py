"""What belongs to clients over rounds: in memory up to a bound, the rest in a file.

    take(ids) --> values of a cohort --> process.next --> put(ids, values)

A client's value is a row of bytes of one size. Where a run is saved, each checkpoint
writes the rows that changed as one archive of `program.checkpoint_store`, and names all
archives with rows that count: of several with a client's row, the one written last.

    clients/7.zip, clients/9.zip    what round_12.zip names, or all_1.zip of `save`
"""

import concurrent.futures
import functools
import os
import tempfile
import weakref
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import IO, Any, Self

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.files.opening import expand_home
from ray_fed.learning.checks import read_whole
from ray_fed.program.checkpoint_store import Versions, telling_storage

ClientId = str | int
Rows = Mapping[ClientId, bytes]


class _SpillFile:
    """Rows of clients in a file without a name, which ends with this process.

    Args:
        folder: of this machine, made for the first row.
        row_bytes: of each row.
    """

    def __init__(self, folder: str, row_bytes: int) -> None:
        self._folder, self._row_bytes = folder, row_bytes
        self._file: IO[bytes] | None = None
        self._checks: dict[ClientId, tuple[int, int]] = {}  # place and CRC-32

    @property
    def clients(self) -> Iterable[ClientId]:
        """All that have a row."""
        return self._checks

    def write(self, rows: Rows) -> None:
        """Write rows, each over the former one of its client.

        Raises:
            StorageError: they cannot be written.
        """
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
        """Return the row of a client, if there is one.

        Raises:
            StorageError: it cannot be read.
            SavedStateError: it is damaged.
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
        """Remove all rows."""
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
    """Rows of clients as they were saved: archives of those that changed.

    Args:
        folder: of any file system that fsspec knows; made by the first archive.
        row_bytes: of each row.
    """

    def __init__(self, folder: str, row_bytes: int) -> None:
        self._versions, self._row_bytes = Versions(folder, ""), row_bytes
        self._latest: dict[ClientId, int] = {}
        self._sizes: dict[int, int] = {}
        self._num_live: Counter[int] = Counter()
        self._next = 0

    def begin(self) -> None:
        """Let archives that are written come after those that are there.

        Raises:
            StorageError: the folder cannot be listed.
        """
        self._next = max(self._versions.find(), default=-1) + 1

    def load(self, numbers: Sequence[int]) -> Iterator[Rows]:
        """Yield the rows of archives, older ones first; then write others after them.

        Raises:
            StorageError: one cannot be read.
            SavedStateError: one is damaged, or is not there.
        """
        self.begin()
        for number in numbers:
            rows = self._read(number)
            self._note(number, rows)
            yield rows

    def save(self, changed: Rows) -> list[int]:
        """Write rows, and return the archives that have all rows now.

        Raises:
            StorageError: they cannot be written.
        """
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
        """Write the rows of archives that count to new ones."""
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
    """Values of clients by id: numpy arrays in one structure for all of them.

    Not safe for several threads at once. Equal calls leave equal values, however much
    is in memory.

    Args:
        initial: of a client that has put none, such as
            `process.initial_client_state`.
        path: a folder of this machine for what does not fit: a file there without a
            name, which ends with these values or the process. None: all stays in
            memory.
        memory_bytes: of values in memory, >= those of a cohort; Python's own objects
            come on top, about 300 bytes for each client.

    Attributes:
        max_memory_bytes: `memory_bytes`.

    Raises:
        ConfigError: `memory_bytes` is too small for a value, or `path` is of another
            machine.
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
        if path is not None and "://" in path:
            raise errors.ConfigError(
                f"Expected a folder of this machine as `path`, found `{path}`: values"
                " that memory has no room for are read in every round."
            )
        self._places: dict[Any, int] | None = None
        self._rows: OrderedDict[ClientId, bytes] = OrderedDict()
        self._spilled = (
            None if path is None else _SpillFile(expand_home(path), self._row_bytes)
        )

    @override
    def __repr__(self) -> str:
        return f"<states of {len(self)} clients, {self.memory_bytes} bytes in memory>"

    def __len__(self) -> int:
        """Return how many clients have put a value."""
        return len(self.ids)

    @property
    def ids(self) -> list[ClientId]:
        """The clients that have put a value, in no order that can be relied on."""
        spilled = () if self._spilled is None else self._spilled.clients
        return list(dict.fromkeys([*self._rows, *spilled]))

    @property
    def memory_bytes(self) -> int:
        """The bytes of values that are in memory now."""
        return len(self._rows) * self._row_bytes

    @tracebacks.shorten
    def take(self, client_ids: Iterable[ClientId]) -> list[Any]:
        """Return the values of clients, in the order of their ids.

        Args:
            client_ids: any; a client that put no value, such as one whose id is new,
                has the initial value. `ids` says who put one. In those of a run:
                indices in its `data`, or ids of clients there that are no numbers.

        Raises:
            ConfigError: a run had no such client.
            StorageError: values in the file cannot be read.
            SavedStateError: these are damaged.
        """
        rows = [self._find(self._place(client)) for client in client_ids]
        return [self._initial if row is None else self._unpack(row) for row in rows]

    def limit_to(self, clients: Sequence[Any]) -> None:
        """Have values of some clients alone, by index, or by id where that is text."""
        self._places = {client: index for index, client in enumerate(clients)}

    def _place(self, client: Any) -> ClientId:
        places = self._places
        if places is None:
            return client
        if isinstance(client, int | np.integer):  # an index, as in `ClientData`
            if 0 <= client < len(places):
                return int(client)
        elif client in places:
            return places[client]
        names = [each for each in places if isinstance(each, str)]
        raise errors.ConfigError(
            "Expected an index in `data` of the run, from 0 to"
            f" {len(places) - 1}, or the id of a client there, found"
            f" {errors.describe(client)}.{errors.suggest(client, names)}"
        )

    def _find(self, client: ClientId) -> bytes | None:
        if client in self._rows:
            self._rows.move_to_end(client)
            return self._rows[client]
        return None if self._spilled is None else self._spilled.read(client)

    def put(self, client_ids: Sequence[ClientId], values: Sequence[Any]) -> None:
        """Keep new values of clients.

        Args:
            client_ids: each once; see `take`.
            values: one for each, of the initial value's structure, dtypes and shapes.

        Raises:
            ConfigError: a run had no such client.
            ValueMismatchError: a value is of another kind, or an id comes twice.
            CardinalityError: there is another number of values.
            StorageError: values that memory has no room for cannot be written.
        """
        if len(client_ids) != len(values):
            raise errors.CardinalityError(
                f"Expected a value for each of {len(client_ids)} clients, found"
                f" {len(values)}."
            )
        places = list(map(self._place, client_ids))
        if len(set(places)) != len(places):
            raise errors.ValueMismatchError(
                "Expected each client once, found an id that comes twice: one of its"
                " values would be lost."
            )
        rows = [self._pack(value) for value in values]  # all are checked first
        self.put_rows(dict(zip(places, rows, strict=True)))

    def put_rows(self, rows: Rows) -> None:
        """Keep values that are rows of bytes; the oldest ones leave memory for them."""
        for client, row in rows.items():
            self._rows[client] = row
            self._rows.move_to_end(client)
        if self._spilled is not None and len(self._rows) > self._max_rows:
            oldest = list(self._rows)[: len(self._rows) - self._max_rows]
            self._spilled.write({client: self._rows[client] for client in oldest})
            for client in oldest:
                del self._rows[client]

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
        for ids in _chunks(other.ids, _AT_ONCE):
            self.put(ids, other.take(ids))

    def save(self, folder: str) -> None:
        """Write all values to a folder, over what was saved there.

        Until all are written, `load` returns what was saved there before.

        Args:
            folder: of any file system that fsspec knows; these values' alone.

        Raises:
            StorageError: they cannot be written.
        """
        archives = ClientArchives(folder, self._row_bytes)
        archives.begin()
        index = Versions(folder, _ALL)
        former = index.find()
        numbers: list[int] = []
        for ids in _chunks(self.ids, max(1, _ARCHIVE_BYTES // max(1, self._row_bytes))):
            found = ((client, self._find(client)) for client in ids)
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
            folder: that they were saved to.
            initial: as of the class, of the kind that was saved.
            path: as of the class.
            memory_bytes: as of the class.

        Raises:
            StorageError: they cannot be read.
            SavedStateError: they are not there, damaged, or of another kind.
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
            states.put_rows(rows)
        return states

    @property
    def _described(self) -> list[Any]:
        return [[dtype.str, list(shape)] for dtype, shape in self._types]

    def close(self) -> None:
        """Remove what memory had no room for."""
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


def _build_nest(initial: Any) -> Callable[[list[NDArray[Any]]], Any]:
    """Return what packs arrays into the structure of a value."""
    if type(initial) in (list, tuple) and not any(map(tf.nest.is_nested, initial)):
        return type(initial)  # takes a fiftieth of the time
    return functools.partial(tf.nest.pack_sequence_as, initial)


class SavedClientStates(ClientStates):
    """Values of clients, none yet, that are saved from time to time.

    Args:
        initial: as of `ClientStates`.
        storage_path: of the run.
        memory_bytes: as of `ClientStates`.
    """

    def __init__(self, initial: Any, storage_path: str, *, memory_bytes: int) -> None:
        place = storage_path.removeprefix("file://").removeprefix("local://")
        # An object store is no place for what rounds read.
        spilled = tempfile.gettempdir() if "://" in place else place
        super().__init__(initial, spilled, memory_bytes=memory_bytes)
        self._archives = ClientArchives(f"{storage_path}/clients", self._row_bytes)
        self._changed: dict[ClientId, bytes] = {}
        self._unsaved: dict[ClientId, bytes] = {}

    @override
    def put_rows(self, rows: Rows) -> None:
        super().put_rows(rows)
        self._changed |= rows

    @override
    def fill_from(self, other: ClientStates) -> None:
        for ids in _chunks(other.ids, _AT_ONCE):
            self.put(ids, other.take(ids))
            self._archives.save(self.take_changed())

    def read_archives(self, numbers: Sequence[int]) -> None:
        """Put what a run saved.

        Args:
            numbers: of its archives, as `write_archives` returned them.

        Raises:
            StorageError: they cannot be read.
            SavedStateError: they are damaged, or not there.
        """
        for rows in self._archives.load(numbers):
            super().put_rows(rows)

    def take_changed(self) -> dict[ClientId, bytes]:
        """Return the rows that were put since the last call."""
        changed, self._changed = self._changed, {}
        return changed

    def is_large(self, changed: Rows) -> bool:
        """Return whether rows that are to be saved take as much memory as all may."""
        return len(changed) >= self._max_rows

    def add_unsaved(self, changed: Rows) -> None:
        """Have the next `write_archives` write rows: of one that fails none is lost."""
        self._unsaved |= changed

    def write_archives(self) -> list[int]:
        """Write what was added since the last save; return the archives of all rows.

        Raises:
            StorageError: they cannot be written.
        """
        numbers = self._archives.save(self._unsaved)
        self._unsaved = {}
        return numbers

    def collect(self, keep: AbstractSet[int]) -> None:
        """Remove archives that neither these values nor kept states need."""
        self._archives.collect(keep)


_MAX_NAMED = 10


def check_client_states(given: object, initial: Any, num_clients: int) -> None:
    """Raise unless a run can begin with values of clients.

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


class RunClients:
    """Takes and puts the values of one round after another.

    Args:
        states: hold the values; None where clients keep nothing.
    """

    def __init__(self, states: ClientStates | None) -> None:
        self._states = states
        # Of the rounds that took and put last: index, clients, what these had before.
        self._taken: tuple[int, Sequence[int], Sequence[Any]] = -1, (), ()
        self._put = self._taken

    def take(self, round_index: int, cohort: Sequence[int]) -> list[list[Any]]:
        """Return what `next` takes before the cohort's data: a list of values, or none.

        Args:
            round_index: of the round that takes them.
            cohort: its clients.
        """
        if self._states is None:
            return []
        values = self._states.take(cohort)
        self._taken = round_index, cohort, values
        return [values]

    def put(self, kept: "concurrent.futures.Future[Any] | None") -> Rows:
        """Put what the round returned that took last.

        Args:
            kept: what it returned for its clients.

        Returns:
            What changed, to be saved; nothing where that is not asked for.
        """
        if self._states is None or kept is None:
            return {}
        _, cohort, _ = self._taken
        self._states.put(cohort, kept.result())
        self._put = self._taken
        if isinstance(self._states, SavedClientStates):
            return self._states.take_changed()
        return {}

    def is_large(self, changed: Rows) -> bool:
        """Return whether what changed is to be saved though no save is due."""
        states = self._states
        return isinstance(states, SavedClientStates) and states.is_large(changed)

    def put_back(self, num_rounds: int) -> None:
        """Put what clients had after some rounds, if one more round was put."""
        round_index, cohort, values = self._put
        if self._states is not None and round_index >= num_rounds:
            self._states.put(cohort, values)

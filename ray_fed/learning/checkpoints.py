"""Saves a run beside its rounds: one save at a time, one state that waits for it.

    round r   r+1   r+2   r+3   r+4          rounds that are done
    save r --------------> save r+3 ----->   saves of their states

If a round ends while another one is saved, its state waits, and a later state replaces
it, because a resume needs only the latest. So saving takes a bounded share of the time
of short rounds.

A run on disk or in an object store has these files:

run_N        the fingerprint of the run. It is written at every start, before the first
             round, so that an error of the storage is raised at once
history_N    the records of rounds. Each is written once, before its state
round_N      `{"state": ...}` after N rounds, and values whose names begin with `run:`,
             see `RUN_PREFIX`: of the clock, of clients, and earlier states
clients/     values of clients. The state of a round names the archives that it uses
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import platform
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray_fed.errors as errors
from ray_fed.files import opening
from ray_fed.learning.client_states import ClientId, Rows, SavedClientStates
from ray_fed.learning.history import History, from_json, open_log, to_json
from ray_fed.learning.run_fingerprint import check_same, say_how_to_take_over
from ray_fed.observability import reprs
from ray_fed.program.checkpoint_store import Versions, telling_storage
from ray_fed.program.managers import RUN_PREFIX, name_values, restore_state

_FORMAT = 4
_CLOCK, _LIVE = RUN_PREFIX + "clock", RUN_PREFIX + "live"
_CLIENTS = RUN_PREFIX + "clients"


@dataclasses.dataclass(frozen=True)
class Reached:
    """The progress of a run after some rounds.

    Attributes:
        state: The server's state, as a call returned it, or as plain values.
        history: The records of all rounds so far.
        clients: The values of clients that changed since the last `Reached` that was
            passed to be saved, by client.
        clock: The saved state of the clock of devices. None if the run has no clock.
        live: The earlier states that running tasks of clients began with, by version.
    """

    state: Any
    history: History = dataclasses.field(default_factory=History)
    clients: Rows = dataclasses.field(default_factory=dict[ClientId, bytes])
    clock: bytes | None = None
    live: Mapping[int, Any] = dataclasses.field(default_factory=dict[int, Any])


class RunStorage:
    """Saves a run and loads it.

    One thread uses it at a time.

    `clients` is the empty store of clients' values, or None if clients keep no values.
    All states are kept if `num_to_keep` is None.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        num_to_keep: int | None,
        clients: SavedClientStates | None = None,
    ) -> None:
        self._where = os.fspath(path)
        self._clients, self._num_to_keep = clients, num_to_keep
        self._archives: dict[str, Sequence[int]] = {}  # by the rounds of each state
        self._starts = Versions(path, "run_")
        self._rounds = Versions(path, "round_")
        self._log = open_log(path)
        self._num_logged = 0  # rounds of the history whose records are in the log
        self._start = 0
        self._note: dict[str, Any] = {}  # fingerprint and owner of the run
        self._lock = FolderLock(self._starts.local_path)
        self._is_closed = False
        self.start: str | None = None
        """Digest of the saved run's first values. None: `initialize` returned them."""
        self.saved_rounds = -1
        """The number of rounds of the latest saved state. -1: nothing was saved."""

    def open(
        self,
        identity: Mapping[str, Any],
        state: Any,
        first_number: int,
        start: str | None = None,
    ) -> tuple[Reached | None, int]:
        """Return the saved run and the number of its call of round 0, and continue it.

        The run is None if no round was saved. Saved states are read in the structure of
        the initial `state`. `first_number` is the number of the first call of a new
        run. `start` is a digest of the values with which the run begins, or None for
        the values of `initialize`.

        Raises:
            ConfigError: Another run is saved there.
            StorageError: The place cannot be read or written, or another run saves
                there now.
            StateFormatError: Another version of ray_fed saved the run.
            SavedStateError: The saved run is damaged.
        """
        if not self._lock.take():
            raise self._taken(self._read_note()[0] or {})
        noted, starts = self._read_note()
        if noted is not None:
            check_same(noted["identity"], identity, self._where)
            first_number = int(noted["first_number"])
            start = noted.get("start")
        saved = self._load(state, is_noted=noted is not None)
        self._note = {
            "format": _FORMAT,
            "identity": identity,
            "first_number": first_number,
            "start": start,
            "token": uuid.uuid4().hex,
            "runs": f"the process {os.getpid()} on {platform.node()}",
        }
        self.start = start
        self._start = starts + 1 if noted is not None else 0
        self._write_note()
        if self._is_closed:  # closed meanwhile, so nobody waits
            self._lock.release()
        return saved, first_number

    def _load(self, structure: Any, *, is_noted: bool) -> Reached | None:
        """Return the latest state whose rounds all have whole records."""
        versions = self._rounds.find()
        if versions and not is_noted:
            raise errors.SavedStateError(
                f"Expected `{self._where}` to say what run its states are of, found no"
                " such file: name another `storage_path`."
            )
        lines = self._log.read() if versions else []
        records = from_json(lines)
        num_rounds = records[-1].round if records else 0
        if versions and num_rounds < versions[0]:
            raise errors.SavedStateError(
                f"Expected the records of at least {versions[0]} rounds in"
                f" `{self._log.where}`, found {num_rounds} that are whole: pass another"
                f" `storage_path`. {say_how_to_take_over(self._where)}"
            )
        if versions and num_rounds < versions[-1]:
            _logger.warning(
                "The records after round %d in `%s` are damaged: the run goes on from"
                " a state before.",
                num_rounds,
                self._log.where,
            )
        # A state without the records of all its rounds would lose part of the history.
        values, rounds = self._rounds.read_latest(at_most=num_rounds)
        archives = json.loads(values.pop(_CLIENTS, b"{}")) if values else {}
        # Without a saved state, this removes values that were lost before a first save.
        if self._clients is not None:
            self._archives = archives
            try:
                self._clients.read_archives(archives.get(str(rounds), ()))
            except errors.SavedStateError as error:
                error.add_note(
                    f"The state after {rounds} rounds in `{self._where}` needs it: move"
                    " that away to resume from the one before."
                )
                raise
        history = History(record for record in records if record.round <= rounds)
        # The rounds after the state run again, and write their records again.
        self._log.resume(lines[: len(history)])
        self._num_logged = len(history)
        if values is None:
            return None
        self.saved_rounds = rounds
        where = self._rounds.where(rounds)
        clock = values.pop(_CLOCK, None)
        versions = json.loads(values.pop(_LIVE, b"[]"))
        names = ["state", *(f"{_LIVE}_{version}" for version in versions)]
        found = restore_state(values, dict.fromkeys(names, structure), where)
        live = {version: found[f"{_LIVE}_{version}"] for version in versions}
        return Reached(found["state"], history, clock=clock, live=live)

    def _read_note(self) -> tuple[dict[str, Any] | None, int]:
        """Return the note of the last start of a run, or None, and its number."""
        values, number = self._starts.read_latest()
        if values is None:
            return None, 0
        try:
            found = dict(json.loads(values[""]))
            known = found["format"]
        except (ValueError, TypeError, KeyError) as error:
            raise errors.SavedStateError(
                f"Expected what a run is in `{self._where}`, found something else"
                f" ({error}): name another `storage_path`."
            ) from error
        if known != _FORMAT:
            raise errors.StateFormatError(
                f"Expected a run of format {_FORMAT} in `{self._where}`, found format"
                f" {errors.describe(known)}: resume it with the version of ray_fed that"
                f" wrote it. {say_how_to_take_over(self._where)}"
            )
        return found, number

    def _write_note(self) -> None:
        self._starts.write_and_keep(self._start, {"": json.dumps(self._note)}, 1)

    def _taken(self, noted: Mapping[str, Any]) -> errors.StorageError:
        who = noted.get("runs", "another thread or process")
        return errors.StorageError(
            f"Expected to be the only run that saves in `{self._where}`, found that"
            f" another one does, in {who}: wait until it ends, or pass another"
            " `storage_path`. What it saved is left as it is."
        )

    def save(self, reached: Reached) -> None:
        """Save the progress of a run, unless it is saved already.

        There is at least one round, and states are plain. Raises StorageError if
        another run began in its place.
        """
        rounds = reached.history[-1].round
        if rounds == self.saved_rounds:
            return
        self._check_place()
        live = {f"{_LIVE}_{version}": each for version, each in reached.live.items()}
        content = name_values({"state": reached.state, **live})
        if reached.clock is not None:
            content[_CLOCK] = reached.clock
            content[_LIVE] = json.dumps(list(reached.live)).encode()
        if self._clients is not None:
            content[_CLIENTS] = self._save_clients(self._clients, rounds)
        # Records first: a state is useless if its rounds have no records.
        self._log.append(map(to_json, reached.history[self._num_logged :]))
        try:
            self._rounds.write_and_keep(rounds, content, self._num_to_keep)
        except BaseException:
            self._log.undo()
            raise
        self._num_logged, self.saved_rounds = len(reached.history), rounds
        if self._clients is not None and self._num_to_keep is not None:
            self._clients.collect({n for kept in self._archives.values() for n in kept})

    def _check_place(self) -> None:
        """Raise StorageError if another run began here or clients' values were removed.

        If the folder was removed, begin again.
        """
        starts = self._starts.find()
        if not starts:
            if self._clients is not None:
                raise errors.StorageError(
                    f"Expected what this run saved in `{self._where}`, found it"
                    " removed, and what clients kept with it: run again with another"
                    " `storage_path`."
                )
            self._lock.take()
            self._write_note()
            self._log.resume([])
            self._num_logged = 0
        elif not self._lock.is_held or starts[-1] != self._start:
            noted = self._read_note()[0] or {}
            if noted.get("token") != self._note["token"]:
                raise self._taken(noted)

    def _save_clients(self, clients: SavedClientStates, rounds: int) -> bytes:
        """Save the values of clients, and return the archives of each state as JSON."""
        self._archives[str(rounds)] = clients.write_archives()
        # One more than the states: the oldest is removed after the new one is written.
        for old in list(self._archives)[: -1 - (self._num_to_keep or 0)]:
            del self._archives[old]
        return json.dumps(self._archives).encode()

    def add_clients(self, changed: Rows) -> None:
        """Add changed values of clients, which the next save writes."""
        if self._clients is not None:
            self._clients.add_unsaved(changed)

    def close(self) -> None:
        """Release the lock, so that another run can save here."""
        self._is_closed = True
        self._lock.release()


class FolderLock:
    """A lock on a folder of this machine, which ends with this process.

    The folder itself is locked (`flock`), so a killed program leaves no lock behind.
    Folders on other machines (None), and on file systems that cannot lock, are not
    locked.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether the folder is locked by this object."""
        return self._descriptor is not None

    def take(self) -> bool:
        """Make the folder and lock it; return False if another one has the lock."""
        self.release()
        if self._path is None:
            return True
        with contextlib.suppress(OSError):  # a later write raises the error
            os.makedirs(self._path, exist_ok=True)  # noqa: PTH103
            descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                return not isinstance(error, BlockingIOError)
            self._descriptor = descriptor
            # A forked process that outlives this one would hold the lock.
            _locks.add(self)
        return True

    def release(self) -> None:
        """Release the lock, if this object has it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_locks: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


def _release_all() -> None:
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_release_all)


def list_runs(path: str) -> dict[str, str]:
    """Return descriptions of the runs at a place, and in its folders, by path.

    Each run has one line: rounds, metrics, size and states, or why it cannot be read.
    Raises ConfigError without a run, and StorageError if the place cannot be read.
    """
    system, root = opening.locate(opening.expand_home(path))
    found = list[Any]()
    with (
        telling_storage(path, Exception, verb="list the runs in"),
        contextlib.suppress(FileNotFoundError),
    ):
        found = system.ls(root, detail=True)
    folders = [str(each["name"]) for each in found if each["type"] != "file"]
    names = sorted(folder.rstrip("/").rpartition("/")[2] for folder in folders)
    inside = [f"{path.rstrip('/')}/{name}" for name in names]
    places = [place for place in (path, *inside) if _is_run(place)]
    if not places:
        raise errors.ConfigError(
            f"Expected runs that `learning.run` saved in `{path}`, found none: pass a"
            " `storage_path`, or the folder that it is in."
        )
    return {place: _describe_saved(place) for place in places}


def _is_run(place: str) -> bool:
    try:
        return bool(Versions(place, "run_").find())
    except errors.StorageError:  # it is a file
        return False


def _describe_saved(place: str) -> str:
    system, root = opening.locate(opening.expand_home(place))
    size = reprs.show_bytes(system.du(root))
    rounds = Versions(place, "round_").find()
    if not rounds:
        return f"no round yet, {size}"
    try:
        history = History.load(place)
    except errors.SavedStateError as error:
        return f"{size}, cannot be read: {error}"
    numbers = dict[str, float]()
    for record in history:
        numbers |= record.numbers()
    shown = errors.cut(
        ", ".join(f"{k} {reprs.show_number(v)}" for k, v in numbers.items())
    )
    states = ", ".join(map(str, rounds))
    count = f"{len(history)} round{'s' * (len(history) != 1)}"
    return f"{count}, {shown}, {size}, states after {states}"


_logger = logging.getLogger("ray_fed.learning.run_loop")

_POLL_S = 0.1
"""How often `finish` asks how much time is left, in seconds."""


class Checkpoints:
    """Saves the latest of the states that it receives, on a thread of its own.

    Args:
        storage: The storage of the run, which `close` closes. None: nothing is saved.
        read: Reads a state into this process, as plain values.
        spacing_s: The least seconds between the beginnings of two saves, >= 0. None:
            each state is saved, and `add` waits until the state before is being saved.
    """

    def __init__(
        self,
        storage: RunStorage | None,
        read: Callable[[Any], Any],
        *,
        spacing_s: float | None,
    ) -> None:
        self._storage = storage
        self._read = read
        self._spacing_s = spacing_s
        self._saves_each = spacing_s is None
        self._changed = threading.Condition()  # guards the attributes below
        self._waiting: Reached | None = None
        self._is_saving = self._is_hurried = self._is_closed = False
        self._error: BaseException | None = None
        if storage is not None:
            # A daemon: a program whose storage hangs does not wait for it.
            threading.Thread(
                target=self._run,
                args=(storage,),
                name="ray_fed run, saves",
                daemon=True,
            ).start()

    def add(self, reached: Reached) -> None:
        """Save a state soon.

        If several states wait, only the latest is saved.

        Raises the error of an earlier save. This state is then not saved.
        """
        if self._storage is None:
            return
        with self._changed:
            while self._saves_each and self._waiting is not None:
                self._changed.wait()
            self._raise_error()
            if self._waiting is not None:
                changed = {**self._waiting.clients, **reached.clients}
                reached = dataclasses.replace(reached, clients=changed)
            self._waiting = reached
            self._changed.notify_all()

    def finish(
        self, reached: Reached, find_time_left: Callable[[], float | None]
    ) -> None:
        """Save the last state and wait for it.

        Log a warning if it takes too long.

        `find_time_left` returns the seconds to wait, or None for no limit. If there is
        a limit, this state replaces a state that waits.
        """
        if self._storage is None or not reached.history:
            return
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
            while self._saves_each and self._waiting is not None:
                self._changed.wait(_POLL_S)
                self._saves_each = find_time_left() is None
            self._error = None  # the last state is always tried
            self.add(reached)
            while self._is_saving or self._waiting is not None:
                left = find_time_left()
                if left is not None and left <= 0:
                    _logger.warning(
                        "The state after %d rounds was not saved in time; the one of %d"
                        " rounds is there.",
                        reached.history[-1].round,
                        self._storage.saved_rounds,
                    )
                    break
                self._changed.wait(_POLL_S if left is None else min(left, _POLL_S))
            self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, storage: RunStorage) -> None:
        while (reached := self._take()) is not None:
            begun = time.monotonic()
            storage.add_clients(reached.clients)
            try:
                state = self._read(reached.state)
                live = {n: self._read(each) for n, each in reached.live.items()}
                storage.save(dataclasses.replace(reached, state=state, live=live))
            except Exception as error:  # noqa: BLE001 (raised by the next call)
                with self._changed:
                    self._error = error
            with self._changed:
                until = begun + (self._spacing_s or 0.0)
                left = until - time.monotonic()
                self._changed.wait_for(lambda: self._is_hurried, max(0.0, left))
        storage.close()

    def _take(self) -> Reached | None:
        """Wait for a state and return it. Return None after `close`."""
        with self._changed:
            self._is_saving = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closed or self._waiting is not None)
            taken, self._waiting = self._waiting, None
            self._is_saving = taken is not None
            self._changed.notify_all()
            return taken

    def close(self) -> None:
        """Close the storage, once a save that still runs has ended."""
        with self._changed:
            self._is_hurried = self._is_closed = True
            self._waiting = None
            self._changed.notify_all()
            if self._storage is not None and not self._is_saving:
                self._storage.close()

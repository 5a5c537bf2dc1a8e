"""Saves a run while its rounds continue, and describes saved runs.

    round r   r+1   r+2   r+3   r+4          rounds that are done
    save r --------------> save r+3 ----->   saves of their states

There is one save at a time. If a round ends during a save, its state waits. A later
state replaces a waiting one, because a resume needs only the latest. So short rounds
spend a bounded share of their time on saves.

A run has these files, on disk or in an object store:

run_N        the fingerprint of the run. It is written at every start, before the first
             round, so that an error of the storage is raised at once
history_N    the records of rounds. Each is written once, before its state
round_N      `{"state": ...}` after N rounds, and values whose names begin with
             `RUN_PREFIX`: the clock, earlier states, and archives in clients/
clients/     values that clients keep. round_N names the archives that it uses
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
        state: Server state, as the round returned it, or as plain values.
        history: Records of all rounds so far.
        clients: New values, as bytes, of the clients whose values changed since the
            last `Reached` that was passed to be saved.
        clock: Saved state of the simulated clock of `devices`, or None without a clock.
        live: Earlier server states from which clients still compute, by their version,
            which is the number of rounds before them.
    """

    state: Any
    history: History = dataclasses.field(default_factory=History)
    clients: Rows = dataclasses.field(default_factory=dict[ClientId, bytes])
    clock: bytes | None = None
    live: Mapping[int, Any] = dataclasses.field(default_factory=dict[int, Any])


class RunStorage:
    """Saves a run and loads it. Only one thread may use it at a time.

    `clients` is the empty store of the values that clients keep, or None if they keep
    nothing. `num_to_keep` is the number of states to keep, or None to keep all.
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
        """Load the saved run, if there is one, and take over its place.

        `identity` is the fingerprint that a saved run must have. `state` is the initial
        state, whose structure saved states have. `first_number` is the number of the
        first call of a new run. `start` is a digest of the values with which the run
        begins, or None for the values of `initialize`.

        Returns:
            The progress of the saved run, or None if no round was saved. The number of
            the run's first call, as the saved run had it.

        Raises:
            ConfigError: Another run is saved there.
            StorageError: The place cannot be read or written, or another program is
                saving a run there.
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
        if self._is_closed:  # by another thread, while this one waited for storage
            self._lock.release()
        return saved, first_number

    def _load(self, structure: Any, *, is_noted: bool) -> Reached | None:
        """Return the latest saved state for whose rounds all records are whole."""
        versions = self._rounds.find()
        if versions and not is_noted:
            raise errors.SavedStateError(
                f"Expected a file run_N in `{self._where}` that describes the run of"
                " its states, found none: pass another `storage_path`."
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
                "The records after round %d in `%s` are damaged: the run continues"
                " from an earlier state.",
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
                    " that state away to resume from an earlier one."
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
        """Return the run's last note (fingerprint, owner) or None, and its number."""
        values, number = self._starts.read_latest()
        if values is None:
            return None, 0
        try:
            found = dict(json.loads(values[""]))
            known = found["format"]
        except (ValueError, TypeError, KeyError) as error:
            raise errors.SavedStateError(
                f"Expected the description of a run in `{self._where}`, found another"
                f" text ({error}): pass another `storage_path`."
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
            f"Expected to be the only run that saves in `{self._where}`, found"
            f" another run, in {who}: wait until it ends, or pass another"
            " `storage_path`. Its files stay as they are."
        )

    def save(self, reached: Reached) -> None:
        """Save the progress after one or more rounds, unless it is saved already.

        States are plain values. Raises StorageError if another run began in this place.
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

        If the folder was removed and clients keep nothing, write it anew.
        """
        starts = self._starts.find()
        if not starts:
            if self._clients is not None:
                raise errors.StorageError(
                    f"Expected the files of this run in `{self._where}`, found them"
                    " removed, with the values that clients keep: run again with"
                    " another `storage_path`."
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
        self._archives[str(rounds)] = clients.write_archives()
        # One more than the states: the oldest is removed after the new one is written.
        for old in list(self._archives)[: -1 - (self._num_to_keep or 0)]:
            del self._archives[old]
        return json.dumps(self._archives).encode()

    def add_clients(self, changed: Rows) -> None:
        """Add changed values of clients, as bytes by client, to the next save."""
        if self._clients is not None:
            self._clients.add_unsaved(changed)

    def close(self) -> None:
        """Release the lock, so that another run can save here."""
        self._is_closed = True
        self._lock.release()


class FolderLock:
    """A lock on a local folder, which ends with this process.

    The folder itself is locked (`flock`), so a killed program leaves no lock behind. A
    `path` of None means a folder elsewhere, such as in an object store. It is not
    locked. Neither is a folder whose file system cannot lock.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object has locked the folder."""
        return self._descriptor is not None

    def take(self) -> bool:
        """Create the folder and lock it. Return False if another has the lock."""
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
            # A forked process shares the lock, and might outlive this process.
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
    """Describe the runs that are saved at `path` and in the folders directly inside it.

    Returns one line of text for each run's path: rounds, metrics, size and saved
    states, or why the run cannot be read. Raises ConfigError if there is no run, and
    StorageError if `path` cannot be read.
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
"""Seconds after which `finish` asks again how much time is left."""


class Checkpoints:
    """Saves the latest state that it received, on a thread of its own.

    Args:
        storage: Storage of the run, which `close` closes. None: nothing is saved.
        read: Function that reads a state into this process, as plain values.
        spacing_s: Least number of seconds between the beginnings of two saves, >= 0.
            None: every state is saved, and `add` waits while an earlier state still
            waits.
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
        """Save a state soon. If several states wait, only the latest is saved.

        If an earlier save failed, this raises its error and does not save the state.
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
        """Save the last state and wait for it, or log a warning if time runs out.

        `find_time_left` returns the seconds that are left, or None without a limit.
        With a limit, this state replaces a state that waits.
        """
        if self._storage is None or not reached.history:
            return
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
            while self._saves_each and self._waiting is not None:
                self._changed.wait(_POLL_S)
                self._saves_each = find_time_left() is None
            self._error = None  # the last state is saved even if a save failed
            self.add(reached)
            while self._is_saving or self._waiting is not None:
                left = find_time_left()
                if left is not None and left <= 0:
                    _logger.warning(
                        "The state after %d rounds was not saved in time. The latest"
                        " saved state is the one after %d rounds.",
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
        """Stop the thread and close the storage, after a save that is under way."""
        with self._changed:
            self._is_hurried = self._is_closed = True
            self._waiting = None
            self._changed.notify_all()
            if self._storage is not None and not self._is_saving:
                self._storage.close()

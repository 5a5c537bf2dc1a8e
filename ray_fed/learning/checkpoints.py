"""Saves a run beside its rounds: one save at a time, one state that waits for it.

    round r   r+1   r+2   r+3   r+4          rounds that are done
    save r --------------> save r+3 ----->   what is saved meanwhile

A round that is done while another one is saved waits, and gives way to a later one: a
resume wants the latest. So saving takes a bounded share of the time of short rounds.

What makes a run the same run: compared before it is resumed.

A run on disk or in an object store: what it is, and its latest rounds.

run_N        what the run is: written anew at every start, before the first round,
so that a place that cannot be written to is told at once
round_N      the state after N rounds, with the history so far
clients/     what clients keep: a round's state names the archives that it has
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

import ray_fed.errors as errors
from ray_fed.files import opening
from ray_fed.learning.client_states import ClientId, Rows, SavedClientStates
from ray_fed.learning.history import History, RoundRecord, from_json, to_json
from ray_fed.observability import reprs
from ray_fed.program import FileProgramStateManager
from ray_fed.program.checkpoint_store import Versions, call_on_daemon, telling_storage

_T = TypeVar("_T")

_MEANINGS = {
    "num_clients": "the number of clients",
    "clients": "the clients, by their ids, or their numbers of elements and of rows",
    "cohort_size": "`cohort_size`",
    "seed": "`seed`",
    "sampler": "the `sampler`, by its text",
    "state_type": "the type of the process's state",
    "next_type": "the type of the process's `next`",
    "next_content": "what the process's `next` computes, by a hash of its graphs and of"
    " numbers in them, such as a learning rate",
    "config_seed": "`Config.seed`",
    "clients_per_leaf": "`Config.clients_per_leaf`",
    "evaluates": "whether there is `evaluate`, or its `evaluate_every`",
}


def check_same(saved: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    """Refuse to resume another run.

    Raises:
        ConfigError: something differs; the message says what.
    """
    names = [n for n in {**saved, **found} if saved.get(n) != found.get(n)]
    if not names:
        return
    told = "; ".join(
        f"{_MEANINGS.get(name, name)}: {errors.describe(saved.get(name))} there,"
        f" {errors.describe(found.get(name))} here"
        for name in names
    )
    traced = ""
    if "next_content" in names:
        traced = (
            " Another version of ray_fed, TensorFlow or Keras may trace other graphs of"
            f" the same process. {_say_how_to_take_over(where)}"
        )
    raise errors.ConfigError(
        f"Expected to resume the run in `{where}` as it was begun, found other"
        f" arguments: {told}. Pass those, or another `storage_path`.{traced}"
    )


_FORMAT = 2


def _say_how_to_take_over(where: str) -> str:
    return (
        "To begin anew with its model, pass another `storage_path` and its `state`, of"
        f' `FileProgramStateManager({where!r}, "round_").load_latest({{"state":'
        ' process.initialize(), "history": b""})` (with `"clients": b""` where clients'
        " keep something)."
    )


@dataclasses.dataclass(frozen=True)
class Reached:
    """Where a run is after some rounds.

    Attributes:
        state: of the server, as a call returned it, or plain.
        records: of all rounds so far.
        clients: what clients keep that changed since the one before that is saved.
    """

    state: Any
    records: tuple[RoundRecord, ...] = ()
    clients: Rows = dataclasses.field(default_factory=dict[ClientId, bytes])


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """What a run goes on from.

    Attributes:
        state: after its rounds; None before the first one is saved.
        records: of these rounds.
        first_number: of the call of its round 0; None where nothing was saved.
    """

    state: Any = None
    records: Sequence[RoundRecord] = ()
    first_number: int | None = None


class RunStorage:
    """Saves a run and loads it.

    Args:
        path: a path or URI.
        num_to_keep: states to keep, >= 1; None keeps all.
        clients: what clients keep, none yet; None where they keep nothing.

    Raises:
        UnsupportedError: it is none that fsspec can use here.
        StorageError: it names an archive that cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        num_to_keep: int | None,
        clients: SavedClientStates | None = None,
    ) -> None:
        self._where = os.fspath(path)
        self._clients, self._num_to_keep = clients, num_to_keep
        self._archives: dict[str, Sequence[int]] = {}  # of each state that is kept
        self._runs = FileProgramStateManager(path, "run_", 1)
        self._rounds = FileProgramStateManager(path, "round_", num_to_keep or 0)
        self._lock = asyncio.Lock()
        self._note = "", 0  # what the run is, and the number of its start
        self._encoded: list[bytes] = []
        self.saved_rounds = -1
        """Rounds that the latest saved state has; -1: none was saved."""

    async def open(
        self, identity: Mapping[str, Any], state: Any, first_number: int
    ) -> SavedRun:
        """Return what is saved, and note that this run goes on from it.

        Args:
            identity: of this run.
            state: its initial one: says what structure a state has.
            first_number: of the call of round 0 where nothing is saved.

        Raises:
            ConfigError: what is saved is of another run.
            StorageError: the place cannot be read or written.
            StateFormatError: another version of ray_fed wrote what is saved.
            SavedStateError: what is saved is damaged.
        """
        content, starts = await self._runs.load_latest("")
        first = first_number
        saved = SavedRun()
        if content is not None:
            found = self._parse(content)
            check_same(found["identity"], identity, self._where)
            first = int(found["first_number"])
            saved = SavedRun(first_number=first)
        structure = {"state": state, "history": b""}
        if self._clients is not None:
            structure["clients"] = b""
        loaded, rounds = await self._rounds.load_latest(structure)
        if loaded is not None:
            if content is None:
                raise errors.SavedStateError(
                    f"Expected `{self._where}` to say what run its states are of, found"
                    " no such file: name another `storage_path`."
                )
            records = from_json(loaded["history"], self._where)
            saved = SavedRun(loaded["state"], records, first)
            if self._clients is not None:
                self._archives = json.loads(loaded["clients"])
            self.saved_rounds = rounds
        if self._clients is not None:  # what was lost before a first save goes, too
            numbers = self._archives.get(str(rounds), ())
            try:
                await call_on_daemon(self._clients.read_archives, numbers)
            except errors.SavedStateError as error:
                error.add_note(
                    f"The state after {rounds} rounds in `{self._where}` needs it: move"
                    " that away to resume from the one before."
                )
                raise
        noted = {"format": _FORMAT, "identity": identity, "first_number": first}
        next_start = starts + 1 if content is not None else 0
        self._note = json.dumps(noted), next_start
        await self._runs.save(*self._note)
        return saved

    def _parse(self, content: Any) -> dict[str, Any]:
        try:
            found = dict(json.loads(content))
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
                f" wrote it. {_say_how_to_take_over(self._where)}"
            )
        return found

    async def save(self, reached: Reached) -> None:
        """Save where a run is after at least one round, unless that is saved.

        Args:
            reached: with a plain state.

        Raises:
            StorageError: it cannot be written.
            ValueMismatchError: a value is of a kind that cannot be saved.
        """
        async with self._lock:
            records = reached.records
            rounds = records[-1].round_index + 1
            if rounds == self.saved_rounds:
                return
            await self._note_again()
            # Rounds are only ever added: each is encoded once.
            self._encoded += map(to_json, records[len(self._encoded) :])
            history = b",\n".join(self._encoded[: len(records)])
            content = {"state": reached.state, "history": b"[" + history + b"]"}
            if self._clients is not None:
                content["clients"] = await self._save_clients(self._clients, rounds)
            await self._rounds.save(content, rounds)
            self.saved_rounds = rounds
            if self._clients is not None and self._num_to_keep is not None:
                keep = {each for kept in self._archives.values() for each in kept}
                await call_on_daemon(self._clients.collect, keep)

    async def _note_again(self) -> None:
        """Say anew what the run is, where the folder was removed since it began.

        Raises:
            StorageError: what clients have kept was removed with it.
        """
        if await self._runs.get_versions():
            return
        if self._clients is not None:
            raise errors.StorageError(
                f"Expected what this run saved in `{self._where}`, found it removed,"
                " and what clients kept with it: run again with another `storage_path`."
            )
        await self._runs.save(*self._note)

    async def _save_clients(self, clients: SavedClientStates, rounds: int) -> bytes:
        """Save what clients have; return what states name as theirs, as JSON."""
        self._archives[str(rounds)] = await call_on_daemon(clients.write_archives)
        # One more than the states: the oldest goes once the new one is there.
        for old in list(self._archives)[: -1 - (self._num_to_keep or 0)]:
            del self._archives[old]
        return json.dumps(self._archives).encode()

    def add_clients(self, changed: Rows) -> None:
        """Have the next save, be it this one or a later, write what changed."""
        if self._clients is not None:
            self._clients.add_unsaved(changed)


def list_runs(path: str) -> dict[str, str]:
    """Return what runs are saved at a place, and in its folders, by their paths.

    Args:
        path: a `storage_path`, or a folder of these.

    Returns:
        Of each run a line: rounds, metrics, size, states; or why it cannot be read.

    Raises:
        ConfigError: none is saved there.
        StorageError: the place cannot be read.
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
"""How soon `finish` sees that there is less time."""


_JOIN_S = 2.0


class IoThread:
    """Runs coroutines; a context manager, whose end cancels those that still run."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ray_fed run, I/O", daemon=True
        )
        self._thread.start()

    def submit(
        self, coroutine: Coroutine[Any, Any, _T]
    ) -> concurrent.futures.Future[_T]:
        """Start a coroutine.

        Raises:
            ContextStateError: the run has ended.
        """
        if self._is_closed:
            coroutine.close()
            raise errors.ContextStateError(
                "Expected a run that goes on, found it ended: what was to follow its"
                " last round came too late."
            )
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a coroutine."""
        return self.submit(coroutine).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(_end_loop(), self._loop)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _end_loop() -> None:
    """Cancel all other tasks, then stop this thread's loop."""
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop.call_soon(loop.stop)


class Checkpoints:
    """Saves the latest of the states that it is given.

    Args:
        storage: takes them; None saves nothing.
        io: runs what saves; not owned.
        fetch: reads a state into this process.
        spacing_s: from the beginning of a save to that of the next; None: each state is
            saved, and `add` waits for room.
    """

    def __init__(
        self,
        storage: RunStorage | None,
        io: IoThread,
        fetch: Callable[[Any], Awaitable[Any]],
        *,
        spacing_s: float | None,
    ) -> None:
        self._storage = storage
        self._io = io
        self._fetch = fetch
        self._spacing_s = spacing_s
        self._saves_each = spacing_s is None
        self._changed = threading.Condition()
        self._waiting: Reached | None = None
        self._saving: concurrent.futures.Future[None] | None = None
        self._error: BaseException | None = None
        self._hurries = threading.Event()

    def add(self, reached: Reached) -> None:
        """Have a state saved soon; of several, the latest one.

        Raises:
            StorageError: a state before could not be saved; this one is not tried.
            ValueMismatchError: it held a value that cannot be saved.
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
            if self._saving is None:
                self._saving = self._io.submit(self._save_all(self._storage))

    def finish(
        self, reached: Reached, find_time_left: Callable[[], float | None]
    ) -> None:
        """Save the last state, and wait for it; log where it takes too long.

        `find_time_left` returns for how many seconds to wait, None: as long as it
        takes. Where there is a limit, a state that waits gives way to this one.

        Raises:
            StorageError: it cannot be saved.
            ValueMismatchError: it holds a value that cannot be saved.
        """
        if self._storage is None or not reached.records:
            return
        self._hurries.set()
        with self._changed:
            while self._saves_each and self._waiting is not None:
                self._changed.wait(_POLL_S)
                self._saves_each = find_time_left() is None
            self._error = None  # the last state is tried in any case
        self.add(reached)
        with self._changed:
            saving = self._saving
        if saving is not None and not _ends(saving, find_time_left):
            _logger.warning(
                "The state after %d rounds was not saved in time; the one of %d"
                " rounds is there.",
                reached.records[-1].round_index + 1,
                self._storage.saved_rounds,
            )
        with self._changed:
            self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    async def _save_all(self, storage: RunStorage) -> None:
        while (reached := self._take()) is not None:
            begun = time.monotonic()
            storage.add_clients(reached.clients)
            try:
                state = await self._fetch(reached.state)
                await storage.save(dataclasses.replace(reached, state=state))
            except Exception as error:  # noqa: BLE001 (raised by the next call)
                with self._changed:
                    self._error = error
            if self._spacing_s is not None:
                left = begun + self._spacing_s - time.monotonic()
                await call_on_daemon(self._hurries.wait, max(0.0, left))

    def _take(self) -> Reached | None:
        with self._changed:
            taken, self._waiting = self._waiting, None
            if taken is None:
                self._saving = None
            self._changed.notify_all()
            return taken


def _ends(
    saving: concurrent.futures.Future[None], find_time_left: Callable[[], float | None]
) -> bool:
    """Wait for a save while there is time, and return whether it ended."""
    while not saving.done():
        left = find_time_left()
        if left is not None and left <= 0:
            return False
        concurrent.futures.wait([saving], _POLL_S if left is None else left)
    return True

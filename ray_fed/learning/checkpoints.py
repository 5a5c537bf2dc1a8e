"""Saves a run beside its rounds: one save at a time, one state that waits for it.

    round r   r+1   r+2   r+3   r+4          rounds that are done
    save r --------------> save r+3 ----->   what is saved meanwhile

A round that is done while another one is saved waits, and gives way to a later one: a
resume wants the latest. So saving takes a bounded share of the time of short rounds.

A history as JSON and back, to the bit: metrics keep their dtypes and shapes.

What makes a run the same run: compared before it is resumed.

A run on disk or in an object store: what it is, and its latest rounds.

run_N        what the run is: written anew at every start, before the first round,
so that a place that cannot be written to is told at once
round_N      the state after N rounds, with the history so far
clients/     what clients keep, in segments: a round's state names those that it has
"""

import asyncio
import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import federated_language as fl
import ml_dtypes  # noqa: F401  # pyright: ignore[reportUnusedImport]  # numpy learns bfloat16
import numpy as np

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.learning.batches import count_rows
from ray_fed.learning.client_states import FrozenRows, SavedClientStates
from ray_fed.learning.history import RoundRecord
from ray_fed.learning.loop_thread import IoThread
from ray_fed.learning.processes import LearningProcess
from ray_fed.learning.run_spec import RunSpec
from ray_fed.program import FileProgramStateManager, RayFederatedContext
from ray_fed.program.daemon_calls import call_on_daemon


def to_json(records: Sequence[RoundRecord]) -> list[Any]:
    """Return records as what `json` writes.

    Args:
        records: with metrics as `read_metrics` returns them.
    """
    return [
        {
            field.name: _encode(getattr(record, field.name))
            for field in dataclasses.fields(record)
        }
        for record in records
    ]


def from_json(content: Sequence[Any]) -> list[RoundRecord]:
    """Return the records that `to_json` described."""
    return [
        RoundRecord(**{name: _decode(value) for name, value in fields.items()})
        for fields in content
    ]


def _encode(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, np.generic | np.ndarray):
        return _encode_array(value)
    if isinstance(value, Mapping):
        return {"dict": [[name, _encode(member)] for name, member in value.items()]}
    kind = "list" if isinstance(value, list) else "tuple"
    return {kind: [_encode(member) for member in value]}


def _encode_array(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "array": [_plain(item) for item in array.ravel().tolist()],
        "scalar": isinstance(value, np.generic),
    }


def _plain(item: Any) -> Any:
    return item if isinstance(item, bool | int | float) else float(item)


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    match value:
        case {"bytes": content}:
            found: Any = bytes.fromhex(content)
        case {"dict": pairs}:
            found = {name: _decode(member) for name, member in pairs}
        case {"list": members}:
            found = [_decode(member) for member in members]
        case {"tuple": members}:
            found = tuple(_decode(member) for member in members)
        case _:
            array = np.array(value["array"], np.dtype(value["dtype"]))
            array = array.reshape(value["shape"])
            found = array[()] if value["scalar"] else array
    return found


_MEANINGS = {
    "num_clients": "the number of clients",
    "clients": "the clients, by their ids, or their numbers of elements and of rows",
    "cohort_size": "`cohort_size`",
    "seed": "`seed`",
    "state_type": "the type of the process's state",
    "next_type": "the type of the process's `next`",
    "next_content": "what the process's `next` computes, by a hash of its graphs and of"
    " numbers in them, such as a learning rate",
    "config_seed": "`Config.seed`",
    "clients_per_leaf": "`Config.clients_per_leaf`",
    "evaluates": "whether there is `evaluate`, or its `evaluate_every`",
}


def describe_run(process: LearningProcess, spec: RunSpec) -> dict[str, Any]:
    """Return what decides the bits of a run, and is compared when it is resumed.

    Args:
        process: that is run.
        spec: of the run; no client's data are read.
    """
    sampler = spec.sampler
    initialize, run_round = (_type_of(c) for c in (process.initialize, process.next))
    return {
        "num_clients": sampler.num_clients,
        "clients": _digest_clients(spec.data),
        "cohort_size": sampler.cohort_size,
        "seed": sampler.seed,
        "state_type": initialize,
        "next_type": run_round,
        "next_content": _content_of(process.next),
        "evaluates": None if spec.evaluate is None else spec.evaluate_every,
        **_settings(),
    }


def _type_of(comp: Any) -> str | None:
    if isinstance(comp, fl.framework.Computation):
        return str(comp.type_signature)
    return None


def _content_of(comp: Any) -> str | None:
    """Return what tells a computation from others; None where nothing does."""
    if not isinstance(comp, fl.framework.ConcreteComputation):
        return None
    try:
        return rtf.identify_computation(comp)[:16]
    except errors.UnsupportedError:  # it has Python functions
        return None


def _digest_clients(data: Sequence[Any]) -> str:
    ids = getattr(data, "ids", None)
    if ids is None:
        ids = tuple(count_rows(client) for client in data)
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:16]


def _settings() -> dict[str, int | None]:
    context = fl.framework.get_context_stack().current
    if isinstance(context, RayFederatedContext):
        context = context.execution_context
    if not isinstance(context, ray_fed.ExecutionContext):
        return {}
    config = context.config
    return {"config_seed": config.seed, "clients_per_leaf": config.clients_per_leaf}


def check_same(saved: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    """Refuse to resume another run.

    Raises:
        ConfigError: something differs; the message says what.
    """
    names = [n for n in {**saved, **found} if saved.get(n) != found.get(n)]
    if not names:
        return
    told = "; ".join(
        f"{_MEANINGS.get(name, name)}: {_show(saved.get(name))} there,"
        f" {_show(found.get(name))} here"
        for name in names
    )
    raise errors.ConfigError(
        f"Expected to resume the run in `{where}` as it was begun, found other"
        f" arguments: {told}. Pass those, or another `storage_path`."
    )


def _show(value: object) -> str:
    return errors.describe(value)


_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Reached:
    """Where a run is after some rounds.

    Attributes:
        state: of the server, as a call returned it, or plain.
        records: of all rounds so far.
        clients: what clients have kept, in a run that is saved.
    """

    state: Any
    records: tuple[RoundRecord, ...] = ()
    clients: FrozenRows | None = None


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
        self._segments: dict[str, Sequence[str]] = {}  # of each state that is kept
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
            records = from_json(json.loads(loaded["history"]))
            saved = SavedRun(loaded["state"], records, first)
            if self._clients is not None:
                self._segments = json.loads(loaded["clients"])
            self.saved_rounds = rounds
        if self._clients is not None:  # what was lost before a first save goes, too
            names = self._segments.get(str(rounds), ())
            await call_on_daemon(self._clients.take_over, names)
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
                " wrote it."
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
            new = to_json(records[len(self._encoded) :])
            self._encoded += [json.dumps(record).encode() for record in new]
            history = b",\n".join(self._encoded[: len(records)])
            content = {"state": reached.state, "history": b"[" + history + b"]"}
            if reached.clients is not None:
                content["clients"] = await self._save_clients(reached.clients, rounds)
            await self._rounds.save(content, rounds)
            self.saved_rounds = rounds
            if self._clients is not None and self._num_to_keep is not None:
                keep = {name for names in self._segments.values() for name in names}
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

    async def _save_clients(self, clients: FrozenRows, rounds: int) -> bytes:
        """Save what clients have; return what states name as theirs, as JSON."""
        self._segments[str(rounds)] = await call_on_daemon(clients.write)
        # One more than the states: the oldest goes once the new one is there.
        for old in list(self._segments)[: -1 - (self._num_to_keep or 0)]:
            del self._segments[old]
        return json.dumps(self._segments).encode()


_logger = logging.getLogger("ray_fed.learning.run")

SPACING_S = 0.5
"""From the begin of a save to that of the next: a save costs some 10 ms of processor
time, as much as a small round."""

_POLL_S = 0.1
"""How soon `finish` sees that there is less time."""


class Checkpoints:
    """Saves the latest of the states that it is given.

    Args:
        storage: takes them; None saves nothing.
        io: runs what saves; not owned.
        fetch: reads a state into this process.
        keeps_all: whether each state is to be saved: `add` waits for room then.
    """

    def __init__(
        self,
        storage: RunStorage | None,
        io: IoThread,
        fetch: Callable[[Any], Awaitable[Any]],
        *,
        keeps_all: bool,
    ) -> None:
        self._storage = storage
        self._io = io
        self._fetch = fetch
        self._keeps_all = keeps_all
        self._changed = threading.Condition()
        self._waiting: Reached | None = None
        self._saving: concurrent.futures.Future[None] | None = None
        self._error: BaseException | None = None
        self._hurries = threading.Event()

    def add(self, reached: Reached) -> None:
        """Have a state saved soon; of several, the latest one.

        Args:
            reached: after at least one round.

        Raises:
            StorageError: a state before could not be saved; this one is not tried.
            ValueMismatchError: it held a value that cannot be saved.
        """
        if self._storage is None:
            return
        with self._changed:
            while self._keeps_all and self._waiting is not None:
                self._changed.wait()
            self._raise_error()
            self._waiting = reached
            if self._saving is None:
                self._saving = self._io.submit(self._save_all(self._storage))

    def finish(
        self, reached: Reached, find_time_left: Callable[[], float | None]
    ) -> None:
        """Save the last state, and wait for it; log where it takes too long.

        Args:
            reached: the last state.
            find_time_left: returns for how many seconds to wait, None: as long as it
                takes. Where there is a limit, a state that waits gives way to this one.

        Raises:
            StorageError: it cannot be saved.
            ValueMismatchError: it holds a value that cannot be saved.
        """
        if self._storage is None or not reached.records:
            return
        self._hurries.set()
        with self._changed:
            while self._keeps_all and self._waiting is not None:
                self._changed.wait(_POLL_S)
                self._keeps_all = find_time_left() is None
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
            try:
                state = await self._fetch(reached.state)
                await storage.save(dataclasses.replace(reached, state=state))
            except Exception as error:  # noqa: BLE001 (raised by the next call)
                with self._changed:
                    self._error = error
            if not self._keeps_all:
                left = begun + SPACING_S - time.monotonic()
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

"""A run on disk or in an object store: what it is, and its latest rounds.

run_N        what the run is: written anew at every start, before the first round,
so that a place that cannot be written to is told at once
round_N      the state after N rounds, with the history so far
clients/     what clients keep, in segments: a round's state names those that it has
"""

import asyncio
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray_fed.errors as errors
from ray_fed.learning.history import RoundRecord
from ray_fed.learning.run_identity import check_same
from ray_fed.learning.saved_clients import SavedClientStates
from ray_fed.learning.saved_history import from_json, to_json
from ray_fed.learning.state_rows import FrozenRows
from ray_fed.program import FileProgramStateManager
from ray_fed.program.daemon_calls import call_on_daemon

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

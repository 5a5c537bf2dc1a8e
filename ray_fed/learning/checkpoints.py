"""Saves a run beside its rounds: one save at a time, one state that waits for it.

    round r   r+1   r+2   r+3   r+4          rounds that are done
    save r --------------> save r+3 ----->   what is saved meanwhile

A round that is done while another one is saved waits, and gives way to a later one: a
resume wants the latest. So saving takes a bounded share of the time of short rounds.
"""

import asyncio
import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray_fed.learning.loop_thread import IoThread
from ray_fed.learning.run_storage import Reached, RunStorage

_logger = logging.getLogger("ray_fed.learning.run")

SPACING_S = 0.5
"""From the begin of a save to that of the next: a save costs some 10 ms of processor
time, as much as a small round."""


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

    def finish(self, reached: Reached, timeout_s: float | None) -> None:
        """Save the last state, and wait for it; log where it takes too long.

        With a timeout, a state that waits gives way to this one.

        Raises:
            StorageError: it cannot be saved.
            ValueMismatchError: it holds a value that cannot be saved.
        """
        if self._storage is None or not reached.records:
            return
        self._hurries.set()
        with self._changed:
            self._keeps_all = self._keeps_all and timeout_s is None
            self._error = None  # the last state is tried in any case
        self.add(reached)
        with self._changed:
            saving = self._saving
        if saving is not None:
            _, late = concurrent.futures.wait([saving], timeout_s)
            if late:
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
                await asyncio.to_thread(self._hurries.wait, max(0.0, left))

    def _take(self) -> Reached | None:
        with self._changed:
            taken, self._waiting = self._waiting, None
            if taken is None:
                self._saving = None
            self._changed.notify_all()
            return taken

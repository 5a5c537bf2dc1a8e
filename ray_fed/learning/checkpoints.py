"""Saves a run beside its rounds: one save at a time, one state that waits for it.

    round r   r+1   r+2   r+3   r+4          rounds that are done
    save r --------------> save r+3 ----->   what is saved meanwhile

A round that is done while another one is saved waits, and gives way to a later one: a
resume wants the latest. So saving takes a bounded share of the time of short rounds.
"""

import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray_fed.learning.loop_thread import IoThread
from ray_fed.learning.run_storage import Reached, RunStorage
from ray_fed.program.daemon_calls import call_on_daemon

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

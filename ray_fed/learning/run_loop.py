"""The rounds of a run, one ahead of what follows each of them."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import ray_fed.errors as errors
from ray_fed.learning.batches import check_batches
from ray_fed.learning.callbacks.hooks import Callbacks
from ray_fed.learning.checkpoints import Checkpoints
from ray_fed.learning.cohorts import say_who
from ray_fed.learning.history import History, RoundRecord
from ray_fed.learning.interrupts import Interrupts, StopNow
from ray_fed.learning.loop_thread import WorkThread
from ray_fed.learning.metric_values import read_evaluation, read_metrics
from ray_fed.learning.process_calls import GoingRound, ProcessCalls
from ray_fed.learning.run_clients import RunClients
from ray_fed.learning.run_progress import RunProgress
from ray_fed.learning.run_spec import RunSpec
from ray_fed.learning.run_storage import Reached
from ray_fed.learning.state_rows import FrozenRows

Reason: TypeAlias = Literal["finished", "stopped early", "interrupted"]

_POLL_S = 0.1
"""How soon a signal is seen; what a round returns is seen at once."""

_FOLLOW_S, _LEAVE_S = 5.0, 9.0
"""After a signal: how long what follows the last round may take, and all of it."""

_SAVE_S = 0.5
"""What the last save has at least, however long ago the signal was."""


class RunLoop:
    """Runs the rounds that are left.

    Args:
        spec: of the run.
        calls: of its process; not owned.
        interrupts: end it.
        callbacks: are told.
        checkpoints: takes states.
        clients: hold what clients keep.
    """

    def __init__(
        self,
        spec: RunSpec,
        calls: ProcessCalls,
        interrupts: Interrupts,
        callbacks: Callbacks,
        checkpoints: Checkpoints,
        clients: RunClients,
    ) -> None:
        self._spec = spec
        self._calls = calls
        self._interrupts = interrupts
        self._callbacks = callbacks
        self._checkpoints = checkpoints
        self._clients = clients
        self._done = Reached(None)  # the last round that all that follows is done of
        self._first = 0
        self._progress: RunProgress | None = None
        self._lock = threading.Lock()
        self._is_left = False
        self._bytes_read = 0

    def begin(
        self, state: Any, records: Sequence[RoundRecord], first_round: int
    ) -> None:
        """Take what the run begins or goes on from.

        Args:
            state: plain, or as a call returned it.
            records: of rounds before.
            first_round: to run now.
        """
        self._done = Reached(state, tuple(records))
        self._first = first_round

    @property
    def num_rounds(self) -> int:
        """How many rounds the state has behind it."""
        records = self._done.records
        return records[-1].round_index + 1 if records else self._first

    @property
    def history(self) -> History:
        """All rounds that count so far."""
        evaluates = self._spec.evaluate is not None
        return History(self._done.records, evaluates=evaluates)

    def read_state(self) -> Any:
        """Return the state after these rounds, as plain values."""
        return self._calls.read(self._done.state)

    def put_back(self) -> None:
        """Let clients keep what they had after these rounds, if one more was done."""
        self._clients.put_back(self.num_rounds)

    def run(self) -> Reason:
        """Run all rounds that are left, and return why the run ended.

        Raises:
            CallbackError: a callback raised.
            Exception: what a round, `evaluate`, `stop` or the storage raised.
        """
        self._callbacks.start(self.history)
        if self._spec.shows_progress:
            self._progress = RunProgress(
                self._calls, self._spec.num_rounds, self.num_rounds
            )
        try:
            reason = self._run_rounds()
        except Exception:
            self._save_last()
            with contextlib.suppress(errors.CallbackError):  # the first error counts
                self._callbacks.end(self.history, "failed")
            raise
        else:
            self._save_last()
            self._callbacks.end(self.history, reason)
            return reason
        finally:
            if self._progress is not None:
                self._progress.close()

    def _run_rounds(self) -> Reason:
        if self._stops():
            return "stopped early"
        following: concurrent.futures.Future[bool] | None = None
        state = self._done.state
        with WorkThread(lambda: None) as work:
            for index in range(self.num_rounds, self._spec.num_rounds):
                started = time.monotonic()
                cohort = self._spec.sampler.sample(index)
                try:
                    going = self._call(state, cohort, index)
                    reason = self._wait(going, following)
                except Exception as error:
                    self._say_why(error, index, cohort, following)
                    raise
                if going is None or reason is not None:
                    return reason or self._leave(following)
                seconds = time.monotonic() - started
                kept = self._clients.put(going.kept)
                follow = functools.partial(self._follow, going, cohort, seconds, kept)
                following = work.submit(follow)
                state = going.state
            return self._wait(None, following) or "finished"

    def _call(self, state: Any, cohort: Sequence[int], index: int) -> GoingRound | None:
        """Call a round; None where a signal ended it."""
        try:
            clients = {client: self._spec.data[client] for client in cohort}
            check_batches(clients)
            taken = [*self._clients.take(index, cohort), list(clients.values())]
            return self._calls.next(state, taken, index)
        except StopNow:
            return None

    def _wait(
        self,
        going: GoingRound | None,
        following: concurrent.futures.Future[bool] | None,
    ) -> Reason | None:
        """Wait for a round and for what follows the one before; return why to end."""
        returned = set[concurrent.futures.Future[Any]]()
        if going is not None:
            returned = {f for f in (going.metrics, going.kept) if f is not None}
        waiting = {*returned, *([] if following is None else [following])}
        while waiting:
            if self._interrupts.since is not None:
                return self._leave(following)
            ended, waiting = concurrent.futures.wait(
                waiting, _POLL_S, concurrent.futures.FIRST_COMPLETED
            )
            if following in ended and following.result():
                return "stopped early"
            for done in ended & returned:
                done.result()
        return None

    def _say_why(
        self,
        error: Exception,
        index: int,
        cohort: Sequence[int],
        following: concurrent.futures.Future[bool] | None,
    ) -> None:
        """Say which round of which clients failed, if not what follows the last one."""
        if following is not None:
            concurrent.futures.wait([following])
            if following.exception() is error:
                return
        say_who(error, index, cohort, self._spec.data)

    def _leave(self, following: concurrent.futures.Future[bool] | None) -> Reason:
        """Give what follows the last round some time, once a signal came."""
        if following is None:
            return "interrupted"
        left = self._interrupts.find_time_left(_FOLLOW_S) or 0.0
        ended, _ = concurrent.futures.wait([following], max(0.0, left))
        with self._lock:
            self._is_left = True
        if ended and following.result():
            return "stopped early"
        return "interrupted"

    def _follow(
        self,
        going: GoingRound,
        cohort: Sequence[int],
        seconds: float,
        kept: FrozenRows | None,
    ) -> bool:
        """Do what follows a round; return whether the run is to end with it.

        Called on the work thread.
        """
        index = going.round_index
        self._calls.evaluating(index)
        record = self._record(going, cohort, seconds)
        with self._lock:
            if self._is_left:  # too late: the run was saved without this round
                return False
            records = (*self._done.records, record)
            self._done = Reached(going.state, records, kept)
        if self._progress is not None:
            self._progress.advance(record)
        try:
            self._callbacks.round(record)
            wanting = self._callbacks.wanting_state(record)
            if wanting:
                state = self._calls.read(going.state)
                self._callbacks.state(wanting, record, state)
            stops = self._stops()
        finally:
            if (index + 1) % self._spec.checkpoint_every == 0:
                self._checkpoints.add(self._done)
        return stops

    def _record(
        self, going: GoingRound, cohort: Sequence[int], seconds: float
    ) -> RoundRecord:
        index = going.round_index
        evaluation = None
        evaluate = self._spec.evaluate
        if evaluate is not None and (index + 1) % self._spec.evaluate_every == 0:
            try:
                evaluation = read_evaluation(evaluate(going.state))
            except Exception as error:
                error.add_note(f"`evaluate` raised it after round {index + 1}.")
                raise
        training = self._spec.add_epsilon(going.metrics.result(), index)
        record = RoundRecord(
            index,
            tuple(cohort),
            read_metrics(training, "training"),
            evaluation,
            seconds,
            bytes_read=self._count_read(),
            started_at=going.started_at,
        )
        report = going.take_report()
        if report is None:
            return record
        return dataclasses.replace(
            record,
            retries=report.num_retries,
            dropped=tuple(cohort[place] for place in report.dropped_clients),
            bytes_sent=report.bytes_broadcast + report.bytes_sliced,
            bytes_returned=report.bytes_returned,
            spans=tuple(tuple(span) for span in report.spans),
        )

    def _count_read(self) -> int:
        before, self._bytes_read = self._bytes_read, self._calls.bytes_read
        return self._bytes_read - before

    def _stops(self) -> bool:
        stop = self._spec.stop
        if stop is None or not self._done.records:
            return False
        return bool(stop(self.history))

    def _save_last(self) -> None:
        """Save the last round that counts, within the time that a signal leaves."""
        begun = time.monotonic()

        def find_time_left() -> float | None:
            left = self._interrupts.find_time_left(_LEAVE_S)
            if left is None:
                return None
            return max(left, begun + _SAVE_S - time.monotonic())

        self._checkpoints.finish(self._done, find_time_left)

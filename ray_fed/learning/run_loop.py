"""`learning.run`: a loop over rounds that is seen, saved, stopped and resumed.

The rounds of a run, one ahead of what follows each of them.

What a run begins with: who draws its cohorts, and what its clients kept.

How far a run is: a bar in a terminal or notebook, lines elsewhere.

The loop over rounds: seen, saved, stopped and resumed.

    main thread    round r ------> round r+1 -------------------------> round r+2
                          |                                        |
    work thread           +--> evaluate, callbacks, stop?, save    +--> the same

What follows a round overlaps the next one. That one counts only if the run goes on, so
that timing decides nothing.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.learning.accounting import check_noise
from ray_fed.learning.batches import check_batches
from ray_fed.learning.callbacks.hooks import Callbacks
from ray_fed.learning.checkpoints import (
    Checkpoints,
    Reached,
    RunStorage,
    SavedRun,
    describe_run,
)
from ray_fed.learning.checks import read_whole, read_whole_or_none
from ray_fed.learning.client_states import (
    ClientStates,
    FrozenRows,
    RunClients,
    SavedClientStates,
    check_client_states,
)
from ray_fed.learning.cohorts import CohortSampler, PrivateCohorts, say_who
from ray_fed.learning.history import History, RoundRecord, read_evaluation, read_metrics
from ray_fed.learning.loop_thread import Interrupts, IoThread, StopNow, WorkThread
from ray_fed.learning.process_calls import GoingRound, ProcessCalls, open_calls
from ray_fed.learning.processes import LearningProcess
from ray_fed.learning.run_spec import RunSpec, check_kinds, check_metrics, check_process
from ray_fed.observability import reprs
from ray_fed.observability.display import RoundProgress


def choose_sampler(
    process: LearningProcess,
    num_clients: int,
    cohort_size: int | None,
    seed: int,
    state: Any,
) -> CohortSampler | PrivateCohorts:
    """Return who draws the cohorts of a run.

    Args:
        process: that is run.
        num_clients: of the data.
        cohort_size: that is asked for.
        seed: of the cohorts.
        state: to go on from, if any.

    Raises:
        ConfigError: there are no clients, the process is for other clients or draws its
            own cohorts, or the state's rounds had other noise.
    """
    if not num_clients:
        raise errors.ConfigError("Expected clients in `data`, found none.")
    wanted = getattr(process, "num_clients", None)
    if wanted is not None and wanted != num_clients:
        raise errors.ConfigError(
            f"Expected data of {wanted} clients, which the process was built for"
            f" (`num_clients`), found {num_clients}: its steps or its noise would be of"
            " another size. Build it for these."
        )
    privacy = getattr(process, "privacy", None)
    check_noise(privacy, state)
    if privacy is None:
        size = num_clients if cohort_size is None else cohort_size
        return CohortSampler(num_clients, size, seed)
    if cohort_size is not None:
        raise errors.ConfigError(
            f"Expected no `cohort_size` for a process with noise, found {cohort_size}:"
            f" its cohorts are drawn as its guarantee assumes, {privacy}."
        )
    return PrivateCohorts(num_clients, privacy, seed)


def begin_clients(
    process: LearningProcess,
    num_clients: int,
    storage_path: str | os.PathLike[str] | None,
    given: ClientStates | None,
    state: Any,
) -> ClientStates | None:
    """Return what holds the values of clients of a run, none yet.

    Args:
        process: that is run.
        num_clients: of the data.
        storage_path: of the run.
        given: to begin with, if any.
        state: to go on from, if any.

    Raises:
        ConfigError: the process keeps nothing of clients, or what they kept is missing.
        ValueMismatchError: what is given is of another process or of other clients.
    """
    initial = getattr(process, "initial_client_state", None)
    if initial is None:
        if given is not None:
            raise errors.ConfigError(
                "Expected no `client_states`, found some for a process whose clients"
                " keep nothing between rounds."
            )
        return None
    if state is not None and given is None:
        raise errors.ConfigError(
            "Expected `client_states` beside `state`, found none: clients of this"
            " process go on from what they kept, as the server does."
        )
    if given is not None:
        check_client_states(given, initial, num_clients)
        if state is None and len(given.ids):
            raise errors.ConfigError(
                "Expected `state` beside `client_states`, found none: what clients kept"
                " goes on with the server's state of the same result. Pass"
                " `state=result.state`, too."
            )
    empty = ClientStates(initial) if given is None else given.emptied(initial)
    if storage_path is None:
        return empty
    folder = f"{os.fspath(storage_path)}/clients"
    return SavedClientStates(initial, folder, memory_bytes=empty.max_memory_bytes)


_MOST_NUMBERS, _MOST_OF_EACH = 3, 2


class RunProgress:
    """Shows rounds as they are done, on the standard error of this process.

    Args:
        calls: whose events are shown.
        num_rounds: of the whole run.
        done: rounds before a resume.
    """

    def __init__(self, calls: ProcessCalls, num_rounds: int, done: int) -> None:
        self._progress = RoundProgress(num_rounds, done=done)
        self._evaluated: RoundRecord | None = None
        calls.subscribe(self._progress)
        self._progress.say("")

    def advance(self, record: RoundRecord) -> None:
        """Show that a round is done, with the latest evaluation."""
        if record.evaluation is not None:
            self._evaluated = record
        self._progress.advance(show_metrics(record, self._evaluated))

    def close(self) -> None:
        """Leave what is shown as it is."""
        self._progress.__exit__()


def show_metrics(record: RoundRecord, evaluated: RoundRecord | None) -> str:
    """Return metrics of training and of evaluation, told apart, in a line.

    Args:
        record: of the round.
        evaluated: the last one that was evaluated.
    """
    training = _show(record, "training.", "")
    if evaluated is None:
        return "  ".join(training[:_MOST_NUMBERS])
    evaluation = _show(evaluated, "evaluation.", "evaluation ")[:_MOST_OF_EACH]
    if evaluated.round < record.round:
        evaluation.append(f"(round {evaluated.round})")
    return "  ".join([*training[:_MOST_OF_EACH], *evaluation])


def _show(record: RoundRecord, part: str, label: str) -> list[str]:
    """Return the metrics of a part, without counts."""
    return [
        f"{label}{name.removeprefix(part)} {reprs.show_number(value)}"
        for name, value in record.numbers().items()
        if name.startswith(part) and not name.endswith("num_examples")
    ]


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


_logger = logging.getLogger("ray_fed.learning.run")

Dataset = Sequence[Any]
"""What one client has: its batches, each of the model's `batch_type`."""

_OPEN_S = 5.0
"""After a signal: how long storage has to tell what is saved."""


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Where a run ended, and how it came there.

    Attributes:
        history: what its rounds were and did, those before a resume included.
        state: of the server, after the last of them, as plain values.
        reason: why it ended: "finished", "stopped early" or "interrupted".
        client_states: what clients kept, by their index in `data`; None where they keep
            nothing. With a `storage_path`, what memory has no room for is read there.
    """

    history: History
    state: Any = dataclasses.field(repr=False)
    reason: Reason
    client_states: ClientStates | None = None

    def _repr_html_(self) -> str:
        return f"<p>{self.reason}</p>{self.history._repr_html_()}"  # pyright: ignore[reportPrivateUsage]


@tracebacks.shorten
def run(
    process: LearningProcess,
    data: Sequence[Dataset],
    *,
    num_rounds: int,
    cohort_size: int | None = None,
    seed: int = 0,
    storage_path: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    num_to_keep: int | None = 3,
    evaluate: Callable[[Any], Mapping[str, Any]] | None = None,
    evaluate_every: int = 1,
    callbacks: Sequence[Any] = (),
    on_error: Literal["raise", "log"] = "raise",
    stop: Callable[[History], bool] | None = None,
    progress: bool = False,
    state: Any = None,
    client_states: ClientStates | None = None,
) -> TrainingResult:
    """Run rounds of a learning process in the default context.

    With a `storage_path`, what is saved there is resumed: state, history and random
    numbers, to the bits of a run that was never interrupted. On the main thread, the
    first SIGINT or SIGTERM saves the run and ends it; a second one leaves at once.

    In a context of ray_fed the state stays in the object store. It is read into this
    process to be saved, for callbacks that want it, and at the end.

    Args:
        process: such as `build_fed_avg` returns.
        data: each client's batches; only those of a cohort are read.
        num_rounds: of the whole run, those before a resume included; >= 0. A run that
            has more behind it runs none and returns all it has, with a warning.
        cohort_size: clients a round; None: all of them, or, for a process with noise,
            those that its guarantee assumes. Which ones they are depends on the seed
            and the round alone. The metrics of a process with noise have `epsilon`.
        seed: of the cohorts, >= 0.
        storage_path: a path, where `~` is the user's home, or a URI of fsspec, for this
            run alone; None saves nothing.
        checkpoint_every: rounds between two saves, >= 1. Rounds that end while another
            one is saved, or within half a second, give way to the latest of them. The
            end is always saved.
        num_to_keep: saved states to keep, >= 1; None keeps all, and rounds wait until
            each that is due is saved.
        evaluate: called with the state, returns metrics by name: numbers, arrays,
            tensors, text, or mappings, lists and tuples of these. On ray_fed's contexts
            the state holds references, which computations take as they are, and numpy
            reads.
        evaluate_every: rounds between two calls of `evaluate`, >= 1.
        callbacks: objects with `on_round(record)`, see `callbacks.Callback`; release
            managers of federated_language.
        on_error: whether what a callback raises ends the run, saved, or is logged.
        stop: called with the history after each round; true ends the run.
        progress: whether a bar shows the run in a terminal or notebook, or a line of
            the log does elsewhere.
        state: to go on from, such as that of another result; its `round_index` says
            how many rounds it has behind it. None: `process.initialize()`. What is
            saved at `storage_path` goes before it.
        client_states: of a process whose clients keep something, such as SCAFFOLD: what
            they begin with, by index in `data`, such as that of another result. The run
            puts into a copy, with the same bound of memory. None: nothing was kept yet.

    Returns:
        The history, the last state, and why the run ended.

    Raises:
        ConfigError: an argument is of another kind or out of its range, a metric is
            asked for that the process does not have, the process is for another number
            of clients, rounds of `state` had other noise, or what is saved is of
            another run.
        ValueMismatchError: inputs and labels of a batch, in a list, have different
            numbers of rows; a metric is of a kind that a history does not keep; or
            `client_states` are of another process or of clients that `data` lacks.
        StorageError: `storage_path` cannot be read or written, or does not answer in
            time as a signal ends the run.
        StateFormatError: another version of ray_fed wrote what is saved.
        SavedStateError: all that is saved is damaged.
        CallbackError: a callback raised.
        Exception: what a round or `evaluate` raised. A round counts clients by their
            place in the cohort; a note says which of `data` these are.
    """
    check_process(process)
    check_kinds(
        {
            "data": data,
            "storage_path": storage_path,
            "evaluate": evaluate,
            "callbacks": callbacks,
            "on_error": on_error,
            "stop": stop,
            "progress": progress,
        }
    )
    seed = read_whole("seed", seed, 0)
    cohort_size = read_whole_or_none("cohort_size", cohort_size, 1)
    num_to_keep = read_whole_or_none("num_to_keep", num_to_keep, 1)
    check_metrics([stop, *callbacks], process, evaluates=evaluate is not None)
    spec = RunSpec(
        data=data,
        sampler=choose_sampler(process, len(data), cohort_size, seed, state),
        num_rounds=read_whole("num_rounds", num_rounds, 0),
        checkpoint_every=read_whole("checkpoint_every", checkpoint_every, 1),
        evaluate=evaluate,
        evaluate_every=read_whole("evaluate_every", evaluate_every, 1),
        stop=stop,
        shows_progress=progress,
    )
    told = Callbacks(callbacks, logs=on_error == "log")
    clients = begin_clients(process, len(data), storage_path, client_states, state)
    saved_clients = clients if isinstance(clients, SavedClientStates) else None
    storage = (
        None
        if storage_path is None
        else RunStorage(storage_path, num_to_keep, saved_clients)
    )
    with IoThread() as io, Interrupts() as interrupts:
        calls = open_calls(process, io, interrupts)
        checkpoints = Checkpoints(
            storage, io, calls.fetch, keeps_all=num_to_keep is None
        )
        loop = RunLoop(spec, calls, interrupts, told, checkpoints, RunClients(clients))
        try:
            initial = calls.initialize()
            saved = SavedRun()
            if storage is not None:
                opening = storage.open(
                    describe_run(process, spec), initial, calls.first_number
                )
                saved = _wait_for(io.submit(opening), interrupts, storage_path)
            if clients is not None and client_states is not None and not saved.records:
                clients.fill_from(client_states)
            _begin(
                loop,
                calls,
                saved,
                initial if state is None else state,
                state,
                spec.num_rounds,
            )
            reason = loop.run()
            loop.put_back()
            return TrainingResult(loop.history, loop.read_state(), reason, clients)
        finally:
            calls.close(loop.num_rounds)


def _wait_for(
    opening: concurrent.futures.Future[SavedRun], interrupts: Interrupts, where: object
) -> SavedRun:
    """Return what is saved, unless a signal came and storage does not answer."""
    try:
        return interrupts.wait_for(opening, _OPEN_S)
    except StopNow:
        raise errors.StorageError(
            f"Expected to find what is saved in `{where}`, found no answer in"
            f" {_OPEN_S:g} seconds after a signal: see that the place can be reached,"
            " and run again. No round was run, and what is saved stays."
        ) from None


def _begin(
    loop: RunLoop,
    calls: ProcessCalls,
    saved: SavedRun,
    initial: Any,
    given: Any,
    num_rounds: int,
) -> None:
    """Begin where the saved run was, else where the given state was."""
    if saved.first_number is not None:
        calls.resume(saved.first_number)
    if saved.records:
        loop.begin(saved.state, saved.records, saved.records[-1].round_index + 1)
    else:
        loop.begin(initial, (), int(getattr(given, "round_index", 0)))
    if loop.num_rounds > num_rounds:
        _logger.warning(
            "The run has %d rounds behind it, more than `num_rounds`, which is %d: it"
            " runs no other, and returns what it has.",
            loop.num_rounds,
            num_rounds,
        )

"""The loop over rounds: seen, saved, stopped and resumed.

    main thread    round r ------> round r+1 -------------------------> round r+2
                          |                                        |
    work thread           +--> evaluate, callbacks, stop?, save    +--> the same

What follows a round overlaps the next one. That one counts only if the run goes on, so
that timing decides nothing.
"""

import concurrent.futures
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.learning.callbacks.hooks import Callbacks
from ray_fed.learning.checkpoints import Checkpoints
from ray_fed.learning.checks import read_whole, read_whole_or_none
from ray_fed.learning.client_states import ClientStates
from ray_fed.learning.history import History
from ray_fed.learning.interrupts import Interrupts, StopNow
from ray_fed.learning.loop_thread import IoThread
from ray_fed.learning.metric_check import check_metrics
from ray_fed.learning.process_calls import ProcessCalls
from ray_fed.learning.processes import LearningProcess
from ray_fed.learning.referenced_calls import open_calls
from ray_fed.learning.run_beginning import begin_clients, choose_sampler
from ray_fed.learning.run_checks import check_kinds, check_process
from ray_fed.learning.run_clients import RunClients
from ray_fed.learning.run_identity import describe_run
from ray_fed.learning.run_loop import Reason, RunLoop
from ray_fed.learning.run_spec import RunSpec
from ray_fed.learning.run_storage import RunStorage, SavedRun
from ray_fed.learning.saved_clients import SavedClientStates

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
def run(  # noqa: PLR0913 (keywords of one loop; none belongs to another)
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

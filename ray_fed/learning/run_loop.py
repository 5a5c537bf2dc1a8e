"""`learning.run`: the loop over rounds, which shows, saves, stops and resumes a run.

    main thread    round r -> read r+1 ... r+1 begins -> read r+2 ... r+2 begins
                          |                          |
    work thread           +--> evaluate, callbacks,  +--> the same
                               stop?, save

The work after a round overlaps the next round. The work before a round does, too: round
r+2 is called while round r+1 runs, and waits only for the state that r+1 returns. Round
r+2 is called once the run is known to continue after round r. Its result is used only
if the run also continues after round r+1, so results do not depend on timing.
Arguments, and the names of metrics, are checked before the first round.
"""

# pyright: reportPrivateUsage=false

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

import federated_language as fl
import numpy as np

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.language import trees
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.accounting import SampledGaussian, TreeGaussian, check_noise
from ray_fed.learning.batches import (
    BatchCaster,
    check_batches,
    check_clients,
    detach,
    find_nan,
)
from ray_fed.learning.callbacks import Callbacks
from ray_fed.learning.candidates import (
    build_candidate_evaluation,
    is_adaptive,
    read_columns,
    to_columns,
)
from ray_fed.learning.checkpoints import (
    Checkpoints,
    Reached,
    RunStorage,
)
from ray_fed.learning.checks import check_number, read_whole_or_none
from ray_fed.learning.client_states import (
    ClientId,
    ClientStates,
    Rows,
    RunClients,
    SavedClientStates,
    check_client_states,
)
from ray_fed.learning.devices import Devices
from ray_fed.learning.fed_eval import choose_evaluation
from ray_fed.learning.history import (
    History,
    RoundRecord,
    name_elements,
    read_evaluation,
    read_training,
    stack_metrics,
)
from ray_fed.learning.processes import LearningProcess
from ray_fed.learning.rounds_in_flight import (
    GoingRound,
    Interrupts,
    ProcessCalls,
    StopNow,
    WorkThread,
    open_calls,
)
from ray_fed.learning.run_fingerprint import (
    describe_data,
    describe_process,
    describe_settings,
    describe_state,
    digest_start,
    with_ids,
)
from ray_fed.learning.schedules import (
    Buffered,
    BufferedClock,
    LiveStates,
    Step,
    Synchronous,
    SynchronousClock,
    open_clock,
)
from ray_fed.observability import reprs
from ray_fed.observability.progress import RoundProgress
from ray_fed.program import (
    AdaptiveSampler,
    AvailabilitySampler,
    ClientData,
    ClientMetrics,
    PoissonSampler,
    Sampler,
    UniformSampler,
)
from ray_fed.program.descriptions import describe_part
from ray_fed.program.samplers import check_cohort

_logger = logging.getLogger(__name__)

_MAX_NAMED = 10  # clients of a cohort that a note lists


@dataclasses.dataclass(frozen=True)
class PrivateSampler:
    """Draws the clients of each round as the accountant of a process assumes it.

    With the noise of `dp_mean`, each client takes part independently with the same
    probability, and a round may have no clients. With the noise of `dp_ftrl_mean`, each
    client takes part once in each pass over all clients.

    Attributes:
        privacy: Guarantee of the process, which decides the size of cohorts.
        seed: Seed of the cohorts, >= 0.
    """

    privacy: SampledGaussian | TreeGaussian
    seed: int

    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        """Draw the clients of a round, see `program.Sampler`. `k` is not used."""
        del k
        if isinstance(self.privacy, SampledGaussian):
            sampler = PoissonSampler(self.privacy.sampling_probability, self.seed)
            return sampler.sample(round_index, num_clients, None)
        index, step = divmod(round_index, self.privacy.rounds_per_pass)
        order = np.random.default_rng([self.seed, index]).permutation(num_clients)
        parts = np.array_split(order, self.privacy.rounds_per_pass)
        return sorted(parts[step].tolist())


def say_who(
    error: BaseException, round_index: int, cohort: Sequence[int], data: Any
) -> None:
    """Add a note to an error: the round, and the client that failed or the cohort."""
    place = getattr(getattr(error, "location", None), "client_index", None)
    ids: Sequence[object] = getattr(data, "ids", ())
    if place is None:
        shown = ", ".join(repr(ids[i]) if ids else str(i) for i in cohort[:_MAX_NAMED])
        others = f" and {len(cohort) - _MAX_NAMED} others" * (len(cohort) > _MAX_NAMED)
        who = f"cohort is, in order, `data[i]` for i in {shown}{others}"
        if ids:
            who = f"cohort is, in order, the clients with the ids {shown}{others}"
    elif ids:
        who = f"client is the one with the id {ids[cohort[place]]!r}"
    else:
        who = f"client at position {place} of the cohort is `data[{cohort[place]}]`"
    nan = ""
    if place is not None and "NaN" in str(error):
        nan = find_nan(data[cohort[place]])
    error.add_note(f"In round {round_index + 1} of the run, the {who}.{nan}")


def _is_function(value: object) -> bool:
    return value is None or callable(value)


def _is_sequence(value: object) -> bool:
    has_places = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return has_places and not isinstance(value, Mapping)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "data": (_is_sequence, "the batches of each client, a sequence or a dictionary,"),
    "sampler": (
        lambda value: (
            value is None
            or callable(getattr(value, "sample", None))
            or is_adaptive(value)
        ),
        "an object with a method `sample`, a `program.AdaptiveSampler` or None",
    ),
    "cast": (lambda value: value is None or isinstance(value, bool), "a bool or None"),
    "storage_path": (
        lambda value: value is None or isinstance(value, str | os.PathLike),
        "a path, a URI or None",
    ),
    "evaluate": (_is_function, "a function of the state or None"),
    "callbacks": (
        lambda value: isinstance(value, Sequence) and not isinstance(value, str),
        "a list of callbacks, such as `[callback]`,",
    ),
    "on_error": (lambda value: value in ("raise", "log"), '"raise" or "log"'),
    "on_signal": (lambda value: value in ("raise", "return"), '"raise" or "return"'),
    "stop": (_is_function, "a function of the history or None"),
    "progress": (lambda value: isinstance(value, bool), "True or False"),
    "devices": (
        lambda value: value is None or isinstance(value, Devices),
        "`learning.devices.Devices` or None",
    ),
    "schedule": (
        lambda value: value is None or isinstance(value, Synchronous | Buffered),
        "`learning.Synchronous`, `learning.Buffered` or None",
    ),
}


def check_kinds(arguments: Mapping[str, object]) -> None:
    """Raise ConfigError unless each argument of `run` has a type that it accepts."""
    for name, value in arguments.items():
        is_right, kind = _KINDS[name]
        if not is_right(value):
            raise errors.ConfigError(
                f"Expected {kind} as `{name}`, found {errors.describe(value)}."
            )


def check_process(process: Any) -> None:
    """Raise ConfigError unless a process trains: its `next` returns a state first."""
    if not hasattr(process, "initialize") or not hasattr(process, "next"):
        raise errors.ConfigError(
            "Expected a learning process, such as `build_fed_avg` returns, as"
            f" `process`, found {errors.describe(process)}."
        )
    if not isinstance(process.next, fl.framework.Computation):
        return
    signature = process.next.type_signature
    state = process.initialize.type_signature.result
    result = signature.result
    returned = result[0] if isinstance(result, fl.StructType) and result else None
    if returned is None or not state.is_assignable_from(returned):
        raise errors.ConfigError(
            "Expected a learning process whose `next` returns the new state first, a"
            f" `{reprs.shorten(str(state))}`, as `process`, found one that returns"
            f" `{reprs.shorten(str(result))}`: an evaluation is called in a function"
            " that is passed as `evaluate`."
        )


def check_metrics(
    askers: Sequence[Any], process: LearningProcess, evaluation: Any
) -> None:
    """Raise ConfigError if a callback or `stop` names a metric that no round has.

    `askers` are the callbacks and the `stop` function. Their attribute `monitor`, if
    they have it, is the name of a metric. Nothing is checked if the names are not
    known.
    """
    *_, metrics = getattr(_result_type(process), "items", lambda: [("", None)])()
    trained = _metric_names(metrics[1])
    evaluated = _metric_names(_result_type(evaluation))
    if trained is None:
        return
    trained += ["epsilon"] * (process.privacy is not None)
    names = [f"training.{name}" for name in trained]
    names += [f"evaluation.{name}" for name in evaluated or ()]
    legal = {*trained, *(evaluated or ()), *names}
    may_be_evaluated = evaluation is not None and evaluated is None
    for asker in askers:
        metric = getattr(asker, "monitor", None)
        if not isinstance(metric, str) or metric in legal:
            continue
        if metric.startswith("training.") or not may_be_evaluated:
            shown = trained if evaluation is None else names
            raise errors.ConfigError(
                f"Expected one of the metrics {shown} for `{type(asker).__name__}`,"
                f" found `{metric}`: name one of these, or pass an `evaluate` that"
                " returns it."
            )


def _result_type(process: Any) -> Any:
    computed = getattr(getattr(process, "next", None), "type_signature", None)
    return getattr(computed, "result", None)


def _metric_names(metrics: Any) -> list[str] | None:
    if isinstance(metrics, fl.FederatedType) and metrics.placement == fl.SERVER:
        members = metrics.member
        return _names(members) if isinstance(members, fl.StructType) else None
    return None


def _names(type_spec: fl.StructType) -> list[str]:
    names: list[str] = []
    for path, leaf in trees.named_leaves(type_spec):
        name, shape = "/".join(map(str, path)), getattr(leaf, "shape", None) or ()
        names += [name] if None in shape else name_elements(name, shape)
    return names


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """The arguments of `learning.run` that the rounds need; `run` describes them.

    Attributes:
        data: Data of each client, by index.
        caster: Function that casts a client's batches to the model's dtypes.
        candidate_evaluation: Evaluation of clients for an adaptive sampler, or None for
            another sampler.
        drawn: One integer for each client that was drawn so far. Records of all rounds
            share it, because a round of 1,000 clients would otherwise keep 36 kB of
            integers.
    """

    data: Sequence[Any]
    caster: Callable[[Any], Any]
    sampler: Sampler | AdaptiveSampler
    cohort_size: int | None
    seed: int
    num_rounds: int
    checkpoint_every: int | None
    evaluate: Callable[[Any], Mapping[str, Any]] | None
    evaluate_every: int
    stop: Callable[[History], bool] | None
    shows_progress: bool
    candidate_evaluation: LearningProcess | None = None
    devices: Devices | None = None
    schedule: Synchronous | Buffered = dataclasses.field(default_factory=Synchronous)
    drawn: dict[int, int] = dataclasses.field(default_factory=dict[int, int])

    def draw(
        self,
        round_index: int,
        size: int | None,
        seen: Mapping[int, ClientMetrics] | None = None,
    ) -> list[int]:
        """Return the indices of the clients that the sampler draws.

        They are a cohort, or the candidates of an adaptive sampler. `round_index`
        cohorts were drawn before. `seen` has the last metrics of clients, for an
        adaptive sampler. Raises ConfigError if the sampler returns a client twice, or
        another value.
        """
        sampler: Any = self.sampler
        given = round_index, len(self.data), size
        if self.candidate_evaluation is None:
            return self._check(sampler.sample(*given))
        return self._check(sampler.propose(*given, seen))

    def choose(
        self, round_index: int, candidates: Mapping[int, ClientMetrics]
    ) -> list[int]:
        """Return the cohort that an adaptive sampler chooses by `candidates`' metrics.

        Raises ConfigError as `draw` does.
        """
        sampler: Any = self.sampler
        return self._check(sampler.choose(round_index, self.cohort_size, candidates))

    def _check(self, drawn: Any) -> list[int]:
        cohort = check_cohort(self.sampler, drawn, len(self.data))
        return [self.drawn.setdefault(client, client) for client in cohort]

    def read(self, client: int) -> Any:
        """Return the batches of a client, by its index, with the model's dtypes."""
        batches = self.data[client]
        is_lazy = not isinstance(self.data, list | tuple | ClientData)
        return self.caster(detach(batches) if is_lazy else batches)

    def describe_clock(self) -> dict[str, Any]:
        """Return the facts about the simulated clock that a resume compares."""
        if self.devices is None:
            return {}
        return {
            **describe_part("devices", self.devices),
            **describe_part("schedule", self.schedule),
        }

    def describe_cohorts(self) -> dict[str, Any]:
        """Return the facts about the cohorts that a resume compares."""
        size: Any = len(self.data) if self.cohort_size is None else self.cohort_size
        described: dict[str, Any] = {"seed": self.seed}
        if isinstance(self.sampler, PrivateSampler):
            size = f"as for {self.sampler.privacy}"
        elif self.sampler != UniformSampler(self.seed):
            described |= describe_part("sampler", self.sampler)
        return described | {"cohort_size": size}

    def add_epsilon(self, training: Any, round_index: int) -> Any:
        """Return a round's metrics, with the epsilon spent so far if there is noise."""
        if not isinstance(self.sampler, PrivateSampler):
            return training
        return {**training, "epsilon": self.sampler.privacy.epsilon(round_index + 1)}


def describe_run(process: LearningProcess, spec: RunSpec) -> dict[str, Any]:
    """Return a run's fingerprint for a resume, without the server's initial state."""
    return {
        **spec.describe_cohorts(),
        **spec.describe_clock(),
        **describe_data(spec.data),
        **describe_process(process),
        "evaluates": None if spec.evaluate is None else spec.evaluate_every,
        **describe_settings(),
    }


def choose_sampler(
    process: LearningProcess,
    num_clients: int,
    cohort_size: int | None,
    seed: int,
    given: Sampler | AdaptiveSampler | None,
    state: Any,
) -> Sampler | AdaptiveSampler:
    """Return the sampler that draws the cohorts of a run.

    `given` is the user's sampler, or None. Raises ConfigError if there are no clients,
    if the process needs another number of clients or draws its own cohorts, or if the
    rounds of `state` had other noise.
    """
    if not num_clients:
        raise errors.ConfigError("Expected clients in `data`, found none.")
    wanted = getattr(process, "num_clients", None)
    if wanted is not None and wanted != num_clients:
        raise errors.ConfigError(
            f"Expected data of {wanted} clients, which the process was built for"
            f" (`num_clients`), found {num_clients}: the size of its steps or its noise"
            f" depends on this. Build it with `num_clients={num_clients}`."
        )
    privacy = getattr(process, "privacy", None)
    check_noise(privacy, state)
    for name, value in {"cohort_size": cohort_size, "sampler": given}.items():
        if privacy is not None and value is not None:
            raise errors.ConfigError(
                f"Expected no `{name}` for a process with noise, found {value}:"
                f" its cohorts are drawn as its guarantee assumes, {privacy}."
            )
    if privacy is not None:
        return PrivateSampler(privacy, seed)
    if given is not None:
        return given
    if cohort_size is not None:
        read_whole("cohort_size", cohort_size, 1, num_clients)
    return UniformSampler(seed)


def begin_clients(
    process: LearningProcess,
    data: Sequence[Any],
    storage_path: str | os.PathLike[str] | None,
    given: ClientStates | None,
    state: Any,
) -> ClientStates | None:
    """Return the empty store of the values that clients keep in a run.

    `given` are the user's `client_states`, or None. The result is None if clients of
    the process keep nothing. Raises ConfigError if only one of `state` and
    `client_states` is passed, or if clients keep nothing, and ValueMismatchError if the
    values belong to another process or to other clients.
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
            " process continue from their values. Pass"
            " `client_states=result.client_states`, too."
        )
    ids: Sequence[Any] = getattr(data, "ids", range(len(data)))
    if given is not None:
        check_client_states(given, initial, ids)
        if state is None and len(given.ids):
            raise errors.ConfigError(
                "Expected `state` beside `client_states`, found none: the values of"
                " clients belong to the server's state of the same result. Pass"
                " `state=result.state`, too."
            )
    empty = ClientStates(initial) if given is None else given._emptied(initial)
    if storage_path is not None:
        path, memory_bytes = os.fspath(storage_path), empty.max_memory_bytes
        empty = SavedClientStates(initial, path, memory_bytes=memory_bytes)
    empty._limit_to(ids)
    return empty


_MOST_NUMBERS, _MOST_OF_EACH = 3, 2


def show_metrics(record: RoundRecord, evaluated: RoundRecord | None) -> str:
    """Return the metrics of a round, and of the last evaluated round, in one line."""
    training = _show(record, "training.", "")
    if evaluated is None:
        return "  ".join(training[:_MOST_NUMBERS])
    evaluation = _show(evaluated, "evaluation.", "evaluation ")[:_MOST_OF_EACH]
    if evaluated.round < record.round:
        evaluation.append(f"(round {evaluated.round})")
    return "  ".join([*training[:_MOST_OF_EACH], *evaluation])


def _show(record: RoundRecord, part: str, label: str) -> list[str]:
    return [
        f"{label}{name.removeprefix(part)} {reprs.show_number(value)}"
        for name, value in record.numbers().items()
        if name.startswith(part) and not name.endswith("num_examples")
    ]


Reason: TypeAlias = Literal["finished", "stopped early", "interrupted"]

_POLL_S = 0.1
"""Seconds after which the loop looks again for a signal."""

_FOLLOW_S, _LEAVE_S = 5.0, 9.0
"""Seconds from a signal: the most that the work after the last round takes, and the
most that the whole end of the run takes."""

_SAVE_S = 0.5
"""Least seconds for the last save, however long ago the signal was."""


class RunLoop:
    """Runs the remaining rounds of a run.

    The caller closes `calls` and `checkpoints`. `work` is the thread for the work after
    each round. `clock` is the simulated clock of `devices`, or None.
    """

    def __init__(
        self,
        spec: RunSpec,
        calls: ProcessCalls,
        interrupts: Interrupts,
        callbacks: Callbacks,
        checkpoints: Checkpoints,
        clients: RunClients,
        work: WorkThread,
        clock: SynchronousClock | BufferedClock | None = None,
    ) -> None:
        self._work = work
        self._clock = clock
        self._live = LiveStates()
        self._spec = spec
        self._calls = calls
        self._interrupts = interrupts
        self._callbacks = callbacks
        self._checkpoints = checkpoints
        self._clients = clients
        # The last round whose evaluation, callbacks and stop are done.
        self._done = Reached(None, self._no_rounds())
        self._first = 0
        self._progress: RoundProgress | None = None
        self._evaluated: RoundRecord | None = None  # the last record with an evaluation
        self._lock = threading.Lock()
        self._is_left = False
        self._bytes_read = 0
        self._changed: dict[ClientId, bytes] = {}  # since a state was to be saved
        self._seen: dict[int, ClientMetrics] = {}  # for an adaptive sampler

    def _no_rounds(self) -> History:
        return History(evaluates=self._spec.evaluate is not None)

    def begin(self, saved: Reached | None, initial: Any, given: Any) -> None:
        """Begin with the saved run, or else the user's state `given`, or `initial`."""
        self._bytes_read = self._calls.bytes_read
        state = initial if given is None else given
        self._done = Reached(state, self._no_rounds())
        self._first = int(getattr(given, "round_index", 0))
        if saved is not None:
            history = History(saved.history, evaluates=self._spec.evaluate is not None)
            self._done = dataclasses.replace(saved, history=history)
            for record in history:
                if record.candidates is not None:
                    self._seen |= read_columns(record.round_index, record.candidates)
            self._live.held = saved.live
        if self._clock is not None:
            self._clock.begin(self.num_rounds, self._done.clock)
        if self.num_rounds > self._spec.num_rounds:
            _logger.warning(
                "The run has %d rounds behind it, more than `num_rounds`, which is %d:"
                " no other round is run, and the result has all saved rounds.",
                self.num_rounds,
                self._spec.num_rounds,
            )

    @property
    def num_rounds(self) -> int:
        """Number of rounds that led to the current state."""
        history = self._done.history
        return history[-1].round if history else self._first

    @property
    def history(self) -> History:
        """All rounds of the run that are complete."""
        return self._done.history

    def read_state(self) -> Any:
        """Return the state after the rounds of `history`, as plain values."""
        return self._calls.read(self._done.state)

    def run(self) -> Reason:
        """Run the remaining rounds, and return why the run ended.

        Raises:
            CallbackError: A callback raised.
            Exception: An error of a round, of `evaluate`, of `stop` or of the storage.
        """
        self._callbacks.start(self.history)
        if self._spec.shows_progress:
            self._progress = RoundProgress(self._spec.num_rounds, done=self.num_rounds)
            self._calls.subscribe(self._progress)
            self._progress.say("")
        try:
            reason = self._run_rounds()
        except BaseException as error:
            # A second signal leaves at once.
            if isinstance(error, Exception) or self._interrupts.since is None:
                self._save_last()
                why = "failed" if isinstance(error, Exception) else "interrupted"
                with contextlib.suppress(errors.CallbackError):  # the first one counts
                    self._callbacks.end(self.history, why)
            raise
        else:
            self._save_last()
            if self._interrupts.since is not None:  # while the last round was saved
                reason = "interrupted"
            self._callbacks.end(self.history, reason)
            self._clients.put_back(self.num_rounds)
            return reason
        finally:
            if self._progress is not None:
                self._progress.__exit__()

    def _run_rounds(self) -> Reason:
        if self._stops():
            return "stopped early"
        following: concurrent.futures.Future[bool] | None = None
        state, going = self._done.state, None
        for index in range(self.num_rounds, self._spec.num_rounds):
            started, started_at = time.monotonic(), time.time()
            going, ahead = going or self._call(state, index), list[GoingRound | None]()
            try:
                reason = self._wait(going, following, ahead)
            except Exception as error:
                is_of_round = following is None or following.exception() is not error
                if is_of_round and going is not None and going.cohort:
                    say_who(error, index, going.cohort, self._spec.data)
                raise
            if going is None or reason is not None:
                return reason or self._leave(following)
            spent = started_at, time.monotonic() - started
            kept = self._clients.put(going.kept)
            follow = functools.partial(self._follow, going, spent, kept)
            following = self._work.submit(follow)
            state, going = going.state, ahead[0] if ahead else None
        return self._wait(None, following, []) or "finished"

    def _call(self, state: Any, index: int) -> GoingRound | None:
        """Call a round, which may still run afterwards.

        `state` may be the reference to a later result. If the call fails, the round's
        `metrics` raise the error. The result is None if a signal ended the call.
        """
        cohort: Sequence[int] = ()
        step: Step | None = None
        try:
            with self._interrupts.breaking():  # samplers and data are user code
                candidates = None
                if self._clock is None:
                    size = self._spec.cohort_size
                    cohort = self._spec.draw(index, size, self._seen)
                    if self._spec.candidate_evaluation is not None:
                        candidates = self._evaluate(cohort, state, index)
                        seen = read_columns(index, candidates)
                        cohort = self._spec.choose(index, seen)
                        self._seen |= seen
                else:
                    step = self._clock.advance(index)
                    cohort = step.clients
                clients = self._read(cohort)
            told = [] if step is None else self._live.tell(index, state, step)
            # One client may have several updates in a step.
            batches = [clients[client] for client in cohort]
            taken = [*self._clients.take(index, cohort), *told, batches]
            going = self._calls.next(state, taken, index, cohort)
            return dataclasses.replace(
                going, candidates=candidates, step=step, live=self._live.held
            )
        except StopNow:
            return None
        except Exception as error:  # noqa: BLE001 (raised when it is the round's turn)
            failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
            failed.set_exception(error)
            return GoingRound(index, cohort, None, failed, None, None, lambda: None)

    def _read(self, cohort: Sequence[int]) -> dict[int, Any]:
        clients = {client: self._spec.read(client) for client in cohort}
        check_batches(clients, getattr(self._spec.data, "ids", ()))
        return clients

    def _evaluate(
        self, candidates: Sequence[int], state: Any, index: int
    ) -> Mapping[str, tuple[float, ...]]:
        found: Any = []
        if candidates:
            data = list(self._read(candidates).values())
            evaluation: Any = self._spec.candidate_evaluation
            found = self._calls.evaluate(evaluation.next, (state, data), index)
        return to_columns(candidates, found)

    def _wait(
        self,
        going: GoingRound | None,
        following: concurrent.futures.Future[bool] | None,
        ahead: list[GoingRound | None],
    ) -> Reason | None:
        """Wait for a round, and for the work after the previous round.

        Return why the run ends, or None if it continues. The result of `following`, the
        work after the previous round, is whether the run ends. An error of the round is
        raised only if the run continues after the previous round. Once only the end of
        this round is missing, the next round is called and appended to the empty list
        `ahead`.
        """
        returned: list[concurrent.futures.Future[Any] | None] = []
        if going is not None:
            returned = [going.metrics, going.kept, going.client_metrics]
        waiting = {f for f in (*returned, following) if f is not None}
        while waiting:
            if self._interrupts.since is not None:
                return self._leave(following)
            goes_on = not ahead and following not in waiting
            if going is not None and goes_on and self._may_call_after(going):
                ahead.append(self._call(going.state, going.round_index + 1))
            ended, waiting = concurrent.futures.wait(
                waiting, _POLL_S, concurrent.futures.FIRST_COMPLETED
            )
            if following in ended and following.result():
                return "stopped early"
        for each in returned:
            if each is not None:
                each.result()
        return None

    def _may_call_after(self, going: GoingRound) -> bool:
        has_more = going.round_index + 1 < self._spec.num_rounds
        # An adaptive sampler waits for the weights after this round.
        has_more = has_more and self._spec.candidate_evaluation is None
        is_open = going.kept is None and not going.metrics.done()
        return has_more and is_open and self._calls.takes_ahead

    def _leave(self, following: concurrent.futures.Future[bool] | None) -> Reason:
        """Give the work after the last round some time to end, after a signal."""
        if following is None:
            return "interrupted"
        left = self._interrupts.find_time_left(_FOLLOW_S) or 0.0
        ended, _ = concurrent.futures.wait([following], max(0.0, left))
        with self._lock:
            self._is_left = True
        if ended:
            following.result()
        return "interrupted"

    def _follow(
        self,
        going: GoingRound,
        spent: tuple[float, float],
        kept: Rows,
    ) -> bool:
        """Do the work after a round, and return whether the run ends with it.

        This is called on the work thread. `spent` has the time at which the round's
        turn came, in seconds since 1970, and the seconds that the round took. `kept`
        has the changed values of clients.
        """
        index = going.round_index
        self._calls.evaluating(index)
        record = self._record(going, *spent)
        with self._lock:
            if self._is_left:  # too late, because the run was saved without it
                return False
            history = self._done.history.with_round(record)
            self._changed |= kept
            clock = None if going.step is None else going.step.saved
            self._done = Reached(going.state, history, self._changed, clock, going.live)
        if record.evaluation is not None:
            self._evaluated = record
        if self._progress is not None:
            self._progress.advance(show_metrics(record, self._evaluated))
        try:
            self._callbacks.round(record)
            wanting = self._callbacks.wanting_state(record)
            if wanting:
                state = self._calls.read(going.state)
                self._callbacks.state(wanting, record, state)
            stops = self._stops()
        finally:
            is_due = (index + 1) % (self._spec.checkpoint_every or 1) == 0
            if is_due or self._clients.is_large(self._changed):
                self._changed = {}
                self._checkpoints.add(self._done)
        return stops

    def _record(
        self, going: GoingRound, started_at: float, seconds: float
    ) -> RoundRecord:
        index, cohort = going.round_index, going.cohort
        evaluation = None
        evaluate = self._spec.evaluate
        if evaluate is not None and (index + 1) % self._spec.evaluate_every == 0:
            try:
                evaluation = read_evaluation(evaluate(going.state))
            except Exception as error:
                error.add_note(f"`evaluate` raised it after round {index + 1}.")
                raise
        training = self._spec.add_epsilon(going.metrics.result(), index)
        report = going.take_report()
        dropped = () if report is None else report.dropped_clients
        moved = self._calls.client_bytes
        own = going.client_metrics
        step = going.step
        asked, decided = len(cohort), dict[str, Any](clients=tuple(cohort))
        if step is not None:
            asked, decided = step.num_asked, step.report()
        return RoundRecord(
            index,
            **decided,
            training=read_training(training),
            evaluation=evaluation,
            seconds=seconds,
            retries=0 if report is None else report.num_retries,
            dropped=tuple(cohort[place] for place in dropped),
            bytes_sent=moved and moved.sent * asked,
            bytes_returned=moved and moved.returned * (len(cohort) - len(dropped)),
            bytes_read=self._count_read(),
            started_at=started_at,
            spans=() if report is None else tuple(map(tuple, report.spans)),
            candidates=going.candidates,
            client_metrics=None if own is None else stack_metrics(own.result()),
        )

    def _count_read(self) -> int:
        before, self._bytes_read = self._bytes_read, self._calls.bytes_read
        return self._bytes_read - before

    def _stops(self) -> bool:
        if not self._done.history:
            return False
        stop = self._spec.stop
        by_callback = self._callbacks.should_stop(self.history)
        return by_callback or (stop is not None and bool(stop(self.history)))

    def _save_last(self) -> None:
        """Save the last complete round, within the time that a signal leaves."""
        begun = time.monotonic()

        def find_time_left() -> float | None:
            left = self._interrupts.find_time_left(_LEAVE_S)
            if left is None:
                return None
            return max(left, begun + _SAVE_S - time.monotonic())

        self._checkpoints.finish(self._done, find_time_left)


Dataset = Sequence[Any]
"""The data of one client: its batches, each of the model's `batch_type`."""

_OPEN_S = 5.0
"""Seconds that the storage has, after a signal, to return the saved run."""


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """The result of a run.

    Attributes:
        history: Records of the rounds, including the rounds before a resume.
        state: State of the server after the last round, as plain values. With
            `EarlyStopping(best_weights=...)` it has the weights of the best round.
        reason: Why the run ended: "finished", "stopped early", or "interrupted" by a
            signal with `on_signal="return"`.
        client_states: Values that clients keep, by their ids in `data`, or by their
            indices if they have no ids. None if they keep nothing. With a
            `storage_path`, values beyond the bound of memory are in an unnamed file of
            this machine.
    """

    history: History
    state: Any = dataclasses.field(repr=False)
    reason: Reason
    client_states: ClientStates | None = None

    def _repr_html_(self) -> str:
        return f"<p>{self.reason}</p>{self.history._repr_html_()}"


@tracebacks.shorten
def run(
    process: LearningProcess,
    data: Sequence[Dataset] | Mapping[Any, Dataset],
    *,
    num_rounds: int,
    cohort_size: int | None = None,
    seed: int = 0,
    sampler: Sampler | AdaptiveSampler | None = None,
    storage_path: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    checkpoint_spacing_s: float = 0.5,
    num_to_keep: int | None = 3,
    evaluate: Callable[[Any], Mapping[str, Any]] | LearningProcess | None = None,
    validation_data: Any = None,
    evaluate_every: int = 1,
    cast: bool | None = None,
    callbacks: Sequence[Any] = (),
    on_error: Literal["raise", "log"] = "raise",
    on_signal: Literal["raise", "return"] = "raise",
    stop: Callable[[History], bool] | None = None,
    progress: bool = False,
    state: Any = None,
    client_states: ClientStates | None = None,
    devices: Devices | None = None,
    schedule: Synchronous | Buffered | None = None,
) -> TrainingResult:
    """Run rounds of a learning process in the default context.

    With a `storage_path`, the saved run is resumed, if there is one. The result then
    has the bits of a run that was never interrupted. On the main thread, the first
    SIGINT or SIGTERM saves the run and then ends the program, or only the run with
    `on_signal="return"`. A second signal ends the program at once.

    In a context of ray_fed the state stays in the object store. This process reads the
    state to save it, for callbacks that need it, and at the end.

    Args:
        process: Learning process, such as `build_fed_avg` returns.
        data: Batches of each client, by index or by id. Only a cohort's data is read.
            Callbacks must not change the data, because the next cohort may be read at
            any time.
        num_rounds: Number of rounds of the whole run, including the rounds before a
            resume, >= 0. A run with more saved rounds returns all of them, with a
            warning.
        cohort_size: Number of clients in a round. The clients depend on the seed and
            the round alone. None: all clients. A process with noise chooses its cohorts
            itself, and its metrics have `epsilon`.
        seed: Seed of the cohorts, >= 0.
        sampler: Object that draws the cohorts, from `program` or your own. Its method
            is `sample(round_index, num_clients, k)`, where `k` is `cohort_size`. A
            `program.AdaptiveSampler`, such as `program.PowerOfChoiceSampler`, first
            proposes clients. They are evaluated before each round, as by
            `build_client_eval`, and `record.candidates` has their metrics. A resume
            compares the fields of a dataclass, or else the sampler's own `__repr__`, or
            else its attributes. None: `program.UniformSampler(seed)`.
        storage_path: Path, where `~` is the user's home, or URI of fsspec, for this run
            alone. None: nothing is saved.
        checkpoint_every: Number of rounds between two saves, >= 1. Rounds wait if they
            are faster than saves. None: the latest round is saved, as often as
            `checkpoint_spacing_s` says, and no round waits. The last round is always
            saved.
        checkpoint_spacing_s: Without `checkpoint_every`: the least seconds from the
            beginning of a save to the next, >= 0. Only the latest of the rounds that
            end in this time is saved.
        num_to_keep: Number of saved states to keep, >= 1. None: all states.
        evaluate: Function of the state that returns metrics by name: numbers, arrays,
            tensors, text, or mappings, lists and tuples of these. In ray_fed's contexts
            the state has references, which computations accept. Other code can use them
            as arrays and numbers, which reads their values. A process that evaluates
            `validation_data`, such as `build_fed_eval` returns, is also accepted.
            `spread` summarizes the metrics of `build_client_eval`.
        validation_data: Data that the server evaluates: a pair `(x, y)`, which is cut
            into batches of 32 rows; a list or a `tf.data.Dataset` of batches; or
            clients, in any form that `data` takes. Arrays are copied before the first
            round. Without `evaluate`, the metrics are as in `build_fed_eval`.
        evaluate_every: Number of rounds between two evaluations, >= 1.
        cast: Whether arrays in lists of batches are cast to the model's dtypes if their
            values fit, such as NumPy's int64 and float64, or integers and booleans for
            floats. None: they are cast, and a warning says so once.
        callbacks: Objects with a method `on_round(record)`, see `callbacks.Callback`,
            such as `callbacks.EarlyStopping`, or release managers of
            federated_language.
        on_error: What follows if a callback raises. "raise" saves and ends the run.
            "log" logs the error and continues.
        on_signal: What follows the first SIGINT or SIGTERM, once the run is saved.
            "raise" ends the program, as Python does, by KeyboardInterrupt or
            SystemExit. "return" returns the rounds so far with the `reason`
            "interrupted".
        stop: Function of the history, which is called after each round. The run ends if
            it returns true.
        progress: Whether to show a bar in a terminal or notebook, and lines elsewhere.
        state: State to continue from, such as another result's state. Its `round_index`
            is the number of rounds before. None: `process.initialize()`. A run that is
            saved at `storage_path` continues instead, with a warning if `state` or
            `client_states` are not values of that run.
        client_states: First values of clients, if the process keeps some, such as the
            values of another result. A client gets the value of its id, or of its index
            if `data` is a list. The run changes a copy with the same bound of memory.
            None: no values yet.
        devices: Devices of the clients. Their simulated clock decides which updates
            enter a round, and records have the simulated time. None: no clock.
        schedule: Schedule of the clock: `Synchronous(...)` with a deadline or
            over-selection, or `Buffered(...)` for asynchronous steps. None:
            `Synchronous()`. Its rounds have the cohorts of a run without devices,
            except for clients that are not there or drop out.

    Returns:
        The history, the last state, why the run ended, and the values that clients
        keep.

    Raises:
        ConfigError: An argument has another type or is out of its range, there is no
            metric of a name, the process is for another number of clients, the rounds
            of `state` had other noise, another run is saved, or `devices` lack a client
            or do not fit the process. Or no update of a round came by its deadline.
        ValueMismatchError: Clients have values of another type than the process takes,
            inputs and labels of a batch have different numbers of rows, a metric has an
            unsupported type, or `client_states` belong to another process or to clients
            that `data` lacks.
        StorageError: `storage_path` cannot be read or written, or does not answer in
            time after a signal.
        StateFormatError: Another version of ray_fed saved the run.
        SavedStateError: All saved states are damaged.
        CallbackError: A callback raised.
        KeyboardInterrupt: SIGINT came. The run is saved.
        SystemExit: SIGTERM came. The run is saved, and the code is 143. A handler of
            the program's own is called first, and may raise another exception.
        Exception: An error of a round or of `evaluate`. A note names the clients of the
            cohort in `data`.
    """
    check_process(process)
    data = with_ids(data)
    caster = BatchCaster(process, cast=cast)
    evaluation, evaluate = choose_evaluation(process, evaluate, validation_data, caster)
    check_kinds(
        {
            "data": data,
            "sampler": sampler,
            "cast": cast,
            "storage_path": storage_path,
            "evaluate": evaluate,
            "callbacks": callbacks,
            "on_error": on_error,
            "on_signal": on_signal,
            "stop": stop,
            "progress": progress,
            "devices": devices,
            "schedule": schedule,
        }
    )
    check_clients(data, caster.member)
    seed = read_whole("seed", seed, 0)
    check_number(
        "checkpoint_spacing_s", checkpoint_spacing_s, lambda s: s >= 0, "at least 0"
    )
    cohort_size = read_whole_or_none("cohort_size", cohort_size, 1)
    num_to_keep = read_whole_or_none("num_to_keep", num_to_keep, 1)
    told = Callbacks(callbacks, logs=on_error == "log")
    check_metrics([stop, *callbacks], process, evaluation)
    spec = RunSpec(
        data=data,
        caster=caster,
        sampler=choose_sampler(process, len(data), cohort_size, seed, sampler, state),
        candidate_evaluation=(
            build_candidate_evaluation(process) if is_adaptive(sampler) else None
        ),
        cohort_size=cohort_size,
        seed=seed,
        num_rounds=read_whole("num_rounds", num_rounds, 0),
        checkpoint_every=read_whole_or_none("checkpoint_every", checkpoint_every, 1),
        evaluate=evaluate,
        evaluate_every=read_whole("evaluate_every", evaluate_every, 1),
        stop=stop,
        shows_progress=progress,
        devices=devices,
        schedule=Synchronous() if schedule is None else schedule,
    )
    clock = None
    if devices is not None:
        _check_clocked(spec.sampler, spec.schedule, process)
        fleet, size = devices.fleet(process, data), len(data)
        clock = open_clock(spec.schedule, fleet, spec.draw, size, cohort_size, seed)
        process = spec.schedule.pace(process, devices)
    elif schedule is not None:
        raise errors.ConfigError(
            "Expected `devices` for a `schedule`, found none: pass"
            " `learning.devices.Devices(seconds_per_example=0.01)`, or leave out the"
            " schedule."
        )
    clients = begin_clients(process, data, storage_path, client_states, state)
    saved_clients = clients if isinstance(clients, SavedClientStates) else None
    storage = (
        None
        if storage_path is None
        else RunStorage(storage_path, num_to_keep, saved_clients)
    )
    raises = on_signal == "raise"
    # Signals are noted from here on, so the last complete round can be saved.
    with WorkThread() as work, Interrupts(raises=raises) as interrupts:
        calls = open_calls(process, interrupts)
        checkpoints = Checkpoints(
            storage,
            calls.read,
            spacing_s=checkpoint_spacing_s if checkpoint_every is None else None,
        )
        kept = RunClients(clients)
        loop = RunLoop(spec, calls, interrupts, told, checkpoints, kept, work, clock)
        try:
            with interrupts.breaking():
                initial = calls.initialize()
            saved: Reached | None = None
            if storage is not None:
                described = describe_run(process, spec)
                given = None if state is None else (state, client_states)
                # Storage may hang. On its own thread, a signal can still end the run.
                found = work.submit(
                    lambda: _open(storage, described, initial, given, calls, clients)
                )
                saved, number = _wait_for(found, interrupts, storage_path)
                calls.first_number = number
            if clients is not None and client_states is not None and saved is None:
                # A saved run has later values of its clients, which take precedence.
                clients._fill_from(client_states)
            loop.begin(saved, initial, state)
            reason = loop.run()
            if interrupts.since is not None:
                reason = "interrupted"
                _say_interrupted(loop.num_rounds, storage_path)
                interrupts.deliver()  # reading the state might take long
            chosen = told.choose_state(loop.read_state())
            return TrainingResult(loop.history, chosen, reason, clients)
        finally:
            checkpoints.close()
            calls.close(loop.num_rounds)


def _check_clocked(
    sampler: Any, schedule: Synchronous | Buffered, process: LearningProcess
) -> None:
    if is_adaptive(sampler):
        raise errors.ConfigError(
            "Expected a sampler that draws without metrics of clients beside"
            f" `devices`, whose clock draws ahead of the rounds, found {sampler}:"
            " pass `UniformSampler`, or leave out `devices`."
        )
    if isinstance(sampler, AvailabilitySampler):
        raise errors.ConfigError(
            "Expected a sampler without hours beside `devices`, whose clock knows the"
            " hour in which a client begins, found an `AvailabilitySampler`: pass"
            " `UniformSampler`, and the hours as `Devices(hours=)`."
        )
    if isinstance(sampler, PoissonSampler) and isinstance(schedule, Buffered):
        raise errors.ConfigError(
            "Expected a sampler that draws the next clients to begin for `Buffered`,"
            f" found {sampler}: clients that begin one by one have no round that"
            " each could join with one probability. Pass `UniformSampler` or"
            " `WeightedSampler`."
        )
    if process.has_client_metrics:
        raise errors.ConfigError(
            "Expected a process without metrics of each client beside `devices`, found"
            " one of `with_client_metrics`: leave out one of the two."
        )


@tracebacks.shorten
def verify_clock(
    history: History,
    process: LearningProcess,
    data: Sequence[Dataset] | Mapping[Any, Dataset],
    *,
    devices: Devices,
    schedule: Synchronous | Buffered | None = None,
    cohort_size: int | None = None,
    seed: int = 0,
    sampler: Sampler | None = None,
) -> None:
    """Replay the simulated clock of a run, and compare its records.

    Nothing is trained. `history` has the records of the run from its first round on.
    The other arguments are as for `run`.

    Raises:
        ConfigError: The arguments do not fit, as for `run`.
        ValueMismatchError: A record has other clients, versions or simulated seconds
            than the clock, or is missing.
    """
    data, size = with_ids(data), len(data)
    schedule = schedule or Synchronous()
    chosen: Any = choose_sampler(process, size, cohort_size, seed, sampler, None)
    _check_clocked(chosen, schedule, process)

    def draw(number: int, k: int | None) -> list[int]:
        return check_cohort(chosen, chosen.sample(number, size, k), size)

    fleet = devices.fleet(process, data)
    clock = open_clock(schedule, fleet, draw, size, cohort_size, seed)
    first = history[0].round_index if history else 0
    clock.begin(first, None)
    for index, record in enumerate(history, first):
        wanted = {"round_index": index, **clock.advance(index).report()}
        for name, value in wanted.items():
            if getattr(record, name) != value:
                raise errors.ValueMismatchError(
                    f"Expected {errors.describe(value)} as `{name}` of round"
                    f" {index + 1}, found {errors.describe(getattr(record, name))}:"
                    " the history was changed, or its run had other arguments."
                )


def _open(
    storage: RunStorage,
    described: Mapping[str, Any],
    initial: Any,
    given: tuple[Any, ClientStates | None] | None,
    calls: ProcessCalls,
    clients: ClientStates | None,
) -> tuple[Reached | None, int]:
    """Return the saved run and the number of its first call, see `RunStorage.open`.

    `given` has the `state` and `client_states` that the user passed, or is None. These
    values are not used if a run is saved. A warning is logged if they are neither the
    first nor the last values of the saved run.
    """
    fingerprint = {**described, **describe_state(initial, calls.read)}
    start = given and digest_start(calls.read(given[0]), given[1])
    saved, number = storage.open(fingerprint, initial, calls.first_number, start)
    if saved is not None and start not in (None, storage.start):
        known = [digest_start(saved.state, clients)]
        if storage.start is None:
            known.append(digest_start(calls.read(initial), None))
        if start not in known:
            _logger.warning(
                "The run continues from its saved state after round %d. The arguments"
                " `state` and `client_states` are not used, because they are neither"
                " the first nor the last values of the saved run. Pass another"
                " `storage_path` to begin with them.",
                saved.history[-1].round,
            )
    return saved, number


def _say_interrupted(num_rounds: int, where: object) -> None:
    saved = "not saved, as it has no `storage_path`"
    if where is not None:
        saved = f"saved in `{where}`: the same call resumes it"
    _logger.warning("The run was interrupted after round %d, %s.", num_rounds, saved)


def _wait_for(
    opening: concurrent.futures.Future[tuple[Reached | None, int]],
    interrupts: Interrupts,
    where: object,
) -> tuple[Reached | None, int]:
    """Return the saved run, or raise StorageError if no answer follows a signal."""
    try:
        return interrupts.wait_for(opening, _OPEN_S)
    except StopNow:
        raise errors.StorageError(
            f"Expected to load the saved run in `{where}`, found no answer in"
            f" {_OPEN_S:g} seconds after a signal: check that the place can be reached,"
            " and run again. No round was run, and the saved run stays as it is."
        ) from None

"""`learning.run`: the loop over rounds: seen, saved, stopped and resumed.

    main thread    round r -> read r+1 ... r+1 begins -> read r+2 ... r+2 begins
                          |                          |
    work thread           +--> evaluate, callbacks,  +--> the same
                               stop?, save

What follows a round overlaps the next one, and so does what comes before a round: while
r+1 runs, r+2 is called with the state that r+1 will have, and waits for that alone. A
round is called once it is known that the run goes on after the one before the last; it
counts only if the run goes on after the last, so that timing decides nothing.
Arguments are checked, and metrics that are asked for by name looked for, before the
first round.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import logging
import operator
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import federated_language as fl
import numpy as np

import ray_fed
import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf
from ray_fed.learning.accounting import SampledGaussian, TreeGaussian, check_noise
from ray_fed.learning.batches import (
    BatchCaster,
    check_batches,
    check_clients,
    count_rows,
    find_nan,
)
from ray_fed.learning.callbacks import Callbacks
from ray_fed.learning.checkpoints import (
    Checkpoints,
    IoThread,
    Reached,
    RunStorage,
    SavedRun,
)
from ray_fed.learning.checks import check_number, read_whole, read_whole_or_none
from ray_fed.learning.client_states import (
    ClientId,
    ClientStates,
    Rows,
    RunClients,
    SavedClientStates,
    check_client_states,
)
from ray_fed.learning.fed_eval import choose_evaluation
from ray_fed.learning.history import (
    History,
    RoundRecord,
    name_elements,
    read_evaluation,
    read_metrics,
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
from ray_fed.observability import reprs
from ray_fed.observability.progress import RoundProgress
from ray_fed.program import (
    PoissonSampler,
    RayFederatedContext,
    Sampler,
    UniformSampler,
)

_logger = logging.getLogger(__name__)

_MAX_NAMED = 10  # clients of a cohort that a note lists


@dataclasses.dataclass(frozen=True)
class PrivateSampler:
    """Draws the clients of each round as the accountant of a process assumes it.

    With the noise of `dp_mean` each client takes part by itself with one probability;
    a round may have none. With that of `dp_ftrl_mean` each pass has each client once.

    Attributes:
        privacy: of the process.
        seed: >= 0.
    """

    privacy: SampledGaussian | TreeGaussian
    seed: int

    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        """Draw clients: see `program.Sampler`; the accountant says how many."""
        del k
        if isinstance(self.privacy, SampledGaussian):
            sampler = PoissonSampler(self.privacy.sampling_probability, self.seed)
            return sampler.sample(round_index, num_clients, None)
        index, step = divmod(round_index, self.privacy.rounds_per_pass)
        order = np.random.default_rng([self.seed, index]).permutation(num_clients)
        parts = np.array_split(order, self.privacy.rounds_per_pass)
        return sorted(parts[step].tolist())


class NamedClients(list[Any]):
    """What clients have, of a dictionary by id.

    Attributes:
        ids: in its order.
    """

    def __init__(self, clients: Mapping[Any, Any]) -> None:
        super().__init__(clients.values())
        self.ids = tuple(clients)


def say_who(
    error: BaseException, round_index: int, cohort: Sequence[int], data: Any
) -> None:
    """Note which round and clients an error is of: it knows of its call alone."""
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
        lambda value: value is None or callable(getattr(value, "sample", None)),
        "an object with a method `sample(round_index, num_clients, k)` or None",
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
    "stop": (_is_function, "a function of the history or None"),
    "progress": (lambda value: isinstance(value, bool), "True or False"),
}


def check_kinds(arguments: Mapping[str, object]) -> None:
    """Raise unless arguments are of their kinds.

    Raises:
        ConfigError: one is of another kind.
    """
    for name, value in arguments.items():
        is_right, kind = _KINDS[name]
        if not is_right(value):
            raise errors.ConfigError(
                f"Expected {kind} as `{name}`, found {errors.describe(value)}."
            )


def check_process(process: Any) -> None:
    """Raise unless a process trains: its `next` returns a state first.

    Raises:
        ConfigError: it is no process, or an evaluation.
    """
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
    """Refuse the name of a metric that no round will have, where that is known.

    Args:
        askers: those with a `monitor` ask for a metric.
        process: that trains.
        evaluation: what the run evaluates by; None: it does not.

    Raises:
        ConfigError: neither training nor the evaluation has such a metric.
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
    """Return the numbers in metrics of a type; None where it does not say them."""
    if isinstance(metrics, fl.FederatedType) and metrics.placement == fl.SERVER:
        members = metrics.member
        return _names(members, "") if isinstance(members, fl.StructType) else None
    return None


def _names(type_spec: fl.StructType, path: str) -> list[str]:
    found: list[str] = []
    for name, member in type_spec.items():
        full = f"{path}/{name}" if path else str(name)
        match member:
            case fl.StructType():
                found += _names(member, full)
            case fl.TensorType(shape=shape) if shape and None not in shape:
                found += name_elements(full, [size or 0 for size in shape])
            case _:
                found.append(full)
    return found


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """The arguments of `learning.run` that its rounds follow; see there.

    Attributes:
        data: of each client.
        caster: makes a client's batches what the model takes.
        sampler: of cohorts.
        cohort_size: that it is asked for.
        seed: of the cohorts.
        num_rounds: of the whole run.
        checkpoint_every: rounds; None: as saves take.
        evaluate: takes the state.
        evaluate_every: rounds.
        stop: takes the history.
        shows_progress: whether a bar or log lines are wanted.
    """

    data: Sequence[Any]
    caster: Callable[[Any], Any]
    sampler: Sampler
    cohort_size: int | None
    seed: int
    num_rounds: int
    checkpoint_every: int | None
    evaluate: Callable[[Any], Mapping[str, Any]] | None
    evaluate_every: int
    stop: Callable[[History], bool] | None
    shows_progress: bool

    def draw(self, round_index: int) -> list[int]:
        """Return the indices of a round's clients.

        Raises:
            ConfigError: the sampler draws something else.
        """
        num_clients = len(self.data)
        drawn = self.sampler.sample(round_index, num_clients, self.cohort_size)
        try:
            cohort = [operator.index(client) for client in drawn]
        except TypeError:
            cohort = [-1]
        are_known = all(0 <= client < num_clients for client in cohort)
        if not are_known or len({*cohort}) < len(cohort):
            raise errors.ConfigError(
                f"Expected indices of clients, from 0 to {num_clients - 1} and none"
                f" twice, of the sampler `{self.sampler}`, found"
                f" {errors.describe(drawn)}."
            )
        return cohort

    def describe_cohorts(self) -> dict[str, Any]:
        """Return what decides who takes part, to compare it when a run is resumed."""
        size: Any = len(self.data) if self.cohort_size is None else self.cohort_size
        described: dict[str, Any] = {"num_clients": len(self.data), "seed": self.seed}
        if isinstance(self.sampler, PrivateSampler):
            size = f"as for {self.sampler.privacy}"
        elif self.sampler != UniformSampler(self.seed):
            text, count = re.subn(" at 0x[0-9a-f]+", "", repr(self.sampler))
            if count:
                _logger.warning(
                    "The sampler is `%s`, which does not say how it draws: whether a"
                    " run that is resumed has the same one cannot be told. Make it a"
                    " dataclass, or give it a `__repr__`.",
                    text,
                )
            described["sampler"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return described | {"cohort_size": size}

    def add_epsilon(self, training: Any, round_index: int) -> Any:
        """Return a round's metrics, with the privacy that is spent after it, if any."""
        if not isinstance(self.sampler, PrivateSampler):
            return training
        return {**training, "epsilon": self.sampler.privacy.epsilon(round_index + 1)}


def describe_run(process: LearningProcess, spec: RunSpec) -> dict[str, Any]:
    """Return what decides the bits of a run, and is compared when it is resumed."""
    initialize, run_round = (_type_of(c) for c in (process.initialize, process.next))
    return {
        **spec.describe_cohorts(),
        "clients": _digest_clients(spec.data),
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


def choose_sampler(
    process: LearningProcess,
    num_clients: int,
    cohort_size: int | None,
    seed: int,
    given: Sampler | None,
    state: Any,
) -> Sampler:
    """Return who draws the cohorts of a run.

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
    """Return what holds the values of clients of a run, none yet.

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
        check_client_states(given, initial, len(data))
        if state is None and len(given.ids):
            raise errors.ConfigError(
                "Expected `state` beside `client_states`, found none: what clients kept"
                " goes on with the server's state of the same result. Pass"
                " `state=result.state`, too."
            )
    empty = ClientStates(initial) if given is None else given.emptied(initial)
    if storage_path is not None:
        path, memory_bytes = os.fspath(storage_path), empty.max_memory_bytes
        empty = SavedClientStates(initial, path, memory_bytes=memory_bytes)
    empty.limit_to(getattr(data, "ids", range(len(data))))
    return empty


_MOST_NUMBERS, _MOST_OF_EACH = 3, 2


def show_metrics(record: RoundRecord, evaluated: RoundRecord | None) -> str:
    """Return metrics of training and of evaluation, told apart, in a line."""
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


@dataclasses.dataclass(frozen=True)
class _CalledRound:
    """What came of the call of a round.

    Attributes:
        cohort: of its clients; None where that was not drawn.
        going: the round; None where a signal ended the call, or it raised.
        error: what it raised.
    """

    cohort: Sequence[int] | None
    going: GoingRound | None
    error: Exception | None = None


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
        self._progress: RoundProgress | None = None
        self._evaluated: RoundRecord | None = None  # the latest that was
        self._lock = threading.Lock()
        self._is_left = False
        self._bytes_read = 0
        self._changed: dict[ClientId, bytes] = {}  # since a state was to be saved

    def begin(self, saved: SavedRun, initial: Any, given: Any) -> None:
        """Begin where the saved run was, else with the state that was given, if any."""
        if saved.first_number is not None:
            self._calls.first_number = saved.first_number
        self._done = Reached(initial if given is None else given)
        first_round = self._first = int(getattr(given, "round_index", 0))
        if saved.records:
            self._done = Reached(saved.state, tuple(saved.records))
            begun = saved.records[0].round_index, self.num_rounds
            if given is not None and first_round not in begun:
                _logger.warning(
                    "The run goes on from what is saved, %d rounds, and not from the"
                    " `state` that it is given, which has %d behind it: pass another"
                    " `storage_path` to begin with that.",
                    self.num_rounds,
                    first_round,
                )
        if self.num_rounds > self._spec.num_rounds:
            _logger.warning(
                "The run has %d rounds behind it, more than `num_rounds`, which is %d:"
                " it runs no other, and returns what it has.",
                self.num_rounds,
                self._spec.num_rounds,
            )

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

    def run(self) -> Reason:
        """Run all rounds that are left, and return why the run ended.

        Raises:
            CallbackError: a callback raised.
            Exception: what a round, `evaluate`, `stop` or the storage raised.
        """
        self._callbacks.start(self.history)
        if self._spec.shows_progress:
            self._progress = RoundProgress(self._spec.num_rounds, done=self.num_rounds)
            self._calls.subscribe(self._progress)
            self._progress.say("")
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
            self._clients.put_back(self.num_rounds)
            return reason
        finally:
            if self._progress is not None:
                self._progress.__exit__()

    def _run_rounds(self) -> Reason:
        if self._stops():
            return "stopped early"
        following: concurrent.futures.Future[bool] | None = None
        state, called = self._done.state, None
        with WorkThread() as work:
            for index in range(self.num_rounds, self._spec.num_rounds):
                started, started_at = time.monotonic(), time.time()
                called = called or self._call(state, index)
                cohort, going, ahead = called.cohort, called.going, list[_CalledRound]()
                try:
                    reason = self._wait(called, following, ahead)
                except Exception as error:
                    self._say_why(error, index, cohort, following)
                    raise
                if going is None or cohort is None or reason is not None:
                    return reason or self._leave(following)
                spent = started_at, time.monotonic() - started
                kept = self._clients.put(going.kept)
                follow = functools.partial(self._follow, going, cohort, spent, kept)
                following = work.submit(follow)
                state, called = going.state, ahead[0] if ahead else None
            return self._wait(_CalledRound(None, None), following, []) or "finished"

    def _call(self, state: Any, index: int) -> _CalledRound:
        """Call a round, with a state that may not be there yet."""
        cohort = None
        try:
            cohort = self._spec.draw(index)
            read = self._spec.caster
            clients = {client: read(self._spec.data[client]) for client in cohort}
            check_batches(clients, getattr(self._spec.data, "ids", ()))
            taken = [*self._clients.take(index, cohort), list(clients.values())]
            return _CalledRound(cohort, self._calls.next(state, taken, index))
        except StopNow:
            return _CalledRound(cohort, None)
        except Exception as error:  # noqa: BLE001 (raised when it is the round's turn)
            return _CalledRound(cohort, None, error)

    def _wait(
        self,
        called: _CalledRound,
        following: concurrent.futures.Future[bool] | None,
        ahead: list[_CalledRound],
    ) -> Reason | None:
        """Wait for a round and for what follows the one before; return why to end.

        Args:
            called: the round.
            following: the other; None: nothing.
            ahead: takes the round after this one, once nothing but the end of this one
                is missing.
        """
        if called.error is not None:
            raise called.error
        going = called.going
        returned = set[concurrent.futures.Future[Any]]()
        if going is not None:
            returned = {f for f in (going.metrics, going.kept) if f is not None}
        waiting = {*returned, *([] if following is None else [following])}
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
            for done in ended & returned:
                done.result()
        return None

    def _may_call_after(self, going: GoingRound) -> bool:
        """Return whether a round can be called before this one is done."""
        has_more = going.round_index + 1 < self._spec.num_rounds
        return has_more and going.kept is None and self._calls.takes_ahead

    def _say_why(
        self,
        error: Exception,
        index: int,
        cohort: Sequence[int] | None,
        following: concurrent.futures.Future[bool] | None,
    ) -> None:
        """Say which round of which clients failed, if not what follows the last one."""
        if following is not None:
            concurrent.futures.wait([following])
            if following.exception() is error:
                return
        if cohort is not None:
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
        spent: tuple[float, float],
        kept: Rows,
    ) -> bool:
        """Do what follows a round; return whether the run is to end with it.

        Called on the work thread. `spent` is when the round's turn came, in seconds
        since 1970, and how many it took.
        """
        index = going.round_index
        self._calls.evaluating(index)
        record = self._record(going, cohort, *spent)
        with self._lock:
            if self._is_left:  # too late: the run was saved without this round
                return False
            records = (*self._done.records, record)
            self._changed |= kept
            self._done = Reached(going.state, records, self._changed)
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
        self,
        going: GoingRound,
        cohort: Sequence[int],
        started_at: float,
        seconds: float,
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
            started_at=started_at,
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
        client_states: what clients kept, by their index in `data`, or by id there; None
            where they keep nothing. With a `storage_path`, what memory has no room for
            is in a file of this machine, without a name.
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
    data: Sequence[Dataset] | Mapping[Any, Dataset],
    *,
    num_rounds: int,
    cohort_size: int | None = None,
    seed: int = 0,
    sampler: Sampler | None = None,
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
        data: each client's batches, by index or by id; only those of a cohort are read.
        num_rounds: of the whole run, those before a resume included; >= 0. A run that
            has more behind it runs none and returns all it has, with a warning.
        cohort_size: clients a round; None: all of them, or, for a process with noise,
            those that its guarantee assumes. Which ones they are depends on the seed
            and the round alone. The metrics of a process with noise have `epsilon`.
        seed: of the cohorts, >= 0.
        sampler: draws the cohorts, one of `program` or an object of one's own with its
            method `sample(round_index, num_clients, k)`, where `k` is `cohort_size`;
            its text (`repr`) says whether a run that is resumed is the same. None:
            `program.UniformSampler(seed)`.
        storage_path: a path, where `~` is the user's home, or a URI of fsspec, for this
            run alone; None saves nothing.
        checkpoint_every: rounds between two saves, >= 1; 1 saves each round. Rounds
            wait where they are faster than saves. None: the latest round is saved, as
            often as `checkpoint_spacing_s` says, and no round waits. The end is always
            saved.
        checkpoint_spacing_s: without `checkpoint_every`: seconds from the beginning of
            a save to that of the next, >= 0. Rounds that end while another one is
            saved, or within this time, give way to the latest of them.
        num_to_keep: saved states to keep, >= 1; None keeps all.
        evaluate: called with the state, returns metrics by name: numbers, arrays,
            tensors, text, or mappings, lists and tuples of these. On ray_fed's contexts
            the state holds references, which computations take as they are, and numpy
            reads. Or a process, such as `build_fed_eval` returns, of `validation_data`.
        validation_data: what the server evaluates: a pair `(x, y)`, a list of batches,
            or clients: their list, `ClientData`, or a dictionary by id. Without
            `evaluate` the metrics are those of `build_fed_eval`.
        evaluate_every: rounds between two calls of `evaluate`, >= 1.
        cast: whether arrays in lists of batches become of the model's types, where only
            their size differs, such as int64 and float64 of numpy, or whole numbers and
            booleans are floats of the same value. None: they do, and a warning says so
            once.
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
        ValueMismatchError: clients of `data`, by reference, have values of another type
            than the process takes; inputs and labels of a batch, in a list, have
            different numbers of rows; a metric is of a kind that a history does not
            keep; or `client_states` are of another process or of clients that `data`
            lacks.
        StorageError: `storage_path` cannot be read or written, or does not answer in
            time as a signal ends the run.
        StateFormatError: another version of ray_fed wrote what is saved.
        SavedStateError: all that is saved is damaged.
        CallbackError: a callback raised.
        Exception: what a round or `evaluate` raised. A round counts clients by their
            place in the cohort; a note says which of `data` these are.
    """
    check_process(process)
    data = NamedClients(data) if isinstance(data, Mapping) else data
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
            "stop": stop,
            "progress": progress,
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
        cohort_size=cohort_size,
        seed=seed,
        num_rounds=read_whole("num_rounds", num_rounds, 0),
        checkpoint_every=read_whole_or_none("checkpoint_every", checkpoint_every, 1),
        evaluate=evaluate,
        evaluate_every=read_whole("evaluate_every", evaluate_every, 1),
        stop=stop,
        shows_progress=progress,
    )
    clients = begin_clients(process, data, storage_path, client_states, state)
    saved_clients = clients if isinstance(clients, SavedClientStates) else None
    storage = (
        None
        if storage_path is None
        else RunStorage(storage_path, num_to_keep, saved_clients)
    )
    with IoThread() as io, Interrupts() as interrupts:
        calls = open_calls(process, io, interrupts)
        checkpoints = Checkpoints(
            storage,
            io,
            calls.fetch,
            spacing_s=checkpoint_spacing_s if checkpoint_every is None else None,
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
            loop.begin(saved, initial, state)
            reason = loop.run()
            if reason == "interrupted":
                _say_interrupted(loop.num_rounds, storage_path)
            return TrainingResult(loop.history, loop.read_state(), reason, clients)
        finally:
            calls.close(loop.num_rounds)


def _say_interrupted(num_rounds: int, where: object) -> None:
    saved = "not saved, as it has no `storage_path`"
    if where is not None:
        saved = f"saved in `{where}`: the same call resumes it"
    _logger.warning("The run was interrupted after round %d, %s.", num_rounds, saved)


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

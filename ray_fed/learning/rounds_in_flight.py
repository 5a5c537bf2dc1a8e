"""Rounds in flight: how a run calls its process, on which threads, until a signal.

    main thread      next(round r) ----> next(round r + 1) ----> ...
    work thread      evaluation, callbacks and `stop` of each round
    saves            reads and saves states, see `checkpoints`

ReferencedCalls   a context of ray_fed: calls return at once, the state stays
NumberedCalls     a context with `debug`: one call after another, with the same numbers
ProcessCalls      any other context, or plain functions: one call after another

The threads are daemons, so they do not keep a program alive that must end at once.
After the first SIGINT or SIGTERM, the run saves its last round and then lets the signal
end the program. A second signal ends the program at once.
"""

import concurrent.futures
import contextlib
import contextvars
import copy
import dataclasses
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NoReturn, Self, TypeVar

import federated_language as fl
from federated_language.program import structure_utils
from typing_extensions import override

import ray_fed
from ray_fed.learning.processes import ClientBytes, LearningProcess
from ray_fed.learning.schedules import Step
from ray_fed.observability import events
from ray_fed.observability.events import EventSink
from ray_fed.observability.report import ASIDE_FROM, ReportBuilder, RoundReport
from ray_fed.program import RayFederatedContext

flf = fl.framework

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_SIGNAL_EXIT_BASE = 128
"""Exit code of a program that a signal ended, in shells, less the signal's number."""

_POLL_S = 0.1
"""Seconds after which `wait_for` looks again for a signal."""


class StopNow(BaseException):
    """Raised on the main thread to leave a call after a signal."""


class Interrupts:
    """Delays the first SIGINT or SIGTERM to the end of a `with` block.

    The first signal is noted in `since`. At the end of the block it is delivered if
    `raises`, as if there were no block. A second signal goes to the program's own
    handlers at once. Outside of the main thread this does nothing. A signal that the
    program ignores, as under `nohup`, stays ignored.
    """

    def __init__(self, *, raises: bool) -> None:
        self.since: float | None = None
        """Time of the first signal, by the monotonic clock. None: no signal came."""
        self._raises = raises
        self._number = signal.SIGINT
        self._former: dict[int, Any] = {}
        self._handler: Any = None  # the former handler of the signal that came
        self._breaks = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, _: object, error: BaseException | None, traceback: object
    ) -> None:
        self._restore()
        # Without an initial state there is no result that could be returned.
        if isinstance(error, StopNow):
            self._deliver()
        # Another exception than an `Exception` ends the program already.
        if error is None or isinstance(error, Exception):
            self.deliver()

    def _restore(self) -> None:
        former, self._former = self._former, {}
        for number, handler in former.items():
            # A handler that was not set from Python is None.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, _: object) -> None:
        if self.since is not None:
            self._restore()
            os.kill(os.getpid(), number)
            return
        self._number, self._handler = signal.Signals(number), self._former[number]
        self.since = time.monotonic()
        if self._breaks:
            raise StopNow

    def deliver(self) -> None:
        """End the program by the signal that came, if there is one and `raises` is set.

        SIGINT raises KeyboardInterrupt. SIGTERM raises SystemExit with the code 143, as
        a shell reports it. A program's own handler may raise another error.
        """
        if self.since is not None and self._raises:
            self._deliver()

    def _deliver(self) -> NoReturn:
        self._restore()
        if callable(self._handler):
            try:
                self._handler(self._number, None)
            except SystemExit as error:
                # Ray's handler exits with the bare number of the signal.
                if error.code != self._number:
                    raise
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(_SIGNAL_EXIT_BASE + self._number)

    def wait_for(self, future: concurrent.futures.Future[_T], grace_s: float) -> _T:
        """Return the result of a future, but wait at most `grace_s` after a signal.

        Raises StopNow if this time is over without a result.
        """
        while not concurrent.futures.wait([future], _POLL_S).done:
            left = self.find_time_left(grace_s)
            if left is not None and left <= 0:
                raise StopNow
        return future.result()

    def find_time_left(self, limit_s: float) -> float | None:
        """Return the seconds that are left of `limit_s` after the first signal.

        The result is negative after the limit, and None if no signal came.
        """
        since = self.since
        return None if since is None else since + limit_s - time.monotonic()

    @contextlib.contextmanager
    def breaking(self) -> Generator[None]:
        """Raise `StopNow` inside the `with` block once the first signal has come."""
        if self.since is not None:
            raise StopNow
        self._breaks = True
        try:
            yield
        finally:
            self._breaks = False


class WorkThread:
    """A thread that runs functions one after another. It is a context manager."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ray_fed run", daemon=True).start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def submit(self, work: Callable[[], _T]) -> concurrent.futures.Future[_T]:
        """Run a function after all functions submitted before. Return its future."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        variables = contextvars.copy_context()  # such as `context.on_workers`

        def do() -> None:
            try:
                future.set_result(variables.run(work))
            except BaseException as error:  # noqa: BLE001 (the future raises it)
                future.set_exception(error)

        self._tasks.put(do)
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._tasks.put(None)


_reports: contextvars.ContextVar["RoundReports | None"] = contextvars.ContextVar(
    "reports", default=None
)
"""Reports of the run that calls a round. The call inherits this variable."""


class RoundReports:
    """An event sink that stores the reports of a run's calls until they are taken.

    Events of other runs are left out, because their calls may have the same numbers.
    """

    def __init__(self) -> None:
        self._builder = ReportBuilder()
        self._found: dict[int, RoundReport | None] = {}

    def expect(self, number: int) -> None:
        """Prepare to store the report of the next call, which has this number."""
        self._found[number] = None
        _reports.set(self)

    def take(self, number: int) -> RoundReport | None:
        """Remove the report of a call and return it. Return None without a report."""
        return self._found.pop(number, None)

    def on_event(self, event: events.Event) -> None:
        """Add an event to the report of its round."""
        if _reports.get() is not self:
            return
        self._builder.on_event(event)
        if isinstance(event, events.RoundFinished):
            last = self._builder.last
            if event.round_index in self._found and last is not None:
                self._found[event.round_index] = last


@dataclasses.dataclass(frozen=True)
class GoingRound:
    """A round that was called and may not be done yet.

    Attributes:
        round_index: Number of rounds of the run before this round.
        cohort: Indices of the clients, in the order of the call's arguments.
        state: State after the round, for the next call. `ProcessCalls.read` reads it.
        metrics: Future of the plain metrics of the clients' training. If the call
            failed, it has the error.
        kept: Future of the plain values that the clients keep for later rounds, or None
            if they keep nothing.
        client_metrics: Future of the plain metrics of each client, or None if the
            process does not return them.
        take_report: Function that returns the report of the round, or None, and removes
            it.
        candidates: Clients that were evaluated for the cohort, see `RoundRecord`.
        step: Decisions of the clock of `devices`, or None without a clock.
        live: Earlier states from which clients still compute, by version, which is the
            number of rounds before a state.
    """

    round_index: int
    cohort: Sequence[int]
    state: Any
    metrics: concurrent.futures.Future[Any]
    kept: concurrent.futures.Future[Any] | None
    client_metrics: concurrent.futures.Future[Any] | None
    take_report: Callable[[], RoundReport | None]
    candidates: Mapping[str, tuple[float, ...]] | None = None
    step: Step | None = None
    live: Mapping[int, Any] = dataclasses.field(default_factory=dict[int, Any])


class ProcessCalls:
    """Calls the two computations of a process, and the computations of `evaluate`.

    A call returns plain values when it is done. It has no number and no events. Threads
    of the run also use `context`, the caller's default context.

    Attributes:
        first_number: Number of the call of round 0. A resumed run continues with the
            number of the saved run.
        bytes_read: Number of bytes of states that this process has read so far.
        takes_ahead: Whether a round can be called before the previous round, which
            returns its state, is done.
    """

    first_number = 0
    bytes_read = 0
    takes_ahead = False

    def __init__(
        self, process: LearningProcess, context: Any, interrupts: Interrupts
    ) -> None:
        self._process = process
        self._context = context
        self._interrupts = interrupts

    @property
    def client_bytes(self) -> ClientBytes | None:
        """Bytes that each client of a round would receive and send, or None."""
        return getattr(self._process, "client_bytes", None)

    def subscribe(self, sink: EventSink) -> None:
        """Send the events of calls, if there are any, to a sink until `close`."""

    def initialize(self) -> Any:
        """Return the initial state. This must be the first call."""
        return self._process.initialize()

    def next(
        self,
        state: Any,
        clients: Sequence[Any],
        round_index: int,
        cohort: Sequence[int],
    ) -> GoingRound:
        """Call the round `round_index` of the clients in `cohort`.

        `clients` are the arguments of `next` after the state. The last argument is the
        clients' data. Before it come the values that clients kept, or the orders of the
        clock. Raises StopNow if a signal comes before a direct call ended.
        """
        with self._interrupts.breaking():
            returned = self.call(round_index, (state, *clients))
        return self._going(round_index, cohort, returned, _done, lambda: None)

    def _going(
        self,
        round_index: int,
        cohort: Sequence[int],
        returned: Any,
        read: Callable[[Any], concurrent.futures.Future[Any]],
        take_report: Callable[[], RoundReport | None],
    ) -> GoingRound:
        state, *at_clients, metrics = returned
        has_own = getattr(self._process, "has_client_metrics", False)
        own = read(at_clients.pop()) if has_own else None
        kept = read(at_clients[0]) if at_clients else None
        return GoingRound(
            round_index, cohort, state, read(metrics), kept, own, take_report
        )

    def call(self, round_index: int, arguments: tuple[Any, ...]) -> Any:
        """Call `next` of the process for a round, and return its result."""
        del round_index
        if isinstance(self._process.next, flf.Computation):
            return self._process.next(*arguments)
        # A plain function may write to a state that it received or returned, while the
        # run evaluates and saves this state. So the function gets and leaves copies.
        state, *clients = arguments
        return copy.deepcopy(self._process.next(copy.deepcopy(state), *clients))

    def read(self, state: Any) -> Any:
        """Return a state in this process, as plain values."""
        return state

    def evaluating(self, round_index: int) -> None:
        """Prepare this thread for calls that evaluate the state of a round."""
        del round_index
        flf.set_default_context(self._context)

    def evaluate(self, comp: Any, arguments: tuple[Any, ...], round_index: int) -> Any:
        """Evaluate the candidates of an adaptive sampler before its round."""
        del round_index
        return comp(*arguments)

    def close(self, num_rounds: int) -> None:
        """End running calls. The next call is numbered as after `num_rounds` rounds."""


def _done(value: Any) -> concurrent.futures.Future[Any]:
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_result(value)
    return done


_CALLS_A_ROUND = 10**4
"""Number of calls that each round can make for other purposes, such as `evaluate`. The
last of these numbers is for the call that evaluates candidates before the round.
"""


def _number_before(round_index: int) -> int:
    return ASIDE_FROM + _CALLS_A_ROUND * (round_index + 1) - 1


def open_calls(process: LearningProcess, interrupts: Interrupts) -> ProcessCalls:
    """Return the object that calls a process in this thread's default context."""
    context = flf.get_context_stack().current
    if isinstance(process.next, flf.Computation):
        if isinstance(context, RayFederatedContext):
            return ReferencedCalls(process, context, owns=False)
        if isinstance(context, ray_fed.ExecutionContext):
            # With `debug`, a breakpoint must stop the calling thread.
            if context.config.debug:
                return NumberedCalls(process, context, interrupts)
            return ReferencedCalls(process, RayFederatedContext(context), owns=True)
    return ProcessCalls(process, context, interrupts)


class ReferencedCalls(ProcessCalls):
    """Calls a process in a context of ray_fed, where calls return references at once.

    The state stays in the object store. If `owns`, `close` also closes `context`.
    """

    def __init__(
        self,
        process: LearningProcess,
        context: RayFederatedContext,
        *,
        owns: bool,
    ) -> None:
        self._process = process
        self._context = context
        self._owns = owns
        self.takes_ahead = owns  # closing the context ends a call that is not needed
        self._reports = RoundReports()
        self._sinks: list[EventSink] = []
        self.subscribe(self._reports)

    @override
    def subscribe(self, sink: EventSink) -> None:
        self._sinks.append(sink)
        self._context.execution_context.subscribe(sink)

    @override
    def initialize(self) -> Any:
        state = self._context.invoke(self._process.initialize)
        self.first_number = self._context.num_invocations
        return state

    @override
    def next(
        self,
        state: Any,
        clients: Sequence[Any],
        round_index: int,
        cohort: Sequence[int],
    ) -> GoingRound:
        number = self.first_number + round_index
        self._reports.expect(number)
        returned = self._context.invoke_at(
            number, self._process.next, (state, *clients)
        )
        return self._going(
            round_index,
            cohort,
            returned,
            self._context.read,
            lambda: self._reports.take(number),
        )

    @override
    def read(self, state: Any) -> Any:
        found = self._context.read(state).result()
        leaves = structure_utils.flatten(found)
        self.bytes_read += sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
        return found

    @override
    def evaluate(self, comp: Any, arguments: tuple[Any, ...], round_index: int) -> Any:
        number = _number_before(round_index)
        result = self._context.invoke_at(number, comp, arguments)
        return self._context.read(result).result()

    @override
    def evaluating(self, round_index: int) -> None:
        def invoke_at(number: int, comp: Any, arg: Any) -> Any:
            result = self._context.invoke_at(number, comp, arg)
            return self._context.read(result).result()

        flf.set_default_context(_EvaluationContext(invoke_at, round_index))

    @override
    def close(self, num_rounds: int) -> None:
        for sink in self._sinks:
            self._context.execution_context.unsubscribe(sink)
        if self._context.execution_context.is_open:
            self._context.resume_at(self.first_number + num_rounds)
        if self._owns:
            self._context.close()


class _EvaluationContext(flf.SyncContext):
    """A context for the calls of `evaluate`, whose numbers no round has.

    Results are plain values. `invoke_at` runs a computation as the call with a number.
    `round_index` is the index of the round whose state is evaluated.
    """

    def __init__(
        self, invoke_at: Callable[[int, Any, Any], Any], round_index: int
    ) -> None:
        self._invoke_at = invoke_at
        self._next = ASIDE_FROM + _CALLS_A_ROUND * round_index

    @override
    def invoke(self, comp: Any, arg: Any) -> Any:
        number, self._next = self._next, self._next + 1
        return self._invoke_at(number, comp, arg)


class NumberedCalls(ProcessCalls):
    """Direct calls with the random numbers that `ReferencedCalls` would draw."""

    def __init__(
        self,
        process: LearningProcess,
        context: ray_fed.ExecutionContext,
        interrupts: Interrupts,
    ) -> None:
        super().__init__(process, context, interrupts)
        self._numbers = context

    @override
    def initialize(self) -> Any:
        state = super().initialize()
        self.first_number = self._numbers.num_calls
        return state

    @override
    def call(self, round_index: int, arguments: tuple[Any, ...]) -> Any:
        number = self.first_number + round_index
        return self._numbers.invoke_at(number, self._process.next, arguments)

    @override
    def evaluate(self, comp: Any, arguments: tuple[Any, ...], round_index: int) -> Any:
        return self._numbers.invoke_at(_number_before(round_index), comp, arguments)

    @override
    def evaluating(self, round_index: int) -> None:
        context = _EvaluationContext(self._numbers.invoke_at, round_index)
        flf.set_default_context(context)

    @override
    def close(self, num_rounds: int) -> None:
        if self._numbers.is_open:
            self._numbers.resume_at(self.first_number + num_rounds)

"""Rounds in flight: how a run calls its process, on which threads, until a signal.

    main thread      next(round r) ----> next(round r + 1) ----> ...
    I/O thread       reads metrics and kept values, reads and saves states
    work thread      what follows each round

ReferencedCalls   a context of ray_fed: calls return at once, the state stays
NumberedCalls     one with `debug`: one call after another, numbered as the above
ProcessCalls      any other context, or plain functions: one call after another

The threads are daemons: a program that is told to leave at once does not wait for what
they do. The first SIGINT or SIGTERM is a wish that the run sees: save and leave. A
second one kills.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Self, TypeVar

import federated_language as fl
from federated_language.program import structure_utils
from typing_extensions import override

import ray_fed
from ray_fed.learning.checkpoints import IoThread
from ray_fed.learning.processes import LearningProcess
from ray_fed.observability import events
from ray_fed.observability.events import EventSink
from ray_fed.observability.report import ASIDE_FROM, ReportBuilder, RoundReport
from ray_fed.program import RayFederatedContext

flf = fl.framework

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_POLL_S = 0.1
"""How soon `wait_for` sees a signal."""


class StopNow(BaseException):
    """Ends a call on the main thread that nothing else could end."""


class Interrupts:
    """Notes the first signal; on the second, the former handlers take over.

    A context manager. On another thread than the main one it does nothing.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        """When the first signal came, by the monotonic clock; None: none came."""
        self._former: dict[int, Any] = {}
        self._breaks = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

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
        self.since = time.monotonic()
        if self._breaks:
            raise StopNow

    def wait_for(self, future: concurrent.futures.Future[_T], grace_s: float) -> _T:
        """Return what a future returns; do not wait for it long once a signal came.

        Raises:
            StopNow: they are over.
            Exception: what the future raised.
        """
        while not concurrent.futures.wait([future], _POLL_S).done:
            left = self.find_time_left(grace_s)
            if left is not None and left <= 0:
                raise StopNow
        return future.result()

    def find_time_left(self, limit_s: float) -> float | None:
        """Return how much is left of a time that began with the first signal.

        Args:
            limit_s: that time.

        Returns:
            Seconds, below 0 once it is over; None where no signal came.
        """
        since = self.since
        return None if since is None else since + limit_s - time.monotonic()

    @contextlib.contextmanager
    def breaking(self) -> Generator[None]:
        """Raise `StopNow` out of what is done inside when the first signal comes.

        Raises:
            StopNow: it came.
        """
        if self.since is not None:
            raise StopNow
        self._breaks = True
        try:
            yield
        finally:
            self._breaks = False


class WorkThread:
    """Does one thing after another, in order; a context manager."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ray_fed run", daemon=True).start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def submit(self, work: Callable[[], _T]) -> concurrent.futures.Future[_T]:
        """Have something done after all before it."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def do() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 (told by the future)
                future.set_exception(error)

        self._tasks.put(do)
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._tasks.put(None)


class RoundReports:
    """An event sink that keeps reports of some calls until they are taken."""

    def __init__(self) -> None:
        self._builder = ReportBuilder()
        self._found: dict[int, RoundReport | None] = {}

    def expect(self, number: int) -> None:
        """Keep the report of the call of a number."""
        self._found[number] = None

    def take(self, number: int) -> RoundReport | None:
        """Return that report, and keep it no longer."""
        return self._found.pop(number, None)

    def on_event(self, event: events.Event) -> None:
        """Add an event to the report of its round."""
        self._builder.on_event(event)
        if isinstance(event, events.RoundFinished):
            last = self._builder.last
            if event.round_index in self._found and last is not None:
                self._found[event.round_index] = last


@dataclasses.dataclass(frozen=True)
class GoingRound:
    """A round that was called.

    Attributes:
        round_index: rounds of the run before it.
        state: after it, to be given to the next call; read by `ProcessCalls.read`.
        metrics: of the clients' training, plain, once they are there.
        kept: what its clients keep for later rounds, likewise; None where they keep
            nothing.
        take_report: returns its report, once; None where there is none.
    """

    round_index: int
    state: Any
    metrics: concurrent.futures.Future[Any]
    kept: concurrent.futures.Future[Any] | None
    take_report: Callable[[], RoundReport | None]


class ProcessCalls:
    """Calls the two computations of a process, and what `evaluate` calls.

    These return when they are done, with plain values, and have no numbers or events.

    Args:
        process: to call.
        context: the default one, which threads of the run are to have too.
        interrupts: end a call.

    Attributes:
        first_number: the number of the call of round 0: in a run that is resumed, that
            of the run before.
        bytes_read: how many bytes of states came into this process so far.
        takes_ahead: whether a round can be called before the one is done whose state it
            takes.
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

    def subscribe(self, sink: EventSink) -> None:
        """Send events of calls to a sink until `close`."""

    def initialize(self) -> Any:
        """Return the initial state; call it first."""
        return self._process.initialize()

    def next(self, state: Any, clients: Sequence[Any], round_index: int) -> GoingRound:
        """Call a round.

        Args:
            state: before it.
            clients: what `next` takes of clients: their data; before these what they
                kept, where they keep something.
            round_index: rounds of the run before it.

        Raises:
            StopNow: the run is to end, and the call did not.
        """
        with self._interrupts.breaking():
            new_state, *kept, metrics = self.call(round_index, (state, *clients))
        return GoingRound(
            round_index,
            new_state,
            _done(metrics),
            _done(kept[0]) if kept else None,
            lambda: None,
        )

    def call(self, round_index: int, arguments: tuple[Any, ...]) -> Any:
        """Return what the process returns of a round."""
        del round_index
        return self._process.next(*arguments)

    def read(self, state: Any) -> Any:
        """Return a state in this process, as plain values."""
        return state

    async def fetch(self, state: Any) -> Any:
        """Return what `read` does, on the I/O thread."""
        return state

    def evaluating(self, round_index: int) -> None:
        """Prepare this thread for calls that evaluate the state of a round."""
        del round_index
        flf.set_default_context(self._context)

    def close(self, num_rounds: int) -> None:
        """End calls that run; the context counts as many calls as rounds now."""


def _done(value: Any) -> concurrent.futures.Future[Any]:
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_result(value)
    return done


_CALLS_A_ROUND = 10**4


def open_calls(
    process: LearningProcess, io: IoThread, interrupts: Interrupts
) -> ProcessCalls:
    """Return how to call a process in the default context of this thread."""
    context = flf.get_context_stack().current
    if isinstance(process.next, flf.Computation):
        if isinstance(context, RayFederatedContext):
            return ReferencedCalls(process, context, io, owns=False)
        if isinstance(context, ray_fed.ExecutionContext):
            # With `debug`, a breakpoint is to stop the thread that calls.
            if context.config.debug:
                return NumberedCalls(process, context, interrupts)
            return ReferencedCalls(process, RayFederatedContext(context), io, owns=True)
    return ProcessCalls(process, context, interrupts)


class ReferencedCalls(ProcessCalls):
    """Calls that return references: the state stays where it was made.

    Args:
        process: to call.
        context: of its calls.
        io: reads references.
        owns: whether `close` closes the context.
    """

    def __init__(
        self,
        process: LearningProcess,
        context: RayFederatedContext,
        io: IoThread,
        *,
        owns: bool,
    ) -> None:
        self._process = process
        self._context = context
        self._io = io
        self._owns = owns
        self.takes_ahead = owns  # so that `close` ends what was called in vain
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
    def next(self, state: Any, clients: Sequence[Any], round_index: int) -> GoingRound:
        number = self.first_number + round_index
        self._reports.expect(number)
        new_state, *kept, metrics = self._context.invoke_at(
            number, self._process.next, (state, *clients)
        )
        return GoingRound(
            round_index,
            new_state,
            self._io.submit(fl.program.materialize_value(metrics)),
            self._io.submit(fl.program.materialize_value(kept[0])) if kept else None,
            lambda: self._reports.take(number),
        )

    @override
    def read(self, state: Any) -> Any:
        return self._io.run(self.fetch(state))

    @override
    async def fetch(self, state: Any) -> Any:
        found = await fl.program.materialize_value(state)
        leaves = structure_utils.flatten(found)
        self.bytes_read += sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
        return found

    @override
    def evaluating(self, round_index: int) -> None:
        def invoke_at(number: int, comp: Any, arg: Any) -> Any:
            result = self._context.invoke_at(number, comp, arg)
            return self._io.run(fl.program.materialize_value(result))

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
    """Calls of `evaluate`, whose numbers are none of rounds; results are plain values.

    Args:
        invoke_at: runs a call of a number.
        round_index: of the round whose state is evaluated.
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
    """Direct calls with the random numbers that `ReferencedCalls` would draw.

    Args:
        process: to call.
        context: the default one.
        interrupts: end a call.
    """

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
    def evaluating(self, round_index: int) -> None:
        context = _EvaluationContext(self._numbers.invoke_at, round_index)
        flf.set_default_context(context)

    @override
    def close(self, num_rounds: int) -> None:
        if self._numbers.is_open:
            self._numbers.resume_at(self.first_number + num_rounds)

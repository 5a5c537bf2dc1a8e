"""How a run calls its process, and how it does so in any context.

The report of each round of a run, by the number of its call.

How a run calls its process where the context has references.

ReferencedCalls   a context of ray_fed: calls return at once, the state stays
NumberedCalls     one with `debug`: one call after another, numbered as the above
DirectCalls       any other context, or plain functions: one call after another
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import federated_language as fl
from federated_language.program import structure_utils
from typing_extensions import override

import ray_fed
from ray_fed.learning.loop_thread import Interrupts, IoThread
from ray_fed.learning.processes import LearningProcess
from ray_fed.observability import events
from ray_fed.observability.events import EventSink
from ray_fed.observability.report import ASIDE_FROM, ReportBuilder, RoundReport
from ray_fed.program import RayFederatedContext


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


flf = fl.framework


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
        started_at: when it was called, in seconds since 1970.
    """

    round_index: int
    state: Any
    metrics: concurrent.futures.Future[Any]
    kept: concurrent.futures.Future[Any] | None
    take_report: Callable[[], RoundReport | None]
    started_at: float


class ProcessCalls(Protocol):
    """Calls the two computations of a process, and what `evaluate` calls."""

    def initialize(self) -> Any:
        """Return the initial state; call it first."""
        ...

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
        ...

    def read(self, state: Any) -> Any:
        """Return a state in this process, as plain values."""
        ...

    async def fetch(self, state: Any) -> Any:
        """Return what `read` does, on the I/O thread."""
        ...

    @property
    def bytes_read(self) -> int:
        """How many bytes of states came into this process so far."""
        ...

    def evaluating(self, round_index: int) -> None:
        """Prepare this thread for calls that evaluate the state of a round."""
        ...

    def close(self, num_rounds: int) -> None:
        """End calls that run; the context counts as many calls as rounds now."""
        ...

    @property
    def first_number(self) -> int:
        """The number of the call of round 0."""
        ...

    def resume(self, first_number: int) -> None:
        """Number rounds as the run did that is resumed."""
        ...

    def subscribe(self, sink: EventSink) -> None:
        """Send events of calls to a sink until `close`."""
        ...


def _done(value: Any) -> concurrent.futures.Future[Any]:
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_result(value)
    return done


class DirectCalls(ProcessCalls):
    """Calls that return when they are done, with plain values.

    Args:
        process: to call.
        context: the default one, which threads of the run are to have too.
        interrupts: end a call.
    """

    def __init__(
        self, process: LearningProcess, context: Any, interrupts: Interrupts
    ) -> None:
        self._process = process
        self._context = context
        self._interrupts = interrupts

    @property
    @override
    def first_number(self) -> int:
        return 0

    @override
    def resume(self, first_number: int) -> None:
        """Do nothing: calls have no numbers."""

    @override
    def subscribe(self, sink: EventSink) -> None:
        """Do nothing: there are no events."""

    @override
    def initialize(self) -> Any:
        return self._process.initialize()

    @override
    def next(self, state: Any, clients: Sequence[Any], round_index: int) -> GoingRound:
        started_at = time.time()
        with self._interrupts.breaking():
            new_state, *kept, metrics = self.call(round_index, (state, *clients))
        return GoingRound(
            round_index,
            new_state,
            _done(metrics),
            _done(kept[0]) if kept else None,
            lambda: None,
            started_at,
        )

    @override
    def read(self, state: Any) -> Any:
        return state

    @override
    async def fetch(self, state: Any) -> Any:
        return state

    def call(self, round_index: int, arguments: tuple[Any, ...]) -> Any:
        """Return what the process returns of a round."""
        del round_index
        return self._process.next(*arguments)

    @property
    @override
    def bytes_read(self) -> int:
        return 0

    @override
    def evaluating(self, round_index: int) -> None:
        flf.set_default_context(self._context)

    @override
    def close(self, num_rounds: int) -> None:
        """Do nothing: no call runs."""


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
    return DirectCalls(process, context, interrupts)


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
        self._first_number = 0
        self._bytes_read = 0
        self._reports = RoundReports()
        self._sinks: list[EventSink] = []
        self.subscribe(self._reports)

    @property
    @override
    def first_number(self) -> int:
        return self._first_number

    @override
    def resume(self, first_number: int) -> None:
        self._first_number = first_number

    @override
    def subscribe(self, sink: EventSink) -> None:
        self._sinks.append(sink)
        self._context.execution_context.subscribe(sink)

    @override
    def initialize(self) -> Any:
        state = self._context.invoke(self._process.initialize)
        self._first_number = self._context.num_invocations
        return state

    @override
    def next(self, state: Any, clients: Sequence[Any], round_index: int) -> GoingRound:
        started_at, number = time.time(), self._first_number + round_index
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
            started_at,
        )

    @override
    def read(self, state: Any) -> Any:
        return self._io.run(self.fetch(state))

    @override
    async def fetch(self, state: Any) -> Any:
        found = await fl.program.materialize_value(state)
        leaves = structure_utils.flatten(found)
        self._bytes_read += sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
        return found

    @property
    @override
    def bytes_read(self) -> int:
        return self._bytes_read

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
            self._context.resume_at(self._first_number + num_rounds)
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


class NumberedCalls(DirectCalls):
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
        self._first_number = 0

    @property
    @override
    def first_number(self) -> int:
        return self._first_number

    @override
    def resume(self, first_number: int) -> None:
        self._first_number = first_number

    @override
    def initialize(self) -> Any:
        state = super().initialize()
        self._first_number = self._numbers.num_calls
        return state

    @override
    def call(self, round_index: int, arguments: tuple[Any, ...]) -> Any:
        number = self._first_number + round_index
        return self._numbers.invoke_at(number, self._process.next, arguments)

    @override
    def evaluating(self, round_index: int) -> None:
        context = _EvaluationContext(self._numbers.invoke_at, round_index)
        flf.set_default_context(context)

    @override
    def close(self, num_rounds: int) -> None:
        if self._numbers.is_open:
            self._numbers.resume_at(self._first_number + num_rounds)

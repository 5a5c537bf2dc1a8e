"""How a run calls its process: by references where the context has them.

ReferencedCalls   a context of ray_fed: calls return at once, the state stays
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
from ray_fed.learning.interrupts import Interrupts
from ray_fed.learning.loop_thread import IoThread
from ray_fed.learning.processes import LearningProcess
from ray_fed.learning.round_reports import RoundReports
from ray_fed.observability.events import EventSink
from ray_fed.observability.report import ASIDE_FROM, RoundReport
from ray_fed.program import RayFederatedContext

flf = fl.framework

_CALLS_A_ROUND = 10**4


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


def open_calls(
    process: LearningProcess, io: IoThread, interrupts: Interrupts
) -> ProcessCalls:
    """Return how to call a process in the default context of this thread."""
    context = flf.get_context_stack().current
    if isinstance(process.next, flf.Computation):
        if isinstance(context, RayFederatedContext):
            return ReferencedCalls(process, context, io, owns=False)
        # With `debug`, a breakpoint is to stop the thread that calls.
        if isinstance(context, ray_fed.ExecutionContext) and not context.config.debug:
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
        first = ASIDE_FROM + _CALLS_A_ROUND * round_index
        flf.set_default_context(_EvaluationContext(self._context, self._io, first))

    @override
    def close(self, num_rounds: int) -> None:
        for sink in self._sinks:
            self._context.execution_context.unsubscribe(sink)
        if self._context.execution_context.is_open:
            self._context.resume_at(self._first_number + num_rounds)
        if self._owns:
            self._context.close()


class _EvaluationContext(flf.SyncContext):
    """Calls of `evaluate`: arguments may be references, results are plain values.

    Args:
        context: runs them.
        io: reads results.
        first: number of the first call.
    """

    def __init__(self, context: RayFederatedContext, io: IoThread, first: int) -> None:
        self._context = context
        self._io = io
        self._next = first

    @override
    def invoke(self, comp: Any, arg: Any) -> Any:
        number, self._next = self._next, self._next + 1
        result = self._context.invoke_at(number, comp, arg)
        return self._io.run(fl.program.materialize_value(result))


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
            new_state, *kept, metrics = self._process.next(state, *clients)
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

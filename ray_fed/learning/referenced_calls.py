"""How a run calls its process where the context has references.

ReferencedCalls   a context of ray_fed: calls return at once, the state stays
DirectCalls       any other context, or plain functions: one call after another
"""

import time
from collections.abc import Sequence
from typing import Any

import federated_language as fl
from federated_language.program import structure_utils
from typing_extensions import override

import ray_fed
from ray_fed.learning.interrupts import Interrupts
from ray_fed.learning.loop_thread import IoThread
from ray_fed.learning.process_calls import DirectCalls, GoingRound, ProcessCalls
from ray_fed.learning.processes import LearningProcess
from ray_fed.learning.round_reports import RoundReports
from ray_fed.observability.events import EventSink
from ray_fed.observability.report import ASIDE_FROM
from ray_fed.program import RayFederatedContext

flf = fl.framework

_CALLS_A_ROUND = 10**4


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

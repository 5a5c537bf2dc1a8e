"""How a run calls its process where the context has references.

ReferencedCalls   a context of ray_fed: calls return at once, the state stays
NumberedCalls     one with `debug`: one call after another, numbered as the above
DirectCalls       any other context, or plain functions: one call after another
"""

import time
from collections.abc import Callable, Sequence
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

"""Checks a computation before its first call, and reports what calls wait for."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

import federated_language as fl

from ray_fed.compiler.form import MergeableCompForm
from ray_fed.language import blocks, intrinsics
from ray_fed.observability import events
from ray_fed.rounds.execution import Computation, ComputationCache

flf = fl.framework
_logger = logging.getLogger(__name__)

_MARKS = frozenset({b"PyFunc", b"GeneratorDataset"})
"""Parts of TensorFlow op names. Every graph with Python functions has one of them in
its bytes. Other graphs may have one, too, so a graph with a mark is checked."""
_SIMULATED = frozenset(uri.encode() for uri in intrinsics.SIMULATED)


class ComputationChecks:
    """Checks each computation once, because a check may take longer than a call.

    `in_process` says whether graphs run in this process, and not in processes of Ray.
    """

    def __init__(self, *, in_process: bool) -> None:
        self._in_process = in_process
        self._warned = False
        self._checked = ComputationCache(self._check)

    def check(self, comp: flf.ConcreteComputation | MergeableCompForm) -> None:
        """Raise UnsupportedError if a graph needs Python functions of another process.

        If the computation simulates secure aggregation, this also logs a warning, once.
        """
        if isinstance(comp, MergeableCompForm):
            for part in (comp.up_to_merge, comp.merge, comp.after_merge):
                self._checked.get(part)
        else:
            self._checked.get(comp)

    def _check(self, comp: flf.ConcreteComputation) -> None:
        # Most computations have no mark. A search of their bytes is quick, and saves an
        # import of TensorFlow.
        written = comp.to_proto().SerializeToString()
        if not any(mark in written for mark in _MARKS | _SIMULATED):
            return
        block = blocks.to_block(comp)
        if block is not None:
            flf.visit_postorder(block, self._check_block)

    def _check_block(self, block: flf.ComputationBuildingBlock) -> None:
        match block:
            case flf.CompiledComputation():
                self._check_graph(block)
            case flf.Intrinsic() if block.uri in intrinsics.SIMULATED:
                self._warn_of_simulation()
            case _:
                pass

    def _check_graph(self, block: flf.CompiledComputation) -> None:
        message = block.to_proto().tensorflow
        if any(mark in message.graph_def.value for mark in _MARKS):
            import ray_fed.tensorflow.graphs.graph_message as graph_message

            check = (
                graph_message.graph_of
                if self._in_process
                else graph_message.check_portable
            )
            check(message)

    def _warn_of_simulation(self) -> None:
        if self._warned:
            return
        self._warned = True
        _logger.warning(
            "Secure aggregation and selection are simulated in the clear: values are"
            " checked against their bounds and summed, and nothing is hidden from the"
            " server."
        )


_PATIENCE_S = 0.5
"""Seconds before the first call of a computation sends an event."""

_LATER_PATIENCE_S = 5.0
"""Seconds before a later call sends an event. Without a wait for workers, a later call
starts in milliseconds."""

AwaitChange = Callable[[str | None], Awaitable[str]]
"""Async function that describes what calls wait for, as soon as the text differs from
its argument, the last text. With None, it returns the present text at once. The text is
"" if no call waits for a worker."""


@dataclasses.dataclass
class _Calls:
    has_returned: bool = False


class StartupProgress:
    """Sends events that say what a slow call waits for.

    A call waits for workers. The first call of a computation also waits for tracing and
    compiling. `emit` sends an event. With None as `await_change`, workers are always
    ready.
    """

    def __init__(
        self, emit: Callable[[events.Event], None], await_change: AwaitChange | None
    ) -> None:
        self._emit = emit
        self._await_change = await_change
        self._calls = ComputationCache(lambda _: _Calls())

    @contextlib.asynccontextmanager
    async def telling(self, comp: Computation) -> AsyncGenerator[None]:
        """Send `events.Waiting` while the `with` block runs a call of a computation."""
        calls = self._calls.get(comp)
        is_first = not calls.has_returned
        if not is_first and self._await_change is None:
            yield
            return
        tasks: list[asyncio.Task[None]] = []

        def start() -> None:
            tasks.append(asyncio.ensure_future(self._tell(is_first=is_first)))

        # A timer costs less than a task, and most calls end before it is due.
        patience_s = _PATIENCE_S if is_first else _LATER_PATIENCE_S
        timer = asyncio.get_running_loop().call_later(patience_s, start)
        try:
            yield
            calls.has_returned = True
        finally:
            timer.cancel()
            for task in tasks:
                task.cancel()
                await asyncio.wait([task])

    async def _tell(self, *, is_first: bool) -> None:
        otherwise = "tracing and compiling" if is_first else ""
        told, activity = None, ""
        try:
            while self._await_change is not None:
                told = await self._await_change(told)
                if (told or otherwise) != activity:
                    activity = told or otherwise
                    self._emit(events.Waiting(activity))
            self._emit(events.Waiting(otherwise))
            await asyncio.Event().wait()
        except Exception:
            _logger.debug("The pool did not describe its waits.", exc_info=True)
        finally:
            if activity or is_first:
                self._emit(events.Waiting(""))

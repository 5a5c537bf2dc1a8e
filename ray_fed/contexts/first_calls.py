"""Before a computation's first call: refuses what cannot run, says what is awaited.

TensorFlow is imported only for a computation that seems to have Python functions.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.compiler.form import MergeableCompForm
from ray_fed.language import blocks, intrinsics
from ray_fed.observability import events
from ray_fed.plan.outcomes import Progress
from ray_fed.rounds.execution import Computation, ComputationCache

flf = fl.framework
_logger = logging.getLogger(__name__)

_MARKS = frozenset({b"PyFunc", b"GeneratorDataset"})
"""One of them is in the bytes of every graph with Python functions, as part of an op's
name; other graphs may have them, too."""
_SIMULATED = frozenset(uri.encode() for uri in intrinsics.SIMULATED)


class ComputationChecks:
    """Checks each computation once, as walking through one may take longer than a call.

    Args:
        in_process: whether graphs run in this process; otherwise they run in workers.
    """

    def __init__(self, *, in_process: bool) -> None:
        self._in_process = in_process
        self._warned = False
        self._checked = ComputationCache(self._check)

    def check(self, comp: flf.ConcreteComputation | MergeableCompForm) -> None:
        """Raise if graphs have Python functions that they cannot call.

        Logs a warning, once, where secure aggregation is simulated.

        Raises:
            UnsupportedError: a graph has Python functions, and runs in another process
                than the one that traced it.
        """
        if isinstance(comp, MergeableCompForm):
            for part in (comp.up_to_merge, comp.merge, comp.after_merge):
                self._checked.get(part)
        else:
            self._checked.get(comp)

    def _check(self, comp: flf.ConcreteComputation) -> None:
        # Most computations have none of it, and their bytes are searched in no time.
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
"""A call that takes less is told of by its result alone."""

AwaitReady = Callable[[Progress | None], Awaitable[Progress]]
"""From a progress to the next one, once that differs; from None to the present one."""


@dataclasses.dataclass
class _Calls:
    comp: Computation
    has_returned: bool = False


class StartupProgress:
    """Sends `events.Waiting` while a computation has not returned once.

    Args:
        emit: takes the events.
        await_ready: see `Backend.await_ready`.
    """

    def __init__(
        self, emit: Callable[[events.Event], None], await_ready: AwaitReady | None
    ) -> None:
        self._emit = emit
        self._await_ready = await_ready
        self._calls = ComputationCache(_Calls)

    @contextlib.asynccontextmanager
    async def telling(self, comp: Computation) -> AsyncGenerator[None]:
        """Send events while the first call of a computation, the `with` block, runs.

        Later calls have nothing to wait for that is worth a word.
        """
        calls = self._calls.get(comp)
        if calls.has_returned:
            yield
            return
        task = asyncio.ensure_future(self._tell())
        try:
            yield
            calls.has_returned = True
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _tell(self) -> None:
        """Send events until the task is cancelled; none if that happens soon."""
        await asyncio.sleep(_PATIENCE_S)
        try:
            if self._await_ready is not None:
                await self._tell_of_workers(self._await_ready)
            self._emit(events.Waiting("tracing and compiling"))
            await asyncio.Event().wait()
        except errors.ClusterError:
            pass  # the call itself raises it
        finally:
            self._emit(events.Waiting(""))

    async def _tell_of_workers(self, await_ready: AwaitReady) -> None:
        progress = await await_ready(None)
        while progress[0] < max(1, progress[1]):
            self._emit(events.Waiting(_describe(*progress)))
            progress = await await_ready(progress)


def _describe(num_ready: int, num_workers: int, needed: str) -> str:
    counted = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    if needed:
        ready = f"{num_ready} of {counted} ready, " if num_ready else ""
        return f"{ready}waiting for {needed}"
    if num_workers == 0:
        return "looking for room for workers"
    if num_ready == 0:
        return f"starting {counted}: TensorFlow"
    return f"{num_ready} of {counted} ready"

"""Hands plans to runners that are free, and tells sinks what became of them."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

import federated_language as fl

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.observability import events
from ray_fed.plan import outcomes
from ray_fed.rounds.calls import Call


class Dispatcher:
    """Gives each runner one plan at a time; a plan waits for a free runner.

    Args:
        runners: AsyncContexts that take plans.
        sinks: receive the events of all rounds.
    """

    def __init__(
        self,
        runners: Sequence[fl.framework.AsyncContext],
        sinks: Sequence[events.EventSink],
    ) -> None:
        self._free: asyncio.Queue[fl.framework.AsyncContext] = asyncio.Queue()
        for runner in runners:
            self._free.put_nowait(runner)
        self._sinks = sinks

    def emit(self, event: events.Event) -> None:
        """Send an event to all sinks."""
        for sink in self._sinks:
            sink.on_event(event)

    async def run(
        self,
        comp: Any,
        arg: Any,
        subround_index: int,
        call: Call,
        bytes_sliced: int = 0,
    ) -> outcomes.Outcome:
        """Return what a runner makes of a plan, once one is free, and tell of it.

        Args:
            comp: the plan.
            arg: that it takes.
            subround_index: in the round.
            call: that it belongs to.
            bytes_sliced: of clients' values that are its own.

        Raises:
            LocatedError: it failed; the error names round and subround.
        """
        outcome, started = await self._invoke(comp, arg, subround_index, call)
        leaves: Iterable[range] = getattr(comp, "leaves", ())
        self.emit(
            events.SubroundFinished(
                round_index=call.spec.round_index,
                subround_index=subround_index,
                num_clients=sum(len(leaf) for leaf in leaves),
                attempts=outcome.attempts,
                started_s=started - call.spec.started,
                seconds=time.monotonic() - started,
                worker=outcome.worker,
                worker_pid=outcome.worker_pid,
                coordinator_pid=outcome.coordinator_pid,
                node=outcome.node,
                kernel_leaves=outcome.kernel_leaves,
                no_kernel=outcome.no_kernel,
                lost=outcome.lost,
                bytes_sliced=bytes_sliced,
                bytes_returned=sum(outcome.value_bytes),
                fingerprint=outcome.fingerprint,
                num_workers=outcome.num_workers,
            )
        )
        return outcome

    async def _invoke(
        self, comp: Any, arg: Any, subround_index: int, call: Call
    ) -> tuple[outcomes.Outcome, float]:
        """Return what a runner makes of a plan, and when it was free to begin."""
        runner = await self._free.get()
        started = time.monotonic()
        try:
            outcome: outcomes.Outcome = await runner.invoke(comp, arg)
        except errors.LocatedError as error:
            located = error.located(
                round_index=call.spec.round_index, subround_index=subround_index
            )
            told = error.cause_text
            raise located from (tracebacks.WorkerTraceback(told) if told else None)
        finally:
            self._free.put_nowait(runner)
        call.notes.update(outcome.notes)
        return outcome, started

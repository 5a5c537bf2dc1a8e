"""Runs the leaves of one computation in subrounds, without clients that fail.

A subround waits for a free runner; there may be more subrounds than runners.
"""

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.compiler.form import KeepingStage
from ray_fed.executors.fanout import gather_by_index
from ray_fed.observability import events
from ray_fed.plan import plans
from ray_fed.plan.random_keys import DrawKey
from ray_fed.rounds.calls import Call
from ray_fed.rounds.dispatch import Dispatcher
from ray_fed.rounds.policy import RoundPolicy
from ray_fed.rounds.prepared_work import PreparedWork

flf = fl.framework


class StageAgainError(Exception):
    """A client was dropped after stages in which it took part."""


class Subrounds:
    """Runs computations on the leaves of calls.

    Args:
        dispatcher: runs plans.
        policy: how calls are cut and carried.
        work: prepares the computations.
    """

    def __init__(
        self, dispatcher: Dispatcher, policy: RoundPolicy, work: PreparedWork
    ) -> None:
        self._dispatcher, self._policy, self._work = dispatcher, policy, work

    def draw(self, call: Call, dropped: tuple[int, ...] = ()) -> DrawKey:
        """Return the key of a call's random numbers.

        Args:
            call: that draws.
            dropped: clients, by index, that others are not renumbered for.
        """
        seed, round_index = self._policy.seed, call.spec.round_index
        return DrawKey(seed, round_index, dropped=dropped)

    async def run(
        self,
        comp: flf.ConcreteComputation,
        merge: flf.ConcreteComputation | None,
        call: Call,
        components_type: bytes | None = None,
        keeping: KeepingStage | None = None,
        num_workers: int = 1,
    ) -> list[tuple[object, ...]]:
        """Return what each subround returned, in order, but for what is kept.

        Args:
            comp: of a leaf.
            merge: of the results of two leaves; None leaves them as they are.
            call: that they belong to.
            components_type: see `plans.Finish`.
            keeping: what to keep of clients for later stages, where runs keep it.
            num_workers: that a subround of one leaf may use.
        """
        merging = None if merge is None else self._work.serialise(merge)
        first = call.take_indices(len(call.cut.runs))

        async def run(index: int, leaves: range) -> tuple[object, ...]:
            while True:
                try:
                    return await run_once(index, leaves)
                except errors.ComputationError as error:
                    self._drop_clients(error, first + index, call)
                call.slice_run(index)
                if call.merged:  # by stages in which they took part
                    raise StageAgainError

        async def run_once(index: int, leaves: range) -> tuple[object, ...]:
            chunks = call.cut.chunks[index]
            kept = keeping if call.keeps[index] else None
            work = comp if kept is None else kept.computation
            subround = plans.Subround(
                self._work.serialise(work),
                merging,
                call.cut.size,
                leaves.start,
                call.leaves(index),
                self.draw(call, call.dropped_of(index)),
                () if merge is None else tuple(call.cut.subtrees_of(index)),
                components_type,
                None if merge is None else self._work.fuse(work),
                self._policy.call_s or 0.0,
                0 if kept is None else len(kept.emits),
                call.max_dropped > 0,
                chunks,
                max(num_workers, len(chunks)),
            )
            arg = call.run_arg(index, () if kept is None else kept.takes)
            num_bytes = call.bytes_sliced[index]
            outcome = await self._dispatcher.run(
                subround, arg, first + index, call, num_bytes
            )
            return outcome.values if kept is None else call.keep(index, kept, outcome)

        return await gather_by_index(
            (run(index, leaves) for index, leaves in enumerate(call.cut.runs)),
            first=call.cut.heaviest_first,
        )

    def _drop_clients(
        self, error: errors.ComputationError, subround_index: int, call: Call
    ) -> None:
        """Go on without the clients that an error names; see `Call.drop_clients`."""
        for client, cause in call.drop_clients(error).items():
            dropped = events.ClientDropped(
                call.spec.round_index, subround_index, client, cause
            )
            self._dispatcher.emit(dropped)

"""One call, from its argument to its result: cut, run in subrounds, merge, finish.

    argument --cut by index--> leaves --gathered into runs--> subrounds   (at once)
    partials --merged by index, along the tree--> merged
    argument, merged --after_merge--> result; by leaf where clients keep values

A subround waits for a free runner; there may be more subrounds than runners. Results
are kept by index, never by arrival.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import federated_language as fl

import ray_fed.blocks as blocks
import ray_fed.plan as plan
import ray_fed.values as values
from ray_fed.compiler.form import MergeableCompForm
from ray_fed.contexts import partition
from ray_fed.contexts.policy import CohortCut, RoundPolicy
from ray_fed.draws import DrawKey
from ray_fed.executors.fanout import gather_by_index
from ray_fed.observability import events

flf = fl.framework


class Rounds:
    """Runs mergeable forms, and whole computations, over runners.

    Args:
        runners: AsyncContexts that take plans; each is given one at a time.
        policy: how to cut.
    """

    def __init__(
        self, runners: Sequence[flf.AsyncContext], policy: RoundPolicy
    ) -> None:
        self._free: asyncio.Queue[flf.AsyncContext] = asyncio.Queue()
        for runner in runners:
            self._free.put_nowait(runner)
        self._policy = policy
        self._round_index = 0

    async def run_form(self, form: MergeableCompForm, arg: Any) -> Any:
        """Return the result of a mergeable form, in the form that runners return.

        Args:
            form: what to run.
            arg: None without a parameter.
        """
        parameter = form.up_to_merge.type_signature.parameter
        num_clients = partition.count_clients(
            arg, parameter, self._policy.default_num_clients
        )
        cut = CohortCut.of(num_clients, self._policy)
        async with self._round(num_clients, cut) as round_index:
            shared = self._share(arg, parameter)
            slices = [self._slice(shared, parameter, cut, run) for run in cut.runs]
            partials = await self._run_up_to_merge(form, cut, slices, round_index)
            return await self._finish(
                form, cut, slices, (partials, shared), round_index
            )

    async def run_whole(self, comp: flf.ConcreteComputation, arg: Any) -> Any:
        """Return the result of a computation that is not cut into subrounds."""
        parameter = comp.type_signature.parameter
        num_clients = partition.count_clients(
            arg, parameter, self._policy.default_num_clients
        )
        cut = CohortCut.of(num_clients, self._policy)
        whole = dataclasses.replace(cut, leaves=(range(num_clients),), runs=(range(1),))
        async with self._round(num_clients, whole) as round_index:
            shared = self._share(arg, parameter)
            subround = plan.Subround(
                blocks.serialise(_block(comp)),
                None,
                cut.size,
                0,
                whole.leaves,
                self._draw(round_index),
                (),
            )
            outcome = await self._dispatch(subround, [shared], 0, round_index)
            return outcome.values[0]

    @contextlib.asynccontextmanager
    async def _round(self, num_clients: int, cut: "CohortCut") -> AsyncGenerator[int]:
        round_index, started = self._round_index, time.monotonic()
        self._round_index += 1
        self._emit(
            events.RoundStarted(
                round_index, num_clients, len(cut.leaves), len(cut.runs)
            )
        )
        yield round_index
        self._emit(events.RoundFinished(round_index, time.monotonic() - started))

    def _draw(self, round_index: int) -> DrawKey:
        return DrawKey(self._policy.seed, round_index)

    def _emit(self, event: events.Event) -> None:
        for sink in self._policy.sinks:
            sink.on_event(event)

    def _share(self, arg: Any, parameter: fl.Type | None) -> Any:
        """Store what all subrounds see; leave what is cut by clients."""
        if parameter is None:
            return None

        def share(part_type: fl.Type, part: Any) -> Any:
            return (
                part
                if values.differs_by_client(part_type)
                else self._policy.store(part)
            )

        return values.map_placed(share, arg, parameter)

    def _slice(
        self, arg: Any, parameter: fl.Type | None, cut: "CohortCut", run: range
    ) -> list[Any]:
        """Return the argument of each leaf of a run; the run's clients stored once."""
        if parameter is None:
            return [None] * len(run)
        leaves = [cut.leaves[index] for index in run]
        clients = range(leaves[0].start, leaves[-1].stop)

        def store(part_type: fl.Type, part: Any) -> Any:
            return (
                self._policy.store(part)
                if values.differs_by_client(part_type)
                else part
            )

        sliced = partition.slice_clients(arg, parameter, clients)
        stored = values.map_placed(store, sliced, parameter)
        return [
            partition.slice_clients(
                stored,
                parameter,
                range(leaf.start - clients.start, leaf.stop - clients.start),
            )
            for leaf in leaves
        ]

    async def _run_up_to_merge(
        self,
        form: MergeableCompForm,
        cut: "CohortCut",
        slices: Sequence[list[Any]],
        round_index: int,
    ) -> list[Any]:
        partial = values.member_type(form.up_to_merge.type_signature.result)
        if values.is_empty_struct(partial):
            return []
        computation = blocks.serialise(_block(form.up_to_merge))
        merge = blocks.serialise(_block(form.merge))

        async def run(index: int, leaves: range) -> tuple[object, ...]:
            subround = plan.Subround(
                computation,
                merge,
                cut.size,
                leaves.start,
                tuple(cut.leaves[leaf] for leaf in leaves),
                self._draw(round_index),
                tuple(plan.subtrees(leaves.start, leaves.stop, len(cut.leaves))),
            )
            outcome = await self._dispatch(subround, slices[index], index, round_index)
            return outcome.values

        outcomes = await gather_by_index(
            run(index, leaves) for index, leaves in enumerate(cut.runs)
        )
        return [partial for outcome in outcomes for partial in outcome]

    async def _finish(
        self,
        form: MergeableCompForm,
        cut: "CohortCut",
        slices: Sequence[list[Any]],
        merging: tuple[list[Any], Any],
        round_index: int,
    ) -> Any:
        result = form.after_merge.type_signature.result
        by_client = flf.type_contains(result, values.differs_by_client)
        partials, arg = merging
        finish = plan.Finish(
            merge=blocks.serialise(_block(form.merge)) if partials else None,
            nodes=tuple(cut.nodes),
            partial_type=blocks.serialise_type(
                values.member_type(form.up_to_merge.type_signature.result)
            ),
            computation=None
            if by_client
            else blocks.serialise(_block(form.after_merge)),
            num_clients=cut.leaves[-1].stop,
            clients_per_leaf=cut.size,
            draw=self._draw(round_index),
        )
        index = len(cut.runs) if partials else 0
        outcome = await self._dispatch(finish, (partials, arg), index, round_index)
        if not by_client:
            return outcome.values[0]
        return await self._run_after_merge(
            form, cut, slices, outcome.values[0], round_index
        )

    async def _run_after_merge(
        self,
        form: MergeableCompForm,
        cut: "CohortCut",
        slices: Sequence[list[Any]],
        merged: Any,
        round_index: int,
    ) -> Any:
        takes_argument = form.up_to_merge.type_signature.parameter is not None
        merged = self._policy.store(merged)

        async def run(index: int, leaves: range) -> tuple[object, ...]:
            subround = plan.Subround(
                blocks.serialise(_block(form.after_merge)),
                None,
                cut.size,
                leaves.start,
                tuple(cut.leaves[leaf] for leaf in leaves),
                self._draw(round_index),
                (),
            )
            args = [
                (leaf, merged) if takes_argument else merged for leaf in slices[index]
            ]
            position = len(cut.runs) + 1 + index
            outcome = await self._dispatch(subround, args, position, round_index)
            return outcome.values

        outcomes = await gather_by_index(
            run(index, leaves) for index, leaves in enumerate(cut.runs)
        )
        results = [result for outcome in outcomes for result in outcome]
        return partition.join_results(results, form.after_merge.type_signature.result)

    async def _dispatch(
        self, comp: Any, arg: Any, subround_index: int, round_index: int
    ) -> plan.Outcome:
        runner = await self._free.get()
        started = time.monotonic()
        try:
            outcome: plan.Outcome = await runner.invoke(comp, arg)
        finally:
            self._free.put_nowait(runner)
        leaves: Iterable[range] = getattr(comp, "leaves", ())
        self._emit(
            events.SubroundFinished(
                round_index=round_index,
                subround_index=subround_index,
                num_clients=sum(len(leaf) for leaf in leaves),
                attempts=outcome.attempts,
                seconds=time.monotonic() - started,
                worker=outcome.worker,
                worker_pid=outcome.worker_pid,
                coordinator_pid=outcome.coordinator_pid,
                node=outcome.node,
            )
        )
        return outcome


def _block(comp: flf.ConcreteComputation) -> flf.ComputationBuildingBlock:
    block = blocks.to_block(comp)
    return values.narrow(block, flf.ComputationBuildingBlock, "a mergeable form")

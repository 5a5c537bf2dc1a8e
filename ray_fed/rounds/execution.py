"""One call, from its argument to its result: cut, run in subrounds, merge, finish.

    argument --cut by index--> leaves --gathered into runs--> subrounds   (at once)
    partials --merged by index, along the tree--> merged
    argument, merged --the next stage, as above--> merged, too
    argument, all merged --after_merge--> result; by leaf where clients keep values

A subround waits for a free runner; there may be more subrounds than runners. Results
are kept by index, never by arrival.
"""

import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import federated_language as fl

from ray_fed.compiler.form import KeepingStage, MergeableCompChain, Stage
from ray_fed.executors.fanout import gather_by_index
from ray_fed.language import blocks, type_checks
from ray_fed.observability import events
from ray_fed.plan import diagnostics, plans
from ray_fed.rounds import client_cuts
from ray_fed.rounds.calls import Call
from ray_fed.rounds.dispatch import Dispatcher
from ray_fed.rounds.policy import CallSpec, CohortCut, RoundPolicy
from ray_fed.rounds.prepared_work import PreparedWork
from ray_fed.rounds.subrounds import StageAgainError, Subrounds

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
        self._dispatcher = Dispatcher(runners, policy.sinks)
        self._policy = policy
        self._lock = threading.Lock()
        self.num_calls = 0
        self._work = PreparedWork(policy)
        self._subrounds = Subrounds(self._dispatcher, policy, self._work)

    def new_call(
        self,
        *,
        by_component: bool = False,
        started: float | None = None,
        number: int | None = None,
    ) -> CallSpec:
        """Number a call, in the order in which threads ask; one with a `number` is not.

        `started` is now, unless that is said, by the monotonic clock.
        """
        started = time.monotonic() if started is None else started
        if number is not None:
            return CallSpec(number, started, by_component)
        with self._lock:
            self.num_calls += 1
            return CallSpec(self.num_calls - 1, started, by_component)

    async def run_chain(
        self, chain: MergeableCompChain, arg: Any, spec: CallSpec
    ) -> Any:
        """Return the result of a chain of stages, in the form that runners return.

        Args:
            chain: what to run.
            arg: None without a parameter; parts of it may be stored.
            spec: from `new_call`; with `by_component` it returns components.
        """
        parameter = chain.parameter
        num_clients = client_cuts.count_clients(
            arg, parameter, self._policy.default_num_clients
        )
        weights = client_cuts.weigh_clients(arg, parameter)
        policy = await self._policy.at_round()
        cut = CohortCut.of(num_clients, policy, parameter, weights)
        async with self._round(spec, num_clients, cut) as call:
            leaves_out = policy.leaves_out_clients
            call.take_argument(arg, parameter, leaves_out_clients=leaves_out)
            call.keeps = cut.first_runs(policy.kept_bytes, chain.kept_member_bytes)
            result_type = chain.after_merge.type_signature.result
            if not type_checks.holds_clients(result_type):
                call.max_dropped = self._policy.max_dropped_clients
            while True:
                with contextlib.suppress(StageAgainError):
                    return await self._run_stages(chain, call)

    async def run_whole(
        self, comp: flf.ConcreteComputation, arg: Any, spec: CallSpec
    ) -> Any:
        """Return the result of a computation that is not cut into subrounds."""
        parameter = comp.type_signature.parameter
        num_clients = client_cuts.count_clients(
            arg, parameter, self._policy.default_num_clients
        )
        policy = await self._policy.at_round()
        cut = CohortCut.of(num_clients, policy, parameter)
        whole = CohortCut((range(num_clients),), (range(1),), cut.size, (0,), ((),))
        num_workers = policy.workers_of(1, len(cut.leaves))
        async with self._round(spec, num_clients, whole) as call:
            call.take_argument(arg, parameter)
            call.keeps = [False]
            components_type = spec.components_type(comp.type_signature.result)
            (held,) = await self._subrounds.run(
                comp, None, call, components_type, num_workers=num_workers
            )
            return held[0] if components_type is None else held

    @contextlib.asynccontextmanager
    async def _round(
        self, spec: CallSpec, num_clients: int, cut: CohortCut
    ) -> AsyncGenerator[Call]:
        call = Call(spec, cut, self._policy.store)
        round_index = spec.round_index
        self._dispatcher.emit(
            events.RoundStarted(
                round_index, num_clients, len(cut.leaves), len(cut.runs)
            )
        )
        yield call
        for note in diagnostics.in_order(call.notes):
            self._dispatcher.emit(events.of_note(note, round_index))
        seconds = time.monotonic() - spec.started
        self._dispatcher.emit(
            events.RoundFinished(
                round_index,
                seconds,
                call.bytes_broadcast,
                sum(call.bytes_sliced.values()),
            )
        )

    async def _run_stages(self, chain: MergeableCompChain, call: Call) -> Any:
        call.merged, call.kept = [], {}
        *earlier, last = chain.stages
        for stage in earlier:
            partials = await self._run_up_to_merge(stage, call)
            call.merged.append(await self._merge(stage, partials, call))
        partials = await self._run_up_to_merge(last, call)
        return await self._run_after_merge(last, partials, chain, call)

    async def _run_up_to_merge(self, stage: Stage, call: Call) -> list[Any]:
        partial = type_checks.member_type(stage.up_to_merge.type_signature.result)
        is_empty = type_checks.is_empty_struct(partial)
        if is_empty and not (stage.keeping and all(call.keeps)):
            call.keeps = [False] * len(call.keeps)  # the end computes it all
            return []
        outcomes = await self._subrounds.run(
            stage.up_to_merge, stage.merge, call, keeping=stage.keeping
        )
        return [partial for o in outcomes for partial in o if not is_empty]

    async def _finish(
        self,
        stage: Stage,
        partials: list[Any],
        computation: flf.ConcreteComputation | None,
        call: Call,
    ) -> Any:
        """Return what a stage merged; with a computation, its result."""
        partial_type = type_checks.member_type(stage.up_to_merge.type_signature.result)
        result_type = (
            partial_type if computation is None else computation.type_signature.result
        )
        components_type = call.spec.components_type(result_type)
        finish = plans.Finish(
            merge=self._work.serialise(stage.merge) if partials else None,
            subtrees=tuple(call.cut.subtrees),
            partial_type=blocks.serialise_type(partial_type),
            computation=computation and self._work.serialise(computation),
            num_clients=call.cut.leaves[-1].stop,
            clients_per_leaf=call.cut.size,
            draw=self._subrounds.draw(call),
            components_type=components_type,
            in_graphs=self._policy.call_s is not None,
        )
        before = () if computation is None else (*call.at_finish, *call.merged)
        arg = (tuple(partials), before)
        outcome = await self._dispatcher.run(finish, arg, call.take_indices(1), call)
        return outcome.values[0] if components_type is None else outcome.values

    async def _merge(self, stage: Stage, partials: list[Any], call: Call) -> Any:
        """Return what a stage merged, to be passed along."""
        merged = await self._finish(stage, partials, None, call)
        result_type = type_checks.member_type(stage.up_to_merge.type_signature.result)
        return call.share(call.spec.as_whole(merged, result_type), result_type)

    async def _run_after_merge(
        self,
        stage: Stage,
        partials: list[Any],
        chain: MergeableCompChain,
        call: Call,
    ) -> Any:
        after_merge, parts = chain.after_merge, chain.parts
        result_type = after_merge.type_signature.result
        if not type_checks.holds_clients(result_type):
            return await self._finish(stage, partials, after_merge, call)
        if parts is None:
            call.merged.append(await self._merge(stage, partials, call))
            result = await self._run_at_clients(after_merge, None, call)
            return call.spec.as_asked(result, result_type)
        at_server: Any = ()
        if parts.at_server is not None:
            at_server = await self._finish(stage, partials, parts.at_server, call)
            at_server = call.spec.as_whole(
                at_server, parts.at_server.type_signature.result
            )
        if parts.names is not None and all(call.keeps):
            at_clients = await self._read_kept(parts.names, call)
        else:
            call.merged.append(await self._merge(stage, partials, call))
            at_clients = await self._run_at_clients(
                parts.at_clients, parts.keeping, call
            )
        result = client_cuts.join_parts(iter(at_server), iter(at_clients), result_type)
        return call.spec.as_asked(result, result_type)

    async def _run_at_clients(
        self,
        comp: flf.ConcreteComputation,
        keeping: KeepingStage | None,
        call: Call,
    ) -> Any:
        """Return a result that leaves compute, or the clients' parts of it."""
        outcomes = await self._subrounds.run(comp, None, call, keeping=keeping)
        results = [result for outcome in outcomes for result in outcome]
        return client_cuts.join_results(results, comp.type_signature.result)

    async def _read_kept(self, names: Sequence[str], call: Call) -> list[list[Any]]:
        """Return values of all clients that stages kept."""
        runs = range(len(call.cut.runs))
        held = [call.kept[run][name] for name in names for run in runs]
        read = await gather_by_index(self._policy.read_clients(part) for part in held)
        of_runs = len(call.cut.runs)
        return [
            [member for part in read[start : start + of_runs] for member in part]
            for start in range(0, len(read), of_runs)
        ]

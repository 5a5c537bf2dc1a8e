"""One call, from its argument to its result: cut, run in subrounds, merge, finish.

    argument --cut by index--> leaves --gathered into runs--> subrounds   (at once)
    partials --merged by index, along the tree--> merged
    argument, merged --the next stage, as above--> merged, too
    argument, all merged --after_merge--> result; by leaf where clients keep values

A subround waits for a free runner; there may be more subrounds than runners. Results
are kept by index, never by arrival.

Keeps what was made of computations: by content, and the same object at once.

A computation is hashed and compared by its whole message, which takes as long as a
small round: a program calls the same object over and over.

Computations as plans carry them: serialised, and fused into client kernels.

Hands plans to runners that are free, and tells sinks what became of them.

Runs the leaves of one computation in subrounds, without clients that fail.

A subround waits for a free runner; there may be more subrounds than runners.
"""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import federated_language as fl

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
import ray_fed.rounds.client_cuts as client_cuts
import ray_fed.tracebacks as tracebacks
from ray_fed.compiler.form import KeepingStage, MergeableCompChain, Stage
from ray_fed.compiler.fuse import fuse
from ray_fed.executors.loops import gather_by_index
from ray_fed.language import blocks, type_checks
from ray_fed.observability import events
from ray_fed.plan import diagnostics, outcomes
from ray_fed.plan.random_keys import DrawKey
from ray_fed.rounds.client_cuts import Call, CallSpec, CohortCut, RoundPolicy
from ray_fed.values.lru_cache import LruCache

Computation = fl.framework.ConcreteComputation
_T = TypeVar("_T")
_CAPACITY = 128


class ComputationCache(Generic[_T]):
    """What a function makes of computations, of the latest 128 of them.

    Args:
        make: a pure function.
    """

    def __init__(self, make: Callable[[Computation], _T]) -> None:
        self._make = make
        self._by_content: LruCache[Computation, _T] = LruCache(_CAPACITY)
        # Holds the object, so that its id is not another's.
        self._by_identity: LruCache[int, tuple[Computation, _T]] = LruCache(_CAPACITY)

    def get(self, comp: Computation) -> _T:
        """Return what was made of a computation, or of one that is equal."""
        _, found = self._by_identity.get(
            id(comp),
            lambda: (comp, self._by_content.get(comp, lambda: self._make(comp))),
        )
        return found


flf = fl.framework


class PreparedWork:
    """Prepares the computations of stages, each once while it is in use.

    Args:
        policy: whether and how client kernels are made.
    """

    def __init__(self, policy: RoundPolicy) -> None:
        self._policy = policy
        self._serialised = ComputationCache(blocks.serialize_computation)
        self._kernels = ComputationCache(self._plan_kernel)

    def serialise(self, comp: flf.ConcreteComputation) -> bytes:
        """Return a computation as plans carry it."""
        return self._serialised.get(comp)

    def fuse(
        self, up_to_merge: flf.ConcreteComputation
    ) -> plans.Kernel | plans.NoKernel | None:
        """Return the client kernel of a leaf's work, or why there is none.

        Returns:
            None where kernels are off.
        """
        if self._policy.call_s is None:
            return None
        return self._kernels.get(up_to_merge)

    def _plan_kernel(
        self, up_to_merge: flf.ConcreteComputation
    ) -> plans.Kernel | plans.NoKernel:
        kernel = fuse(up_to_merge)
        if isinstance(kernel, plans.NoKernel):
            return kernel
        return dataclasses.replace(
            kernel,
            jit=self._policy.jit,
            vectorised_clients=self._policy.vectorised_clients,
        )


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

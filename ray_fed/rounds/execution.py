"""The driver's part in one call (a round), from its argument to its result.

    argument -> leaves -> subrounds, which run at once -> partials -> merged value
    argument and merged values -> the next stage, in the same way
    argument and all merged values -> after_merge -> result

A stage is clients' work (`up_to_merge`) and its aggregation (`merge`). A leaf is a few
neighboring clients, and a subround has neighboring leaves. `after_merge` is the
server's work. If the result has values at clients, subrounds compute these after the
last merge. A runner runs one subround at a time. Results are ordered by index.
"""

import asyncio
import contextlib
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
import ray_fed.rounds.client_cuts as client_cuts
import ray_fed.tracebacks as tracebacks
from ray_fed.compiler.form import KeepingStage, MergeableCompChain, Stage
from ray_fed.compiler.fuse import fuse
from ray_fed.executors.fan_out import gather_by_index
from ray_fed.language import blocks, type_checks
from ray_fed.observability import events
from ray_fed.plan import diagnostics, outcomes
from ray_fed.plan.random_keys import DrawKey
from ray_fed.rounds.client_cuts import CohortCut, RoundPolicy, RoundRequest, RoundState
from ray_fed.values.lru_cache import LruCache

Computation = fl.framework.ConcreteComputation
_T = TypeVar("_T")
_CAPACITY, _LATEST = 128, 6
_CUTS = 16


class ComputationCache(Generic[_T]):
    """Caches the results of a pure function of computations, `make`.

    A result stays while its computation is alive. The latest few results stay longer,
    for equal computations, for example if a learning process is built again.
    """

    def __init__(self, make: Callable[[Computation], _T]) -> None:
        self._make = make
        self._latest: LruCache[Computation, _T] = LruCache(_LATEST)
        # The key is the id of a computation, which is unique while it is alive. A
        # WeakKeyDictionary would never drop a result that refers to its computation.
        self._living: LruCache[int, tuple[weakref.ref[Computation], _T]]
        self._living = LruCache(_CAPACITY)

    def get(self, comp: Computation) -> _T:
        """Return the result for a computation, from the cache if possible."""
        key = id(comp)
        found = self._living.find(key)
        if found is None or found[0]() is not comp:
            made = self._latest.get(comp, lambda: self._make(comp))
            forget = functools.partial(_forget, weakref.ref(self._living), key)
            found = weakref.ref(comp, forget), made
            self._living.put(key, found)
        return found[1]


def _forget(
    living: "weakref.ref[LruCache[int, Any]]", key: int, ended: "weakref.ref[Any]"
) -> None:
    cache = living()
    if cache is not None:
        cache.drop(key, lambda value: value[0] is ended)


flf = fl.framework


_AT_CLIENTS = plans.Fallback("a result at clients")


class StageAgainError(Exception):
    """All stages must run again, as earlier stages counted a client that failed."""


class Rounds:
    """Runs calls on runners: computations in stages, or whole computations.

    `runners` are contexts whose `invoke` takes a plan (the work of a subround or of the
    round's finish) and its argument. Each runs one plan at a time. `policy` has the
    settings. `num_calls` is the number of calls so far.
    """

    def __init__(
        self, runners: Sequence[flf.AsyncContext], policy: RoundPolicy
    ) -> None:
        self._free: asyncio.Queue[flf.AsyncContext] = asyncio.Queue()
        for runner in runners:
            self._free.put_nowait(runner)
        self._policy = policy
        self._lock = threading.Lock()
        self.num_calls = 0
        self._serialized = ComputationCache(blocks.serialize_computation)
        self._kernels = ComputationCache(self._plan_kernel)
        self._cuts: LruCache[tuple[object, ...], CohortCut] = LruCache(_CUTS)
        self._client_s: LruCache[bytes, float] = LruCache(_CAPACITY)

    def _plan_kernel(
        self, up_to_merge: flf.ConcreteComputation
    ) -> plans.Kernel | plans.Fallback:
        kernel = fuse(up_to_merge)
        if isinstance(kernel, plans.Fallback):
            return kernel
        return dataclasses.replace(
            kernel,
            jit=self._policy.jit,
            vectorized_clients=self._policy.vectorized_clients,
        )

    def _kernel_of(
        self, work: flf.ConcreteComputation, why: plans.Fallback | None
    ) -> plans.Kernel | plans.Fallback | None:
        if self._policy.call_s is None:
            return None
        return why or self._kernels.get(work)

    def _cut(
        self,
        num_clients: int,
        num_workers: int,
        parameter: fl.Type | None,
        weights: NDArray[np.float64] | None = None,
    ) -> CohortCut:
        about = None if weights is None else weights.tobytes()
        type_spec = None if self._policy.replicas is None else parameter
        cut = num_clients, num_workers, self._policy, parameter, weights
        return self._cuts.get(
            (num_clients, num_workers, type_spec, about), lambda: CohortCut.of(*cut)
        )

    def new_call(
        self,
        *,
        by_component: bool = False,
        started: float | None = None,
        number: int | None = None,
    ) -> RoundRequest:
        """Return the request of a new call.

        Args:
            by_component: Whether the result is a tuple of its tensors and sequences.
            started: Start of the call by the monotonic clock, or None for now.
            number: Index of the round, which decides its random numbers. With None, the
                call gets the next number, and `num_calls` counts it.
        """
        started = time.monotonic() if started is None else started
        if number is not None:
            return RoundRequest(number, started, by_component)
        with self._lock:
            self.num_calls += 1
            return RoundRequest(self.num_calls - 1, started, by_component)

    async def run_chain(
        self, chain: MergeableCompChain, arg: Any, spec: RoundRequest
    ) -> Any:
        """Run a computation in stages, and return its result, whole or as components.

        `arg` is the plain argument, whose parts may be stored, or None.
        """
        parameter = chain.parameter
        num_clients = client_cuts.count_clients(
            arg, parameter, self._policy.default_num_clients
        )
        weights = client_cuts.weigh_clients(arg, parameter)
        work = self._serialized.get(chain.stages[0].up_to_merge)
        # The seconds of one client in the last call tell how many workers are worth it.
        client_s = self._client_s.find(work)
        num_workers = await self._policy.workers_now(
            client_s and client_s * num_clients
        )
        cut = self._cut(num_clients, num_workers, parameter, weights)
        async with self._round(spec, num_workers, num_clients, cut) as call:
            leaves_out = self._policy.has_own_runners
            call.take_argument(arg, parameter, leaves_out_clients=leaves_out)
            call.keeps = cut.first_runs(
                self._policy.kept_bytes, chain.kept_member_bytes
            )
            result_type = chain.after_merge.type_signature.result
            if not type_checks.holds_clients(result_type):
                call.max_dropped = self._policy.max_dropped_clients
            while True:  # ends, because each repetition has fewer clients
                with contextlib.suppress(StageAgainError):
                    result = await self._run_stages(chain, call)
                    break
        self._client_s.put(work, call.work_s / max(1, num_clients))
        return result

    async def run_whole(
        self,
        comp: flf.ConcreteComputation,
        arg: Any,
        spec: RoundRequest,
        why: plans.Fallback | None = None,
    ) -> Any:
        """Run a computation as one subround, and return its result.

        `arg` is the plain argument, whose parts may be stored, or None. `why` is the
        reason why the computation has no stages, for the report, or None.
        """
        parameter = comp.type_signature.parameter
        num_clients = client_cuts.count_clients(
            arg, parameter, self._policy.default_num_clients
        )
        num_workers = await self._policy.workers_now()
        cut = self._cut(num_clients, num_workers, parameter)
        # One leaf has all clients, because nothing merges the results of two leaves.
        whole = CohortCut((range(num_clients),), (range(1),), cut.size, (0,), ((),))
        num_leaves = len(cut.leaves)
        at_once = self._policy.workers_per_subround(num_workers, 1, num_leaves)
        async with self._round(spec, num_workers, num_clients, whole) as call:
            call.take_argument(arg, parameter)
            call.keeps = [False]
            components_type = spec.components_type(comp.type_signature.result)
            (returned,) = await self._run_subrounds(
                comp, None, call, components_type, num_workers=at_once, why=why
            )
            return returned[0] if components_type is None else returned

    @contextlib.asynccontextmanager
    async def _round(
        self, spec: RoundRequest, num_workers: int, num_clients: int, cut: CohortCut
    ) -> AsyncGenerator[RoundState]:
        call = RoundState(spec, cut, self._policy.store)
        round_index = spec.round_index
        self._policy.emit(
            events.RoundStarted(
                *(round_index, num_clients, len(cut.leaves), len(cut.runs)),
                num_workers,
            )
        )
        yield call
        for note in diagnostics.in_order(call.notes):
            self._policy.emit(events.of_note(note, round_index))
        seconds = time.monotonic() - spec.started
        self._policy.emit(
            events.RoundFinished(
                round_index,
                seconds,
                call.bytes_broadcast,
                sum(call.bytes_sliced.values()),
            )
        )

    async def _run_stages(self, chain: MergeableCompChain, call: RoundState) -> Any:
        call.merged, call.kept = [], {}
        *earlier, last = chain.stages
        for stage in earlier:
            partials = await self._run_up_to_merge(stage, call)
            call.merged.append(await self._merge(stage, partials, call))
        if self._finishes_in_subround(chain, call):
            finish = self._plan_finish(last, chain.after_merge, call)
            components_type = finish.components_type
            ((*values,),) = await self._run_subrounds(
                last.up_to_merge, last.merge, call, components_type, finish=finish
            )
            return values[0] if components_type is None else tuple(values)
        partials = await self._run_up_to_merge(last, call)
        return await self._run_after_merge(last, partials, chain, call)

    def _finishes_in_subround(
        self, chain: MergeableCompChain, call: RoundState
    ) -> bool:
        # One worker then does the whole round, so a second plan would only cost time.
        last = chain.stages[-1]
        return (
            self._policy.has_own_runners
            and len(call.cut.runs) == 1
            and len(call.cut.chunks[0]) == 1
            and not (last.keeping and any(call.keeps))
            and not type_checks.is_empty_struct(last.partial_type)
            and not type_checks.holds_clients(chain.after_merge.type_signature.result)
        )

    async def _run_subrounds(
        self,
        comp: flf.ConcreteComputation,
        merge: flf.ConcreteComputation | None,
        call: RoundState,
        components_type: bytes | None = None,
        keeping: KeepingStage | None = None,
        num_workers: int = 1,
        finish: plans.Finish | None = None,
        why: plans.Fallback | None = None,
    ) -> list[tuple[object, ...]]:
        """Run the same work in every subround, and return their values, in order.

        Without a `merge`, the results of all leaves are returned. Kernels return only
        merged values, so `why` must then say why no kernel runs. `keeping` is the
        variant of `comp` for subrounds whose clients keep values, which `call` gets.
        If there is only one subround, it may also run the `finish` of the round.
        """
        merging = None if merge is None else self._serialized.get(merge)
        first = call.take_indices(len(call.cut.runs))

        async def run(index: int) -> tuple[object, ...]:
            chunks = call.cut.chunks[index]
            kept = keeping if call.keeps[index] else None
            work = comp if kept is None else kept.computation
            while True:
                # Each repetition leaves out the clients that have failed so far.
                dropped = call.dropped_in(index)
                subround = plans.Subround(
                    computation=self._serialized.get(work),
                    merge=merging,
                    clients_per_leaf=call.cut.size,
                    first_leaf=call.cut.runs[index].start,
                    leaves=call.leaves(index),
                    draw=DrawKey(
                        self._policy.seed, call.spec.round_index, dropped=dropped
                    ),
                    subtrees=() if merge is None else call.cut.subtrees[index],
                    components_type=components_type,
                    kernel=self._kernel_of(work, why),
                    call_s=self._policy.call_s or 0.0,
                    num_kept=0 if kept is None else len(kept.saves),
                    names_failures=call.max_dropped > 0,
                    chunks=chunks,
                    num_workers=max(num_workers, len(chunks)),
                    finish=finish,
                )
                arg = call.run_arg(index, () if kept is None else kept.loads)
                if finish is not None:
                    arg = (arg, (*call.finish_argument, *call.merged))
                try:
                    outcome = await self._run_plan(
                        subround, arg, first + index, call, call.bytes_sliced[index]
                    )
                except errors.ComputationError as error:
                    for client, cause in call.drop_clients(error).items():
                        self._policy.emit(
                            events.ClientDropped(
                                *(call.spec.round_index, first + index, client, cause)
                            )
                        )
                else:
                    call.work_s += outcome.busy_s
                    if kept is None:
                        return outcome.values
                    return call.keep(index, kept, outcome)
                # This subround runs again without the failed clients. The results of
                # other subrounds stay valid.
                call.slice_run(index)
                if call.merged:  # earlier stages counted the dropped clients
                    raise StageAgainError

        return await gather_by_index(
            (run(index) for index in range(len(call.cut.runs))),
            # If the subround with the most work began last, the round would wait for it
            # alone.
            first=call.cut.heaviest_first,
        )

    async def _run_plan(
        self,
        comp: Any,
        arg: Any,
        subround_index: int,
        call: RoundState,
        bytes_sliced: int = 0,
    ) -> outcomes.Outcome:
        """Run a plan on the next free runner, emit its event, and return its outcome.

        If the plan fails, raise its error with the round and the subround.
        """
        runner = await self._free.get()
        started = time.monotonic()
        try:
            outcome: outcomes.Outcome = await runner.invoke(comp, arg)
        except errors.LocatedError as error:
            located = error.located(
                round_index=call.spec.round_index, subround_index=subround_index
            )
            cause_text = error.cause_text
            raise located from (
                tracebacks.WorkerTraceback(cause_text) if cause_text else None
            )
        finally:
            self._free.put_nowait(runner)
        call.notes.update(outcome.notes)
        leaves: Iterable[range] = getattr(comp, "leaves", ())
        self._policy.emit(
            events.SubroundFinished(
                round_index=call.spec.round_index,
                subround_index=subround_index,
                num_clients=sum(len(leaf) for leaf in leaves),
                started_s=started - call.spec.started,
                seconds=time.monotonic() - started,
                bytes_sliced=bytes_sliced,
                bytes_returned=sum(outcome.value_bytes),
                **outcome.ran,
            )
        )
        return outcome

    async def _run_up_to_merge(self, stage: Stage, call: RoundState) -> list[Any]:
        partial = stage.partial_type
        is_empty = type_checks.is_empty_struct(partial)
        if is_empty and not (stage.keeping and all(call.keeps)):
            call.keeps = [False] * len(call.keeps)  # the last computation does it all
            return []
        outcomes = await self._run_subrounds(
            stage.up_to_merge, stage.merge, call, keeping=stage.keeping
        )
        return [partial for o in outcomes for partial in o if not is_empty]

    def _plan_finish(
        self,
        stage: Stage,
        computation: flf.ConcreteComputation | None,
        call: RoundState,
        *,
        merges: bool = True,
    ) -> plans.Finish:
        result_type = stage.partial_type
        if computation is not None:
            result_type = computation.type_signature.result
        return plans.Finish(
            merge=self._serialized.get(stage.merge) if merges else None,
            subtrees=tuple(tree for run in call.cut.subtrees for tree in run),
            partial_type=blocks.serialize_type(stage.partial_type),
            computation=computation and self._serialized.get(computation),
            num_clients=call.cut.leaves[-1].stop,
            clients_per_leaf=call.cut.size,
            draw=DrawKey(self._policy.seed, call.spec.round_index),
            components_type=call.spec.components_type(result_type),
            in_graphs=self._policy.call_s is not None,
        )

    async def _finish(
        self,
        stage: Stage,
        partials: list[Any],
        computation: flf.ConcreteComputation | None,
        call: RoundState,
    ) -> Any:
        # Returns the merged value of a stage, or the result of `computation` on it.
        finish = self._plan_finish(stage, computation, call, merges=bool(partials))
        before = () if computation is None else (*call.finish_argument, *call.merged)
        arg = (tuple(partials), before)
        outcome = await self._run_plan(finish, arg, call.take_indices(1), call)
        return outcome.values[0] if finish.components_type is None else outcome.values

    async def _merge(self, stage: Stage, partials: list[Any], call: RoundState) -> Any:
        merged = await self._finish(stage, partials, None, call)
        result_type = stage.partial_type
        return call.share(call.spec.as_whole(merged, result_type), result_type)

    async def _run_after_merge(
        self,
        stage: Stage,
        partials: list[Any],
        chain: MergeableCompChain,
        call: RoundState,
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
        call: RoundState,
    ) -> Any:
        outcomes = await self._run_subrounds(
            comp, None, call, keeping=keeping, why=_AT_CLIENTS
        )
        results = [result for outcome in outcomes for result in outcome]
        return client_cuts.join_results(results, comp.type_signature.result)

    async def _read_kept(
        self, names: Sequence[str], call: RoundState
    ) -> list[list[Any]]:
        runs = range(len(call.cut.runs))
        parts = [call.kept[run][name] for name in names for run in runs]
        read = await gather_by_index(self._policy.read_clients(part) for part in parts)
        num_runs = len(call.cut.runs)
        return [
            [member for part in read[start : start + num_runs] for member in part]
            for start in range(0, len(read), num_runs)
        ]

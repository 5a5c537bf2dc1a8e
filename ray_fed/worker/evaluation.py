"""Evaluates what a plan says over executors: leaves, merges inside, the finish.

Whoever has executors calls this: a thread of the local backend, an actor, or a Ray
task over remote executors. So all do the same, in the same order.
"""

import dataclasses
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import federated_language as fl

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
from ray_fed.executors.closure import ResolvedValue
from ray_fed.executors.loops import gather_by_index
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.language import blocks, structs, type_checks
from ray_fed.language.structs import Plain
from ray_fed.plan import diagnostics, merge_tree, random_keys
from ray_fed.plan.outcomes import Evaluated
from ray_fed.plan.plans import Fallback
from ray_fed.values import components, stored
from ray_fed.worker.kernel_runner import run_kernel
from ray_fed.worker.stacks import (
    DeviceStack,
    call_on,
    fetch,
    local_stack,
    merge_subtrees,
    merge_values,
)

if TYPE_CHECKING:
    from ray_fed.executors.eager_tf import EagerTFExecutor

flf = fl.framework
Block: TypeAlias = flf.ComputationBuildingBlock

Gather = Callable[[Iterable[Coroutine[Any, Any, Any]]], Coroutine[Any, Any, list[Any]]]
"""Runs coroutines and returns their results by index: one of `fanout`."""


@dataclasses.dataclass(frozen=True)
class Executors:
    """What a plan is evaluated over.

    Attributes:
        stack_for: returns a stack over so many clients; all share `unplaced`.
        unplaced: runs merges, and what those stacks do not place.
        parse: returns the block of a serialised computation.
        gather: runs the leaves.
        device: runs kernels; None: there are none.
    """

    stack_for: Callable[[int], ReferenceResolvingExecutor]
    unplaced: flf.Executor
    parse: Callable[[bytes], Block] = blocks.parse_block
    gather: Gather = gather_by_index
    device: DeviceStack | None = None

    @classmethod
    def of_device(
        cls,
        stack: DeviceStack,
        clients_per_leaf: int | None,
        gather: Gather = gather_by_index,
    ) -> "Executors":
        """Return those of one device, for cohorts of such leaves."""

        def stack_for(num_clients: int) -> ReferenceResolvingExecutor:
            return local_stack(num_clients, [stack], stack, clients_per_leaf)

        return cls(stack_for, stack, stack.parse, gather, stack)


async def evaluate_plan(
    comp: plans.Subround | plans.Finish, arg: Any, executors: Executors
) -> Evaluated:
    """Run a subround, or a finish.

    Args:
        comp: what to run.
        arg: with the values of all its clients; for a finish, (partials, before); for a
            subround that finishes its round, (the former, before).
        executors: that run it.

    Returns:
        What the plan asks for, in order; with a `components_type`, its components.

    Raises:
        ComputationError: client work raised; the index is the client's in the cohort.
    """
    started = time.monotonic()
    finish = comp
    evaluated = Evaluated([])
    if isinstance(comp, plans.Subround):
        finish = comp.finish
        leaves_arg, before = (arg, ()) if finish is None else arg
        with random_keys.using(comp.draw):
            ran = comp.kernel
            if isinstance(ran, plans.Kernel):
                device = type_checks.narrow(executors.device, DeviceStack, "a kernel")
                ran = await run_kernel(device, comp, leaves_arg)
            if isinstance(ran, Evaluated):
                evaluated = ran
            else:
                evaluated = await _interpret(comp, leaves_arg, executors, ran)
        partials: Sequence[Any] = evaluated.values
    else:
        partials, before = arg
    values = evaluated.values
    if isinstance(finish, plans.Finish):
        with random_keys.using(finish.draw):
            values = [await evaluate_finish(finish, partials, before, executors)]
    if comp.components_type is not None:
        type_spec = blocks.parse_type(comp.components_type)
        values = [c for r in values for c in components.split(r, type_spec)]
    busy_s = time.monotonic() - started
    return dataclasses.replace(evaluated, values=values, busy_s=busy_s)


async def _interpret(
    subround: plans.Subround, arg: Any, executors: Executors, fallback: Fallback | None
) -> Evaluated:
    """Run a computation on each leaf, merge inside the largest whole subtrees.

    Args:
        subround: what to run.
        arg: with the values of all clients; None for a computation of no argument.
        executors: that run it.
        fallback: why there is no kernel that does; None: nobody asked for one.
    """
    block = executors.parse(subround.computation)
    parameter = type_checks.function_type(block.type_signature).parameter
    run = _LeafRun(subround, arg, parameter, executors)
    if fallback is not None and fallback.leaf is not None:
        # The leaf alone, first: it most likely raises, and names the client.
        await run.evaluate(subround.leaves[fallback.leaf])
    evaluated = await executors.gather(run.evaluate(leaf) for leaf in subround.leaves)
    leaves: list[Any] = [result for result, _ in evaluated]
    if subround.merge is not None:
        # Results at the server, as the unplaced executor's own values.
        partials = [leaf.reference.reference for leaf in leaves]
        leaves = await merge_subtrees(subround, partials, executors.unplaced)
    fetched = await gather_by_index(fetch(value) for value in leaves)
    kept = [
        [member for _, of_leaf in evaluated for member in of_leaf[index]]
        for index in range(subround.num_kept)
    ]
    reason = None if fallback is None else fallback.reason
    return Evaluated([*fetched, *kept], no_kernel=reason)


@dataclasses.dataclass(frozen=True)
class _LeafRun:
    """The leaves of a subround, to be interpreted one by one.

    Attributes:
        subround: of them.
        arg: with the values of all clients.
        parameter: its type; None for a computation of no argument.
        executors: interpret them.
    """

    subround: plans.Subround
    arg: Any
    parameter: fl.Type | None
    executors: Executors

    async def evaluate(self, leaf: range) -> tuple[ResolvedValue, list[list[Plain]]]:
        """Return the result of a leaf, and for each value kept its clients'."""
        try:
            return await self._call(leaf)
        except errors.ComputationError as error:
            named = self.subround.names_failures
            if not named or error.location.client_index is None:
                raise
            others = await self._find_failures(leaf)
            failures = {error.location.client_index: error.message, **others}
            raise error.naming(failures) from error

    async def _find_failures(self, leaf: range) -> dict[int, str]:
        """Return what clients of a leaf raise, each alone, by index in the cohort."""
        failures: dict[int, str] = {}
        for client in leaf:
            try:
                await self._call(range(client, client + 1))
            except errors.WorkerMemoryError:
                raise
            except errors.ComputationError as error:
                failures[self.subround.draw.in_cohort(client)] = error.message
        return failures

    async def _call(self, clients: range) -> tuple[ResolvedValue, list[list[Plain]]]:
        first = self.subround.leaves[0].start
        inside = range(clients.start - first, clients.stop - first)
        arg = stored.slice_clients(self.arg, self.parameter, inside)
        function = self.executors.parse(self.subround.computation)
        num_kept = self.subround.num_kept
        stack = self.executors.stack_for(len(clients))
        try:
            with random_keys.at_leaf(clients.start):
                called = await call_on(stack, function, [arg])
                if not num_kept:
                    return called, []
                result, *kept = [
                    await stack.create_selection(called, index=index)
                    for index in range(1 + num_kept)
                ]
                return (
                    type_checks.narrow(result, ResolvedValue, "a federated stack"),
                    await gather_by_index(fetch(value) for value in kept),
                )
        except errors.ComputationError as error:
            index = error.location.client_index
            if index is None:
                raise
            # The index counts clients that take part; users know those of the cohort.
            in_cohort = self.subround.draw.in_cohort(clients.start + index)
            raise error.located(client_index=in_cohort) from error


async def evaluate_finish(
    finish: plans.Finish,
    partials: Sequence[Any],
    before: Sequence[Any],
    executors: Executors,
) -> Plain:
    """Merge the partials of all subrounds and run what comes after.

    Args:
        finish: what to run.
        partials: one for each of `finish.subtrees`, plain or stored.
        before: what the after-merge computation takes first: the round's argument, if
            there is one, and what earlier stages merged.
        executors: that run it.

    Returns:
        The result of the after-merge computation; without one the merged partial.
    """
    if finish.in_graphs and finish.merge is not None and executors.device is not None:
        result = _finish_in_graph(finish, partials, before, executors.device.eager)
        if result is not None:
            return result[0]
    merged = await _merge_partials(finish, partials, executors)
    if finish.computation is None:
        return await fetch(merged)
    args = [plans.as_argument([*before, merged])]
    stack = executors.stack_for(finish.num_clients)
    return await fetch(await call_on(stack, executors.parse(finish.computation), args))


def _finish_in_graph(
    finish: plans.Finish,
    partials: Sequence[Any],
    before: Sequence[Any],
    eager: "EagerTFExecutor",
) -> tuple[Plain] | None:
    """Return the result of a finish by one graph; None where executors are to do it."""
    merge = cast("bytes", finish.merge)
    graph = eager.kernels.finish(merge, finish.computation, len(before))
    if isinstance(graph, Fallback):
        return None
    pairs = [(m.left, m.right) for m in merge_tree.merge_order(finish.subtrees)]
    try:
        tensors = eager.run_kernel(graph, before, partials, pairs)
        return (graph.to_plain(tensors),)
    except Exception as error:  # noqa: BLE001 (the executors will say what it is)
        work = "the finish of a round"
        diagnostics.note([diagnostics.WorkInterpreted.of(work, error)])
    return None


async def _merge_partials(
    finish: plans.Finish, partials: Sequence[Any], executors: Executors
) -> flf.ExecutorValue:
    type_spec = blocks.parse_type(finish.partial_type)
    unplaced = executors.unplaced
    if finish.merge is None:
        return await unplaced.create_value(structs.Struct([]), type_spec)
    merge = await unplaced.create_value(executors.parse(finish.merge))
    embedded = await gather_by_index(
        unplaced.create_value(partial, type_spec) for partial in partials
    )
    return await merge_values(unplaced, merge, embedded, finish.subtrees)

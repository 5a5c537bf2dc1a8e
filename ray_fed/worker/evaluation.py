"""Evaluates a plan: runs clients, merges their results, and finishes the round.

A plan is the work of a subround (some of a round's clients) or of the finish of a
round. A leaf is a few neighboring clients whose values are accumulated one after
another. The results of leaves (partials) are merged along a binary tree.

Threads of the local backend, worker actors and Ray tasks all call `evaluate_plan`, so
their results are equal.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import federated_language as fl

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
from ray_fed.executors.closure import ResolvedValue
from ray_fed.executors.fan_out import gather_by_index
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
    from ray_fed.tensorflow.kernels.server_kernels import ServerGraph

flf = fl.framework
Block: TypeAlias = flf.ComputationBuildingBlock

Gather = Callable[[Iterable[Coroutine[Any, Any, Any]]], Coroutine[Any, Any, list[Any]]]
"""Function that runs coroutines and returns their results by index, see `fan_out`."""


@dataclasses.dataclass(frozen=True)
class Executors:
    """The executors that evaluate a plan.

    Attributes:
        stack_for: Function from a number of clients to an executor stack.
        unplaced: Executor of merges and of all work that is not at clients.
        parse: Function that parses a serialized computation.
        gather: Function that runs the coroutines of the leaves.
        device: Stack that runs kernels (graphs for many clients), or None.
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
        """Return the executors that run all work on the device of `stack`."""

        def stack_for(num_clients: int) -> ReferenceResolvingExecutor:
            return local_stack(num_clients, [stack], stack, clients_per_leaf)

        return cls(stack_for, stack, stack.parse, gather, stack)


async def evaluate_plan(
    comp: plans.Subround | plans.Finish, arg: Any, executors: Executors
) -> Evaluated:
    """Run a subround or a finish, and return its values in the order of the plan.

    For a subround, `arg` is the argument with the values of its clients. For a finish,
    it is the pair (partials, before), see `evaluate_finish`. For a subround that also
    finishes its round, it is the pair (argument, before). If `components_type` is set,
    the result has each value's components (tensors and sequences) instead of the value.
    Raises ComputationError with the index of a client whose work failed.
    """
    started = time.monotonic()
    finish = comp
    evaluated = Evaluated([])
    if isinstance(comp, plans.Subround):
        finish = comp.finish
        leaves_arg, before = (arg, ()) if finish is None else arg
        with random_keys.using(comp.draw):
            # A kernel is tried first. Executors compute the same bits, but slower.
            ran = comp.kernel
            if isinstance(ran, plans.Kernel):
                device = type_checks.narrow(executors.device, DeviceStack, "a kernel")
                meanwhile = None
                if finish is not None:
                    # The finish's graph takes long to build, so this happens while the
                    # clients run.
                    meanwhile = functools.partial(_finish_graph, finish, before, device)
                ran = await run_kernel(device, comp, leaves_arg, meanwhile)
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
    # `fallback` is why no kernel ran, or None if kernels are turned off.
    block = executors.parse(subround.computation)
    parameter = type_checks.function_type(block.type_signature).parameter
    run = _LeafRun(subround, arg, parameter, executors)
    if fallback is not None and fallback.leaf is not None:
        # Run the failed leaf first, because it most likely fails again.
        await run.evaluate(subround.leaves[fallback.leaf])
    evaluated = await executors.gather(run.evaluate(leaf) for leaf in subround.leaves)
    leaves: list[Any] = [result for result, _ in evaluated]
    if subround.merge is not None:
        # A leaf's result is at the server. Its reference is a value of `unplaced`.
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
    """Runs the leaves of a subround by executors, call by call, without a kernel."""

    subround: plans.Subround
    arg: Any
    parameter: fl.Type | None
    executors: Executors

    async def evaluate(self, leaf: range) -> tuple[ResolvedValue, list[list[Plain]]]:
        """Return a leaf's result, and the values that its clients keep for later."""
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
            # This index skips dropped clients. Users know the index in the cohort.
            in_cohort = self.subround.draw.in_cohort(clients.start + index)
            raise error.located(client_index=in_cohort) from error


async def evaluate_finish(
    finish: plans.Finish,
    partials: Sequence[Any],
    before: Sequence[Any],
    executors: Executors,
) -> Plain:
    """Merge the partials of all subrounds, and run the server's computation on them.

    `partials` are the results of the subrounds, in order, plain or stored. `before` has
    the computation's first arguments: the argument of the round, if there is one, and
    the merged values of earlier stages. Without a computation, return the merged value.
    """
    if executors.device is not None:
        graph = _finish_graph(finish, before, executors.device)
        if not isinstance(graph, Fallback):
            eager = executors.device.eager
            result = _finish_in_graph(graph, finish, partials, before, eager)
            if result is not None:
                return result[0]
    merged = await _merge_partials(finish, partials, executors)
    if finish.computation is None:
        return await fetch(merged)
    args = [plans.as_argument([*before, merged])]
    stack = executors.stack_for(finish.num_clients)
    return await fetch(await call_on(stack, executors.parse(finish.computation), args))


def _finish_graph(
    finish: plans.Finish, before: Sequence[Any], device: DeviceStack
) -> "ServerGraph | Fallback":
    if finish.merge is None or not finish.in_graphs:
        return Fallback("a finish without a merge, or without graphs")
    kernels = device.eager.kernels
    return kernels.finish(finish.merge, finish.computation, len(before))


def _finish_in_graph(
    graph: "ServerGraph",
    finish: plans.Finish,
    partials: Sequence[Any],
    before: Sequence[Any],
    eager: "EagerTFExecutor",
) -> tuple[Plain] | None:
    pairs = [(m.left, m.right) for m in merge_tree.merge_order(finish.subtrees)]
    try:
        tensors = eager.run_kernel(graph, before, partials, pairs)
        return (graph.to_plain(tensors),)
    except Exception as error:  # noqa: BLE001 (executors do the work instead)
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

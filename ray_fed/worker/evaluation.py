"""Evaluates what a plan says over executors: leaves, merges inside, the finish.

Whoever has an executor calls this: a thread of the local backend, an actor, or a Ray
task over remote executors. So all do the same, in the same order.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeAlias, cast

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.executors.fanout import gather_by_index
from ray_fed.executors.scopes import ResolvedValue
from ray_fed.language import blocks, structs, type_checks
from ray_fed.language.blocks import Function
from ray_fed.language.structs import Plain
from ray_fed.plan import merge_tree, plans, random_keys
from ray_fed.values import components, plain_values, stored

flf = fl.framework
Block: TypeAlias = flf.ComputationBuildingBlock

StackFactory = Callable[[int], flf.Executor]
"""From a number of clients to a stack over them; all share one unplaced executor."""

Gather = Callable[[Iterable[Coroutine[Any, Any, Any]]], Coroutine[Any, Any, list[Any]]]
"""Runs coroutines and returns their results by index: one of `fanout`."""


async def _call(
    executor: flf.Executor, function: Function | Block, args: Sequence[Any]
) -> ResolvedValue:
    """Call a computation with its argument, if it takes one."""
    embedded = await executor.create_value(function)
    parameter = cast("fl.FunctionType", embedded.type_signature).parameter
    argument = None
    if parameter is not None:
        (arg,) = args
        argument = await executor.create_value(arg, parameter)
    called = await executor.create_call(embedded, argument)
    return type_checks.narrow(called, ResolvedValue, "a federated stack")


async def fetch(value: flf.ExecutorValue) -> Plain:
    """Return an embedded value as a plain one."""
    type_spec = value.type_signature
    return plain_values.to_plain(await value.compute(), type_spec, "a result")


def _at_server(value: ResolvedValue) -> flf.ExecutorValue:
    """Return a server-placed result as the unplaced executor's own value."""
    return value.reference.reference


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What a plan came to.

    Attributes:
        values: plain, in the order that the plan asks for.
        kernel_leaves: how many leaves a kernel ran.
        no_kernel: why others were interpreted, if a kernel was asked for.
    """

    values: list[Plain]
    kernel_leaves: int = 0
    no_kernel: str | None = None


@dataclasses.dataclass(frozen=True)
class KernelRan:
    """What a kernel came to.

    Attributes:
        partials: of each of the subround's subtrees, plain.
        kept: for each value that is kept a list over all clients, plain.
    """

    partials: list[Plain]
    kept: list[list[Plain]]


class KernelRunner(abc.ABC):
    """An unplaced executor that runs graphs where it runs everything else."""

    @abc.abstractmethod
    def parse(self, serialised: bytes) -> Block:
        """Return the block of a serialised computation, parsed when first asked for."""

    @abc.abstractmethod
    def run_at_server(self, function: bytes, argument: Any) -> Any:
        """Return what a serialised function comes to as tensors in tuples, or None.

        None where only executors can do it, or are to say what it raises.

        Args:
            function: of values at the server.
            argument: plain, or tensors in tuples.
        """

    @abc.abstractmethod
    def run_finish(
        self, finish: plans.Finish, partials: Sequence[Any], before: Sequence[Any]
    ) -> tuple[Plain] | None:
        """Return the result of a finish, plain; or None, as `run_at_server` does."""

    @abc.abstractmethod
    async def run_kernel(
        self,
        subround: plans.Subround,
        inputs: Sequence[Any],
        data: Sequence[Sequence[Any]],
        check: Callable[[], None] = lambda: None,
    ) -> KernelRan | plans.NoKernel:
        """Return the partial of each of `subround.subtrees`, and what is kept.

        Args:
            subround: with a kernel, and a merge.
            inputs: what `server` of the kernel returned, plain or of tensors.
            data: for each of `data` of the kernel the values of all clients of the
                subround, in order.
            check: called before each call; what it raises ends the run.
        """


async def evaluate_plan(
    comp: plans.Subround | plans.Finish,
    arg: Any,
    stack_for: StackFactory,
    unplaced: flf.Executor,
    gather: Gather = gather_by_index,
) -> Evaluated:
    """Run a subround or a finish.

    Args:
        comp: what to run.
        arg: with the values of all its clients; for a finish, (partials, before).
        stack_for: builds the stack over so many clients.
        unplaced: the unplaced executor of those stacks.
        gather: runs the leaves.

    Returns:
        What the plan asks for, in order; with a `components_type`, its components.
    """
    with random_keys.using(comp.draw):
        if isinstance(comp, plans.Subround):
            evaluated = await evaluate_subround(comp, arg, stack_for, unplaced, gather)
        else:
            partials, before = arg
            result = await evaluate_finish(comp, partials, before, stack_for, unplaced)
            evaluated = Evaluated([result])
    if comp.components_type is None:
        return evaluated
    type_spec = blocks.parse_type(comp.components_type)
    split = [c for r in evaluated.values for c in components.split(r, type_spec)]
    return dataclasses.replace(evaluated, values=split)


async def evaluate_subround(
    subround: plans.Subround,
    arg: Any,
    stack_for: StackFactory,
    unplaced: flf.Executor,
    gather: Gather = gather_by_index,
) -> Evaluated:
    """Run a computation on each leaf, merge inside the largest whole subtrees.

    Args:
        subround: what to run.
        arg: with the values of all clients; None for a computation of no argument.
        stack_for: builds the stack of a leaf.
        unplaced: runs the merges; the one that the stacks share.
        gather: runs the leaves.

    Returns:
        The partial of each of `subround.subtrees`; without a merge the result of each
        leaf. Then what is kept.

    Raises:
        ComputationError: client work raised; the index is the client's in the cohort.
    """
    ran: Evaluated | plans.Kernel | plans.NoKernel | None = subround.kernel
    if isinstance(ran, plans.Kernel) and isinstance(unplaced, KernelRunner):
        ran = await evaluate_kernel(subround, arg, stack_for, unplaced)
    if isinstance(ran, Evaluated):
        return ran
    reason = ran.reason if isinstance(ran, plans.NoKernel) else None
    run = _LeafRun(subround, arg, _parameter(subround, unplaced), stack_for)
    if isinstance(ran, plans.NoKernel) and ran.leaf is not None:
        # The leaf alone, first: it most likely raises, and names the client.
        await run.evaluate(subround.leaves[ran.leaf])
    evaluated = await gather(run.evaluate(leaf) for leaf in subround.leaves)
    leaves: list[Any] = [result for result, _ in evaluated]
    if subround.merge is not None:
        partials = [_at_server(leaf) for leaf in leaves]
        leaves = await merge_subtrees(subround, partials, unplaced)
    fetched = await gather_by_index(fetch(value) for value in leaves)
    kept = [
        [member for _, of_leaf in evaluated for member in of_leaf[index]]
        for index in range(subround.num_kept)
    ]
    return Evaluated([*fetched, *kept], no_kernel=reason)


def _parameter(subround: plans.Subround, unplaced: flf.Executor) -> fl.Type | None:
    """Return the type of what the computation of a subround takes."""
    serialised = subround.computation
    is_kept = isinstance(unplaced, KernelRunner)
    block = unplaced.parse(serialised) if is_kept else blocks.parse_block(serialised)
    return type_checks.function_type(block.type_signature).parameter


@dataclasses.dataclass(frozen=True)
class _LeafRun:
    """The leaves of a subround, to be interpreted one by one.

    Attributes:
        subround: of them.
        arg: with the values of all clients.
        parameter: its type; None for a computation of no argument.
        stack_for: builds the stack of a leaf.
    """

    subround: plans.Subround
    arg: Any
    parameter: fl.Type | None
    stack_for: StackFactory

    async def evaluate(self, leaf: range) -> tuple[ResolvedValue, list[list[Plain]]]:
        """Return the result of a leaf, and for each value kept its clients'."""
        try:
            return await self._call(leaf)
        except errors.ComputationError as error:
            named = self.subround.names_failures
            if not named or error.location.client_index is None:
                raise
            found = await self._find_failures(leaf)
            failures = {error.location.client_index: error.message, **found}
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
        function = Function(self.subround.computation)
        num_kept = self.subround.num_kept
        stack = self.stack_for(len(clients))
        try:
            with random_keys.at_leaf(clients.start):
                called = await _call(stack, function, [arg])
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
            in_cohort = self.subround.draw.in_cohort(clients.start + index)
            raise error.located(client_index=in_cohort) from error


async def evaluate_kernel(
    subround: plans.Subround,
    arg: Any,
    stack_for: StackFactory,
    unplaced: KernelRunner,
    check: Callable[[], None] = lambda: None,
) -> Evaluated | plans.NoKernel:
    """Compute at the server what is the same for all clients, then run the kernel.

    Args:
        subround: with a kernel.
        arg: with the values of all clients.
        stack_for: builds the stack that computes at the server.
        unplaced: the unplaced executor of that stack.
        check: called now and then; what it raises ends the run.
    """
    inputs, data = await _read_kernel(subround, arg, stack_for, unplaced)
    ran = await unplaced.run_kernel(subround, inputs, data, check)
    if isinstance(ran, plans.NoKernel):
        return ran
    return Evaluated([*ran.partials, *ran.kept], kernel_leaves=len(subround.leaves))


async def _read_kernel(
    subround: plans.Subround,
    arg: Any,
    stack_for: StackFactory,
    unplaced: KernelRunner,
) -> tuple[Sequence[Any], list[Sequence[Any]]]:
    """Return what a kernel takes: zeros and constants, and values of all clients."""
    kernel = cast("plans.Kernel", subround.kernel)
    shared = tuple(_part(arg, path) for path in kernel.parts)
    inputs = unplaced.run_at_server(kernel.server, shared)
    if inputs is None:
        stack = stack_for(len(subround.leaves[0]))
        called = await _call(stack, unplaced.parse(kernel.server), [shared])
        inputs = await fetch(_at_server(called))
    return inputs, [_part(arg, path) for path in kernel.data]


def _part(arg: Any, path: plans.Path) -> Any:
    return functools.reduce(lambda part, index: part[index], path, arg)


async def merge_subtrees(
    subround: plans.Subround,
    partials: Sequence[flf.ExecutorValue],
    executor: flf.Executor,
) -> list[flf.ExecutorValue]:
    """Return the partial of each of `subround.subtrees`.

    Args:
        subround: with a merge.
        partials: of its leaves, embedded in the executor.
        executor: runs the merges.
    """
    merge = await executor.create_value(Function(cast("bytes", subround.merge)))
    merged: list[flf.ExecutorValue] = []
    for start, stop in subround.subtrees:
        inside = range(start - subround.first_leaf, stop - subround.first_leaf)
        nodes = [(index, index + 1) for index in range(start, stop)]
        subtree = [partials[index] for index in inside]
        merged.append(await merge_values(executor, merge, subtree, nodes))
    return merged


async def merge_values(
    executor: flf.Executor,
    merge: flf.ExecutorValue,
    partials: list[flf.ExecutorValue],
    nodes: Sequence[merge_tree.Subtree],
) -> flf.ExecutorValue:
    """Merge adjacent subtrees, all embedded in one executor, along the tree.

    Each merge draws from the key of its node, whoever runs it.
    """
    partials = list(partials)
    for left, right, node in merge_tree.merge_order(nodes):
        pair = await executor.create_struct([partials[left], partials[right]])
        with random_keys.at_step("merge", *node):
            partials[left] = await executor.create_call(merge, pair)
    return partials[0]


async def evaluate_finish(
    finish: plans.Finish,
    partials: Sequence[Any],
    before: Sequence[Any],
    stack_for: StackFactory,
    unplaced: flf.Executor,
) -> Plain:
    """Merge the partials of all subrounds and run what comes after.

    Args:
        finish: what to run.
        partials: one for each of `finish.subtrees`, plain or stored.
        before: what an after-merge computation takes before what is merged here: the
            round's argument, if there is one, and what earlier stages merged.
        stack_for: builds the stack that runs the after-merge computation.
        unplaced: runs the merges; the one that the stack uses.

    Returns:
        The result of the after-merge computation; without one the merged partial.
    """
    if finish.in_graphs and isinstance(unplaced, KernelRunner):
        ran = unplaced.run_finish(finish, partials, before)
        if ran is not None:
            return ran[0]
    merged = await _merge_partials(finish, partials, unplaced)
    if finish.computation is None:
        return await fetch(merged)
    args = [plans.as_argument([*before, merged])]
    stack = stack_for(finish.num_clients)
    return await fetch(await _call(stack, _parsed(finish.computation, unplaced), args))


def _parsed(serialised: bytes, unplaced: flf.Executor) -> Function | Block:
    """Return a computation as executors take it, parsed where that is kept."""
    if isinstance(unplaced, KernelRunner):
        return unplaced.parse(serialised)
    return Function(serialised)


async def _merge_partials(
    finish: plans.Finish, partials: Sequence[Any], unplaced: flf.Executor
) -> flf.ExecutorValue:
    type_spec = blocks.parse_type(finish.partial_type)
    if finish.merge is None:
        return await unplaced.create_value(structs.Struct([]), type_spec)
    merge = await unplaced.create_value(_parsed(finish.merge, unplaced))
    embedded = await gather_by_index(
        unplaced.create_value(partial, type_spec) for partial in partials
    )
    return await merge_values(unplaced, merge, embedded, finish.subtrees)

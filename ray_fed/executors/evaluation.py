"""Evaluates what a plan says over executors: leaves, merges inside, the finish.

Whoever coordinates calls this: a thread of the local backend, or a Ray task over
remote executors. So both do the same, in the same order.
"""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, cast

import federated_language as fl

import ray_fed.blocks as blocks
import ray_fed.draws as draws
import ray_fed.errors as errors
import ray_fed.parts as parts
import ray_fed.plain as plain
import ray_fed.plan as plan
import ray_fed.values as values
from ray_fed.blocks import Function
from ray_fed.executors.fanout import gather_by_index
from ray_fed.executors.scopes import ResolvedValue
from ray_fed.values import Plain

flf = fl.framework

StackFactory = Callable[[int], flf.Executor]
"""From a number of clients to a stack over them; all share one unplaced executor."""

Gather = Callable[[Iterable[Coroutine[Any, Any, Any]]], Coroutine[Any, Any, list[Any]]]
"""Runs coroutines and returns their results by index: one of `fanout`."""


async def _call(
    executor: flf.Executor, function: Function, args: Sequence[Any]
) -> ResolvedValue:
    """Call a serialised computation with its argument, if it takes one."""
    embedded = await executor.create_value(function)
    parameter = cast("fl.FunctionType", embedded.type_signature).parameter
    argument = None
    if parameter is not None:
        (arg,) = args
        argument = await executor.create_value(arg, parameter)
    called = await executor.create_call(embedded, argument)
    return values.narrow(called, ResolvedValue, "a federated stack")


async def _fetch(value: flf.ExecutorValue) -> Plain:
    type_spec = value.type_signature
    return plain.to_plain(await value.compute(), type_spec, "a result")


def _at_server(value: ResolvedValue) -> flf.ExecutorValue:
    """Return a server-placed result as the unplaced executor's own value."""
    return value.reference.reference


async def evaluate_plan(
    comp: plan.Subround | plan.Finish,
    arg: Any,
    stack_for: StackFactory,
    unplaced: flf.Executor,
    gather: Gather = gather_by_index,
) -> list[Plain]:
    """Run a subround over the arguments of its leaves, or a finish.

    Args:
        comp: what to run.
        arg: the arguments of the leaves; for a finish, (partials, before).
        stack_for: builds the stack over so many clients.
        unplaced: the unplaced executor of those stacks.
        gather: runs the leaves.

    Returns:
        What the plan asks for, in order; with a `parts_type`, part by part.
    """
    with draws.using(comp.draw):
        if isinstance(comp, plan.Subround):
            results = await evaluate_subround(comp, arg, stack_for, unplaced, gather)
        else:
            partials, before = arg
            results = [
                await evaluate_finish(comp, partials, before, stack_for, unplaced)
            ]
    if comp.parts_type is None:
        return results
    type_spec = blocks.parse_type(comp.parts_type)
    return [part for result in results for part in parts.split(result, type_spec)]


async def evaluate_subround(
    subround: plan.Subround,
    args: Sequence[Any],
    stack_for: StackFactory,
    unplaced: flf.Executor,
    gather: Gather = gather_by_index,
) -> list[Plain]:
    """Run a computation on each leaf, merge inside the largest whole subtrees.

    Args:
        subround: what to run.
        args: of each leaf, in order; all None for a computation of no argument.
        stack_for: builds the stack of a leaf.
        unplaced: runs the merges; the one that the stacks share.
        gather: runs the leaves.

    Returns:
        The partial of each of `subround.nodes`, plain; without a merge the result of
        each leaf.

    Raises:
        ComputationError: client work raised; the index is the client's in the cohort.
    """
    function = Function(subround.computation)

    async def evaluate_leaf(leaf: range, arg: Any) -> ResolvedValue:
        try:
            with draws.at_leaf(leaf.start):
                return await _call(stack_for(len(leaf)), function, [arg])
        except errors.ComputationError as error:
            index = error.location.client_index
            if index is None:
                raise
            raise error.located(client_index=leaf.start + index) from error

    leaves = await gather(
        evaluate_leaf(leaf, arg)
        for leaf, arg in zip(subround.leaves, args, strict=True)
    )
    if subround.merge is None:
        return await gather_by_index(_fetch(leaf) for leaf in leaves)
    partials = [_at_server(leaf) for leaf in leaves]
    merge = await unplaced.create_value(Function(subround.merge))
    merged: list[flf.ExecutorValue] = []
    for start, stop in subround.nodes:
        inside = range(start - subround.first_leaf, stop - subround.first_leaf)
        nodes = [(index, index + 1) for index in range(start, stop)]
        subtree = [partials[index] for index in inside]
        merged.append(await merge_values(unplaced, merge, subtree, nodes))
    return await gather_by_index(_fetch(partial) for partial in merged)


async def merge_values(
    executor: flf.Executor,
    merge: flf.ExecutorValue,
    partials: list[flf.ExecutorValue],
    nodes: Sequence[plan.Node],
) -> flf.ExecutorValue:
    """Merge adjacent subtrees, all embedded in one executor, along the tree."""
    partials = list(partials)
    for left, right in plan.merge_order(nodes):
        pair = await executor.create_struct([partials[left], partials[right]])
        partials[left] = await executor.create_call(merge, pair)
    return partials[0]


async def evaluate_finish(
    finish: plan.Finish,
    partials: Sequence[Any],
    before: Sequence[Any],
    stack_for: StackFactory,
    unplaced: flf.Executor,
) -> Plain:
    """Merge the partials of all subrounds and run what comes after.

    Args:
        finish: what to run.
        partials: one for each of `finish.nodes`, plain or stored.
        before: what an after-merge computation takes before what is merged here: the
            round's argument, if there is one, and what earlier stages merged.
        stack_for: builds the stack that runs the after-merge computation.
        unplaced: runs the merges; the one that the stack uses.

    Returns:
        The result of the after-merge computation; without one the merged partial.
    """
    merged = await _merge_partials(finish, partials, unplaced)
    if finish.computation is None:
        return await _fetch(merged)
    args = [plan.pack([*before, merged])]
    stack = stack_for(finish.num_clients)
    return await _fetch(await _call(stack, Function(finish.computation), args))


async def _merge_partials(
    finish: plan.Finish, partials: Sequence[Any], unplaced: flf.Executor
) -> flf.ExecutorValue:
    type_spec = blocks.parse_type(finish.partial_type)
    if finish.merge is None:
        return await unplaced.create_value(values.Struct([]), type_spec)
    merge = await unplaced.create_value(Function(finish.merge))
    embedded = await gather_by_index(
        unplaced.create_value(partial, type_spec) for partial in partials
    )
    return await merge_values(unplaced, merge, embedded, finish.nodes)

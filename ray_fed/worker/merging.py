"""Partials merged along the tree of leaves, whichever executor holds them."""

from collections.abc import Sequence
from typing import cast

import federated_language as fl

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
import ray_fed.values.plain_values as plain_values
from ray_fed.language.blocks import Function
from ray_fed.language.structs import Plain
from ray_fed.plan import merge_tree, random_keys

flf = fl.framework


async def fetch(value: flf.ExecutorValue) -> Plain:
    """Return an embedded value in plain form."""
    type_spec = value.type_signature
    return plain_values.to_plain(await value.compute(), type_spec, "a result")


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
        subtrees = [(index, index + 1) for index in range(start, stop)]
        subtree = [partials[index] for index in inside]
        merged.append(await merge_values(executor, merge, subtree, subtrees))
    return merged


async def merge_values(
    executor: flf.Executor,
    merge: flf.ExecutorValue,
    partials: Sequence[flf.ExecutorValue],
    subtrees: Sequence[merge_tree.Subtree],
) -> flf.ExecutorValue:
    """Merge adjacent subtrees, all embedded in one executor, along the tree.

    Each merge draws from the key of its subtree, on any worker.
    """
    partials = list(partials)
    for left, right, subtree in merge_tree.merge_order(subtrees):
        pair = await executor.create_struct([partials[left], partials[right]])
        with random_keys.at_step("merge", *subtree):
            partials[left] = await executor.create_call(merge, pair)
    return partials[0]


async def merge_plain(
    executor: flf.Executor, partials: Sequence[Plain], merge: Function
) -> flf.ExecutorValue:
    """Merge partials of all leaves, in order, along the tree; embed the result.

    Args:
        executor: runs `merge`.
        partials: U of each leaf, plain, at least one.
        merge: <U, U> -> U.
    """
    function = await executor.create_value(merge)
    type_spec = function.type_signature
    if not isinstance(type_spec, fl.FunctionType) or not isinstance(
        type_spec.parameter, fl.StructType
    ):
        raise errors.ValueMismatchError(
            f"Expected a merge of two partials, found a value of type `{type_spec}`."
        )
    member = type_spec.parameter[0]
    embedded = [await executor.create_value(partial, member) for partial in partials]
    subtrees = [(index, index + 1) for index in range(len(embedded))]
    return await merge_values(executor, function, embedded, subtrees)

"""What each function of a mergeable form may contain, so that slices can be run apart.

    up_to_merge   anything but an aggregation of what another aggregation returned:
                  a slice knows its own clients' sum, not the cohort's
    merge         nothing placed: it takes two partials, wherever they come from
    after_merge   anything but aggregations: it runs slice by slice where its result
                  has a value for each client

The types of the functions are checked by `form`.
"""

from collections.abc import Callable

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.compiler.normalize import free_references, needed_names, normalize
from ray_fed.compiler.substitution import find_blocks
from ray_fed.language import blocks, intrinsics

flf = fl.framework
Block = flf.ComputationBuildingBlock


def check_up_to_merge(up_to_merge: flf.ConcreteComputation) -> None:
    """Refuse an aggregation that depends on another one's result.

    Raises:
        CompileError: there is one.
    """
    block = _to_block(up_to_merge)
    if len(find_blocks(block, intrinsics.is_aggregation)) < 2:  # noqa: PLR2004
        return
    calls = dict(normalize(block).calls)
    aggregations = {
        name: call.function.uri
        for name, call in calls.items()
        if isinstance(call, flf.Call)
        and isinstance(call.function, flf.Intrinsic)
        and intrinsics.is_aggregation(call.function)
    }
    for name, uri in aggregations.items():
        before = needed_names(free_references(calls[name]), calls)
        for other in sorted(before & aggregations.keys()):
            raise errors.CompileError(
                "Expected aggregations in `up_to_merge` that do not depend on one"
                f" another, found `{uri}` of what `{aggregations[other]}` returned: a"
                " slice of the clients does not know the result of the whole cohort;"
                " invoke the computation itself instead of a form."
            )


def check_merge(merge: flf.ConcreteComputation) -> None:
    """Refuse aggregations, and whatever else is placed.

    Raises:
        CompileError: there is such a block.
    """
    block = _to_block(merge)
    _refuse(
        block,
        intrinsics.is_aggregation,
        "no aggregation in `merge`, which takes two partials and no clients",
        "aggregate in `up_to_merge`.",
    )
    _refuse(
        block,
        lambda part: flf.contains_federated_types(part.type_signature),
        "`merge` to take two partials and nothing that is placed",
        "move it to `up_to_merge` or to `after_merge`.",
    )


def check_after_merge(after_merge: flf.ConcreteComputation) -> None:
    """Refuse aggregations.

    Raises:
        CompileError: there is one.
    """
    _refuse(
        _to_block(after_merge),
        intrinsics.is_aggregation,
        "no aggregation in `after_merge`, which each slice of the clients runs apart",
        "aggregate in `up_to_merge`.",
    )


def _refuse(
    block: Block, is_refused: Callable[[Block], bool], expected: str, advice: str
) -> None:
    found = find_blocks(block, is_refused)
    if not found:
        return
    named = [part for part in found if isinstance(part, flf.Intrinsic)]
    shown = f"the intrinsic `{named[0].uri}`" if named else blocks.show_block(found[0])
    raise errors.CompileError(f"Expected {expected}, found {shown}: {advice}")


def _to_block(comp: flf.ConcreteComputation) -> Block:
    with blocks.depth_in_words():
        return Block.from_proto(comp.to_proto())

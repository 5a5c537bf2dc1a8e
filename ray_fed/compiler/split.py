"""Cuts a computation at its aggregations into up_to_merge, merge and after_merge.

    calls before the aggregations  ->  aggregate, report left out   up_to_merge
    partials of any two slices     ->  the aggregations' merges      merge
    argument, merged partials      ->  reports, calls after them     after_merge

Aggregations that do not depend on one another count as one: their partials travel as
a struct. One that depends on another's result belongs to a later stage, which has an
up_to_merge of the argument and all that was merged before, and a merge of its own.
Where it needs what clients did in an earlier stage, it has a second form, which takes
that as an argument: see `keeping`.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.compiler import keeping, placed_parts
from ray_fed.compiler.form import (
    KeepingStage,
    MergeableCompChain,
    MergeableCompForm,
    ResultParts,
    Stage,
)
from ray_fed.compiler.normalize import (
    CallGraph,
    free_references,
    needed_names,
    normalize,
)
from ray_fed.compiler.partial_aggregations import (
    PartialAggregation,
    is_aggregation,
    to_partial_aggregation,
)
from ray_fed.compiler.stage_inputs import PAIR, partial_type, stage_input
from ray_fed.compiler.substitution import select, zip_at_server
from ray_fed.language import type_checks

flf = fl.framework
Block = flf.ComputationBuildingBlock
_NOTHING = keeping.KeptNames()


def compile_to_mergeable_comp_form(
    comp: flf.ConcreteComputation,
) -> MergeableCompForm:
    """Return the mergeable form of a federated computation.

    Args:
        comp: any computation whose aggregations do not depend on one another; it may
            have none, and need not take an argument.

    Raises:
        ValueMismatchError: it is no computation.
        CompileError: an aggregation depends on the result of another one, is of a kind
            that has no partials, or merges with values that depend on the argument.
    """
    type_checks.check_kind(comp, flf.ConcreteComputation, "comp")
    chain = compile_to_chain(comp)
    if len(chain.stages) > 1:
        raise errors.CompileError(
            "Expected aggregations that do not depend on one another, found"
            f" {len(chain.stages)} stages, each of values that were computed from the"
            " result of the one before: run it in a context that ray_fed.init makes."
        )
    stage = chain.stages[0]
    return MergeableCompForm(stage.up_to_merge, stage.merge, chain.after_merge)


def compile_to_chain(comp: flf.ConcreteComputation) -> MergeableCompChain:
    """Return the stages of a federated computation, one for each depth of aggregation.

    Args:
        comp: any computation; it may have no aggregation, which makes one stage of no
            partials, and need not take an argument.

    Raises:
        CompileError: an aggregation is of a kind that has no partials, or merges with
            values that depend on the argument or on another aggregation.
    """
    block = Block.from_proto(comp.to_proto())
    graph = normalize(block)
    stages = _group(graph)
    *kept, kept_after = _keep(graph, stages)
    return MergeableCompChain(
        stages=[
            Stage(
                _compute(_up_to_merge(graph, stages[:index], stage)),
                _compute(_merge(graph, stage)),
                _keeping(
                    graph,
                    kept[index],
                    _up_to_merge(graph, stages[:index], stage, kept[index]),
                ),
            )
            for index, stage in enumerate(stages)
        ],
        after_merge=_compute(_after_merge(graph, stages, graph.result)),
        parts=_divide_result(graph, stages, kept_after),
    )


def _keep(
    graph: CallGraph, stages: Sequence[Sequence["PartialAggregation"]]
) -> list[keeping.KeptNames]:
    """Return what each stage, and then the end, takes and emits."""
    calls_of_stages: list[keeping.StageCalls] = []
    at_clients = placed_parts.struct(placed_parts.at_clients(graph.result))
    wanted = free_references(at_clients)
    stage_of = {a.name: i for i, stage in enumerate(stages) for a in stage}
    early = keeping.find_early(wanted, dict(graph.calls), stage_of)
    for index, stage in enumerate(stages):
        calls = stage_input(graph, stages[:index]).calls
        roots = _roots(calls, stage) | {
            n for n, first in early.items() if first == index
        }
        calls_of_stages.append(keeping.StageCalls(roots, calls))
    end = stage_input(graph, stages).calls
    calls_of_stages.append(keeping.StageCalls(wanted, end))
    return keeping.divide(calls_of_stages)


def _divide_result(
    graph: CallGraph,
    stages: Sequence[Sequence["PartialAggregation"]],
    kept: keeping.KeptNames,
) -> ResultParts | None:
    """Return what makes the parts of a result; None where none differs by client."""
    of_clients = placed_parts.at_clients(graph.result)
    if not of_clients:
        return None
    of_server = placed_parts.at_server(graph.result)
    at_server = _after_merge(graph, stages, placed_parts.struct(of_server))
    at_clients = placed_parts.struct(of_clients)
    names = [p.name for p in of_clients if isinstance(p, flf.Reference)]
    is_kept = len(names) == len(of_clients) and set(names) <= set(kept.takes)
    return ResultParts(
        _compute(at_server) if of_server else None,
        _compute(_after_merge(graph, stages, at_clients)),
        _keeping(graph, kept, _after_merge(graph, stages, at_clients, kept)),
        tuple(names) if is_kept else None,
    )


def _keeping(
    graph: CallGraph, kept: keeping.KeptNames, block: Block
) -> KeepingStage | None:
    if not kept.takes and not kept.emits:
        return None
    calls = dict(graph.calls)
    num_bytes = sum(keeping.count_member_bytes(calls[name]) for name in kept.emits)
    return KeepingStage(_compute(block), kept.takes, kept.emits, num_bytes)


def _group(graph: CallGraph) -> list[list[PartialAggregation]]:
    """Return the aggregations by how many others each has to wait for."""
    calls = dict(graph.calls)
    needed = needed_names(free_references(graph.result), calls)
    depths: dict[str, int] = {}
    stages: list[list[PartialAggregation]] = []
    for name, call in graph.calls:  # each refers to earlier ones only
        if name not in needed or not is_aggregation(call):
            continue
        behind = needed_names(free_references(call), calls)
        depth = max(
            (depths[other] + 1 for other in depths if other in behind), default=0
        )
        depths[name] = depth
        if depth == len(stages):
            stages.append([])
        stages[depth].append(to_partial_aggregation(name, cast("flf.Call", call)))
    return stages or [[]]


def _compute(block: Block) -> flf.ConcreteComputation:
    return flf.ConcreteComputation.from_building_block(block)


def _lambda(parameter: flf.Reference | None, body: Block) -> flf.Lambda:
    if parameter is None:
        return flf.Lambda(None, None, body)
    return flf.Lambda(parameter.name, parameter.type_signature, body)


def _up_to_merge(
    graph: CallGraph,
    before: Sequence[Sequence[PartialAggregation]],
    aggregations: Sequence[PartialAggregation],
    kept: keeping.KeptNames = _NOTHING,
) -> Block:
    if not aggregations and not kept.emits:
        return _lambda(graph.parameter, zip_at_server([]))
    given = stage_input(graph, before, kept.takes)
    locals_ = given.locals_for(_roots(given.calls, aggregations) | {*kept.emits})
    for aggregation in aggregations:
        locals_ += [*aggregation.before, (aggregation.name, aggregation.call)]
    result = zip_at_server([_reference(a.name, a.call) for a in aggregations])
    if kept.emits:
        emitted = [_reference(name, given.calls[name]) for name in kept.emits]
        result = flf.Struct([result, *emitted])
    return _lambda(given.parameter, flf.Block(locals_, result))


def _reference(name: str, block: Block) -> flf.Reference:
    return flf.Reference(name, block.type_signature)


def _roots(
    calls: Mapping[str, Block], aggregations: Sequence[PartialAggregation]
) -> frozenset[str]:
    """Return the names that aggregations need."""
    needed = (free_references(calls[aggregation.name]) for aggregation in aggregations)
    return frozenset[str]().union(*needed)


def _merge(graph: CallGraph, aggregations: Sequence[PartialAggregation]) -> Block:
    """Return the merge of a stage's partials: each aggregation's under its name.

    The names are part of what the random numbers of a merge depend on, so that two
    aggregations draw different ones, also where one function merges both.
    """
    partial = partial_type(aggregations)
    pair = flf.Reference(PAIR, fl.StructType([partial, partial]))
    merges: list[tuple[str, Block]] = []
    for index, aggregation in enumerate(aggregations):
        sides = flf.Struct(
            [select(select(pair, 0), index), select(select(pair, 1), index)]
        )
        merges.append((aggregation.name, flf.Call(aggregation.merge, sides)))
    free = frozenset[str]().union(*(free_references(call) for _, call in merges))
    free -= {PAIR}
    calls = dict(graph.calls)
    needed = needed_names(free, calls)
    captured = [(name, call) for name, call in graph.calls if name in needed]
    used = frozenset[str]().union(free, *(free_references(c) for _, c in captured))
    if graph.parameter is not None and graph.parameter.name in used:
        raise errors.CompileError(
            "Expected a merge that depends on partials alone, found one that captures"
            " the computation's argument: carry it in the accumulator."
        )
    if any(is_aggregation(call) for _, call in captured):
        raise errors.CompileError(
            "Expected a merge that depends on partials alone, found one that captures"
            " the result of an aggregation: carry it in the accumulator."
        )
    merged = flf.Struct([_reference(name, call) for name, call in merges])
    return _lambda(pair, flf.Block([*captured, *merges], merged) if merges else merged)


def _after_merge(
    graph: CallGraph,
    stages: Sequence[Sequence[PartialAggregation]],
    result: Block,
    kept: keeping.KeptNames = _NOTHING,
) -> Block:
    """Return what evaluates a result, or a part of it, of what the stages merged."""
    given = stage_input(graph, stages, kept.takes)
    locals_ = given.locals_for(free_references(result))
    body = flf.Block(locals_, result) if locals_ else result
    return _lambda(given.parameter, body)

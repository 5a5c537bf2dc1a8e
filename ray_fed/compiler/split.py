"""Divides a computation at its aggregations into up_to_merge, merge and after_merge.

    calls before the aggregations, without reports  ->  up_to_merge
    the merges of the aggregations                  ->  merge, of partials of two slices
    reports, and calls after the aggregations       ->  after_merge

A partial is the result of a slice, which is a subset of the clients. A report is a
function from the merged partial of an aggregation to its result.

Aggregations that do not depend on one another are one stage, with a struct of their
partials. An aggregation that depends on the result of another one belongs to a later
stage. Each stage has a `merge`, and an `up_to_merge` of the argument and of all earlier
merged values. A stage that uses values which clients computed in earlier stages has a
second form that takes these values: see `kept_values`.

A result has two kinds of parts: values that differ by client, and all others.

    <state@SERVER, <kept@CLIENTS, metrics@SERVER>>   ->   at_server   state, metrics
                                                          at_clients  kept
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.compiler.expressions import (
    close_over,
    free_references,
    needed_names,
    select,
    zip_at_server,
)
from ray_fed.compiler.form import (
    KeepingStage,
    MergeableCompChain,
    MergeableCompForm,
    ResultParts,
    Stage,
)
from ray_fed.compiler.kept_values import (
    KeptNames,
    count_member_bytes,
    divide,
    find_early,
)
from ray_fed.compiler.normalize import CallGraph, normalize
from ray_fed.compiler.partials import (
    PartialAggregation,
    is_aggregation,
    partial_type,
    to_partial_aggregation,
)
from ray_fed.language import type_checks

flf = fl.framework
Block = flf.ComputationBuildingBlock

PAIR = "pair"
"""Name of a parameter that is a struct, such as argument and merged values."""

_KEPT = "kept"
_NOTHING = KeptNames()


def compile_to_mergeable_comp_form(
    comp: flf.ConcreteComputation,
) -> MergeableCompForm:
    """Return the mergeable form of a federated computation.

    Args:
        comp: A computation whose aggregations do not depend on one another. It may have
            no aggregation and no parameter.

    Raises:
        ValueMismatchError: `comp` is not a computation.
        CompileError: An aggregation depends on the result of another one, is not known
            to ray_fed, or has a merge that captures values which depend on the
            argument.
    """
    type_checks.check_kind(comp, flf.ConcreteComputation, "comp")
    chain = compile_to_chain(comp)
    if len(chain.stages) > 1:
        raise errors.CompileError(
            "Expected aggregations that do not depend on one another, found"
            f" {len(chain.stages)} stages, each of which depends on the one before:"
            " run the computation in a context that ray_fed.init creates."
        )
    stage = chain.stages[0]
    return MergeableCompForm(stage.up_to_merge, stage.merge, chain.after_merge)


def compile_to_chain(comp: flf.ConcreteComputation) -> MergeableCompChain:
    """Return the stages of a federated computation.

    The stage of an aggregation is the length of the longest chain of aggregations that
    it depends on. Without an aggregation, there is one stage without partials. Raises
    CompileError if an aggregation is not known to ray_fed, or has a merge that captures
    values which depend on the argument or on another aggregation.
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


def _group(graph: CallGraph) -> list[list[PartialAggregation]]:
    calls = dict(graph.calls)
    needed = needed_names(free_references(graph.result), calls)
    depths: dict[str, int] = {}
    stages: list[list[PartialAggregation]] = []
    for name, call in graph.calls:  # each call refers only to earlier calls
        if name not in needed or not is_aggregation(call):
            continue
        behind = needed_names(free_references(call), calls)
        # All aggregations that this one needs must be merged in earlier stages.
        depth = max(
            (depths[other] + 1 for other in depths if other in behind), default=0
        )
        depths[name] = depth
        if depth == len(stages):
            stages.append([])
        stages[depth].append(to_partial_aggregation(name, cast("flf.Call", call)))
    return stages or [[]]


def _keep(
    graph: CallGraph, stages: Sequence[Sequence["PartialAggregation"]]
) -> list[KeptNames]:
    calls_of_stages: list[tuple[frozenset[str], Mapping[str, Block]]] = []
    wanted = free_references(flf.Struct(at_clients(graph.result)))
    stage_of = {a.name: i for i, stage in enumerate(stages) for a in stage}
    early = find_early(wanted, dict(graph.calls), stage_of)
    for index, stage in enumerate(stages):
        calls = stage_input(graph, stages[:index]).calls
        roots = _roots(calls, stage) | {
            n for n, first in early.items() if first == index
        }
        calls_of_stages.append((roots, calls))
    end = stage_input(graph, stages).calls
    calls_of_stages.append((wanted, end))
    return divide(calls_of_stages)


def _keeping(graph: CallGraph, kept: KeptNames, block: Block) -> KeepingStage | None:
    if not kept.loads and not kept.saves:
        return None
    calls = dict(graph.calls)
    num_bytes = sum(count_member_bytes(calls[name]) for name in kept.saves)
    return KeepingStage(_compute(block), kept.loads, kept.saves, num_bytes)


def _divide_result(
    graph: CallGraph,
    stages: Sequence[Sequence["PartialAggregation"]],
    kept: KeptNames,
) -> ResultParts | None:
    of_clients = at_clients(graph.result)
    if not of_clients:
        return None
    of_server = at_server(graph.result)
    server_part = _after_merge(graph, stages, flf.Struct(of_server))
    clients_part = flf.Struct(of_clients)
    names = [p.name for p in of_clients if isinstance(p, flf.Reference)]
    is_kept = len(names) == len(of_clients) and set(names) <= set(kept.loads)
    return ResultParts(
        _compute(server_part) if of_server else None,
        _compute(_after_merge(graph, stages, clients_part)),
        _keeping(graph, kept, _after_merge(graph, stages, clients_part, kept)),
        tuple(names) if is_kept else None,
    )


def at_server(result: Block) -> list[Block]:
    """Return the parts of a result that do not differ by client, in order."""
    return [
        part
        for part in _parts(result)
        if not type_checks.differs_by_client(part.type_signature)
    ]


def at_clients(result: Block) -> list[Block]:
    """Return the parts of a result that differ by client, in order."""
    return [
        part
        for part in _parts(result)
        if type_checks.differs_by_client(part.type_signature)
    ]


def _parts(block: Block) -> Iterator[Block]:
    type_spec = block.type_signature
    if not type_checks.is_placed_struct(type_spec):
        yield block
        return
    for index in range(len(type_checks.struct_type(type_spec))):
        yield from _parts(select(block, index))


def _up_to_merge(
    graph: CallGraph,
    before: Sequence[Sequence[PartialAggregation]],
    aggregations: Sequence[PartialAggregation],
    kept: KeptNames = _NOTHING,
) -> Block:
    if not aggregations and not kept.saves:
        return close_over(graph.parameter, (), zip_at_server([]))
    inputs = stage_input(graph, before, kept.loads)
    locals_ = inputs.locals_for(_roots(inputs.calls, aggregations) | {*kept.saves})
    for aggregation in aggregations:
        locals_ += [*aggregation.before, (aggregation.name, aggregation.call)]
    result = zip_at_server([_reference(a.name, a.call) for a in aggregations])
    if kept.saves:
        saved = [_reference(name, inputs.calls[name]) for name in kept.saves]
        result = flf.Struct([result, *saved])
    return close_over(inputs.parameter, locals_, result)


def _merge(graph: CallGraph, aggregations: Sequence[PartialAggregation]) -> Block:
    # The random numbers of a merge depend on the name of its local. With a local for
    # each aggregation, two aggregations with one merge function draw other numbers.
    partial = partial_type(aggregations)
    pair = flf.Reference(PAIR, fl.StructType([partial, partial]))
    merges: list[tuple[str, Block]] = []
    for index, aggregation in enumerate(aggregations):
        sides = flf.Struct(
            [select(select(pair, 0), index), select(select(pair, 1), index)]
        )
        merges.append((aggregation.name, flf.Call(aggregation.merge, sides)))
    # Any process may run a merge, so it cannot capture values of one process.
    free = frozenset[str]().union(*(free_references(call) for _, call in merges))
    free -= {PAIR}
    calls = dict(graph.calls)
    needed = needed_names(free, calls)
    captured = [(name, call) for name, call in graph.calls if name in needed]
    used = frozenset[str]().union(free, *(free_references(c) for _, c in captured))
    if graph.parameter is not None and graph.parameter.name in used:
        raise errors.CompileError(
            "Expected a merge that depends on partials only, found one that captures"
            " the computation's argument: put the value into the accumulator."
        )
    if any(is_aggregation(call) for _, call in captured):
        raise errors.CompileError(
            "Expected a merge that depends on partials only, found one that captures"
            " the result of an aggregation: put the value into the accumulator."
        )
    merged = flf.Struct([_reference(name, call) for name, call in merges])
    return close_over(pair, [*captured, *merges], merged)


def _after_merge(
    graph: CallGraph,
    stages: Sequence[Sequence[PartialAggregation]],
    result: Block,
    kept: KeptNames = _NOTHING,
) -> Block:
    inputs = stage_input(graph, stages, kept.loads)
    locals_ = inputs.locals_for(free_references(result))
    return close_over(inputs.parameter, locals_, result)


@dataclasses.dataclass(frozen=True)
class StageInput:
    """The input of a stage, or of `after_merge`, once the earlier stages are merged.

    Attributes:
        parameter: A reference to the argument and the merged values, or None if the
            stage takes nothing.
        bound: Locals that give names to the elements of `parameter`.
        calls: The calls of the computation, by name. For an aggregation that is already
            merged, the call is its report.
    """

    parameter: flf.Reference | None
    bound: tuple[tuple[str, Block], ...]
    calls: Mapping[str, Block]

    def locals_for(self, roots: frozenset[str]) -> list[tuple[str, Block]]:
        """Return the locals that `roots` depend on, in order."""
        needed = needed_names(roots, self.calls)
        return [
            *self.bound,
            *((name, call) for name, call in self.calls.items() if name in needed),
        ]


def stage_input(
    graph: CallGraph,
    stages: Sequence[Sequence[PartialAggregation]],
    loaded: Sequence[str] = (),
) -> StageInput:
    """Return the input of the stage that follows the merged `stages`.

    `loaded` has the names of the clients' values that the stage takes from them.
    """
    merged = [
        flf.Reference(
            f"merged_{index}" if index else "merged",
            fl.FederatedType(partial_type(stage), fl.SERVER),
        )
        for index, stage in enumerate(stages)
    ]
    reports = {
        aggregation.name: _report(aggregation, position, reference)
        for stage, reference in zip(stages, merged, strict=True)
        for position, aggregation in enumerate(stage)
    }
    # Later calls refer to a merged aggregation by its name, and must get its report.
    calls = dict(graph.calls) | reports
    parts = [] if graph.parameter is None else [graph.parameter]
    parts += merged
    if loaded:
        types = [calls[name].type_signature for name in loaded]
        parts.append(flf.Reference(_KEPT, fl.StructType(types)))
        calls |= {
            name: flf.Selection(parts[-1], index=index)
            for index, name in enumerate(loaded)
        }
    if len(parts) < 2:  # noqa: PLR2004 (a single part is not in a struct)
        return StageInput(parts[0] if parts else None, (), calls)
    types = fl.StructType([part.type_signature for part in parts])
    parameter = flf.Reference(PAIR, types)
    bound = tuple(
        (part.name, flf.Selection(parameter, index=index))
        for index, part in enumerate(parts)
    )
    return StageInput(parameter, bound, calls)


def _report(
    aggregation: PartialAggregation, index: int, merged: flf.Reference
) -> Block:
    partials = flf.Reference(
        f"{aggregation.name}_partials",
        type_checks.member_type(merged.type_signature),
    )
    partial: Block = flf.Selection(partials, index=index)
    if aggregation.report is not None:
        partial = flf.Call(aggregation.report, partial)
    return flf.create_federated_apply(
        flf.Lambda(partials.name, partials.type_signature, partial), merged
    )


def _roots(
    calls: Mapping[str, Block], aggregations: Sequence[PartialAggregation]
) -> frozenset[str]:
    needed = (free_references(calls[aggregation.name]) for aggregation in aggregations)
    return frozenset[str]().union(*needed)


def _reference(name: str, block: Block) -> flf.Reference:
    return flf.Reference(name, block.type_signature)


def _compute(block: Block) -> flf.ConcreteComputation:
    return flf.ConcreteComputation.from_building_block(block)

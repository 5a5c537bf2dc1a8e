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

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.compiler import keeping
from ray_fed.compiler.form import (
    KeepingStage,
    MergeableCompChain,
    MergeableCompForm,
    Stage,
)
from ray_fed.compiler.normalize import (
    CallGraph,
    free_references,
    needed_names,
    normalize,
)
from ray_fed.language import intrinsics

flf = fl.framework
Block = flf.ComputationBuildingBlock
_PAIR, _KEPT = "pair", "kept"
_NOTHING = keeping.KeptNames()


@dataclasses.dataclass(frozen=True)
class _Aggregation:
    """One aggregation of a call graph, as the arguments of federated_aggregate.

    Attributes:
        name: of the call it stands for.
        before: calls to add before it, by name.
        call: federated_aggregate that returns the partial unreported.
        merge: <U, U> -> U.
        report: U -> result; None returns the partial.
    """

    name: str
    before: tuple[tuple[str, Block], ...]
    call: flf.Call
    merge: Block
    report: Block | None


def compile_to_mergeable_comp_form(
    comp: flf.ConcreteComputation,
) -> MergeableCompForm:
    """Return the mergeable form of a federated computation.

    Args:
        comp: any computation whose aggregations do not depend on one another; it may
            have none, and need not take an argument.

    Raises:
        CompileError: an aggregation depends on the result of another one, is of a kind
            that has no partials, or merges with values that depend on the argument.
    """
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
        after_merge=_compute(_after_merge(graph, stages)),
        after_keeping=_keeping(
            graph, kept_after, _after_merge(graph, stages, kept_after)
        ),
    )


def _keep(
    graph: CallGraph, stages: Sequence[Sequence["_Aggregation"]]
) -> list[keeping.KeptNames]:
    """Return what each stage, and then the end, takes and emits."""
    calls_of_stages: list[keeping.StageCalls] = []
    for index, stage in enumerate(stages):
        calls = _given(graph, stages[:index]).calls
        calls_of_stages.append(keeping.StageCalls(_roots(calls, stage), calls))
    end = _given(graph, stages).calls
    calls_of_stages.append(keeping.StageCalls(free_references(graph.result), end))
    return keeping.divide(calls_of_stages)


def _keeping(
    graph: CallGraph, kept: keeping.KeptNames, block: Block
) -> KeepingStage | None:
    if not kept.takes and not kept.emits:
        return None
    calls = dict(graph.calls)
    num_bytes = sum(keeping.count_member_bytes(calls[name]) for name in kept.emits)
    return KeepingStage(_compute(block), kept.takes, kept.emits, num_bytes)


def _group(graph: CallGraph) -> list[list[_Aggregation]]:
    """Return the aggregations by how many others each has to wait for."""
    calls = dict(graph.calls)
    needed = needed_names(free_references(graph.result), calls)
    depths: dict[str, int] = {}
    stages: list[list[_Aggregation]] = []
    for name, call in graph.calls:  # each refers to earlier ones only
        if name not in needed or not _is_aggregation(call):
            continue
        behind = needed_names(free_references(call), calls)
        depth = max(
            (depths[other] + 1 for other in depths if other in behind), default=0
        )
        depths[name] = depth
        if depth == len(stages):
            stages.append([])
        stages[depth].append(_to_aggregation(name, cast("flf.Call", call)))
    return stages or [[]]


def _compute(block: Block) -> flf.ConcreteComputation:
    return flf.ConcreteComputation.from_building_block(block)


def _uri(call: Block) -> str | None:
    if isinstance(call, flf.Call) and isinstance(call.function, flf.Intrinsic):
        return call.function.uri
    return None


def _is_aggregation(call: Block) -> bool:
    return isinstance(call, flf.Call) and intrinsics.is_aggregation(call.function)


def _to_aggregation(name: str, call: flf.Call) -> _Aggregation:
    uri = _uri(call) or ""
    argument = cast("Block", call.argument)
    if uri == flf.FEDERATED_AGGREGATE.uri:
        value, zero, accumulate, merge, report = (_at(argument, i) for i in range(5))
        return _Aggregation(
            name, (), _aggregate(value, zero, accumulate, merge), merge, report
        )
    if uri in intrinsics.SECURE_SUM_CHECKS:
        return _to_secure_sum(name, uri, argument)
    if uri == intrinsics.FEDERATED_SECURE_MODULAR_SUM.uri:
        return _to_modular_sum(name, argument)
    derive = intrinsics.DERIVED_AGGREGATIONS.get(uri)
    if derive is None:
        raise errors.CompileError(
            f"Expected an aggregation with partials, found `{uri}`."
        )
    before: tuple[tuple[str, Block], ...] = ()
    value = argument
    if isinstance(value.type_signature, fl.StructType):  # a weighted mean's pair
        zipped = flf.create_federated_zip(flf.Struct([_at(value, 0), _at(value, 1)]))
        before = ((f"{name}_zipped", zipped),)
        value = flf.Reference(f"{name}_zipped", zipped.type_signature)
    return _derived_aggregation(name, before, value, derive)


def _derived_aggregation(
    name: str,
    before: tuple[tuple[str, Block], ...],
    value: Block,
    derive: Callable[[fl.Type], intrinsics.Aggregation],
) -> _Aggregation:
    derived = derive(cast("fl.FederatedType", value.type_signature).member)
    return _aggregation_of(name, before, value, derived, flf.Call(derived.zero))


def _aggregation_of(
    name: str,
    before: tuple[tuple[str, Block], ...],
    value: Block,
    derived: intrinsics.Aggregation,
    call: flf.Call,
) -> _Aggregation:
    """Return a derived aggregation of a value, whose zero a call makes."""
    zero = flf.Reference(f"{name}_zero", call.type_signature)
    aggregate = _aggregate(value, zero, derived.accumulate, derived.merge)
    before += ((zero.name, call),)
    return _Aggregation(name, before, aggregate, derived.merge, derived.report)


def _to_modular_sum(name: str, argument: Block) -> _Aggregation:
    value, modulus = _at(argument, 0), _at(argument, 1)
    member = cast("fl.FederatedType", value.type_signature).member
    derived = intrinsics.modular_sum(member, modulus.type_signature)
    call = flf.Call(derived.zero, flf.Struct([modulus]))
    return _aggregation_of(name, (), value, derived, call)


def _to_secure_sum(name: str, uri: str, argument: Block) -> _Aggregation:
    """Check each client's value against its bound, then sum."""
    value, bound = _at(argument, 0), _at(argument, 1)
    member = cast("fl.FederatedType", value.type_signature).member
    placed = flf.create_federated_value(bound, fl.CLIENTS)
    bounds = flf.Reference(f"{name}_bound", placed.type_signature)
    zipped = flf.create_federated_zip(flf.Struct([value, bounds]))
    pairs = flf.Reference(f"{name}_zipped", zipped.type_signature)
    check = intrinsics.check_of(uri, member, bound.type_signature)
    mapped = flf.create_federated_map(check, pairs)
    checked = flf.Reference(f"{name}_checked", mapped.type_signature)
    before = ((bounds.name, placed), (pairs.name, zipped), (checked.name, mapped))
    derive = intrinsics.DERIVED_AGGREGATIONS[flf.FEDERATED_SUM.uri]
    return _derived_aggregation(name, before, checked, derive)


def _aggregate(value: Block, zero: Block, accumulate: Block, merge: Block) -> flf.Call:
    partial = cast("fl.FunctionType", merge.type_signature).result
    identity = flf.create_identity(partial)
    return flf.create_federated_aggregate(value, zero, accumulate, merge, identity)


def _at(source: Block, index: int) -> Block:
    if isinstance(source, flf.Struct):
        return cast("Any", source)[index]
    return flf.Selection(source, index=index)


def _lambda(parameter: flf.Reference | None, body: Block) -> flf.Lambda:
    if parameter is None:
        return flf.Lambda(None, None, body)
    return flf.Lambda(parameter.name, parameter.type_signature, body)


@dataclasses.dataclass(frozen=True)
class _Given:
    """What a part of a computation starts from, once some stages are merged.

    Attributes:
        parameter: the argument and what was merged: one reference, or None.
        bound: locals that take the parameter apart.
        calls: of the graph, by name, merged aggregations replaced by their reports.
    """

    parameter: flf.Reference | None
    bound: tuple[tuple[str, Block], ...]
    calls: Mapping[str, Block]

    def locals_for(self, roots: frozenset[str]) -> list[tuple[str, Block]]:
        """Return the locals that lead to `roots`, in order."""
        needed = needed_names(roots, self.calls)
        return [
            *self.bound,
            *((name, call) for name, call in self.calls.items() if name in needed),
        ]


def _given(
    graph: CallGraph,
    stages: Sequence[Sequence[_Aggregation]],
    taken: Sequence[str] = (),
) -> _Given:
    merged = [
        flf.Reference(f"merged_{index}" if index else "merged", _merged_type(stage))
        for index, stage in enumerate(stages)
    ]
    reports = {
        aggregation.name: _report(aggregation, position, reference)
        for stage, reference in zip(stages, merged, strict=True)
        for position, aggregation in enumerate(stage)
    }
    calls = dict(graph.calls) | reports
    parts = [] if graph.parameter is None else [graph.parameter]
    parts += merged
    if taken:
        types = [calls[name].type_signature for name in taken]
        parts.append(flf.Reference(_KEPT, fl.StructType(types)))
        calls |= {
            name: flf.Selection(parts[-1], index=index)
            for index, name in enumerate(taken)
        }
    if len(parts) < 2:  # noqa: PLR2004 (nothing to take apart)
        return _Given(parts[0] if parts else None, (), calls)
    types = fl.StructType([part.type_signature for part in parts])
    parameter = flf.Reference(_PAIR, types)
    bound = tuple(
        (part.name, flf.Selection(parameter, index=index))
        for index, part in enumerate(parts)
    )
    return _Given(parameter, bound, calls)


def _up_to_merge(
    graph: CallGraph,
    before: Sequence[Sequence[_Aggregation]],
    aggregations: Sequence[_Aggregation],
    kept: keeping.KeptNames = _NOTHING,
) -> Block:
    if not aggregations:
        empty = flf.create_federated_value(flf.Struct([]), fl.SERVER)
        return _lambda(graph.parameter, empty)
    given = _given(graph, before, kept.takes)
    locals_ = given.locals_for(_roots(given.calls, aggregations))
    for aggregation in aggregations:
        locals_ += [*aggregation.before, (aggregation.name, aggregation.call)]
    partials = flf.Struct(
        [flf.Reference(a.name, a.call.type_signature) for a in aggregations]
    )
    result: Block = flf.create_federated_zip(partials)
    if kept.emits:
        emitted = [_reference(name, given.calls[name]) for name in kept.emits]
        result = flf.Struct([result, *emitted])
    return _lambda(given.parameter, flf.Block(locals_, result))


def _reference(name: str, block: Block) -> flf.Reference:
    return flf.Reference(name, block.type_signature)


def _roots(
    calls: Mapping[str, Block], aggregations: Sequence[_Aggregation]
) -> frozenset[str]:
    """Return the names that aggregations need."""
    needed = (free_references(calls[aggregation.name]) for aggregation in aggregations)
    return frozenset[str]().union(*needed)


def _merged_type(aggregations: Sequence[_Aggregation]) -> fl.FederatedType:
    return fl.FederatedType(_partial_type(aggregations), fl.SERVER)


def _partial_type(aggregations: Sequence[_Aggregation]) -> fl.Type:
    return fl.StructType(
        [cast("fl.FederatedType", a.call.type_signature).member for a in aggregations]
    )


def _merge(graph: CallGraph, aggregations: Sequence[_Aggregation]) -> Block:
    """Return the merge of a stage's partials: each aggregation's under its name.

    The names are part of what the random numbers of a merge depend on, so that two
    aggregations draw different ones, also where one function merges both.
    """
    partial = _partial_type(aggregations)
    pair = flf.Reference(_PAIR, fl.StructType([partial, partial]))
    merges: list[tuple[str, Block]] = []
    for index, aggregation in enumerate(aggregations):
        sides = flf.Struct([_at(_at(pair, 0), index), _at(_at(pair, 1), index)])
        merges.append((aggregation.name, flf.Call(aggregation.merge, sides)))
    free = frozenset[str]().union(*(free_references(call) for _, call in merges))
    free -= {_PAIR}
    calls = dict(graph.calls)
    needed = needed_names(free, calls)
    captured = [(name, call) for name, call in graph.calls if name in needed]
    used = frozenset[str]().union(free, *(free_references(c) for _, c in captured))
    if graph.parameter is not None and graph.parameter.name in used:
        raise errors.CompileError(
            "Expected a merge that depends on partials alone, found one that captures"
            " the computation's argument: carry it in the accumulator."
        )
    if any(_is_aggregation(call) for _, call in captured):
        raise errors.CompileError(
            "Expected a merge that depends on partials alone, found one that captures"
            " the result of an aggregation: carry it in the accumulator."
        )
    merged = flf.Struct([_reference(name, call) for name, call in merges])
    return _lambda(pair, flf.Block([*captured, *merges], merged) if merges else merged)


def _after_merge(
    graph: CallGraph,
    stages: Sequence[Sequence[_Aggregation]],
    kept: keeping.KeptNames = _NOTHING,
) -> Block:
    given = _given(graph, stages, kept.takes)
    locals_ = given.locals_for(free_references(graph.result))
    body = flf.Block(locals_, graph.result) if locals_ else graph.result
    return _lambda(given.parameter, body)


def _report(aggregation: _Aggregation, index: int, merged: flf.Reference) -> Block:
    """Return the call that makes an aggregation's result of the merged partials."""
    partials = flf.Reference(
        f"{aggregation.name}_partials",
        cast("fl.FederatedType", merged.type_signature).member,
    )
    partial: Block = flf.Selection(partials, index=index)
    if aggregation.report is not None:
        partial = flf.Call(aggregation.report, partial)
    return flf.create_federated_apply(_lambda(partials, partial), merged)

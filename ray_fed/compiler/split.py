"""Cuts a computation at its aggregations into up_to_merge, merge and after_merge.

    calls before the aggregations  ->  aggregate, report left out   up_to_merge
    partials of any two slices     ->  the aggregations' merges      merge
    argument, merged partials      ->  reports, calls after them     after_merge

Aggregations that do not depend on one another count as one: their partials travel as
a struct. One that depends on another's result has no mergeable form.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import federated_language as fl

import ray_fed.errors as errors
import ray_fed.intrinsics as intrinsics
from ray_fed.compiler.form import MergeableCompForm
from ray_fed.compiler.normalize import CallGraph, free_references, normalize

flf = fl.framework
Block = flf.ComputationBuildingBlock
_MERGED = "merged"
_PAIR = "pair"


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
    block = Block.from_proto(comp.to_proto())
    graph = normalize(block)
    calls = dict(graph.calls)
    needed = _needed(free_references(graph.result), calls)
    aggregations = [
        _to_aggregation(name, cast("flf.Call", call))
        for name, call in graph.calls
        if name in needed and _is_aggregation(call)
    ]
    _check_independent(aggregations, calls)
    return MergeableCompForm(
        up_to_merge=_compute(_up_to_merge(graph, aggregations)),
        merge=_compute(_merge(graph, aggregations)),
        after_merge=_compute(_after_merge(graph, aggregations)),
    )


def _compute(block: Block) -> flf.ConcreteComputation:
    return flf.ConcreteComputation.from_building_block(block)


def _uri(call: Block) -> str | None:
    if isinstance(call, flf.Call) and isinstance(call.function, flf.Intrinsic):
        return call.function.uri
    return None


def _is_aggregation(call: Block) -> bool:
    uri = _uri(call)
    return uri in {i.uri for i in flf.get_aggregation_intrinsics()}


def _needed(
    roots: frozenset[str],
    calls: Mapping[str, Block],
    stop: frozenset[str] = frozenset(),
) -> frozenset[str]:
    """Return the names that `roots` need, themselves included, not beyond `stop`."""
    needed: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name in needed or name not in calls:
            continue
        needed.add(name)
        if name not in stop:
            pending.extend(free_references(calls[name]))
    return frozenset(needed)


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
    call = flf.Call(derived.zero)
    zero = flf.Reference(f"{name}_zero", call.type_signature)
    aggregate = _aggregate(value, zero, derived.accumulate, derived.merge)
    before += ((zero.name, call),)
    return _Aggregation(name, before, aggregate, derived.merge, derived.report)


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


def _check_independent(
    aggregations: Sequence[_Aggregation], calls: Mapping[str, Block]
) -> None:
    names = frozenset(aggregation.name for aggregation in aggregations)
    for aggregation in aggregations:
        behind = _needed(free_references(calls[aggregation.name]), calls)
        if behind & names:
            raise errors.CompileError(
                "Expected aggregations that do not depend on one another, found"
                f" `{_uri(calls[aggregation.name])}` of a value that was computed from"
                " the result of another aggregation."
            )


def _lambda(parameter: flf.Reference | None, body: Block) -> flf.Lambda:
    if parameter is None:
        return flf.Lambda(None, None, body)
    return flf.Lambda(parameter.name, parameter.type_signature, body)


def _up_to_merge(graph: CallGraph, aggregations: Sequence[_Aggregation]) -> Block:
    if not aggregations:
        empty = flf.create_federated_value(flf.Struct([]), fl.SERVER)
        return _lambda(graph.parameter, empty)
    calls = dict(graph.calls)
    roots = frozenset[str]().union(
        *(free_references(calls[aggregation.name]) for aggregation in aggregations)
    )
    needed = _needed(roots, calls)
    before = [(name, call) for name, call in graph.calls if name in needed]
    for aggregation in aggregations:
        before += [*aggregation.before, (aggregation.name, aggregation.call)]
    partials = flf.Struct(
        [flf.Reference(a.name, a.call.type_signature) for a in aggregations]
    )
    zipped = flf.create_federated_zip(partials)
    return _lambda(graph.parameter, flf.Block(before, zipped))


def _partial_type(aggregations: Sequence[_Aggregation]) -> fl.Type:
    return fl.StructType(
        [cast("fl.FederatedType", a.call.type_signature).member for a in aggregations]
    )


def _merge(graph: CallGraph, aggregations: Sequence[_Aggregation]) -> Block:
    partial = _partial_type(aggregations)
    pair = flf.Reference(_PAIR, fl.StructType([partial, partial]))
    merged = flf.Struct(
        [
            flf.Call(
                aggregation.merge,
                flf.Struct([_at(_at(pair, 0), index), _at(_at(pair, 1), index)]),
            )
            for index, aggregation in enumerate(aggregations)
        ]
    )
    free = free_references(merged) - {_PAIR}
    calls = dict(graph.calls)
    needed = _needed(free, calls)
    captured = [(name, call) for name, call in graph.calls if name in needed]
    used = frozenset[str]().union(free, *(free_references(c) for _, c in captured))
    if graph.parameter is not None and graph.parameter.name in used:
        raise errors.CompileError(
            "Expected a merge that depends on partials alone, found one that captures"
            " the computation's argument: carry it in the accumulator."
        )
    return _lambda(pair, flf.Block(captured, merged) if captured else merged)


def _after_merge(graph: CallGraph, aggregations: Sequence[_Aggregation]) -> Block:
    merged_type = fl.FederatedType(_partial_type(aggregations), fl.SERVER)
    if graph.parameter is None:
        parameter = merged = flf.Reference(_MERGED, merged_type)
        bound: list[tuple[str, Block]] = []
    else:
        pair_type = fl.StructType([graph.parameter.type_signature, merged_type])
        parameter = flf.Reference(_PAIR, pair_type)
        merged = flf.Reference(_MERGED, merged_type)
        bound = [
            (graph.parameter.name, flf.Selection(parameter, index=0)),
            (_MERGED, flf.Selection(parameter, index=1)),
        ]
    reports = {
        aggregation.name: _report(aggregation, index, merged)
        for index, aggregation in enumerate(aggregations)
    }
    calls = dict(graph.calls) | reports
    needed = _needed(free_references(graph.result), calls)
    after = [(name, calls[name]) for name, _ in graph.calls if name in needed]
    locals_ = [*bound, *after]
    body = flf.Block(locals_, graph.result) if locals_ else graph.result
    return _lambda(parameter, body)


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

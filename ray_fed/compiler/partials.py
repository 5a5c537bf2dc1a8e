"""Rewrites each aggregation as the functions zero, accumulate, merge and report.

A partial is the result of a subset of the clients. Before the merge, a
`federated_aggregate` without a report computes it. After the merge, the report computes
the result from the merged partial.
"""

import dataclasses
from collections.abc import Sequence
from typing import cast

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.compiler.expressions import select
from ray_fed.language import intrinsics, type_checks

flf = fl.framework
Block = flf.ComputationBuildingBlock


@dataclasses.dataclass(frozen=True)
class PartialAggregation:
    """One aggregation of a computation, divided at the merge.

    Attributes:
        name: Name of the call.
        before: Names and calls that must be added before the aggregation.
        call: The federated_aggregate without a report. It returns a partial of type U.
        merge: Function <U, U> -> U.
        report: Function from U to the result, or None if the partial is the result.
    """

    name: str
    before: tuple[tuple[str, Block], ...]
    call: flf.Call
    merge: Block
    report: Block | None


def is_aggregation(call: Block) -> bool:
    """Return whether a block calls an intrinsic that aggregates, such as a mean."""
    return isinstance(call, flf.Call) and intrinsics.is_aggregation(call.function)


def partial_type(aggregations: Sequence[PartialAggregation]) -> fl.Type:
    """Return the type of the struct of the partials of some aggregations."""
    return fl.StructType(
        [type_checks.member_type(a.call.type_signature) for a in aggregations]
    )


def to_partial_aggregation(name: str, call: flf.Call) -> PartialAggregation:
    """Divide an aggregation at the merge.

    `call` is the aggregation, and `name` is its name. Raises CompileError if ray_fed
    does not know its intrinsic.
    """
    uri = cast("flf.Intrinsic", call.function).uri
    argument = cast("Block", call.argument)
    if uri == flf.FEDERATED_AGGREGATE.uri:
        value, zero, accumulate, merge, report = (select(argument, i) for i in range(5))
        return PartialAggregation(
            name, (), _aggregate(value, zero, accumulate, merge), merge, report
        )
    if uri not in intrinsics.DERIVED_AGGREGATIONS:
        raise errors.CompileError(
            f"Expected an aggregation with partials, found `{uri}`."
        )
    return _derive(name, uri, argument)


def _derive(name: str, uri: str, argument: Block) -> PartialAggregation:
    before: list[tuple[str, Block]] = []

    def bind(suffix: str, block: Block) -> Block:
        before.append((f"{name}_{suffix}", block))
        return flf.Reference(f"{name}_{suffix}", block.type_signature)

    value, bounds = argument, list[Block]()
    if uri in intrinsics.BOUNDED:
        value, bounds = select(argument, 0), [select(argument, 1)]
    elif isinstance(argument.type_signature, fl.StructType):  # <value, weight>
        pair = flf.Struct([select(argument, 0), select(argument, 1)])
        value = bind("zipped", flf.create_federated_zip(pair))
    derived = intrinsics.DERIVED_AGGREGATIONS[uri](
        type_checks.member_type(value.type_signature),
        *(bound.type_signature for bound in bounds),
    )
    if derived.check is not None:
        placed = bind("bound", flf.create_federated_value(bounds.pop(), fl.CLIENTS))
        zipped = flf.create_federated_zip(flf.Struct([value, placed]))
        pairs = bind("zipped", zipped)
        value = bind("checked", flf.create_federated_map(derived.check, pairs))
    zero = flf.Call(derived.zero, flf.Struct(bounds) if bounds else None)
    call = _aggregate(value, bind("zero", zero), derived.accumulate, derived.merge)
    return PartialAggregation(name, tuple(before), call, derived.merge, derived.report)


def _aggregate(value: Block, zero: Block, accumulate: Block, merge: Block) -> flf.Call:
    partial = cast("fl.FunctionType", merge.type_signature).result
    identity = flf.create_identity(partial)
    return flf.create_federated_aggregate(value, zero, accumulate, merge, identity)

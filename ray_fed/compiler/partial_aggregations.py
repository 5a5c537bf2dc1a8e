"""Aggregations as partials: each intrinsic becomes zero, accumulate, merge, report."""

import dataclasses
from collections.abc import Callable
from typing import cast

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.compiler.substitution import select
from ray_fed.language import intrinsics

flf = fl.framework
Block = flf.ComputationBuildingBlock


@dataclasses.dataclass(frozen=True)
class PartialAggregation:
    """One aggregation of a call graph, as a federated_aggregate that stops at partials.

    Attributes:
        name: of the aggregation in the call graph.
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


def _uri(call: Block) -> str | None:
    if isinstance(call, flf.Call) and isinstance(call.function, flf.Intrinsic):
        return call.function.uri
    return None


def is_aggregation(call: Block) -> bool:
    """Return whether a block is the call of an aggregating intrinsic."""
    return isinstance(call, flf.Call) and intrinsics.is_aggregation(call.function)


def to_partial_aggregation(name: str, call: flf.Call) -> PartialAggregation:
    """Return an aggregation as federated_aggregate, its report set apart.

    Args:
        name: of the aggregation in the call graph.
        call: of an aggregating intrinsic.

    Raises:
        CompileError: the intrinsic has no partials.
    """
    uri = _uri(call) or ""
    argument = cast("Block", call.argument)
    if uri == flf.FEDERATED_AGGREGATE.uri:
        value, zero, accumulate, merge, report = (select(argument, i) for i in range(5))
        return PartialAggregation(
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
        zipped = flf.create_federated_zip(
            flf.Struct([select(value, 0), select(value, 1)])
        )
        before = ((f"{name}_zipped", zipped),)
        value = flf.Reference(f"{name}_zipped", zipped.type_signature)
    return _derived_aggregation(name, before, value, derive)


def _derived_aggregation(
    name: str,
    before: tuple[tuple[str, Block], ...],
    value: Block,
    derive: Callable[[fl.Type], intrinsics.Aggregation],
) -> PartialAggregation:
    derived = derive(cast("fl.FederatedType", value.type_signature).member)
    return _aggregation_of(name, before, value, derived, flf.Call(derived.zero))


def _aggregation_of(
    name: str,
    before: tuple[tuple[str, Block], ...],
    value: Block,
    derived: intrinsics.Aggregation,
    call: flf.Call,
) -> PartialAggregation:
    """Return a derived aggregation of a value, whose zero a call makes."""
    zero = flf.Reference(f"{name}_zero", call.type_signature)
    aggregate = _aggregate(value, zero, derived.accumulate, derived.merge)
    before += ((zero.name, call),)
    return PartialAggregation(name, before, aggregate, derived.merge, derived.report)


def _to_modular_sum(name: str, argument: Block) -> PartialAggregation:
    value, modulus = select(argument, 0), select(argument, 1)
    member = cast("fl.FederatedType", value.type_signature).member
    derived = intrinsics.modular_sum(member, modulus.type_signature)
    call = flf.Call(derived.zero, flf.Struct([modulus]))
    return _aggregation_of(name, (), value, derived, call)


def _to_secure_sum(name: str, uri: str, argument: Block) -> PartialAggregation:
    """Check each client's value against its bound, then sum."""
    value, bound = select(argument, 0), select(argument, 1)
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

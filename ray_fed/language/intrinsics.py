"""Derived aggregations, written as `federated_aggregate`: one table for everyone.

The executor that interprets an intrinsic and the compiler that cuts it out of a
computation take the same zero, accumulate, merge and report from here, so both give
the same bits. Arithmetic that federated_language has no intrinsic for is defined
here as intrinsics of ray_fed's own, which the leaf executor runs.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import cast

import federated_language as fl
import numpy as np

import ray_fed.errors as errors
from ray_fed.language import type_checks

flf = fl.framework

_T = fl.AbstractType("T")
_U = fl.AbstractType("U")


def _define(name: str, type_signature: fl.FunctionType) -> flf.IntrinsicDef:
    return flf.IntrinsicDef(
        f"RAY_FED_{name}", f"ray_fed_{name.lower()}", type_signature
    )


ZEROS = _define("ZEROS", fl.FunctionType(None, _T))
LARGEST = _define("LARGEST", fl.FunctionType(None, _T))
LOWEST = _define("LOWEST", fl.FunctionType(None, _T))
MINIMUM = _define("MINIMUM", fl.FunctionType([_T, _T], _T))
MAXIMUM = _define("MAXIMUM", fl.FunctionType([_T, _T], _T))
ADD_VALUE = _define("ADD_VALUE", fl.FunctionType([_U, _T], _U))
"""Adds a value to <sum, number of clients>."""
ADD_WEIGHTED = _define("ADD_WEIGHTED", fl.FunctionType([_U, _T], _U))
"""Adds <value, weight> to <sum of value * weight, sum of weight, number of clients>."""
CHECK_MAXIMUM = _define("CHECK_MAXIMUM", fl.FunctionType([_T, _U], _T))
"""Returns the first, of which no element may exceed the bound of its tensor."""
CHECK_BITWIDTH = _define("CHECK_BITWIDTH", fl.FunctionType([_T, _U], _T))
"""Returns the first, of which every element must fit its tensor's number of bits."""
AVERAGE = _define("AVERAGE", fl.FunctionType(_U, _T))
"""Divides the sum by what stands behind it; no clients are an error."""
MODULAR_ZERO = _define("MODULAR_ZERO", fl.FunctionType([_T], _U))
"""Makes <zeros, moduli> of <modulus>, which is checked."""
ADD_MODULAR = _define("ADD_MODULAR", fl.FunctionType([_U, _T], _U))
"""Adds a value to <sum, moduli>, modulo these."""
MERGE_MODULAR = _define("MERGE_MODULAR", fl.FunctionType([_U, _U], _U))
"""Adds two <sum, moduli> of the same moduli, modulo these."""
MODULAR_SUM = _define("MODULAR_SUM", fl.FunctionType(_U, _T))
"""Returns the sum of <sum, moduli>."""

GENERIC_ZERO_URI = "generic_zero"
"""Of the intrinsic that is no function, but a value of zeros."""

FEDERATED_SECURE_MODULAR_SUM = flf.IntrinsicDef(
    "FEDERATED_SECURE_MODULAR_SUM",
    "federated_secure_modular_sum",
    fl.FunctionType(
        [fl.FederatedType(_T, fl.CLIENTS), _U], fl.FederatedType(_T, fl.SERVER)
    ),
    aggregation_kind=flf.AggregationKind.SECURE,
)
"""Of TensorFlow Federated, whose computations have it; federated_language has not."""


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """What `federated_aggregate` takes beside the value, as intrinsics.

    Attributes:
        zero: -> U, U the type of a partial; <bound> -> U for a sum with a modulus.
        accumulate: <U, T> -> U.
        merge: <U, U> -> U.
        report: U -> the declared result; None for the partial itself.
    """

    zero: flf.Intrinsic
    accumulate: flf.Intrinsic
    merge: flf.Intrinsic
    report: flf.Intrinsic | None = None


def _intrinsic(
    definition: flf.IntrinsicDef, parameter: object, result: fl.Type
) -> flf.Intrinsic:
    return flf.Intrinsic(definition.uri, fl.FunctionType(parameter, result))


def _monoid(
    zero: flf.IntrinsicDef, operator: flf.IntrinsicDef
) -> Callable[[fl.Type], Aggregation]:
    def derive(member: fl.Type) -> Aggregation:
        operation = _intrinsic(operator, [member, member], member)
        return Aggregation(_intrinsic(zero, None, member), operation, operation)

    return derive


def _mean(member: fl.Type) -> Aggregation:
    partial = fl.StructType([member, np.int32])
    return _averaged(partial, ADD_VALUE, member, member)


def _weighted_mean(member: fl.Type) -> Aggregation:
    value_type, weight_type = (t for _, t in cast("fl.StructType", member).items())
    partial = fl.StructType([value_type, weight_type, np.int32])
    return _averaged(partial, ADD_WEIGHTED, member, value_type)


def _averaged(
    partial: fl.Type, add: flf.IntrinsicDef, member: fl.Type, result: fl.Type
) -> Aggregation:
    return Aggregation(
        zero=_intrinsic(ZEROS, None, partial),
        accumulate=_intrinsic(add, [partial, member], partial),
        merge=_intrinsic(flf.GENERIC_PLUS, [partial, partial], partial),
        report=_intrinsic(AVERAGE, partial, result),
    )


DERIVED_AGGREGATIONS: Mapping[str, Callable[[fl.Type], Aggregation]] = {
    flf.FEDERATED_SUM.uri: _monoid(ZEROS, flf.GENERIC_PLUS),
    flf.FEDERATED_MIN.uri: _monoid(LARGEST, MINIMUM),
    flf.FEDERATED_MAX.uri: _monoid(LOWEST, MAXIMUM),
    flf.FEDERATED_MEAN.uri: _mean,
    flf.FEDERATED_WEIGHTED_MEAN.uri: _weighted_mean,
}
"""From the member type of what is aggregated; a weighted mean's is <value, weight>."""


def modular_sum(member: fl.Type, modulus: fl.Type) -> Aggregation:
    """Return a sum modulo a number, which partials carry along.

    Args:
        member: type of what is summed: integers.
        modulus: type of the modulus: one for all tensors, or one for each.

    Raises:
        CompileError: values are no integers, or there is another number of moduli.
    """
    tensors, moduli = _tensors(member), _tensors(modulus)
    for tensor in [*tensors, *moduli]:
        if not np.issubdtype(tensor.dtype, np.integer):
            raise errors.CompileError(
                "Expected integers for federated_secure_modular_sum, found values of"
                f" type `{member}` and a modulus of type `{modulus}`."
            )
    if len(moduli) not in (1, len(tensors)):
        raise errors.CompileError(
            "Expected one modulus for federated_secure_modular_sum, or one for each of"
            f" {len(tensors)} tensors, found a modulus of type `{modulus}`."
        )
    if len(moduli) == 1:
        moduli *= len(tensors)
    for tensor, of_tensor in zip(tensors, moduli, strict=True):
        if of_tensor.shape not in ((), tensor.shape):
            raise errors.CompileError(
                "Expected a modulus of the shape of what it is for, or without one,"
                f" for federated_secure_modular_sum, found `{of_tensor}` for"
                f" `{tensor}`."
            )
    # Partials carry the moduli along: a merge is given nothing beside two partials.
    carried = [
        fl.TensorType(tensor.dtype, of_tensor.shape)
        for tensor, of_tensor in zip(tensors, moduli, strict=True)
    ]
    partial = fl.StructType([member, fl.StructType(carried)])
    return Aggregation(
        zero=_intrinsic(MODULAR_ZERO, [modulus], partial),
        accumulate=_intrinsic(ADD_MODULAR, [partial, member], partial),
        merge=_intrinsic(MERGE_MODULAR, [partial, partial], partial),
        report=_intrinsic(MODULAR_SUM, partial, member),
    )


def _tensors(type_spec: fl.Type) -> list[fl.TensorType]:
    match type_spec:
        case fl.TensorType():
            return [type_spec]
        case fl.StructType():
            return [t for _, element in type_spec.items() for t in _tensors(element)]
        case _:
            raise errors.CompileError(
                "Expected tensors for federated_secure_modular_sum, found a value of"
                f" type `{type_spec}`."
            )


SECURE_SUM_CHECKS: Mapping[str, flf.IntrinsicDef] = {
    flf.FEDERATED_SECURE_SUM.uri: CHECK_MAXIMUM,
    flf.FEDERATED_SECURE_SUM_BITWIDTH.uri: CHECK_BITWIDTH,
}
"""Secure sums are simulated in the clear: what each client's value must pass before a
federated_sum of it, together with the bound that the intrinsic takes."""


def check_of(uri: str, member: fl.Type, bound: fl.Type) -> flf.Intrinsic:
    """Return the check of a secure sum: <member, bound> -> member."""
    return _intrinsic(SECURE_SUM_CHECKS[uri], [member, bound], member)


SIMULATED = frozenset(
    {
        *SECURE_SUM_CHECKS,
        FEDERATED_SECURE_MODULAR_SUM.uri,
        flf.FEDERATED_SECURE_SELECT.uri,
    }
)
"""What is to hide values from the server, and is computed in the clear here."""


def zeros_of(type_spec: fl.Type) -> flf.Intrinsic:
    """Return the function that makes what generic_zero stands for."""
    return _intrinsic(ZEROS, None, type_spec)


def is_aggregation(block: flf.ComputationBuildingBlock) -> bool:
    """Return whether a block is an intrinsic from values of clients to the server.

    The type decides, so this is true also of aggregations that ray_fed does not know.
    """
    match block:
        case flf.Intrinsic(
            type_signature=fl.FunctionType(parameter=fl.Type() as parameter) as function
        ):
            return flf.type_contains(
                parameter, type_checks.is_at_clients
            ) and not flf.type_contains(function.result, type_checks.is_at_clients)
        case _:
            return False

"""Derived aggregations as the arguments of `federated_aggregate`.

The executor that interprets an intrinsic and the compiler that splits a computation
take zero, accumulate, merge and report from here, so both give the same bits.
Arithmetic that has no intrinsic in federated_language is defined here as an intrinsic
of ray_fed, which the leaf executor runs.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import cast

import federated_language as fl
import numpy as np

import ray_fed.errors as errors
from ray_fed.language import trees, type_checks

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
"""Returns the first argument. No element may exceed the bound of its tensor."""
CHECK_BITWIDTH = _define("CHECK_BITWIDTH", fl.FunctionType([_T, _U], _T))
"""Returns the first argument. Elements must fit the number of bits of their tensor."""
AVERAGE = _define("AVERAGE", fl.FunctionType(_U, _T))
"""Divides the sum by the weight or the number of clients. No clients is an error."""
MODULAR_ZERO = _define("MODULAR_ZERO", fl.FunctionType([_T], _U))
"""Checks <modulus> and returns <zeros, moduli>."""
ADD_MODULAR = _define("ADD_MODULAR", fl.FunctionType([_U, _T], _U))
"""Adds a value to <sum, moduli>, modulo the moduli."""
MERGE_MODULAR = _define("MERGE_MODULAR", fl.FunctionType([_U, _U], _U))
"""Adds two <sum, moduli> with equal moduli, modulo the moduli."""
MODULAR_SUM = _define("MODULAR_SUM", fl.FunctionType(_U, _T))
"""Returns the sum of <sum, moduli>."""

GENERIC_ZERO_URI = "generic_zero"
"""URI of the intrinsic that is a value of zeros, not a function."""

FEDERATED_SECURE_MODULAR_SUM = flf.IntrinsicDef(
    "FEDERATED_SECURE_MODULAR_SUM",
    "federated_secure_modular_sum",
    fl.FunctionType(
        [fl.FederatedType(_T, fl.CLIENTS), _U], fl.FederatedType(_T, fl.SERVER)
    ),
    aggregation_kind=flf.AggregationKind.SECURE,
)
"""An intrinsic of TensorFlow Federated's computations that federated_language lacks."""


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """The arguments of `federated_aggregate` after the value, as intrinsics.

    T is the type of a client's value, and U is the type of a partial.

    Attributes:
        zero: -> U, or <bound> -> U for a modular sum.
        accumulate: <U, T> -> U.
        merge: <U, U> -> U.
        report: U -> the declared result, or None if that is the partial itself.
        check: <T, bound> -> T, which each client's value goes through before it is
            accumulated, or None.
    """

    zero: flf.Intrinsic
    accumulate: flf.Intrinsic
    merge: flf.Intrinsic
    report: flf.Intrinsic | None = None
    check: flf.Intrinsic | None = None


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


_sum = _monoid(ZEROS, flf.GENERIC_PLUS)


def _checked_sum(check: flf.IntrinsicDef) -> Callable[[fl.Type, fl.Type], Aggregation]:
    def derive(member: fl.Type, bound: fl.Type) -> Aggregation:
        checked = _intrinsic(check, [member, bound], member)
        return dataclasses.replace(_sum(member), check=checked)

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


def _modular_sum(member: fl.Type, modulus: fl.Type) -> Aggregation:
    """Return the aggregation of a modular sum.

    Its partials contain the moduli.

    There is one modulus for all tensors, or one for each. Raises CompileError for
    another number, or for a tensor that is not of integers.
    """
    tensors = cast("list[fl.TensorType]", trees.leaf_types(member))
    moduli = cast("list[fl.TensorType]", trees.leaf_types(modulus))
    for leaf in [*tensors, *moduli]:
        if not np.issubdtype(getattr(leaf, "dtype", object), np.integer):
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
                "Expected a scalar modulus, or one with the shape of its tensor, for"
                f" federated_secure_modular_sum, found `{of_tensor}` for `{tensor}`."
            )
    # Partials contain the moduli, because a merge takes nothing but two partials.
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


DERIVED_AGGREGATIONS: Mapping[str, Callable[..., Aggregation]] = {
    flf.FEDERATED_SUM.uri: _sum,
    flf.FEDERATED_MIN.uri: _monoid(LARGEST, MINIMUM),
    flf.FEDERATED_MAX.uri: _monoid(LOWEST, MAXIMUM),
    flf.FEDERATED_MEAN.uri: _mean,
    flf.FEDERATED_WEIGHTED_MEAN.uri: _weighted_mean,
    flf.FEDERATED_SECURE_SUM.uri: _checked_sum(CHECK_MAXIMUM),
    flf.FEDERATED_SECURE_SUM_BITWIDTH.uri: _checked_sum(CHECK_BITWIDTH),
    FEDERATED_SECURE_MODULAR_SUM.uri: _modular_sum,
}
"""Functions of the member type of a value, by URI of the aggregation. The member type
of a weighted mean is <value, weight>. The functions of `BOUNDED` also take the type of
the bound. Secure sums are simulated in the clear."""

BOUNDED = frozenset(
    {
        flf.FEDERATED_SECURE_SUM.uri,
        flf.FEDERATED_SECURE_SUM_BITWIDTH.uri,
        FEDERATED_SECURE_MODULAR_SUM.uri,
    }
)
"""URIs of aggregations whose argument is <value, bound>."""

SIMULATED = BOUNDED | {flf.FEDERATED_SECURE_SELECT.uri}
"""URIs of intrinsics that hide values from the server, which run in the clear here."""


def zeros_of(type_spec: fl.Type) -> flf.Intrinsic:
    """Return the function that computes the value of a generic_zero."""
    return _intrinsic(ZEROS, None, type_spec)


def is_aggregation(block: flf.ComputationBuildingBlock) -> bool:
    """Return whether a block is an intrinsic from values at clients to the server.

    The type decides, so it is also true for aggregations that ray_fed does not know.
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

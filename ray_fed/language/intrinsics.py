"""Defines aggregations such as `federated_mean` by a general `federated_aggregate`.

A `federated_aggregate` has four functions: zero, accumulate, merge and report. An
executor that interprets a computation and the compiler that splits it both take these
functions from here, so both compute the same bits.

The functions are intrinsics: operators that an executor knows by a URI. If
federated_language has no intrinsic for some arithmetic, this module defines one. The
executor that runs TensorFlow carries it out (`ray_fed.tensorflow.operators`).
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
"""Function from <<sum, count>, value> to <sum + value, count + 1>."""
ADD_WEIGHTED = _define("ADD_WEIGHTED", fl.FunctionType([_U, _T], _U))
"""Function from <<sum, total, count>, <value, weight>> to
<sum + value * weight, total + weight, count + 1>."""
CHECK_MAXIMUM = _define("CHECK_MAXIMUM", fl.FunctionType([_T, _U], _T))
"""Function from <value, bounds> to value. Raises if an element exceeds its bound."""
CHECK_BITWIDTH = _define("CHECK_BITWIDTH", fl.FunctionType([_T, _U], _T))
"""Function from <value, numbers of bits> to value. Raises if an element is negative, or
needs more bits than its tensor may have."""
AVERAGE = _define("AVERAGE", fl.FunctionType(_U, _T))
"""Function from <sum, total, count> to sum / total, or <sum, count> to sum / count.
Raises if the count of clients is 0."""
MODULAR_ZERO = _define("MODULAR_ZERO", fl.FunctionType([_T], _U))
"""Function from <modulus> to <zeros, moduli>. Raises if a modulus is not positive."""
ADD_MODULAR = _define("ADD_MODULAR", fl.FunctionType([_U, _T], _U))
"""Function from <<sum, moduli>, value> to <(sum + value) % moduli, moduli>."""
MERGE_MODULAR = _define("MERGE_MODULAR", fl.FunctionType([_U, _U], _U))
"""Function from two <sum, moduli> with equal moduli to the <sum, moduli> of both."""
MODULAR_SUM = _define("MODULAR_SUM", fl.FunctionType(_U, _T))
"""Function from <sum, moduli> to sum."""

GENERIC_ZERO_URI = "generic_zero"
"""URI of federated_language's intrinsic that is a value of zeros, not a function."""

FEDERATED_SECURE_MODULAR_SUM = flf.IntrinsicDef(
    "FEDERATED_SECURE_MODULAR_SUM",
    "federated_secure_modular_sum",
    fl.FunctionType(
        [fl.FederatedType(_T, fl.CLIENTS), _U], fl.FederatedType(_T, fl.SERVER)
    ),
    aggregation_kind=flf.AggregationKind.SECURE,
)
"""A sum of integers modulo a bound, which computations of TensorFlow Federated contain.
federated_language does not define it."""


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """The functions of a `federated_aggregate`, as intrinsics.

    T is the type of a client's value. U is the type of a partial, which is the
    accumulated result of some clients.

    Attributes:
        zero: Function -> U. For a modular sum, it is a function <modulus> -> U.
        accumulate: Function <U, T> -> U that adds one client's value.
        merge: Function <U, U> -> U that combines two partials.
        report: Function from U to the aggregation's result, or None if the merged
            partial is the result.
        check: Function <T, bound> -> T that runs on each client's value before
            `accumulate`, or None. It raises an error if the value exceeds the bound.
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
"""For each aggregation, by URI, a function that returns its `Aggregation`. The argument
is the type of one client's value, which is <value, weight> for a weighted mean. For the
aggregations of `BOUNDED`, the type of the bound is a second argument."""

BOUNDED = frozenset(
    {
        flf.FEDERATED_SECURE_SUM.uri,
        flf.FEDERATED_SECURE_SUM_BITWIDTH.uri,
        FEDERATED_SECURE_MODULAR_SUM.uri,
    }
)
"""URIs of the aggregations whose argument is <value, bound>. They are secure sums."""

SIMULATED = BOUNDED | {flf.FEDERATED_SECURE_SELECT.uri}
"""URIs of the intrinsics that hide clients' values from the server by encryption in a
real deployment. ray_fed computes them in the clear."""


def zeros_of(type_spec: fl.Type) -> flf.Intrinsic:
    """Return a function without parameters that returns zeros of a type."""
    return _intrinsic(ZEROS, None, type_spec)


def is_aggregation(block: flf.ComputationBuildingBlock) -> bool:
    """Return whether a block is an intrinsic that combines clients' values.

    The type decides: the parameter has a part placed at clients and the result has
    none. So this is also true for aggregations that ray_fed does not know.
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

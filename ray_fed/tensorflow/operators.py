"""Carries out the intrinsics of `ray_fed.language.intrinsics` with TensorFlow."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import federated_language as fl
import numpy as np
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.language import intrinsics
from ray_fed.tensorflow.tensors import specs
from ray_fed.values.tensor_structures import flatten_type

Tensors = list[Any]
"""The tensors of a structure, in the order of its type."""


def _elementwise(operator: Callable[[Any, Any], Any]) -> Callable[..., Tensors]:
    def run(parts: list[Tensors], _: fl.FunctionType) -> Tensors:
        left, right = parts
        return [operator(x, y) for x, y in zip(left, right, strict=True)]

    return run


def _divide(parts: list[Tensors], type_spec: fl.FunctionType) -> Tensors:
    return [
        tf.cast(tf.divide(x, y), specs.to_tf_dtype(result))
        for x, y, result in zip(*parts, flatten_type(type_spec.result), strict=True)
    ]


def _add_value(parts: list[Tensors], _: fl.FunctionType) -> Tensors:
    (*sums, count), added = parts
    return [*(tf.add(x, y) for x, y in zip(sums, added, strict=True)), count + 1]


def _add_weighted(parts: list[Tensors], _: fl.FunctionType) -> Tensors:
    (*sums, total, count), (*added, weight) = parts
    weighed = [
        tf.add(x, tf.multiply(y, tf.cast(weight, y.dtype)))
        for x, y in zip(sums, added, strict=True)
    ]
    return [*weighed, tf.add(total, weight), count + 1]


def _average(parts: list[Tensors], type_spec: fl.FunctionType) -> Tensors:
    if int(count_of(parts)) == 0:
        raise errors.CardinalityError(
            "Expected at least one client for federated_mean, found none: sample a"
            " larger cohort, or sum and divide yourself."
        )
    return divide_sums(parts, type_spec)


def count_of(parts: list[Tensors]) -> Any:
    """Return the number of clients in the partial of a mean, i32[]."""
    return parts[-1][-1]


def divide_sums(parts: list[Tensors], type_spec: fl.FunctionType) -> Tensors:
    """Return the means of a partial: sum / weight, or sum / count. 0 / 0 is NaN."""
    tensors = [tensor for part in parts for tensor in part]
    sums = tensors[: len(flatten_type(type_spec.result))]
    weight = tensors[len(sums)]  # the count itself if there are no weights
    return [tf.divide(x, tf.cast(weight, x.dtype)) for x in sums]


def _checked(
    largest: Callable[[Any], Any], lowest: int | None, name: str
) -> Callable[..., Tensors]:
    def run(parts: list[Tensors], _: fl.FunctionType) -> Tensors:
        tensors, bounds = parts
        for tensor, bound in zip(tensors, bounds, strict=True):
            low, high = int(tf.reduce_min(tensor)), int(tf.reduce_max(tensor))
            limit = largest(int(bound))
            if high > limit or (lowest is not None and low < lowest):
                raise ValueError(
                    f"Expected values of at most {limit} for {name}, found values from"
                    f" {low} to {high}."
                )
        return tensors

    return run


def _modular_zero(parts: list[Tensors], type_spec: fl.FunctionType) -> Tensors:
    member, carried = cast("fl.StructType", type_spec.result)
    (modulus,) = parts
    types = flatten_type(carried)
    moduli = modulus * len(types) if len(modulus) == 1 else modulus
    checked = [_to_modulus(m, t) for m, t in zip(moduli, types, strict=True)]
    return [*(_fill(tensor, lambda _: 0) for tensor in flatten_type(member)), *checked]


def _to_modulus(modulus: Any, type_spec: fl.TensorType) -> Any:
    value, largest = modulus.numpy(), np.iinfo(type_spec.dtype).max
    if value.size and not (value.min() > 0 and value.max() <= largest):
        raise errors.ComputationError(
            f"Expected a modulus from 1 to {largest} for federated_secure_modular_sum"
            f" of `{type_spec.dtype}` values, found {value}."
        )
    return tf.cast(modulus, specs.to_tf_dtype(type_spec))


def _add_modular(parts: list[Tensors], _: fl.FunctionType) -> Tensors:
    (*partial,), added = parts
    sums, moduli = partial[: len(partial) // 2], partial[len(partial) // 2 :]
    pairs = zip(sums, added[: len(sums)], moduli, strict=True)
    return [*(_add_modulo(x, y, modulus) for x, y, modulus in pairs), *moduli]


def _add_modulo(x: Any, y: Any, modulus: Any) -> Any:
    # This is (x + y) % modulus for x in 0 to modulus - 1, without overflow in x + y.
    y = tf.math.floormod(y, modulus)
    room = modulus - y
    return tf.where(x >= room, x - room, x + y)


def _modular_sum(parts: list[Tensors], _: fl.FunctionType) -> Tensors:
    return parts[0]


def _filled(
    choose: Callable[[np.dtype[Any]], Any],
) -> Callable[..., Tensors]:
    def run(_: list[Tensors], type_spec: fl.FunctionType) -> Tensors:
        return [_fill(tensor, choose) for tensor in flatten_type(type_spec.result)]

    return run


def _fill(type_spec: fl.TensorType, choose: Callable[[np.dtype[Any]], Any]) -> Any:
    shape = type_spec.shape
    if shape is None or None in shape:
        raise errors.ValueMismatchError(
            f"Expected an aggregated tensor of a fixed shape, found `{type_spec}`: use"
            " federated_aggregate with a zero of your own."
        )
    dtype = specs.to_tf_dtype(type_spec)
    return tf.fill(shape, tf.constant(choose(np.dtype(type_spec.dtype)), dtype))


def _largest(dtype: np.dtype[Any]) -> Any:
    return np.inf if tf.as_dtype(dtype).is_floating else np.iinfo(dtype).max


def _lowest(dtype: np.dtype[Any]) -> Any:
    return -np.inf if tf.as_dtype(dtype).is_floating else np.iinfo(dtype).min


OPERATORS: Mapping[str, Callable[[list[Tensors], fl.FunctionType], Tensors]] = {
    fl.framework.GENERIC_PLUS.uri: _elementwise(tf.add),
    fl.framework.GENERIC_MULTIPLY.uri: _elementwise(tf.multiply),
    fl.framework.GENERIC_DIVIDE.uri: _divide,
    intrinsics.MINIMUM.uri: _elementwise(tf.minimum),
    intrinsics.MAXIMUM.uri: _elementwise(tf.maximum),
    intrinsics.ADD_VALUE.uri: _add_value,
    intrinsics.ADD_WEIGHTED.uri: _add_weighted,
    intrinsics.CHECK_MAXIMUM.uri: _checked(
        lambda bound: bound, None, "federated_secure_sum"
    ),
    intrinsics.CHECK_BITWIDTH.uri: _checked(
        lambda bound: 2**bound - 1, 0, "federated_secure_sum_bitwidth"
    ),
    intrinsics.AVERAGE.uri: _average,
    intrinsics.MODULAR_ZERO.uri: _modular_zero,
    intrinsics.ADD_MODULAR.uri: _add_modular,
    intrinsics.MERGE_MODULAR.uri: _add_modular,
    intrinsics.MODULAR_SUM.uri: _modular_sum,
    intrinsics.ZEROS.uri: _filled(lambda _: 0),
    intrinsics.LARGEST.uri: _filled(_largest),
    intrinsics.LOWEST.uri: _filled(_lowest),
}
"""The function of each intrinsic, by URI. It takes the tensors of each element of the
argument, and the intrinsic's type. It returns the tensors of the result."""

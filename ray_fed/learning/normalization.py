"""Mean and variance of clients' inputs, for `keras.layers.Normalization`.

Source:
    Tony F. Chan, Gene H. Golub, Randall J. LeVeque: Algorithms for Computing the Sample
    Variance: Analysis and Recommendations. The American Statistician 37(3), 1983,
    https://doi.org/10.1080/00031305.1983.10483115, Section 2 (two parts are merged).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import federated_language as fl
import numpy as np
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf


class _Moments(NamedTuple):
    """The moments of some values of an input, all f64.

    `mean` has the shape of an input's last dimension. `squares` has the sums of (value
    - mean)^2, in the same shape.
    """

    count: Any
    mean: Any
    squares: Any


@tracebacks.shorten
def build_normalization(data_type: Any) -> fl.framework.Computation:
    """Build a computation of the arguments that `keras.layers.Normalization` takes.

        moments = build_normalization(data.type_signature)(data)
        layer = keras.layers.Normalization(**moments)

    The moments equal the mean and variance that `layer.adapt` computes from all inputs
    of all clients. There is one mean and one variance for each component of the last
    dimension. If inputs are single numbers, there is one mean and one variance for all
    of them (`axis=None`). A client sends exact counts, means and sums of squares in
    float64, so this is not private.

    Args:
        data_type: Type of one client's data, a sequence of `<x=..., ...>` or of inputs,
            such as `ClientData.type_signature`. The type of all clients' data, such as
            `Model.data_type`, is also accepted.

    Returns:
        The computation from clients' data to `<mean=f64[...], variance=f64[...]>` at
        the server. If inputs have names, there is one result for each name. Without
        rows, the variance is NaN.

    Raises:
        ValueMismatchError: Clients do not have a sequence of numeric inputs.
    """
    sequence = _read_type(data_type)
    means = _build_means(_select_type(sequence.element))
    zeros = tuple(
        _Moments(np.float64(0), mean, mean) for mean in tf.nest.flatten(means)
    )

    @rtf.computation(sequence)
    def measure(dataset: Any) -> Any:
        def add(total: Any, element: Any) -> Any:
            inputs = tf.nest.flatten(_select(element))
            found = map(_measure, inputs, (zero.mean.shape for zero in zeros))
            return tuple(map(_merge, total, found))

        return dataset.reduce(zeros, add)

    moments = measure.type_signature.result

    @rtf.computation
    def start() -> Any:
        return tuple(_Moments(*map(tf.constant, zero)) for zero in zeros)

    @rtf.computation(moments, moments)
    def merge(total: Any, part: Any) -> Any:
        return tuple(map(_merge, total, part))

    @rtf.computation(moments)
    def finish(total: Any) -> Any:
        found = [{"mean": m.mean, "variance": m.squares / m.count} for m in total]
        return tf.nest.pack_sequence_as(means, found)

    @fl.federated_computation(fl.FederatedType(sequence, fl.CLIENTS))
    def normalize(clients: Any) -> Any:
        measured = fl.federated_map(measure, clients)
        return fl.federated_aggregate(measured, start(), merge, merge, finish)

    return cast("fl.framework.Computation", normalize)


def _measure(values: Any, shape: tuple[int, ...]) -> _Moments:
    values = tf.reshape(tf.cast(values, tf.float64), [-1, *shape])
    count = tf.cast(tf.shape(values)[0], tf.float64)
    mean = tf.math.divide_no_nan(tf.reduce_sum(values, 0), count)
    return _Moments(count, mean, tf.reduce_sum(tf.square(values - mean), 0))


def _merge(total: _Moments, part: _Moments) -> _Moments:
    """Return the moments of two parts together (Equations 2.1 of the source)."""
    count = total.count + part.count
    share, step = tf.math.divide_no_nan(part.count, count), part.mean - total.mean
    squares = total.squares + part.squares + tf.square(step) * total.count * share
    return _Moments(count, total.mean + step * share, squares)


def _read_type(given: Any) -> fl.SequenceType:
    found = given.member if isinstance(given, fl.FederatedType) else given
    if not isinstance(found, fl.SequenceType):
        raise errors.ValueMismatchError(
            "Expected the type of a sequence that each client has, found"
            f" {errors.describe(given)}: pass `data.type_signature`."
        )
    return found


def _select_type(element: fl.Type) -> fl.Type:
    if isinstance(element, fl.StructType):
        named: dict[Any, fl.Type] = dict(element.items())
        if "x" not in named:
            raise errors.ValueMismatchError(
                f"Expected elements with inputs named `x`, found `{element}`: name"
                " them, such as by `data.map`."
            )
        return named["x"]
    return element


def _select(element: Any) -> Any:
    if isinstance(element, Mapping):
        return element["x"]
    return getattr(element, "x", element)


def _build_means(inputs: fl.Type) -> Any:
    match inputs:
        case fl.StructType():
            return {name: _build_means(member) for name, member in inputs.items()}
        case fl.TensorType() if np.dtype(inputs.dtype).kind in "biuf":
            last = (inputs.shape or ())[-1:]
            return np.zeros([size for size in last if size is not None])
        case _:
            raise errors.ValueMismatchError(
                f"Expected inputs that are numbers, found `{inputs}`: leave others"
                " out, such as by `data.map`."
            )

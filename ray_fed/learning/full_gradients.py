"""The gradient of a client's mean loss over all of its examples, at fixed weights."""

from typing import Any

import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.learning.models import Model, ModelWeights
from ray_fed.learning.totals import Totals


def full_gradient(
    model: Model, weights: ModelWeights, dataset: Any
) -> tuple[tuple[Any, ...], Totals]:
    """Return the gradient of the mean loss, zeros over no example, and the totals.

    It is traced into the current graph. The layers behave as in training, and what they
    do to weights that are not trained is dropped.

    Args:
        model: to differentiate.
        weights: where; tensors.
        dataset: of a client.
    """
    zeros = tuple(tf.zeros_like(weight) for weight in weights.trainable)

    def add(carried: Any, batch: Any) -> Any:
        sums, totals = carried
        gradients, passed = model.differentiate(weights, batch, totals)
        if passed.writes:
            raise errors.ValueMismatchError(
                "Expected layers that leave trained weights as they are, found one"
                " that writes to them in `call`, as SpectralNormalization does, which a"
                " gradient at fixed weights loses: use an algorithm such as fed_avg."
            )
        size = passed.totals.num_examples - totals.num_examples
        added = tuple(
            s if g is None else s + g * tf.cast(size, g.dtype)
            for s, g in zip(sums, gradients, strict=True)
        )
        return added, passed.totals

    sums, totals = dataset.reduce((zeros, model.totals.zero()), add)
    count = totals.num_examples
    means = tuple(tf.math.divide_no_nan(s, tf.cast(count, s.dtype)) for s in sums)
    return means, totals

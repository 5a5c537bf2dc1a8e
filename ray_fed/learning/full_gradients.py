"""The gradient of a client's mean loss over all of its examples, at fixed weights."""

from typing import Any, NamedTuple

import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.learning.layer_seeds import reseed
from ray_fed.learning.models import Model, ModelWeights
from ray_fed.learning.precision import widened
from ray_fed.learning.totals import Totals


class FullGradient(NamedTuple):
    """What a pass over a client's data comes to.

    Attributes:
        trainable: the gradient of the mean loss, of the weights' types; zeros over no
            example.
        non_trainable: weights after the pass, as layers leave them in training.
        totals: of all examples.
    """

    trainable: tuple[Any, ...]
    non_trainable: tuple[Any, ...]
    totals: Totals


def full_gradient(model: Model, weights: ModelWeights, dataset: Any) -> FullGradient:
    """Return the gradient at some weights, traced into the current graph.

    Args:
        model: to differentiate, as in training.
        weights: where; tensors.
        dataset: of a client.
    """
    zeros = tuple(widened(tf.zeros_like(weight)) for weight in weights.trainable)

    def add(carried: Any, batch: Any) -> Any:
        sums, non_trainable, totals = carried
        at = ModelWeights(weights.trainable, non_trainable)
        gradients, passed = model.differentiate(at, batch, totals)
        if passed.writes:
            raise errors.ValueMismatchError(
                "Expected layers that leave trained weights as they are, found one"
                " that writes to them in `call`, as SpectralNormalization does, which a"
                " gradient at fixed weights loses: use an algorithm such as fed_avg."
            )
        size = passed.totals.num_examples - totals.num_examples
        added = tuple(
            s if g is None else s + widened(g) * tf.cast(size, s.dtype)
            for s, g in zip(sums, gradients, strict=True)
        )
        return added, passed.weights.non_trainable, passed.totals

    start = (
        zeros,
        reseed(model.seed_indices, weights.non_trainable),
        model.totals.zero(),
    )
    sums, non_trainable, totals = dataset.reduce(start, add)
    means = tuple(
        tf.cast(
            tf.math.divide_no_nan(s, tf.cast(totals.num_examples, s.dtype)), w.dtype
        )
        for s, w in zip(sums, weights.trainable, strict=True)
    )
    return FullGradient(means, non_trainable, totals)

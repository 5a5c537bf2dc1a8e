"""Loss and metrics as sums over examples, which add up over batches and clients.

Each client counts on its own, the counts are summed at the server, and Keras' metrics
make results of the sums: so accuracy over all clients is that over all examples.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import federated_language as fl
import keras
import numpy as np
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.learning.checks import expect_object

_LOSS, _NUM_EXAMPLES = "loss", "num_examples"


class Totals(NamedTuple):
    """Sums over the examples seen.

    Attributes:
        loss: f32[], sum of each batch's mean loss times its size.
        num_examples: i64[].
        metrics: the variables of each metric.
    """

    loss: Any
    num_examples: Any
    metrics: tuple[tuple[Any, ...], ...]


class TotalsKeeper:
    """Adds batches to totals and makes metrics of them, inside of traced graphs.

    Args:
        metrics: Keras metrics, owned; their variables are sums.
    """

    def __init__(self, metrics: Sequence[keras.metrics.Metric]) -> None:
        self._metrics = tuple(metrics)

    @classmethod
    def of(
        cls,
        metrics: Sequence[keras.metrics.Metric],
        label_type: fl.TensorType,
        predictions: Any,
    ) -> "TotalsKeeper":
        """Return a keeper of copies of a user's metrics.

        Args:
            metrics: of the user, left as they are.
            label_type: of a batch of labels.
            predictions: the symbolic output of the model, for metrics that make
                their variables when they first see one.

        Raises:
            ValueMismatchError: a metric is no Keras metric, is not a sum, or has the
                name of another.
        """
        names = [_LOSS, _NUM_EXAMPLES]
        copies: list[keras.metrics.Metric] = []
        for metric in metrics:
            expect_object(
                metric,
                keras.metrics.Metric,
                "keras.metrics.SparseCategoricalAccuracy()",
            )
            if metric.name in names:
                raise errors.ValueMismatchError(
                    f"Expected metrics of other names than {names}, found"
                    f" `{metric.name}`: give it a `name`."
                )
            names.append(metric.name)
            copies.append(_copy_of(metric, label_type, predictions))
        return cls(copies)

    def zero(self) -> Totals:
        """Return the totals of no example, as tensors."""
        return Totals(
            tf.constant(0.0),
            tf.constant(0, tf.int64),
            tuple(
                tuple(tf.zeros(v.shape, v.dtype) for v in metric.variables)
                for metric in self._metrics
            ),
        )

    def add(self, totals: Totals, labels: Any, predictions: Any, loss: Any) -> Totals:
        """Return the totals with one more batch.

        Args:
            totals: so far.
            labels: of the batch.
            predictions: of the model for the batch.
            loss: f32[], mean over the batch.
        """
        size = tf.shape(predictions, tf.int64)[0]
        return Totals(
            totals.loss + tf.cast(loss, tf.float32) * tf.cast(size, tf.float32),
            totals.num_examples + size,
            tuple(
                tuple(metric.stateless_update_state(list(sums), labels, predictions))
                for metric, sums in zip(self._metrics, totals.metrics, strict=True)
            ),
        )

    def finish(self, totals: Totals) -> "OrderedDict[str, Any]":
        """Return loss (NaN over no examples), number of examples, and each metric."""
        results: OrderedDict[str, Any] = OrderedDict()
        results[_LOSS] = totals.loss / tf.cast(totals.num_examples, tf.float32)
        results[_NUM_EXAMPLES] = totals.num_examples
        for metric, sums in zip(self._metrics, totals.metrics, strict=True):
            results[metric.name] = metric.stateless_result(list(sums))
        return results


def _copy_of(
    metric: keras.metrics.Metric, label_type: fl.TensorType, predictions: Any
) -> keras.metrics.Metric:
    copy = type(metric).from_config(metric.get_config())
    if not copy.variables:
        labels = np.zeros([size or 1 for size in label_type.shape or ()], np.int32)
        example = np.zeros([size or 1 for size in predictions.shape], np.float32)
        copy.update_state(labels.astype(label_type.dtype), example)
    copy.reset_state()
    if any(np.any(variable.numpy()) for variable in copy.variables):
        raise errors.ValueMismatchError(
            "Expected metrics whose variables are sums that start at zero, found"
            f" `{metric.name}`: sums alone add up over clients."
        )
    return copy

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
from ray_fed.learning.objectives import Output

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
        metrics: Keras metrics, owned, each with its output; their variables are sums.
    """

    def __init__(self, metrics: Sequence[tuple[Output, keras.metrics.Metric]]) -> None:
        self._outputs = tuple(output for output, _ in metrics)
        self._metrics = tuple(metric for _, metric in metrics)

    @classmethod
    def of(cls, outputs: Sequence[Output]) -> "TotalsKeeper":
        """Return a keeper of copies of a user's metrics.

        Args:
            outputs: of the model, with their metrics, which are left as they are.

        Raises:
            ValueMismatchError: a metric is not a sum, or has the name of another.
        """
        names = [_LOSS, _NUM_EXAMPLES]
        copies: list[tuple[Output, keras.metrics.Metric]] = []
        measured = [(output, metric) for output in outputs for metric in output.metrics]
        for output, metric in measured:
            if metric.name in names:
                raise errors.ValueMismatchError(
                    f"Expected metrics of other names than {names}, found"
                    f" `{metric.name}`: give it a `name`."
                )
            names.append(metric.name)
            copy = _copy_of(metric, output.label_type, output.symbolic)
            copies.append((output, copy))
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
            labels: of the batch; by name where there are several outputs.
            predictions: of the model for the batch, likewise.
            loss: f32[], mean over the batch.
        """
        size = tf.shape(tf.nest.flatten(predictions)[0], tf.int64)[0]
        return Totals(
            totals.loss + tf.cast(loss, tf.float32) * tf.cast(size, tf.float32),
            totals.num_examples + size,
            tuple(
                tuple(
                    metric.stateless_update_state(
                        list(sums), output.of(labels), output.of(predictions)
                    )
                )
                for output, metric, sums in zip(
                    self._outputs, self._metrics, totals.metrics, strict=True
                )
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

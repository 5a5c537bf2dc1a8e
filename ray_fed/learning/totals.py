"""Loss and metrics as sums over examples, which add up over batches and clients.

Each client counts on its own, the counts are summed at the server, and Keras' metrics
make results of the sums: so accuracy over all clients is that over all examples.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.learning.objectives import Output

_LOSS, _NUM_EXAMPLES = "loss", "num_examples"


class Totals(NamedTuple):
    """Sums over the examples seen.

    Attributes:
        loss: f32[], sum of each batch's mean loss times its size.
        num_examples: i64[].
        output_losses: of each output likewise, without penalties of layers; none where
            there is one output.
        metrics: the variables of each metric.
    """

    loss: Any
    num_examples: Any
    output_losses: tuple[Any, ...]
    metrics: tuple[tuple[Any, ...], ...]


class TotalsKeeper:
    """Adds batches to totals and makes metrics of them, inside of traced graphs.

    Args:
        outputs: of the model, with their metrics, which are left as they are.

    Raises:
        ValueMismatchError: a metric has the name of another, or of a loss.
    """

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._losses = tuple(
            f"{output.name}_{_LOSS}" for output in outputs if output.name is not None
        )
        self._measured = tuple(
            (output, measure) for output in outputs for measure in output.measures
        )
        names = [_LOSS, _NUM_EXAMPLES, *self._losses]
        for _, measure in self._measured:
            if measure.name in names:
                raise errors.ValueMismatchError(
                    f"Expected metrics of other names than {names}, found"
                    f" `{measure.name}`: give it a `name`, a function as"
                    " `keras.metrics.MeanMetricWrapper(function, name=...)`."
                )
            names.append(measure.name)

    def zero(self) -> Totals:
        """Return the totals of no example, as tensors."""
        return Totals(
            tf.constant(0.0),
            tf.constant(0, tf.int64),
            tuple(tf.constant(0.0) for _ in self._losses),
            tuple(
                tuple(tf.zeros(v.shape, v.dtype) for v in measure.metric.variables)
                for _, measure in self._measured
            ),
        )

    def add(
        self,
        totals: Totals,
        labels: Any,
        predictions: Any,
        loss: Any,
        output_losses: Sequence[Any],
    ) -> Totals:
        """Return the totals with one more batch.

        Args:
            totals: so far.
            labels: of the batch; by name where there are several outputs.
            predictions: of the model for the batch, likewise.
            loss: f32[], mean over the batch.
            output_losses: of each output, likewise.
        """
        size = tf.shape(tf.nest.flatten(predictions)[0], tf.int64)[0]

        def add_loss(sum_so_far: Any, value: Any) -> Any:
            return sum_so_far + tf.cast(value, tf.float32) * tf.cast(size, tf.float32)

        return Totals(
            add_loss(totals.loss, loss),
            totals.num_examples + size,
            # Of the only output there is no sum of its own.
            tuple(map(add_loss, totals.output_losses, output_losses)),
            tuple(
                measure.add(sums, output.of(labels), output.of(predictions))
                for (output, measure), sums in zip(
                    self._measured, totals.metrics, strict=True
                )
            ),
        )

    def finish(self, totals: Totals) -> "OrderedDict[str, Any]":
        """Return loss (NaN over no examples), number of examples, and each metric."""
        results: OrderedDict[str, Any] = OrderedDict()
        count = tf.cast(totals.num_examples, tf.float32)
        results[_LOSS] = totals.loss / count
        results[_NUM_EXAMPLES] = totals.num_examples
        for name, loss in zip(self._losses, totals.output_losses, strict=True):
            results[name] = loss / count
        for (_, measure), sums in zip(self._measured, totals.metrics, strict=True):
            results[measure.name] = measure.finish(sums)
        return results

"""Loss and metrics as sums over examples, which add up over batches and clients.

Each client counts on its own, the counts are summed at the server, and Keras' metrics
make results of the sums: so accuracy over all clients is that over all examples.

Types to add up in: a sum in float16 ends at 65,504, one in bfloat16 has 8 bits.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import federated_language as fl
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.learning.objectives import Output

_SHORT = (tf.float16, tf.bfloat16)


def widened(tensor: Any) -> tf.Tensor:
    """Return floats of 16 bits as float32, and others as they are."""
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype in _SHORT else tensor


def narrowed(values: Any, like: Any) -> Any:
    """Return a structure in the types of another one, of tensors or of `specs_of`."""
    return _cast(values, like, lambda _: True)


def averaged(means: Any, like: Any) -> Any:
    """Return what `narrowed` does of floats; means of integers stay as they are."""
    return _cast(means, like, lambda dtype: dtype.is_floating)


def _cast(values: Any, like: Any, is_cast: Callable[[tf.DType], bool]) -> Any:
    def cast(value: Any, each: Any) -> Any:
        return tf.cast(value, each.dtype) if is_cast(each.dtype) else value

    return tf.nest.map_structure(cast, values, like, check_types=False)


def specs_of(struct_type: Any) -> Any:
    """Return the specs of tensors of a type, in its containers."""
    if isinstance(struct_type, fl.TensorType):
        return tf.TensorSpec(list(struct_type.shape or ()), struct_type.dtype)
    elements = [(name, specs_of(member)) for name, member in struct_type.items()]
    container: Any = getattr(struct_type, "python_container", None)
    if container is not None and hasattr(container, "_fields"):
        return container(*(spec for _, spec in elements))
    if any(name is not None for name, _ in elements):
        return dict(elements)
    return tuple(spec for _, spec in elements)


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
        """Return the totals with one more batch."""
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

"""What a model is trained and measured by: losses and metrics of one output or several.

    one output       loss                    y: labels
    several, by name {"rating": loss, ..}    y: {"rating": labels, ..}; a sum of losses

Names are those of Keras, as its `compile` takes them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import federated_language as fl
import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.learning.checks import expect_object

Loss: TypeAlias = keras.losses.Loss | str
Metrics: TypeAlias = Sequence[keras.metrics.Metric | str]


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of a model, and what it is compared with.

    Attributes:
        name: None, if it is the only one.
        symbolic: of Keras; has a dtype and a shape.
        loss: mean over a batch.
        metrics: to report.
        label_type: of its labels.
    """

    name: str | None
    symbolic: Any
    loss: keras.losses.Loss
    metrics: tuple[keras.metrics.Metric, ...]
    label_type: fl.TensorType

    def of(self, structure: Any) -> Any:
        """Return what belongs to this output, of labels or predictions."""
        return structure if self.name is None else structure[self.name]


def build_outputs(
    symbolic: Mapping[str | None, Any],
    loss: Loss | Mapping[str, Loss],
    metrics: Metrics | Mapping[str, Metrics],
    label_type: fl.TensorType | Mapping[str, fl.TensorType] | None,
) -> tuple[Output, ...]:
    """Return the outputs of a model, each with its loss, metrics and labels.

    Args:
        symbolic: the outputs of Keras by name; the name is None where there is one.
        loss: as `Model.from_keras` takes it.
        metrics: as `Model.from_keras` takes them.
        label_type: as `Model.from_keras` takes it.

    Raises:
        ValueMismatchError: a loss or a metric is none, or there is not one loss for
            each output.
    """
    losses: dict[str | None, Any] = {None: loss}
    measured: dict[str | None, Any] = {None: metrics}
    labels: dict[str | None, Any] = {None: label_type}
    if None not in symbolic:
        losses = _by_output(loss, symbolic, "loss", needed=True)
        measured = _by_output(metrics or {}, symbolic, "metrics", needed=False)
        labels = _by_output(label_type or {}, symbolic, "label_type", needed=False)
    outputs: list[Output] = []
    for name, tensor in symbolic.items():
        label = labels.get(name) or _label_type(losses[name], tensor)
        found = _to_metrics(measured.get(name) or (), tensor, label, name)
        outputs.append(Output(name, tensor, _to_loss(losses[name]), found, label))
    return tuple(outputs)


def _by_output(
    given: Any, symbolic: Mapping[str | None, Any], what: str, *, needed: bool
) -> dict[str | None, Any]:
    names = list(symbolic)
    found = set(given) if isinstance(given, Mapping) else None
    fits = found is not None and (found == set(names) if needed else found <= {*names})
    if not fits:
        raise errors.ValueMismatchError(
            f"Expected `{what}` as a dictionary by the outputs {names}, found"
            f" {errors.describe(given)}."
        )
    return dict(given)


class _NamedLoss(keras.losses.Loss):
    """One of Keras' functions of labels and predictions, as a mean over a batch."""

    def __init__(self, function: Any, name: str) -> None:
        super().__init__(name=name)
        self._function = function

    @override
    def call(self, y_true: Any, y_pred: Any) -> Any:
        # As Keras: labels of one value a row, against an output of one value a row.
        if len(y_pred.shape) == len(y_true.shape) + 1 and y_pred.shape[-1] == 1:
            y_true = tf.expand_dims(y_true, -1)
        return self._function(y_true, y_pred)


def _to_loss(loss: object) -> keras.losses.Loss:
    if isinstance(loss, str):
        try:
            found: Any = keras.losses.get(loss)
        except ValueError as error:
            raise _unknown("loss", "mse", loss) from error
        return (
            found if isinstance(found, keras.losses.Loss) else _NamedLoss(found, loss)
        )
    expect_object(loss, keras.losses.Loss, 'keras.losses.MeanSquaredError() or "mse"')
    return loss  # pyright: ignore[reportReturnType]


def _unknown(what: str, example: str, found: str) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f'Expected the name of a Keras {what}, such as "{example}", found `{found}`.'
    )


def _label_type(loss: object, output: Any) -> fl.TensorType:
    """Return the type of labels where nobody says one: classes, or as the output.

    An output of one value a row is compared with labels `[rows]`.
    """
    is_class = not isinstance(loss, str) or "sparse" in loss.lower()
    if is_class:
        return fl.TensorType(np.int32, [None])
    shape = list(output.shape)
    if len(shape) == 2 and shape[1] == 1:  # noqa: PLR2004 (batch, and the one value)
        shape = shape[:1]
    return fl.TensorType(tf.as_dtype(output.dtype).as_numpy_dtype, shape)


def _to_metrics(
    metrics: Any, output: Any, label_type: fl.TensorType, name: str | None
) -> tuple[keras.metrics.Metric, ...]:
    if isinstance(metrics, Mapping | str):
        raise errors.ValueMismatchError(
            "Expected a list of metrics for one output, found"
            f" {errors.describe(metrics)}."
        )
    found = [_to_metric(metric, output, label_type) for metric in metrics]
    if name is None:
        return tuple(found)
    return tuple(_renamed(metric, f"{name}_{metric.name}") for metric in found)


def _to_metric(
    metric: object, output: Any, label_type: fl.TensorType
) -> keras.metrics.Metric:
    if metric in ("accuracy", "acc"):
        return _accuracy(output, label_type)
    if isinstance(metric, str):
        try:
            found: Any = keras.metrics.get(metric)
        except ValueError as error:
            raise _unknown("metric", "accuracy", metric) from error
        if isinstance(found, keras.metrics.Metric):
            return _renamed(found, metric)
        return keras.metrics.MeanMetricWrapper(found, name=metric)
    expect_object(
        metric,
        keras.metrics.Metric,
        'keras.metrics.SparseCategoricalAccuracy() or "accuracy"',
    )
    return metric  # pyright: ignore[reportReturnType]


def _accuracy(output: Any, label_type: fl.TensorType) -> keras.metrics.Metric:
    """Return what Keras means by "accuracy": by the shapes of output and labels."""
    if output.shape[-1] == 1:
        return keras.metrics.BinaryAccuracy("accuracy")
    if len(label_type.shape or ()) < len(output.shape):
        return keras.metrics.SparseCategoricalAccuracy("accuracy")
    return keras.metrics.CategoricalAccuracy("accuracy")


def _renamed(metric: keras.metrics.Metric, name: str) -> keras.metrics.Metric:
    return type(metric).from_config(metric.get_config() | {"name": name})

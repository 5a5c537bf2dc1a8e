"""What a model is trained and measured by: losses and metrics of one output or several.

    one output       loss                    y: labels
    several, by name {"rating": loss, ..}    y: {"rating": labels, ..}; a sum of losses

Names, functions and objects mean what they mean in Keras' `compile`. Each is tried on a
few rows when the model is made: a loss is one number, and what a metric keeps adds up.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import federated_language as fl
import keras
import numpy as np
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.learning.checks import expect_kind, expect_object
from ray_fed.learning.sample_rows import (
    Reshape,
    SampleRows,
    check_metric,
    find_reshape,
    leave,
    refusal,
)

Function: TypeAlias = Callable[[Any, Any], Any]
"""Of labels and predictions."""

Loss: TypeAlias = keras.losses.Loss | str | Function
Metrics: TypeAlias = Sequence[keras.metrics.Metric | str | Function]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A metric of one output, whose variables are sums over rows.

    Attributes:
        name: under which it is reported.
        metric: the user's own object, whose values nothing writes.
        reshape: what it needs done to labels and predictions.
    """

    name: str
    metric: keras.metrics.Metric
    reshape: Reshape

    def add(
        self, sums: Sequence[Any], labels: Any, predictions: Any
    ) -> tuple[Any, ...]:
        """Return its variables with one more batch, in a graph that is being traced.

        Raises:
            ValueMismatchError: it cannot take the batch.
        """
        try:
            reshaped = self.reshape(labels, predictions)
            return tuple(self.metric.stateless_update_state(list(sums), *reshaped))
        except Exception as error:
            raise refusal(
                "metric", self.name, _show(labels, predictions), error
            ) from error

    def finish(self, sums: Sequence[Any]) -> Any:
        """Return its result for values of its variables: a tensor, or some by name.

        Raises:
            ValueMismatchError: it has none in a graph.
        """
        values = list(zip(self.metric.variables, sums, strict=True))
        try:
            # Read inside of the scope: the result may be a variable.
            with keras.StatelessScope(state_mapping=values):
                found: Any = self.metric.result()
                return tf.nest.map_structure(tf.convert_to_tensor, found)
        except Exception as error:
            raise refusal("metric", self.name, "sums of clients", error) from error


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of a model, and what it is compared with.

    Attributes:
        name: None, if it is the only one.
        symbolic: of Keras; has a dtype and a shape.
        loss: of Keras; one number a batch.
        reshape: what the loss needs done to labels and predictions.
        measures: the metrics to report.
        label_type: of its labels.
    """

    name: str | None
    symbolic: Any
    loss: keras.losses.Loss
    reshape: Reshape
    measures: tuple[Measure, ...]
    label_type: fl.TensorType

    def of(self, structure: Any) -> Any:
        """Return what belongs to this output, of labels or predictions."""
        return structure if self.name is None else structure[self.name]

    def measure_loss(self, labels: Any, predictions: Any) -> Any:
        """Return the loss of a batch, f32[], in a graph that is being traced.

        Args:
            labels: of the batch; by name where there are several outputs.
            predictions: likewise.

        Raises:
            ValueMismatchError: the loss cannot take them, or is not one number.
        """
        labels, predictions = self.of(labels), self.of(predictions)
        try:
            loss: Any = self.loss(*self.reshape(labels, predictions))
        except Exception as error:
            shapes = _show(labels, predictions)
            raise refusal("loss", self.loss.name, shapes, error) from error
        if loss.shape.rank != 0:
            raise _many_values(self.loss)
        return loss


def _show(labels: Any, predictions: Any) -> str:
    return f"labels `{labels.shape}` and output `{predictions.shape}`"


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
        ValueMismatchError: a loss or a metric is none, or cannot be of its output, or a
            metric is no sum over rows, or there is not one loss for each output.
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
        expect_kind("label_type", label, fl.TensorType)
        found = _to_loss(losses[name], tensor, label)
        chosen = _to_metrics(measured.get(name, ()), tensor, label)
        prefix = "" if name is None else f"{name}_"
        does_it = isinstance(found, _FunctionLoss)
        reshape, measures = leave, ()
        if chosen or not does_it:
            rows = SampleRows.of(tensor, label)
            reshape = leave if does_it else find_reshape(found, rows)
            measures = tuple(
                Measure(prefix + metric.name, metric, check_metric(metric, rows))
                for metric in chosen
            )
        outputs.append(Output(name, tensor, found, reshape, measures, label))
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


_FunctionLoss: Any = keras.losses.MeanSquaredError.__base__
"""Keras' own loss of a function, which it does not export: a mean over a batch."""


def _to_loss(loss: object, output: Any, label_type: fl.TensorType) -> keras.losses.Loss:
    if isinstance(loss, str) and loss.lower() in ("crossentropy", "ce"):
        kinds = ("binary", "sparse_categorical", "categorical")
        loss = f"{kinds[_kind_of(output, label_type)]}_crossentropy"
    if not isinstance(loss, str) and not callable(loss):
        example = 'keras.losses.MeanSquaredError() or "mse"'
        expect_object(loss, keras.losses.Loss, example)
    try:
        found: Any = keras.losses.get(loss)
    except (TypeError, ValueError) as error:
        raise _unknown("loss", "mse", loss, error) from error
    if not isinstance(found, keras.losses.Loss):
        name = loss if isinstance(loss, str) else _name_of(found)
        return _FunctionLoss(found, name=name)
    if found.reduction in (None, "none"):
        raise _many_values(found)
    return found


def _many_values(loss: keras.losses.Loss) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f"Expected a loss that is one number a batch, found `{loss.name}` with"
        f" `reduction={loss.reduction!r}`, which is one a row: take"
        ' "sum_over_batch_size", a mean, or "sum": without a reduction, `fit` of Keras'
        " trains on the sum."
    )


def _kind_of(output: Any, label_type: fl.TensorType) -> int:
    """Return what Keras' "accuracy" means: 0 binary, 1 sparse, 2 categorical."""
    labels = list(label_type.shape or [])
    if output.shape[-1] == 1:
        return 0
    is_sparse = len(labels) < len(output.shape) or labels[-1] == 1
    return 1 if is_sparse else 2


def _name_of(function: Any) -> str:
    """Return the name that Keras gives: `my_error` for `my_error` and `MyError()`."""
    name = getattr(function, "name", None) or getattr(function, "__name__", None)
    words = re.sub(r"\W", "", str(name or type(function).__name__))
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words).lower()


def _unknown(
    what: str, example: str, found: object, error: Exception
) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f'Expected the name of a Keras {what}, such as "{example}", found'
        f" {errors.describe(found)} ({error}): name another one, or pass an object."
    )


def _label_type(loss: object, output: Any) -> fl.TensorType:
    """Return the type of labels where nobody says one: classes, or as the output.

    An output of one value a row is compared with labels `[rows]`.
    """
    if isinstance(loss, keras.losses.Loss):
        # Of a loss of one's own nothing is known; binary ones are of classes 0 and 1.
        is_own = not type(loss).__module__.startswith("keras.")
        name = type(loss).__name__
        is_classes = is_own or "Sparse" in name or name.startswith("Binary")
    else:
        name = loss if isinstance(loss, str) else getattr(loss, "__name__", "")
        is_classes = "sparse" in name.lower()
    if is_classes:
        return fl.TensorType(np.int32, [None])
    shape = list(output.shape)
    if len(shape) == 2 and shape[1] == 1:  # noqa: PLR2004 (batch, and the one value)
        shape = shape[:1]
    return fl.TensorType(tf.as_dtype(output.dtype).as_numpy_dtype, shape)


def _to_metrics(
    metrics: Any, output: Any, label_type: fl.TensorType
) -> list[keras.metrics.Metric]:
    if metrics is None:
        return []
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise errors.ValueMismatchError(
            "Expected a list of metrics for one output, found"
            f" {errors.describe(metrics)}."
        )
    return [_to_metric(metric, output, label_type) for metric in metrics]


def _to_metric(
    metric: object, output: Any, label_type: fl.TensorType
) -> keras.metrics.Metric:
    name = metric if isinstance(metric, str) else None
    if name is not None and name.lower() in ("accuracy", "acc"):
        kinds = ("BinaryAccuracy", "SparseCategoricalAccuracy", "CategoricalAccuracy")
        metric = kinds[_kind_of(output, label_type)]
    if not isinstance(metric, str) and not callable(metric):
        example = 'keras.metrics.SparseCategoricalAccuracy() or "accuracy"'
        expect_object(metric, keras.metrics.Metric, example)
    try:
        found: Any = keras.metrics.get(metric)
    except (TypeError, ValueError) as error:
        raise _unknown("metric", "accuracy", metric, error) from error
    if not isinstance(found, keras.metrics.Metric):
        name = name or _name_of(found)
        return keras.metrics.MeanMetricWrapper(found, name=name)
    if name is not None:
        found.name = name
    return found

"""Losses and metrics of a model with one output or several.

    one output       loss                    y: labels
    several, by name {"rating": loss, ..}    y: {"rating": labels, ..}; losses add up

Names, functions and objects mean the same as in Keras' `compile`. ray_fed adds up the
variables of metrics over clients, so these must be sums over rows. The sums are called
totals. Each client computes its own totals, the server adds them up, and Keras' metrics
compute results from the sums. So the accuracy over all clients is the accuracy over all
their examples.

When a model is made, each loss and metric is tried on a few sample rows. A loss must be
one number. For a metric this must hold:

    variables(a, b) + variables(c) = variables(a and b and c)

Here a and b are two batches of one client, and c is a batch of another client. The
equation does not hold for a maximum or a mean of batches. It also fails if rows are
mixed because labels `[rows]` are broadcast against predictions `[rows, 1]`.
"""

import dataclasses
import inspect
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import federated_language as fl
import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.learning.checks import expect_kind, expect_object

Reshape: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
"""Function that changes the shapes of labels and predictions to fit a metric."""

_OPEN = 4
"""Size in a sample of an axis whose size the model leaves open."""

_LARGE = 100_000
"""Number of elements of a row from which on a sample has 6 rows in place of 24."""


@dataclasses.dataclass(frozen=True)
class SampleRows:
    """Sample labels and predictions of one output, to try losses and metrics on.

    Attributes:
        labels: Classes, one-hot rows or numbers, as their type and the output require.
        predictions: Numbers between 0 and 1. Several values of a row add up to 1.
    """

    labels: np.ndarray[Any, Any]
    predictions: np.ndarray[Any, Any]

    @classmethod
    def of(cls, output: Any, label_type: fl.TensorType) -> "SampleRows":
        """Return rows for a Keras model's symbolic output and its type of labels."""
        random = np.random.default_rng(0)
        axes, label_axes = list(output.shape), list(label_type.shape or [None])
        shape, label_shape = _fill(axes, label_axes), _fill(label_axes, axes)
        shape[0] = label_shape[0] = 24 if math.prod(shape[1:]) < _LARGE else 6
        predictions = 0.1 + 0.8 * random.random(shape, np.float32)
        labels: Any = 0.1 + 0.8 * random.random(label_shape, np.float32)
        num_classes = shape[-1] if len(shape) > 1 else 1
        if num_classes > 1:
            predictions /= predictions.sum(-1, keepdims=True)
        if not np.issubdtype(label_type.dtype, np.floating):
            labels = random.integers(0, max(num_classes, 2), label_shape)
            if label_shape == shape and num_classes > 1:
                labels = np.eye(num_classes)[labels[..., 0]]
        dtype = tf.as_dtype(output.dtype).as_numpy_dtype
        return cls(labels.astype(label_type.dtype), predictions.astype(dtype))

    @override
    def __str__(self) -> str:
        return f"labels `{_shown(self.labels)}` and output `{_shown(self.predictions)}`"

    def cut(self, *ends: float) -> list[tuple[Any, Any]]:
        """Cut the rows into batches. For example, `cut(1 / 2, 1)` gives halves."""
        ends_at = [round(end * len(self.labels)) for end in ends]
        return [
            (tf.constant(self.labels[i:j]), tf.constant(self.predictions[i:j]))
            for i, j in zip([0, *ends_at], ends_at, strict=False)
        ]

    @property
    def reshapes(self) -> Sequence[Reshape]:
        """Changes of labels and predictions to try, in order.

        If one of the two lacks a last axis of size one, the change adds it. For labels
        or predictions `[rows]`, every metric of Keras needs this. For `[rows, steps]`,
        a metric may reduce over the steps, so the unchanged arrays are tried first.
        """
        short, long = sorted([self.labels.shape, self.predictions.shape], key=len)
        if len(short) + 1 != len(long) or long[-1] != 1:
            return (leave,)
        return (_to_one_rank, leave) if len(short) == 1 else (leave, _to_one_rank)


def _fill(axes: Sequence[int | None], others: Sequence[int | None]) -> list[int]:
    """Return the sizes `axes`. An open axis (None) takes its size from `others`."""
    padded = [*others, *[None] * len(axes)]
    return [own or other or _OPEN for own, other in zip(axes, padded, strict=False)]


def _shown(rows: np.ndarray[Any, Any]) -> str:
    return f"{rows.dtype}[{','.join(['rows', *map(str, rows.shape[1:])])}]"


def leave(labels: Any, predictions: Any) -> tuple[Any, Any]:
    """Return labels and predictions unchanged."""
    return labels, predictions


def _to_one_rank(labels: Any, predictions: Any) -> tuple[Any, Any]:
    if len(labels.shape) < len(predictions.shape):
        return tf.expand_dims(labels, -1), predictions
    if len(predictions.shape) == 1:
        return labels, tf.expand_dims(predictions, -1)
    return tf.squeeze(labels, -1), predictions


def check_metric(metric: keras.metrics.Metric, rows: SampleRows) -> Reshape:
    """Return the change of labels and predictions that a metric needs, usually none.

    The metric keeps its values. It may have more variables afterwards, because some
    metrics create them with the first batch. Raises ValueMismatchError if its variables
    are not sums over rows, or if it raises for the sample rows.
    """
    before = [(variable, variable.numpy()) for variable in metric.variables]
    failures: list[Exception] = []
    try:
        for reshape in rows.reshapes:
            try:
                if _adds_up(metric, rows, reshape):
                    return reshape
            except Exception as error:  # noqa: BLE001 (a user's code)
                failures.append(error)
    finally:
        metric.reset_state()
        for variable, value in before:
            variable.assign(value)
    if len(failures) == len(rows.reshapes):
        raise refusal("metric", metric.name, str(rows), failures[-1]) from failures[-1]
    raise errors.ValueMismatchError(
        "Expected metrics whose variables are sums over rows, found"
        f" `{metric.name}`: for {rows}, its variables after all rows are not the sum of"
        " its variables after two parts of them, so that clients cannot be added up."
        " Store sums over rows, and the number of rows, in variables that start at"
        " zero. Store no maximum and no mean of a batch."
    )


def _adds_up(metric: keras.metrics.Metric, rows: SampleRows, reshape: Reshape) -> bool:
    # Keras passes the same arguments. `Mean` is refused: its second is a weight.
    parameters = inspect.signature(metric.update_state).parameters
    weight = {"sample_weight": None} if "sample_weight" in parameters else {}

    def keep(*batches: tuple[Any, Any]) -> list[Any]:
        metric.reset_state()
        for batch in batches:
            metric.update_state(*reshape(*batch), **weight)
        metric.result()
        return [variable.numpy() for variable in metric.variables]

    first, second, third = rows.cut(1 / 6, 1 / 2, 1)
    whole = keep(*rows.cut(1))
    sums = [a + b for a, b in zip(keep(first, second), keep(third), strict=True)]
    is_numeric = all(value.dtype != np.bool_ for value in whole)
    return len(whole) > 0 and is_numeric and all(map(_is_close, sums, whole))


def _is_close(one: Any, other: Any) -> bool:
    tolerance = 0.05 if one.dtype.itemsize <= 2 else 1e-3  # noqa: PLR2004 (halves)
    one, other = np.float64(one), np.float64(other)
    return np.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def find_reshape(loss: Callable[[Any, Any], Any], rows: SampleRows) -> Reshape:
    """Return a function that gives labels and predictions the shapes that a loss needs.

    It is found by trials of the loss on the sample `rows`. Usually it changes nothing.
    If labels or predictions lack an axis of the other, it adds the axis. Otherwise
    broadcasting would mix rows.
    """
    for reshape in rows.reshapes if len(rows.reshapes) > 1 else ():
        try:
            if _is_mean(loss, rows, reshape):
                return reshape
        except Exception:  # noqa: BLE001 (user code, reported when it is traced)
            continue
    return leave


def _is_mean(loss: Any, rows: SampleRows, reshape: Reshape) -> bool:
    batches = [*rows.cut(1), *rows.cut(1 / 2, 1)]
    whole, first, second = (np.asarray(loss(*reshape(*each))) for each in batches)
    parts = first + second
    return _is_close(parts / 2, whole) or _is_close(parts, whole)


def refusal(
    kind: str, name: str, rows: str, error: Exception
) -> errors.ValueMismatchError:
    """Return the error for a loss or metric that raised `error` for some rows."""
    text = str(error).strip() or type(error).__name__
    place = tracebacks.find_place(error_texts.traceback_of(error))
    then = ": set the type of the labels by `label_type`"
    if place:  # in a user's function
        then = f". {place} Fix it there"
    return errors.ValueMismatchError(
        f"Expected a {kind} that takes {rows}, found that `{name}` raises"
        f" {type(error).__name__}: {text[: errors.MAX_SHOWN].rstrip('.')}{then}, or"
        f" choose another {kind}."
    )


Function: TypeAlias = Callable[[Any, Any], Any]
"""A function of labels and predictions."""

Loss: TypeAlias = keras.losses.Loss | str | Function
Metrics: TypeAlias = Sequence[keras.metrics.Metric | str | Function]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A metric of one output. Its variables are sums over rows.

    Attributes:
        name: Name in reports.
        metric: The user's own metric object, whose values never change.
        reshape: Change of labels and predictions that the metric needs.
    """

    name: str
    metric: keras.metrics.Metric
    reshape: Reshape

    def add(
        self, sums: Sequence[Any], labels: Any, predictions: Any
    ) -> tuple[Any, ...]:
        """Return the variables `sums` after a batch, or raise ValueMismatchError."""
        try:
            reshaped = self.reshape(labels, predictions)
            return tuple(self.metric.stateless_update_state(list(sums), *reshaped))
        except Exception as error:
            raise refusal(
                "metric", self.name, _show(labels, predictions), error
            ) from error

    def finish(self, sums: Sequence[Any]) -> Any:
        """Return the metric's result for `sums`, or raise ValueMismatchError."""
        values = list(zip(self.metric.variables, sums, strict=True))
        try:
            # Inside the scope, because the result may be a variable.
            with keras.StatelessScope(state_mapping=values):
                found: Any = self.metric.result()
                return tf.nest.map_structure(tf.convert_to_tensor, found)
        except Exception as error:
            raise refusal("metric", self.name, "sums of clients", error) from error


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of a model, with its loss, its metrics and the type of its labels.

    Attributes:
        name: Name of the output, or None if the model has one output.
        symbolic: Symbolic tensor of Keras, with a dtype and a shape.
        loss: Loss, which returns one number for a batch.
        reshape: Change of labels and predictions that the loss needs.
        measures: Metrics to report.
        label_type: Type of the labels in a batch.
    """

    name: str | None
    symbolic: Any
    loss: keras.losses.Loss
    reshape: Reshape
    measures: tuple[Measure, ...]
    label_type: fl.TensorType

    def of(self, structure: Any) -> Any:
        """Return the part of a structure of labels or predictions for this output."""
        return structure if self.name is None else structure[self.name]

    def measure_loss(self, labels: Any, predictions: Any) -> Any:
        """Return the loss of a batch, f32[], or raise ValueMismatchError."""
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
    """Return the outputs of a model, each with its loss, metrics and type of labels.

    `symbolic` has Keras' symbolic outputs by name, or one with the name None. Raises
    ValueMismatchError if an output has no loss, or a loss or metric does not fit.
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
"""Base class of Keras' losses that wrap a function. Keras does not export it."""


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
        # Keras opens a scope of this name, which must not begin with an underscore.
        return _FunctionLoss(found, name=name.lstrip("_") or "loss")
    if found.reduction in (None, "none"):
        raise _many_values(found)
    return found


def _many_values(loss: keras.losses.Loss) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f"Expected a loss that is one number a batch, found `{loss.name}` with"
        f" `reduction={loss.reduction!r}`, which is one a row: pass"
        ' "sum_over_batch_size" for the mean, or "sum", on which Keras\' `fit` trains'
        " without a reduction."
    )


def _kind_of(output: Any, label_type: fl.TensorType) -> int:
    """Return which accuracy Keras means: 0 binary, 1 sparse, 2 categorical."""
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
    """Return the default type of an output's labels: int32 classes, or its own type.

    If the output has one value for each row, the labels have the shape `[rows]`.
    """
    if isinstance(loss, keras.losses.Loss):
        # Losses of a user's class, and binary losses, have classes as labels.
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


_LOSS, _NUM_EXAMPLES = "loss", "num_examples"


class Totals(NamedTuple):
    """Sums over examples, which clients compute and the server adds up.

    Attributes:
        loss: Sum over batches of the mean loss times the number of rows, f32[].
        num_examples: Number of examples, i64[].
        output_losses: The same sum for each output, without penalties of layers. Empty
            if there is one output.
        metrics: Values of each metric's variables.
    """

    loss: Any
    num_examples: Any
    output_losses: tuple[Any, ...]
    metrics: tuple[tuple[Any, ...], ...]


class TotalsKeeper:
    """Adds batches to totals and computes metrics from them, inside traced graphs.

    Raises ValueMismatchError if two metrics, or a metric and a loss, have one name.
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
        """Return the totals of no examples, as tensors."""
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
        """Return totals with one more batch, from its outputs and mean losses."""
        size = tf.shape(tf.nest.flatten(predictions)[0], tf.int64)[0]

        def add_loss(sum_so_far: Any, value: Any) -> Any:
            return sum_so_far + tf.cast(value, tf.float32) * tf.cast(size, tf.float32)

        return Totals(
            add_loss(totals.loss, loss),
            totals.num_examples + size,
            # A model with one output has no sums of output losses.
            tuple(map(add_loss, totals.output_losses, output_losses)),
            tuple(
                measure.add(sums, output.of(labels), output.of(predictions))
                for (output, measure), sums in zip(
                    self._measured, totals.metrics, strict=True
                )
            ),
        )

    def finish(self, totals: Totals) -> "OrderedDict[str, Any]":
        """Return the loss (NaN without examples), number of examples, and metrics."""
        results: OrderedDict[str, Any] = OrderedDict()
        count = tf.cast(totals.num_examples, tf.float32)
        results[_LOSS] = totals.loss / count
        results[_NUM_EXAMPLES] = totals.num_examples
        for name, loss in zip(self._losses, totals.output_losses, strict=True):
            results[name] = loss / count
        for (_, measure), sums in zip(self._measured, totals.metrics, strict=True):
            results[measure.name] = measure.finish(sums)
        return results

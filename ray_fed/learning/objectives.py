"""What a model is trained and measured by: losses and metrics of one output or several.

    one output       loss                    y: labels
    several, by name {"rating": loss, ..}    y: {"rating": labels, ..}; a sum of losses

Names, functions and objects mean what they mean in Keras' `compile`. Each is tried on a
few rows when the model is made: a loss is one number, and what a metric keeps adds up.

A few rows that losses and metrics are tried on when a model is made.

What a metric keeps is summed over clients. So it is read here after two batches, and in
another client after a third one, and compared with all of these rows at once:

    kept(a, b) + kept(c) = kept(a and b and c)

This holds for sums over rows; not for a maximum, a mean of batches, or rows that are
mixed because labels `[rows]` are broadcast against predictions `[rows, 1]`.

Totals are sums over examples, which add up over batches and clients: each client counts
on its own, the counts are summed at the server, and Keras' metrics make results of the
sums. So accuracy over all clients is that over all examples.
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
"""Of labels and predictions."""

_OPEN = 4
"""Elements of an axis whose size a model leaves open."""

_LARGE = 100_000
"""Elements of a row of which six are tried rather than 24."""


@dataclasses.dataclass(frozen=True)
class SampleRows:
    """Labels and predictions of one output, the same ones each time.

    Attributes:
        labels: classes, one-hot rows or numbers, as their type and the output say.
        predictions: above 0 and below 1; of several values, they add up to 1.
    """

    labels: np.ndarray[Any, Any]
    predictions: np.ndarray[Any, Any]

    @classmethod
    def of(cls, output: Any, label_type: fl.TensorType) -> "SampleRows":
        """Return rows for a symbolic output of Keras and the type of its labels."""
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
        """Return tensors of the rows up to each end, from the one before; 1: all."""
        ends_at = [round(end * len(self.labels)) for end in ends]
        return [
            (tf.constant(self.labels[i:j]), tf.constant(self.predictions[i:j]))
            for i, j in zip([0, *ends_at], ends_at, strict=False)
        ]

    @property
    def reshapes(self) -> Sequence[Reshape]:
        """What may be done to both, in the order in which to try it.

        Where one lacks a last axis of one: give it that. Of `[rows]` no metric of Keras
        means anything else; in `[rows, steps]` steps may be what it reduces over.
        """
        short, long = sorted([self.labels.shape, self.predictions.shape], key=len)
        if len(short) + 1 != len(long) or long[-1] != 1:
            return (leave,)
        return (_to_one_rank, leave) if len(short) == 1 else (leave, _to_one_rank)


def _fill(axes: Sequence[int | None], others: Sequence[int | None]) -> list[int]:
    """Return sizes where an axis that is open is as long as the other's."""
    padded = [*others, *[None] * len(axes)]
    return [own or other or _OPEN for own, other in zip(axes, padded, strict=False)]


def _shown(rows: np.ndarray[Any, Any]) -> str:
    return f"{rows.dtype}[{','.join(['rows', *map(str, rows.shape[1:])])}]"


def leave(labels: Any, predictions: Any) -> tuple[Any, Any]:
    """Return both as they are."""
    return labels, predictions


def _to_one_rank(labels: Any, predictions: Any) -> tuple[Any, Any]:
    if len(labels.shape) < len(predictions.shape):
        return tf.expand_dims(labels, -1), predictions
    if len(predictions.shape) == 1:
        return labels, tf.expand_dims(predictions, -1)
    return tf.squeeze(labels, -1), predictions


def check_metric(metric: keras.metrics.Metric, rows: SampleRows) -> Reshape:
    """Return what is to be done to labels and predictions for a metric, mostly nothing.

    Its values are as before, afterwards. Variables that it makes with its first batch
    are there, as they would be after Keras' `evaluate`.

    Raises:
        ValueMismatchError: what it keeps is no sum over rows, or it cannot take them.
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
        f" `{metric.name}`: of {rows}, what it keeps of all rows is not what it keeps"
        " of some and of the others, added up, so that clients cannot be summed. Keep"
        " sums over rows, and their number, in variables that start at zero: no"
        " maximum, and no mean of a batch."
    )


def _adds_up(metric: keras.metrics.Metric, rows: SampleRows, reshape: Reshape) -> bool:
    # As Keras does: it refuses `Mean`, whose second argument is a weight.
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
    """Return what is to be done to labels and predictions for a loss, mostly nothing.

    Where one lacks an axis that the other has, it is what keeps rows from being mixed.
    """
    for reshape in rows.reshapes if len(rows.reshapes) > 1 else ():
        try:
            if _is_mean(loss, rows, reshape):
                return reshape
        except Exception:  # noqa: BLE001 (a user's code: told when it is traced)
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
    """Return the error for a loss or a metric that raises on labels and predictions."""
    text = str(error).strip() or type(error).__name__
    place = tracebacks.find_place(error_texts.traceback_of(error))
    then = ": say what labels are by `label_type`"
    if place:  # in a function of the user's
        then = f". {place} Mend it there"
    return errors.ValueMismatchError(
        f"Expected a {kind} that takes {rows}, found that `{name}` raises"
        f" {type(error).__name__}: {text[: errors.MAX_SHOWN].rstrip('.')}{then}, or"
        f" choose another {kind}."
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
        # Keras opens a scope of this name, which may not begin with an underscore.
        return _FunctionLoss(found, name=name.lstrip("_") or "loss")
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

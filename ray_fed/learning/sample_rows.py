"""A few rows that losses and metrics are tried on when a model is made.

What a metric keeps is summed over clients. So it is read here after two batches, and in
another client after a third one, and compared with all of these rows at once:

    kept(a, b) + kept(c) = kept(a and b and c)

This holds for sums over rows; not for a maximum, a mean of batches, or rows that are
mixed because labels `[rows]` are broadcast against predictions `[rows, 1]`.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import federated_language as fl
import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors

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
        return f"labels `{_show(self.labels)}` and output `{_show(self.predictions)}`"

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


def _show(rows: np.ndarray[Any, Any]) -> str:
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
    return errors.ValueMismatchError(
        f"Expected a {kind} that takes {rows}, found that `{name}` raises"
        f" {type(error).__name__}: {text[: errors.MAX_SHOWN]}: say what labels are by"
        f" `label_type`, or choose another {kind}."
    )

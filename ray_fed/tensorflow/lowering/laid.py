"""Sequences that are there at once: a parameter's rows, tensors, a range of numbers."""

from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from ray_fed.tensorflow.lowering.indexed import Drawn, Element, Indexed, Traits


class Laid(Indexed):
    """The elements of a parameter, or of tensors, laid as `ColumnarSequence` are.

    Args:
        specs: of an element's components.
        columns: rows and splits, i64[n + 1, 1], of each; without splits, row `i` is of
            element `i`.
        length: i64[].
        num_elements: the same, where it is known when traced.
    """

    def __init__(
        self,
        specs: Sequence[tf.TensorSpec],
        columns: Sequence[tuple[tf.Tensor, tf.Tensor | None]],
        length: tf.Tensor,
        num_elements: int | None = None,
    ) -> None:
        super().__init__(specs, Traits())
        self._num_elements = num_elements
        self.unrolled = False
        self._columns = columns
        self._length = length
        self._is_stacked = all(splits is None for _, splits in columns)

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        return self._length

    @override
    def num_elements(self) -> int | None:
        return self._num_elements

    @override
    def element(self, drawn: Drawn, index: tf.Tensor) -> Element:
        if self._num_elements is not None and self._is_stacked:
            return [tf.gather(rows, index) for rows, _ in self._columns]
        return [
            rows[index] if splits is None else self._between(rows, splits, index)
            for rows, splits in self._columns
        ]

    @staticmethod
    def _between(rows: tf.Tensor, splits: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        # Takes half of the ops that slicing with two scalars takes.
        start, stop = tf.gather(splits, index), tf.gather(splits, index + 1)
        return tf.strided_slice(rows, start, stop, [1])

    @override
    def gather(self, drawn: Drawn, indices: tf.Tensor) -> Element:
        if not self._is_stacked:
            return super().gather(drawn, indices)
        return [tf.gather(rows, indices) for rows, _ in self._columns]

    @override
    def span(self, drawn: Drawn, start: tf.Tensor, stop: tf.Tensor) -> Element:
        if not self._is_stacked:
            return super().span(drawn, start, stop)
        return [rows[start:stop] for rows, _ in self._columns]

    @override
    def block(self, drawn: Drawn, start: tf.Tensor, size: int) -> Element:
        if not self._is_stacked:
            return super().block(drawn, start, size)
        if size == self._num_elements:
            return [tf.identity(rows) for rows, _ in self._columns]
        return [
            tf.slice(
                rows, [start, *[0] * (len(rows.shape) - 1)], [size, *rows.shape[1:]]
            )
            for rows, _ in self._columns
        ]


class Counted(Indexed):
    """The numbers of a range.

    Args:
        spec: of a number.
        start: i64[].
        stop: i64[], not reached.
        step: i64[].
    """

    def __init__(
        self, spec: tf.TensorSpec, start: tf.Tensor, stop: tf.Tensor, step: tf.Tensor
    ) -> None:
        super().__init__([spec], Traits())
        self._start, self._step = start, step
        rest = tf.math.floormod(stop - start, step)
        self._length = tf.maximum(
            (stop - start) // step + tf.cast(tf.not_equal(rest, 0), tf.int64), 0
        )

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        return self._length

    @override
    def element(self, drawn: Drawn, index: tf.Tensor) -> Element:
        return [tf.cast(self._start + index * self._step, self.specs[0].dtype)]

    @override
    def gather(self, drawn: Drawn, indices: tf.Tensor) -> Element:
        return self.element(drawn, indices)

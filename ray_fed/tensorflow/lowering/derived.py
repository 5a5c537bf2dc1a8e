"""Sequences made of the elements of others, in the same order."""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf
from typing_extensions import override

import ray_fed.tensorflow.lowering.streams as streams
from ray_fed.tensorflow.lowering.indexed import Drawn, Element, Indexed, Traits


class Mapped(Indexed):
    """The results of a function of elements.

    Args:
        inner: the elements.
        function: from components to components.
        specs: of the results.
        traits: of the function.
    """

    def __init__(
        self,
        inner: Indexed,
        function: Callable[[Element], Element],
        specs: Sequence[tf.TensorSpec],
        traits: Traits,
    ) -> None:
        super().__init__(specs, inner.traits & traits)
        self._inner = inner
        self._function = function

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        return self._inner.draw(limit)

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        return self._inner.length(drawn)

    @override
    def element(self, drawn: Drawn, index: tf.Tensor) -> Element:
        inner = self._inner
        return self._function(streams.shaped(inner.element(drawn, index), inner.specs))


class Selected(Indexed):
    """Components of elements, by position, each any number of times.

    Args:
        inner: the elements.
        positions: of the components to take.
    """

    def __init__(self, inner: Indexed, positions: Sequence[int]) -> None:
        super().__init__([inner.specs[p] for p in positions], inner.traits)
        self._inner = inner
        self._positions = positions

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        return self._inner.draw(limit)

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        return self._inner.length(drawn)

    def _select(self, element: Element) -> Element:
        return [element[position] for position in self._positions]

    @override
    def element(self, drawn: Drawn, index: tf.Tensor) -> Element:
        return self._select(self._inner.element(drawn, index))

    @override
    def gather(self, drawn: Drawn, indices: tf.Tensor) -> Element:
        return self._select(self._inner.gather(drawn, indices))

    @override
    def span(self, drawn: Drawn, start: tf.Tensor, stop: tf.Tensor) -> Element:
        return self._select(self._inner.span(drawn, start, stop))


class Batched(Indexed):
    """Elements stacked, `size` at a time.

    Args:
        inner: the elements.
        size: i64[], > 0.
        drop_remainder: bool[], whether the last batch is left out where it is smaller.
        specs: of a batch.
    """

    def __init__(
        self,
        inner: Indexed,
        size: tf.Tensor,
        drop_remainder: tf.Tensor,
        specs: Sequence[tf.TensorSpec],
    ) -> None:
        super().__init__(specs, inner.traits)
        self._inner = inner
        self._size = size
        self._drop_remainder = drop_remainder

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        return self._inner.draw(None if limit is None else limit * self._size)

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        length = self._inner.length(drawn)
        rest = tf.math.floormod(length, self._size)
        has_rest = tf.logical_and(rest > 0, tf.logical_not(self._drop_remainder))
        return length // self._size + tf.cast(has_rest, tf.int64)

    @override
    def element(self, drawn: Drawn, index: tf.Tensor) -> Element:
        start = index * self._size
        stop = tf.minimum(start + self._size, self._inner.length(drawn))
        return self._inner.span(drawn, start, stop)


class Zipped(Indexed):
    """Elements of several sequences side by side, as long as all have some."""

    def __init__(self, inners: Sequence[Indexed]) -> None:
        traits = inners[0].traits
        for inner in inners[1:]:
            traits = traits & inner.traits
        # Ends with the shortest, so one that is known to end is enough.
        bounded = any(inner.traits.bounded for inner in inners)
        traits = dataclasses.replace(traits, bounded=bounded)
        super().__init__([spec for inner in inners for spec in inner.specs], traits)
        self._inners = inners

    def _pairs(self, drawn: Drawn) -> list[tuple[Indexed, Drawn]]:
        return list(zip(self._inners, drawn, strict=True))

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        return tuple(inner.draw(limit) for inner in self._inners)

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        return tf.reduce_min([inner.length(each) for inner, each in self._pairs(drawn)])

    @override
    def element(self, drawn: Drawn, index: tf.Tensor) -> Element:
        pairs = self._pairs(drawn)
        return [t for inner, each in pairs for t in inner.element(each, index)]

    @override
    def gather(self, drawn: Drawn, indices: tf.Tensor) -> Element:
        pairs = self._pairs(drawn)
        return [t for inner, each in pairs for t in inner.gather(each, indices)]

    @override
    def span(self, drawn: Drawn, start: tf.Tensor, stop: tf.Tensor) -> Element:
        pairs = self._pairs(drawn)
        return [t for inner, each in pairs for t in inner.span(each, start, stop)]

"""Sequences made of the elements of others, in the same order."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import tensorflow as tf
from typing_extensions import override

import ray_fed.tensorflow.lowering.streams as streams
from ray_fed.tensorflow.lowering.indexed import (
    Drawn,
    Element,
    Indexed,
    Traits,
)
from ray_fed.tensorflow.lowering.reindexed import static


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
        self.unrolled = inner.unrolled
        self._function = function

    @override
    def num_elements(self) -> int | None:
        return self._inner.num_elements()

    @override
    def alike(self) -> "Sequence[streams.Stream]":
        parts = [part for part in self._inner.alike() if isinstance(part, Indexed)]
        return [Mapped(p, self._function, self.specs, self.traits) for p in parts]

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
        self.unrolled = inner.unrolled
        self._positions = positions

    @override
    def num_elements(self) -> int | None:
        return self._inner.num_elements()

    @override
    def alike(self) -> "Sequence[streams.Stream]":
        parts = [part for part in self._inner.alike() if isinstance(part, Indexed)]
        return [Selected(part, self._positions) for part in parts]

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

    @override
    def block(self, drawn: Drawn, start: tf.Tensor, size: int) -> Element:
        return self._select(self._inner.block(drawn, start, size))


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
        self.unrolled = inner.unrolled
        self._size = size
        self._drop_remainder = drop_remainder

    def _known(self) -> tuple[int, int] | None:
        """Return the number of whole batches and what is left, where known."""
        length, size = self._inner.num_elements(), static(self._size)
        drops = static(self._drop_remainder)
        if length is None or size is None or drops is None:
            return None
        return length // size, 0 if drops else length % size

    @override
    def num_elements(self) -> int | None:
        known = self._known()
        return None if known is None else known[0] + (known[1] > 0)

    @override
    def alike(self) -> "Sequence[streams.Stream]":
        known = self._known()
        if known is None or known[1] == 0:
            return [self]
        whole, rest = known
        last = Ending(
            self._inner, whole * cast("int", static(self._size)), rest, self.specs
        )
        if not whole:
            return [last]
        dropping = tf.ones([], tf.bool)
        return [Batched(self._inner, self._size, dropping, self.specs), last]

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
        known = self._known()
        if known is not None and known[1] == 0:
            size = cast("int", static(self._size))
            return self._inner.block(drawn, start, size)
        stop = tf.minimum(start + self._size, self._inner.length(drawn))
        return self._inner.span(drawn, start, stop)


class Ending(Indexed):
    """One batch, of the last elements.

    Args:
        inner: the elements.
        start: index of the first.
        size: how many.
        specs: of the batch.
    """

    def __init__(
        self, inner: Indexed, start: int, size: int, specs: Sequence[tf.TensorSpec]
    ) -> None:
        super().__init__(specs, inner.traits)
        self._inner = inner
        self._start, self._size = start, size

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        return self._inner.draw(None)

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        return tf.ones([], tf.int64)

    @override
    def num_elements(self) -> int | None:
        return 1

    @override
    def element(self, drawn: Drawn, index: tf.Tensor) -> Element:
        start = tf.constant(self._start, tf.int64)
        return self._inner.block(drawn, start, self._size)


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

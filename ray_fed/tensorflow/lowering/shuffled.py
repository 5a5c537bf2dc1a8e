"""Sequences in another order on each pass, distributed as tf.data's buffer makes it.

A buffer of `b` elements gives a random one and takes the next in its place; at the end
what is left comes out in a random order. So step `j` gives what went last into the slot
that it chose, which was the slot's first element or came in after the step that chose
the slot before: a sort by slots finds it, with no loop over elements.

The draws are random ops of the graph, so they are keyed when the graph is loaded.
"""

import dataclasses
from typing import Any

import tensorflow as tf
from typing_extensions import override

from ray_fed.tensorflow.lowering.bodies import CannotLower
from ray_fed.tensorflow.lowering.indexed import Drawn, Element, Indexed
from ray_fed.tensorflow.lowering.reindexed import (
    Reindexed,
    Repeated,
    check_pure,
    repeated_length,
    repeated_traits,
    static,
)


def draw_order(length: tf.Tensor, buffer: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
    """Return the first indices of a shuffle, i64[min(length, limit)].

    Args:
        length: number of elements, i64[].
        buffer: number of elements to choose from, i64[]; negative: all.
        limit: how many indices are asked for, i64[].
    """
    buffer = tf.minimum(tf.where(buffer < 0, length, buffer), length)
    asked = tf.minimum(length, limit)
    steps = tf.minimum(length - buffer, asked)
    # An empty draw needs bounds in order, too.
    top = tf.maximum(buffer, 1)
    slots = tf.random.uniform(steps[tf.newaxis], 0, top, tf.int64)
    by_slot: Any = tf.argsort(slots, stable=True)
    sorted_slots = tf.gather(slots, by_slot)
    arrivals = tf.cast(by_slot, tf.int64) + buffer  # what a step put into its slot
    is_first = tf.concat(
        [[True], tf.not_equal(sorted_slots[1:], sorted_slots[:-1])], 0
    )[:steps]
    before = tf.concat([[0], arrivals[:-1]], 0)[:steps]
    given = tf.where(is_first, sorted_slots, before)
    given = tf.gather(given, tf.math.invert_permutation(by_slot))
    last: Any = tf.math.unsorted_segment_max(tf.range(steps) + buffer, slots, buffer)
    left = tf.random.shuffle(tf.maximum(last, tf.range(buffer)))
    return tf.concat([given, left[: asked - steps]], 0)


class Shuffled(Reindexed):
    """Elements in an order that each pass draws.

    Args:
        inner: the elements.
        buffer: number of elements to choose from, i64[]; negative: all.
    """

    def __init__(self, inner: Indexed, buffer: tf.Tensor) -> None:
        check_pure(inner, "shuffled")
        if static(buffer) == 0:
            raise CannotLower("a shuffle of no buffer")
        super().__init__(inner, dataclasses.replace(inner.traits, shuffled=True))
        self.inner = inner
        self.buffer = buffer

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        if limit is None and not self.inner.traits.bounded:
            raise CannotLower("an endless shuffle")
        ahead = None
        if limit is not None and (static(self.buffer) or 0) > 0:
            ahead = limit + self.buffer
        drawn = self.inner.draw(ahead)
        length = self.inner.length(drawn)
        order = draw_order(length, self.buffer, length if limit is None else limit)
        return drawn, order

    @override
    def _drawn_inside(self, drawn: Drawn) -> Drawn:
        return drawn[0]

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        return self.inner.length(drawn[0])

    @override
    def _index(self, drawn: Drawn, index: tf.Tensor) -> tf.Tensor:
        return tf.gather(drawn[1], index)


class FixedOrder(Reindexed):
    """Elements in an order that is drawn once, where the sequence is made."""

    def __init__(self, inner: Indexed, buffer: tf.Tensor) -> None:
        check_pure(inner, "shuffled")
        if not inner.traits.bounded or inner.traits.shuffled or static(buffer) == 0:
            raise CannotLower("a shuffle in one order of what has none")
        super().__init__(inner, inner.traits)
        length = inner.length(inner.draw(None))
        self._order = draw_order(length, buffer, length)

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        return self._inner.length(drawn)

    @override
    def _index(self, drawn: Drawn, index: tf.Tensor) -> tf.Tensor:
        return tf.gather(self._order, index)


class _Epochs:
    """How often a sequence is drawn for a pass over its repetitions."""

    def __init__(self, inner: Indexed, count: tf.Tensor) -> None:
        self._is_endless = not repeated_traits(inner, count).bounded
        self._count = count

    def number(self, length: tf.Tensor, limit: tf.Tensor | None) -> tf.Tensor:
        """Return how many times to draw, i64[], >= 1."""
        if limit is None:
            if self._is_endless:
                raise CannotLower("an endless shuffle")
            return tf.maximum(self._count, 1)
        asked = tf.maximum((limit - 1) // tf.maximum(length, 1) + 1, 1)
        return tf.where(self._count < 0, asked, tf.minimum(asked, self._count))


def _joined(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    return tf.concat([first, second], 0)


def _any_number(tensor: tf.Tensor) -> tf.TensorShape:
    return tf.TensorShape([None]).concatenate(tensor.shape[1:])


def _stacked(tensor: tf.Tensor) -> tf.Tensor:
    return tensor[tf.newaxis]


def _concatenate(first: Any, number: tf.Tensor, draw: Any) -> Any:
    """Return `number` draws one after the other, `first` being the first of them."""

    @tf.autograph.experimental.do_not_convert
    def goes_on(index: Any, drawn: Any) -> tf.Tensor:
        del drawn
        return index < number

    @tf.autograph.experimental.do_not_convert
    def body(index: Any, drawn: Any) -> Any:
        longer = tf.nest.map_structure(_joined, drawn, draw())
        return index + 1, longer

    shapes = tf.nest.map_structure(_any_number, first)
    _, drawn = tf.while_loop(
        goes_on,
        body,
        (tf.ones([], tf.int64), first),
        (tf.TensorShape([]), shapes),
        parallel_iterations=1,
    )
    return drawn


class ShuffledEpochs(Reindexed):
    """A shuffled sequence over and over, each time in another order."""

    def __init__(self, inner: Shuffled, count: tf.Tensor) -> None:
        super().__init__(inner.inner, repeated_traits(inner, count))
        self._buffer = inner.buffer
        self._count = count
        self._epochs = _Epochs(inner, count)

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        drawn = self._inner.draw(None)
        length = self._inner.length(drawn)

        def draw() -> tf.Tensor:
            return draw_order(length, self._buffer, length)

        number = self._epochs.number(length, limit)
        return drawn, _concatenate(draw(), number, draw)

    @override
    def _drawn_inside(self, drawn: Drawn) -> Drawn:
        return drawn[0]

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        return repeated_length(self._inner.length(drawn[0]), self._count)

    @override
    def _index(self, drawn: Drawn, index: tf.Tensor) -> tf.Tensor:
        return tf.gather(drawn[1], index)


class DrawnEpochs(Indexed):
    """What is made of a shuffled sequence, over and over, drawn anew each time."""

    def __init__(self, inner: Indexed, count: tf.Tensor) -> None:
        if not (inner.traits.steady and inner.traits.bounded):
            raise CannotLower("a repeated shuffle whose length may change")
        super().__init__(inner.specs, repeated_traits(inner, count))
        self._inner = inner
        self._count = count
        self._epochs = _Epochs(inner, count)

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        def draw() -> Drawn:
            drawn = self._inner.draw(None)
            return tf.nest.map_structure(_stacked, drawn)

        first = draw()
        length = self._inner.length(_at(first, 0))
        return _concatenate(first, self._epochs.number(length, limit), draw)

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        return repeated_length(self._inner.length(_at(drawn, 0)), self._count)

    @override
    def element(self, drawn: Drawn, index: tf.Tensor) -> Element:
        length = self._inner.length(_at(drawn, 0))
        return self._inner.element(
            _at(drawn, index // length), tf.math.floormod(index, length)
        )


def _at(drawn: Drawn, epoch: Any) -> Drawn:
    def at(tensor: tf.Tensor) -> tf.Tensor:
        return tensor[epoch]

    return tf.nest.map_structure(at, drawn)


def repeat(inner: Indexed, count: tf.Tensor) -> Indexed:
    """Return a sequence `count` times over; for ever where it is negative."""
    if not inner.traits.shuffled:
        return Repeated(inner, count)
    if isinstance(inner, Shuffled) and not inner.inner.traits.shuffled:
        return ShuffledEpochs(inner, count)
    return DrawnEpochs(inner, count)

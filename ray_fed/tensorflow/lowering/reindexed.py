"""Sequences that are another one's elements at other indices."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from typing_extensions import override

from ray_fed.tensorflow.lowering.bodies import CannotLower
from ray_fed.tensorflow.lowering.indexed import ENDLESS, Drawn, Element, Indexed, Traits


class Reindexed(Indexed, abc.ABC):
    """Elements of another sequence.

    Args:
        inner: where the elements are.
        traits: of this sequence.
    """

    def __init__(self, inner: Indexed, traits: Traits) -> None:
        super().__init__(inner.specs, traits)
        self._inner = inner

    @abc.abstractmethod
    def _index(self, drawn: Drawn, index: tf.Tensor) -> tf.Tensor:
        """Return the index in `inner` of an index here, or of each of several."""

    def _drawn_inside(self, drawn: Drawn) -> Drawn:
        return drawn

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        return self._inner.draw(limit)

    @override
    def element(self, drawn: Drawn, index: tf.Tensor) -> Element:
        inside = self._drawn_inside(drawn)
        return self._inner.element(inside, self._index(drawn, index))

    @override
    def gather(self, drawn: Drawn, indices: tf.Tensor) -> Element:
        inside = self._drawn_inside(drawn)
        return self._inner.gather(inside, self._index(drawn, indices))


class Taken(Reindexed):
    """The first `count` elements; all where it is negative."""

    def __init__(self, inner: Indexed, count: tf.Tensor) -> None:
        ends = (static(count) or 0) > 0 or static(count) == 0
        traits = inner.traits
        if ends:
            traits = dataclasses.replace(traits, bounded=True)
        super().__init__(inner, traits)
        self._ends = ends
        self._count = tf.where(count < 0, ENDLESS, count)

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        if not self._ends:
            return self._inner.draw(limit)
        taken = self._count if limit is None else tf.minimum(limit, self._count)
        return self._inner.draw(taken)

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        return tf.minimum(self._count, self._inner.length(drawn))

    @override
    def _index(self, drawn: Drawn, index: tf.Tensor) -> tf.Tensor:
        return index

    @override
    def span(self, drawn: Drawn, start: tf.Tensor, stop: tf.Tensor) -> Element:
        return self._inner.span(drawn, start, stop)


class Skipped(Reindexed):
    """All but the first `count` elements; none where it is negative."""

    def __init__(self, inner: Indexed, count: tf.Tensor) -> None:
        check_pure(inner, "skipped")
        super().__init__(inner, inner.traits)
        self._count = tf.where(count < 0, ENDLESS, count)

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        if limit is None:
            return self._inner.draw(None)
        # Without a sum that could overflow: a skip of all asks for nothing.
        return self._inner.draw(limit + tf.minimum(self._count, ENDLESS - limit))

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        length = self._inner.length(drawn)
        rest = tf.maximum(length - self._count, 0)
        return tf.where(tf.equal(length, ENDLESS), length, rest)

    @override
    def _index(self, drawn: Drawn, index: tf.Tensor) -> tf.Tensor:
        return index + self._count

    @override
    def span(self, drawn: Drawn, start: tf.Tensor, stop: tf.Tensor) -> Element:
        return self._inner.span(drawn, start + self._count, stop + self._count)


class Sharded(Reindexed):
    """Every `num_shards`-th element, from the one at `shard` on."""

    def __init__(self, inner: Indexed, num_shards: tf.Tensor, shard: tf.Tensor) -> None:
        check_pure(inner, "sharded")
        super().__init__(inner, inner.traits)
        self._num_shards, self._shard = num_shards, shard

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        return self._inner.draw(None if limit is None else limit * self._num_shards)

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        length = self._inner.length(drawn)
        count = (length - self._shard - 1) // self._num_shards + 1
        return tf.where(tf.equal(length, ENDLESS), length, tf.maximum(count, 0))

    @override
    def _index(self, drawn: Drawn, index: tf.Tensor) -> tf.Tensor:
        return self._shard + index * self._num_shards


class Repeated(Reindexed):
    """A sequence `count` times over, in the same order; for ever where negative."""

    def __init__(self, inner: Indexed, count: tf.Tensor) -> None:
        super().__init__(inner, repeated_traits(inner, count))
        self._count = count

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        return self._inner.draw(None)

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        return repeated_length(self._inner.length(drawn), self._count)

    @override
    def _index(self, drawn: Drawn, index: tf.Tensor) -> tf.Tensor:
        return tf.math.floormod(index, self._inner.length(drawn))


class Filtered(Reindexed):
    """The elements for which a predicate is true.

    Args:
        inner: the elements; the predicate sees them all when a pass begins.
        predicate: of an element's components; without effects.
    """

    def __init__(self, inner: Indexed, predicate: Callable[[Element], Element]) -> None:
        check_pure(inner, "filtered")
        if not (inner.traits.repeatable and inner.traits.bounded):
            raise CannotLower("a filter of random or endless elements")
        steady = inner.traits.steady and not inner.traits.shuffled
        super().__init__(inner, dataclasses.replace(inner.traits, steady=steady))
        self._predicate = predicate

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        drawn = self._inner.draw(None)

        @tf.autograph.experimental.do_not_convert
        def is_kept(index: tf.Tensor) -> tf.Tensor:
            return self._predicate(self._inner.element(drawn, index))[0]

        mask: Any = tf.map_fn(
            is_kept,
            tf.range(self._inner.length(drawn)),
            fn_output_signature=tf.TensorSpec([], tf.bool),
        )
        return drawn, tf.where(mask)[:, 0]

    @override
    def _drawn_inside(self, drawn: Drawn) -> Drawn:
        return drawn[0]

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        return tf.size(drawn[1], tf.int64)

    @override
    def _index(self, drawn: Drawn, index: tf.Tensor) -> tf.Tensor:
        return tf.gather(drawn[1], index)


def static(tensor: tf.Tensor) -> int | None:
    """Return the number that a tensor always is, where that is known."""
    value: Any = tf.get_static_value(tensor)
    return None if value is None else int(value)


def check_pure(inner: Indexed, what: str) -> None:
    """Refuse elements with effects where not each is asked for, once and in order."""
    if inner.traits.effects:
        raise CannotLower(f"elements with effects, {what}")


def repeated_traits(inner: Indexed, count: tf.Tensor) -> Traits:
    """Return the traits of a sequence over and over."""
    known = static(count)
    bounded = inner.traits.bounded and known is not None and known >= 0
    return dataclasses.replace(inner.traits, bounded=bounded)


def repeated_length(length: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return the length of a sequence over and over."""
    is_endless = (length > 0) & ((count < 0) | tf.equal(length, ENDLESS) & (count > 0))
    return tf.where(is_endless, ENDLESS, length * tf.maximum(count, 0))

"""Sequences whose elements are functions of an index, and of what a pass has drawn.

A pass over a sequence begins by drawing (the order of a shuffle, for one): `draw` gives
tensors, which every other method takes. Without shuffles there are none.

    batch(k) of map(f) of a parameter:   element(i) = stack(f(rows[j]) for j in i*k...)
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from typing_extensions import override

import ray_fed.tensorflow.lowering.streams as streams
from ray_fed.tensorflow.lowering.bodies import CannotLower

Drawn: TypeAlias = Any
"""A nest of tensors."""
Element: TypeAlias = "list[tf.Tensor]"
"""The components of one element, or of several, stacked."""

ENDLESS = tf.int64.max


@dataclasses.dataclass(frozen=True)
class Traits:
    """What may be done with a sequence.

    Attributes:
        shuffled: a new pass has another order.
        repeatable: an element asked for twice is the same.
        effects: asking for an element does something else beside.
        bounded: it is known when traced that it ends.
        steady: all passes are of one length.
    """

    shuffled: bool = False
    repeatable: bool = True
    effects: bool = False
    bounded: bool = True
    steady: bool = True

    def __and__(self, other: "Traits") -> "Traits":
        """Return the traits of what is made of two."""
        return Traits(
            shuffled=self.shuffled or other.shuffled,
            repeatable=self.repeatable and other.repeatable,
            effects=self.effects or other.effects,
            bounded=self.bounded and other.bounded,
            steady=self.steady and other.steady,
        )


class Indexed(streams.Stream, abc.ABC):
    """A sequence of elements by index.

    Args:
        specs: of an element's components.
        traits: of the sequence.

    Attributes:
        unrolled: whether a pass is to be without a loop, where `num_elements` is known.
    """

    always_emits = True
    unrolled = False

    def __init__(self, specs: Sequence[tf.TensorSpec], traits: Traits) -> None:
        super().__init__(specs)
        self.traits = traits
        self.has_effects = traits.effects or not traits.repeatable

    def draw(self, limit: tf.Tensor | None) -> Drawn:
        """Return what one pass needs; of which `limit` elements are asked for."""
        del limit
        return ()

    @abc.abstractmethod
    def length(self, drawn: Drawn) -> tf.Tensor:
        """Return the number of elements, i64[]; `ENDLESS` where there is no end."""

    @abc.abstractmethod
    def element(self, drawn: Drawn, index: tf.Tensor) -> Element:
        """Return the element at an index, i64[]."""

    def gather(self, drawn: Drawn, indices: tf.Tensor) -> Element:
        """Return the elements at indices, i64[n] with n > 0, stacked."""
        if any(spec.dtype == tf.variant for spec in self.specs):
            raise CannotLower("a batch of variants")

        @tf.autograph.experimental.do_not_convert
        def at(index: tf.Tensor) -> Element:
            return self.element(drawn, index)

        in_order = self.traits.effects or not self.traits.repeatable
        stacked: Any = tf.map_fn(
            at,
            indices,
            fn_output_signature=list(self.specs),
            parallel_iterations=1 if in_order else None,
        )
        return list(stacked)

    def span(self, drawn: Drawn, start: tf.Tensor, stop: tf.Tensor) -> Element:
        """Return the elements from start to stop, stacked; at least one."""
        return self.gather(drawn, tf.range(start, stop))

    def num_elements(self) -> int | None:
        """Return the number of elements where it is known when traced."""
        return None

    def block(self, drawn: Drawn, start: tf.Tensor, size: int) -> Element:
        """Return elements from a start, stacked; their number is known when traced."""
        return self.gather(drawn, start + tf.range(size, dtype=tf.int64))

    @override
    def begin(self) -> Any:
        drawn = self.draw(None)
        return tf.zeros([], tf.int64), self.length(drawn), drawn

    @override
    def is_ready(self, state: Any) -> tf.Tensor:
        index, length, _ = state
        return index < length

    @override
    def advance(self, state: Any) -> streams.Step:
        index, length, drawn = state
        element = streams.shaped(self.element(drawn, index), self.specs)
        return streams.Step(None, (index + 1, length, drawn), element)

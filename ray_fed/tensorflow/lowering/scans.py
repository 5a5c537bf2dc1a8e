"""Streams whose elements depend on the elements before, and what is made of them."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from ray_fed.tensorflow.lowering.streams import (
    Function,
    Step,
    Stream,
    blank,
    shaped,
    where_emitted,
)


class MappedStream(Stream):
    """The results of a function of the elements of a stream."""

    def __init__(
        self, inner: Stream, function: Function, specs: Sequence[tf.TensorSpec]
    ) -> None:
        super().__init__(specs)
        self.always_emits = inner.always_emits
        self.has_effects = True  # asked in order and once, as if it had
        self._inner = inner
        self._function = function

    @override
    def begin(self) -> Any:
        return self._inner.begin()

    @override
    def is_ready(self, state: Any) -> tf.Tensor:
        return self._inner.is_ready(state)

    @override
    def advance(self, state: Any) -> Step:
        step = self._inner.advance(state)
        mapped = where_emitted(
            step, lambda: self._function(step.element), lambda: blank(self.specs)
        )
        return Step(step.emitted, step.state, shaped(mapped, self.specs))

    @override
    def invariants(self, state: Any) -> Any:
        return self._inner.invariants(state)


class Scanned(Stream):
    """The results of a function of a state and an element, which gives a new state.

    Args:
        inner: the elements.
        function: from state and element to new state and result.
        initial: state.
        shapes: of the state at any time.
        specs: of the result.
    """

    def __init__(
        self,
        inner: Stream,
        function: Function,
        initial: Sequence[tf.Tensor],
        shapes: Sequence[tf.TensorShape],
        specs: Sequence[tf.TensorSpec],
    ) -> None:
        super().__init__(specs)
        self.always_emits = inner.always_emits
        self.has_effects = True
        self._inner = inner
        self._function = function
        self._initial = tuple(initial)
        self._shapes = tuple(shapes)

    @override
    def begin(self) -> Any:
        return self._inner.begin(), self._initial

    @override
    def is_ready(self, state: Any) -> tf.Tensor:
        return self._inner.is_ready(state[0])

    @override
    def advance(self, state: Any) -> Step:
        inner, carried = state
        step = self._inner.advance(inner)
        results = where_emitted(
            step,
            lambda: self._function([*carried, *step.element]),
            lambda: [*carried, *blank(self.specs)],
        )
        carried, element = results[: len(carried)], results[len(carried) :]
        state = (step.state, tuple(carried))
        return Step(step.emitted, state, shaped(element, self.specs))

    @override
    def invariants(self, state: Any) -> Any:
        return self._inner.invariants(state[0]), self._shapes


class TakenWhile(Stream):
    """The elements before the first for which a predicate is false."""

    always_emits = False

    def __init__(self, inner: Stream, predicate: Function) -> None:
        super().__init__(inner.specs)
        self.has_effects = True
        self._inner = inner
        self._predicate = predicate

    @override
    def begin(self) -> Any:
        return self._inner.begin(), tf.ones([], tf.bool)

    @override
    def is_ready(self, state: Any) -> tf.Tensor:
        inner, goes_on = state
        return goes_on & self._inner.is_ready(inner)

    @override
    def advance(self, state: Any) -> Step:
        step = self._inner.advance(state[0])
        [goes_on] = where_emitted(
            step,
            lambda: self._predicate(step.element),
            lambda: [tf.ones([], tf.bool)],
        )
        emitted = goes_on if step.emitted is None else goes_on & step.emitted
        return Step(emitted, (step.state, goes_on), step.element)

    @override
    def invariants(self, state: Any) -> Any:
        return self._inner.invariants(state[0]), tf.TensorShape([])

"""Sequences that are passed from the front to the end, and what passes over them.

A pass is a state, a nest of tensors. `advance` takes one that is ready to the next, and
usually gives an element; a `take_while` that has seen enough gives none.

    state = begin();  while is_ready(state):  emitted?, state, element = advance(state)
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import tensorflow as tf

from ray_fed.tensorflow.lowering.bodies import CannotLower
from ray_fed.tensorflow.lowering.symbols import Symbol

Function: TypeAlias = Callable[["list[tf.Tensor]"], "list[tf.Tensor]"]
"""From tensors to tensors, in the current graph."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What `advance` gives.

    Attributes:
        emitted: bool[], whether `element` is one; None: it always is.
        state: of the pass after it.
        element: its components.
    """

    emitted: tf.Tensor | None
    state: Any
    element: list[tf.Tensor]


class Stream(Symbol, abc.ABC):
    """A sequence, as far as a pass over it needs.

    Args:
        specs: of an element's components.

    Attributes:
        always_emits: whether each `advance` gives an element.
        has_effects: whether asking for an element does something else beside.
    """

    always_emits: bool
    has_effects: bool

    def __init__(self, specs: Sequence[tf.TensorSpec]) -> None:
        self.specs = tuple(specs)

    @abc.abstractmethod
    def begin(self) -> Any:
        """Return the state of a pass at the front."""

    @abc.abstractmethod
    def is_ready(self, state: Any) -> tf.Tensor:
        """Return whether there is more, bool[]."""

    @abc.abstractmethod
    def advance(self, state: Any) -> Step:
        """Take the next step of a pass that is ready."""

    def alike(self) -> "Sequence[Stream]":
        """Return streams that give the same elements, one after another.

        In each of them all elements are of one shape, as far as can be known.
        """
        return [self]

    def invariants(self, state: Any) -> Any:
        """Return the static shapes of a state at any time."""
        return tf.nest.map_structure(_shape_of, state)


def _shape_of(tensor: tf.Tensor) -> tf.TensorShape:
    return tensor.shape


def where_emitted(
    step: Step,
    then: Callable[[], list[tf.Tensor]],
    otherwise: Callable[[], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """Return what `then` gives where a step gave an element, else `otherwise`."""
    if step.emitted is None:
        return then()
    return choose(step.emitted, then, otherwise)


def choose(
    condition: tf.Tensor,
    then: Callable[[], list[tf.Tensor]],
    otherwise: Callable[[], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """Return the tensors of one of two branches; both give as many."""
    no_convert = tf.autograph.experimental.do_not_convert
    # One more, as TensorFlow has no branches without results.
    marked: Any = tf.cond(
        condition,
        no_convert(lambda: [*then(), tf.zeros([], tf.bool)]),
        no_convert(lambda: [*otherwise(), tf.zeros([], tf.bool)]),
    )
    return list(marked[:-1])


def blank(specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Return an element in the place of none."""
    if any(spec.dtype == tf.variant for spec in specs):
        raise CannotLower("an element of variants that there may not be")
    return [tf.zeros(_blank_shape(spec.shape), spec.dtype) for spec in specs]


def _blank_shape(shape: tf.TensorShape) -> list[int]:
    rank = cast("int | None", shape.rank)
    return [] if rank is None else [size or 0 for size in shape.as_list()]


def shaped(
    element: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Return the components of an element, with the static shapes of their specs."""
    for tensor, spec in zip(element, specs, strict=True):
        tensor.set_shape(spec.shape)
    return list(element)

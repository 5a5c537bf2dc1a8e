"""Iterators and optionals: a pass over a stream whose state is carried along.

The resource of an iterator becomes a symbol with the state of its pass. A rule that
takes an element sets the state; loops and branches carry it as their variables.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

import ray_fed.tensorflow.lowering.passes as passes
import ray_fed.tensorflow.lowering.streams as streams
from ray_fed.tensorflow.lowering.bodies import CannotLower
from ray_fed.tensorflow.lowering.inlining import Rule, Site
from ray_fed.tensorflow.lowering.symbols import Opaque, Symbol


class Iterator(Symbol):
    """A pass over a stream that goes on where it stopped.

    Attributes:
        stream: None before the iterator is made.
        state: of the pass.
        original: the iterator that this is in a loop or branch; else itself.
    """

    moves = True

    def __init__(
        self,
        stream: streams.Stream | None = None,
        state: Any = None,
        original: "Iterator | None" = None,
    ) -> None:
        self.stream = stream
        self.state = state
        self.original = original or self
        self._is_carried = original is not None

    def start(self, stream: streams.Stream) -> None:
        """Begin a pass."""
        if self._is_carried:
            raise CannotLower("an iterator made anew in a loop or branch")
        self.stream = stream
        self.state = stream.begin()

    def opened(self) -> streams.Stream:
        """Return the stream of an iterator that was made."""
        if self.stream is None:
            raise CannotLower("an iterator that was never made")
        return self.stream

    @override
    def leaves(self) -> list[tf.Tensor]:
        return [] if self.stream is None else tf.nest.flatten(self.state)

    @override
    def shapes(self) -> list[tf.TensorShape]:
        if self.stream is None:
            return []
        invariants = self.stream.invariants(self.state)
        return _flat_shapes(self.state, invariants)

    @override
    def with_leaves(self, leaves: Sequence[tf.Tensor]) -> "Iterator":
        state = self.state
        if self.stream is not None:
            state = tf.nest.pack_sequence_as(state, list(leaves))
        return Iterator(self.stream, state, self.original)

    def take(self, leaves: Sequence[tf.Tensor]) -> None:
        """Go on from where a loop or branch left a copy."""
        if self.stream is not None:
            self.state = tf.nest.pack_sequence_as(self.state, list(leaves))

    @override
    def is_like(self, other: Any) -> bool:
        return isinstance(other, Iterator) and other.original is self.original


def _flat_shapes(state: Any, shapes: Any) -> list[tf.TensorShape]:
    """Return the shapes at the leaves of a state."""
    if not isinstance(state, tuple):
        return [shapes]
    pairs = zip(state, shapes, strict=True)
    return [shape for pair in pairs for shape in _flat_shapes(*pair)]


@dataclasses.dataclass(frozen=True, eq=False)
class Optional(Symbol):
    """An element, or none.

    Attributes:
        has_value: bool[].
        element: its components; anything where there is none.
        specs: of the components.
    """

    has_value: tf.Tensor
    element: tuple[tf.Tensor, ...]
    specs: tuple[tf.TensorSpec, ...]

    @override
    def leaves(self) -> list[tf.Tensor]:
        return [self.has_value, *self.element]

    @override
    def shapes(self) -> list[tf.TensorShape]:
        return [tf.TensorShape([]), *(spec.shape for spec in self.specs)]

    @override
    def with_leaves(self, leaves: Sequence[tf.Tensor]) -> "Optional":
        element = streams.shaped(leaves[1:], self.specs)
        return Optional(leaves[0], tuple(element), self.specs)

    @override
    def is_like(self, other: Any) -> bool:
        return isinstance(other, Optional) and len(other.specs) == len(self.specs)


def _new_iterator(site: Site) -> list[Any]:
    outputs = 1 if site.node.op == "AnonymousIteratorV3" else 2
    return [Iterator(), Opaque()][:outputs]


def _make(site: Site) -> list[Any]:
    stream, iterator = site.inputs
    if not isinstance(stream, streams.Stream) or not isinstance(iterator, Iterator):
        raise CannotLower("an iterator from elsewhere")
    iterator.start(stream)
    return []


def _iterator(site: Site) -> Iterator:
    [iterator] = site.inputs
    if not isinstance(iterator, Iterator):
        raise CannotLower("an iterator from elsewhere")
    return iterator


def _take(iterator: Iterator) -> streams.Step:
    step = passes.pull(iterator.opened(), iterator.state)
    iterator.state = step.state
    return step


def _get_next(site: Site) -> "list[Any]":
    step = _take(_iterator(site))
    ended: Any = tf.debugging.Assert(step.emitted, ["End of sequence"])
    with tf.control_dependencies([ended]):
        return [tf.identity(tensor) for tensor in step.element]


def _get_optional(site: Site) -> list[Any]:
    iterator = _iterator(site)
    step = _take(iterator)
    specs = iterator.opened().specs
    emitted: Any = step.emitted
    return [Optional(emitted, tuple(step.element), specs)]


def _optional(site: Site) -> Optional:
    [optional] = site.inputs
    if not isinstance(optional, Optional):
        raise CannotLower("an optional from elsewhere")
    return optional


def _has_value(site: Site) -> "list[Any]":
    return [tf.identity(_optional(site).has_value)]


def _get_value(site: Site) -> "list[Any]":
    optional = _optional(site)
    missing: Any = tf.debugging.Assert(optional.has_value, ["Optional has no value"])
    with tf.control_dependencies([missing]):
        return [tf.identity(tensor) for tensor in optional.element]


def _nothing(site: Site) -> list[Any]:
    del site
    return []


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("AnonymousIterator", "AnonymousIteratorV2", "AnonymousIteratorV3"),
        _new_iterator,
    ),
    "MakeIterator": _make,
    "IteratorGetNext": _get_next,
    "IteratorGetNextSync": _get_next,
    "IteratorGetNextAsOptional": _get_optional,
    "OptionalHasValue": _has_value,
    "OptionalGetValue": _get_value,
    "DeleteIterator": _nothing,
}

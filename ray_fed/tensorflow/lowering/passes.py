"""Passes over streams: loops over all elements, and iterators.

A stream is a sequence whose elements can depend on the elements before them, so a pass
carries a state. `ray_fed.tensorflow.lowering.sequences` defines streams. While a graph
is lowered, an iterator is an object with this state. A rule that takes an element sets
the state, and loops and branches carry it as loop variables.
"""

import contextlib
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

import ray_fed.tensorflow.lowering.sequences as sequences
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.lowering.inlining import (
    Carried,
    IgnoredResource,
    Rule,
    Site,
    TracedValue,
)
from ray_fed.tensorflow.lowering.sequences import (
    Function,
    Indexed,
    Step,
    Stream,
    blank,
    choose,
    shaped,
    where_emitted,
)


class MappedStream(Stream):
    """The results of a function that is applied to each element of a stream."""

    def __init__(
        self, inner: Stream, function: Function, specs: Sequence[tf.TensorSpec]
    ) -> None:
        super().__init__(specs)
        self.always_emits = inner.always_emits
        self.has_effects = True  # so that each element is computed once, in order
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
    """The results of a function from <state, element> to <next state, result>.

    `initial` is the first state. The static `shapes` hold for all states.
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
    """The elements of a stream before the first one for which a predicate is false."""

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


_UNROLLED = 100
"""Maximum number of elements to unroll. Each adds ops to the graph."""


def reduce(
    stream: Stream,
    initial: Sequence[tf.Tensor],
    function: Function,
    shapes: Sequence[tf.TensorShape],
) -> list[tf.Tensor]:
    """Loop over a stream by a function from <state, element> to the next state.

    Return the last state. `initial` is the first state. The static `shapes` hold for
    all states.
    """
    state = list(initial)
    effects: list[tf.Operation] = []
    for part in stream.split_by_shape():
        count = part.num_elements() if isinstance(part, Indexed) else None
        if (
            isinstance(part, Indexed)
            and count is not None
            and (count == 1 or part.unrolled)
        ):
            state = _unroll(part, count, state, function, effects)
        else:
            with _after(effects):
                state = _reduce(part, state, function, shapes)
    return state


@contextlib.contextmanager
def _after(effects: list[tf.Operation]) -> Generator[None]:
    # If the block has effects, they replace the effects in the list.
    ops = tf.compat.v1.get_default_graph().get_operations
    num_ops = len(ops())
    with tf.control_dependencies(effects):
        yield
    effects[:] = [op for op in ops()[num_ops:] if op.op_def.is_stateful] or effects


def _unroll(
    sequence: Indexed,
    count: int,
    initial: Sequence[tf.Tensor],
    function: Function,
    effects: list[tf.Operation],
) -> list[tf.Tensor]:
    if count > _UNROLLED:
        raise Fallback(f"more than {_UNROLLED} elements without a loop")
    state = list(initial)
    drawn = sequence.draw(None)
    for index in range(count):
        with _after(effects):
            element = sequence.element(drawn, tf.constant(index, tf.int64))
            state = function([*state, *shaped(element, sequence.specs)])
    return state


def _reduce(
    stream: Stream,
    initial: Sequence[tf.Tensor],
    function: Function,
    shapes: Sequence[tf.TensorShape],
) -> list[tf.Tensor]:
    @tf.autograph.experimental.do_not_convert
    def goes_on(position: Any, carried: Any) -> tf.Tensor:
        del carried
        return stream.is_ready(position)

    @tf.autograph.experimental.do_not_convert
    def body(position: Any, carried: Any) -> Any:
        step = stream.advance(position)
        following = where_emitted(
            step,
            lambda: function([*carried, *step.element]),
            lambda: [*carried],
        )
        return step.state, tuple(following)

    position = stream.begin()
    _, results = tf.while_loop(
        goes_on,
        body,
        (position, tuple(initial)),
        (stream.invariants(position), tuple(shapes)),
        parallel_iterations=1,  # effects of an iteration precede the next one
    )
    return list(results)


def pull(stream: Stream, state: Any) -> Step:
    """Return the next step of a pass that has an element.

    At the end of the stream, `emitted` of the result is false.
    """
    if stream.always_emits:
        ready = stream.is_ready(state)
        flat = tf.nest.flatten(state)

        def advance() -> list[tf.Tensor]:
            step = stream.advance(state)
            return [*tf.nest.flatten(step.state), *step.element]

        chosen = choose(ready, advance, lambda: [*flat, *blank(stream.specs)])
        after = tf.nest.pack_sequence_as(state, chosen[: len(flat)])
        return Step(ready, after, shaped(chosen[len(flat) :], stream.specs))
    return _search(stream, state)


def _search(stream: Stream, state: Any) -> Step:
    @tf.autograph.experimental.do_not_convert
    def goes_on(emitted: Any, state: Any, element: Any) -> tf.Tensor:
        del element
        return ~emitted & stream.is_ready(state)

    @tf.autograph.experimental.do_not_convert
    def body(emitted: Any, state: Any, element: Any) -> Any:
        del emitted, element
        step = stream.advance(state)
        return step.emitted, step.state, tuple(step.element)

    shapes = tuple(spec.shape for spec in stream.specs)
    emitted, state, element = tf.while_loop(
        goes_on,
        body,
        (tf.zeros([], tf.bool), state, tuple(blank(stream.specs))),
        (tf.TensorShape([]), stream.invariants(state), shapes),
        parallel_iterations=1,
    )
    return Step(emitted, state, list(element))


class Iterator(Carried):
    """An iterator of a dataset: a pass over a stream that can be resumed.

    `stream` is None before the iterator is initialized. `state` is the state of the
    pass. `original` is the object of which this one is a copy in a loop or branch, or
    None if this is not a copy.
    """

    def __init__(
        self,
        stream: sequences.Stream | None = None,
        state: Any = None,
        original: Carried | None = None,
    ) -> None:
        super().__init__(original)
        self.stream = stream
        self.state = state
        self._is_carried = original is not None

    def start(self, stream: sequences.Stream) -> None:
        """Start a pass over a stream."""
        if self._is_carried:
            raise Fallback("an iterator that is initialized again in a loop or branch")
        self.stream = stream
        self.state = stream.begin()

    def opened(self) -> sequences.Stream:
        """Return the stream, or raise Fallback if the iterator is not initialized."""
        if self.stream is None:
            raise Fallback("an iterator that is never initialized")
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

    @override
    def take(self, leaves: Sequence[tf.Tensor]) -> None:
        if self.stream is not None:
            self.state = tf.nest.pack_sequence_as(self.state, list(leaves))


def _flat_shapes(state: Any, shapes: Any) -> list[tf.TensorShape]:
    if not isinstance(state, tuple):
        return [shapes]
    pairs = zip(state, shapes, strict=True)
    return [shape for pair in pairs for shape in _flat_shapes(*pair)]


@dataclasses.dataclass(frozen=True, eq=False)
class Optional(TracedValue):
    """An optional of tf.data: an element, or the end of an iterator.

    Attributes:
        has_value: Whether there is an element, bool[].
        element: Components of the element, or arbitrary tensors if there is none.
        specs: Specs of the components.
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
        element = sequences.shaped(leaves[1:], self.specs)
        return Optional(leaves[0], tuple(element), self.specs)

    @override
    def is_like(self, other: Any) -> bool:
        return isinstance(other, Optional) and len(other.specs) == len(self.specs)


def _new_iterator(site: Site) -> list[Any]:
    outputs = 1 if site.node.op == "AnonymousIteratorV3" else 2
    return [Iterator(), IgnoredResource()][:outputs]


def _make(site: Site) -> list[Any]:
    stream, iterator = site.inputs
    if not isinstance(stream, sequences.Stream) or not isinstance(iterator, Iterator):
        raise Fallback("an iterator from elsewhere")
    iterator.start(stream)
    return []


def _iterator(site: Site) -> Iterator:
    [iterator] = site.inputs
    if not isinstance(iterator, Iterator):
        raise Fallback("an iterator from elsewhere")
    return iterator


def _take(iterator: Iterator) -> sequences.Step:
    step = pull(iterator.opened(), iterator.state)
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
        raise Fallback("an optional from elsewhere")
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


ITERATORS: Mapping[str, Rule] = {
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

"""Sequences that replace datasets of tf.data while a graph is lowered.

A sequence is an object of Python. Its methods add ops to the current graph that compute
elements. A *pass* goes from the first element to the last. It has a state, which is a
nest of tensors. If the state is ready, `advance` returns the next state and usually an
element, which is a list of tensors, its components:

    state = begin();  while is_ready(state):  emitted?, state, element = advance(state)

Most sequences compute an element from its index and from the *draws* of the pass: its
random numbers, such as the order of a shuffle. `draw` returns the draws as tensors, and
all other methods take them. Without shuffles there are none.

    batch(k) of map(f) of a parameter:   element(i) = stack(f(rows[j]) for j in i*k...)

The ops that draw are part of the lowered graph. They get their keys when the graph is
loaded, as all random ops do (`graphs/randomness.py`).
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import tensorflow as tf
from typing_extensions import override

from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.lowering.inlining import TracedValue

Function: TypeAlias = Callable[["list[tf.Tensor]"], "list[tf.Tensor]"]
"""Function from tensors to tensors, in the current graph."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The result of `Stream.advance`.

    Attributes:
        emitted: Whether there is an element, bool[], or None if there always is one.
        state: The next state of the pass.
        element: Components of the element. They are arbitrary if there is none.
    """

    emitted: tf.Tensor | None
    state: Any
    element: list[tf.Tensor]


class Stream(TracedValue, abc.ABC):
    """A sequence whose elements are read one after another.

    Attributes:
        specs: Specs of the components of an element.
        always_emits: Whether each `advance` returns an element.
        has_effects: Whether each element must be read exactly once and in order.
    """

    always_emits: bool
    has_effects: bool

    def __init__(self, specs: Sequence[tf.TensorSpec]) -> None:
        self.specs = tuple(specs)

    @abc.abstractmethod
    def begin(self) -> Any:
        """Return the first state of a pass."""

    @abc.abstractmethod
    def is_ready(self, state: Any) -> tf.Tensor:
        """Return whether a pass goes on, so that `advance` may be called, bool[]."""

    @abc.abstractmethod
    def advance(self, state: Any) -> Step:
        """Return the next step of a pass. The state must be ready."""

    def split_by_shape(self) -> "Sequence[Stream]":
        """Return consecutive streams, each with one static shape if it is known."""
        return [self]

    def invariants(self, state: Any) -> Any:
        """Return the static shapes that a state has throughout a pass."""
        return tf.nest.map_structure(_shape_of, state)


def _shape_of(tensor: tf.Tensor) -> tf.TensorShape:
    return tensor.shape


def where_emitted(
    step: Step,
    then: Callable[[], list[tf.Tensor]],
    otherwise: Callable[[], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """Return `then()` if a step has an element, and `otherwise()` if it has none."""
    if step.emitted is None:
        return then()
    return choose(step.emitted, then, otherwise)


def choose(
    condition: tf.Tensor,
    then: Callable[[], list[tf.Tensor]],
    otherwise: Callable[[], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """Return the tensors of `then` if a condition is true, otherwise of `otherwise`."""
    no_convert = tf.autograph.experimental.do_not_convert
    # In TensorFlow, each branch has a result, so one is added.
    marked: Any = tf.cond(
        condition,
        no_convert(lambda: [*then(), tf.zeros([], tf.bool)]),
        no_convert(lambda: [*otherwise(), tf.zeros([], tf.bool)]),
    )
    return list(marked[:-1])


def blank(specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Return zeros as the components of a missing element."""
    if any(spec.dtype == tf.variant for spec in specs):
        raise Fallback("an element of variants that may be missing")
    return [tf.zeros(_blank_shape(spec.shape), spec.dtype) for spec in specs]


def _blank_shape(shape: tf.TensorShape) -> list[int]:
    rank = cast("int | None", shape.rank)
    return [] if rank is None else [size or 0 for size in shape.as_list()]


def shaped(
    element: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Set the static shapes of an element's components, and return them."""
    for tensor, spec in zip(element, specs, strict=True):
        tensor.set_shape(spec.shape)
    return list(element)


Drawn: TypeAlias = Any
"""The draws of a pass, its random numbers, as a nest of tensors."""
Element: TypeAlias = "list[tf.Tensor]"
"""The components of one element, or of several stacked elements."""

ENDLESS = tf.int64.max
"""The length of an endless sequence."""


@dataclasses.dataclass(frozen=True)
class Traits:
    """The properties of a sequence that decide which rules apply.

    Attributes:
        shuffled: Whether each pass has another order.
        repeatable: Whether an element that is read twice is the same.
        effects: Whether reading an element has effects.
        bounded: Whether the sequence is known to end.
        steady: Whether all passes have the same length.
    """

    shuffled: bool = False
    repeatable: bool = True
    effects: bool = False
    bounded: bool = True
    steady: bool = True

    def __and__(self, other: "Traits") -> "Traits":
        """Return the traits of a sequence that is made of two others with these."""
        return Traits(
            shuffled=self.shuffled or other.shuffled,
            repeatable=self.repeatable and other.repeatable,
            effects=self.effects or other.effects,
            bounded=self.bounded and other.bounded,
            steady=self.steady and other.steady,
        )


class Indexed(Stream, abc.ABC):
    """A sequence that computes elements from their indices and the draws of a pass.

    `unrolled` says whether to unroll a pass if `num_elements` is known.
    """

    always_emits = True
    unrolled = False

    def __init__(self, specs: Sequence[tf.TensorSpec], traits: Traits) -> None:
        super().__init__(specs)
        self.traits = traits
        self.has_effects = traits.effects or not traits.repeatable

    def draw(self, limit: tf.Tensor | None) -> Drawn:
        """Return the draws of a pass over `limit` elements, or over all with None."""
        del limit
        return ()

    @abc.abstractmethod
    def length(self, drawn: Drawn) -> tf.Tensor:
        """Return the number of elements, i64[], or `ENDLESS`."""

    @abc.abstractmethod
    def element(self, drawn: Drawn, index: tf.Tensor) -> Element:
        """Return the element at an index, i64[]."""

    def gather(self, drawn: Drawn, indices: tf.Tensor) -> Element:
        """Return the elements at some indices, i64[n] with n > 0, stacked."""
        if any(spec.dtype == tf.variant for spec in self.specs):
            raise Fallback("a batch of variants")

        @tf.autograph.experimental.do_not_convert
        def at(index: tf.Tensor) -> Element:
            return self.element(drawn, index)

        stacked: Any = tf.map_fn(
            at,
            indices,
            fn_output_signature=list(self.specs),
            parallel_iterations=1 if self.has_effects else None,
        )
        return list(stacked)

    def span(self, drawn: Drawn, start: tf.Tensor, stop: tf.Tensor) -> Element:
        """Return the elements from `start` up to `stop`, stacked, at least one."""
        return self.gather(drawn, tf.range(start, stop))

    def num_elements(self) -> int | None:
        """Return the number of elements, or None if the graph must compute it."""
        return None

    def block(self, drawn: Drawn, start: tf.Tensor, size: int) -> Element:
        """Return `size` elements from the index `start` on, stacked."""
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
    def advance(self, state: Any) -> Step:
        index, length, drawn = state
        element = shaped(self.element(drawn, index), self.specs)
        return Step(None, (index + 1, length, drawn), element)


class InMemorySequence(Indexed):
    """A sequence of an argument or of a tensor, in columns as in a `ColumnarSequence`.

    Args:
        specs: Specs of an element's components.
        columns: For each component, the rows of all elements, and splits: the first row
            of each element, and then the number of rows, i64[n + 1, 1]. If splits are
            None, row `i` is element `i`.
        length: Number of elements, i64[].
        num_elements: Number of elements, or None if the graph must compute it.
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
        # This takes half as many ops as slicing with two scalars.
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


class RangeSequence(Indexed):
    """The numbers of a range from `start` up to `stop` by `step`, i64[] each."""

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


class Derived(Indexed, abc.ABC):
    """A sequence made of an inner one, by default with the inner draws and length."""

    def __init__(
        self, inner: Indexed, specs: Sequence[tf.TensorSpec], traits: Traits
    ) -> None:
        super().__init__(specs, traits)
        self._inner = inner

    def _drawn_inside(self, drawn: Drawn) -> Drawn:
        """Return the draws of the inner sequence, a part of the draws of this one."""
        return drawn

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        return self._inner.draw(limit)

    @override
    def length(self, drawn: Drawn) -> tf.Tensor:
        return self._inner.length(self._drawn_inside(drawn))


class Reindexed(Derived, abc.ABC):
    """A sequence that reorders, repeats or drops the elements of an inner sequence.

    Subclasses map an index in this sequence to an index in the inner one.
    """

    def __init__(self, inner: Indexed, traits: Traits) -> None:
        super().__init__(inner, inner.specs, traits)

    @abc.abstractmethod
    def _index(self, drawn: Drawn, index: tf.Tensor) -> tf.Tensor:
        """Return the inner index of `index`, or of each index if it is a vector."""

    @override
    def element(self, drawn: Drawn, index: tf.Tensor) -> Element:
        inside = self._drawn_inside(drawn)
        return self._inner.element(inside, self._index(drawn, index))

    @override
    def gather(self, drawn: Drawn, indices: tf.Tensor) -> Element:
        inside = self._drawn_inside(drawn)
        return self._inner.gather(inside, self._index(drawn, indices))


class Chosen(Reindexed):
    """Inner elements at indices that a pass draws: its draws are (inner, indices)."""

    @override
    def _drawn_inside(self, drawn: Drawn) -> Drawn:
        return drawn[0]

    @override
    def _index(self, drawn: Drawn, index: tf.Tensor) -> tf.Tensor:
        return tf.gather(drawn[1], index)


class Taken(Reindexed):
    """The first `count` elements, or all if `count` is negative."""

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
        count = self._count if limit is None else tf.minimum(limit, self._count)
        return self._inner.draw(count)

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
    """All elements after the first `count`, or none if `count` is negative."""

    def __init__(self, inner: Indexed, count: tf.Tensor) -> None:
        check_pure(inner, "skipped")
        super().__init__(inner, inner.traits)
        self._count = tf.where(count < 0, ENDLESS, count)

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        if limit is None:
            return self._inner.draw(None)
        # The sum cannot overflow, even if all elements are skipped.
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
    """Every `num_shards`-th element, starting at index `shard`."""

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
    """A sequence repeated `count` times in the same order, or forever if negative."""

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


class Filtered(Chosen):
    """The elements for which a predicate without effects is true.

    The predicate tests all inner elements when a pass begins.
    """

    def __init__(self, inner: Indexed, predicate: Callable[[Element], Element]) -> None:
        check_pure(inner, "filtered")
        if not (inner.traits.repeatable and inner.traits.bounded):
            raise Fallback("a filter of random or endless elements")
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
    def length(self, drawn: Drawn) -> tf.Tensor:
        return tf.size(drawn[1], tf.int64)


def static(tensor: tf.Tensor) -> int | None:
    """Return the value of a tensor, or None if the graph must compute it."""
    value: Any = tf.get_static_value(tensor)
    return None if value is None else int(value)


def check_pure(inner: Indexed, what: str) -> None:
    """Raise Fallback for elements with effects, as not all are read once in order."""
    if inner.traits.effects:
        raise Fallback(f"elements with effects, {what}")


def repeated_traits(inner: Indexed, count: tf.Tensor) -> Traits:
    """Return the traits of a sequence that repeats another one `count` times."""
    known = static(count)
    bounded = inner.traits.bounded and known is not None and known >= 0
    return dataclasses.replace(inner.traits, bounded=bounded)


def repeated_length(length: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return the length of `length` elements repeated `count` times, or `ENDLESS`."""
    is_endless = (length > 0) & ((count < 0) | tf.equal(length, ENDLESS) & (count > 0))
    return tf.where(is_endless, ENDLESS, length * tf.maximum(count, 0))


class ByElement(Derived, abc.ABC):
    """A sequence with one element for each element of an inner sequence."""

    def __init__(
        self, inner: Indexed, specs: Sequence[tf.TensorSpec], traits: Traits
    ) -> None:
        super().__init__(inner, specs, traits)
        self.unrolled = inner.unrolled

    @abc.abstractmethod
    def _made_of(self, inner: Indexed) -> Indexed:
        """Return a sequence like this one, made of another inner sequence."""

    @override
    def num_elements(self) -> int | None:
        return self._inner.num_elements()

    @override
    def split_by_shape(self) -> "Sequence[Stream]":
        parts = self._inner.split_by_shape()
        return [self._made_of(part) for part in parts if isinstance(part, Indexed)]


class Mapped(ByElement):
    """The results of a function of each element. `traits` belong to the function."""

    def __init__(
        self,
        inner: Indexed,
        function: Callable[[Element], Element],
        specs: Sequence[tf.TensorSpec],
        traits: Traits,
    ) -> None:
        super().__init__(inner, specs, inner.traits & traits)
        self._function = function

    @override
    def _made_of(self, inner: Indexed) -> Indexed:
        return Mapped(inner, self._function, self.specs, self.traits)

    @override
    def element(self, drawn: Drawn, index: tf.Tensor) -> Element:
        inner = self._inner
        return self._function(shaped(inner.element(drawn, index), inner.specs))


class Selected(ByElement):
    """Some components of each element. `positions` has their indices in order."""

    def __init__(self, inner: Indexed, positions: Sequence[int]) -> None:
        super().__init__(inner, [inner.specs[p] for p in positions], inner.traits)
        self._positions = positions

    @override
    def _made_of(self, inner: Indexed) -> Indexed:
        return Selected(inner, self._positions)

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


class Batched(Derived):
    """Batches of `size` elements, i64[] and > 0.

    `drop_remainder`, bool[], says whether to drop the last batch if it is smaller.
    """

    def __init__(
        self,
        inner: Indexed,
        size: tf.Tensor,
        drop_remainder: tf.Tensor,
        specs: Sequence[tf.TensorSpec],
    ) -> None:
        super().__init__(inner, specs, inner.traits)
        self.unrolled = inner.unrolled
        self._size = size
        self._drop_remainder = drop_remainder

    def _known(self) -> tuple[int, int] | None:
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
    def split_by_shape(self) -> "Sequence[Stream]":
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


class Ending(Derived):
    """A sequence of one batch: the last `size` elements, from the index `start` on."""

    def __init__(
        self, inner: Indexed, start: int, size: int, specs: Sequence[tf.TensorSpec]
    ) -> None:
        super().__init__(inner, specs, inner.traits)
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
    """Tuples of the elements of several sequences, up to the shortest."""

    def __init__(self, inners: Sequence[Indexed]) -> None:
        traits = inners[0].traits
        for inner in inners[1:]:
            traits = traits & inner.traits
        # It ends with the shortest sequence, so one bounded sequence is enough.
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


def draw_order(length: tf.Tensor, buffer: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
    """Return the first indices of a shuffle, i64[min(length, limit)].

    The distribution is the same as in tf.data, which fills a buffer with elements. Each
    step returns a random element of the buffer, and puts the next element into its
    slot. At the end, the elements in the buffer are returned in random order.

    All arguments are i64[]. A negative `buffer` holds all elements.
    """
    # A step returns the element that an earlier step with the same slot put there last
    # or, without such a step, the slot's first element. Sorting the steps by slot finds
    # it without a loop over elements.
    buffer = tf.minimum(tf.where(buffer < 0, length, buffer), length)
    asked = tf.minimum(length, limit)
    steps = tf.minimum(length - buffer, asked)
    # The upper bound must be positive, even if nothing is drawn.
    top = tf.maximum(buffer, 1)
    slots = tf.random.uniform(steps[tf.newaxis], 0, top, tf.int64)
    # Sorted by slot, the step before a step is the previous one with the same slot.
    by_slot: Any = tf.argsort(slots, stable=True)
    sorted_slots = tf.gather(slots, by_slot)
    arrivals = tf.cast(by_slot, tf.int64) + buffer  # the element that a step put in
    is_first = tf.concat(
        [[True], tf.not_equal(sorted_slots[1:], sorted_slots[:-1])], 0
    )[:steps]
    before = tf.concat([[0], arrivals[:-1]], 0)[:steps]
    order = tf.where(is_first, sorted_slots, before)
    order = tf.gather(order, tf.math.invert_permutation(by_slot))
    # Each slot still has its last element, or its first one if no step chose it.
    last: Any = tf.math.unsorted_segment_max(tf.range(steps) + buffer, slots, buffer)
    left = tf.random.shuffle(tf.maximum(last, tf.range(buffer)))
    return tf.concat([order, left[: asked - steps]], 0)


class Shuffled(Chosen):
    """The elements of a sequence, shuffled in each pass. `buffer`: see `draw_order`."""

    def __init__(self, inner: Indexed, buffer: tf.Tensor) -> None:
        check_pure(inner, "shuffled")
        if static(buffer) == 0:
            raise Fallback("a shuffle with an empty buffer")
        super().__init__(inner, dataclasses.replace(inner.traits, shuffled=True))
        self.inner = inner
        self.buffer = buffer

    @override
    def draw(self, limit: tf.Tensor | None) -> Drawn:
        if limit is None and not self.inner.traits.bounded:
            raise Fallback("an endless shuffle")
        ahead = None
        if limit is not None and (static(self.buffer) or 0) > 0:
            ahead = limit + self.buffer
        drawn = self.inner.draw(ahead)
        length = self.inner.length(drawn)
        order = draw_order(length, self.buffer, length if limit is None else limit)
        return drawn, order


class FixedOrder(Reindexed):
    """The elements of a sequence, shuffled once. All passes have the same order."""

    def __init__(self, inner: Indexed, buffer: tf.Tensor) -> None:
        check_pure(inner, "shuffled")
        if not inner.traits.bounded or inner.traits.shuffled or static(buffer) == 0:
            raise Fallback("a shuffle in a fixed order of endless or shuffled elements")
        super().__init__(inner, inner.traits)
        length = inner.length(inner.draw(None))
        self._order = draw_order(length, buffer, length)

    @override
    def _index(self, drawn: Drawn, index: tf.Tensor) -> tf.Tensor:
        return tf.gather(self._order, index)


class _Epochs:
    """Counts the epochs that a pass over a repeated sequence needs draws for."""

    def __init__(self, inner: Indexed, count: tf.Tensor) -> None:
        self._is_endless = not repeated_traits(inner, count).bounded
        self._count = count

    def number(self, length: tf.Tensor, limit: tf.Tensor | None) -> tf.Tensor:
        if limit is None:
            if self._is_endless:
                raise Fallback("an endless shuffle")
            return tf.maximum(self._count, 1)
        # As many epochs as have `limit` elements. The first is always drawn, because
        # its draws give the others their shapes.
        asked = tf.maximum((limit - 1) // tf.maximum(length, 1) + 1, 1)
        return tf.where(self._count < 0, asked, tf.minimum(asked, self._count))


def _joined(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    return tf.concat([first, second], 0)


def _any_number(tensor: tf.Tensor) -> tf.TensorShape:
    return tf.TensorShape([None]).concatenate(tensor.shape[1:])


def _stacked(tensor: tf.Tensor) -> tf.Tensor:
    return tensor[tf.newaxis]


def _concatenate(first: Any, number: tf.Tensor, draw: Any) -> Any:

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


class ShuffledEpochs(Chosen):
    """A shuffled sequence that is repeated, each time in another order."""

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
    def length(self, drawn: Drawn) -> tf.Tensor:
        return repeated_length(self._inner.length(drawn[0]), self._count)


class DrawnEpochs(Derived):
    """A sequence with a shuffle inside that is repeated, with new draws each time."""

    def __init__(self, inner: Indexed, count: tf.Tensor) -> None:
        if not (inner.traits.steady and inner.traits.bounded):
            raise Fallback("a repeated shuffle whose length may change")
        super().__init__(inner, inner.specs, repeated_traits(inner, count))
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
    """Return a sequence repeated `count` times, or forever if negative."""
    if not inner.traits.shuffled:
        return Repeated(inner, count)
    if isinstance(inner, Shuffled) and not inner.inner.traits.shuffled:
        return ShuffledEpochs(inner, count)
    return DrawnEpochs(inner, count)

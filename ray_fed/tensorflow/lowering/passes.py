"""Passes over a stream: all of it, in a loop; or up to the next element."""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf

from ray_fed.tensorflow.lowering.bodies import CannotLower
from ray_fed.tensorflow.lowering.indexed import Indexed
from ray_fed.tensorflow.lowering.streams import (
    Function,
    Step,
    Stream,
    blank,
    choose,
    shaped,
    where_emitted,
)

_UNROLLED = 100
"""Elements that a pass without a loop takes; each adds its ops to the graph."""


def reduce(
    stream: Stream,
    initial: Sequence[tf.Tensor],
    function: Function,
    shapes: Sequence[tf.TensorShape],
) -> list[tf.Tensor]:
    """Return the state after a function of state and element took each element.

    Args:
        stream: the elements.
        initial: state.
        function: from state and element to the new state.
        shapes: of the state at any time.
    """
    state = list(initial)
    effects: list[tf.Operation] = []
    for part in stream.alike():
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
    """Have what is built inside run after some effects; list its own instead, if any.

    What a loop runs is in order; what stands in a graph one after another is not.
    """
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
        raise CannotLower(f"more than {_UNROLLED} elements without a loop")
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
        taken = where_emitted(
            step,
            lambda: function([*carried, *step.element]),
            lambda: [*carried],
        )
        return step.state, tuple(taken)

    position = stream.begin()
    _, results = tf.while_loop(
        goes_on,
        body,
        (position, tuple(initial)),
        (stream.invariants(position), tuple(shapes)),
        parallel_iterations=1,  # effects of one iteration are before the next
    )
    return list(results)


def pull(stream: Stream, state: Any) -> Step:
    """Return the next step that gives an element; `emitted` where there was one."""
    if stream.always_emits:
        ready = stream.is_ready(state)
        flat = tf.nest.flatten(state)

        def advance() -> list[tf.Tensor]:
            step = stream.advance(state)
            return [*tf.nest.flatten(step.state), *step.element]

        found = choose(ready, advance, lambda: [*flat, *blank(stream.specs)])
        after = tf.nest.pack_sequence_as(state, found[: len(flat)])
        return Step(ready, after, shaped(found[len(flat) :], stream.specs))
    return _search(stream, state)


def _search(stream: Stream, state: Any) -> Step:
    @tf.autograph.experimental.do_not_convert
    def goes_on(found: Any, state: Any, element: Any) -> tf.Tensor:
        del element
        return ~found & stream.is_ready(state)

    @tf.autograph.experimental.do_not_convert
    def body(found: Any, state: Any, element: Any) -> Any:
        del found, element
        step = stream.advance(state)
        return step.emitted, step.state, tuple(step.element)

    shapes = tuple(spec.shape for spec in stream.specs)
    found, state, element = tf.while_loop(
        goes_on,
        body,
        (tf.zeros([], tf.bool), state, tuple(blank(stream.specs))),
        (tf.TensorShape([]), stream.invariants(state), shapes),
        parallel_iterations=1,
    )
    return Step(found, state, list(element))

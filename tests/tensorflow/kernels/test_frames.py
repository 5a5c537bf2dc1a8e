"""Loops written as frames: the same results and effects, and what is entered once."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import ray_fed.tensorflow.graphs.loader as loader
import ray_fed.tensorflow.kernels.graph_functions as graph_functions

Function = Callable[..., Any]


def framed(function: Function, *arguments: Any) -> tuple[Any, list[Any]]:
    """Return the graph of a function after the rewriting, and its results."""
    graph = tf.Graph()
    with graph.as_default():
        fed = [tf.compat.v1.placeholder(tf.as_dtype(a.dtype), []) for a in arguments]
        results = [tf.identity(tensor) for tensor in function(*fed)]
    feeds, fetches = ([t.name for t in ends] for ends in (fed, results))
    written = graph_functions.write_frames(graph.as_graph_def(), [*feeds, *fetches])
    run = loader.import_function(written, feeds, fetches)
    return written, [tensor.numpy().tolist() for tensor in run(list(arguments))]


def counts_of(graph_def: Any, *, is_constant: bool) -> int:
    enters = [node for node in graph_def.node if node.op == "Enter"]
    return sum(node.attr["is_constant"].b == is_constant for node in enters)


def repeated(count: Any, step: Function, start: list[Any]) -> Any:
    def goes_on(index: Any, *_: Any) -> Any:
        return index < count

    return tf.while_loop(goes_on, step, start)


def power(base: Any, count: Any) -> list[Any]:
    def step(index: Any, product: Any) -> list[Any]:
        return [index + 1, product * base]

    return repeated(count, step, [0, tf.ones([])])


def powers_summed(base: Any, count: Any) -> list[Any]:
    def step(index: Any, total: Any) -> list[Any]:
        return [index + 1, total + power(base, index)[1]]

    return repeated(count, step, [0, tf.zeros([])])


def swapped(base: Any, count: Any) -> list[Any]:
    def step(index: Any, one: Any, other: Any) -> list[Any]:
        return [index + 1, other, one]

    start = [0, base, -base]
    return repeated(count, step, start)


def replaced(base: Any, count: Any) -> list[Any]:
    def step(index: Any, _: Any) -> list[Any]:
        return [index + 1, base]

    return repeated(count, step, [0, tf.zeros([])])


def branching(base: Any, count: Any) -> list[Any]:
    def step(index: Any, total: Any) -> list[Any]:
        even = tf.equal(index % 2, 0)
        return [index + 1, tf.cond(even, lambda: total + base, lambda: total * 2.0)]

    return repeated(count, step, [0, tf.ones([])])


def passed_on(base: Any, count: Any) -> list[Any]:
    def step(index: Any, kept: Any) -> list[Any]:
        return [index + 1, tf.identity(kept)]

    index, kept = repeated(count, step, [0, base])
    return [index, kept + 1.0]


def calling(_: Any, count: Any) -> list[Any]:
    @tf.function
    def tripled(value: Any) -> Any:
        return value * tf.constant(3.0)

    def step(index: Any, total: Any) -> list[Any]:
        return [index + 1, total + tripled(total)]

    return repeated(count, step, [0, tf.ones([])])


CASES: dict[str, tuple[Function, list[Any], list[Any]]] = {
    "a loop": (power, [3, 8.0], [0, 1.0]),
    "nested loops": (powers_summed, [3, 7.0], [0, 0.0]),
    "variables that swap": (swapped, [3, -2.0, 2.0], [0, 2.0, -2.0]),
    "a variable set to a constant": (replaced, [3, 2.0], [0, 0.0]),
    "branches": (branching, [3, 8.0], [0, 1.0]),
    "a function with a constant": (calling, [3, 64.0], [0, 1.0]),
    "a variable passed on": (passed_on, [3, 3.0], [0, 3.0]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [3, 0], ids=["iterations", "none"])
def test_frames_have_the_results_of_the_loop(case: str, count: int) -> None:
    function, *expected = CASES[case]

    written, found = framed(function, tf.constant(2.0), tf.constant(count))

    assert found == expected[count == 0]
    assert not any("While" in node.op for node in written.node)


def test_what_no_iteration_changes_is_entered_once() -> None:
    written, _ = framed(power, tf.constant(2.0), tf.constant(3))

    loops = [node for node in written.node if node.op == "NextIteration"]
    assert len(loops) == counts_of(written, is_constant=False)
    assert len(loops) == 2  # without TensorFlow's count of iterations
    assert counts_of(written, is_constant=True) >= 2  # base and count


def test_effects_of_what_only_comes_from_outside_run_once_an_iteration() -> None:
    name = "effects of frames"
    counter = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=name)
    tf.raw_ops.AssignVariableOp(resource=counter, value=tf.constant(0))

    def count_up(times: Any) -> list[Any]:
        handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=name)

        def step(index: Any) -> list[Any]:
            added = tf.raw_ops.AssignAddVariableOp(resource=handle, value=times)
            with tf.control_dependencies([added]):
                return [index + 1]

        counted = repeated(times, step, [0])
        with tf.control_dependencies(tf.nest.flatten(counted)):
            read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int32)
        return [*tf.nest.flatten(counted), read]

    _, found = framed(count_up, tf.constant(3))

    tf.raw_ops.DestroyResourceOp(resource=counter)
    assert found == [3, 9]


def test_loop_in_a_called_function_is_left() -> None:
    @tf.function
    def inner(base: Any) -> Any:
        return power(base, 3)[1]

    def called(base: Any) -> list[Any]:
        return [inner(base)]

    written, found = framed(called, tf.constant(2.0))

    assert found == [8.0]
    assert counts_of(written, is_constant=True) == 0


def test_what_is_not_asked_for_is_left_out() -> None:
    def unused_loop(base: Any) -> list[Any]:
        power(base, 3)
        return [base + 1]

    written, found = framed(unused_loop, tf.constant(2.0))

    assert found == [3.0]
    assert counts_of(written, is_constant=False) == 0

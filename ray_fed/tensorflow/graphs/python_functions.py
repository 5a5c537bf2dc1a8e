"""Finds the Python functions of a graph, and refuses those of another process.

A graph holds no Python function, only a number for it (`pyfunc_0`) in a table of the
process that wrote the graph. Another process may have another function under that
number, so the table cannot tell whether a graph may run. The graph itself can: a
traced graph with such functions names the process that traced it.
"""

import functools
import os
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import ray_fed.errors as errors
from ray_fed.tensorflow.graphs import origins
from ray_fed.tensorflow.graphs.protobufs import GraphDef

_OPS = frozenset({"EagerPyFunc", "GeneratorDataset", "PyFunc", "PyFuncStateless"})
_KEY = "ray_fed process"
"""In the graph's debug information; the name of no node, as in `origins`."""


def write_process(graph_def: GraphDef) -> None:
    """Note in a graph with Python functions that this process traced it."""
    if any(_found(graph_def)):
        frames = graph_def.debug_info.traces[_KEY].file_line_cols
        frames.add(func=_this_process())


def check_process(graph_def: GraphDef) -> None:
    """Raise unless the Python functions of a graph, if any, are of this process.

    Args:
        graph_def: with its debug information.

    Raises:
        UnsupportedError: another process traced them, or it is not known which.
    """
    if any(_found(graph_def)) and _process_of(graph_def) != _this_process():
        raise _stays_error(graph_def)


def check_absent(graph_def: GraphDef) -> None:
    """Raise if a graph has Python functions, as before it is sent elsewhere.

    Raises:
        UnsupportedError: it has.
    """
    if any(_found(graph_def)):
        raise _stays_error(graph_def)


def _found(graph_def: GraphDef) -> Iterator[str]:
    """Yield the kinds of the ops that call Python functions."""
    bodies: list[Iterable[Any]] = [graph_def.node]
    bodies += [function.node_def for function in graph_def.library.function]
    for nodes in bodies:
        yield from (node.op for node in nodes if node.op in _OPS)


def _process_of(graph_def: GraphDef) -> str | None:
    traces = graph_def.debug_info.traces
    return traces[_KEY].file_line_cols[0].func if _KEY in traces else None


def _this_process() -> str:
    return f"{_token()} {os.getpid()}"  # a fork has the token, and numbers of its own


@functools.cache
def _token() -> str:
    return uuid.uuid4().hex


def _stays_error(graph_def: GraphDef) -> errors.UnsupportedError:
    kinds = ", ".join(sorted(set(_found(graph_def))))
    return errors.UnsupportedError(
        f"Expected TensorFlow's own operations in {origins.read(graph_def)}, found"
        f" Python functions ({kinds}) that would run in another process than the one"
        " that traced them. A tf.py_function, a tf.numpy_function and a"
        " Dataset.from_generator stay in the process that made it: use TensorFlow's"
        ' own operations, or Config(backend="local") in that process.'
    )

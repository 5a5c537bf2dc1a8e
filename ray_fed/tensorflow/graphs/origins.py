"""Where a computation and its nodes were traced: lines that travel in its graph.

They stand where TensorFlow itself keeps the source of nodes, in the graph's debug
information; that of the computation under a key that is the name of no node. So no op
and no tensor of the graph differs, those who do not know the key pass over it, and what
a graph draws or computes never depends on it. A node has a line where the user's code
made it: the function that is traced, or a layer, a loss or a metric that ray_fed calls.
Of a file only the last part of its path is kept: a message may travel further than a
home directory should.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

import ray_fed.tracebacks as tracebacks
from ray_fed.tensorflow.graphs.protobufs import GraphDef

_KEY = "ray_fed computation"


class Place(NamedTuple):
    """A line of the user's code.

    Attributes:
        file: the last part of its path.
        line: its number.
        name: of the function.
    """

    file: str
    line: int
    name: str


def write(graph_def: GraphDef, fn: Callable[..., Any]) -> None:
    """Note in a GraphDef which Python function it was traced from."""
    function = _innermost(fn)
    name = getattr(function, "__name__", type(function).__name__)
    called = function if hasattr(function, "__code__") else type(function).__call__
    code = getattr(called, "__code__", None)
    frame = graph_def.debug_info.traces[_KEY].file_line_cols.add(func=name)
    if code is not None and not tracebacks.is_own(code.co_filename):
        graph_def.debug_info.files.append(tracebacks.short_file(code.co_filename))
        frame.line = code.co_firstlineno


def read(graph_def: GraphDef) -> str:
    """Return what an error calls the computation: what `write` noted, if it did."""
    debug_info = graph_def.debug_info
    if _KEY not in debug_info.traces:
        return "a TensorFlow computation"
    (frame,) = debug_info.traces[_KEY].file_line_cols
    line = f" ({debug_info.files[0]}:{frame.line})" if frame.line else ""
    return f"the computation `{frame.func}`{line}"


def _innermost(fn: Any) -> Any:
    """Return the function that a user wrote, inside of what wraps it."""
    fn = inspect.unwrap(getattr(fn, "python_function", fn))
    while isinstance(fn, functools.partial):
        fn = inspect.unwrap(fn.func)
    return getattr(fn, "__func__", fn)


def write_places(graph_def: GraphDef, graph: tf.Graph) -> None:
    """Note in a GraphDef which lines of the user's code made its nodes."""
    places: dict[str, Place | None] = {}
    searched: set[str] = set()  # scopes of layers that the user did not write
    for each in _with_functions(graph):
        for op in each.get_operations():
            place = _place_of(op, searched)
            if place is not None:
                known = places.setdefault(op.name, place)
                if known != place:  # functions may have nodes of one name
                    places[op.name] = None
    debug_info = graph_def.debug_info
    files: dict[str, int] = {}
    for name, place in places.items():
        if place is None:
            continue
        frame = debug_info.traces[name].file_line_cols.add(
            func=place.name, line=place.line
        )
        if place.file not in files:
            files[place.file] = len(debug_info.files)
            debug_info.files.append(place.file)
        frame.file_index = files[place.file]


def find_place(graph_def: GraphDef, text: str) -> str:
    """Return a sentence on the line that made the node an error's text names, or ""."""
    debug_info = graph_def.debug_info
    node = _NODE.search(text)
    named = [node[1]] if node else []
    for name in _with_parents([*named, *_NAME.findall(text)]):
        if name in debug_info.traces and name != _KEY:
            frame = debug_info.traces[name].file_line_cols[0]
            line = f"{debug_info.files[frame.file_index]}:{frame.line}"
            return f"At {line}, in `{frame.func}` (`{name}`)."
    if node and node[1].count("/") > 1:  # model/layer/op
        return f"At `{node[1]}`."
    return ""


_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_NAME = re.compile(r"\((\w[\w./>-]*/[\w./>-]+):\d+\)")
"""Of a tensor, in what an assertion shows."""


def _with_parents(names: Iterable[str]) -> Iterator[str]:
    """Yield names of nodes; each without a number at its end; then its scopes."""
    for name in names:
        parts = name.split("/")
        for end in range(len(parts), 0, -1):
            scope = "/".join(parts[:end])
            yield scope
            yield re.sub(r"_\d+$", "", scope)


def _with_functions(graph: tf.Graph) -> list[tf.Graph]:
    """Return a graph and the bodies of its functions, each once."""
    graphs = {id(graph): graph}
    pending = [graph]
    while pending:
        for function in pending.pop()._functions.values():  # noqa: SLF001 (no other)
            body = getattr(function, "graph", None)
            if body is not None and id(body) not in graphs:
                graphs[id(body)] = body
                pending.append(body)
    return list(graphs.values())


def _place_of(op: tf.Operation, searched: set[str]) -> Place | None:
    """Return the innermost line of the user's code inside of what ray_fed traces.

    A frame takes 15 us to read (2026), the last one that is not TensorFlow's 6 us.
    """
    stack: Any = op.traceback
    if stack is None:  # of a computation that is called inside
        return None
    frame = stack.last_user_frame()
    if tracebacks.is_of_user(frame.filename):
        return Place(tracebacks.short_file(frame.filename), frame.lineno, frame.name)
    layer = op.name.split("/")[:-1][:2]  # of a model
    scope = "/".join(layer)
    if scope in searched or not (scope or op.type == "Assert"):
        return None
    for index in range(len(stack) - 1, -1, -1):
        frame = stack[index]
        if tracebacks.is_own(frame.filename):
            break
        if tracebacks.is_of_user(frame.filename):
            file = tracebacks.short_file(frame.filename)
            return Place(file, frame.lineno, frame.name)
    searched.add(scope)
    return None

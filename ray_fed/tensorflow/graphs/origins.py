"""Where a computation was traced: a name and a line that travel in its graph.

They stand where TensorFlow itself keeps the source of nodes, in the graph's debug
information, under a key that is the name of no node. So no op and no tensor of the
graph differs, those who do not know the key pass over it, and what a graph draws or
computes never depends on it. Of a file only the last part of its path is kept: a
message may travel further than a home directory should.
"""

import functools
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

from ray_fed.tensorflow.graphs.protobufs import GraphDef

_KEY = "ray_fed computation"


def write(graph_def: GraphDef, fn: Callable[..., Any]) -> None:
    """Note in a GraphDef which Python function it was traced from."""
    function = _innermost(fn)
    name = getattr(function, "__name__", type(function).__name__)
    called = function if hasattr(function, "__code__") else type(function).__call__
    code = getattr(called, "__code__", None)
    frame = graph_def.debug_info.traces[_KEY].file_line_cols.add(func=name)
    if code is not None:
        graph_def.debug_info.files.append(_short_file(code.co_filename))
        frame.line = code.co_firstlineno


def read(graph_def: GraphDef) -> str:
    """Return what an error calls the computation: what `write` noted, if it did."""
    debug_info = graph_def.debug_info
    if _KEY not in debug_info.traces:
        return "a TensorFlow computation"
    (frame,) = debug_info.traces[_KEY].file_line_cols
    line = f" ({debug_info.files[0]}:{frame.line})" if debug_info.files else ""
    return f"the computation `{frame.func}`{line}"


def _innermost(fn: Any) -> Any:
    """Return the function that a user wrote, inside of what wraps it."""
    fn = inspect.unwrap(getattr(fn, "python_function", fn))
    while isinstance(fn, functools.partial):
        fn = inspect.unwrap(fn.func)
    return getattr(fn, "__func__", fn)


def _short_file(filename: str) -> str:
    if filename.startswith("<"):  # <stdin>, <string>
        return filename
    path = pathlib.PurePath(filename)
    if path.parent.name.startswith("ipykernel_"):  # a hash of the cell's text
        return "<cell>"
    return path.name

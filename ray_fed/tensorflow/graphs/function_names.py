"""Names of the functions that a graph has in its library.

TensorFlow counts the functions that a process traces, and the count is part of their
names. Named by their places in the graph, the same code makes the same graph, however
much was traced before.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ray_fed.tensorflow.graphs.protobufs import GraphDef, NodeDef

_ADDED = re.compile(r"^__(?:inference|forward|backward)_|(?:_\d+)+$")
"""What TensorFlow adds to a function's own name, as in `__inference_train_362`."""


def name_by_place(graph_def: GraphDef) -> None:
    """Name and order functions by the first place where each is called, in place.

    Functions that no node calls stay behind them, by their names.
    """
    library = graph_def.library
    functions = {each.signature.name: each for each in library.function}
    called = list(_calls_of(graph_def.node, functions))
    names = [*called, *sorted(functions.keys() - set(called))]
    copies = [copy.deepcopy(functions[name]) for name in names]
    library.ClearField("function")
    library.function.extend(copies)
    own = {name: _ADDED.sub("", name) for name in names}
    rename(graph_def, {name: f"{own[name]}_{i}" for i, name in enumerate(names)})


def _calls_of(nodes: Iterable[NodeDef], functions: Mapping[str, Any]) -> Iterator[str]:
    """Yield the functions that nodes call, and those that these call, once each."""
    pending = [iter(nodes)]
    seen: set[str] = set()
    while pending:
        node = next(pending[-1], None)
        if node is None:
            pending.pop()
            continue
        for name in _names_in(node):
            if name in functions and name not in seen:
                seen.add(name)
                yield name
                pending.append(iter(functions[name].node_def))


def _names_in(node: NodeDef) -> Iterator[str]:
    yield node.op
    for key in sorted(node.attr):
        yield from _named_functions(node.attr[key])


def _named_functions(value: Any) -> Iterator[str]:
    for function in [value.func] if value.HasField("func") else value.list.func:
        yield function.name
        for key in sorted(function.attr):
            yield from _named_functions(function.attr[key])


def rename(graph_def: GraphDef, renamed: Mapping[str, str]) -> None:
    """Give library functions of a GraphDef other names, in place, wherever they stand.

    Args:
        graph_def: to rewrite.
        renamed: new names by old ones.
    """
    library = graph_def.library
    for function in library.function:
        name = function.signature.name
        function.signature.name = renamed.get(name, name)
        _rename_in_attributes(function.attr, renamed)
    for gradient in library.gradient:
        gradient.function_name = renamed.get(
            gradient.function_name, gradient.function_name
        )
        gradient.gradient_func = renamed.get(
            gradient.gradient_func, gradient.gradient_func
        )
    for nodes in all_nodes(graph_def):
        for node in nodes:
            node.op = renamed.get(node.op, node.op)
            _rename_in_attributes(node.attr, renamed)


def _rename_in_attributes(attributes: Any, renamed: Mapping[str, str]) -> None:
    for value in attributes.values():
        functions = [value.func] if value.HasField("func") else list(value.list.func)
        for function in functions:
            function.name = renamed.get(function.name, function.name)
            _rename_in_attributes(function.attr, renamed)
        if value.HasField("s"):
            name = value.s.decode(errors="replace")
            value.s = renamed[name].encode() if name in renamed else value.s


def all_nodes(graph_def: GraphDef) -> list[Any]:
    """Return the nodes of a graph, and those of each function of its library."""
    return [graph_def.node, *(f.node_def for f in graph_def.library.function)]

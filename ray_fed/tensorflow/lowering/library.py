"""The functions of a graph: named alike in every process, and only those it needs.

TensorFlow counts what it traces, so a function's name says how much the process traced
before; random ops are numbered in the order of functions, which must not depend on it.
"""

import collections
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import ray_fed.tensorflow.lowering.bodies as bodies
from ray_fed.tensorflow.graphs import function_names
from ray_fed.tensorflow.graphs.protobufs import FunctionDef, GraphDef, NodeDef


def rename_functions(graph_def: GraphDef) -> None:
    """Give the functions of a graph names that no tracing here can give again."""
    _rename(graph_def, "written")


def with_functions(graph_def: GraphDef, library: Any, kept: Sequence[str]) -> Any:
    """Return what a graph needs to run, with its functions.

    Args:
        graph_def: some functions that it calls may be missing in it.
        library: has these.
        kept: names of nodes and tensors that must stay.
    """
    nodes = {node.name: node for node in graph_def.node}
    needed = set(bodies.needed(nodes, map(bodies.node_of, kept)))
    functions = {f.signature.name: f for f in library.function}
    functions |= {f.signature.name: f for f in graph_def.library.function}
    built = tf.compat.v1.GraphDef(versions=graph_def.versions)
    built.node.extend(node for node in graph_def.node if node.name in needed)
    called: dict[str, None] = {}
    pending = collections.deque(built.node)
    while pending:
        for name in _called(pending.popleft(), functions):
            if name not in called:
                called[name] = None
                pending.extend(functions[name].node_def)
    built.library.function.extend(functions[name] for name in called)
    built.library.gradient.extend(
        gradient
        for gradient in library.gradient
        if {gradient.function_name, gradient.gradient_func} <= set(called)
    )
    _rename(built, "lowered")
    return built


def _called(node: NodeDef, functions: dict[str, FunctionDef]) -> list[str]:
    return [name for name in bodies.functions_of(node) if name in functions]


def _rename(graph_def: GraphDef, prefix: str) -> None:
    """Number the functions of a graph in the order in which they stand."""
    names = {
        function.signature.name: f"{prefix}_{index}"
        for index, function in enumerate(graph_def.library.function)
    }
    function_names.rename(graph_def, names)

"""Functions of a dataset's node: what they do, inlined or only looked at."""

from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

import ray_fed.tensorflow.lowering.bodies as bodies
from ray_fed.tensorflow.graphs.protobufs import FunctionDef, NodeDef
from ray_fed.tensorflow.lowering.bodies import CannotLower
from ray_fed.tensorflow.lowering.indexed import Traits
from ray_fed.tensorflow.lowering.inlining import Inliner, Site
from ray_fed.tensorflow.lowering.streams import Function
from ray_fed.tensorflow.lowering.symbols import Symbol

_READS = frozenset(
    {"ReadVariableOp", "ResourceGather", "VarHandleOp", "LookupTableFindV2"}
)
"""Stateful to TensorFlow, but asked twice they say the same."""
_DRAWS = ("Random", "StatefulUniform", "StatefulStandard", "StatefulTruncated",
          "NonDeterministicInts", "Multinomial", "TruncatedNormal")  # fmt: skip


_UNKNOWN: Any = tf.TensorShape(cast("Any", None))


def specs_of(node: NodeDef) -> list[tf.TensorSpec]:
    """Return the specs of the elements of a dataset's node."""
    written = "output_types" if "output_types" in node.attr else "Toutput_types"
    types = node.attr[written].list.type
    shapes = node.attr["output_shapes"].list.shape
    return [
        tf.TensorSpec(tf.TensorShape(shape), tf.as_dtype(dtype))
        for dtype, shape in zip(types, shapes, strict=True)
    ]


def inlined(
    site: Site, attribute: str, captured: Sequence[Any], *, in_order: bool
) -> Function:
    """Return the function of an attribute; `in_order`: after effects of its inputs."""
    name = site.node.attr[attribute].func.name
    if any(isinstance(value, Symbol) and value.moves for value in captured):
        raise CannotLower(f"{site.node.op} that takes from an iterator")

    def run(inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        entry = inputs if in_order else ()
        results = site.inliner.call(name, [*inputs, *captured], entry)
        if any(isinstance(result, Symbol) for result in results):
            raise CannotLower(f"{site.node.op} of datasets")
        return results

    return run


def traits_of(inliner: Inliner, name: str) -> Traits:
    """Return what the ops of a function mean for a sequence made by it."""
    traits = Traits()
    for node in inliner.function(name).node_def:
        if node.op in _READS:
            continue
        if any(part in node.op for part in _DRAWS):
            traits = traits & Traits(repeatable=False)
            continue
        called = list(bodies.functions_of(node))
        for function in called:
            traits = traits & traits_of(inliner, function)
        if not called and bodies.definition_of(node).is_stateful:
            traits = traits & Traits(repeatable=False, effects=True)
    return traits


def selected(function: FunctionDef, num_components: int) -> list[int] | None:
    """Return which arguments a function gives back; None where it does more."""
    body = bodies.of_function(function)
    if body.last:
        return None
    taken = {name: index for index, name in enumerate(body.arguments)}
    positions: list[int] = []
    for result in body.results:
        while result not in taken:
            node = body.nodes[bodies.node_of(result)]
            if node.op != "Identity" or len(node.input) != 1:
                return None
            result = bodies.tensor_of(node.input[0])  # noqa: PLW2901 (follows the chain)
        positions.append(taken[result])
    return positions if all(p < num_components for p in positions) else None


def argument_shapes(site: Site, attribute: str, count: int) -> list[tf.TensorShape]:
    """Return the static shapes of a function's first arguments, as it was traced."""
    function = site.inliner.function(site.node.attr[attribute].func.name)
    shapes: list[tf.TensorShape] = []
    for index in range(count):
        attributes = function.arg_attr[index].attr
        known = attributes["_output_shapes"].list.shape
        shapes.append(tf.TensorShape(known[0]) if known else _UNKNOWN)
    return shapes

"""Two TensorFlow messages as one: the second takes a sequence that the first returned.

rows -> Batch(rows)          batches -> Reduce(batches)      two messages
rows -> Reduce(Batch(rows))                                  one, without a dataset
that anybody would see
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import ray_fed.tensorflow.graphs.graph_message as graph_message
from ray_fed.tensorflow.graphs.graph_message import GraphDef, TensorFlowMessage

_FIRST = "ray_fed_first_"
"""Starts the names of the first message's nodes, and ends those of its functions."""


class CannotCompose(Exception):  # noqa: N818 (it ends an attempt, nobody reports it)
    """The messages stay two; the message says why, in a few words."""


def compose(
    first: TensorFlowMessage, second: TensorFlowMessage, index: int
) -> TensorFlowMessage:
    """Return the second message of what the first one returns.

    Args:
        first: returns one sequence.
        second: takes it.
        index: of the sequence among all that `second` takes.

    Returns:
        A message that takes, flat, what `second` takes, with what `first` takes in the
        place of the sequence.

    Raises:
        CannotCompose: it would not be the same.
    """
    if first.initialize_op or first.session_token_tensor_name:
        raise CannotCompose("a sequence result of a computation with state")
    if not all(graph_message.are_variants(first.result)):
        raise CannotCompose("a sequence result as a serialised graph")
    taken = list(_leaves(second.parameter))
    if not taken[index].sequence.variant_tensor_name:
        raise CannotCompose("a sequence argument as a serialised graph")
    before, after = graph_message.graph_of(first), graph_message.graph_of(second)
    (returned,) = graph_message.bound_names(first.result)
    _rename(before)
    _feed(after, taken[index].sequence.variant_tensor_name, _FIRST + returned)
    after.node.extend(before.node)
    after.library.MergeFrom(before.library)
    composed = type(second)()
    composed.CopyFrom(second)
    composed.graph_def.Pack(after, deterministic=True)
    given = [_renamed(leaf) for leaf in _leaves(first.parameter)]
    bindings = [*taken[:index], *given, *taken[index + 1 :]]
    composed.parameter.Clear()
    composed.parameter.struct.element.extend(bindings)
    return composed


def _leaves(binding: Any) -> list[Any]:
    match binding.WhichOneof("binding"):
        case "struct":
            return [leaf for e in binding.struct.element for leaf in _leaves(e)]
        case None:
            return []
        case _:
            return [binding]


def _renamed(leaf: Any) -> Any:
    """Return the binding of a tensor of the first message, in the composed one."""
    found = type(leaf)()
    found.CopyFrom(leaf)
    if leaf.WhichOneof("binding") == "tensor":
        found.tensor.tensor_name = _FIRST + leaf.tensor.tensor_name
    elif leaf.sequence.variant_tensor_name:
        found.sequence.variant_tensor_name = _FIRST + leaf.sequence.variant_tensor_name
    else:
        name = leaf.sequence.graph_def_tensor_name
        found.sequence.graph_def_tensor_name = _FIRST + name
    return found


def _rename(graph_def: GraphDef) -> None:
    """Give nodes and functions names that no other graph has."""
    library = graph_def.library.SerializeToString(deterministic=True)
    digest = hashlib.sha256(library).hexdigest()[:16]
    functions: Mapping[str, str] = {
        function.signature.name: f"{function.signature.name}_{_FIRST}{digest}"
        for function in graph_def.library.function
    }
    graph_message.rename(graph_def, functions)
    for node in graph_def.node:
        node.name = _FIRST + node.name
        node.input[:] = [
            f"^{_FIRST}{name[1:]}" if name.startswith("^") else _FIRST + name
            for name in node.input
        ]
        if "_class" in node.attr:  # of colocation, by name
            del node.attr["_class"]


def _feed(graph_def: GraphDef, placeholder: str, source: str) -> None:
    """Let a graph read another tensor where it reads a placeholder."""
    fed = placeholder.partition(":")[0]
    kept = [node for node in graph_def.node if node.name != fed]
    name, _, output = source.partition(":")
    source = name if output in ("", "0") else source
    del graph_def.node[:]
    graph_def.node.extend(kept)
    for node in graph_def.node:
        node.input[:] = [
            source
            if given in (fed, f"{fed}:0")
            else (f"^{name}" if given == f"^{fed}" else given)
            for given in node.input
        ]

"""The states that random ops of a graph draw from: variables, set before each call."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context  # no public name

from ray_fed.plan import random_keys
from ray_fed.tensorflow.graphs.protobufs import GraphDef, NodeDef


class RandomStates:
    """The state variables of one loaded graph; the owner of the graph closes them.

    Attributes:
        names: of the variables, in the order of their ops.
        unkeyed: names and kinds of random ops that could not be rewritten.
        in_functions: of those that were, in library functions: what such a function
            of a dataset draws, it draws when the dataset is read.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.unkeyed: list[str] = []
        self.in_functions: list[str] = []
        self._handles: list[Any] = []

    def create(self) -> None:
        """Make the variables, on the device that is current."""
        self._handles = [
            tf.raw_ops.VarHandleOp(
                dtype=tf.int64, shape=[random_keys.STATE_SIZE], shared_name=name
            )
            for name in self.names
        ]

    def set(self, content: bytes) -> None:
        """Set every variable for the work that runs, on the device that is current.

        Args:
            content: identifies the computation.
        """
        for index, handle in enumerate(self._handles):
            value = tf.constant(
                random_keys.state(content + index.to_bytes(4)), tf.int64
            )
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    def close(self) -> None:
        """Free the variables."""
        # Collected by Python, at any time: also while this thread builds a graph.
        with context.eager_mode():
            for handle in self._handles:
                tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
        self._handles.clear()


def add_assignments(graph_def: GraphDef, names: Sequence[str]) -> tuple[list[str], str]:
    """Add to a GraphDef what sets state variables; for who calls it inside of a graph.

    Args:
        graph_def: to add to, in place.
        names: of the variables, as in `RandomStates`.

    Returns:
        The names of placeholders for the states, i64[3] each, and of the op that has
        set them all.
    """
    group = graph_def.node.add(name="ray_fed_set_states", op="NoOp")
    for index, name in enumerate(names):
        prefix = f"ray_fed_set_states/{index}"
        handle = graph_def.node.add(name=f"{prefix}/state", op="VarHandleOp")
        describe_state(handle, name)
        value = graph_def.node.add(name=f"{prefix}/value", op="Placeholder")
        value.attr["dtype"].type = tf.int64.as_datatype_enum
        value.attr["shape"].shape.dim.add(size=random_keys.STATE_SIZE)
        assign = graph_def.node.add(name=f"{prefix}/assign", op="AssignVariableOp")
        assign.attr["dtype"].type = tf.int64.as_datatype_enum
        assign.input.extend([handle.name, value.name])
        group.input.append(f"^{assign.name}")
    values = [f"ray_fed_set_states/{index}/value:0" for index in range(len(names))]
    return values, group.name


def describe_state(handle: NodeDef, name: str) -> None:
    """Complete the node of a state variable, in place."""
    handle.attr["dtype"].type = tf.int64.as_datatype_enum
    handle.attr["shape"].shape.dim.add(size=random_keys.STATE_SIZE)
    handle.attr["shared_name"].s = name.encode()
    handle.attr["container"].s = b""

"""Names for the protocol buffers that graphs are serialised as.

TensorFlow makes their classes as it is imported: a type checker sees none of them.
"""

from typing import Any, TypeAlias

GraphDef: TypeAlias = Any
"""A graph: its nodes, and a library of functions that they call."""

NodeDef: TypeAlias = Any
"""An op of a graph or of a function: its kind, inputs and attributes."""

FunctionDef: TypeAlias = Any
"""A function of a graph's library: its signature, and nodes of its own."""

TensorFlowMessage: TypeAlias = Any
"""A `pb.TensorFlow`: a graph, and the tensors bound to its argument and result."""

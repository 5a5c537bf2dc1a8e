"""Values inside of a graph: tensors and sequences in structs, and what does not fit."""

import dataclasses
from typing import Any

import federated_language as fl
import tensorflow as tf

from ray_fed.language.structs import Struct
from ray_fed.values import columnar_sequence


class UnfitError(Exception):
    """Client work cannot run in a kernel; the message is the reason, in few words."""


@dataclasses.dataclass(frozen=True)
class GraphSequence:
    """A sequence inside of a graph, in the layout of `rows`.

    Attributes:
        columns: of each column its rows and, where it has them, its splits.
        length: how many elements, i64[]; None with `sizes`.
        sizes: where they were known when traced; then columns have no splits, and the
            elements' dimension first.
    """

    columns: tuple[tf.Tensor, ...]
    length: tf.Tensor | None
    sizes: columnar_sequence.Sizes | None = None


def leaf_types(type_spec: fl.Type) -> list[fl.TensorType | fl.SequenceType]:
    """Return the tensors and sequences of a structure, in order.

    Raises:
        UnfitError: it holds something else.
    """
    match type_spec:
        case fl.StructType():
            return [leaf for _, e in type_spec.items() for leaf in leaf_types(e)]
        case fl.TensorType() | fl.SequenceType():
            return [type_spec]
        case _:
            raise UnfitError(f"a value of type `{type_spec}`")


def flatten(value: Any) -> list[Any]:
    """Return the tensors and sequences of a value inside of a graph, in order."""
    if isinstance(value, Struct):
        return [leaf for member in value for leaf in flatten(member)]
    return [value]

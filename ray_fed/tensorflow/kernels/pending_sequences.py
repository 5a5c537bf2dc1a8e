"""Sequences between two computations, which are composed so that none is there."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self, cast

import federated_language as fl

from ray_fed.tensorflow.graphs import joined_messages
from ray_fed.tensorflow.graphs.protobufs import TensorFlowMessage
from ray_fed.tensorflow.kernels.graph_values import UnfitError, leaf_types

flf = fl.framework


@dataclasses.dataclass(frozen=True)
class PendingSequence:
    """A sequence that a computation returns, for another one to be composed with it.

    Attributes:
        message: of the computation; it draws nothing and has no state.
        taken: types of what it takes, in order.
        leaves: of its argument, tensors and sequences.
    """

    message: TensorFlowMessage
    taken: tuple[fl.Type, ...]
    leaves: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        message: TensorFlowMessage,
        type_spec: fl.FunctionType,
        leaves: Sequence[Any],
    ) -> Self:
        """Return the sequence that a computation returns of an argument."""
        taken = [] if type_spec.parameter is None else leaf_types(type_spec.parameter)
        return cls(message, tuple(taken), tuple(leaves))


def message_of(block: flf.CompiledComputation) -> TensorFlowMessage:
    """Return the message of a computation.

    Raises:
        UnfitError: it is not of TensorFlow.
    """
    proto = block.to_proto()
    if proto.WhichOneof("computation") != "tensorflow":
        raise UnfitError(f"a computation of kind {proto.WhichOneof('computation')}")
    return proto.tensorflow


def compose_pending(
    block: flf.CompiledComputation, leaves: Sequence[Any]
) -> tuple[TensorFlowMessage, fl.FunctionType, Sequence[Any]]:
    """Return a computation that takes what its pending sequences are made of.

    With leaves that it takes; those that were given, where none is pending.
    """
    message = message_of(block)
    type_spec = cast("fl.FunctionType", block.type_signature)
    if not any(isinstance(leaf, PendingSequence) for leaf in leaves):
        return message, type_spec, leaves
    taken: list[fl.Type] = list(leaf_types(cast("fl.Type", type_spec.parameter)))
    found = list(leaves)
    for index in reversed(range(len(found))):
        pending = found[index]
        if isinstance(pending, PendingSequence):
            try:
                message = joined_messages.compose(pending.message, message, index)
            except joined_messages.CannotCompose as error:
                raise UnfitError(str(error)) from error
            taken[index : index + 1] = pending.taken
            found[index : index + 1] = pending.leaves
    return message, fl.FunctionType(fl.StructType(taken), type_spec.result), found

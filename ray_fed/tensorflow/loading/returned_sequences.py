"""Sequences that computations returned, made when somebody asks for their elements.

A computation that takes one is composed with the one that returned it, as kernels do:
no dataset is set up between them, and the bits are those of kernels.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import federated_language as fl
import tensorflow as tf
from typing_extensions import override

import ray_fed.tensorflow.tensors.datasets as datasets
from ray_fed.language import type_checks
from ray_fed.tensorflow.graphs import callbacks, joined_messages
from ray_fed.tensorflow.graphs.graph_message import TensorFlowMessage
from ray_fed.tensorflow.loading import normal
from ray_fed.tensorflow.lowering.rewriting import leaf_types


class ReturnedSequence(datasets.KnownSequence):
    """A sequence that a computation without state returned.

    Args:
        message: of the computation, or of several, composed.
        taken: types of what it takes, in order.
        leaves: that it was given: tensors and sequences.
        element: the type of the elements.
        run: makes a dataset of the elements.
    """

    def __init__(
        self,
        message: TensorFlowMessage,
        taken: Sequence[fl.Type],
        leaves: Sequence[normal.Normal],
        element: fl.Type,
        run: Callable[[], "tf.data.Dataset[Any]"],
    ) -> None:
        self.message, self.taken, self.leaves = message, taken, leaves
        self._element, self._run = element, run

    @classmethod
    def of(
        cls,
        message: TensorFlowMessage,
        type_spec: fl.FunctionType,
        arg: normal.Normal,
        run: Callable[[], "tf.data.Dataset[Any]"],
    ) -> Self:
        """Return what a computation returns of an argument."""
        leaves = normal.leaves_of(arg, type_spec.parameter)
        element = cast("fl.SequenceType", type_spec.result).element
        try:
            message, type_spec, leaves = compose_returned(message, type_spec, leaves)
        except joined_messages.CannotCompose:
            leaves = [
                leaf.dataset if isinstance(leaf, ReturnedSequence) else leaf
                for leaf in leaves
            ]
        taken = leaf_types(type_spec.parameter)
        return cls(message, taken, leaves, element, run)

    @property
    @override
    def dataset(self) -> "tf.data.Dataset[Any]":
        return self._dataset

    @functools.cached_property
    def _dataset(self) -> "tf.data.Dataset[Any]":
        return self._run()

    @override
    def as_sequence_of(self, element: fl.Type) -> Any:
        if element == self._element:
            return self
        declared, found = map(fl.SequenceType, (element, self._element))
        type_checks.check_assignable(declared, found, "a sequence")
        return datasets.to_canonical(self.dataset, element)

    @override
    def elements(self) -> list[Any]:
        return callbacks.call(datasets.to_elements, self.dataset, self._element)


def compose_returned(
    message: TensorFlowMessage,
    type_spec: fl.FunctionType,
    leaves: Sequence[normal.Normal],
) -> tuple[TensorFlowMessage, fl.FunctionType, list[normal.Normal]]:
    """Return a computation that takes what returned sequences are made of, and that.

    The computation itself, where none was returned.

    Raises:
        CannotCompose: it would not be the same.
    """
    if not any(isinstance(leaf, ReturnedSequence) for leaf in leaves):
        return message, type_spec, list(leaves)
    taken = list(leaf_types(type_spec.parameter))
    found = list(leaves)
    for index in reversed(range(len(found))):
        returned = found[index]
        if isinstance(returned, ReturnedSequence):
            message = joined_messages.compose(returned.message, message, index)
            taken[index : index + 1] = returned.taken
            found[index : index + 1] = returned.leaves
    return message, fl.FunctionType(fl.StructType(taken), type_spec.result), found

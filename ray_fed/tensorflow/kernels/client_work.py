"""What a `plans.Kernel` does with one client, inside of any graph."""

from collections.abc import Sequence
from typing import Any, cast

import federated_language as fl
import tensorflow as tf

import ray_fed.plan.plans as plans
from ray_fed.language import blocks, structs, type_checks
from ray_fed.tensorflow.kernels.client_batches import ClientLayout
from ray_fed.tensorflow.kernels.graph_builder import (
    Grafts,
    Interpreter,
    UnfitError,
    flatten,
    leaf_types,
)
from ray_fed.tensorflow.tensors import specs
from ray_fed.values.tensor_structures import nester, unflatten

_MOST_TENSORS = 500
"""Of a structure; TensorFlow takes minutes to prepare loops over a thousand."""


class ClientWork:
    """The functions of a kernel, and the types of what goes through them.

    Args:
        kernel: what the compiler planned.

    Attributes:
        constants: type of the values that are the same for all clients.
        partial: type of the accumulators.
        kept: type of the values that are kept of each client.
        layout: of the clients' data.
        specs: of the accumulators.

    Raises:
        UnfitError: there are values that no kernel takes.
    """

    def __init__(self, kernel: plans.Kernel) -> None:
        self._work = blocks.parse_block(kernel.work)
        self._accumulate = blocks.parse_block(kernel.accumulate)
        client = type_checks.struct_type(parameter_of(self._work))
        self.constants = type_checks.struct_type(client[0])
        self.layout = ClientLayout(type_checks.struct_type(client[1]))
        self.partial = type_checks.struct_type(parameter_of(self._accumulate))[0]
        result = type_checks.function_type(self._work.type_signature).result
        worked = list(type_checks.struct_type(result).items())
        self._worked = fl.StructType(worked[: kernel.num_aggregations])
        self.kept = fl.StructType(worked[kernel.num_aggregations :])
        self.specs = specs_of(self.partial)

    def work(
        self, grafts: Grafts, constants: Sequence[tf.Tensor], member: Any
    ) -> list[Any]:
        """Return what a client's value comes to, inside of a graph."""
        packed = unflatten(iter(constants), self.constants)
        client = structs.Struct([(None, packed), (None, member)])
        return list(Interpreter(grafts).call(self._work, client))

    def fold(
        self,
        grafts: Grafts,
        accumulators: Sequence[tf.Tensor],
        worked: Sequence[tf.Tensor],
        constants: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Return the accumulators after a client, inside of a graph.

        Args:
            grafts: puts computations into it.
            accumulators: before the client.
            worked: the tensors of what `work` returned, but for what is kept.
            constants: the same for all.
        """
        folded = structs.Struct(
            [
                (None, unflatten(iter(accumulators), self.partial)),
                (None, unflatten(iter(worked), self._worked)),
                (None, unflatten(iter(constants), self.constants)),
            ]
        )
        return flatten(Interpreter(grafts).call(self._accumulate, folded))

    def kept_values(self, stacked: Sequence[Sequence[tf.Tensor]]) -> list[list[Any]]:
        """Return the plain values of each of what is kept, in client order.

        Args:
            stacked: what calls of `run` kept, in order.
        """
        clients: list[Any] = []
        for tensors in stacked:
            arrays = [tensor.numpy() for tensor in tensors]
            clients.extend(map(list, zip(*arrays, strict=True)))
        nest = nester(self.kept)
        plain = [nest(iter(leaves)) for leaves in clients]
        return [[member[k] for member in plain] for k in range(len(self.kept))]


def refuse_many(num_tensors: int, where: str) -> None:
    """Raise where a structure has more tensors than graphs are built for.

    Raises:
        UnfitError: it has.
    """
    if num_tensors > _MOST_TENSORS:
        raise UnfitError(f"{num_tensors} tensors {where}")


def parameter_of(block: fl.framework.ComputationBuildingBlock) -> fl.Type:
    """Return the type that a function takes."""
    return cast("fl.Type", type_checks.function_type(block.type_signature).parameter)


def specs_of(type_spec: fl.Type) -> list[tf.TensorSpec]:
    """Return the specs of the tensors of a type.

    Raises:
        UnfitError: there are sequences in it.
    """
    return [specs.to_spec(_tensor_type(leaf)) for leaf in leaf_types(type_spec)]


def _tensor_type(leaf: fl.TensorType | fl.SequenceType) -> fl.TensorType:
    if isinstance(leaf, fl.SequenceType):
        raise UnfitError(f"a value of type `{leaf}` to accumulate")
    return leaf

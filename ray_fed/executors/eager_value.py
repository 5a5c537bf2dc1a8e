"""Values of an `EagerTFExecutor`: tensors, functions, and what fused work returned."""

from typing import Any, cast

import federated_language as fl
from typing_extensions import override

from ray_fed.executors.embedded_value import EmbeddedValue
from ray_fed.language import type_checks
from ray_fed.tensorflow.kernels.fused_graphs import FusedGraph
from ray_fed.tensorflow.loading import normal
from ray_fed.tensorflow.loading.normal import Executable, Normal


class EagerValue(EmbeddedValue):
    """A value embedded in an `EagerTFExecutor`, in its normal form."""

    @override
    async def compute(self) -> Any:
        """Return numpy values in Structs; a list of elements for a sequence.

        Raises:
            ValueMismatchError: the value is a function.
        """
        return normal.compute(self._reference, self._type_signature)


class FusedValue(EagerValue):
    """What the graph of fused work returned; its reference is what the graph says."""

    def __init__(
        self, reference: Any, type_signature: fl.Type, graph: FusedGraph
    ) -> None:
        super().__init__(reference, type_signature)
        self._graph = graph

    @override
    async def compute(self) -> Any:
        """Return plain values: see `to_plain` of the graph."""
        return self._graph.to_plain(self._reference)


def retyped(value: EagerValue, type_spec: fl.Type) -> EagerValue:
    """Return a value as one of a type that its own is assignable to.

    So that the reference stays a normal form: names come from the type, and with them
    the order of tensors in a dataset's elements.
    """
    found = value.type_signature
    if found == type_spec:
        return EagerValue(value.reference, type_spec)
    type_checks.check_assignable(type_spec, found, "a value")
    if isinstance(found, fl.FunctionType) and isinstance(type_spec, fl.FunctionType):
        return EagerValue(_retyped_function(value, found, type_spec), type_spec)
    return EagerValue(normal.normalise(value.reference, type_spec), type_spec)


def _retyped_function(
    value: EagerValue, found: fl.FunctionType, declared: fl.FunctionType
) -> Executable:
    def run(*args: Normal) -> Normal:
        parameter = cast("fl.Type", found.parameter)
        taken = [normal.normalise(arg, parameter) for arg in args]
        return normal.normalise(value.reference(*taken), declared.result)

    return Executable(run)

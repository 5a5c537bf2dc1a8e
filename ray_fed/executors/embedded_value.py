"""The base class of values that an executor of ray_fed returns."""

from typing import Any

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.executors.fan_out import gather_by_index
from ray_fed.language import structs


class EmbeddedValue(fl.framework.ExecutorValue):
    """A value's type, and the reference by which its executor knows the value."""

    def __init__(self, reference: Any, type_signature: fl.Type) -> None:
        self._reference = reference
        self._type_signature = type_signature

    @property
    @override
    def reference(self) -> Any:
        return self._reference

    @property
    @override
    def type_signature(self) -> fl.Type:
        return self._type_signature

    @override
    async def compute(self) -> Any:
        """Return the value. Raises ValueMismatchError if the value is a function."""
        match self._reference:
            case fl.framework.ExecutorValue():
                return await self._reference.compute()
            case structs.Struct():
                pairs = list(structs.iter_elements(self._reference))
                computed = await gather_by_index(v.compute() for _, v in pairs)
                names = [name for name, _ in pairs]
                return structs.Struct(zip(names, computed, strict=True))
            case _:
                raise errors.ValueMismatchError(
                    "Expected a value to compute, found a function"
                    f" `{self._type_signature}`: call it."
                )

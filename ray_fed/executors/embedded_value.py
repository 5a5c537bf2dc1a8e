"""The base class of values that are embedded in an executor of ray_fed."""

from typing import Any

import federated_language as fl
from typing_extensions import override


class EmbeddedValue(fl.framework.ExecutorValue):
    """A type, and a reference that only the executor of the value understands."""

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

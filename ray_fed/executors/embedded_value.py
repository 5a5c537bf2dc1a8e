"""What all values embedded in an executor of ray_fed share."""

from typing import Any

import federated_language as fl
from typing_extensions import override


class EmbeddedValue(fl.framework.ExecutorValue):
    """A value embedded in an executor: a reference that it understands, and a type."""

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

"""The pair of computations that a federated algorithm is."""

import dataclasses
from typing import Any

from typing_extensions import override

from ray_fed.observability import reprs


@dataclasses.dataclass(frozen=True, repr=False)
class LearningProcess:
    """A federated algorithm as two federated_language computations.

    Call them as functions, or give them to any context of federated_language.

    Attributes:
        initialize: ( -> state@SERVER).
        next: one round, from the state and all clients' data; what it returns is said
            where the process is built.
    """

    initialize: Any
    next: Any

    @override
    def __repr__(self) -> str:
        named = {"initialize": self.initialize, "next": self.next}
        types = (
            f"{name} {reprs.shorten(str(getattr(comp, 'type_signature', comp)))}"
            for name, comp in named.items()
        )
        return f"<learning process: {'; '.join(types)}>"

"""The pair of computations that a federated algorithm is."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
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

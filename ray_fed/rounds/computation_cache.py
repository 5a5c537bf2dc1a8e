"""Keeps what was made of computations: by content, and the same object at once.

A computation is hashed and compared by its whole message, which takes as long as a
small round: a program calls the same object over and over.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import federated_language as fl

from ray_fed.values.lru_cache import LruCache

Computation = fl.framework.ConcreteComputation
_T = TypeVar("_T")
_CAPACITY = 128


class ComputationCache(Generic[_T]):
    """What a function makes of computations, of the latest 128 of them.

    Args:
        make: a pure function.
    """

    def __init__(self, make: Callable[[Computation], _T]) -> None:
        self._make = make
        self._by_content: LruCache[Computation, _T] = LruCache(_CAPACITY)
        # Holds the object, so that its id is not another's.
        self._by_identity: LruCache[int, tuple[Computation, _T]] = LruCache(_CAPACITY)

    def get(self, comp: Computation) -> _T:
        """Return what was made of a computation, or of one that is equal."""
        _, found = self._by_identity.get(
            id(comp),
            lambda: (comp, self._by_content.get(comp, lambda: self._make(comp))),
        )
        return found

"""Keeps what was made of computations: by content, and the same object at once.

A computation is hashed and compared by its whole message, which takes as long as a
small round: a program calls the same object over and over.
"""

import collections
from collections.abc import Callable
from typing import Generic, TypeVar

import federated_language as fl

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
        self._by_content: collections.OrderedDict[Computation, _T]
        self._by_content = collections.OrderedDict()
        # Holds the object, so that its id is not another's.
        self._by_identity: collections.OrderedDict[int, tuple[Computation, _T]]
        self._by_identity = collections.OrderedDict()

    def get(self, comp: Computation) -> _T:
        """Return what was made of a computation, or of one that is equal."""
        held = self._by_identity.get(id(comp))
        if held is not None:
            return held[1]
        if comp not in self._by_content:
            self._by_content[comp] = self._make(comp)
        found = self._by_content[comp]
        self._by_identity[id(comp)] = (comp, found)
        for cache in (self._by_content, self._by_identity):
            if len(cache) > _CAPACITY:
                cache.popitem(last=False)
        return found

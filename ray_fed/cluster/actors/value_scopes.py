"""The values of a worker, by the use that they belong to: nothing outlives its use."""

import collections
import threading
from collections.abc import Iterable
from typing import Any

import ray_fed.errors as errors

_FREED_SCOPES = 256
"""How many freed scopes a worker remembers, to end work of them that still runs."""


class _Cancelled(errors.ClusterError):
    """The scope of this work was freed while it ran."""


class ValueScopes:
    """Embedded values by scope and key; one thread uses them, others may free them."""

    def __init__(self) -> None:
        self._scopes: dict[str, dict[int, Any]] = {}
        self._freed: collections.OrderedDict[str, bool]  # whether for good
        self._freed = collections.OrderedDict()
        self._freeing = threading.Lock()

    def begin(self, scope: str) -> None:
        """Open a scope, empty.

        Raises:
            ClusterError: it was freed for good.
        """
        with self._freeing:
            if self._freed.get(scope):
                raise _cancelled(scope)
            self._freed.pop(scope, None)
            self._scopes[scope] = {}

    def check(self, scope: str) -> None:
        """Raise as `values` does."""
        self.values(scope)

    def values(self, scope: str) -> dict[int, Any]:
        """Return the values of an open scope by key, to be changed.

        Raises:
            ClusterError: it was freed, or never begun.
        """
        if scope in self._freed or scope not in self._scopes:
            raise _cancelled(scope)
        return self._scopes[scope]

    def drop(self, scope: str, keys: Iterable[int]) -> None:
        """Drop values of a scope; those that it has not are ignored."""
        held = self._scopes.get(scope, {})
        for key in keys:
            held.pop(key, None)

    def end(self, scope: str) -> None:
        """Drop the values of a scope whose work is done."""
        self._scopes.pop(scope, None)

    def free(self, scope: str, *, for_good: bool = False) -> None:
        """Drop the values of a scope; work of it that still runs ends soon.

        Where that is for good, so does work of it that is yet to come.
        """
        with self._freeing:
            self._freed[scope] = self._freed.pop(scope, False) or for_good
            if len(self._freed) > _FREED_SCOPES:
                self._freed.popitem(last=False)
            dropped = self._scopes.pop(scope, None)
        del dropped  # not inside: what it holds may take a while to end


def _cancelled(scope: str) -> _Cancelled:
    return _Cancelled(f"Expected the scope `{scope}` to be open, found it freed.")

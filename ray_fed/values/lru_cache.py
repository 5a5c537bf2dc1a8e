"""Keeps what was used most recently."""

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def _ignore(value: object) -> None:
    """Do nothing with what is dropped."""
    del value


class Recent(Generic[_Key, _Value]):
    """Values by key, so many of them; the least recently used is dropped beyond.

    No value is None. Several threads may use it.

    Args:
        limit: how many are kept, >= 1.
        on_drop: called with each value that is kept no more.
    """

    def __init__(
        self, limit: int, on_drop: Callable[[_Value], object] = _ignore
    ) -> None:
        self._limit = limit
        self._on_drop = on_drop
        self._held: dict[_Key, _Value] = {}  # the least recently used first
        # One thread may have it twice: what Python frees inside may come back here.
        self._lock = threading.RLock()

    def get(self, key: _Key, make: Callable[[], _Value]) -> _Value:
        """Return the value of a key; make it, and keep it, if there is none.

        Threads that ask for it at once may each make one; the first counts.
        """
        found = self.find(key)
        if found is not None:
            return found
        made = make()
        with self._lock:
            found = self.find(key)
            if found is None:
                self.keep(key, made)
                return made
        self._on_drop(made)
        return found

    def find(self, key: _Key) -> _Value | None:
        """Return the value of a key, or None."""
        with self._lock:
            if key not in self._held:
                return None
            value = self._held[key] = self._held.pop(key)
            return value

    def keep(self, key: _Key, value: _Value) -> None:
        """Keep a value, in place of the one that its key had."""
        with self._lock:
            dropped = [self._held.pop(key, None)]
            self._held[key] = value
            if len(self._held) > self._limit:
                dropped.append(self._held.pop(next(iter(self._held))))
        for former in dropped:
            if former is not None and former is not value:
                self._on_drop(former)

    def items(self) -> list[tuple[_Key, _Value]]:
        """Return keys with their values, the least recently used first."""
        with self._lock:
            return list(self._held.items())

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            dropped = list(self._held.values())
            self._held.clear()
        for value in dropped:
            self._on_drop(value)

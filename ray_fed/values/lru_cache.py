"""A cache of a bounded number of values: the least recently used one goes first."""

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class LruCache(Generic[_Key, _Value]):
    """Maps keys to at most `limit` values; drops the least recently used value.

    Values must not be None. Several threads may use one cache.

    Args:
        limit: the most values that the cache holds, >= 1.
        on_drop: called with each value that leaves the cache.
    """

    def __init__(
        self, limit: int, on_drop: Callable[[_Value], object] = lambda _: None
    ) -> None:
        self._limit = limit
        self._on_drop = on_drop
        self._held: dict[_Key, _Value] = {}  # the least recently used first
        # Reentrant: freeing a value under the lock may call this cache again.
        self._lock = threading.RLock()

    def get(self, key: _Key, make: Callable[[], _Value]) -> _Value:
        """Return the value of a key; if there is none, make one and put it.

        Threads that miss the same key at once may each make a value; all of them get
        the first one that was put, and the others are dropped.
        """
        found = self.find(key)
        if found is not None:
            return found
        made = make()
        with self._lock:
            found = self.find(key)
            if found is None:
                self.put(key, made)
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

    def put(self, key: _Key, value: _Value) -> None:
        """Set the value of a key; drop the value that the key had before."""
        with self._lock:
            dropped = [self._held.pop(key, None)]
            self._held[key] = value
            if len(self._held) > self._limit:
                dropped.append(self._held.pop(next(iter(self._held))))
        for former in dropped:
            if former is not None and former is not value:
                self._on_drop(former)

    def items(self) -> list[tuple[_Key, _Value]]:
        """Return (key, value) pairs, the least recently used first."""
        with self._lock:
            return list(self._held.items())

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            dropped = list(self._held.values())
            self._held.clear()
        for value in dropped:
            self._on_drop(value)

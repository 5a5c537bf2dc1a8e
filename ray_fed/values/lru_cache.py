"""A cache of bounded size that drops the least recently used value."""

import math
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class LruCache(Generic[_Key, _Value]):
    """Maps keys to at most `limit` values and drops the least recently used value.

    Values must not be None. Several threads may use one cache. `on_drop` is called with
    each dropped value. `weight` is the sum of the values' weights, such as bytes, and
    at most `max_weight`. The `least` most recently used values stay in any case.
    """

    def __init__(
        self,
        limit: float = math.inf,
        on_drop: Callable[[_Value], object] = lambda _: None,
        *,
        max_weight: float = math.inf,
        least: int = 1,
    ) -> None:
        self._limit = limit
        self._on_drop = on_drop
        self._max_weight, self._least = max_weight, least
        self.weight: float = 0
        self._held: dict[_Key, tuple[_Value, float]] = {}  # least recently used first
        # Reentrant: freeing a value under the lock may call this cache again.
        self._lock = threading.RLock()

    def get(self, key: _Key, make: Callable[[], _Value], weight: float = 0) -> _Value:
        """Return the value of a key, which `make` returns if there is no value yet.

        If several threads miss a key at once, each makes a value. All of them return
        the first value that was put, and the others are dropped.
        """
        found = self.find(key)
        if found is not None:
            return found
        made = make()
        with self._lock:
            found = self.find(key)
            if found is None:
                self.put(key, made, weight)
                return made
        self._on_drop(made)
        return found

    def find(self, key: _Key) -> _Value | None:
        """Return the value of a key, or None."""
        with self._lock:
            if key not in self._held:
                return None
            value, _ = self._held[key] = self._held.pop(key)
            return value

    def put(self, key: _Key, value: _Value, weight: float = 0) -> None:
        """Set the value of a key and drop its previous value."""
        with self._lock:
            dropped = [self._pop(key)] if key in self._held else []
            self._held[key] = value, weight
            self.weight += weight
            while len(self._held) > self._limit or (
                len(self._held) > self._least and self.weight > self._max_weight
            ):
                dropped.append(self._pop(next(iter(self._held))))
        for former in dropped:
            if former is not value:
                self._on_drop(former)

    def _pop(self, key: _Key) -> _Value:
        value, weight = self._held.pop(key)
        self.weight -= weight
        return value

    def drop(self, key: _Key, is_it: Callable[[_Value], bool] = lambda _: True) -> None:
        """Drop the value of a key if `is_it` returns true for it."""
        with self._lock:
            if key not in self._held or not is_it(self._held[key][0]):
                return
            value = self._pop(key)
        self._on_drop(value)

    def items(self) -> list[tuple[_Key, _Value]]:
        """Return (key, value) pairs, the least recently used first."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._held.items()]

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            dropped = [self._pop(key) for key in list(self._held)]
        for value in dropped:
            self._on_drop(value)

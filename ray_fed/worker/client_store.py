"""A cache of clients' data on one worker, which outlives rounds.

If the data exceeds a limit, the least recently used data is dropped, and read again
when needed. So results do not depend on the cache. A client source is an object that
reads clients' data. When a source no longer exists, its data is dropped, too.
"""

import collections
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from ray_fed.language.structs import Plain
from ray_fed.values import stored
from ray_fed.values.client_references import ClientMember, ClientRun, ClientSource
from ray_fed.values.lru_cache import LruCache
from ray_fed.values.stored import ClientValues

_T = TypeVar("_T")
_KEPT_SIZES = 65_536
"""Number of groups of clients whose bytes are remembered, to count them once."""


class ClientStore:
    """Reads clients' data, and caches up to `max_bytes` of the data."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # Values with the tokens of their sources.
        self.kept: LruCache[Hashable, tuple[Any, frozenset[str]]]
        self.kept = LruCache(max_weight=max_bytes, least=0)
        self._sources: dict[str, ClientSource | None] = {}
        self._gone: collections.deque[str] = collections.deque()
        self._sizes: LruCache[tuple[str, bytes], int] = LruCache(_KEPT_SIZES)
        self._asked: LruCache[int, int] = LruCache(_KEPT_SIZES)

    def read(self, member: ClientMember) -> Plain:
        """Return one client's data as a plain value, from the cache if possible."""
        source = self._open(member.source).opened()
        if source.is_resident:
            return self._make(source, member.position)
        return self.keep(
            (source.token, member.position),
            frozenset([source.token]),
            lambda: self._make(source, member.position),
            stored.count_bytes,
        )

    def _make(self, source: ClientSource, position: int) -> Plain:
        if source.base is None:
            return source.read(position)
        return source.arrange(self.read(ClientMember(source.base, position)), position)

    def read_all(self, clients: ClientValues) -> ClientValues:
        """Return the plain values of clients, in order. Values in sources are read."""
        if isinstance(clients, ClientRun):
            return [self.read(member) for member in clients]
        return [self.read(m) if isinstance(m, ClientMember) else m for m in clients]

    def differs_by_call(self, clients: ClientRun) -> bool:
        """Return whether clients' values change with each call, as shuffled rows do."""
        return self._open(clients.source).opened().occasion() is not None

    def count_bytes(self, clients: ClientValues) -> int:
        """Return the approximate bytes of the arrays in clients' values."""
        if not isinstance(clients, ClientRun):
            return stored.count_bytes(clients)
        return self._sizes.get(
            clients.key, lambda: stored.count_bytes(list(self.read_all(clients)))
        )

    def keep(
        self,
        key: Hashable,
        tokens: frozenset[str],
        make: Callable[[], _T],
        count: Callable[[_T], float],
    ) -> _T:
        """Return the cached value of a key, or call `make` and cache the result.

        The key determines the value. `tokens` are tokens of the sources whose data the
        value contains. `count` returns a value's bytes. A value above `max_bytes` is
        not cached.
        """
        kept = self.kept.find(key)
        if kept is not None:
            return kept[0]
        made = make()
        size = count(made)
        if size <= self._max_bytes:
            self.kept.put(key, (made, tokens), int(size))
        return made

    def is_repeated(self, key: Hashable) -> bool:
        """Return whether this method has been called with this key before.

        Only then should a caller cache the data of a whole cohort. If each round
        samples other clients, this data is never needed again, and would displace the
        data of single clients.
        """
        asked = hash(key)
        is_repeated = self._asked.find(asked) is not None
        self._asked.put(asked, asked)
        return is_repeated

    def forget(self, tokens: Iterable[str]) -> None:
        """Drop the data of the sources with these tokens, which no longer exist."""
        self._gone.extend(tokens)
        self._drop_gone()

    def close(self) -> None:
        """Drop all cached data."""
        self.kept.clear()
        self._sources.clear()
        self._sizes.clear()
        self._asked.clear()

    def _drop_gone(self) -> None:
        gone: set[str] = set()
        while self._gone:
            token = self._gone.popleft()
            source = self._sources.pop(token, None)
            if source is not None and (base := source.opened_base()) is not None:
                self._gone.append(base.token)  # the base exists for this source only
            gone.add(token)
        if not gone:
            return
        for key, (_, tokens) in self.kept.items():
            if tokens & gone:
                self.kept.drop(key)
        for range_key, _ in self._sizes.items():  # noqa: PERF102 (no dictionary)
            if range_key[0] in gone:
                self._sizes.drop(range_key)

    def _open(self, source: ClientSource) -> ClientSource:
        # Equal sources arrive with each call. If the first read of a source opens
        # resources, such as a file, the first source with the token is used again.
        self._drop_gone()
        if source.token not in self._sources:
            self._sources[source.token] = source if source.opens_once else None
            if not source.opens_once:  # a user's object, which this must not keep alive
                end = weakref.finalize(source, self._gone.append, source.token)
                end.atexit = False
        return self._sources[source.token] or source

"""A cache of clients' data on one worker, which is kept between rounds.

If the data exceeds the limit, the least recently used data is dropped. It is read again
when needed, so results do not depend on the cache. Data of a source is also dropped
when the source no longer exists.
"""

import collections
import dataclasses
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
"""Number of client ranges whose size is remembered, so they are measured once."""


@dataclasses.dataclass(frozen=True)
class _Kept:
    value: Any
    num_bytes: int
    tokens: frozenset[str]


class ClientStore:
    """Reads clients' data and caches it.

    A value larger than `max_bytes` is returned but not cached.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: collections.OrderedDict[Hashable, _Kept] = collections.OrderedDict()
        self._sources: dict[str, ClientSource | None] = {}
        self._gone: collections.deque[str] = collections.deque()
        self._sizes: collections.OrderedDict[tuple[str, bytes], int]
        self._sizes = collections.OrderedDict()
        self._asked: LruCache[int, int] = LruCache(_KEPT_SIZES)

    def read(self, member: ClientMember) -> Plain:
        """Return a client's data as a plain value, see `ClientSource.read`."""
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
        """Return the plain values of clients, whether stored or in a `ClientRun`."""
        if isinstance(clients, ClientRun):
            return [self.read(member) for member in clients]
        return [self.read(m) if isinstance(m, ClientMember) else m for m in clients]

    def differs_by_call(self, clients: ClientRun) -> bool:
        """Return whether the clients can have other values in the next call."""
        return self._open(clients.source).opened().occasion() is not None

    def count_bytes(self, clients: ClientValues) -> int:
        """Return the approximate bytes of arrays in the values of clients."""
        if not isinstance(clients, ClientRun):
            return stored.count_bytes(clients)
        if clients.key not in self._sizes:
            read = list(self.read_all(clients))
            self._sizes[clients.key] = stored.count_bytes(read)
            if len(self._sizes) > _KEPT_SIZES:
                self._sizes.popitem(last=False)
        return self._sizes[clients.key]

    def keep(
        self,
        key: Hashable,
        tokens: frozenset[str],
        make: Callable[[], _T],
        count: Callable[[_T], float],
    ) -> _T:
        """Return the cached value of a key, or make and cache it.

        The key determines the value. `tokens` identify the sources whose data it
        contains. `count` returns its bytes.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key].value
        made = make()
        size = count(made)
        if size <= self._max_bytes:
            self._kept[key] = _Kept(made, int(size), tokens)
            self.num_bytes += int(size)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))
        return made

    def is_repeated(self, key: Hashable) -> bool:
        """Return whether this method was called with the key before.

        Caching pays only then. If each round samples other clients, the data of a whole
        cohort is not needed again and would displace the data of single clients.
        """
        asked = hash(key)
        is_repeated = self._asked.find(asked) is not None
        self._asked.put(asked, asked)
        return is_repeated

    def forget(self, tokens: Iterable[str]) -> None:
        """Drop the data of sources that no longer exist."""
        self._gone.extend(tokens)
        self._drop_gone()

    def close(self) -> None:
        """Drop all cached data."""
        self._kept.clear()
        self._sources.clear()
        self._sizes.clear()
        self._asked.clear()
        self.num_bytes = 0

    def _drop(self, key: Hashable) -> None:
        self.num_bytes -= self._kept.pop(key).num_bytes

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
        for key in [k for k, kept in self._kept.items() if kept.tokens & gone]:
            self._drop(key)
        for key in [key for key in self._sizes if key[0] in gone]:
            del self._sizes[key]

    def _open(self, source: ClientSource) -> ClientSource:
        """Return the source to read: the first with this token, if it opens once."""
        self._drop_gone()
        if source.token not in self._sources:
            self._sources[source.token] = source if source.opens_once else None
            if not source.opens_once:  # a user's object, which this must not keep alive
                end = weakref.finalize(source, self._gone.append, source.token)
                end.atexit = False
        return self._sources[source.token] or source

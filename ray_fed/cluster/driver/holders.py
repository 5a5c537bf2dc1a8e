"""Which worker has which clients laid out: the one that ran them last."""

import hashlib
from collections.abc import Iterator
from typing import Any, cast

from ray_fed.values.client_references import ClientRun
from ray_fed.values.lru_cache import LruCache


class Holders:
    """Remembers the workers that ran clients by reference; what it says may be stale.

    Args:
        limit: runs of clients that are remembered; the least recent go first.
    """

    def __init__(self, limit: int = 1024) -> None:
        self._workers: LruCache[bytes, str] = LruCache(limit)

    def find(self, clients: bytes) -> str:
        """Return the name of the worker that ran some clients last, or an empty one.

        Args:
            clients: what `name_clients` returned.
        """
        return self._workers.find(clients) or ""

    def note(self, clients: bytes, worker: str) -> None:
        """Note that a worker ran some clients; an empty name of these is no one's."""
        if clients:
            self._workers.put(clients, worker)


def name_clients(argument: Any) -> bytes:
    """Return what names the clients by reference in an argument; empty without any.

    Args:
        argument: plain, structures as tuples.
    """
    digest, is_empty = hashlib.sha256(), True
    for run in _runs(argument):
        token, positions = run.key
        digest.update(b"%d %b" % (len(positions), token.encode()))
        digest.update(positions)
        is_empty = False
    return b"" if is_empty else digest.digest()


def _runs(argument: Any) -> Iterator[ClientRun]:
    if isinstance(argument, ClientRun):
        yield argument
    elif isinstance(argument, tuple):
        for part in cast("tuple[Any, ...]", argument):
            yield from _runs(part)

"""Leases that the driver keeps a moment, for what it runs next: no pool is asked.

    pool --lease--> use --> kept --> use --> kept ... --> given back to the pool

The pool is told soon after what a lease was used for, many uses at once: in time for
what hangs or straggles, and not in the way of rounds of milliseconds. The pool tells
when somebody waits for a worker: kept leases are given back then, and none is kept.
"""

import asyncio
import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Generator
from typing import Any

import ray.exceptions

import ray_fed.errors as errors
from ray_fed.cluster.pool.actions import UseBegan, UseEnded
from ray_fed.cluster.task.driving import Driven
from ray_fed.cluster.task.leases import Given, Terms
from ray_fed.plan import outcomes

_KEPT_S = 0.5
"""How long a lease is kept for what follows."""

_TELL_S = 0.5
"""How long the pool may not know what a lease is used for."""


@dataclasses.dataclass(eq=False)
class _Kept:
    name: str
    outcome: outcomes.Outcome  # of the plan that was given it
    until_s: float
    uses: int


@dataclasses.dataclass(frozen=True)
class Lent:
    """A lease that was kept, for a plan that begins.

    Attributes:
        name: that the worker was leased under, which becomes the plan's.
        given: what the plan takes of it.
    """

    name: str
    given: Given


class KeptLeases:
    """Keeps leases between plans that run one after another.

    Args:
        pool: `JobActor` of the `PoolHost`; not owned.
        num_workers: of the pool.
    """

    def __init__(self, pool: Any, num_workers: int) -> None:
        self._pool = pool
        self._num_workers = num_workers
        self._num_running = 0
        self._kept: collections.deque[_Kept] = collections.deque()
        self._untold: list[tuple[float, str, Terms | None]] = []  # None: the use ended
        self._is_awaited = False  # as the pool last told
        self._watch: asyncio.Task[None] | None = None
        self._is_closed = False

    def close(self) -> None:
        """Ask the pool nothing more, from any thread: it gives back all that it lent.

        Ray would start again for a call that comes after its end.
        """
        self._is_closed = True

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Have a plan run inside."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def take(self, terms: Terms) -> Lent | None:
        """Return a lease for a plan that runs; None where the pool is to be asked.

        It is to be asked, too, where the plan prefers a worker that may be idle there.
        """
        self.give_back(time.monotonic())
        preferred = [k for k in self._kept if k.outcome.worker == terms.prefers]
        is_idle_there = self._num_running + len(self._kept) <= self._num_workers
        if not self._kept or (terms.prefers and is_idle_there and not preferred):
            return None
        kept = (preferred or self._kept)[0]
        self._kept.remove(kept)
        if terms.num_workers > 1:  # it asks the pool for what is idle there
            self.give_back()
        found = kept.outcome
        attempt = outcomes.Attempt(
            1,
            found.worker,
            found.worker_pid,
            found.node,
            fingerprint=found.fingerprint,
        )
        self._note(time.monotonic(), kept.name, terms)
        return Lent(kept.name, Given(attempt, kept.uses))

    def keep(
        self,
        name: str,
        terms: Terms,
        begun_s: float,
        driven: Driven,
        given: Given | None = None,
    ) -> None:
        """Keep the lease of a plan that is done, or give it back.

        It is given back where the pool might take the worker for one that hangs before
        it is told, where someone waits for a worker, where the plan may have asked for
        a second worker, and where it lost others: what is kept has all its budgets.

        Args:
            name: of the plan.
            terms: of the plan.
            begun_s: when that was, or before, by the monotonic clock.
            driven: what came of it.
            given: the lease, where it was kept before.
        """
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(self._follow_the_pool())
        now_s = time.monotonic()
        hangs_at_s = begun_s + (terms.timeout_s or math.inf)
        found = driven.outcome
        asks_at_s = terms.spare_after_s if terms.siblings else None
        is_alone = asks_at_s is None or driven.seconds < asks_at_s
        is_whole = is_alone and not found.lost and found.attempts == 1
        if self._is_awaited or not is_whole or now_s + _KEPT_S + _TELL_S >= hangs_at_s:
            self._release(name, driven.scope)
            return
        uses = 1 if given is None else given.use + 1
        self._kept.append(_Kept(name, found, now_s + _KEPT_S, uses))
        self._note(now_s, name, None)
        loop = asyncio.get_running_loop()
        loop.call_later(_KEPT_S, lambda: self.give_back(time.monotonic()))

    def give_back(self, now_s: float = math.inf) -> None:
        """Give those back whose moment has passed; all of them, without an argument."""
        while self._kept and self._kept[0].until_s <= now_s:
            kept = self._kept.popleft()
            self._release(kept.name, kept.name)

    async def _follow_the_pool(self) -> None:
        """Note whether somebody waits for a worker, while leases are kept.

        A call that waited for as long as the pool lives would be a reference for as
        long, in this process and in the pool.
        """
        with contextlib.suppress(ray.exceptions.RayError, errors.ContextStateError):
            while not self._is_closed:
                self._is_awaited = await self._pool.when_awaited.remote(
                    known=self._is_awaited, timeout_s=_KEPT_S
                )
                if self._is_awaited:
                    self.give_back()
                elif not self._kept:
                    return

    def end(self, name: str) -> None:
        """Give back what a plan has that comes to nothing, whatever that still does."""
        self._tell()
        self._send("end", name)

    def _release(self, name: str, scope: str) -> None:
        self._tell()
        self._send("release", name, scope)

    def _note(self, at_s: float, name: str, terms: Terms | None) -> None:
        if not self._untold:
            asyncio.get_running_loop().call_later(_TELL_S, self._tell)
        self._untold.append((at_s, name, terms))

    def _tell(self) -> None:
        """Tell the pool, before anything else that it is told of the same leases."""
        uses: list[UseBegan | UseEnded] = []
        now_s = time.monotonic()
        for at_s, name, terms in self._untold:
            ago_s = now_s - at_s
            if terms is None:
                uses.append(UseEnded(name, ago_s))
                continue
            uses.append(UseBegan(name, ago_s, terms.timeout_s, terms.siblings))
        self._untold.clear()
        if uses:
            self._send("note_uses", uses)

    def _send(self, verb: str, *args: Any) -> None:
        """Tell the pool; nothing where it is closed, or gone with its Ray."""
        if not self._is_closed:
            with contextlib.suppress(errors.ContextStateError):
                getattr(self._pool, verb).remote(*args)

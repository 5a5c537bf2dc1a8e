"""Which worker runs which subround, and what a failure costs: decisions, no I/O.

The pool takes note of what happened (`ready`, `lost`, `ask`, `give_back`) and says on
`decide` what is to be done. Whoever hosts it does that and nothing else:

    starting --ready--> idle --Grant--> leased --give_back--> idle
        |                 |               |
        +----- lost ------+----- lost ----+----> gone; a Start replaces it

A lost worker counts against the budget of the subround that held it, by class. On
`survey` the pool follows the nodes: it grows to where there is room, and leaves those
that drain, an idle worker at once and a leased one when it is given back.
"""

import math
from collections.abc import Mapping, Sequence

from ray_fed.cluster.pool.actions import (
    SHORTAGE,
    Action,
    FailureClass,
    Look,
    Size,
    Stop,
)
from ray_fed.cluster.pool.budgets import Budgets
from ray_fed.cluster.pool.growth import Growth, count_nodes
from ray_fed.cluster.pool.placement import Node, Placement
from ray_fed.cluster.pool.roster import Roster
from ray_fed.cluster.pool.shortage import Shortage
from ray_fed.cluster.pool.starts import FailedStarts
from ray_fed.cluster.pool.stragglers import Stragglers
from ray_fed.cluster.pool.tickets import Tickets

_PLACED_WITHIN_S = 30.0
"""Within so many seconds a worker answers from a node that had room for it."""

COPY = " copy"
"""Ends the name under which a straggler has its second worker."""

FURTHER = " worker "
"""Stands between a subround's name and a number in the names of its further leases."""


class Pool:
    """The state of a pool of workers; it starts none before the first survey.

    Args:
        size: workers to keep.
        budgets: failures of each class that one subround may have.
        start_timeout_s: seconds within which a worker must become ready.
        stragglers: decides who gets a second worker, where one is idle; owned.
    """

    def __init__(
        self,
        size: Size,
        budgets: Mapping[str, int],
        start_timeout_s: float,
        stragglers: Stragglers | None = None,
    ) -> None:
        self._size = size
        self._start_timeout_s = start_timeout_s
        self._placement = Placement()
        self._roster = Roster(self._placement)
        self._growth = Growth(size, self._placement, self._roster, start_timeout_s)
        self._failed_starts = FailedStarts()
        self._shortage = Shortage(size)
        self._budgets = Budgets(budgets)
        self._stragglers = stragglers or Stragglers(math.inf, math.inf)
        self._tickets = Tickets(self._roster, self._budgets, self._stragglers)

    def ask(
        self,
        subround: str,
        timeout_s: float = math.inf,
        siblings: str = "",
        prefers: str = "",
    ) -> int:
        """Ask for a worker for a subround; return the ticket to decide on.

        Args:
            subround: its name.
            timeout_s: seconds from the lease until the worker counts as hung.
            siblings: names those that do as much; empty: nothing does.
            prefers: the worker to have, where that is idle; empty: any will do.
        """
        return self._tickets.ask(subround, timeout_s, siblings, prefers)

    def ask_spare(self, subround: str, timeout_s: float = math.inf) -> int:
        """Ask for a second worker for a subround that has one, should it straggle.

        It is given when nobody else waits for a worker. Losing it counts for nobody.
        """
        return self._tickets.ask_spare(subround, timeout_s)

    def lease_idle(self, subround: str, count: int, deadline_s: float) -> list[str]:
        """Lease workers that are idle now to a subround that has one; return them.

        Losing one of them counts as a failure of the subround. Nobody waits for these:
        there may be none, and there are none while a ticket waits.

        Args:
            subround: its name.
            count: at most so many.
            deadline_s: when they count as hung; see `decide`.
        """
        found = [] if self.is_awaited else self._roster.idle()[:count]
        for worker in found:
            self._roster.lease(worker, subround, deadline_s)
        return found

    def finish(self, subround: str, now_s: float) -> None:
        """Note that a subround has its result."""
        self._stragglers.done(subround, now_s)

    def withdraw(self, ticket: int) -> None:
        """Take a ticket back that is still waiting."""
        self._tickets.withdraw(ticket)

    def survey(self, nodes: Sequence[Node]) -> None:
        """Take note of what the cluster has: all nodes that are alive."""
        self._placement.survey(nodes, count_nodes(self._roster.nodes()))

    def placed(self, worker: str) -> None:
        """Note that a worker that starts has its place, and a process there."""
        found = self._roster.starting(worker)
        if found is not None:
            found.is_placed = True

    def ready(self, worker: str, node: str) -> None:
        """Note that a worker answered, and from which node."""
        found = self._roster.starting(worker)
        if found is not None:
            found.state, found.node = "idle", node
            self._placement.trust(node)
            self._failed_starts.clear()

    def bar(self, worker: str, node: str, why: str) -> None:
        """Note that a worker answered that must not be used, nor others of its node."""
        if self._roster.remove(worker) is not None:
            self._placement.bar(node, why)

    def give_back(self, worker: str) -> None:
        """Note that a subround is done with its worker."""
        found = self._roster.leased(worker)
        if found is not None:
            found.state, found.subround = "idle", None

    def begin_use(
        self, worker: str, begun_s: float, timeout_s: float, siblings: str
    ) -> None:
        """Note that a lease that was kept is used again.

        Args:
            worker: its name.
            begun_s: since when, see `decide`.
            timeout_s: see `ask`; from then on.
            siblings: see `ask`.
        """
        found = self._roster.leased(worker)
        if found is None or found.subround is None:
            return
        found.deadline_s = begun_s + timeout_s
        self._stragglers.forget(found.subround)
        if siblings:
            self._stragglers.begin(found.subround, siblings, begun_s)

    def end_use(self, worker: str, ended_s: float) -> None:
        """Note that a leased worker is done, and is kept by who leased it."""
        found = self._roster.leased(worker)
        if found is None or found.subround is None:
            return
        found.deadline_s = math.inf
        self._stragglers.done(found.subround, ended_s)

    def abandon(self, worker: str, until_s: float) -> None:
        """Note that nobody wants what a leased worker still works on.

        It stays leased until it is given back; if it is not by then, it is ended.
        """
        found = self._roster.leased(worker)
        if found is not None:
            found.subround, found.deadline_s = None, until_s

    def lost(
        self, worker: str, failure_class: FailureClass, detail: str
    ) -> FailureClass:
        """Note that a worker is gone; a second report of the same loss is ignored.

        Args:
            worker: its name.
            failure_class: what it died of, as far as can be told from its death.
            detail: in words, for the error that may come of it.

        Returns:
            The class that it counts against.
        """
        found = self._roster.remove(worker)
        if found is None:
            return failure_class
        if failure_class == "crash" and self._placement.is_draining(found.node):
            failure_class = "preemption"
        self._placement.suspect(found.node)
        if found.state == "starting":
            self._failed_starts.note(detail)
        elif found.subround is not None:
            self.failed(found.subround, failure_class, detail)
        return failure_class

    def failed(self, subround: str, failure_class: FailureClass, detail: str) -> None:
        """Count a failure of a subround that is no worker's."""
        self._budgets.fail(subround, failure_class, detail)

    def forget(self, subround: str) -> None:
        """Drop what is counted for a subround that ended."""
        self._stragglers.forget(subround)
        self._budgets.forget(subround)

    def decide(self, now_s: float) -> list[Action]:
        """Return what is to be done now, in order; the pool takes it as done.

        Args:
            now_s: seconds of any clock that only goes forward.
        """
        actions: list[Action] = [*self._expire(now_s), *self._end_hung(now_s)]
        actions += [*self._tickets.refuse_spent(), *self._growth.retire()]
        is_short = self.num_ready < self._size.least
        if self._failed_starts.allow(now_s, is_short=is_short):
            actions += self._growth.start(now_s)
        elif is_short:
            actions += self._refuse_all(self._failed_starts.give_up(), "fatal")
        # Those that start count: nobody waits for a replacement while one worker lives.
        if self.num_workers >= self._size.least:
            actions += self._tickets.grant(now_s)
            actions += self._tickets.grant_spares(now_s)
        return [*actions, *self._wait(now_s), *self._growth.request()]

    def next_deadline_s(self) -> float | None:
        """Return when `decide` is to be called again if nothing happens before."""
        deadlines = [*self._roster.deadlines_s(), *self._tickets.spares_due_s()]
        others = [self._failed_starts.paused_until_s, self._shortage.next_deadline_s()]
        deadlines += [other_s for other_s in others if other_s is not None]
        return min(deadlines, default=None)

    @property
    def is_awaited(self) -> bool:
        """Whether a ticket waits for a worker."""
        return self._tickets.is_waiting

    @property
    def is_full(self) -> bool:
        """Whether all workers wanted are ready or start, on nodes that stay."""
        return self._size.most <= self.num_workers == len(self._roster)

    @property
    def num_ready(self) -> int:
        """Workers that are idle or leased, on nodes that stay."""
        return self._roster.num_ready

    @property
    def num_workers(self) -> int:
        """Workers that are ready or start, on nodes that stay."""
        return self._roster.num_workers

    def num_unplaced(self, now_s: float) -> int:
        """Return how many workers wait for room: they start, or do not even that.

        One that is to have a place at once takes a while to answer from there.
        """
        if not self._placement.is_known:
            return 0
        waiting = self._roster.num_unplaced(now_s - _PLACED_WITHIN_S)
        return max(waiting, self._size.least - self.num_workers)

    def _expire(self, now_s: float) -> list[Action]:
        names = self._roster.overdue("starting", now_s)
        detail = (
            f"it was not ready within {self._start_timeout_s:.0f} s"
            " (`workers.start_timeout_s`); is the cluster short of what `workers` asks"
            " for?"
        )
        for name in names:
            self.lost(name, "crash", detail)
        return [Stop(name, detail) for name in names]

    def _end_hung(self, now_s: float) -> list[Action]:
        stops: list[Action] = []
        for name in self._roster.overdue("leased", now_s):
            detail = (
                f"`{name}` had not finished within the time of its subround"
                " (`subrounds.timeout_s`), and was ended."
            )
            self.lost(name, "hang", detail)
            stops.append(Stop(name, detail))
        return stops

    def _refuse_all(self, message: str, failure_class: str) -> list[Action]:
        self._shortage.end()
        return [*self._tickets.refuse_all(message, failure_class)]

    def _wait(self, now_s: float) -> list[Action]:
        """Look at the cluster while tickets wait and there is no room for the least.

        Workers that start have a time limit of their own.
        """
        if not self.is_awaited or self.num_workers >= self._size.least:
            self._shortage.end()
            return []
        waited_s = self._shortage.wait(now_s)
        if self._shortage.is_over(now_s) or self._growth.is_barred():
            found, last = (
                f"{self.num_ready} after {waited_s:.0f} s",
                self._failed_starts.last,
            )
            message = self._shortage.describe(found, self._placement, last)
            return self._refuse_all(message, SHORTAGE)
        return [Look()] if self._shortage.look(now_s) else []

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

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ray_fed.cluster.pool.actions import (
    SHORTAGE,
    Action,
    FailureClass,
    Grant,
    Look,
    Refuse,
    Request,
    Size,
    Start,
    Stop,
)
from ray_fed.cluster.pool.placement import Node, Placement
from ray_fed.cluster.pool.stragglers import Stragglers

COPY = " copy"
"""Ends the name under which a straggler has its second worker."""

FURTHER = " worker "
"""Stands between a subround's name and a number in the names of its further leases."""

MAX_FAILED_STARTS = 3
"""Starts that fail one after another before everyone who waits is refused."""

START_PAUSE_S = 30.0
"""Seconds after so many failures until starts are tried again, while others work."""


LOOK_S = 1.0
"""How often to look at the cluster while a round waits for workers to be there, or
while there is nothing to hope for from it."""


@dataclasses.dataclass
class _Worker:
    state: Literal["starting", "idle", "leased"]
    deadline_s: float
    node: str | None
    subround: str | None = None


@dataclasses.dataclass(frozen=True)
class _Ticket:
    subround: str
    timeout_s: float
    siblings: str = ""
    prefers: str = ""


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
        budgets: Mapping[FailureClass, int],
        start_timeout_s: float,
        stragglers: Stragglers | None = None,
    ) -> None:
        self._size = size
        self._placement = Placement()
        self._requested = 0
        self._short_since_s: float | None = None
        self._look_at_s = 0.0
        self._budgets = budgets
        self._start_timeout_s = start_timeout_s
        self._workers: dict[str, _Worker] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._spares: dict[int, _Ticket] = {}
        self._stragglers = stragglers or Stragglers(math.inf, math.inf)
        self._names = itertools.count()
        self._ids = itertools.count()
        self._attempts: collections.Counter[str] = collections.Counter()
        self._failures: collections.Counter[tuple[str, str]] = collections.Counter()
        self._last_failure: dict[str, tuple[FailureClass, str]] = {}
        self._failed_starts: list[str] = []
        self._paused_until_s: float | None = None

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
        ticket = next(self._ids)
        self._tickets[ticket] = _Ticket(subround, timeout_s, siblings, prefers)
        return ticket

    def ask_spare(self, subround: str, timeout_s: float = math.inf) -> int:
        """Ask for a second worker for a subround that has one, should it straggle.

        It is given when nobody else waits for a worker. Losing it counts for nobody.
        """
        ticket = next(self._ids)
        self._spares[ticket] = _Ticket(subround, timeout_s)
        return ticket

    def lease_idle(self, subround: str, count: int, deadline_s: float) -> list[str]:
        """Lease workers that are idle now to a subround that has one; return them.

        Losing one of them counts as a failure of the subround. Nobody waits for these:
        there may be none, and there are none while a ticket waits.

        Args:
            subround: its name.
            count: at most so many.
            deadline_s: when they count as hung; see `decide`.
        """
        found = [] if self._tickets else self._idle()[:count]
        for worker in found:
            self._hand_out(worker, subround, deadline_s)
        return found

    def finish(self, subround: str, now_s: float) -> None:
        """Note that a subround has its result."""
        self._stragglers.done(subround, now_s)

    def withdraw(self, ticket: int) -> None:
        """Take a ticket back that is still waiting."""
        self._tickets.pop(ticket, None)
        self._spares.pop(ticket, None)

    def survey(self, nodes: Sequence[Node]) -> None:
        """Take note of what the cluster has: all nodes that are alive."""
        holding = (w.node for w in self._workers.values() if w.state != "starting")
        self._placement.survey(nodes, _count(holding))

    def ready(self, worker: str, node: str) -> None:
        """Note that a worker answered, and from which node."""
        found = self._workers.get(worker)
        if found is not None and found.state == "starting":
            found.state, found.node = "idle", node
            self._placement.trust(node)
            self._failed_starts.clear()
            self._paused_until_s = None

    def bar(self, worker: str, node: str, why: str) -> None:
        """Note that a worker answered that must not be used, nor others of its node."""
        if self._workers.pop(worker, None) is not None:
            self._placement.bar(node, why)

    def give_back(self, worker: str) -> None:
        """Note that a subround is done with its worker."""
        found = self._leased(worker)
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
        found = self._leased(worker)
        if found is None or found.subround is None:
            return
        found.deadline_s = begun_s + timeout_s
        self._stragglers.forget(found.subround)
        if siblings:
            self._stragglers.begin(found.subround, siblings, begun_s)

    def end_use(self, worker: str, ended_s: float) -> None:
        """Note that a leased worker is done, and is kept by who leased it."""
        found = self._leased(worker)
        if found is None or found.subround is None:
            return
        found.deadline_s = math.inf
        self._stragglers.done(found.subround, ended_s)

    def abandon(self, worker: str, until_s: float) -> None:
        """Note that nobody wants what a leased worker still works on.

        It stays leased until it is given back; if it is not by then, it is ended.
        """
        found = self._leased(worker)
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
        found = self._workers.pop(worker, None)
        if found is None:
            return failure_class
        if failure_class == "crash" and self._placement.is_draining(found.node):
            failure_class = "preemption"
        self._placement.suspect(found.node)
        if found.state == "starting":
            self._failed_starts.append(detail)
        elif found.subround is not None:
            self.failed(found.subround, failure_class, detail)
        return failure_class

    def failed(self, subround: str, failure_class: FailureClass, detail: str) -> None:
        """Count a failure of a subround that is no worker's."""
        self._failures[subround, failure_class] += 1
        self._last_failure[subround] = (failure_class, detail)

    def forget(self, subround: str) -> None:
        """Drop what is counted for a subround that ended."""
        self._stragglers.forget(subround)
        self._attempts.pop(subround, None)
        self._last_failure.pop(subround, None)
        for failure_class in self._budgets:
            self._failures.pop((subround, failure_class), None)

    def decide(self, now_s: float) -> list[Action]:
        """Return what is to be done now, in order; the pool takes it as done.

        Args:
            now_s: seconds of any clock that only goes forward.
        """
        actions: list[Action] = [*self._expire(now_s), *self._end_hung(now_s)]
        actions += [*self._refuse_spent(), *self._retire()]
        if self._may_start(now_s):
            actions += self._replace(now_s)
        elif self.num_ready < self._size.least:
            actions += self._refuse_failed()
        # Those that start count: nobody waits for a replacement while one worker lives.
        if self.num_workers >= self._size.least:
            actions += [*self._grant(now_s), *self._grant_spares(now_s)]
        return [*actions, *self._wait(now_s), *self._request()]

    def _may_start(self, now_s: float) -> bool:
        """Return whether to start workers: not for a while after too many failures."""
        if len(self._failed_starts) < MAX_FAILED_STARTS:
            return True
        if self._paused_until_s is None:
            self._paused_until_s = now_s + START_PAUSE_S
        if self.num_ready < self._size.least or now_s < self._paused_until_s:
            return False
        self._failed_starts.clear()
        self._paused_until_s = None
        return True

    def next_deadline_s(self) -> float | None:
        """Return when `decide` is to be called again if nothing happens before."""
        deadlines = [
            worker.deadline_s
            for worker in self._workers.values()
            if worker.state != "idle" and worker.deadline_s < math.inf
        ]
        if self._paused_until_s is not None:
            deadlines.append(self._paused_until_s)
        if self._idle():
            dues = [self._stragglers.due_s(s.subround) for s in self._spares.values()]
            deadlines += [due_s for due_s in dues if due_s is not None]
        if self._short_since_s is not None:
            ends_s = self._short_since_s + self._size.wait_timeout_s
            deadlines.append(min(ends_s, self._look_at_s))
        return min(deadlines, default=None)

    @property
    def is_awaited(self) -> bool:
        """Whether a ticket waits for a worker."""
        return bool(self._tickets)

    @property
    def is_full(self) -> bool:
        """Whether it has all the workers that are wanted, or has them start.

        And none on a node that goes.
        """
        return self._size.most <= self.num_workers == len(self._workers)

    @property
    def num_ready(self) -> int:
        """Workers that are idle or leased, on nodes that stay."""
        return sum(worker.state != "starting" for worker in self._staying())

    @property
    def num_workers(self) -> int:
        """Workers that are ready or start, on nodes that stay."""
        return len(self._staying())

    def _staying(self) -> list[_Worker]:
        workers = self._workers.values()
        return [w for w in workers if not self._placement.is_leaving(w.node)]

    def _refuse_spent(self) -> list[Action]:
        refused: list[Action] = []
        for ticket, asked in list(self._tickets.items()):
            subround = asked.subround
            failure_class, detail = self._last_failure.get(subround, (None, ""))
            if failure_class is None:
                continue
            failures = self._failures[subround, failure_class]
            budget = self._budgets[failure_class]
            if failures > budget:
                del self._tickets[ticket]
                message = (
                    f"Expected at most {budget} failures of {failure_class}"
                    f" in one subround (`retry.{failure_class}`), found {failures}."
                    f" The last: {detail}"
                )
                refused.append(Refuse(ticket, message, failure_class))
        return refused

    def _expire(self, now_s: float) -> list[Action]:
        expired = [
            name
            for name, worker in self._workers.items()
            if worker.state == "starting" and worker.deadline_s <= now_s
        ]
        detail = (
            f"it was not ready within {self._start_timeout_s:.0f} s"
            " (`workers.start_timeout_s`); is the cluster short of what `workers` asks"
            " for?"
        )
        for name in expired:
            self.lost(name, "crash", detail)
        return [Stop(name, detail) for name in expired]

    def _end_hung(self, now_s: float) -> list[Action]:
        hung = [
            name
            for name, worker in self._workers.items()
            if worker.state == "leased" and worker.deadline_s <= now_s
        ]
        stops: list[Action] = []
        for name in hung:
            detail = (
                f"`{name}` had not finished within the time of its subround"
                " (`subrounds.timeout_s`), and was ended."
            )
            self.lost(name, "hang", detail)
            stops.append(Stop(name, detail))
        return stops

    def _refuse_failed(self) -> list[Action]:
        detail = self._failed_starts[-1]
        count = len(self._failed_starts)
        self._failed_starts.clear()
        self._paused_until_s = None
        return self._refuse_all(
            f"Expected workers to start, found {count} failures. The last: {detail}",
            "fatal",
        )

    def _refuse_all(self, message: str, failure_class: str) -> list[Action]:
        tickets = list(self._tickets)
        self._tickets.clear()
        self._short_since_s = None
        return [Refuse(ticket, message, failure_class) for ticket in tickets]

    def _retire(self) -> list[Action]:
        """End workers on nodes that go, but for those that are leased."""
        leaving = [
            name
            for name, worker in self._workers.items()
            if worker.state != "leased" and self._placement.is_leaving(worker.node)
        ]
        for name in leaving:
            del self._workers[name]
        return [Stop(name, "its node goes") for name in leaving]

    def _replace(self, now_s: float) -> list[Action]:
        started: list[Action] = []
        while self.num_workers < self._size.most:
            node = self._find_node()
            if node is None and not self._may_queue():
                break
            name = f"worker {next(self._names)}"
            deadline_s = now_s + self._start_timeout_s
            self._workers[name] = _Worker("starting", deadline_s, node)
            started.append(Start(name, node))
        return started

    def _find_node(self) -> str | None:
        return self._placement.choose(_count(w.node for w in self._staying()))

    def _may_queue(self) -> bool:
        capacity = self._placement.capacity()
        return self._size.is_fixed and self.num_workers < capacity

    def _wait(self, now_s: float) -> list[Action]:
        """Look at the cluster while tickets wait and there is no room for the least.

        Workers that start have a time limit of their own.
        """
        if not self._tickets or self.num_workers >= self._size.least:
            self._short_since_s = None
            return []
        if self._short_since_s is None:
            self._short_since_s, self._look_at_s = now_s, now_s + LOOK_S
        ends_s = self._short_since_s + self._size.wait_timeout_s
        if now_s >= ends_s or self._is_barred():
            message = self._describe_shortage(now_s - self._short_since_s)
            return self._refuse_all(message, SHORTAGE)
        if now_s < self._look_at_s:
            return []
        self._look_at_s = now_s + LOOK_S
        return [Look()]

    def _is_barred(self) -> bool:
        """Return whether only nodes are left whose workers were refused."""
        is_full = self.num_workers == self.num_ready and not self._placement.capacity()
        return is_full and bool(self._placement.barred)

    def _describe_shortage(self, waited_s: float) -> str:
        failed = self._failed_starts
        last = f" The last start failed: {failed[-1]}." if failed else ""
        return (
            f"Expected at least {self._size.least} workers (`workers.count`), each with"
            f" {self._size.each}, found {self.num_ready} after {waited_s:.0f} s"
            f" (`workers.wait_timeout_s`), and {self._placement}.{last} Add nodes,"
            " lower what `workers` asks for, or wait longer."
        )

    def _request(self) -> list[Action]:
        """Ask for all workers that are wanted while there is no room for some.

        For the most, not the least: it is what the user is ready to use, and whoever
        adds nodes has a limit of its own.
        """
        if not self._placement.is_known:
            return []
        is_short = self.num_workers < self._size.most
        is_full = self._find_node() is None and not self._may_queue()
        count = self._size.most if is_short and is_full else 0
        if count == self._requested:
            return []
        self._requested = count
        return [Request(count)]

    def _grant(self, now_s: float) -> list[Action]:
        granted: list[Action] = []
        idle = self._idle()
        for ticket, asked in list(self._tickets.items())[: len(idle)]:
            name = asked.prefers if asked.prefers in idle else idle[0]
            idle.remove(name)
            subround = asked.subround
            self._hand_out(name, subround, now_s + asked.timeout_s)
            self._attempts[subround] += 1
            if asked.siblings:
                self._stragglers.begin(subround, asked.siblings, now_s)
            del self._tickets[ticket]
            granted.append(Grant(ticket, name, self._attempts[subround]))
        return granted

    def _grant_spares(self, now_s: float) -> list[Action]:
        """Give stragglers what is idle still: nobody else waits, then."""
        granted: list[Action] = []
        due: list[tuple[float, int]] = []
        for ticket, asked in self._spares.items():
            due_s = self._stragglers.due_s(asked.subround)
            if due_s is not None and due_s <= now_s:
                due.append((due_s, ticket))
        for (_, ticket), name in zip(sorted(due), self._idle(), strict=False):
            asked = self._spares.pop(ticket)
            self._hand_out(name, None, now_s + asked.timeout_s)
            granted.append(Grant(ticket, name, self._attempts[asked.subround]))
        return granted

    def _idle(self) -> list[str]:
        """Return the idle workers: on nodes that stay, as others were ended."""
        return [name for name, found in self._workers.items() if found.state == "idle"]

    def _leased(self, worker: str) -> _Worker | None:
        found = self._workers.get(worker)
        return found if found is not None and found.state == "leased" else None

    def _hand_out(self, name: str, subround: str | None, deadline_s: float) -> None:
        worker = self._workers[name]
        worker.state, worker.subround, worker.deadline_s = (
            "leased",
            subround,
            deadline_s,
        )


def _count(nodes: Iterable[str | None]) -> Mapping[str, int]:
    return collections.Counter(node for node in nodes if node is not None)

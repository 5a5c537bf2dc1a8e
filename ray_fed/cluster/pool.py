"""Which worker runs which subround, and what a failure costs: decisions, no I/O.

The pool takes note of what happened (`ready`, `lost`, `ask`, `give_back`) and says on
`decide` what is to be done. Whoever hosts it does that and nothing else:

    starting --ready--> idle --Grant--> leased --give_back--> idle
        |                 |               |
        +----- lost ------+----- lost ----+----> gone; a Start replaces it

A lost worker counts against the budget of the subround that held it, by class.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Literal

from ray_fed.cluster.stragglers import Stragglers

FailureClass = Literal["crash", "preemption", "memory", "hang"]

COPY = " copy"
"""Ends the name under which a straggler has its second worker."""

MAX_FAILED_STARTS = 3
"""Starts that fail one after another before everyone who waits is refused."""

START_PAUSE_S = 30.0
"""Seconds after so many failures until starts are tried again, while others work."""


@dataclasses.dataclass(frozen=True)
class Start:
    """Start a worker."""

    worker: str


@dataclasses.dataclass(frozen=True)
class Stop:
    """End a worker that did not become ready in time, or hangs.

    Attributes:
        worker: its name.
        detail: why, in words.
    """

    worker: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Grant:
    """Give a worker to a ticket.

    Attributes:
        ticket: that asked.
        worker: now its own.
        attempt: how many leases the ticket's subround was given, this one included.
    """

    ticket: int
    worker: str
    attempt: int


@dataclasses.dataclass(frozen=True)
class Refuse:
    """Tell a ticket that there will be no worker for it, and why."""

    ticket: int
    message: str
    failure_class: str


Action = Start | Stop | Grant | Refuse


@dataclasses.dataclass
class _Worker:
    state: Literal["starting", "idle", "leased"]
    deadline_s: float
    subround: str | None = None


@dataclasses.dataclass(frozen=True)
class _Ticket:
    subround: str
    timeout_s: float
    siblings: str = ""


class Pool:
    """The state of a pool of a fixed number of workers.

    Args:
        count: workers to keep, >= 1.
        budgets: failures of each class that one subround may have.
        start_timeout_s: seconds within which a worker must become ready.
        stragglers: decides who gets a second worker, where one is idle; owned.
    """

    def __init__(
        self,
        count: int,
        budgets: Mapping[FailureClass, int],
        start_timeout_s: float,
        stragglers: Stragglers | None = None,
    ) -> None:
        self._count = count
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
        self, subround: str, timeout_s: float = math.inf, siblings: str = ""
    ) -> int:
        """Ask for a worker for a subround; return the ticket to decide on.

        Args:
            subround: its name.
            timeout_s: seconds from the lease until the worker counts as hung.
            siblings: names those that do as much; empty: nothing does.
        """
        ticket = next(self._ids)
        self._tickets[ticket] = _Ticket(subround, timeout_s, siblings)
        return ticket

    def ask_spare(self, subround: str, timeout_s: float = math.inf) -> int:
        """Ask for a second worker for a subround that has one, should it straggle.

        It is given when nobody else waits for a worker. Losing it counts for nobody.
        """
        ticket = next(self._ids)
        self._spares[ticket] = _Ticket(subround, timeout_s)
        return ticket

    def finish(self, subround: str, now_s: float) -> None:
        """Note that a subround has its result."""
        self._stragglers.done(subround, now_s)

    def withdraw(self, ticket: int) -> None:
        """Take a ticket back that is still waiting."""
        self._tickets.pop(ticket, None)
        self._spares.pop(ticket, None)

    def ready(self, worker: str) -> None:
        """Note that a worker answered."""
        found = self._workers.get(worker)
        if found is not None and found.state == "starting":
            found.state = "idle"
            self._failed_starts.clear()
            self._paused_until_s = None

    def give_back(self, worker: str) -> None:
        """Note that a subround is done with its worker."""
        found = self._workers.get(worker)
        if found is not None and found.state == "leased":
            found.state, found.subround = "idle", None

    def abandon(self, worker: str, until_s: float) -> None:
        """Note that nobody wants what a leased worker still works on.

        It stays leased until it is given back; if it is not by then, it is ended.
        """
        found = self._workers.get(worker)
        if found is not None and found.state == "leased":
            found.subround, found.deadline_s = None, until_s

    def lost(self, worker: str, failure_class: FailureClass, detail: str) -> None:
        """Note that a worker is gone; a second report of the same loss is ignored.

        Args:
            worker: its name.
            failure_class: what it died of.
            detail: in words, for the error that may come of it.
        """
        found = self._workers.pop(worker, None)
        if found is None:
            return
        if found.state == "starting":
            self._failed_starts.append(detail)
        elif found.subround is not None:
            self.failed(found.subround, failure_class, detail)

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
        actions += self._refuse_spent()
        if self._may_start(now_s):
            actions += self._replace(now_s)
        elif self.num_ready == 0:
            actions += self._refuse_all()
        return [*actions, *self._grant(now_s), *self._grant_spares(now_s)]

    def _may_start(self, now_s: float) -> bool:
        """Return whether to start workers: not for a while after too many failures."""
        if len(self._failed_starts) < MAX_FAILED_STARTS:
            return True
        if self._paused_until_s is None:
            self._paused_until_s = now_s + START_PAUSE_S
        if self.num_ready == 0 or now_s < self._paused_until_s:
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
        return min(deadlines, default=None)

    @property
    def num_ready(self) -> int:
        """Workers that are idle or leased."""
        return sum(worker.state != "starting" for worker in self._workers.values())

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

    def _refuse_all(self) -> list[Action]:
        detail = self._failed_starts[-1]
        count = len(self._failed_starts)
        tickets = list(self._tickets)
        self._tickets.clear()
        self._failed_starts.clear()
        self._paused_until_s = None
        message = (
            f"Expected workers to start, found {count} failures. The last: {detail}"
        )
        return [Refuse(ticket, message, "fatal") for ticket in tickets]

    def _replace(self, now_s: float) -> list[Action]:
        started: list[Action] = []
        while len(self._workers) < self._count:
            name = f"worker {next(self._names)}"
            self._workers[name] = _Worker("starting", now_s + self._start_timeout_s)
            started.append(Start(name))
        return started

    def _grant(self, now_s: float) -> list[Action]:
        granted: list[Action] = []
        for (ticket, asked), name in zip(
            list(self._tickets.items()), self._idle(), strict=False
        ):
            subround = asked.subround
            self._hand_out(name, subround, now_s + asked.timeout_s)
            self._attempts[subround] += 1
            if asked.siblings:
                self._stragglers.begin(subround, asked.siblings, now_s)
            del self._tickets[ticket]
            granted.append(Grant(ticket, name, self._attempts[subround]))
        return granted

    def _grant_spares(self, now_s: float) -> list[Action]:
        granted: list[Action] = []
        if self._tickets:
            return granted
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
        return [name for name, found in self._workers.items() if found.state == "idle"]

    def _hand_out(self, name: str, subround: str | None, deadline_s: float) -> None:
        worker = self._workers[name]
        worker.state, worker.subround, worker.deadline_s = (
            "leased",
            subround,
            deadline_s,
        )

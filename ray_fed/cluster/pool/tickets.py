"""Who waits for a worker, and who is given one that is idle."""

import dataclasses
import itertools
import math

from ray_fed.cluster.pool.actions import Grant, Refuse
from ray_fed.cluster.pool.budgets import Budgets
from ray_fed.cluster.pool.roster import Roster
from ray_fed.cluster.pool.stragglers import Stragglers


@dataclasses.dataclass(frozen=True)
class _Ticket:
    subround: str
    timeout_s: float
    siblings: str = ""
    prefers: str = ""


class Tickets:
    """The subrounds that wait for a worker, in the order in which they asked.

    Args:
        roster: of the workers; not owned.
        budgets: of failures; not owned.
        stragglers: decides who gets a second worker, where one is idle; not owned.
    """

    def __init__(
        self, roster: Roster, budgets: Budgets, stragglers: Stragglers
    ) -> None:
        self._roster = roster
        self._budgets = budgets
        self._stragglers = stragglers
        self._tickets: dict[int, _Ticket] = {}
        self._spares: dict[int, _Ticket] = {}
        self._ids = itertools.count()

    @property
    def is_waiting(self) -> bool:
        """Whether a subround waits for its first worker."""
        return bool(self._tickets)

    def ask(self, subround: str, timeout_s: float, siblings: str, prefers: str) -> int:
        """Ask for a worker; see `decisions.Pool.ask`."""
        ticket = next(self._ids)
        self._tickets[ticket] = _Ticket(subround, timeout_s, siblings, prefers)
        return ticket

    def ask_spare(self, subround: str, timeout_s: float) -> int:
        """Ask for a second worker; see `decisions.Pool.ask_spare`."""
        ticket = next(self._ids)
        self._spares[ticket] = _Ticket(subround, timeout_s)
        return ticket

    def withdraw(self, ticket: int) -> None:
        """Take a ticket back that is still waiting."""
        self._tickets.pop(ticket, None)
        self._spares.pop(ticket, None)

    def refuse_all(self, message: str, failure_class: str) -> list[Refuse]:
        """Refuse everyone who waits for a first worker."""
        tickets = list(self._tickets)
        self._tickets.clear()
        return [Refuse(ticket, message, failure_class) for ticket in tickets]

    def refuse_spent(self) -> list[Refuse]:
        """Refuse the subrounds that failed too often."""
        refused: list[Refuse] = []
        for ticket, asked in list(self._tickets.items()):
            spent = self._budgets.find_spent(asked.subround)
            if spent is not None:
                del self._tickets[ticket]
                failure_class, message = spent
                refused.append(Refuse(ticket, message, failure_class))
        return refused

    def grant(self, now_s: float) -> list[Grant]:
        """Give the idle workers to those that wait, the first who asked first."""
        granted: list[Grant] = []
        idle = self._roster.idle()
        for ticket, asked in list(self._tickets.items())[: len(idle)]:
            name = asked.prefers if asked.prefers in idle else idle[0]
            idle.remove(name)
            subround = asked.subround
            self._roster.lease(name, subround, now_s + asked.timeout_s)
            attempt = self._budgets.begin_attempt(subround)
            if asked.siblings:
                self._stragglers.begin(subround, asked.siblings, now_s)
            del self._tickets[ticket]
            granted.append(Grant(ticket, name, attempt))
        return granted

    def grant_spares(self, now_s: float) -> list[Grant]:
        """Give stragglers what is idle still: nobody else waits, then."""
        granted: list[Grant] = []
        due: list[tuple[float, int]] = []
        for ticket, asked in self._spares.items():
            due_s = self._stragglers.due_s(asked.subround)
            if due_s is not None and due_s <= now_s:
                due.append((due_s, ticket))
        for (_, ticket), name in zip(sorted(due), self._roster.idle(), strict=False):
            asked = self._spares.pop(ticket)
            self._roster.lease(name, None, now_s + asked.timeout_s)
            granted.append(Grant(ticket, name, self._budgets.attempts(asked.subround)))
        return granted

    def spares_due_s(self) -> list[float]:
        """Return when those that ask for a second worker will be stragglers.

        Nothing where no worker is idle, or where too little is known to tell.
        """
        if not self._roster.idle():
            return []
        due = [self._stragglers.due_s(s.subround) for s in self._spares.values()]
        return [due_s for due_s in due if due_s is not None and due_s < math.inf]

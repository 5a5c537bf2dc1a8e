"""The workers of a pool: which state each is in, on which node, and until when."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

from ray_fed.cluster.pool.placement import Placement

State = Literal["starting", "idle", "leased"]


@dataclasses.dataclass
class Member:
    """A worker of the pool.

    Attributes:
        state: see `decisions`.
        deadline_s: when it counts as hung in that state.
        node: Ray's id; None: not known yet.
        subround: that a failure counts against; None: none.
        asked_s: when it was to start.
        is_placed: whether a worker that starts has its place.
    """

    state: State
    deadline_s: float
    node: str | None
    subround: str | None = None
    asked_s: float = 0.0
    is_placed: bool = False


class Roster:
    """The workers that start, are idle or are leased, by name.

    Args:
        placement: which nodes go; not owned.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._members: dict[str, Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def start(
        self, worker: str, now_s: float, deadline_s: float, node: str | None
    ) -> None:
        """Add a worker that starts."""
        member = Member("starting", deadline_s, node, asked_s=now_s)
        self._members[worker] = member

    def starting(self, worker: str) -> Member | None:
        """Return a worker that starts; None where it does not."""
        return self._in_state(worker, "starting")

    def leased(self, worker: str) -> Member | None:
        """Return a worker that is leased; None where it is not."""
        return self._in_state(worker, "leased")

    def _in_state(self, worker: str, state: State) -> Member | None:
        found = self._members.get(worker)
        return found if found is not None and found.state == state else None

    def remove(self, worker: str) -> Member | None:
        """Return a worker that is gone, as it was; None where it is not here."""
        return self._members.pop(worker, None)

    def lease(self, worker: str, subround: str | None, deadline_s: float) -> None:
        """Lease an idle worker; its loss counts against a subround that is given."""
        member = self._members[worker]
        member.state, member.subround = "leased", subround
        member.deadline_s = deadline_s

    def idle(self) -> list[str]:
        """Return the idle workers: on nodes that stay, as others were ended."""
        return [name for name, found in self._members.items() if found.state == "idle"]

    def overdue(self, state: State, now_s: float) -> list[str]:
        """Return the workers in a state whose deadline has passed."""
        return [
            name
            for name, member in self._members.items()
            if member.state == state and member.deadline_s <= now_s
        ]

    def deadlines_s(self) -> list[float]:
        """Return when workers will be overdue that start or are leased."""
        return [
            member.deadline_s
            for member in self._members.values()
            if member.state != "idle" and member.deadline_s < math.inf
        ]

    def leaving(self) -> list[str]:
        """Return the workers on nodes that go, but for those that are leased."""
        return [
            name
            for name, member in self._members.items()
            if member.state != "leased" and self._placement.is_leaving(member.node)
        ]

    def staying(self) -> list[Member]:
        """Return the workers on nodes that stay."""
        members = self._members.values()
        return [m for m in members if not self._placement.is_leaving(m.node)]

    @property
    def num_workers(self) -> int:
        """Workers that are ready or start, on nodes that stay."""
        return len(self.staying())

    @property
    def num_ready(self) -> int:
        """Workers that are idle or leased, on nodes that stay."""
        return sum(member.state != "starting" for member in self.staying())

    def num_unplaced(self, asked_s: float) -> int:
        """Return how many start without a place: for no node, or asked before then."""
        return sum(
            member.state == "starting"
            and not member.is_placed
            and (member.node is None or member.asked_s < asked_s)
            for member in self.staying()
        )

    def nodes(self) -> Iterable[str | None]:
        """Return the node of each worker that is idle or leased."""
        return [m.node for m in self._members.values() if m.state != "starting"]

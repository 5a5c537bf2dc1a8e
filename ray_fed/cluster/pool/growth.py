"""How many workers a pool starts, ends and asks the cluster for."""

import collections
import itertools
from collections.abc import Iterable, Mapping

from ray_fed.cluster.pool.actions import Request, Size, Start, Stop
from ray_fed.cluster.pool.placement import Placement
from ray_fed.cluster.pool.roster import Roster


class Growth:
    """Brings the number of workers to what the pool wants and the nodes have room for.

    Args:
        size: of the pool.
        placement: where there is room; not owned.
        roster: of the workers; not owned.
        start_timeout_s: seconds within which a worker must become ready.
    """

    def __init__(
        self, size: Size, placement: Placement, roster: Roster, start_timeout_s: float
    ) -> None:
        self._size = size
        self._placement = placement
        self._roster = roster
        self._start_timeout_s = start_timeout_s
        self._names = itertools.count()
        self._requested = 0

    def retire(self) -> list[Stop]:
        """End workers on nodes that go, but for those that are leased."""
        leaving = self._roster.leaving()
        for name in leaving:
            self._roster.remove(name)
        return [Stop(name, "its node goes") for name in leaving]

    def start(self, now_s: float) -> list[Start]:
        """Start the workers that are missing, where there is room for them."""
        started: list[Start] = []
        while self._roster.num_workers < self._size.most:
            node = self._find_node()
            if node is None and not self._may_queue():
                break
            name = f"worker {next(self._names)}"
            self._roster.start(name, now_s, now_s + self._start_timeout_s, node)
            started.append(Start(name, node))
        return started

    def request(self) -> list[Request]:
        """Ask for all workers that are wanted while there is no room for some.

        For the most, not the least: it is what the user is ready to use, and whoever
        adds nodes has a limit of its own.
        """
        if not self._placement.is_known:
            return []
        is_short = self._roster.num_workers < self._size.most
        is_full = self._find_node() is None and not self._may_queue()
        count = self._size.most if is_short and is_full else 0
        if count == self._requested:
            return []
        self._requested = count
        return [Request(count)]

    def is_barred(self) -> bool:
        """Return whether only nodes are left whose workers were refused."""
        none_starts = self._roster.num_workers == self._roster.num_ready
        is_full = none_starts and not self._placement.capacity()
        return is_full and bool(self._placement.barred)

    def _find_node(self) -> str | None:
        staying = self._roster.staying()
        return self._placement.choose(count_nodes(w.node for w in staying))

    def _may_queue(self) -> bool:
        capacity = self._placement.capacity()
        return self._size.is_fixed and self._roster.num_workers < capacity


def count_nodes(nodes: Iterable[str | None]) -> Mapping[str, int]:
    """Return how many workers are on each node; those of no node are left out."""
    return collections.Counter(node for node in nodes if node is not None)

"""How long tickets wait while the cluster has no room for the least of a pool."""

from ray_fed.cluster.pool.actions import Size
from ray_fed.cluster.pool.placement import Placement

LOOK_S = 1.0
"""How often to look at the cluster while a round waits for workers to be there, or
while there is nothing to hope for from it."""


class Shortage:
    """The time since there was room for too few workers; no time where there is room.

    Args:
        size: of the pool.
    """

    def __init__(self, size: Size) -> None:
        self._size = size
        self._since_s: float | None = None
        self._look_at_s = 0.0

    def end(self) -> None:
        """Note that there is room, or that nobody waits for it."""
        self._since_s = None

    def wait(self, now_s: float) -> float:
        """Note that somebody waits for room; return for how many seconds already."""
        if self._since_s is None:
            self._since_s, self._look_at_s = now_s, now_s + LOOK_S
        return now_s - self._since_s

    def is_over(self, now_s: float) -> bool:
        """Return whether who waits has waited as long as `wait_timeout_s` allows."""
        return self._since_s is not None and now_s >= self._ends_s(self._since_s)

    def look(self, now_s: float) -> bool:
        """Return whether to look at the cluster again; if so, count from now."""
        if now_s < self._look_at_s:
            return False
        self._look_at_s = now_s + LOOK_S
        return True

    def next_deadline_s(self) -> float | None:
        """Return when to decide again; None where nobody waits."""
        if self._since_s is None:
            return None
        return min(self._ends_s(self._since_s), self._look_at_s)

    def describe(self, found: str, room: Placement, last: str | None) -> str:
        """Return the message for everyone who waited too long.

        Args:
            found: how many workers there are, after how long.
            room: what the cluster has.
            last: why the last start failed; None where none did.
        """
        failed = "" if last is None else f" The last start failed: {last}."
        return (
            f"Expected at least {self._size.least} workers (`workers.count`), each with"
            f" {self._size.each}, found {found} (`workers.wait_timeout_s`), and"
            f" {room}.{failed} Add nodes, lower what `workers` asks for, or wait"
            " longer."
        )

    def _ends_s(self, since_s: float) -> float:
        return since_s + self._size.wait_timeout_s

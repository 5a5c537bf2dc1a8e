"""Which subrounds take far longer than their siblings: a decision, no I/O."""

import dataclasses
import statistics


@dataclasses.dataclass
class _Group:
    running: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    seconds: list[float] = dataclasses.field(default_factory=list[float])


class Stragglers:
    """Compares subrounds that run with those of their siblings that are done.

    A subround straggles when it has run for `factor` times the median of its siblings'
    durations, and for `min_s` at least; nothing is said before half of those that were
    begun are done. All times are seconds of one clock, which only goes forward.

    Args:
        factor: > 1.
        min_s: >= 0.
    """

    def __init__(self, factor: float, min_s: float) -> None:
        self._factor = factor
        self._min_s = min_s
        self._groups: dict[str, _Group] = {}
        self._siblings: dict[str, str] = {}  # the group of each subround

    def begin(self, subround: str, siblings: str, now_s: float) -> None:
        """Note that a subround was given a worker; again, where it lost the first.

        Args:
            subround: its name.
            siblings: names those to compare with.
            now_s: of the clock.
        """
        self._siblings[subround] = siblings
        group = self._groups.setdefault(siblings, _Group())
        group.running[subround] = now_s

    def done(self, subround: str, now_s: float) -> None:
        """Note that a subround came to its end; one that is not known is ignored."""
        group = self._groups.get(self._siblings.get(subround, ""))
        if group is not None and subround in group.running:
            group.seconds.append(now_s - group.running.pop(subround))

    def forget(self, subround: str) -> None:
        """Drop a subround; what is known of a group goes with the last of it."""
        siblings = self._siblings.pop(subround, "")
        group = self._groups.get(siblings)
        if group is not None:
            group.running.pop(subround, None)
            if siblings not in self._siblings.values():
                del self._groups[siblings]

    def due_s(self, subround: str) -> float | None:
        """Return when a subround that runs is to be called a straggler.

        None: not as things stand.
        """
        group = self._groups.get(self._siblings.get(subround, ""))
        if group is None or subround not in group.running:
            return None
        if len(group.seconds) < max(1, len(group.running)):
            return None
        limit_s = self._factor * statistics.median(group.seconds)
        return group.running[subround] + max(self._min_s, limit_s)

"""How often each subround was given a worker, and failed, by class of failure."""

import collections
from collections.abc import Mapping

from ray_fed.cluster.pool.actions import FailureClass


class Budgets:
    """Counts what became of subrounds until they end.

    Args:
        limits: failures of each class that one subround may have.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = limits
        self._attempts: collections.Counter[str] = collections.Counter()
        self._failures: collections.Counter[tuple[str, str]] = collections.Counter()
        self._last: dict[str, tuple[FailureClass, str]] = {}

    def attempts(self, subround: str) -> int:
        """Return how often a subround was given a worker."""
        return self._attempts[subround]

    def begin_attempt(self, subround: str) -> int:
        """Count a worker that a subround is given; return the number of the attempt."""
        self._attempts[subround] += 1
        return self._attempts[subround]

    def fail(self, subround: str, failure_class: FailureClass, detail: str) -> None:
        """Count a failure of a subround."""
        self._failures[subround, failure_class] += 1
        self._last[subround] = (failure_class, detail)

    def find_spent(self, subround: str) -> tuple[FailureClass, str] | None:
        """Return (class, message) where a subround failed too often; else None."""
        if subround not in self._last:
            return None
        failure_class, detail = self._last[subround]
        count, limit = (
            self._failures[subround, failure_class],
            self._limits[failure_class],
        )
        if count <= limit:
            return None
        message = (
            f"Expected at most {limit} failures of {failure_class}"
            f" in one subround (`retry.{failure_class}`), found {count}."
            f" The last: {detail}"
        )
        return failure_class, message

    def forget(self, subround: str) -> None:
        """Drop what is counted for a subround that ended."""
        self._attempts.pop(subround, None)
        self._last.pop(subround, None)
        for failure_class in self._limits:
            self._failures.pop((subround, failure_class), None)

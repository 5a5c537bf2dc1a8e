"""What became of the attempts at each subround, for reports and final errors."""

import dataclasses
import math

import ray_fed.errors as errors
from ray_fed.cluster.pool.actions import Failure
from ray_fed.plan import outcomes


@dataclasses.dataclass
class _Subround:
    asked_s: float
    lost: list[outcomes.Attempt] = dataclasses.field(
        default_factory=list[outcomes.Attempt]
    )
    last: Failure | None = None
    uses: int = 0


class AttemptLog:
    """Remembers who was given to which subround, and how it ended.

    All times are seconds of one clock, which only goes forward.
    """

    def __init__(self) -> None:
        self._subrounds: dict[str, _Subround] = {}
        self._running: dict[str, tuple[str, outcomes.Attempt]] = {}  # by worker

    def asked(self, subround: str, now_s: float) -> None:
        """Note that a subround asks for a worker; its times count from the first."""
        self._subrounds.setdefault(subround, _Subround(now_s))

    def granted(
        self, subround: str, attempt: outcomes.Attempt, now_s: float
    ) -> outcomes.Attempt:
        """Note that a subround was given a worker; return the attempt that begins.

        Args:
            subround: that asked.
            attempt: its times and its end are not known yet.
            now_s: of the clock.
        """
        started_s = now_s - self._subrounds[subround].asked_s
        begun = dataclasses.replace(attempt, started_s=started_s)
        self._running[attempt.worker] = (subround, begun)
        return begun

    def begin_use(self, worker: str, begun_s: float) -> None:
        """Note that the lease of a worker is used again: its times count from then."""
        subround, attempt = self._running.get(worker, ("", None))
        found = self._subrounds.get(subround)
        if found is not None and attempt is not None:
            found.asked_s = begun_s
            found.uses += 1
            again = dataclasses.replace(attempt, started_s=0.0)
            self._running[worker] = (subround, again)

    def count_loss_from(self, subround: str, begun_s: float, use: int) -> None:
        """Have the one loss of a subround count from its use, were that not noted yet.

        Args:
            subround: its name; one that lost nothing is ignored.
            begun_s: when the use began in which it lost its worker.
            use: of the lease, counted from 0.
        """
        found = self._subrounds.get(subround)
        if found is not None and found.lost and found.uses < use:
            seconds = max(0.0, self.lost_at_s(subround) - begun_s)
            again = dataclasses.replace(found.lost[-1], started_s=0.0, seconds=seconds)
            found.asked_s, found.lost[-1] = begun_s, again

    def lost(self, worker: str, failure: Failure, now_s: float) -> None:
        """Note that a worker is gone; one that no subround has is ignored."""
        subround, attempt = self._running.pop(worker, ("", None))
        found = self._subrounds.get(subround)
        if found is None or attempt is None:
            return
        seconds = now_s - found.asked_s - attempt.started_s
        ended = dataclasses.replace(
            attempt,
            seconds=seconds,
            ended=failure.failure_class,
            detail=failure.detail,
        )
        found.lost.append(ended)
        found.last = failure

    def lost_at_s(self, subround: str) -> float:
        """Return when a subround lost its latest worker; never is infinite."""
        found = self._subrounds.get(subround)
        if found is None or not found.lost:
            return math.inf
        return found.asked_s + found.lost[-1].started_s + found.lost[-1].seconds

    def done(self, worker: str) -> None:
        """Note that a worker is no subround's any more, and that nothing was lost."""
        self._running.pop(worker, None)

    def forget(self, subround: str) -> None:
        """Drop what is known of a subround that ended."""
        self._subrounds.pop(subround, None)

    def lost_of(self, subround: str) -> tuple[outcomes.Attempt, ...]:
        """Return the attempts of a subround that came to nothing, in order."""
        found = self._subrounds.get(subround)
        return () if found is None else tuple(found.lost)

    def final_error(
        self, subround: str, message: str, failure_class: str
    ) -> errors.LocatedError:
        """Return what a caller sees of a subround that gets no more attempts."""
        found = self._subrounds.get(subround)
        location, cause_text = errors.Location(), ""
        if found is not None and found.last is not None:
            attempt = found.lost[-1]
            location = errors.Location(
                client_index=found.last.client_index,
                node=attempt.node,
                attempt=attempt.attempt,
            )
            cause_text = found.last.cause_text
        if failure_class == "hang":
            return errors.DeadlineError(message, location, cause_text)
        return errors.RetryBudgetError(message, failure_class, location, cause_text)

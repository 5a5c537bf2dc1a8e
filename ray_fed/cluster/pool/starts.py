"""Workers that failed to start, one after another: when to try again."""

MAX_FAILED_STARTS = 3
"""Starts that fail one after another before everyone who waits is refused."""

START_PAUSE_S = 30.0
"""Seconds after so many failures until starts are tried again, while others work."""


class FailedStarts:
    """The starts that failed since a worker last got ready."""

    def __init__(self) -> None:
        self._details: list[str] = []
        self.paused_until_s: float | None = None

    @property
    def last(self) -> str | None:
        """Why the last one failed, in words; None where none did."""
        return self._details[-1] if self._details else None

    def note(self, detail: str) -> None:
        """Count a start that failed."""
        self._details.append(detail)

    def clear(self) -> None:
        """Forget them: a worker got ready, or everyone who waits was refused."""
        self._details.clear()
        self.paused_until_s = None

    def allow(self, now_s: float, *, is_short: bool) -> bool:
        """Return whether to start workers: not for a while after too many failures.

        Args:
            now_s: of the pool's clock.
            is_short: whether fewer workers are ready than the pool needs.
        """
        if len(self._details) < MAX_FAILED_STARTS:
            return True
        if self.paused_until_s is None:
            self.paused_until_s = now_s + START_PAUSE_S
        if is_short or now_s < self.paused_until_s:
            return False
        self.clear()
        return True

    def give_up(self) -> str:
        """Forget them, and return the message for everyone who waits."""
        message = (
            f"Expected workers to start, found {len(self._details)} failures. The last:"
            f" {self.last}"
        )
        self.clear()
        return message

"""How far a run is: a bar in a terminal or notebook, a line of the log elsewhere."""

import logging
from typing import Protocol

import rich.console

from ray_fed.learning.history import RoundRecord
from ray_fed.learning.process_calls import ProcessCalls
from ray_fed.observability.display import RoundProgress

_logger = logging.getLogger("ray_fed.learning.run")
_MOST_NUMBERS = 3


class Progress(Protocol):
    """Shows rounds as they are done."""

    def advance(self, record: RoundRecord) -> None:
        """Show that a round is done."""
        ...

    def close(self) -> None:
        """Leave what is shown."""
        ...


def open_progress(
    calls: ProcessCalls, num_rounds: int, done: int, *, shown: bool
) -> Progress:
    """Return what shows a run, where the standard error of this process goes.

    Args:
        calls: whose events are shown.
        num_rounds: of the whole run.
        done: rounds before a resume.
        shown: whether anything is.
    """
    if not shown:
        return _Nothing()
    console = rich.console.Console(stderr=True)
    if console.is_terminal or console.is_jupyter:
        return _Bar(RoundProgress(num_rounds, console, done), calls)
    return _Log(num_rounds)


class _Nothing:
    def advance(self, record: RoundRecord) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Leave nothing."""


class _Log:
    def __init__(self, num_rounds: int) -> None:
        self._num_rounds = num_rounds

    def advance(self, record: RoundRecord) -> None:
        """Log a line."""
        numbers = ", ".join(f"{k} {v:.4f}" for k, v in _few(record).items())
        done = record.round_index + 1
        _logger.info("round %d/%d: %s", done, self._num_rounds, numbers)

    def close(self) -> None:
        """Leave the log."""


class _Bar:
    def __init__(self, progress: RoundProgress, calls: ProcessCalls) -> None:
        self._progress = progress
        calls.subscribe(progress)
        progress.say("")

    def advance(self, record: RoundRecord) -> None:
        """Move the bar."""
        self._progress.advance(**_few(record))

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.__exit__()


def _few(record: RoundRecord) -> dict[str, float]:
    """Return the numbers to show: of evaluation where there are, without counts."""
    numbers = record.numbers()
    part = "evaluation." if record.evaluation else "training."
    few = {
        name.removeprefix(part): value
        for name, value in numbers.items()
        if name.startswith(part) and not name.endswith("num_examples")
    }
    return dict(list(few.items())[:_MOST_NUMBERS])

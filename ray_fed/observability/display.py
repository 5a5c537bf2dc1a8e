"""A live line for a run of many rounds: how far it is, and its latest numbers.

    events (ray_fed's thread) --+
                                +--> RoundProgress --> a line in the terminal
    advance (the user's loop) --+                      or in a notebook's cell

In what is neither, such as a file, the last state alone is written, when it ends.
"""

import datetime as dt
import html
import math
import time
from typing import Any, Protocol, Self

import rich.console
import rich.progress
import rich.table
import rich.text
from typing_extensions import override

from ray_fed.observability import events

_DRAWN_EVERY_S = 0.1
_BAR_WIDTH = 20


class ProgressView(Protocol):
    """Where the line is drawn."""

    def show(self, done: int, activity: str, numbers: str) -> None:
        """Draw it anew.

        Args:
            done: rounds.
            activity: what goes on now.
            numbers: the latest metrics.
        """
        ...

    def close(self) -> None:
        """Leave the line as it is."""
        ...


class RoundProgress:
    """An event sink that shows a run of rounds; a context manager.

    Args:
        num_rounds: of the run.
        console: where to draw; by default standard error.
        done: rounds of the run that are done before.

    Attributes:
        draws_waits: whether the line is drawn in a terminal, see `events.Sinks`.
    """

    def __init__(
        self,
        num_rounds: int,
        console: rich.console.Console | None = None,
        done: int = 0,
    ) -> None:
        console = console or rich.console.Console(stderr=True)
        self.draws_waits = console.is_terminal
        self._view: ProgressView = (
            NotebookView(num_rounds)
            if console.is_jupyter
            else TerminalView(num_rounds, console)
        )
        self._done = done
        self._activity = self._numbers = ""
        self._subrounds = (0, 0)
        self.retries = 0
        """Attempts beyond the first, of all subrounds so far."""

    def on_event(self, event: events.Event) -> None:
        """Count retries, and the subrounds of a round that has several."""
        match event:
            case events.Waiting():
                self.say(event.activity)
                return
            case events.RoundStarted():
                self._subrounds = (0, event.num_subrounds)
            case events.SubroundFinished():
                done, total = self._subrounds
                self._subrounds = (min(done + 1, total), total)
                self.retries += event.attempts - 1
            case _:
                return
        done, total = self._subrounds
        if total > 1:
            self.say(f"subround {done}/{total}")

    def say(self, activity: str) -> None:
        """Show what goes on, such as "starting Ray"."""
        self._activity = activity
        self._show()

    def advance(self, **metrics: float) -> None:
        """Show that a round is done, and its metrics."""
        self._done += 1
        self._numbers = "  ".join(f"{k} {v:.4f}" for k, v in metrics.items())
        self._show()

    def _show(self) -> None:
        retried = f"  retries {self.retries}" if self.retries else ""
        self._view.show(self._done, self._activity, self._numbers + retried)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._activity = ""
        self._show()
        self._view.close()


class _Pace:
    """Says when to draw: not sooner than a tenth of a second after the last time."""

    def __init__(self) -> None:
        self._drawn = -math.inf

    def is_due(self) -> bool:
        """Return whether to draw now, which counts as drawn then."""
        now = time.monotonic()
        if now - self._drawn < _DRAWN_EVERY_S:
            return False
        self._drawn = now
        return True


class _DetailsColumn(rich.progress.ProgressColumn):
    """The time, the numbers and the activity: cut where a terminal is narrow."""

    @override
    def render(self, task: rich.progress.Task) -> rich.text.Text:
        elapsed_s = int((task.finished_time if task.finished else task.elapsed) or 0)
        found = (
            (str(dt.timedelta(seconds=elapsed_s)), "yellow"),
            (task.fields["numbers"], "cyan"),
            (task.fields["activity"], "dim"),
        )
        parts = [rich.text.Text(*each) for each in found if each[0]]
        return rich.text.Text("  ", no_wrap=True, overflow="ellipsis").join(parts)


class TerminalView(ProgressView):
    """Draws with rich, in place where the console is a terminal.

    Args:
        num_rounds: of the run.
        console: where to draw.
    """

    def __init__(self, num_rounds: int, console: rich.console.Console) -> None:
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("rounds"),
            # Named colours: with 16 of them rich's own show a full bar as an empty one.
            rich.progress.BarColumn(
                bar_width=None,
                style="bright_black",
                complete_style="cyan",
                finished_style="green",
                table_column=rich.table.Column(max_width=_BAR_WIDTH),
            ),
            rich.progress.MofNCompleteColumn(
                table_column=rich.table.Column(no_wrap=True)
            ),
            _DetailsColumn(),
            console=console,
        )
        self._task = self._progress.add_task(
            "rounds", total=num_rounds, numbers="", activity=""
        )
        self._progress.start()
        self._pace = _Pace()

    @override
    def show(self, done: int, activity: str, numbers: str) -> None:
        # Refreshed here, as an import may hold up rich's own thread for seconds. That
        # thread draws what is not.
        self._progress.update(
            self._task,
            completed=done,
            activity=activity,
            numbers=numbers,
            refresh=self._pace.is_due(),
        )

    @override
    def close(self) -> None:
        # Nothing done: what went wrong follows, without a bar above it.
        self._progress.live.transient = not self._progress.tasks[0].completed
        self._progress.stop()


class NotebookView(ProgressView):
    """Draws HTML in the output of a notebook's cell; needs no widgets.

    Args:
        num_rounds: of the run.
    """

    def __init__(self, num_rounds: int) -> None:
        import IPython.display

        self._html: Any = IPython.display.HTML
        self._num_rounds = num_rounds
        self._handle: Any = IPython.display.display(
            self._draw(0, "", ""), display_id=True
        )
        self._done = 0
        self._pace = _Pace()
        self._undrawn: tuple[int, str, str] | None = None

    def _draw(self, done: int, activity: str, numbers: str) -> Any:
        total = self._num_rounds
        text = html.escape("  ".join(filter(None, [numbers, activity])))
        return self._html(
            f'<progress value="{done}" max="{total}"></progress> {done}/{total}  {text}'
        )

    @override
    def show(self, done: int, activity: str, numbers: str) -> None:
        # Every update is a message to the browser: once a round is enough.
        if done <= self._done and activity:
            return
        self._done = done
        self._undrawn = done, activity, numbers
        if self._pace.is_due():
            self._update()

    def _update(self) -> None:
        if self._undrawn is not None:
            self._handle.update(self._draw(*self._undrawn))
            self._undrawn = None

    @override
    def close(self) -> None:
        """Leave the last drawing in the cell."""
        self._update()

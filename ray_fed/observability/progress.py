"""Progress on the screen: a line while a call waits, and the bar of a run.

                WaitLine                              RoundProgress
    terminal    a spinner, gone when the wait ends    a bar, which stays
    notebook    a line in the cell, likewise          a bar in the cell
    elsewhere   INFO lines of the log; with           lines on standard error: the first
                progress="on" on standard error       round, the last, some between

Both are event sinks. ray_fed's thread and the user's loop call them. `show_metrics` in
`learning/run_loop.py` writes the metrics of a line.
"""

import collections
import dataclasses
import datetime as dt
import html
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Literal, Self

import rich.console
import rich.progress
import rich.table
import rich.text
from typing_extensions import override

from ray_fed.observability import events

_logger = logging.getLogger(__name__)


class _Console(rich.console.Console):
    """A console on standard error. Work goes on if nothing can be written there.

    The file may be closed, or its disk full, or the program that reads it may be gone.
    Rich would then raise an error, or end the program.
    """

    def __init__(self) -> None:
        super().__init__(stderr=True)

    @override
    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except (OSError, ValueError):
            self.quiet = True

    @override
    def on_broken_pipe(self) -> None:
        self.quiet = True


class WaitLine:
    """A line that shows what ray_fed waits for: an event sink for `events.Waiting`.

    For other waits, call `say` in a `with` block. `draw` shows a text in place of the
    last text. An empty text removes the line. For `draws_waits` see `events.Sinks`.
    """

    draws_waits = True

    def __init__(self, draw: Callable[[str], None]) -> None:
        self._draw = draw
        self._shown = ""

    @classmethod
    def create(
        cls,
        progress: Literal["auto", "on", "off"],
        console: rich.console.Console | None = None,
    ) -> Self:
        """Return the line for a value of `Config.progress`; see the module's table."""
        console = console or _Console()
        if progress == "off":
            return cls(lambda _: None)
        if console.is_jupyter:
            return cls(_NotebookOutput().draw_line)
        if console.is_terminal:
            return cls(_Spinner(console).draw)

        def write(activity: str) -> None:
            if activity and progress == "on":
                console.print(f"ray_fed: {activity}", markup=False, highlight=False)
            elif activity:
                _logger.info("%s", activity)

        return cls(write)

    def say(self, activity: str) -> None:
        """Show an activity, such as "starting Ray". An empty text ends the wait."""
        if activity != self._shown:
            self._shown = activity
            self._draw(activity)

    def on_event(self, event: events.Event) -> None:
        """Show a wait until the next subround ends."""
        match event:
            case events.Waiting():
                self.say(event.activity)
            case events.SubroundFinished():
                self.say("")
            case _:
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.say("")


class _Spinner:
    """Draws a spinner, the activity and its seconds, with rich."""

    def __init__(self, console: rich.console.Console) -> None:
        self._console = console
        self._progress: rich.progress.Progress | None = None

    def draw(self, activity: str) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if activity:
            self._progress = rich.progress.Progress(
                rich.progress.SpinnerColumn(),
                rich.progress.TextColumn("ray_fed: {task.description}"),
                rich.progress.TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._progress.add_task(activity, total=None)
            self._progress.start()


class _NotebookOutput:
    """An output of a notebook cell that is redrawn in place."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, text: str, content: str) -> None:
        """Draw the HTML `content`, or `text` if the notebook does not show HTML."""
        from IPython.display import display

        drawn = {"text/plain": text, "text/html": content}
        if self._handle is None:
            self._handle = display(drawn, raw=True, display_id=True)
        else:
            self._handle.update(drawn, raw=True)

    def draw_line(self, activity: str) -> None:
        """Draw an activity. An empty text removes the line."""
        if activity:
            line = f"ray_fed: {activity} …"
            self.draw(line, f"<i>{html.escape(line)}</i>")
        elif self._handle is not None:
            self.draw("", "")
            self._handle = None


_DRAWN_EVERY_S = 0.1
_PRINTED_EVERY_S = 5.0
_LINES_A_TIME = 100
"""After the first minutes, a run prints a line whenever its elapsed time has grown by a
hundredth: about 600 lines in a day."""
_BAR_WIDTH = 20
_TIMED_ROUNDS = 32


@dataclasses.dataclass(frozen=True)
class Shown:
    """The progress of a run, as a view shows it.

    Attributes:
        done: The number of rounds so far.
        numbers: The text of the latest metrics and of the number of retries.
        activity: The current activity.
        elapsed_s: The seconds since the display began.
        left_s: The estimated seconds until the end, or None if they are unknown.
    """

    done: int
    numbers: str = ""
    activity: str = ""
    elapsed_s: float = 0.0
    left_s: float | None = None

    @property
    def times(self) -> str:
        """The elapsed and the remaining time, as text."""
        left = "" if self.left_s is None else f", {_clock(self.left_s)} left"
        return _clock(self.elapsed_s) + left


def _clock(seconds: float) -> str:
    return str(dt.timedelta(seconds=int(seconds)))


class RoundProgress:
    """An event sink and context manager that shows the rounds of a run.

    `done` is the number of rounds before this process. `console` is standard error by
    default. For `draws_waits` see `events.Sinks`.
    """

    def __init__(
        self,
        num_rounds: int,
        console: rich.console.Console | None = None,
        done: int = 0,
    ) -> None:
        console = console or _Console()
        self.draws_waits = console.is_interactive
        self._num_rounds = num_rounds
        self._view = (
            _NotebookView(num_rounds)
            if console.is_jupyter
            else _TerminalView(num_rounds, console)
            if console.is_interactive
            else _LinesView(num_rounds, console, done)
        )
        self._done = done
        self._activity = self._numbers = ""
        self._subrounds = (0, 0)
        self._begun = time.monotonic()
        # The first round is slow: it starts workers and compiles.
        self._ends = collections.deque[float](maxlen=_TIMED_ROUNDS + 1)
        self.retries = 0
        """The number of retries of subrounds so far."""

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
            self.say(f"{done} of {total} subrounds")

    def say(self, activity: str) -> None:
        """Show an activity, such as "starting Ray"."""
        self._activity = activity
        self._show()

    def advance(self, numbers: str = "") -> None:
        """Show that one more round is done. `numbers` is the text of its metrics."""
        self._done += 1
        self._numbers = numbers
        self._ends.append(time.monotonic())
        self._show()

    def _show(self) -> None:
        retried = f"retries {self.retries}" if self.retries else ""
        self._view.show(
            Shown(
                self._done,
                "  ".join(filter(None, [self._numbers, retried])),
                self._activity,
                time.monotonic() - self._begun,
                self._find_time_left(),
            )
        )

    def _find_time_left(self) -> float | None:
        rounds = self._num_rounds - self._done
        if len(self._ends) < 2 or rounds <= 0:  # noqa: PLR2004 (two ends: one round)
            return None
        return rounds * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._activity = ""
        self._show()
        self._view.close()


class _Pace:
    def __init__(self) -> None:
        self._drawn = -math.inf

    def is_due(self, every_s: float) -> bool:
        """Return whether to draw now. If so, the interval starts again."""
        now = time.monotonic()
        if now - self._drawn < every_s:
            return False
        self._drawn = now
        return True


class _DetailsColumn(rich.progress.ProgressColumn):
    @override
    def render(self, task: rich.progress.Task) -> rich.text.Text:
        shown: Shown = task.fields["shown"]
        elapsed_s = (task.finished_time if task.finished else task.elapsed) or 0.0
        styled = (
            (dataclasses.replace(shown, elapsed_s=elapsed_s).times, "yellow"),
            (shown.numbers, "cyan"),
            (shown.activity, "dim"),
        )
        parts = [rich.text.Text(*each) for each in styled if each[0]]
        return rich.text.Text("  ", no_wrap=True, overflow="ellipsis").join(parts)


class _TerminalView:
    def __init__(self, num_rounds: int, console: rich.console.Console) -> None:
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("rounds"),
            # Named colors: with 16 of them rich's own show a full bar as an empty one.
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
        self._task = self._progress.add_task("rounds", total=num_rounds, shown=Shown(0))
        self._progress.start()
        self._pace = _Pace()

    def show(self, shown: Shown) -> None:
        # Refreshed here, because an import may block rich's own thread for seconds.
        self._progress.update(
            self._task,
            completed=shown.done,
            shown=shown,
            refresh=self._pace.is_due(_DRAWN_EVERY_S),
        )

    def close(self) -> None:
        # If no round is done, an error follows, and the bar is removed.
        self._progress.live.transient = not self._progress.tasks[0].completed
        self._progress.stop()


class _NotebookView:
    def __init__(self, num_rounds: int) -> None:
        self._num_rounds = num_rounds
        self._output = _NotebookOutput()
        self._draw(Shown(0))
        self._done = 0
        self._pace = _Pace()
        self._undrawn: Shown | None = None

    def _draw(self, shown: Shown) -> None:
        done, total = shown.done, self._num_rounds
        details = [shown.times, shown.numbers, shown.activity]
        text = f"{done}/{total}  {'  '.join(filter(None, details))}"
        bar = f'<progress value="{done}" max="{total}"></progress>'
        self._output.draw(f"rounds {text}", f"<div>{bar} {html.escape(text)}</div>")

    def show(self, shown: Shown) -> None:
        # Every update is a message to the browser, so one for each round is enough.
        if shown.done <= self._done and shown.activity:
            return
        self._done = shown.done
        self._undrawn = shown
        if self._pace.is_due(_DRAWN_EVERY_S):
            self.close()

    def close(self) -> None:
        if self._undrawn is not None:
            self._draw(self._undrawn)
            self._undrawn = None


class _LinesView:
    """Prints lines for the first and the last round, and for some rounds between."""

    def __init__(
        self, num_rounds: int, console: rich.console.Console, done: int
    ) -> None:
        self._num_rounds = num_rounds
        self._console = console
        self._pace = _Pace()
        self._done = done
        self._unprinted: Shown | None = None

    def show(self, shown: Shown) -> None:
        if shown.done > self._done:
            self._done = shown.done
            self._unprinted = shown
        every_s = max(_PRINTED_EVERY_S, shown.elapsed_s / _LINES_A_TIME)
        if self._unprinted is not None and self._pace.is_due(every_s):
            self.close()

    def close(self) -> None:
        if self._unprinted is not None:
            shown, self._unprinted = self._unprinted, None
            details = "  ".join(filter(None, [shown.times, shown.numbers]))
            line = f"round {shown.done}/{self._num_rounds}  {details}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

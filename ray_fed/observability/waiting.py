"""A sign of life: one line that says what `init` or a first call waits for.

    terminal     a line on standard error, which goes away when the wait is over
    notebook     a line in the cell, likewise
    elsewhere    an INFO line of the log for each activity; with progress="on" a line
                 on standard error

The line never decides anything; it only shows.
"""

import html
import logging
from typing import Any, Literal, Protocol, Self

import rich.console
import rich.progress
from typing_extensions import override

from ray_fed.observability import events

_logger = logging.getLogger(__name__)


class LineView(Protocol):
    """Where the line is drawn; it may be shown again after `clear`."""

    def show(self, activity: str) -> None:
        """Draw the line, in place of what it said before."""
        ...

    def clear(self) -> None:
        """Take the line away."""
        ...


class WaitLine:
    """An event sink that shows `events.Waiting`; a context manager for other waits.

    Args:
        view: draws the line; None shows nothing.

    Attributes:
        draws_waits: true, see `events.Sinks`.
    """

    draws_waits = True

    def __init__(self, view: LineView | None) -> None:
        self._view = view
        self._shown = ""

    @classmethod
    def create(
        cls,
        progress: Literal["auto", "on", "off"],
        console: rich.console.Console | None = None,
    ) -> Self:
        """Return the line that a setting asks for.

        Args:
            progress: see `Config.progress`.
            console: where to draw; by default standard error.
        """
        console = console or rich.console.Console(stderr=True)
        if progress == "off":
            return cls(None)
        if console.is_jupyter:
            return cls(NotebookLine())
        if console.is_terminal:
            return cls(TerminalLine(console))
        return cls(PrintedLine(console) if progress == "on" else LoggedLine())

    def say(self, activity: str) -> None:
        """Show an activity, such as "starting Ray"; the empty one ends the wait."""
        if self._view is None or activity == self._shown:
            return
        self._shown = activity
        if activity:
            self._view.show(activity)
        else:
            self._view.clear()

    def on_event(self, event: events.Event) -> None:
        """Show what a first call waits for, up to the end of its first subround."""
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


class TerminalLine(LineView):
    """Draws with rich: a spinner, the activity, and the seconds since it began.

    Args:
        console: a terminal.
    """

    def __init__(self, console: rich.console.Console) -> None:
        self._console = console
        self._progress: rich.progress.Progress | None = None

    @override
    def show(self, activity: str) -> None:
        self.clear()
        self._progress = rich.progress.Progress(
            rich.progress.SpinnerColumn(),
            rich.progress.TextColumn("ray_fed: {task.description}"),
            rich.progress.TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._progress.add_task(activity, total=None)
        self._progress.start()

    @override
    def clear(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class NotebookLine(LineView):
    """Draws in the output of the cell that waits."""

    def __init__(self) -> None:
        self._handle: Any = None

    @override
    def show(self, activity: str) -> None:
        from IPython.display import display

        line = f"ray_fed: {activity} …"
        drawn = {"text/plain": line, "text/html": f"<i>{html.escape(line)}</i>"}
        if self._handle is None:
            self._handle = display(drawn, raw=True, display_id=True)
        else:
            self._handle.update(drawn, raw=True)

    @override
    def clear(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": "", "text/html": ""}, raw=True)
            self._handle = None


class LoggedLine(LineView):
    """Writes each activity to the log."""

    @override
    def show(self, activity: str) -> None:
        _logger.info("%s", activity)

    @override
    def clear(self) -> None:
        """Leave the log as it is."""


class PrintedLine(LineView):
    """Writes each activity as a line of its own.

    Args:
        console: what is no terminal, such as a file.
    """

    def __init__(self, console: rich.console.Console) -> None:
        self._console = console

    @override
    def show(self, activity: str) -> None:
        self._console.print(f"ray_fed: {activity}", markup=False, highlight=False)

    @override
    def clear(self) -> None:
        """Leave the lines as they are."""

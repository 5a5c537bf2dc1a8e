import io
import logging
import sys
import types
from collections.abc import Iterable
from typing import Any

import pytest
import rich.console

import ray_fed.observability.progress as progress_module
from ray_fed.observability import events
from ray_fed.observability.progress import RoundProgress, WaitLine
from tests.observability.subrounds import finished


def record(*, terminal: bool, width: int = 120) -> rich.console.Console:
    return rich.console.Console(
        file=io.StringIO(), force_terminal=terminal, width=width, force_jupyter=False
    )


def text_of(console: rich.console.Console) -> str:
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_line_shows_rounds_numbers_and_activity() -> None:
    console = record(terminal=True)

    with RoundProgress(4, console) as progress:
        progress.say("starting Ray")
        progress.advance("loss 0.5000  accuracy 0.2500")

    assert "starting Ray" in text_of(console)
    assert "1/4" in text_of(console)
    assert "loss 0.5000  accuracy 0.2500" in text_of(console)


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress_module, "time", made)
    return made


def run_rounds(progress: RoundProgress, clock: Clock, ends: Iterable[float]) -> None:
    for number, end in enumerate(ends, 1):
        clock.now = end
        progress.advance(f"loss {number}.500")


@pytest.mark.parametrize("kind", ["terminal", "lines", "notebook"])
def test_time_that_is_left_is_told_by_rounds_after_the_first(
    kind: str, clock: Clock, cell: "Cell"
) -> None:
    console = (
        rich.console.Console(file=io.StringIO(), force_jupyter=True)
        if kind == "notebook"
        else record(terminal=kind == "terminal")
    )

    with RoundProgress(10, console) as progress:
        run_rounds(progress, clock, [100.0, 110.0, 130.0])

    shown = cell.drawn[-1] if kind == "notebook" else text_of(console)
    assert ", 0:01:45 left" in shown  # seven rounds of 15 s


def test_subrounds_of_a_round_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_DRAWN_EVERY_S", 0.0)
    console = record(terminal=True)

    with RoundProgress(1, console) as progress:
        progress.on_event(events.RoundStarted(0, 6, 6, num_subrounds=2))
        progress.on_event(finished())
        progress.on_event(finished())
        progress.on_event(finished())  # the finish of the round

    assert "1 of 2 subrounds" in text_of(console)
    assert "2 of 2 subrounds" in text_of(console)
    assert "3 of 2 subrounds" not in text_of(console)


def test_retries_are_counted_and_shown() -> None:
    console = record(terminal=True)

    with RoundProgress(1, console) as progress:
        progress.on_event(finished(attempts=3))
        progress.on_event(finished())
        progress.advance("loss 1")

    assert progress.retries == 2
    assert "retries 2" in text_of(console)


def test_lines_are_few_and_have_the_first_and_the_last_round(clock: Clock) -> None:
    console = record(terminal=False, width=40)

    with RoundProgress(2000, console) as progress:
        progress.say("starting Ray")
        run_rounds(progress, clock, (n / 10 for n in range(1, 2001)))

    lines = text_of(console).splitlines()
    assert lines[0] == "round 1/2000  0:00:00  loss 1.500"
    assert lines[1] == "round 51/2000  0:00:05, 0:03:14 left  loss 51.500"
    assert lines[-1] == "round 2000/2000  0:03:20  loss 2000.500"
    assert len(lines) == 41  # 200 s, one in five
    assert "\r" not in text_of(console)


def test_dumb_terminal_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = record(terminal=True)

    with RoundProgress(2, console) as progress:
        progress.advance("loss 0.5000")

    assert text_of(console) == "round 1/2  0:00:00  loss 0.5000\n"


class Cell:
    """What IPython's display shows in a cell."""

    def __init__(self) -> None:
        self.drawn: list[str] = []

    def display(
        self, drawing: dict[str, str], *, raw: bool, display_id: bool
    ) -> "Cell":
        assert display_id
        self.update(drawing, raw=raw)
        return self

    def update(self, drawing: dict[str, str], *, raw: bool) -> None:
        assert raw
        assert set(drawing) == {"text/plain", "text/html"}
        self.drawn.append(drawing["text/html"])


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    shown = Cell()
    ipython: Any = types.ModuleType("IPython")
    module: Any = types.ModuleType("IPython.display")
    ipython.display, module.display = module, shown.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


def test_what_changes_often_is_drawn_ten_times_a_second(cell: Cell) -> None:
    console = rich.console.Console(file=io.StringIO(), force_jupyter=True)

    with RoundProgress(1000, console) as progress:
        for _ in range(1000):
            progress.advance()

    assert len(cell.drawn) < 100
    assert cell.drawn[-1].startswith('<div><progress value="1000" max="1000">')


def test_notebook_draws_html_once_a_round(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "_DRAWN_EVERY_S", 0.0)
    console = rich.console.Console(file=io.StringIO(), force_jupyter=True)

    with RoundProgress(2, console) as progress:
        progress.on_event(events.RoundStarted(0, 6, 6, num_subrounds=2))
        progress.on_event(finished())
        progress.advance("loss 0.5000")
        progress.advance("loss 0.2500")

    assert len(cell.drawn) == 4
    assert cell.drawn[0].startswith('<div><progress value="0" max="2">')
    assert "1/2  0:00:00  loss 0.5000" in cell.drawn[1]
    assert cell.drawn[-1].startswith('<div><progress value="2" max="2">')
    assert console.file.getvalue() == ""  # pyright: ignore[reportAttributeAccessIssue]


TAKE_AWAY = "\x1b[2K"
"""What a terminal is sent to erase a line."""


def test_terminal_shows_a_line_and_takes_it_away() -> None:
    console = record(terminal=True)

    with WaitLine.create("auto", console) as line:
        line.say("starting Ray")
        line.say("joining Ray")

    drawn = text_of(console)
    assert drawn.index("ray_fed: starting Ray") < drawn.index("ray_fed: joining Ray")
    assert drawn.rindex(TAKE_AWAY) > drawn.rindex("ray_fed: joining Ray")


def test_notebook_shows_a_line_and_takes_it_away(cell: Cell) -> None:
    console = rich.console.Console(file=io.StringIO(), force_jupyter=True)

    with WaitLine.create("auto", console) as line:
        line.say("starting <Ray>")
        line.say("joining Ray")

    assert cell.drawn == [
        "<i>ray_fed: starting &lt;Ray&gt; …</i>",
        "<i>ray_fed: joining Ray …</i>",
        "",
    ]


@pytest.mark.parametrize(
    ("progress", "terminal", "printed", "logged"),
    [
        ("auto", False, "", ["starting [bold]Ray", "joining Ray"]),
        ("on", False, "ray_fed: starting [bold]Ray\nray_fed: joining Ray\n", []),
        ("off", True, "", []),
    ],
    ids=["logged elsewhere", "printed on demand", "silent where it is off"],
)
def test_each_activity_is_told_once_without_a_line(
    caplog: pytest.LogCaptureFixture,
    progress: Any,
    terminal: bool,
    printed: str,
    logged: list[str],
) -> None:
    console = record(terminal=terminal)
    caplog.set_level(logging.INFO, "ray_fed")

    with WaitLine.create(progress, console) as line:
        for activity in ("starting [bold]Ray", "starting [bold]Ray", "joining Ray"):
            line.say(activity)

    assert text_of(console) == printed
    assert caplog.messages == logged


@pytest.mark.parametrize(
    "end", [events.Waiting(""), finished()], ids=["the call", "a subround"]
)
def test_first_call_is_shown_until_something_is_done(end: events.Event) -> None:
    console = record(terminal=True)
    line = WaitLine.create("auto", console)

    line.on_event(events.Waiting("1 of 2 workers ready"))
    line.on_event(events.RoundStarted(0, 6, 6, num_subrounds=2))
    shown = text_of(console)
    line.on_event(end)

    assert "1 of 2 workers ready" in shown
    assert TAKE_AWAY not in shown[shown.rindex("workers ready") :]
    assert TAKE_AWAY in text_of(console)[len(shown) :]


def test_bar_takes_the_place_of_the_line_in_a_terminal() -> None:
    console, bar_console = record(terminal=True), record(terminal=True)
    sinks = events.Sinks([WaitLine.create("auto", console)])
    sinks.on_event(events.Waiting("1 of 2 workers ready"))

    with RoundProgress(4, bar_console) as progress:
        sinks.add(progress)
        sinks.on_event(events.Waiting("tracing and compiling"))
        sinks.remove(progress)
    sinks.on_event(events.Waiting("looking for room"))

    drawn = text_of(console)
    assert drawn.index(TAKE_AWAY) < drawn.index("looking for room")
    assert "tracing" not in drawn
    assert "tracing and compiling" in text_of(bar_console)


def test_line_is_still_written_where_a_bar_is_not_drawn() -> None:
    console = record(terminal=False)
    sinks = events.Sinks([WaitLine.create("on", console)])

    with RoundProgress(4, console) as progress:
        sinks.add(progress)
        sinks.on_event(events.Waiting("tracing and compiling"))

    assert text_of(console).startswith("ray_fed: tracing and compiling\n")

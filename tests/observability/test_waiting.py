import io
import logging
import sys
import types
from typing import Any

import pytest
import rich.console

from ray_fed.observability import events
from ray_fed.observability.display import RoundProgress, WaitLine
from tests.observability.test_display import finish_subround, record, text_of

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


class Cell:
    """What IPython's display shows in a cell, as HTML."""

    def __init__(self) -> None:
        self.drawn: list[str] = []

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> "Cell":
        assert display_id
        self.update(data, raw=raw)
        return self

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        assert set(data) == {"text/plain", "text/html"}
        self.drawn.append(data["text/html"])


def test_notebook_shows_a_line_and_takes_it_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell, ipython = Cell(), types.ModuleType("IPython")
    module: Any = types.ModuleType("IPython.display")
    module.display = cell.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    console = rich.console.Console(file=io.StringIO(), force_jupyter=True)

    with WaitLine.create("auto", console) as line:
        line.say("starting <Ray>")
        line.say("joining Ray")

    assert cell.drawn == [
        "<i>ray_fed: starting &lt;Ray&gt; …</i>",
        "<i>ray_fed: joining Ray …</i>",
        "",
    ]


def test_elsewhere_each_activity_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    console = record(terminal=False)
    caplog.set_level(logging.INFO, "ray_fed")

    with WaitLine.create("auto", console) as line:
        for activity in ("starting Ray", "starting Ray", "joining Ray"):
            line.say(activity)

    assert caplog.messages == ["starting Ray", "joining Ray"]
    assert text_of(console) == ""


def test_elsewhere_it_is_printed_on_demand(caplog: pytest.LogCaptureFixture) -> None:
    console = record(terminal=False)
    caplog.set_level(logging.INFO, "ray_fed")

    with WaitLine.create("on", console) as line:
        line.say("starting [bold]Ray")

    assert text_of(console) == "ray_fed: starting [bold]Ray\n"
    assert caplog.messages == []


def test_it_is_silent_where_it_is_off(caplog: pytest.LogCaptureFixture) -> None:
    console = record(terminal=True)
    caplog.set_level(logging.INFO, "ray_fed")

    with WaitLine.create("off", console) as line:
        line.say("starting Ray")

    assert text_of(console) == ""
    assert caplog.messages == []


@pytest.mark.parametrize(
    "end", [events.Waiting(""), finish_subround()], ids=["the call", "a subround"]
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

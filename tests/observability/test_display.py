import io
import sys
import types
from collections.abc import Iterable
from typing import Any

import pytest
import rich.console
import rich.text

import ray_fed.observability.display as display
from ray_fed.observability import events
from ray_fed.observability.display import RoundProgress


def finish_subround(attempts: int = 1) -> events.SubroundFinished:
    return events.SubroundFinished(
        round_index=0,
        subround_index=0,
        num_clients=3,
        attempts=attempts,
        started_s=0.0,
        seconds=0.1,
        worker="worker 0",
        worker_pid=1,
        coordinator_pid=2,
        node="here",
    )


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
    monkeypatch.setattr(display, "time", made)
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


def test_resumed_run_is_timed_by_its_own_rounds(clock: Clock) -> None:
    console = record(terminal=False)

    with RoundProgress(10, console, done=7) as progress:
        run_rounds(progress, clock, [100.0, 102.0])

    first, last = text_of(console).splitlines()
    assert first == "round 8/10  0:01:40  loss 1.500"
    assert last == "round 9/10  0:01:42, 0:00:02 left  loss 2.500"


def test_subrounds_of_a_round_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_DRAWN_EVERY_S", 0.0)
    console = record(terminal=True)

    with RoundProgress(1, console) as progress:
        progress.on_event(events.RoundStarted(0, 6, 6, num_subrounds=2))
        progress.on_event(finish_subround())
        progress.on_event(finish_subround())
        progress.on_event(finish_subround())  # the finish of the round

    assert "1 of 2 subrounds" in text_of(console)
    assert "2 of 2 subrounds" in text_of(console)
    assert "3 of 2 subrounds" not in text_of(console)


def test_round_of_one_subround_leaves_the_activity_alone() -> None:
    console = record(terminal=True)

    with RoundProgress(1, console) as progress:
        progress.say("waiting")
        progress.on_event(events.RoundStarted(0, 1, 1, num_subrounds=1))
        progress.on_event(finish_subround())
        progress.on_event(events.RoundFinished(0, 0.1))

    assert "subround" not in text_of(console)


def test_retries_are_counted_and_shown() -> None:
    console = record(terminal=True)

    with RoundProgress(1, console) as progress:
        progress.on_event(finish_subround(attempts=3))
        progress.on_event(finish_subround())
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


def test_lines_are_fewer_the_longer_a_run_takes(clock: Clock) -> None:
    console = record(terminal=False)

    with RoundProgress(86400, console) as progress:
        run_rounds(progress, clock, map(float, range(86400)))

    assert 500 < text_of(console).count("\n") < 700


def test_each_slow_round_is_a_line(clock: Clock) -> None:
    console = record(terminal=False)

    with RoundProgress(3, console) as progress:
        run_rounds(progress, clock, [60.0, 120.0, 180.0])

    assert len(text_of(console).splitlines()) == 3


def test_dumb_terminal_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = record(terminal=True)

    with RoundProgress(2, console) as progress:
        progress.advance("loss 0.5000")

    assert text_of(console) == "round 1/2  0:00:00  loss 0.5000\n"


def test_narrow_line_keeps_the_bar_and_the_count() -> None:
    console = record(terminal=True, width=40)

    with RoundProgress(100, console) as progress:
        for _ in range(9):
            progress.advance("loss 0.5000  accuracy 0.2500")

    drawn = rich.text.Text.from_ansi(text_of(console)).plain.splitlines()
    line = [line for line in drawn if line.startswith("rounds ━")][-1]
    assert " 9/100 0:00:00, 0:" in line
    assert line.endswith("…")


def test_nothing_is_left_where_nothing_was_done() -> None:
    console = record(terminal=False)

    with RoundProgress(2, console) as progress:
        progress.say("starting")

    assert text_of(console).strip() == ""


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
    monkeypatch.setattr(display, "_DRAWN_EVERY_S", 0.0)
    console = rich.console.Console(file=io.StringIO(), force_jupyter=True)

    with RoundProgress(2, console) as progress:
        progress.on_event(events.RoundStarted(0, 6, 6, num_subrounds=2))
        progress.on_event(finish_subround())
        progress.advance("loss 0.5000")
        progress.advance("loss 0.2500")

    assert len(cell.drawn) == 4
    assert cell.drawn[0].startswith('<div><progress value="0" max="2">')
    assert "1/2  0:00:00  loss 0.5000" in cell.drawn[1]
    assert cell.drawn[-1].startswith('<div><progress value="2" max="2">')
    assert console.file.getvalue() == ""  # pyright: ignore[reportAttributeAccessIssue]

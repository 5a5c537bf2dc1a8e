import io
import sys
import types
from typing import Any

import pytest
import rich.console

from ray_fed.observability import display, events
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
        progress.advance(loss=0.5, accuracy=0.25)

    assert "starting Ray" in text_of(console)
    assert "1/4" in text_of(console)
    assert "loss 0.5000  accuracy 0.2500" in text_of(console)


def test_subrounds_of_a_round_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_DRAWN_EVERY_S", 0.0)
    console = record(terminal=True)

    with RoundProgress(1, console) as progress:
        progress.on_event(events.RoundStarted(0, 6, 6, num_subrounds=2))
        progress.on_event(finish_subround())
        progress.on_event(finish_subround())
        progress.on_event(finish_subround())  # the finish of the round

    assert "subround 1/2" in text_of(console)
    assert "subround 2/2" in text_of(console)
    assert "subround 3/2" not in text_of(console)


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
        progress.advance(loss=1.0)

    assert progress.retries == 2
    assert "retries 2" in text_of(console)


def test_file_gets_the_last_line_alone() -> None:
    console = record(terminal=False)

    with RoundProgress(2, console) as progress:
        progress.advance(loss=0.5)
        progress.advance(loss=0.25)

    (line,) = text_of(console).strip().splitlines()
    assert "2/2" in line
    assert "loss 0.2500" in line


def test_narrow_line_keeps_the_bar_and_the_count() -> None:
    console = record(terminal=False, width=40)

    with RoundProgress(100, console) as progress:
        for _ in range(9):
            progress.advance(loss=0.5, accuracy=0.25)

    (line,) = text_of(console).strip().splitlines()
    assert line.startswith("rounds ━")
    assert " 9/100 0:00:00" in line
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

    def display(self, drawing: str, *, display_id: bool) -> "Cell":
        assert display_id
        self.update(drawing)
        return self

    def update(self, drawing: str) -> None:
        self.drawn.append(drawing)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    shown = Cell()
    ipython: Any = types.ModuleType("IPython")
    module: Any = types.ModuleType("IPython.display")
    ipython.display, module.HTML, module.display = module, str, shown.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


def test_what_changes_often_is_drawn_ten_times_a_second(cell: Cell) -> None:
    console = rich.console.Console(file=io.StringIO(), force_jupyter=True)

    with RoundProgress(1000, console) as progress:
        for _ in range(1000):
            progress.advance()

    assert len(cell.drawn) < 100
    assert cell.drawn[-1].startswith('<progress value="1000" max="1000">')


def test_notebook_draws_html_once_a_round(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "_DRAWN_EVERY_S", 0.0)
    console = rich.console.Console(file=io.StringIO(), force_jupyter=True)

    with RoundProgress(2, console) as progress:
        progress.on_event(events.RoundStarted(0, 6, 6, num_subrounds=2))
        progress.on_event(finish_subround())
        progress.advance(loss=0.5)
        progress.advance(loss=0.25)

    assert len(cell.drawn) == 4
    assert cell.drawn[0].startswith('<progress value="0" max="2">')
    assert "1/2  loss 0.5000" in cell.drawn[1]
    assert cell.drawn[-1].startswith('<progress value="2" max="2">')
    assert console.file.getvalue() == ""  # pyright: ignore[reportAttributeAccessIssue]

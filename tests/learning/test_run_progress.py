"""How far a run is: what is shown, and what of it where no terminal is."""

import errno
import io
import pathlib
import re
import sys
from typing import Never

import pytest
from typing_extensions import override

from ray_fed.learning import RoundRecord, run
from ray_fed.learning.run_loop import show_metrics
from tests.learning.counting import CLIENTS, build_tally


def test_lines_are_printed_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = run(
        build_tally(),
        CLIENTS,
        num_rounds=3,
        evaluate=lambda _: {"loss": 12345.678},
        evaluate_every=2,
        progress=True,
    )

    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    losses = [show_metrics(record, None) for record in result.history]
    assert re.fullmatch(rf"round 1/3  0:00:\d\d  {losses[0]}", lines[0])
    found = f"{losses[2]}  evaluation loss 12,346  (round 2)"
    assert re.fullmatch(rf"round 3/3  0:00:\d\d  {re.escape(found)}", lines[-1])
    assert captured.out == ""


def test_terminal_has_a_bar_that_begins_where_the_run_was(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: pathlib.Path,
) -> None:
    run(build_tally(), CLIENTS, num_rounds=2, storage_path=tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")

    run(build_tally(), CLIENTS, num_rounds=3, storage_path=tmp_path, progress=True)

    assert "3/3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "full"), BrokenPipeError(), ValueError("closed")],
    ids=repr,
)
def test_run_goes_on_if_its_progress_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class Unwritable(io.StringIO):
        @override
        def write(self, text: str) -> Never:
            raise error

    monkeypatch.setattr(sys, "stderr", Unwritable())

    result = run(build_tally(), CLIENTS, num_rounds=3, progress=True)

    assert (len(result.history), result.reason) == (3, "finished")


def test_numbers_of_training_and_evaluation_are_told_apart() -> None:
    metrics = {"loss": 0.5, "num_examples": 9, "accuracy": 0.25, "mae": 2.0, "f1": 3.0}
    trained = RoundRecord(3, (), metrics, None, 0.1)
    evaluated = RoundRecord(2, (), metrics, {"loss": 0.204114, "accuracy": 1.0}, 0.1)

    numbers = "loss 0.5000  accuracy 0.2500"
    assert show_metrics(trained, None) == f"{numbers}  mae 2"
    found = "evaluation loss 0.2041  evaluation accuracy 1"
    assert show_metrics(evaluated, evaluated) == f"{numbers}  {found}"
    assert show_metrics(trained, evaluated) == f"{numbers}  {found}  (round 3)"

"""How far a run is, where no terminal is."""

import logging
import pathlib

import pytest

from ray_fed.learning import run
from tests.learning.counting import CLIENTS, build_tally


def test_each_round_is_a_line_of_the_log_without_a_terminal(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "ray_fed.learning.run"):
        result = run(build_tally(), CLIENTS, num_rounds=2, progress=True)

    losses = result.history.values("loss")
    assert caplog.messages == [
        f"round {n + 1}/2: loss {loss:.4f}" for n, loss in enumerate(losses)
    ]
    assert capsys.readouterr().err == ""


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

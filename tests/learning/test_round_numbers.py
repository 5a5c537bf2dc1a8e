"""Rounds count from 1 on all that a person reads; `round_index` counts from 0.

What files, TensorBoard and progress lines count is in the tests of these.
"""

import json
import pathlib
import re
import unittest.mock
from typing import Any

import federated_language as fl
import pytest
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.learning import RoundRecord, callbacks, run
from ray_fed.learning.run_loop import say_who
from tests.learning.counting import CLIENTS, build_tally

ROUNDS = [1, 2, 3]


class Keys(fl.program.ReleaseManager[Any, int]):
    """A release manager that keeps its keys."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    @override
    async def release(self, value: Any, key: int) -> None:
        del value
        self.keys.append(key)


def test_trackers_and_release_managers_count_rounds_from_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = unittest.mock.MagicMock()
    tracker.MlflowException = Exception

    def give(*_: object) -> Any:
        return tracker

    monkeypatch.setattr(callbacks, "import_extra", give)
    keys = Keys()
    run(
        build_tally(),
        CLIENTS,
        num_rounds=3,
        callbacks=[callbacks.MLflow("a"), callbacks.WandB("a", "b"), keys],
    )

    logged = tracker.MlflowClient().log_metric.call_args_list
    assert [call.kwargs["step"] for call in logged] == ROUNDS
    logged = tracker.init().log.call_args_list
    assert [call.args[0]["round"] for call in logged] == ROUNDS
    assert keys.keys == ROUNDS


def test_all_that_a_history_shows_counts_rounds_from_one(
    tmp_path: pathlib.Path,
) -> None:
    trace = tmp_path / "trace.json"

    result = run(build_tally(), CLIENTS, num_rounds=3)

    history = result.history
    history.write_trace(trace)
    assert [row["round"] for row in history.rows()] == ROUNDS
    assert list(history.to_pandas().index) == ROUNDS
    html: str = getattr(history, "_repr_html_")()  # noqa: B009
    assert re.findall("<tr><td>(.*?)</td>", html) == ["1", "2", "3"]
    assert list(history.plot().axes[0].lines[0].get_xdata()) == ROUNDS
    assert list(history[1:].plot().axes[0].lines[0].get_xdata()) == [2, 3]
    events = json.loads(trace.read_text())["traceEvents"]
    named = [event["name"] for event in events if event.get("cat") == "round"]
    assert named == ["round 1", "round 2", "round 3"]
    for number, record in zip(ROUNDS, history, strict=True):
        assert record.round == number
        assert history[record.round_index] is record
        assert repr(record).startswith(f"<round {number}: ")
        assert f"round {number}<" in getattr(record, "_repr_html_")()  # noqa: B009
        title = record.timeline().axes[0].get_title()
        assert title == f"round {number} of the run"
    assert result.state.round_index == history[-1].round  # how many are done


def test_errors_count_rounds_from_one() -> None:
    class Fails(callbacks.Callback):
        @override
        def on_round(self, record: RoundRecord) -> None:
            raise ValueError(record.round)

    with pytest.raises(errors.CallbackError, match="after round 1, found ValueError"):
        run(build_tally(), CLIENTS, num_rounds=2, callbacks=[Fails()])
    error = ValueError("a")
    say_who(error, 0, [0], CLIENTS)
    assert error.__notes__[0].startswith("In round 1 of the run")

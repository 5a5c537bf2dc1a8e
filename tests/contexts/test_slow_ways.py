"""Slow ways are told in the terminal: once, with the reason and the quick way."""

import pytest

from ray_fed.contexts.slow_ways import SlowPathWarnings
from ray_fed.observability import events
from tests.observability import subrounds


def interpreted(reason: str) -> events.SubroundFinished:
    return subrounds.finished(0, no_kernel=reason)


def run(sink: SlowPathWarnings, told: list[events.Event], seconds: float) -> None:
    for event in (
        events.RoundStarted(0, 3, 1, 1),
        *told,
        events.RoundFinished(0, seconds),
    ):
        sink.on_event(event)


def test_a_slow_round_says_why_and_what_is_quick(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = SlowPathWarnings()
    reason = (
        "`federated_select` of keys that clients compute, together with other values of"
        " 65,540 bytes, where at most 65,536 can be passed on"
    )
    unlowered = events.ComputationUnlowered("`f` (a.py:3)", "ab", "FlatMapDataset")
    step = events.WorkInterpreted("the finish of a round", "ValueError: so")

    run(sink, [interpreted(reason), interpreted(reason), unlowered, step], 1.5)

    first, second, third = caplog.messages
    assert reason in first
    assert "pass them as an argument" in first
    assert "1.5 s" in first
    assert "`f` (a.py:3)" in second
    assert "FlatMapDataset" in second
    assert "dataset.reduce" in second
    assert "ValueError: so" in third
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert {record.name for record in caplog.records} == {"ray_fed.contexts.slow_ways"}


def test_each_reason_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    sink = SlowPathWarnings()

    run(sink, [interpreted("a")], 2.0)
    run(sink, [interpreted("a"), interpreted("b")], 2.0)

    assert len(caplog.messages) == 2


def test_quick_rounds_and_kernels_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sink = SlowPathWarnings()

    run(sink, [interpreted("a")], 0.2)
    run(sink, [], 2.0)

    assert not caplog.messages

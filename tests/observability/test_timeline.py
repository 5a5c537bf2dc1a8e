"""When each worker did what: the spans of a round, their picture, a run's trace."""

import dataclasses
import json
import pathlib

import pytest

import ray_fed.errors as errors
from ray_fed.learning import History, RoundRecord
from ray_fed.observability.report import RoundReport, SubroundReport
from ray_fed.plan.outcomes import Attempt
from tests.observability import subrounds


def make_subround(index: int, clients: int, *lost: Attempt) -> SubroundReport:
    return subrounds.reported(
        subround_index=index,
        num_clients=clients,
        attempts=1 + sum(each.ended != "slower" for each in lost),
        started_s=0.5 + index,
        seconds=3.0,
        worker=f"worker {index}",
        lost=lost,
    )


@pytest.fixture
def report() -> RoundReport:
    """A round with a lost attempt, a slower copy, and a finish."""
    lost = Attempt(1, "worker 5", 9, "10.0.0.2", 0.25, 1.0, "crash", "killed")
    slower = Attempt(1, "worker 6", 9, "10.0.0.2", 0.5, 2.0, "slower")
    made = make_subround(0, 2, lost), make_subround(1, 2, slower), make_subround(2, 0)
    return RoundReport(
        round_index=3, num_clients=4, num_leaves=4, subrounds=made, seconds=6.0
    )


def test_spans_tell_what_was_lost_and_when_the_next_attempt_began(
    report: RoundReport,
) -> None:
    found = [
        (span.worker, span.label, span.started_s, span.seconds) for span in report.spans
    ]

    assert found == [
        ("driver", "argument", 0.0, 0.5),
        ("worker 5", "lost attempt", 0.75, 1.0),
        ("worker 0", "clients", 1.75, 1.75),
        ("worker 6", "slower copy", 2.0, 2.0),
        ("worker 1", "clients", 1.5, 3.0),
        ("worker 2", "merge", 2.5, 3.0),
    ]


def test_picture_has_a_lane_a_worker_and_a_color_a_kind(report: RoundReport) -> None:
    pytest.importorskip("matplotlib")

    figure = report.timeline()

    (axes,) = figure.axes
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert lanes[:2] == ["driver", "worker 5 (10.0.0.2)"]
    assert len(lanes) == 6
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == [
        "argument",
        "clients",
        "lost attempt",
        "merge",
        "slower copy",
    ]
    assert axes.get_title().startswith("call 3: 4 clients")
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_picture_of_nothing_is_empty() -> None:
    pytest.importorskip("matplotlib")
    empty = RoundReport(
        round_index=0, num_clients=0, num_leaves=0, subrounds=(), seconds=0.0
    )

    assert not list(empty.timeline().axes[0].patches)


def test_trace_has_all_rounds_on_one_clock(
    report: RoundReport, tmp_path: pathlib.Path
) -> None:
    spans = tuple(tuple(span) for span in report.spans)
    first = RoundRecord(0, (0,), {}, None, 6.0, started_at=100.0, spans=spans)
    records = [first, dataclasses.replace(first, round_index=1, started_at=110.0)]
    path = tmp_path / "trace.json"

    History(records).write_trace(path)

    events = json.loads(path.read_text())["traceEvents"]
    begins = [event["ts"] for event in events if event.get("cat") == "round"]
    assert begins == [0.0, 10e6]
    lost = [event for event in events if event.get("cat") == "lost attempt"]
    assert [(event["ts"], event["dur"]) for event in lost] == [
        (0.75e6, 1e6),
        (10.75e6, 1e6),
    ]
    assert lost[0]["args"] == {"round": 1, "attempt": 1, "ended": "crash"}
    named = {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in events
        if event["ph"] == "M"
    }
    assert named[lost[0]["pid"], lost[0]["tid"]] == "worker 5"
    assert named[lost[0]["pid"], None] == "10.0.0.2"


def test_trace_that_cannot_be_written_says_so(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.StorageError, match="Expected to write the file"):
        History().write_trace(tmp_path / "missing" / "trace.json")

"""The report of a round, gathered from its events."""

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from ray_fed.observability import events
from ray_fed.observability.report import (
    ASIDE_FROM,
    ReportBuilder,
    RoundReport,
)
from ray_fed.plan import outcomes
from tests.observability import subrounds


def _subround(index: int, **fields: Any) -> events.SubroundFinished:
    of_index = {"started_s": 0.5 * index, "worker_pid": 100 + index}
    return subrounds.finished(subround_index=index, **of_index, **fields)


def _lost(number: int, ended: str) -> outcomes.Attempt:
    return outcomes.Attempt(
        number, f"w{number}", 300 + number, "10.0.0.2", 0.5, 1.25, ended, "it <died>"
    )


def _report(*finished: events.SubroundFinished, seconds: float = 2.0) -> RoundReport:
    builder = ReportBuilder()
    builder.on_event(events.RoundStarted(4, 10, 3, 2))
    for subround in finished:
        builder.on_event(subround)
    builder.on_event(events.RoundFinished(4, seconds))
    assert builder.last is not None
    return builder.last


def html_of(report: Any) -> str:
    return report._repr_html_()


def test_call_aside_is_counted_and_is_not_the_last_one() -> None:
    builder = ReportBuilder()
    for number in (4, ASIDE_FROM):
        builder.on_event(events.RoundStarted(number, 2, 2, 1))
        builder.on_event(events.RoundFinished(number, 0.5))

    assert builder.last is not None
    assert builder.last.round_index == 4
    assert (builder.num_calls, builder.seconds) == (2, 1.0)


def test_report_says_what_the_events_said() -> None:
    report = _report(_subround(0))

    assert report == RoundReport(
        round_index=4,
        num_clients=10,
        num_leaves=3,
        subrounds=(subrounds.reported(),),
        seconds=2.0,
    )


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [pytest.param(2.0, 5.0, id="timed"), pytest.param(0.0, 0.0, id="no time")],
)
def test_clients_per_second_are_those_of_the_cohort(
    seconds: float, expected: float
) -> None:
    assert _report(_subround(0), seconds=seconds).clients_per_second == expected


def test_workers_wait_while_they_have_nothing_to_do() -> None:
    builder = ReportBuilder()
    builder.on_event(events.RoundStarted(4, 10, 3, 2, num_workers=2))
    for index, busy_s in enumerate((1.5, 1.0, 0.5)):
        builder.on_event(_subround(index, busy_s=busy_s))
    builder.on_event(events.RoundFinished(4, 2.0))

    assert builder.last is not None
    assert builder.last.waiting == 0.25
    assert "workers waited 25% of the time" in html_of(builder.last)
    assert _report(_subround(0), seconds=0.0).waiting == 0.0


def test_report_is_one_line_of_text() -> None:
    report = _report(_subround(0, attempts=2), _subround(1))

    assert str(report) == (
        "call 4: 10 clients in 2 subrounds, 2 s, 5 clients/s, 1 retry"
    )
    assert "10 clients in 1 subround, 2 s" in str(_report(_subround(0)))


def test_html_is_a_table_with_a_row_for_each_subround() -> None:
    report = _report(_subround(0), _subround(1))

    found = ET.fromstring(html_of(report))

    rows = found.findall("table/tbody/tr")
    assert found.findtext("table/caption") == str(report)
    assert len(found.findall("table/thead/tr/th")) == 8
    assert [cell.text for cell in rows[1]] == [
        *("1", "5", "1", "0.2500", None, "w", "101", "10.0.0.1")
    ]
    assert found.find("ul") is None


def test_html_has_a_bar_for_when_a_subround_ran() -> None:
    report = _report(_subround(0), _subround(2, attempts=2))

    found = ET.fromstring(html_of(report))

    bars = [bar.get("style", "") for bar in found.findall(".//td/div/div")]
    assert bars[0].startswith("margin-left:0px;width:20px;")  # 0.25 of 2 s, of 160 px
    assert bars[1].startswith("margin-left:80px;width:20px;")
    assert bars[0][-7:] != bars[1][-7:]  # what was tried again has another color


def test_html_says_below_what_ran_otherwise_than_asked() -> None:
    report = _report(_subround(0)).model_copy(
        update={
            "unlowered": ("`f`: window",),
            "interpreted": ("a merge: ValueError: refused",),
        }
    )

    found = ET.fromstring(html_of(report))

    assert [item.text for item in found.findall("ul/li")] == [
        "read through tf.data: `f`: window",
        "interpreted, as its graph raised: a merge: ValueError: refused",
    ]


def test_html_escapes_what_it_shows() -> None:
    report = _report(_subround(0, worker="<script>alert('&')</script>"))

    text = html_of(report)

    assert "<script>" not in text
    assert "&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;" in text


def test_report_of_the_last_round_stays_until_the_next_is_done() -> None:
    builder = ReportBuilder()
    for index in range(2):
        builder.on_event(events.RoundStarted(index, 1, 1, 1))
        builder.on_event(_subround(0, round_index=index))
        builder.on_event(events.RoundFinished(index, 1.0))
    builder.on_event(events.RoundStarted(2, 1, 1, 1))

    assert builder.last is not None
    assert builder.last.round_index == 1
    assert len(builder.last.subrounds) == 1


def test_rounds_that_overlap_keep_their_own_subrounds() -> None:
    builder = ReportBuilder()
    builder.on_event(events.RoundStarted(3, 7, 1, 1))
    builder.on_event(events.RoundStarted(4, 10, 3, 2))
    builder.on_event(_subround(0, round_index=3))
    builder.on_event(_subround(0))
    builder.on_event(_subround(1))

    builder.on_event(events.RoundFinished(4, 1.0))
    later = builder.last
    builder.on_event(events.RoundFinished(3, 2.0))
    earlier = builder.last

    assert later is not None
    assert (later.num_clients, len(later.subrounds)) == (10, 2)
    assert earlier is not None
    assert (earlier.num_clients, len(earlier.subrounds)) == (7, 1)


def test_html_says_what_moved() -> None:
    builder = ReportBuilder()
    builder.on_event(events.RoundStarted(4, 10, 3, 2))
    builder.on_event(_subround(0, bytes_returned=1_500_000))
    builder.on_event(events.RoundFinished(4, 1.0, 2_000_000, 3000))

    assert builder.last is not None
    assert "2 MB broadcast, 0.003000 MB of clients, 1.500 MB returned" in html_of(
        builder.last
    )


def test_retries_are_counted_by_class_over_all_subrounds() -> None:
    report = _report(
        _subround(0, lost=(_lost(1, "crash"), _lost(2, "memory")), attempts=3),
        _subround(1, lost=(_lost(1, "crash"),), attempts=2),
        _subround(2),
    )

    assert report.retries == {"crash": 2, "memory": 1}
    assert report.num_retries == 3


def test_slower_copy_of_a_straggler_is_told_but_no_retry() -> None:
    report = _report(_subround(0, lost=(_lost(1, "slower"),)))

    assert report.retries == {}
    assert report.num_retries == 0
    assert report.subrounds[0].lost == (_lost(1, "slower"),)


def test_html_tells_below_who_had_a_subround_before() -> None:
    report = _report(_subround(0, lost=(_lost(1, "crash"),), attempts=2))

    found = ET.fromstring(html_of(report))

    (item,) = found.findall("ul/li")
    assert item.text == (
        "subround 0, attempt 1, 1.250 s on w1 (pid 301, node 10.0.0.2): crash:"
        " it <died>"
    )

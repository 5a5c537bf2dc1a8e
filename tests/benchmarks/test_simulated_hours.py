"""The comparison of schedules by simulated hours, on made-up images."""

import pathlib

import pytest

from benchmarks import simulated_hours


@pytest.mark.slow
def test_schedules_have_rows_and_curves(digits: pathlib.Path) -> None:
    rows, histories = simulated_hours.compare(digits, "local", 2, target=0.3)
    figure = simulated_hours.draw(histories, target=0.3)

    assert [row["schedule"] for row in rows] == [*simulated_hours.SCHEDULES]
    assert [row["rounds"] for row in rows] == [
        f"{history[-1].round}" for history in histories.values()
    ]
    slow, *faster = (
        simulated_hours.read_hours(history[-1]) / sum(len(r.clients) for r in history)
        for history in histories.values()
    )
    assert all(0 < hours < slow for hours in faster)  # of an update
    assert all(0 < float(row["busy"]) <= 1 for row in rows)
    (axes,) = figure.axes
    _, labels = axes.get_legend_handles_labels()
    assert labels == [*histories]

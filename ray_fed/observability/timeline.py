"""Shows what workers did when, as a figure or as a trace for a browser's viewer.

Traces follow the "Trace Event Format" of the Chromium project: complete events ("X"),
with names of processes and threads ("M").
"""

import dataclasses
import io
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ray_fed.imports import import_extra


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure, with width and height in inches."""
    matplotlib = import_extra("matplotlib.figure", "a figure")

    class ShownFigure(matplotlib.Figure):
        """A figure that a notebook shows even if pyplot is not imported."""

        def _repr_png_(self) -> bytes:
            drawn = io.BytesIO()
            self.savefig(drawn, format="png", dpi=100)
            return drawn.getvalue()

    return ShownFigure(figsize=(width, height), layout="constrained")


_COLORS = {"argument": "#bab0ac", "clients": "#4c78a8", "merge": "#54a24b"}
_LOST_COLOR, _SLOWER_COLOR = "#e45756", "#f2cf5b"
_DRIVER = "driver"
_MICROSECONDS = 1e6
_LANE_INCHES, _MOST_INCHES = 0.4, 12.0


class Span(NamedTuple):
    """The time in which a worker did one thing.

    Attributes:
        node: The address of the machine, empty for the driver.
        worker: The name of the worker.
        what: "argument" if the driver checks, cuts and stores the argument, "clients"
            if a worker reads clients' data and does their work, or "merge" if a worker
            merges and finishes.
        subround: The index of the subround in the round, -1 for the argument.
        attempt: The number of the attempt, from 1.
        started_s: The beginning, in seconds since the round began.
        seconds: The duration. If no attempt was lost, it includes the wait for a
            worker.
        ended: The failure of the attempt, or "slower" if a copy was faster. Empty if
            the attempt succeeded.
    """

    node: str
    worker: str
    what: str
    subround: int
    attempt: int
    started_s: float
    seconds: float
    ended: str = ""

    @property
    def color(self) -> str:
        """The color of the span's bar in a figure."""
        if not self.ended:
            return _COLORS[self.what]
        return _SLOWER_COLOR if self.ended == "slower" else _LOST_COLOR

    @property
    def label(self) -> str:
        """The name of the span's kind in the legend of a figure."""
        if not self.ended:
            return self.what
        return "slower copy" if self.ended == "slower" else "lost attempt"


def spans_of(subrounds: Sequence[Any], num_clients: int) -> list[Span]:
    """Return what each worker did in a round, from the round's `SubroundReport`s.

    A subround without clients is a merge only if the round has clients.
    """
    spans: list[Span] = []
    for each in subrounds:
        what = "clients" if each.num_clients or not num_clients else "merge"
        begun = each.started_s
        for lost in each.lost:
            started = each.started_s + lost.started_s
            turn = (lost.node, lost.worker, what, each.subround_index, lost.attempt)
            spans.append(Span(*turn, started, lost.seconds, lost.ended or "lost"))
            if lost.ended != "slower":
                begun = max(begun, started + lost.seconds)
        ends = each.started_s + each.seconds
        turn = (each.node, each.worker, what, each.subround_index, each.attempts)
        spans.append(Span(*turn, begun, max(0.0, ends - begun)))
    if spans:
        first = min(each.started_s for each in subrounds)
        spans.insert(0, Span("", _DRIVER, "argument", -1, 1, 0.0, first))
    return spans


def draw_spans(spans: Sequence[Span], title: str) -> Any:
    """Return a matplotlib figure: a lane for each worker, and a bar for each span."""
    lanes = list(dict.fromkeys((span.node, span.worker) for span in spans))
    height = min(_MOST_INCHES, 1.6 + _LANE_INCHES * len(lanes))
    figure = new_figure(9, height)
    axes = figure.subplots()
    labeled: set[str] = set()
    for span in spans:
        lane = lanes.index((span.node, span.worker))
        label = span.label if span.label not in labeled else None
        labeled.add(span.label)
        axes.barh(
            lane,
            span.seconds,
            left=span.started_s,
            height=0.7,
            color=span.color,
            hatch="//" if span.ended else None,
            edgecolor="white",
            label=label,
        )
    axes.set(xlabel="seconds since the round began", title=title)
    axes.set_yticks(range(len(lanes)), [_name_lane(*lane) for lane in lanes])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    if labeled:
        figure.legend(loc="outside lower right", ncols=len(labeled))
    return figure


def _name_lane(node: str, worker: str) -> str:
    return f"{worker} ({node})" if node else worker


@dataclasses.dataclass(frozen=True)
class TracedRound:
    """What `trace` needs to know about a round.

    Attributes:
        number: The number of the round in its run, from 1.
        started_s: The beginning, in seconds since the trace began.
        seconds: The duration of the call.
        spans: The spans of its workers.
    """

    number: int
    started_s: float
    seconds: float
    spans: Sequence[Span]


def trace(rounds: Iterable[TracedRound]) -> dict[str, Any]:
    """Return a trace in JSON. Machines are its processes, and workers its threads."""
    lanes: dict[tuple[str, str], tuple[int, int]] = {}
    nodes: dict[str, int] = {}
    events: list[dict[str, Any]] = []

    def place(node: str, worker: str) -> dict[str, int]:
        pid = nodes.setdefault(node, len(nodes))
        _, tid = lanes.setdefault((node, worker), (pid, len(lanes)))
        return {"pid": pid, "tid": tid}

    for each in rounds:
        whole = f"round {each.number}"
        events.append(
            _event(whole, "round", each.started_s, each.seconds)
            | place("", _DRIVER)
            | {"args": {}}
        )
        for span in each.spans:
            if span.what == "argument":
                name = span.what
            else:
                name = f"{span.what} of subround {span.subround}"
            started = each.started_s + span.started_s
            arguments = {"round": each.number, "attempt": span.attempt}
            events.append(
                _event(name, span.label, started, span.seconds)
                | place(span.node, span.worker)
                | {"args": arguments | ({"ended": span.ended} if span.ended else {})}
            )
    return {"traceEvents": [*_names(nodes, lanes), *events], "displayTimeUnit": "ms"}


def _event(name: str, category: str, started_s: float, seconds: float) -> Any:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": started_s * _MICROSECONDS,
        "dur": seconds * _MICROSECONDS,
    }


def _names(
    nodes: dict[str, int], lanes: dict[tuple[str, str], tuple[int, int]]
) -> list[Any]:
    processes = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": node or "run"}}
        for node, pid in nodes.items()
    ]
    threads = [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": pid,
            "tid": tid,
            "args": {"name": worker},
        }
        for (_, worker), (pid, tid) in lanes.items()
    ]
    return [*processes, *threads]

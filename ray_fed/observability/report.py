"""What one round cost: gathered from its events, drawn in a notebook.

There it is a table with a row for each subround, and a bar for when it ran.
"""

import collections
import html
from collections.abc import Sequence
from typing import Any, TypeVar

import pydantic
from typing_extensions import override

import ray_fed.observability.timeline as timeline
from ray_fed.observability import events, reprs
from ray_fed.plan import diagnostics, outcomes
from ray_fed.plan.fingerprint import Fingerprint

_Event = TypeVar("_Event", bound=events.Event)

_BAR_PX = 160
_BAR_COLOR = "#4c78a8"
_RETRIED_COLOR = "#e45756"


def _draw_bar(subround: "SubroundReport", seconds: float) -> reprs.Html:
    """Return when a subround ran, in red where there was more than one attempt."""
    scale = _BAR_PX / seconds if seconds > 0 else 0.0
    left = min(_BAR_PX - 1.0, subround.started_s * scale)
    width = min(_BAR_PX - left, max(1.0, subround.seconds * scale))
    color = _BAR_COLOR if subround.attempts == 1 else _RETRIED_COLOR
    return reprs.Html(
        f"<div style='width:{_BAR_PX}px'><div style='margin-left:{left:.0f}px;"
        f"width:{width:.0f}px;height:10px;background:{color}'></div></div>"
    )


_OPEN_ROUNDS = 256

ASIDE_FROM = 10**9
"""Calls of these numbers are made beside those of a program, such as evaluations while
the next round runs: they are never the last one."""


class SubroundReport(pydantic.BaseModel):
    """Where one subround ran, when, and how often it was tried: see its event."""

    model_config = pydantic.ConfigDict(frozen=True)

    subround_index: int
    num_clients: int
    attempts: int
    started_s: float
    seconds: float
    worker: str
    worker_pid: int
    coordinator_pid: int
    node: str
    kernel_leaves: int = 0
    no_kernel: str | None = None
    lost: tuple[outcomes.Attempt, ...] = ()
    bytes_sliced: int = 0
    bytes_returned: int = 0
    fingerprint: Fingerprint | None = None
    num_workers: int = 1
    busy_s: float = 0.0


class RoundReport(pydantic.BaseModel):
    """The last call of a context, in numbers.

    Attributes:
        round_index: calls before this one.
        num_clients: size of the cohort.
        num_leaves: leaves of the merge tree.
        subrounds: in order; what merged and finished the round is the last, but for a
            round of one subround, which finishes it.
        seconds: from the call to its result, without a wait for what it takes from
            another call.
        num_workers: that its subrounds had between them.
        unkeyed_ops: computations with random ops that seed, call and client do not
            decide, and those ops; what they drew differs on a retry.
        unlowered: computations that read their sequences through tf.data, which takes
            longer, and why.
        bytes_broadcast: of values that all subrounds are given: the server's part of
            the argument, and what earlier stages merged; each counted once, also where
            it was in the object store before.
        bytes_sliced: of the clients' values, each counted once.
        dropped_clients: those that the round went on without, by index in the cohort:
            what their work or data raised. They count in `num_clients`.
        jit_decisions: which way leaves of kernels ran with `kernels={"jit": "auto"}`,
            and why: each once. Empty with "on" and "off".
        interpreted: work that executors did step by step because its graph raised an
            error, and that error: each once. The result is the same; it took longer.

    Bytes are those of arrays that leave a process: no computation, nothing that a
    worker reads from files, no second attempt; none on the local backend.
    """

    model_config = pydantic.ConfigDict(frozen=True)

    round_index: int
    num_clients: int
    num_leaves: int
    subrounds: tuple[SubroundReport, ...]
    seconds: float
    unkeyed_ops: tuple[str, ...] = ()
    unlowered: tuple[str, ...] = ()
    bytes_broadcast: int = 0
    bytes_sliced: int = 0
    dropped_clients: dict[int, str] = {}
    jit_decisions: tuple[diagnostics.JitDecision, ...] = ()
    interpreted: tuple[str, ...] = ()
    num_workers: int = 1

    @property
    def waiting(self) -> float:
        """The share of the round in which workers had nothing to do, from 0 to 1.

        Of all workers, of the whole call: while the argument is checked, cut and sent,
        while others still run or one merges, and while the result is on its way.
        """
        busy_s = sum(subround.busy_s for subround in self.subrounds)
        had_s = self.seconds * self.num_workers
        return max(0.0, 1 - busy_s / had_s) if had_s else 0.0

    @property
    def bytes_returned(self) -> int:
        """How many bytes came back: partials, kept values, merged ones, the result."""
        return sum(subround.bytes_returned for subround in self.subrounds)

    @property
    def num_retries(self) -> int:
        """How many attempts were made beyond the first of each subround."""
        return sum(subround.attempts - 1 for subround in self.subrounds)

    @property
    def retries(self) -> dict[str, int]:
        """How many attempts failed, by class: crash, preemption, memory, hang."""
        ends = [lost.ended for s in self.subrounds for lost in s.lost]
        return dict(collections.Counter(end for end in ends if end != "slower"))

    @property
    def kernel_leaves(self) -> int:
        """How many leaves kernels ran, in all stages."""
        return sum(subround.kernel_leaves for subround in self.subrounds)

    @property
    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """What decided the bits of the result, on its workers: one, unless mixed."""
        by_subround = (subround.fingerprint for subround in self.subrounds)
        return tuple(dict.fromkeys(each for each in by_subround if each is not None))

    @property
    def no_kernel(self) -> tuple[str, ...]:
        """Why leaves were interpreted, each reason once."""
        reasons = (subround.no_kernel for subround in self.subrounds)
        return tuple(dict.fromkeys(reason for reason in reasons if reason is not None))

    @property
    def clients_per_second(self) -> float:
        """Clients of the cohort over the seconds of the whole call."""
        return self.num_clients / self.seconds if self.seconds else 0.0

    @property
    def spans(self) -> tuple[timeline.Span, ...]:
        """What each worker did when, lost attempts and slower copies included."""
        return tuple(timeline.spans_of(self.subrounds, self.num_clients))

    def timeline(self) -> Any:
        """Return a matplotlib figure: a lane a worker, a bar a subround.

        Attempts that came to nothing are hatched. The clients' data is read within
        their bars.

        Raises:
            UserError: matplotlib is not installed.
        """
        return timeline.draw_spans(self.spans, str(self))

    @override
    def __str__(self) -> str:
        num_subrounds = sum(subround.num_clients > 0 for subround in self.subrounds)
        dropped = len(self.dropped_clients)
        without = f" ({dropped} dropped)" if dropped else ""
        return (
            f"call {self.round_index}: {self.num_clients} clients{without} in"
            f" {num_subrounds} subround{'s' * (num_subrounds != 1)},"
            f" {reprs.show_number(self.seconds)} s,"
            f" {reprs.show_number(self.clients_per_second)} clients/s,"
            f" {self.num_retries}"
            f" {'retry' if self.num_retries == 1 else 'retries'}"
        )

    @override
    def __repr__(self) -> str:
        return f"<{self}>"

    def _repr_html_(self) -> str:
        rows = [
            {
                "subround": self._name(subround),
                "clients": subround.num_clients,
                "attempts": subround.attempts,
                "seconds": subround.seconds,
                "when": _draw_bar(subround, self.seconds),
                "worker": subround.worker,
                "pid": str(subround.worker_pid),
                "node": subround.node,
            }
            for subround in self.subrounds
        ]
        is_told = any(subround.busy_s for subround in self.subrounds)
        moved = self.bytes_broadcast, self.bytes_sliced, self.bytes_returned
        remarks = [
            *([f"workers waited {self.waiting:.0%} of the time"] if is_told else []),
            *([_show_moved(*moved)] if any(moved) else []),
            *(
                f"subround {subround.subround_index}, attempt {lost.attempt},"
                f" {reprs.show_number(lost.seconds)} s on {lost.worker} (pid"
                f" {lost.worker_pid}, node {lost.node}): {lost.ended}: {lost.detail}"
                for subround in self.subrounds
                for lost in subround.lost
            ),
            *(
                f"dropped the client at position {client}: {reason}"
                for client, reason in self.dropped_clients.items()
            ),
            *(f"drew without a key: {ops}" for ops in self.unkeyed_ops),
            *(f"read through tf.data: {computation}" for computation in self.unlowered),
            *(f"interpreted, not in a kernel: {reason}" for reason in self.no_kernel),
            *(
                f"XLA is {'on' if decision.jit else 'off'}: {decision.reason}"
                for decision in self.jit_decisions
            ),
            *(f"interpreted, as its graph raised: {work}" for work in self.interpreted),
        ]
        notes = "".join(f"<li>{html.escape(remark)}</li>" for remark in remarks)
        return reprs.draw_table(str(self), rows, f"<ul>{notes}</ul>" if notes else "")

    def _name(self, subround: SubroundReport) -> str:
        ends = self.num_clients and not subround.num_clients
        return f"{subround.subround_index}{' (finish)' if ends else ''}"


def _show_moved(broadcast: int, sliced: int, returned: int) -> str:
    common, own, back = (
        reprs.show_number(moved / 1e6) for moved in (broadcast, sliced, returned)
    )
    return f"{common} MB broadcast, {own} MB of clients, {back} MB returned"


class ReportBuilder:
    """An event sink that keeps the report of the round that returned last.

    Rounds may overlap. Of those that never return, it remembers a few.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.seconds = 0.0
        self._open: dict[int, list[events.Event]] = {}
        self.last: RoundReport | None = None

    def on_event(self, event: events.Event) -> None:
        """Add an event to the report of its round."""
        if isinstance(event, events.Waiting):
            return
        if isinstance(event, events.RoundStarted):
            if len(self._open) >= _OPEN_ROUNDS:
                self._open.pop(next(iter(self._open)))
            self._open[event.round_index] = []
        if event.round_index not in self._open:
            return
        self._open[event.round_index].append(event)
        if isinstance(event, events.RoundFinished):
            told = self._open.pop(event.round_index)
            self.num_calls += 1
            self.seconds += event.seconds
            if event.round_index < ASIDE_FROM:
                self.last = _report(told)


def _report(told: Sequence[events.Event]) -> RoundReport:
    """Return the report of a round that has returned, from all of its events."""

    def of(kind: type[_Event]) -> list[_Event]:
        return [event for event in told if isinstance(event, kind)]

    (started,), (finished,) = of(events.RoundStarted), of(events.RoundFinished)
    ended = sorted(of(events.SubroundFinished), key=lambda event: event.subround_index)
    dropped = {event.client_index: event.reason for event in of(events.ClientDropped)}
    return RoundReport(
        round_index=started.round_index,
        num_clients=started.num_clients,
        num_leaves=started.num_leaves,
        subrounds=tuple(SubroundReport(**vars(event)) for event in ended),
        seconds=finished.seconds,
        unkeyed_ops=tuple(
            f"{event.computation}: {', '.join(event.ops)}"
            for event in of(events.RandomOpsUnkeyed)
        ),
        unlowered=tuple(
            f"{event.computation}: {event.reason}"
            for event in of(events.ComputationUnlowered)
        ),
        bytes_broadcast=finished.bytes_broadcast,
        bytes_sliced=finished.bytes_sliced,
        dropped_clients=dict(sorted(dropped.items())),
        jit_decisions=tuple(event.decision for event in of(events.JitDecided)),
        interpreted=tuple(
            f"{event.work}: {event.reason}" for event in of(events.WorkInterpreted)
        ),
        num_workers=started.num_workers,
    )

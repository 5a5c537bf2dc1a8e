"""The report of a round, which is built from the round's events.

A notebook shows it as a table. Each subround has a row, with a bar for when it ran.
"""

import collections
import dataclasses
import html
from collections.abc import Sequence
from typing import Any, TypeVar

import pydantic
from typing_extensions import override

import ray_fed.observability.timeline as timeline
from ray_fed.observability import events, reprs
from ray_fed.observability.events import SubroundReport
from ray_fed.plan import diagnostics
from ray_fed.plan.fingerprint import Fingerprint

_Event = TypeVar("_Event", bound=events.Event)

_BAR_PX = 160
_BAR_COLOR = "#4c78a8"
_RETRIED_COLOR = "#e45756"


def _draw_bar(subround: SubroundReport, seconds: float) -> reprs.Html:
    """Return a bar for when a subround ran, red if it had several attempts."""
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
"""First number of calls that run beside a program's own calls, such as evaluations
during the next round. Such a call never becomes the last report."""


class RoundReport(pydantic.BaseModel):
    """The report of one call of a context.

    The module `events` explains subrounds and leaves. Bytes are the sizes of arrays
    that leave a process. They do not include computations, files that a worker reads,
    or second attempts. On the local backend they are 0.

    Attributes:
        round_index: The number of calls before this one.
        num_clients: The size of the cohort.
        num_leaves: The number of leaves of the merge tree.
        subrounds: The subrounds in order. The last subround merges and finishes the
            round. If there is only one, it also does the work of all clients.
        seconds: The time from the call to its result. A wait for the result of another
            call does not count.
        num_workers: The number of workers that the round could use.
        unkeyed_ops: Computations, and their random ops that do not follow the seed, the
            call and the client. Such ops draw other numbers on a retry.
        unlowered: Computations that read their sequences through tf.data, which is
            slower, with the reasons.
        bytes_broadcast: The size of the values that all subrounds receive: the server's
            part of the argument, and merged values of earlier stages. Each value counts
            once, even if it was in the object store before.
        bytes_sliced: The size of the clients' values. Each value counts once.
        dropped_clients: The errors of clients that the round continued without, by
            index in the cohort. These clients count in `num_clients`.
        jit_decisions: The decisions of `kernels={"jit": "auto"}` for or against XLA,
            with their reasons. Empty with "on" and "off".
        interpreted: Work whose graph raised an error, with the error. Executors ran it
            step by step. The result is the same, but it took longer.
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
        """The share of the workers' time, 0 to 1, in which they had nothing to do.

        Workers wait while the argument is checked and sent, while other workers still
        run or merge, and while the result is returned.
        """
        busy_s = sum(subround.busy_s for subround in self.subrounds)
        had_s = self.seconds * self.num_workers
        return max(0.0, 1 - busy_s / had_s) if had_s else 0.0

    @property
    def bytes_returned(self) -> int:
        """The size of returned values: partials, kept and merged values, the result."""
        return sum(subround.bytes_returned for subround in self.subrounds)

    @property
    def num_retries(self) -> int:
        """The number of retries of all subrounds."""
        return sum(subround.attempts - 1 for subround in self.subrounds)

    @property
    def retries(self) -> dict[str, int]:
        """The number of failed attempts by kind: crash, preemption, memory, hang.

        Attempts that a faster copy overtook do not count.
        """
        ends = [lost.ended for s in self.subrounds for lost in s.lost]
        return dict(collections.Counter(end for end in ends if end != "slower"))

    @property
    def kernel_leaves(self) -> int:
        """The number of leaves whose clients ran as one graph, in all stages."""
        return sum(subround.kernel_leaves for subround in self.subrounds)

    @property
    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """The distinct `Fingerprint`s: one, unless `workers.allow_mixed` is set."""
        by_subround = (subround.fingerprint for subround in self.subrounds)
        return tuple(dict.fromkeys(each for each in by_subround if each is not None))

    @property
    def no_kernel(self) -> tuple[str, ...]:
        """The distinct reasons why leaves ran op by op instead of as one graph."""
        reasons = (subround.no_kernel for subround in self.subrounds)
        return tuple(dict.fromkeys(reason for reason in reasons if reason is not None))

    @property
    def clients_per_second(self) -> float:
        """The number of clients, divided by the seconds of the call."""
        return self.num_clients / self.seconds if self.seconds else 0.0

    @property
    def spans(self) -> tuple[timeline.Span, ...]:
        """What each worker did when, including lost attempts and slower copies."""
        return tuple(timeline.spans_of(self.subrounds, self.num_clients))

    def timeline(self) -> Any:
        """Return a matplotlib figure with a lane for each worker.

        Each subround is a bar, which includes the reading of clients' data. Attempts
        without a result are hatched.

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
    """An event sink that builds the report of the latest finished round, `last`.

    Rounds may overlap. Events of the latest unfinished rounds are kept.
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


def _without_round(event: events.SubroundFinished) -> SubroundReport:
    fields = dataclasses.fields(SubroundReport)
    return SubroundReport(**{f.name: getattr(event, f.name) for f in fields})


def _report(told: Sequence[events.Event]) -> RoundReport:

    def of(kind: type[_Event]) -> list[_Event]:
        return [event for event in told if isinstance(event, kind)]

    (started,), (finished,) = of(events.RoundStarted), of(events.RoundFinished)
    ended = sorted(of(events.SubroundFinished), key=lambda event: event.subround_index)
    dropped = {event.client_index: event.reason for event in of(events.ClientDropped)}
    return RoundReport(
        round_index=started.round_index,
        num_clients=started.num_clients,
        num_leaves=started.num_leaves,
        subrounds=tuple(map(_without_round, ended)),
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

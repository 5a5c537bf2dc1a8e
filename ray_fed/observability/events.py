"""What happened, as data: events leave a round sideways and decide nothing."""

import dataclasses
from collections.abc import Iterable
from typing import Protocol

from ray_fed.plan import diagnostics, outcomes
from ray_fed.plan.diagnostics import (
    ComputationUnlowered,
    RandomOpsUnkeyed,
    WorkInterpreted,
    WorkUnshaped,
)
from ray_fed.plan.fingerprint import Fingerprint


@dataclasses.dataclass(frozen=True)
class Waiting:
    """The first call of a computation waits, or waits no more.

    Sent only where that call takes longer than half a second.

    Attributes:
        activity: what it waits for, such as "1 of 2 workers ready"; empty when the call
            ends.
    """

    activity: str


@dataclasses.dataclass(frozen=True)
class RoundStarted:
    """A call was cut into subrounds.

    Attributes:
        round_index: calls of this context before this one.
        num_clients: size of the cohort.
        num_leaves: leaves of the merge tree.
        num_subrounds: how many run before the merge.
        num_workers: that they have between them.
    """

    round_index: int
    num_clients: int
    num_leaves: int
    num_subrounds: int
    num_workers: int = 1


@dataclasses.dataclass(frozen=True)
class SubroundFinished:
    """A subround returned its partials.

    Attributes:
        round_index: of its round.
        subround_index: in its round; the finish comes after the last one, unless the
            only subround does it, too.
        num_clients: that it ran.
        attempts: 1 where nothing failed.
        started_s: when it was submitted, in seconds since its round began.
        seconds: from its first submission to its result.
        worker: name of the worker that ran it.
        worker_pid: process of the clients' work.
        coordinator_pid: process that drove it.
        node: address of the machine.
        kernel_leaves: how many of its leaves a kernel ran.
        no_kernel: why the others were interpreted, in a few words; None where nobody
            asked for a kernel.
        lost: the attempts that came to nothing, in order.
        bytes_sliced: of its clients' values, which it alone is given.
        bytes_returned: of its partials and of what is kept, or of its result.
        fingerprint: of the worker, where it is known.
        num_workers: how many workers ran its clients, `worker` among them.
        busy_s: seconds that workers were at it, in sum, with reading clients' data.
    """

    round_index: int
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


@dataclasses.dataclass(frozen=True)
class ClientDropped:
    """A round goes on without a client whose work or data raised.

    Attributes:
        round_index: of the round.
        subround_index: in its round.
        client_index: in the cohort.
        reason: what was raised.
    """

    round_index: int
    subround_index: int
    client_index: int
    reason: str


@dataclasses.dataclass(frozen=True)
class JitDecided:
    """Which way leaves of kernels ran with `kernels.jit="auto"`, and why.

    They come once a round for each decision, before its `RoundFinished`.

    Attributes:
        round_index: of the round.
        decision: what was decided, and why.
    """

    round_index: int
    decision: diagnostics.JitDecision


@dataclasses.dataclass(frozen=True)
class RoundFinished:
    """A call returned.

    Attributes:
        round_index: of the round.
        seconds: from the call to its result.
        bytes_broadcast: of values that all its subrounds are given, each once.
        bytes_sliced: of values of its clients, each once.
    """

    round_index: int
    seconds: float
    bytes_broadcast: int = 0
    bytes_sliced: int = 0


Event = (
    Waiting
    | RoundStarted
    | SubroundFinished
    | ClientDropped
    | RandomOpsUnkeyed
    | ComputationUnlowered
    | WorkUnshaped
    | JitDecided
    | WorkInterpreted
    | RoundFinished
)


def of_note(note: diagnostics.Note, round_index: int) -> Event:
    """Return the event that work of a round told something."""
    if isinstance(note, diagnostics.JitDecision):
        return JitDecided(round_index, note)
    return dataclasses.replace(note, round_index=round_index)


class EventSink(Protocol):
    """Receives events in the order they happen, on ray_fed's own thread."""

    def on_event(self, event: Event) -> None:
        """Take note of an event; must return soon and not raise."""
        ...


class Sinks:
    """Passes events on to all who subscribed, in the order in which they did.

    Some sinks draw `Waiting` in a terminal, and say so by an attribute `draws_waits`
    that is true. A terminal has room for one such line: of these sinks, the last that
    subscribed alone is told of waits.

    Args:
        sinks: the first of them.
    """

    def __init__(self, sinks: Iterable[EventSink] = ()) -> None:
        self._sinks = list(sinks)

    def add(self, sink: EventSink) -> None:
        """Pass later events on to a sink, too."""
        if _draws_waits(sink):
            self.on_event(Waiting(""))  # what another one drew goes away
        self._sinks.append(sink)

    def remove(self, sink: EventSink) -> None:
        """Pass no later event on to a sink."""
        self._sinks.remove(sink)

    def on_event(self, event: Event) -> None:
        """Pass an event on."""
        sinks = list(self._sinks)
        if isinstance(event, Waiting):
            hidden = [sink for sink in sinks if _draws_waits(sink)][:-1]
            sinks = [sink for sink in sinks if sink not in hidden]
        for sink in sinks:
            sink.on_event(event)


def _draws_waits(sink: EventSink) -> bool:
    return getattr(sink, "draws_waits", False)

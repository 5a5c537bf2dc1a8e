"""Events of rounds, as data. No code of ray_fed decides anything by them."""

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
    """A call waits, or stopped waiting.

    The first call of a computation sends it if it takes longer than half a second. A
    later call sends it if it waits for workers for longer than five seconds.

    Attributes:
        activity: The reason for the wait, such as "1 of 2 workers ready". It is empty
            when the wait ends.
    """

    activity: str


@dataclasses.dataclass(frozen=True)
class RoundStarted:
    """A call was divided into subrounds.

    Attributes:
        round_index: The number of calls of this context before this one.
        num_clients: The size of the cohort.
        num_leaves: The number of leaves of the merge tree.
        num_subrounds: The number of subrounds before the merge.
        num_workers: The number of workers that all subrounds have together.
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
        round_index: The index of its round.
        subround_index: Its index in the round. The finish has the last index, unless
            the only subround also does the finish.
        num_clients: The number of its clients.
        attempts: The number of attempts, 1 if nothing failed.
        started_s: When it was submitted, in seconds since the round began.
        seconds: The time from its first submission to its result.
        worker: The name of the worker that ran it.
        worker_pid: The process that did the clients' work.
        coordinator_pid: The process that ran the subround's task.
        node: The address of the machine.
        kernel_leaves: The number of its leaves that a kernel ran.
        no_kernel: Why other leaves were interpreted. None if kernels are off.
        lost: The attempts without a result, in order.
        bytes_sliced: The size of its clients' values, which only this subround gets.
        bytes_returned: The size of its partials and kept values, or of its result.
        fingerprint: The fingerprint of the worker, if it is known.
        num_workers: The number of workers that ran its clients, including `worker`.
        busy_s: The sum of the seconds in which workers ran it or read clients' data.
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
    """A round continues without a client whose work or data raised.

    Attributes:
        round_index: The index of the round.
        subround_index: The index of the subround in the round.
        client_index: The index of the client in the cohort.
        reason: The error, as text.
    """

    round_index: int
    subround_index: int
    client_index: int
    reason: str


@dataclasses.dataclass(frozen=True)
class JitDecided:
    """Kernels ran with or without XLA, as `kernels.jit="auto"` decided.

    Each decision is one event in a round, before its `RoundFinished`.

    Attributes:
        round_index: The index of the round.
        decision: The decision and its reason.
    """

    round_index: int
    decision: diagnostics.JitDecision


@dataclasses.dataclass(frozen=True)
class RoundFinished:
    """A call returned.

    Attributes:
        round_index: The index of the round.
        seconds: The time from the call to its result.
        bytes_broadcast: The size of the values that all subrounds get. Each counts
            once.
        bytes_sliced: The size of the clients' values. Each counts once.
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
    """Return the event for a note that a worker made in a round."""
    if isinstance(note, diagnostics.JitDecision):
        return JitDecided(round_index, note)
    return dataclasses.replace(note, round_index=round_index)


class EventSink(Protocol):
    """Receives events in order, on ray_fed's own thread."""

    def on_event(self, event: Event) -> None:
        """Receive an event. The method must return soon and must not raise."""
        ...


class Sinks:
    """Passes events to all sinks, in the order in which they subscribed.

    A sink that draws `Waiting` in a terminal has a true attribute `draws_waits`. A
    terminal has room for one such line, so only the last of these sinks receives waits.
    """

    def __init__(self, sinks: Iterable[EventSink] = ()) -> None:
        self._sinks = list(sinks)

    def add(self, sink: EventSink) -> None:
        """Pass later events to a sink, too."""
        if _draws_waits(sink):
            self.on_event(Waiting(""))  # removes the line of another sink
        self._sinks.append(sink)

    def remove(self, sink: EventSink) -> None:
        """Pass no later events to a sink."""
        self._sinks.remove(sink)

    def on_event(self, event: Event) -> None:
        """Pass an event to all sinks."""
        sinks = list(self._sinks)
        if isinstance(event, Waiting):
            hidden = [sink for sink in sinks if _draws_waits(sink)][:-1]
            sinks = [sink for sink in sinks if sink not in hidden]
        for sink in sinks:
            sink.on_event(event)


def _draws_waits(sink: EventSink) -> bool:
    return getattr(sink, "draws_waits", False)

"""Events that tell a program what happens in a round, which is one call of a context.

    cohort --> subrounds, one for each worker --> leaves --> merge and finish

The clients of a round are its cohort. A worker runs a subround, which has the clients
of one or more leaves. A leaf accumulates its clients' values one after another to
partial values. A last step, the finish, merges the partial values of all leaves.
"""

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


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A call waits, or stopped waiting.

    The first call of a computation sends this event if it takes longer than half a
    second. A later call sends it if it waits longer than five seconds for workers.

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
        num_workers: The number of workers that the round can use.
    """

    round_index: int
    num_clients: int
    num_leaves: int
    num_subrounds: int
    num_workers: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubroundReport(outcomes.Ran):
    """A subround in the report of its round. `outcomes.Ran` says where it ran.

    Attributes:
        subround_index: The subround's index in the round. The finish has the last
            index, unless the only subround also does the finish.
        num_clients: The number of the subround's clients.
        started_s: The time of its first submission, in seconds since the round began.
        seconds: The time from its first submission to its result.
        bytes_sliced: The size of the clients' values that only this subround receives.
        bytes_returned: The size of the values that the subround returns: partial and
            kept values, or the result.
    """

    subround_index: int
    num_clients: int
    started_s: float
    seconds: float
    bytes_sliced: int = 0
    bytes_returned: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubroundFinished(SubroundReport):
    """A subround returned its values.

    Attributes:
        round_index: The index of the round.
    """

    round_index: int


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
    """`kernels.jit="auto"` decided whether XLA compiles the work of a computation.

    A round sends each decision once, before its `RoundFinished`.

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
        bytes_broadcast: The size of the values that all subrounds receive. Each value
            counts once.
        bytes_sliced: The size of the clients' values. Each value counts once.
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
    """Convert a worker's note on the round `round_index` to an event."""
    if isinstance(note, diagnostics.JitDecision):
        return JitDecided(round_index, note)
    return dataclasses.replace(note, round_index=round_index)


class EventSink(Protocol):
    """Receives events in order, on ray_fed's own thread."""

    def on_event(self, event: Event) -> None:
        """Receive an event. The method must return soon and must not raise."""
        ...


class Sinks:
    """Passes events to all sinks, in the order in which they were added.

    A sink that draws `Waiting` in a terminal has a true attribute `draws_waits`. A
    terminal has room for one such line, so only the last of these sinks receives
    `Waiting`.
    """

    def __init__(self, sinks: Iterable[EventSink] = ()) -> None:
        self._sinks = list(sinks)

    def add(self, sink: EventSink) -> None:
        """Add a sink, which receives all later events."""
        if _draws_waits(sink):
            self.on_event(Waiting(""))  # removes the line of another sink
        self._sinks.append(sink)

    def remove(self, sink: EventSink) -> None:
        """Remove a sink, which receives no later events."""
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

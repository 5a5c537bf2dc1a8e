"""What a pool is to be, is told of, and says is to be done: plain data."""

import dataclasses
from typing import Literal

FailureClass = Literal["crash", "preemption", "memory", "hang"]

SHORTAGE = "shortage"
"""Stands in a `Refuse` for a class of failure where the cluster has no room."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How many workers a pool is to have, of which kind.

    Attributes:
        least: with fewer, those that start included, no worker is granted.
        most: it grows to so many where there is room.
        is_fixed: what has no room now is started all the same, as long as the nodes
            could hold it: whoever holds the room may leave it.
        each: what a worker asks for, in words.
        wait_timeout_s: seconds that tickets wait for room for `least` workers.
    """

    least: int
    most: int
    is_fixed: bool
    each: str
    wait_timeout_s: float


@dataclasses.dataclass(frozen=True)
class UseBegan:
    """A lease that was kept is used again, as if the worker had just been given.

    Attributes:
        subround: the name that the worker was leased under.
        ago_s: how long ago.
        timeout_s: seconds from then on after which the worker counts as hung; None:
            never.
        siblings: names subrounds that take about as long; empty: there are none.
    """

    subround: str
    ago_s: float
    timeout_s: float | None
    siblings: str


@dataclasses.dataclass(frozen=True)
class UseEnded:
    """What a worker was leased for is done, and the lease is kept."""

    subround: str
    ago_s: float


@dataclasses.dataclass(frozen=True)
class Start:
    """Start a worker on a node; None: wherever there will be room."""

    worker: str
    node: str | None


@dataclasses.dataclass(frozen=True)
class Stop:
    """End a worker that was not ready in time, hangs, or whose node goes.

    Attributes:
        worker: its name.
        detail: why, in words.
    """

    worker: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Look:
    """Survey the nodes soon."""


@dataclasses.dataclass(frozen=True)
class Request:
    """Ask for a cluster that holds so many workers; 0: withdraw what was asked for."""

    count: int


@dataclasses.dataclass(frozen=True)
class Grant:
    """Give a worker to a ticket.

    Attributes:
        ticket: that asked.
        worker: now its own.
        attempt: how many leases the ticket's subround was given, this one included.
    """

    ticket: int
    worker: str
    attempt: int


@dataclasses.dataclass(frozen=True)
class Refuse:
    """Tell a ticket that there will be no worker for it, and why.

    Attributes:
        ticket: that asked.
        message: why, in words.
        failure_class: a `FailureClass` whose budget is spent, "fatal", or `SHORTAGE`.
    """

    ticket: int
    message: str
    failure_class: str


Action = Start | Stop | Grant | Refuse | Look | Request


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a worker is of no more use to a subround.

    Attributes:
        failure_class: whose budget it is counted against.
        detail: which worker on which node, and what happened, in words.
        client_index: whose work it was, in the cohort; None where nobody can tell.
        cause_text: the worker's traceback, where it lived to tell.
    """

    failure_class: FailureClass
    detail: str
    client_index: int | None = None
    cause_text: str = ""

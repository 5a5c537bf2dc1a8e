"""Describes how a worker's plan ended: its values, and the attempts to run it."""

import dataclasses
import os
import platform
from collections.abc import Iterable
from typing import Any

from ray_fed.plan.diagnostics import Note
from ray_fed.plan.fingerprint import Fingerprint, WorkerDescription


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The result of a plan in the process that evaluated it.

    Attributes:
        values: Plain values. For a `Subround`, these are the partial of each subtree,
            and then a list of clients' values for each kept value.
        kernel_leaves: Number of leaves that ran as one graph, which is called a kernel.
        no_kernel: The reason why the other leaves ran step by step, or None.
        busy_s: Seconds of work, summed over workers, with the time to read data.
    """

    values: list[object]
    kernel_leaves: int = 0
    no_kernel: str | None = None
    busy_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One try of a worker to run a subround.

    Attributes:
        attempt: Number of the try, from 1. A copy of a slow try has the same number.
        worker: Name of the worker.
        worker_pid: Process ID of the worker, or 0 if it is unknown.
        node: Address of the machine.
        started_s: Time when the try got the worker, in seconds since the subround first
            asked for a worker.
        seconds: Number of seconds for which the try had the worker.
        ended: "crash", "preemption", "memory" or "hang" if the worker was lost, or
            "slower" if a copy of the same work finished first.
        detail: A sentence about the end, or "".
        fingerprint: Fingerprint of the worker's process.
    """

    attempt: int
    worker: str
    worker_pid: int
    node: str
    started_s: float = 0.0
    seconds: float = 0.0
    ended: str = ""
    detail: str = ""
    fingerprint: Fingerprint | None = None

    @classmethod
    def on(
        cls, worker: str, described: WorkerDescription | None, **about: Any
    ) -> "Attempt":
        """Return an attempt on a worker with other attributes `about`.

        `described` is None if the worker is not ready yet.
        """
        pid = 0 if described is None else described.pid
        node = "unknown" if described is None else described.address
        return cls(worker=worker, worker_pid=pid, node=node, **about)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """The facts about how a subround or a finish ran.

    Attributes:
        attempts: Number of attempts, 1 if nothing failed.
        worker: Name of the worker that ran the clients.
        worker_pid: Process ID of the worker.
        coordinator_pid: ID of the process that drove the subround.
        node: Address of the machine.
        kernel_leaves: See `Evaluated`.
        no_kernel: See `Evaluated`. It is also None if kernels are turned off.
        lost: The attempts that failed, or that ended after another one, in order.
        fingerprint: Fingerprint of the process that ran the clients, if it is known.
        num_workers: Number of workers that ran the clients, including `worker`.
        busy_s: See `Evaluated`.
    """

    attempts: int = 1
    worker: str
    worker_pid: int
    coordinator_pid: int
    node: str
    kernel_leaves: int = 0
    no_kernel: str | None = None
    lost: tuple[Attempt, ...] = ()
    fingerprint: Fingerprint | None = None
    num_workers: int = 1
    busy_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome(Ran):
    """The result of a subround or a finish, and how it ran.

    Attributes:
        values: Plain values, or references to them in a store, as in `Evaluated`.
        notes: Notes of the work, sorted. See `ray_fed.plan.diagnostics`.
        value_bytes: Number of bytes of the arrays in each value that left a worker's
            node. It is empty if values stay in this process.
    """

    values: tuple[object, ...]
    notes: tuple[Note, ...] = ()
    value_bytes: tuple[int, ...] = ()

    @classmethod
    def here(cls, worker: str, values: Iterable[object], **about: Any) -> "Outcome":
        """Return an outcome of work in this process, with other attributes `about`."""
        pid = os.getpid()
        place = {"worker_pid": pid, "coordinator_pid": pid, "node": platform.node()}
        return cls(worker=worker, values=tuple(values), **place, **about)

    @property
    def ran(self) -> dict[str, Any]:
        """The attributes that this outcome has from `Ran`, by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(Ran)}

"""The outcome of a plan: its values, and the attempts to run it."""

import dataclasses
from typing import Any

from ray_fed.plan.diagnostics import Note
from ray_fed.plan.fingerprint import Fingerprint, WorkerDescription


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The result of a plan in the process that evaluated it.

    Attributes:
        values: Plain values in the order of the plan. A subround has the partial of
            each subtree, and then a list of clients' values for each kept value.
        kernel_leaves: Number of leaves that a kernel ran.
        no_kernel: The reason why other leaves were interpreted, if any.
        busy_s: Seconds of work in sum over workers, including reading clients' data.
    """

    values: list[object]
    kernel_leaves: int = 0
    no_kernel: str | None = None
    busy_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One try of a worker to run a subround.

    Attributes:
        attempt: 1 for the first try. A straggler's copy has the straggler's number.
        worker: Name of the worker.
        worker_pid: Process of the worker.
        node: Address of the machine.
        started_s: Time when the worker was leased, in seconds since the subround first
            asked for a worker.
        seconds: Duration of the lease.
        ended: "crash", "preemption", "memory" or "hang" if the worker was lost, or
            "slower" if a copy of the same work finished first.
        detail: A description of what happened.
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
        """Return an attempt on a worker, which has no description until it is ready."""
        pid = 0 if described is None else described.pid
        node = "unknown" if described is None else described.address
        return cls(worker=worker, worker_pid=pid, node=node, **about)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a runner for a subround or a finish.

    Attributes:
        values: Plain or stored values, in the order of the plan.
        attempts: Number of attempts, 1 if nothing failed.
        worker: Name of the worker that ran the clients.
        worker_pid: Process of the worker.
        coordinator_pid: The process that drove the subround.
        node: Address of the machine.
        notes: Notes of the work, in order; see `diagnostics`.
        kernel_leaves: Number of leaves that a kernel ran.
        no_kernel: The reason why the other leaves were interpreted, or None if there
            are no others or kernels are turned off.
        lost: The attempts that failed or were slower, in order.
        value_bytes: Bytes of the arrays in each value that left a worker's node. Empty
            if values stay in this process.
        fingerprint: Fingerprint of the process that ran the clients, if it is known.
        num_workers: Number of workers that ran the clients, including `worker`.
        busy_s: See `Evaluated`.
    """

    values: tuple[object, ...]
    attempts: int
    worker: str
    worker_pid: int
    coordinator_pid: int
    node: str
    notes: tuple[Note, ...] = ()
    kernel_leaves: int = 0
    no_kernel: str | None = None
    lost: tuple[Attempt, ...] = ()
    value_bytes: tuple[int, ...] = ()
    fingerprint: Fingerprint | None = None
    num_workers: int = 1
    busy_s: float = 0.0

"""What became of a plan: its values, and the attempts at it."""

import dataclasses
from typing import Any, TypeAlias

from ray_fed.plan.diagnostics import Note
from ray_fed.plan.fingerprint import Fingerprint, WorkerDescription

Progress: TypeAlias = tuple[int, int, str]
"""Workers that are ready, those and the ones that start, and what they have no room
for, in words; empty where they have it."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What a plan came to, where it was evaluated.

    Attributes:
        values: plain, in the order that the plan asks for: of a subround the partial of
            each of its subtrees, then for each value that is kept its clients'.
        kernel_leaves: how many leaves one graph folded.
        no_kernel: why others were interpreted, if a kernel was asked for.
        busy_s: seconds that workers were at it, in sum, with reading clients' data.
    """

    values: list[object]
    kernel_leaves: int = 0
    no_kernel: str | None = None
    busy_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One worker's turn at a subround.

    Attributes:
        attempt: 1 for the first try; a copy of a straggler has its number.
        worker: its name.
        worker_pid: its process.
        node: address of the machine.
        started_s: when the worker was leased, in seconds since the subround first asked
            for one.
        seconds: how long the worker was leased.
        ended: "crash", "preemption", "memory" or "hang", where the worker was lost;
            "slower", where a copy of the same work finished first.
        detail: what happened, in words.
        fingerprint: of the worker's process.
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
        """Return an attempt on a worker.

        Args:
            worker: its name.
            described: what it said of itself; None where it was not ready.
            **about: the other attributes.
        """
        pid = 0 if described is None else described.pid
        node = "unknown" if described is None else described.address
        return cls(worker=worker, worker_pid=pid, node=node, **about)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a runner returns for a subround or a finish.

    Attributes:
        values: plain or stored, in the order that the plan asks for.
        attempts: 1 where nothing failed.
        worker: name of the worker that ran the clients.
        worker_pid: its process.
        coordinator_pid: the process that drove it.
        node: address of the machine.
        notes: of the work, in order; see `diagnostics`.
        kernel_leaves: how many leaves a kernel ran.
        no_kernel: why the other leaves were interpreted; None where none was, or where
            kernels are turned off.
        lost: the attempts that failed or were slower, in order.
        value_bytes: of the arrays in each value that left a worker's node; empty where
            values stay in this process.
        fingerprint: of the process that ran the clients, where it is known.
        num_workers: how many workers ran the clients, `worker` among them.
        busy_s: see `Evaluated`.
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

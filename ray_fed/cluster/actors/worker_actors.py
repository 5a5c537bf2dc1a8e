"""The actors of a pool's workers: started, compared when they answer, ended."""

from typing import Any

import ray

from ray_fed.cluster.actors.pool_cluster import Cluster
from ray_fed.plan import outcomes
from ray_fed.plan.fingerprint import (
    Fingerprint,
    Versions,
    WorkerDescription,
    describe_difference,
)


class WorkerActors:
    """The handles of the workers that start or are ready, by name.

    Args:
        cluster: on which workers are started.
        driver: the versions that workers have to agree with.
        allow_mixed: whether workers may differ from the driver and from one another.
    """

    def __init__(
        self, cluster: Cluster, driver: Versions, *, allow_mixed: bool
    ) -> None:
        self._cluster = cluster
        self._driver = driver
        self._allow_mixed = allow_mixed
        self._handles: dict[str, Any] = {}
        self._described: dict[str, WorkerDescription] = {}
        self._fingerprint: Fingerprint | None = None

    def __contains__(self, worker: object) -> bool:
        return worker in self._handles

    def start(self, worker: str, node: str | None) -> Any:
        """Start the actor of a worker, without waiting for it; return its handle."""
        self._handles[worker] = handle = self._cluster.start_worker(worker, node)
        return handle

    def handle_of(self, worker: str) -> Any:
        """Return the handle of a worker; None where it is gone."""
        return self._handles.get(worker)

    def address_of(self, worker: str) -> str:
        """Return the address of a worker's node, for an error."""
        found = self._described.get(worker)
        return "unknown" if found is None else found.address

    def admit(self, worker: str, described: WorkerDescription) -> str:
        """Take a worker that answered, and return why it must not be used.

        Returns:
            Empty for one that was taken. The first one that is sets what the others
            have to be like.
        """
        difference = describe_difference(described, self._driver, self._fingerprint)
        if not described.missing and (difference is None or self._allow_mixed):
            self._fingerprint = self._fingerprint or described.fingerprint
            self._described[worker] = described
            return ""
        why = described.missing or (
            f"{difference}. Make them the same, or set `workers.allow_mixed`"
        )
        return f"`{worker}` on node {described.address} was refused: {why}."

    def begin_attempt(self, worker: str, number: int) -> outcomes.Attempt:
        """Return the attempt of that number on a worker, which has not begun."""
        found = self._described[worker]
        return outcomes.Attempt(
            number, worker, found.pid, found.address, fingerprint=found.fingerprint
        )

    def forget_clients(self, tokens: list[str]) -> None:
        """Have workers drop what they keep of clients whose sources are gone."""
        for handle in self._handles.values():
            handle.forget_clients.remote(tokens)

    def end(self, worker: str) -> None:
        """End the actor of a worker; one that is gone is ignored."""
        self._described.pop(worker, None)
        handle = self._handles.pop(worker, None)
        if handle is not None:
            ray.kill(handle, no_restart=True)

    def leave_all(self) -> None:
        """Have all workers end the calls that wait for their end."""
        for handle in self._handles.values():
            handle.leave.remote()

    def end_all(self) -> None:
        """End the actors of all workers."""
        for worker in list(self._handles):
            self.end(worker)

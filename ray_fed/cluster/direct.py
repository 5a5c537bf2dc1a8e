"""Executor stacks on workers of their own, without subrounds.

ReferenceResolvingExecutor
FederatingExecutor --------- RayFederatingStrategy
RemoteExecutor (the first)   RemoteExecutor, one a worker
"""

import itertools
from typing import Any, Self

import federated_language as fl
from typing_extensions import override

import ray_fed.worker.stacks as stacks
from ray_fed.cluster.ray_strategy import (
    RayFederatingStrategy,
    RemoteExecutor,
    WorkerConnection,
)
from ray_fed.cluster.session import Session
from ray_fed.config import Config, check_config
from ray_fed.executors.seeded import SeededExecutor

flf = fl.framework


class RayExecutorFactory(flf.ExecutorFactory):
    """Builds executor stacks over Ray for `fl.framework.SyncExecutionContext`.

    Computations are interpreted as they are, over the whole cohort, on workers that
    the factory holds until it is closed. A worker that dies is replaced, and the values
    that lived on it are made again when they are next needed, from how they were made;
    a piece of work that loses more workers than `config.retry` allows fails, and so
    does one whose worker finds no place within `workers.wait_timeout_s`.

    Args:
        config: `workers`, `retry`, `seed`, `clients_per_leaf`, `default_num_clients`
            and `runtime_env` count here.
        address: of Ray, as for `ray_fed.init`.

    Raises:
        ClusterError: there is no cluster at the address.
        ResourceError: the cluster is smaller than what `workers` asks for.
    """

    def __init__(
        self, config: Config | None = None, address: str | None = None
    ) -> None:
        self._config = check_config(config)
        self._session = Session(address, self._config, needs_all=True)
        self._connections = [
            WorkerConnection(source) for source in self._session.sources()
        ]
        self._stacks: dict[int, flf.Executor] = {}
        self._count = itertools.count()

    def executors(self) -> list[RemoteExecutor]:
        """Return one executor a worker, for a stack of one's own."""
        return [RemoteExecutor(connection) for connection in self._connections]

    @override
    def create_executor(self, cardinalities: Any) -> flf.Executor:
        """Return the stack for so many clients; the same one for the same number."""
        num_clients = cardinalities.get(fl.CLIENTS, self._config.default_num_clients)
        if num_clients not in self._stacks:
            self._stacks[num_clients] = self._build(num_clients)
        return self._stacks[num_clients]

    def _build(self, num_clients: int) -> flf.Executor:
        workers = self.executors()
        executor = stacks.federated_stack(
            lambda federating: RayFederatingStrategy(
                federating.unplaced, workers, num_clients, self._config.clients_per_leaf
            ),
            workers[0],
        )
        return SeededExecutor(executor, self._config.seed, self._count)

    @override
    def clean_up_executor(self, cardinalities: Any) -> None:
        """Close the stack for so many clients, if there is one; the workers stay."""
        num_clients = cardinalities.get(fl.CLIENTS, self._config.default_num_clients)
        executor = self._stacks.pop(num_clients, None)
        if executor is not None:
            executor.close()

    def close(self) -> None:
        """End the workers, then the Ray that was started for them, if it was."""
        for executor in self._stacks.values():
            executor.close()
        self._stacks.clear()
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

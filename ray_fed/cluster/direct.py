"""Builds executors that run on Ray workers, for contexts of federated_language.

An executor stack from `RayExecutorFactory`, from the outermost executor inwards:

ReferenceResolvingExecutor
FederatingExecutor --------- RayFederatingStrategy
RemoteExecutor (the first)   RemoteExecutor, one for each worker
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
from ray_fed.config import Config, resolve_config
from ray_fed.executors.seeded import SeededExecutor

flf = fl.framework


class RayExecutorFactory(flf.ExecutorFactory):
    """Builds executor stacks over Ray for `fl.framework.SyncExecutionContext`.

    Computations are interpreted operation by operation, over all clients at once. They
    run on workers that the factory holds until it is closed. If a worker dies, the
    factory replaces the worker. Values on that worker are computed again when they are
    next needed.

    A computation fails if it loses more workers than `config.retry` allows. It also
    fails if the cluster has no room for a worker within `workers.wait_timeout_s`.

    Args:
        config: The settings. Only `workers`, `retry`, `seed`, `clients_per_leaf`,
            `default_num_clients` and `runtime_env` are used.
        address: Address of Ray, as for `ray_fed.init`.

    Raises:
        ClusterError: No cluster is at the address.
        ResourceError: The cluster lacks resources that `config.workers` asks for.
    """

    def __init__(
        self, config: Config | None = None, address: str | None = None
    ) -> None:
        self._config = resolve_config(config)
        self._session = Session(address, self._config, needs_all=True)
        self._connections = [
            WorkerConnection(source) for source in self._session.sources()
        ]
        self._stacks: dict[int, flf.Executor] = {}
        self._count = itertools.count()

    def executors(self) -> list[RemoteExecutor]:
        """Return a new executor for each worker, for a custom executor stack."""
        return [RemoteExecutor(connection) for connection in self._connections]

    @override
    def create_executor(self, cardinalities: Any) -> flf.Executor:
        """Return the stack for a number of clients. The factory owns the stack."""
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
        """Close the stack for a number of clients, if it exists. Workers stay alive."""
        num_clients = cardinalities.get(fl.CLIENTS, self._config.default_num_clients)
        executor = self._stacks.pop(num_clients, None)
        if executor is not None:
            executor.close()

    def close(self) -> None:
        """End the workers, and then Ray if the factory started it."""
        for executor in self._stacks.values():
            executor.close()
        self._stacks.clear()
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

"""Simple executor stacks on threads of this process, for debugging."""

from typing import Any

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.executors.federating import FederatingExecutor
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.executors.threads import ThreadDelegatingExecutor
from ray_fed.language import type_checks
from ray_fed.worker.stacks import LocalStrategy

flf = fl.framework


def thread_debugging_executor_factory(
    num_clients: int | None = None, clients_per_thread: int = 1
) -> flf.ExecutorFactory:
    """Return a factory of simple executor stacks that run computations for debugging.

    A stack runs exactly the computation that was passed: it caches no results, and it
    runs each graph as it was written. The work of clients must be TensorFlow.

    A stack is a ReferenceResolvingExecutor over a FederatingExecutor. Each group of
    clients has a ThreadDelegatingExecutor over an EagerTFExecutor.

    Args:
        num_clients: Size of the cohort, >= 1, or None to infer it from each argument.
        clients_per_thread: Number of clients that one thread runs in sequence, >= 1.

    Raises:
        ValueError: `num_clients` or `clients_per_thread` is below one.
        TypeError: `num_clients` or `clients_per_thread` is not a whole number.
    """
    if num_clients is not None:
        num_clients = type_checks.check_count(num_clients, "num_clients")
    clients_per_thread = type_checks.check_count(
        clients_per_thread, "clients_per_thread"
    )
    return _DebuggingFactory(num_clients, clients_per_thread)


class _DebuggingFactory(flf.ExecutorFactory):
    """Builds one debugging stack for each number of clients. The stacks share threads.

    One thread is for the server, and the others are for groups of clients.
    """

    def __init__(self, num_clients: int | None, clients_per_thread: int) -> None:
        self._num_clients = num_clients
        self._clients_per_thread = clients_per_thread
        self._executors: dict[tuple[tuple[str, int], ...], flf.Executor] = {}
        self._leaves: list[flf.Executor] = []  # the server's first

    @override
    def create_executor(self, cardinalities: Any) -> flf.Executor:
        """Return the stack for the number of clients. The factory owns the stack."""
        key = _key(cardinalities)
        if key not in self._executors:
            self._executors[key] = self._build(dict(key).get(fl.CLIENTS.uri))
        return self._executors[key]

    def _build(self, inferred: int | None) -> flf.Executor:
        num_clients = self._num_clients if inferred is None else inferred
        if self._num_clients is not None and num_clients != self._num_clients:
            raise errors.CardinalityError(
                f"Expected {self._num_clients} clients, as the executor factory was"
                f" configured, found an argument with {num_clients}."
            )
        groups = [
            range(start, min(start + self._clients_per_thread, num_clients or 0))
            for start in range(0, num_clients or 0, self._clients_per_thread)
        ]
        names = ["server", *map(str, range(len(groups)))]
        for name in names[len(self._leaves) :]:
            self._leaves.append(_debugging_leaf(name))
        unplaced, *targets = self._leaves[: len(names)]
        federating = FederatingExecutor(
            lambda executor: LocalStrategy(executor.unplaced, targets, groups), unplaced
        )
        return ReferenceResolvingExecutor(federating)

    @override
    def clean_up_executor(self, cardinalities: Any) -> None:
        """Drop the stack for a number of clients. Without any stack, threads end."""
        self._executors.pop(_key(cardinalities), None)
        if not self._executors:
            while self._leaves:
                self._leaves.pop().close()


def _key(cardinalities: Any) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((placement.uri, n) for placement, n in cardinalities.items()))


def _debugging_leaf(name: str) -> flf.Executor:
    from ray_fed.executors.eager_tf import EagerTFExecutor

    leaf = EagerTFExecutor.of_written_graphs()
    return ThreadDelegatingExecutor(leaf, f"ray_fed debugging {name}")

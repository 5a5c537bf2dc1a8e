"""Where executors meet: the stacks that ray_fed builds, drawn.

    device_stack                    local_stack

    DeviceStack (resolves names)    FederatedStack (resolves names)
    SequenceExecutor                FederatingExecutor --- LocalStrategy
    EagerTFExecutor                 device_stack           device_stack, one a thread

TensorFlow is imported inside of functions: a coordinator imports this module, but
never loads TensorFlow.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.executors.federating import FederatingExecutor
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.executors.strategy import FederatingStrategy
from ray_fed.executors.threads import ThreadDelegatingExecutor
from ray_fed.language import type_checks
from ray_fed.language.structs import Plain
from ray_fed.plan import merge_tree, plans
from ray_fed.plan.outcomes import Evaluated
from ray_fed.worker.device_stack import DeviceStack, ThreadedStack
from ray_fed.worker.thread_strategy import LocalStrategy

flf = fl.framework


CLIENT_BYTES = 2**30
"""Of clients' data that a stack keeps between rounds, where nobody says another."""


def device_stack(device: Any = None, client_bytes: int = CLIENT_BYTES) -> DeviceStack:
    """Return a stack that runs all unplaced work.

    Args:
        device: a `tf.config.LogicalDevice`, or None.
        client_bytes: of clients' data that is kept between rounds.
    """
    from ray_fed.executors.eager_tf import EagerTFExecutor

    return DeviceStack(EagerTFExecutor(device), client_bytes)


def threaded_stacks(
    num_threads: int,
    client_bytes: int = CLIENT_BYTES,
    devices: Sequence[Any] = (None,),
) -> list[ThreadedStack]:
    """Return stacks, each on a thread of its own, which take turns with devices.

    See `device_stack`.
    """
    stacks: list[ThreadedStack] = []
    with contextlib.ExitStack() as failed:
        for index, device in zip(range(num_threads), itertools.cycle(devices)):
            stack = device_stack(device, client_bytes)
            stacks.append(ThreadedStack(stack, f"ray_fed executor {index}"))
            failed.callback(stacks[-1].close)
        failed.pop_all()  # who asked for them closes them
    return stacks


class FederatedStack(ReferenceResolvingExecutor):
    """Runs any computation over a strategy.

    Args:
        strategy_factory: see `FederatingExecutor`.
        unplaced: runs what is not placed; owned.
    """

    def __init__(
        self,
        strategy_factory: Callable[[FederatingExecutor], FederatingStrategy],
        unplaced: flf.Executor,
    ) -> None:
        self._federating = FederatingExecutor(strategy_factory, unplaced)
        super().__init__(self._federating)

    async def fold(
        self, subround: Any, arg: Plain = None
    ) -> Evaluated | plans.NoKernel:
        """Fold clients: see `FederatingExecutor.fold`."""
        return await self._federating.fold(subround, arg)


def local_stack(
    num_clients: int,
    targets: Sequence[flf.Executor],
    unplaced: flf.Executor,
    clients_per_leaf: int | None = None,
) -> FederatedStack:
    """Return a stack over executors of this process.

    Args:
        num_clients: size of the cohort.
        targets: run the clients; adjacent leaves of clients each.
        unplaced: runs everything else; may be one of `targets`.
        clients_per_leaf: see `merge_tree.cut_leaves`.
    """
    cut = merge_tree.cut_leaves(num_clients, clients_per_leaf)
    runs = merge_tree.cut_runs(len(cut), len(targets))
    groups = [range(cut[run.start].start, cut[run.stop - 1].stop) for run in runs]
    return FederatedStack(
        lambda executor: LocalStrategy(
            executor.unplaced, targets[: len(groups)], groups, clients_per_leaf
        ),
        unplaced,
    )


class _DebuggingFactory(flf.ExecutorFactory):
    """Builds one debugging stack for each set of cardinalities, and owns it."""

    def __init__(self, num_clients: int | None, clients_per_thread: int) -> None:
        self._num_clients = num_clients
        self._clients_per_thread = clients_per_thread
        self._executors: dict[tuple[tuple[str, int], ...], flf.Executor] = {}

    @override
    def create_executor(self, cardinalities: Any) -> flf.Executor:
        """Return the stack for the cardinalities, a new one if there is none."""
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
        targets = [_debugging_leaf(index) for index in range(len(groups))]
        federating = FederatingExecutor(
            lambda executor: LocalStrategy(executor.unplaced, targets, groups),
            _debugging_leaf(len(groups)),
        )
        return ReferenceResolvingExecutor(federating)

    @override
    def clean_up_executor(self, cardinalities: Any) -> None:
        """Close the stack for the cardinalities, if there is one."""
        executor = self._executors.pop(_key(cardinalities), None)
        if executor is not None:
            executor.close()


def _key(cardinalities: Any) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((placement.uri, n) for placement, n in cardinalities.items()))


def _debugging_leaf(index: int) -> flf.Executor:
    from ray_fed.executors.eager_tf import EagerTFExecutor

    leaf = EagerTFExecutor.of_written_graphs()
    return ThreadDelegatingExecutor(leaf, f"ray_fed debugging {index}")


def thread_debugging_executor_factory(
    num_clients: int | None = None, clients_per_thread: int = 1
) -> flf.ExecutorFactory:
    """Return a factory of simple stacks that run local computations for debugging.

    A ReferenceResolvingExecutor over a FederatingExecutor over one
    ThreadDelegatingExecutor for each group of clients, each over an EagerTFExecutor:
    no caches of results, and exactly the computation that was passed, every graph as it
    was written. References are resolved at the top of the stack only, so what clients
    run must be TensorFlow.

    Args:
        num_clients: size of the cohort, >= 1; None: inferred from each argument.
        clients_per_thread: clients that one thread runs in sequence, >= 1.

    Raises:
        ValueError: `num_clients` or `clients_per_thread` is below one.
        TypeError: one of them is no whole number.
    """
    if num_clients is not None:
        num_clients = type_checks.check_count(num_clients, "num_clients")
    clients_per_thread = type_checks.check_count(
        clients_per_thread, "clients_per_thread"
    )
    return _DebuggingFactory(num_clients, clients_per_thread)

"""`RayExecutionContext`, an asynchronous context that runs computations on Ray.

A `MergeableCompExecutionContext` uses several of these contexts, also with one pool:

MergeableCompExecutionContext
  |-- RayExecutionContext --+
  |-- RayExecutionContext --+-- one pool: Ray tasks, workers, budgets
  +-- RayExecutionContext --+
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any, Self

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
import ray_fed.values.plain_values as plain_values
from ray_fed.cluster.metrics import RoundMetrics
from ray_fed.cluster.session import Session
from ray_fed.compiler.binding import read_invocation
from ray_fed.config import Config, resolve_config
from ray_fed.contexts.first_calls import ComputationChecks
from ray_fed.executors.loops import LoopThread
from ray_fed.language import type_checks
from ray_fed.observability import events
from ray_fed.observability.report import ReportBuilder, RoundReport
from ray_fed.plan import merge_tree
from ray_fed.rounds.client_cuts import RoundPolicy, RoundRequest
from ray_fed.rounds.execution import Rounds

flf = fl.framework


@dataclasses.dataclass(frozen=True)
class _Pool:
    """The objects that several contexts share.

    Attributes:
        config: The settings.
        session: Session that owns the pool of workers.
        thread: Thread that runs all calls. A caller's own event loop may end before the
            call gives its workers back.
        numbers: Iterator over the numbers of calls, in the order in which calls begin.
        checks: Checks of each computation before its first call.
    """

    config: Config
    session: Session
    thread: LoopThread
    numbers: Iterator[int]
    checks: ComputationChecks

    def close(self) -> None:
        self.thread.close()
        self.session.close()


class RayExecutionContext(flf.AsyncContext):
    """Runs each computation as one Ray task, on one worker of a pool.

    If the worker dies, the computation runs again on another worker, as often as
    `config.retry` allows, with the same random numbers. Several event loops may call
    the context at the same time. With `pool_of`, several contexts use one pool:

        with RayExecutionContext(Config(workers=3)) as first:
            others = [RayExecutionContext(pool_of=first) for _ in range(2)]
            context = MergeableCompExecutionContext([first, *others], compiler_fn)

    Args:
        config: The settings. Only `workers`, `subrounds.timeout_s`, `retry`, `seed`,
            `data`, `default_num_clients`, `clients_per_leaf` and `runtime_env` are
            used.
        address: Address of Ray, as for `ray_fed.init`.
        pool_of: A context that owns a pool. The new context uses the same pool.

    Raises:
        ConfigError: The backend is not "ray", `config` is no `Config`, or `pool_of` was
            passed with `config` or `address`.
        ValueMismatchError: `pool_of` is no `RayExecutionContext`.
        ClusterError: No cluster is at the address.
        ResourceError: The cluster lacks resources that `config.workers` asks for.
    """

    def __init__(
        self,
        config: Config | None = None,
        address: str | None = None,
        *,
        pool_of: "RayExecutionContext | None" = None,
    ) -> None:
        if pool_of is not None and not (config is None and address is None):
            raise errors.ConfigError(
                "Expected no `config` or `address` beside `pool_of`, found one or both"
                " of them: the pool has its settings already."
            )
        if pool_of is not None:
            type_checks.check_kind(pool_of, RayExecutionContext, "pool_of")
        self._owns_pool = pool_of is None
        self._pool = _start(config, address) if pool_of is None else pool_of._open_pool  # noqa: SLF001 (of this class)
        config, session = self._pool.config, self._pool.session
        self._report = ReportBuilder()
        self._sinks = events.Sinks([self._report, RoundMetrics(session.program)])
        self._rounds = Rounds(
            session.runners(),
            RoundPolicy(
                cut_leaves=lambda n: merge_tree.cut_leaves(n, config.clients_per_leaf),
                num_workers=session.count_workers,
                default_num_clients=config.default_num_clients,
                seed=config.seed,
                store=session.store,
                fetch=session.fetch,
                emit=self._sinks.on_event,
            ),
        )
        self._is_closed = False

    @property
    def _open_pool(self) -> _Pool:
        if self._is_closed:
            raise errors.ContextStateError(
                "Expected an open RayExecutionContext, found it closed: make another."
            )
        self._pool.session.check()
        return self._pool

    @property
    def last_report(self) -> RoundReport | None:
        """Report of the latest call that returned, or None before any has returned."""
        return self._report.last

    def subscribe(self, sink: events.EventSink) -> None:
        """Call `sink.on_event` for the events of all later calls, on another thread."""
        self._sinks.add(sink)

    @override
    @tracebacks.shorten
    async def invoke(self, comp: Any, arg: Any = None) -> Any:
        """Run a computation on its argument, on one worker.

        The result has the Python containers of its type, with NumPy values as elements.
        Raises the errors of `ExecutionContext.invoke`.
        """
        pool, started = self._open_pool, time.monotonic()
        comp, argument = read_invocation(comp, arg, pool.config.driver_limits)
        pool.checks.check(comp)
        spec = RoundRequest(next(pool.numbers), started)
        work = self._rounds.run_whole(comp, argument, spec)
        return plain_values.from_plain(
            await pool.thread.run(work), comp.type_signature.result
        )

    def close(self) -> None:
        """Close the context. If it has made the pool, end the pool, too."""
        if self._owns_pool and not self._is_closed:
            self._pool.close()
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _start(config: Config | None, address: str | None) -> _Pool:
    config = resolve_config(config)
    if config.backend != "ray":
        raise errors.ConfigError(
            f'Expected backend="ray" for a RayExecutionContext, found'
            f' backend="{config.backend}".'
        )
    session = Session(address, config)
    return _Pool(
        config,
        session,
        LoopThread("ray_fed calls"),
        itertools.count(),
        ComputationChecks(in_process=False),
    )

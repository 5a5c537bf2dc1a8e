"""The context that `init` and `create_context` build, on either backend."""

import concurrent.futures
import dataclasses
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Self

import federated_language as fl
from typing_extensions import override

import ray_fed.blocks as blocks
import ray_fed.errors as errors
import ray_fed.plain as plain
import ray_fed.plan as plan
from ray_fed.compiler.binding import bind_functions
from ray_fed.compiler.form import MergeableCompChain, MergeableCompForm
from ray_fed.compiler.split import compile_to_chain
from ray_fed.config import Config
from ray_fed.contexts.computation_cache import ComputationCache
from ray_fed.contexts.policy import CallSpec, RoundPolicy
from ray_fed.contexts.rounds import Rounds
from ray_fed.contexts.runners import LocalRunner
from ray_fed.executors import stack
from ray_fed.executors.calling_thread import CallingThread
from ray_fed.executors.threads import LoopThread, wait_for
from ray_fed.fingerprint import Fingerprint
from ray_fed.observability import events
from ray_fed.observability.report import ReportBuilder, RoundReport

flf = fl.framework
_logger = logging.getLogger(__name__)


class ExecutionContext(flf.SyncContext):
    """Runs any federated computation in subrounds, on Ray or on threads.

    A computation is compiled once, to stages of a mergeable form, and run in subrounds;
    one that has no such form runs whole, on one worker. Results have the Python
    containers of their type and numpy values at the leaves. Calls may come from any
    thread, also from one that runs an event loop.

    Args:
        config: settings.
        runners: run subrounds; closed by `close` before `on_close` is called.
        num_workers: subrounds of a round where `config.subrounds` leaves it open; a
            function is asked as each round begins.
        store: see `RoundPolicy`.
        on_close: releases what the runners run on.
        fetch: reads what `store`, or a runner, left in a store; passes on the rest.
    """

    def __init__(
        self,
        config: Config,
        runners: Sequence[flf.AsyncContext],
        num_workers: int | Callable[[], Awaitable[int]],
        store: Callable[[Any], tuple[Any, int]],
        on_close: Callable[[], None],
        fetch: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> None:
        self._config = config
        self._on_close = on_close
        self._fetch = fetch
        self._report = ReportBuilder()
        self._warned = False
        self._sinks = _Sinks([self._report])
        self._chains = ComputationCache(self._to_chain)
        self._rounds = Rounds(
            runners,
            RoundPolicy(
                cut_leaves=lambda n: plan.cut_leaves(n, config.clients_per_leaf),
                count_subrounds=_count_subrounds(config, num_workers),
                default_num_clients=config.default_num_clients,
                seed=config.seed,
                store=store,
                sinks=(self._sinks,),
                call_s=_call_s(config),
                jit=config.kernels.jit,
                vectorised_clients=config.kernels.vectorised_clients,
                leaves_out_clients=True,
                kept_bytes=config.kept_bytes,
                max_dropped_clients=config.max_dropped_clients,
            ),
        )
        self._thread: LoopThread | CallingThread | None = (
            CallingThread() if config.debug else LoopThread("ray_fed rounds")
        )

    @property
    def is_open(self) -> bool:
        """Whether the context can be called: false once it is closed."""
        return self._thread is not None

    @property
    def config(self) -> Config:
        """The settings that the context was built with."""
        return self._config

    @property
    def last_report(self) -> RoundReport | None:
        """What the latest call cost; None before the first one returns."""
        return self._report.last

    @property
    def num_calls(self) -> int:
        """Calls so far: the next one's random numbers are keyed by it."""
        return self._rounds.num_calls

    def resume_at(self, num_calls: int) -> None:
        """Number the next call as a run that was interrupted would have.

        Args:
            num_calls: of that run, when it saved its state; >= 0.
        """
        self._rounds.num_calls = num_calls

    def subscribe(self, sink: events.EventSink) -> None:
        """Send the events of all later rounds to a sink, on ray_fed's own thread."""
        self._sinks.add(sink)

    def unsubscribe(self, sink: events.EventSink) -> None:
        """Stop sending events to a sink."""
        self._sinks.remove(sink)

    @override
    def invoke(self, comp: Any, arg: Any = None) -> Any:
        """Run a computation, or a MergeableCompForm, on its argument.

        Where the parameter's type has functions, the argument has computations.

        Raises:
            TypeError: the argument is not of its type.
            CardinalityError: client values in the argument differ in number.
            ComputationError: work of the computation raised.
            RetryBudgetError: workers died more often than `config.retry` allows.
            DeadlineError: they hung more often than that.
            ContextStateError: the context was closed.
        """
        started = time.monotonic()  # it may take longer to read an argument than to run
        thread = self._open_thread()
        type_spec = comp.type_signature
        if not isinstance(type_spec, fl.FunctionType):
            raise errors.ValueMismatchError(
                f"Expected a computation, found a value of type `{type_spec}`."
            )
        comp, arg = bind_functions(comp, arg)
        parameter, argument = comp.type_signature.parameter, None
        if parameter is not None:
            argument = plain.to_plain(arg, parameter, "the argument")
        spec = self._rounds.new_call(started=started)
        result = _wait_for(thread, self._invoke(comp, argument, spec))
        return plain.from_plain(result, type_spec.result)

    def start(
        self,
        comp: Any,
        prepare: Callable[[], Awaitable[Any]],
        deliver: Callable[[Sequence[Any]], None],
    ) -> concurrent.futures.Future[None]:
        """Start a call whose result stays, part by part, where it was made.

        Args:
            comp: a computation whose result holds nothing placed at clients.
            prepare: returns its argument in plain form; parts of it may be stored.
            deliver: takes the parts of the result, in the order of `ray_fed.parts`:
                each plain or stored, for `fetch`.

        Returns:
            A future of the call, with its failure. All that is given here, and
            `fetch`, runs on ray_fed's own thread.

        Raises:
            ContextStateError: the context was closed.
        """
        thread = self._open_thread()
        spec = self._rounds.new_call(in_parts=True)

        async def run() -> None:
            argument = await prepare()  # may wait for the call before
            begun = dataclasses.replace(spec, started=time.monotonic())
            deliver(await self._invoke(comp, argument, begun))

        return thread.submit(run())

    def fetch(self, part: Any) -> concurrent.futures.Future[Any]:
        """Read a part that a call delivered, into this process.

        Raises:
            ContextStateError: the context was closed.
        """

        async def run() -> Any:
            return part if self._fetch is None else await self._fetch(part)

        return self._open_thread().submit(run())

    def _open_thread(self) -> LoopThread | CallingThread:
        if self._thread is None:
            raise errors.ContextStateError(
                "Expected an open context, found it closed: call ray_fed.init again."
            )
        return self._thread

    async def _invoke(self, comp: Any, arg: Any, spec: CallSpec) -> Any:
        if isinstance(comp, MergeableCompForm):
            return await self._rounds.run_chain(MergeableCompChain.of(comp), arg, spec)
        chain = self._chains.get(comp)
        if chain is None:
            return await self._rounds.run_whole(comp, arg, spec)
        return await self._rounds.run_chain(chain, arg, spec)

    def _to_chain(self, comp: flf.ConcreteComputation) -> MergeableCompChain | None:
        self._warn_of_simulation(comp)
        try:
            with blocks.depth_in_words():
                return compile_to_chain(comp)
        except errors.CompileError:
            return None

    def _warn_of_simulation(self, comp: flf.ConcreteComputation) -> None:
        if self._warned or not flf.computation_contains_secure_aggregation(comp):
            return
        self._warned = True
        _logger.warning(
            "Secure aggregation is simulated in the clear: values are checked against"
            " their bounds and summed, and nothing is hidden from the server."
        )

    def close(self) -> None:
        """Stop workers and what was started for them; a second call does nothing."""
        if self._thread is None:
            return
        self._thread.close()
        self._thread = None
        self._on_close()
        if flf.get_context_stack().current is self:
            flf.set_default_context(_Closed())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _wait_for(
    thread: LoopThread | CallingThread, coroutine: Coroutine[Any, Any, Any]
) -> Any:
    if isinstance(thread, CallingThread):
        return thread.run(coroutine)
    return wait_for(thread, coroutine)


def _count_subrounds(
    config: Config, num_workers: int | Callable[[], Awaitable[int]]
) -> Callable[[], Awaitable[int]]:
    """Return what is asked as a round begins: also where the settings have the answer.

    Whoever counts the workers looks after them by the way.
    """

    async def count() -> int:
        found = num_workers if isinstance(num_workers, int) else await num_workers()
        return config.subrounds.count or found

    return count


def _call_s(config: Config) -> float | None:
    """Return how long a call of a kernel may be; None for no kernels.

    Debugging goes through the work of one client at a time.
    """
    if config.debug or not config.kernels.enabled:
        return None
    return config.kernels.call_s


class _Closed(flf.SyncContext):
    """Stands where a closed context stood, to say so."""

    @override
    def invoke(self, comp: Any, arg: Any) -> Any:
        raise errors.ContextStateError(
            "Expected an open context, found it closed: call ray_fed.init again."
        )


class _Sinks:
    """Passes events on to those who subscribed."""

    def __init__(self, sinks: list[events.EventSink]) -> None:
        self._sinks = sinks

    def add(self, sink: events.EventSink) -> None:
        self._sinks.append(sink)

    def remove(self, sink: events.EventSink) -> None:
        self._sinks.remove(sink)

    def on_event(self, event: events.Event) -> None:
        for sink in list(self._sinks):
            sink.on_event(event)


def build_context(address: str | None, config: Config) -> ExecutionContext:
    """Return a context on the configured backend.

    Args:
        address: of Ray, see `cluster.session.Session`; not for the local backend.
        config: settings.

    Raises:
        ConfigError: an address was given to the local backend.
        ClusterError: the cluster is not there, or smaller than what is asked for.
    """
    if config.backend == "local":
        return _build_local(address, config)
    from ray_fed.cluster.session import Session

    session = Session(address, config)
    return ExecutionContext(
        config,
        session.runners(),
        session.count_workers,
        session.store,
        session.close,
        session.fetch,
    )


def _build_local(address: str | None, config: Config) -> ExecutionContext:
    if address is not None:
        raise errors.ConfigError(
            f"Expected no address for the local backend, found `{address}`."
        )
    if config.workers.num_gpus or config.workers.resources:
        raise errors.ConfigError(
            "Expected neither `workers.num_gpus` nor `workers.resources` for the local"
            " backend, whose workers are threads of this process, found"
            f" {config.workers.num_gpus:g} and {dict(config.workers.resources)}: set"
            ' backend="ray".'
        )
    from ray_fed.tensorflow import devices

    num_leaves = 1 if config.debug else _count_threads(config)
    devices.set_threads(max(1, int(config.workers.num_cpus)), num_leaves)
    found = devices.read_fingerprint()
    make_runners = _debugging_runners if config.debug else _threaded_runners
    runners = make_runners(config, found)

    def close() -> None:
        for runner in runners:
            runner.close()

    return ExecutionContext(config, runners, len(runners), RoundPolicy.store, close)


def _threaded_runners(config: Config, fingerprint: Fingerprint) -> list[LocalRunner]:
    leaves = stack.threaded_leaves(_count_threads(config), config.workers.client_bytes)
    return [
        LocalRunner(leaf, f"thread {index}", fingerprint)
        for index, leaf in enumerate(leaves)
    ]


def _count_threads(config: Config) -> int:
    num_cpus = os.cpu_count() or 1
    match config.workers.count:
        case None:
            return num_cpus
        case int() as count:
            return count
        case (least, most):
            return max(least, min(most, num_cpus))


def _debugging_runners(config: Config, fingerprint: Fingerprint) -> list[LocalRunner]:
    del config  # one thread, whatever it says
    leaf = stack.leaf_stack()
    return [LocalRunner(leaf, "calling thread", fingerprint, stepwise=True)]

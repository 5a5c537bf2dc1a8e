"""The context that `init` and `create_context` install or return, on any backend.

`Backend` is the seam between it and what runs its subrounds: Ray, or threads.
"""

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Self

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
import ray_fed.values.plain_values as plain_values
from ray_fed.compiler.binding import read_invocation
from ray_fed.compiler.form import MergeableCompChain, MergeableCompForm
from ray_fed.compiler.split import compile_to_chain
from ray_fed.config import Config
from ray_fed.contexts.first_calls import (
    AwaitReady,
    ComputationChecks,
    StartupProgress,
)
from ray_fed.contexts.slow_ways import SlowPathWarnings
from ray_fed.executors.loops import CallingThread, LoopThread
from ray_fed.language import blocks, type_checks
from ray_fed.language.structs import Plain
from ray_fed.observability import events, reprs
from ray_fed.observability.report import ReportBuilder, RoundReport
from ray_fed.plan import merge_tree
from ray_fed.rounds.client_cuts import RoundPolicy, RoundRequest
from ray_fed.rounds.execution import ComputationCache, Rounds
from ray_fed.values.client_references import ListCache
from ray_fed.values.components import Components
from ray_fed.values.stored import ArgumentPart

flf = fl.framework


@dataclasses.dataclass(frozen=True)
class Backend:
    """What runs the subrounds of a context.

    Attributes:
        runners: run subrounds; closed by `close`.
        num_workers: the number of workers, and of a round's subrounds where
            `Config.subrounds` has none; a function is called as each round begins.
        close: closes the runners, and what they run on.
        store: see `RoundPolicy`.
        fetch: see `RoundPolicy`.
        await_ready: see `AwaitReady`; None: workers are threads, which are always
            ready.
        check: raises a ContextStateError once what the runners run on is gone.
        spreads_subrounds: whether a runner may use several workers for one subround.
        place: which Ray it is on, in a few words; empty: none.
        sinks: receive the events of all rounds.
    """

    runners: Sequence[fl.framework.AsyncContext]
    num_workers: int | Callable[[], Awaitable[int]]
    close: Callable[[], None]
    store: Callable[[ArgumentPart], tuple[ArgumentPart, int]] = RoundPolicy.store
    fetch: Callable[[ArgumentPart], Coroutine[Any, Any, Plain]] = RoundPolicy.fetch
    await_ready: AwaitReady | None = None
    check: Callable[[], None] = lambda: None
    spreads_subrounds: bool = False
    place: str = ""
    sinks: Sequence[events.EventSink] = ()


class ExecutionContext(flf.SyncContext):
    """Runs any federated computation in subrounds, on Ray or on threads.

    A computation is compiled once, to stages of a mergeable form, and run in subrounds;
    one that has no such form runs whole, its clients spread over all workers. Results
    have the Python containers of their type and numpy values at the leaves. Calls may
    come from any thread, also from one that runs an event loop.

    Args:
        config: settings.
        backend: runs subrounds; owned: `close` closes it.
        sinks: receive the events of all rounds, before sinks that subscribe later.

    Attributes:
        lists: of clients that come again, kept for as long as this is open.
        read_limits: what may be read of arguments, in this process.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        sinks: Sequence[events.EventSink] = (),
    ) -> None:
        self._config = config
        self._backend = backend
        self._report = ReportBuilder()
        self._sinks = events.Sinks(
            [self._report, SlowPathWarnings(), *backend.sinks, *sinks]
        )
        self._startup = StartupProgress(self._sinks.on_event, backend.await_ready)
        self._checks = ComputationChecks(in_process=config.backend == "local")
        self._chains = ComputationCache(_to_chain)
        self._rounds = Rounds(
            backend.runners,
            RoundPolicy(
                cut_leaves=lambda n: merge_tree.cut_leaves(n, config.clients_per_leaf),
                num_subrounds=config.subrounds.count,
                num_workers=backend.num_workers,
                spreads_subrounds=backend.spreads_subrounds,
                default_num_clients=config.default_num_clients,
                seed=config.seed,
                store=backend.store,
                fetch=backend.fetch,
                emit=self._sinks.on_event,
                call_s=_call_s(config),
                jit=config.kernels.jit,
                vectorised_clients=config.kernels.vectorised_clients,
                has_own_runners=True,
                kept_bytes=config.kept_bytes,
                max_dropped_clients=config.max_dropped_clients,
            ),
        )
        self.lists = ListCache(config.workers.client_bytes)
        self.read_limits = config.driver_limits
        self._pid = os.getpid()
        self._thread: LoopThread | CallingThread | None = (
            CallingThread() if config.debug else LoopThread("ray_fed rounds")
        )

    @property
    def is_open(self) -> bool:
        """Whether the context can be called: false once it is closed.

        False, too, once `ray.shutdown` ended the Ray that it runs on, and in a process
        that was forked from its own.
        """
        try:
            self._open_thread()
        except errors.ContextStateError:
            return False
        return True

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

    @tracebacks.shorten
    def resume_at(self, num_calls: int) -> None:
        """Give the next call the number that it has in an interrupted run.

        Args:
            num_calls: `num_calls` of that run as it saved its state; >= 0.

        Raises:
            CardinalityError: it is below zero.
            ValueMismatchError: it is no whole number.
        """
        self._rounds.num_calls = type_checks.check_count(num_calls, "num_calls", 0)

    def subscribe(self, sink: events.EventSink) -> None:
        """Send the events of all later rounds to a sink, on ray_fed's own thread."""
        self._sinks.add(sink)

    def unsubscribe(self, sink: events.EventSink) -> None:
        """Stop sending events to a sink."""
        self._sinks.remove(sink)

    @override
    @tracebacks.shorten
    def invoke(self, comp: Any, arg: Any = None) -> Any:
        """Run a computation, or a MergeableCompForm, on its argument.

        Where the parameter's type has functions, the argument has computations.

        Raises:
            TypeError: `comp` is no computation, or the argument is not of its type.
            CardinalityError: client values in the argument differ in number.
            UnsupportedError: a graph has Python functions of another process.
            ComputationError: work of the computation raised.
            RetryBudgetError: workers died more often than `config.retry` allows.
            DeadlineError: they hung more often than that.
            ResourceError: the cluster no longer has room for `workers`, or its nodes
                have GPUs that TensorFlow does not see.
            ContextStateError: the context was closed.
        """
        return self.invoke_at(None, comp, arg)

    def invoke_at(self, number: int | None, comp: Any, arg: Any) -> Any:
        """Do what `invoke` does, with the random numbers of a call of a number.

        Args:
            number: of the call, which is not counted then; None: the next one.
            comp: to run.
            arg: of it.
        """
        started = time.monotonic()  # it may take longer to read an argument than to run
        thread = self._open_thread()
        comp, argument = read_invocation(comp, arg, self.read_limits, self.lists)
        spec = self._rounds.new_call(started=started, number=number)
        result = thread.wait_for(self._invoke(comp, argument, spec))
        return plain_values.from_plain(result, comp.type_signature.result)

    def start(
        self,
        comp: Any,
        prepare: Callable[[], Awaitable[Plain]],
        deliver: Callable[[Components], None],
        number: int | None = None,
    ) -> concurrent.futures.Future[None]:
        """Start a call whose result stays, each component by itself, where it was made.

        Args:
            comp: a computation whose result holds nothing placed at clients.
            prepare: returns its argument, plain; components of it may be stored.
            deliver: takes the components of the result, in the order of
                `ray_fed.values.components`: each plain or stored, for `fetch`.
            number: of the call, which is not counted then; None: the next one.

        Returns:
            A future of the call; it raises what the call raises. `prepare`, `deliver`
            and `fetch` run on ray_fed's own thread.

        Raises:
            ContextStateError: the context was closed.
        """
        thread = self._open_thread()
        spec = self._rounds.new_call(by_component=True, number=number)

        async def run() -> None:
            argument = await prepare()  # may wait for the call before
            begun = dataclasses.replace(spec, started=time.monotonic())
            deliver(await self._invoke(comp, argument, begun))

        return thread.submit(run())

    def fetch(self, component: ArgumentPart) -> concurrent.futures.Future[Plain]:
        """Read a component that a call delivered, into this process.

        Raises:
            ContextStateError: the context was closed.
        """
        return self._open_thread().submit(self._backend.fetch(component))

    def _open_thread(self) -> LoopThread | CallingThread:
        if self._thread is None:
            raise errors.ContextStateError(
                "Expected an open context, found it closed: call ray_fed.init again."
            )
        if self._pid != os.getpid():
            raise errors.ContextStateError(
                "Expected a context of this process, found one of the process that it"
                " was forked from, whose threads did not follow: start processes by"
                ' `spawn`, as in multiprocessing.get_context("spawn"), and call'
                " ray_fed.init in them; or fork before TensorFlow and Ray are used."
            )
        self._backend.check()
        return self._thread

    async def _invoke(self, comp: Any, arg: Plain, spec: RoundRequest) -> Plain:
        called = comp.up_to_merge if isinstance(comp, MergeableCompForm) else comp
        async with self._startup.telling(called):
            self._checks.check(comp)
            if isinstance(comp, MergeableCompForm):
                chain = MergeableCompChain.of(comp)
            elif (chain := self._chains.get(comp)) is None:
                return await self._rounds.run_whole(comp, arg, spec)
            return await self._rounds.run_chain(chain, arg, spec)

    def _facts(self) -> dict[str, Any]:
        counted = self._config.workers.count or self._backend.num_workers
        place = f" ({self._backend.place})" if self._backend.place else ""
        return {
            "backend": self._config.backend + place,
            "workers": counted if isinstance(counted, int | tuple) else "one a CPU",
            "calls": self._report.num_calls,
            "seconds": reprs.show_number(self._report.seconds),
            "state": "open" if self.is_open else "closed",
        }

    @override
    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"<ray_fed context: {facts}>"

    def _repr_html_(self) -> str:
        return reprs.draw_facts("ray_fed context", self._facts())

    def close(self) -> None:
        """Stop workers and what was started for them; a second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self.lists.clear()
        if self._pid == os.getpid():  # threads and workers are those of that process
            thread.close()
            self._backend.close()
        if flf.get_context_stack().current is self:
            flf.set_default_context(_ClosedContext())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _ClosedContext(flf.SyncContext):
    """Says of every call that the context is closed."""

    @override
    def invoke(self, comp: Any, arg: Any) -> Any:
        raise errors.ContextStateError(
            "Expected an open context, found it closed: call ray_fed.init again."
        )


def _to_chain(comp: flf.ConcreteComputation) -> MergeableCompChain | None:
    """Return a computation as a chain of stages; None where it has no such form."""
    try:
        with blocks.depth_in_words():
            return compile_to_chain(comp)
    except errors.CompileError:
        return None


def _call_s(config: Config) -> float | None:
    """Return how long a call of a kernel may take; None turns kernels off.

    Debugging steps through the work of one client at a time, so it has none.
    """
    if config.debug or not config.kernels.enabled:
        return None
    return config.kernels.call_s

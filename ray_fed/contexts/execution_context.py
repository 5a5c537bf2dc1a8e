"""`ExecutionContext`: the context that `init` and `create_context` return.

Its `Backend` has the workers, on Ray or on threads of this process.
"""

import collections
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import os
import threading
import time
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar

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
    AwaitChange,
    ComputationChecks,
    StartupProgress,
)
from ray_fed.contexts.slow_ways import SlowPathWarnings
from ray_fed.executors.calling_thread import CallingThread
from ray_fed.executors.loops import LoopThread
from ray_fed.language import blocks, type_checks
from ray_fed.language.structs import Plain
from ray_fed.observability import events, reprs
from ray_fed.observability.report import ReportBuilder, RoundReport
from ray_fed.plan import merge_tree
from ray_fed.plan.plans import Fallback
from ray_fed.rounds.client_cuts import RoundPolicy, RoundRequest
from ray_fed.rounds.execution import ComputationCache, Rounds
from ray_fed.values.client_references import ListCache
from ray_fed.values.components import Components
from ray_fed.values.stored import ArgumentPart

_T = TypeVar("_T")

flf = fl.framework


@dataclasses.dataclass(frozen=True)
class Backend:
    """The workers of a context, and how rounds reach them.

    Attributes:
        runners: Runners of subrounds, see `contexts.runners`. `close` closes them.
        num_workers: Number of workers, or an async function that each round calls for
            it. If `Config.subrounds` sets no number, a round has as many subrounds.
        close: Function that closes the runners, and their pool or threads.
        store: Function that stores a part of an argument, see `RoundPolicy`.
        fetch: Function that reads a stored value, see `RoundPolicy`.
        await_change: Function that says what calls wait for, see `AwaitChange`. It is
            None if workers are threads, which are always ready.
        check: Function that raises ContextStateError if the workers' Ray is gone.
        spreads_subrounds: Whether a runner may use several workers for one subround.
        place: Description of the workers' Ray, or "" without Ray.
        sinks: Event sinks that receive the events of all rounds.
        groups: Backends of the `worker_groups`, by name. `close` closes them, too.
    """

    runners: Sequence[fl.framework.AsyncContext]
    num_workers: int | Callable[[], Awaitable[int]]
    close: Callable[[], None]
    store: Callable[[ArgumentPart], tuple[ArgumentPart, int]] = RoundPolicy.store
    fetch: Callable[[ArgumentPart], Coroutine[Any, Any, Plain]] = RoundPolicy.fetch
    await_change: AwaitChange | None = None
    check: Callable[[], None] = lambda: None
    spreads_subrounds: bool = False
    place: str = ""
    sinks: Sequence[events.EventSink] = ()
    groups: Mapping[str, "Backend"] = dataclasses.field(
        default_factory=dict[str, "Backend"]
    )


@dataclasses.dataclass(frozen=True)
class _Group:
    """One group of workers: `Config.workers`, or one of `Config.worker_groups`.

    `rounds` runs calls on the group. `startup` reports the workers for which these
    calls wait.
    """

    rounds: Rounds
    startup: StartupProgress


class Holders:
    """Counts the users of a context (holders), so that the last holder closes it.

    A `with` statement is a holder until it ends. A thread that calls `init` is a
    holder, too, until its next `with` statement takes this place. Without a `with`
    statement, the thread is a holder until the context is closed. If a `with` statement
    of another thread has the context already, `init` adds no holder. The thread may
    then use the context for as long as the other holders do.

    `reopen` returns a new context for a thread that comes after the last holder has
    left.
    """

    lock = threading.RLock()
    """The lock of all contexts of the process. It is reentrant, because a signal's
    handler may close a context while its thread has the lock."""

    def __init__(self, reopen: Callable[[], "ExecutionContext"] | None = None) -> None:
        self._reopen = reopen
        self._inside = collections.Counter[int]()  # `with` statements by thread
        self._kept = collections.Counter[int]()
        self._arrived = set[int]()  # threads for which `add` made no holder
        self._reopened: dict[int, ExecutionContext] = {}  # by thread

    @classmethod
    def renew_lock(cls) -> None:
        """Replace the lock in a forked process.

        A thread that the fork did not copy may have locked the former lock.
        """
        cls.lock = threading.RLock()

    def add(self) -> None:
        """Make this thread a holder, unless a `with` statement has the context."""
        thread = threading.get_ident()
        if self._inside.total():
            self._arrived.add(thread)
        else:
            self._kept[thread] += 1

    def enter(self, context: "ExecutionContext") -> "ExecutionContext":
        """Begin a `with` statement, and return the context that it uses.

        This is `context`, or a new context if the last holder has closed `context`.
        """
        thread = threading.get_ident()
        with self.lock:
            if thread in self._arrived:
                self._arrived.discard(thread)
                # The others may have left between `init` and `with` of this thread.
                if self._reopen is not None and not context.is_open:
                    reopened = self._reopened[thread] = self._reopen().__enter__()
                    return reopened
            elif self._kept[thread]:
                self._kept[thread] -= 1
            self._inside[thread] += 1
        return context

    def leave(self, context: "ExecutionContext") -> None:
        """End a `with` statement. The last holder to leave closes the context."""
        thread = threading.get_ident()
        with self.lock:
            if thread in self._reopened:
                self._reopened.pop(thread).__exit__()
                return
            self._inside[thread] -= 1
            if self._inside.total() <= 0 and self._kept.total() <= 0:
                context.close()
            elif self._inside[thread] + self._kept[thread] <= 0:
                _uninstall(context)


os.register_at_fork(after_in_child=Holders.renew_lock)


class ExecutionContext(flf.SyncContext):
    """Runs federated computations on workers of Ray, or on threads of this process.

    A computation is compiled once. If possible, it is divided into stages: clients'
    work, an aggregation, and the server's work. Each call is a round. A round runs a
    stage in subrounds, each for some of the clients. Other computations run as a whole,
    with their clients on all workers.

    Results have the Python containers of their type, with NumPy values as elements. Any
    thread may call the context, also a thread that runs an event loop.

    Args:
        config: The settings.
        backend: Backend with the workers, which the context owns.
        sinks: Event sinks that receive the events of all rounds.

    Attributes:
        holders: Counter of the context's users. The last user to leave closes the
            context.
        lists: Cache of lists of clients' values that calls pass again.
        read_limits: Limits on the data that this process reads from arguments.
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
        self._checks = ComputationChecks(in_process=config.backend == "local")
        self._chains = ComputationCache(_to_chain)
        self._main = self._open_group(backend)
        self._groups = {
            name: self._open_group(each) for name, each in backend.groups.items()
        }
        self._group = contextvars.ContextVar("group", default=self._main)
        self.holders = Holders()
        self.lists = ListCache(config.workers.client_bytes)
        self.read_limits = config.driver_limits
        self._pid = os.getpid()
        self._thread: LoopThread | CallingThread | None = (
            CallingThread() if config.debug else LoopThread("ray_fed rounds")
        )

    def _open_group(self, backend: Backend) -> _Group:
        config = self._config
        rounds = Rounds(
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
                vectorized_clients=config.kernels.vectorized_clients,
                has_own_runners=True,
                kept_bytes=config.kept_bytes,
                max_dropped_clients=config.max_dropped_clients,
            ),
        )
        return _Group(
            rounds, StartupProgress(self._sinks.on_event, backend.await_change)
        )

    @property
    def is_open(self) -> bool:
        """Whether the context can be called: not after `close`, or in a forked process.

        It cannot be called after `ray.shutdown`, either, if it uses Ray.
        """
        try:
            self._open_thread()
        except errors.ContextStateError:
            return False
        return True

    @property
    def config(self) -> Config:
        """The settings of the context."""
        return self._config

    @property
    def last_report(self) -> RoundReport | None:
        """Report of the latest call that returned, or None before any has returned."""
        return self._report.last

    @property
    def num_calls(self) -> int:
        """Number of calls so far. The next call's random numbers depend on it."""
        return self._main.rounds.num_calls

    @tracebacks.shorten
    def resume_at(self, num_calls: int) -> None:
        """Set the number of the next call, to continue an interrupted run.

        Args:
            num_calls: The value of `num_calls` when the run saved its state, >= 0.

        Raises:
            CardinalityError: `num_calls` is negative.
            ValueMismatchError: `num_calls` is not an integer.
        """
        self._main.rounds.num_calls = type_checks.check_count(num_calls, "num_calls", 0)

    @contextlib.contextmanager
    def on_workers(self, group: str) -> Generator[None]:
        """Run the calls of a `with` block on the workers of a group.

        A call uses only the workers of one group. So the bits of its result depend on
        the device and the threads of these workers, and not on other groups.

        Args:
            group: A name of `Config.worker_groups`.

        Raises:
            ConfigError: There is no group with this name.
        """
        if group not in self._groups:
            raise errors.ConfigError(
                f"Expected one of the `worker_groups` {sorted(self._groups)}, found"
                f" `{errors.describe(group)}`."
            )
        token = self._group.set(self._groups[group])
        try:
            yield
        finally:
            self._group.reset(token)

    def subscribe(self, sink: events.EventSink) -> None:
        """Call `sink.on_event` for all events of later rounds, on another thread."""
        self._sinks.add(sink)

    def unsubscribe(self, sink: events.EventSink) -> None:
        """Send no more events to a sink that `subscribe` added."""
        self._sinks.remove(sink)

    @override
    @tracebacks.shorten
    def invoke(self, comp: Any, arg: Any = None) -> Any:
        """Run a computation, or a MergeableCompForm, on its argument.

        A value placed at clients is a list with one element for each client. If the
        parameter's type has functions, pass computations for them. The result has the
        Python containers of its type, with NumPy values as elements.

        Raises:
            TypeError: `comp` is no computation, or the argument is not of its type.
            CardinalityError: Parts of the argument have values of different numbers of
                clients.
            UnsupportedError: A graph has Python functions of another process.
            ComputationError: The code of the computation raised an error.
            RetryBudgetError: Workers died more often than `config.retry` allows.
            DeadlineError: Workers hung more often than `config.retry` allows.
            ResourceError: The cluster no longer has room for `workers`, or its nodes
                have GPUs that TensorFlow does not see.
            ContextStateError: The context was closed.
        """
        return self.invoke_at(None, comp, arg)

    def invoke_at(self, number: int | None, comp: Any, arg: Any) -> Any:
        """Run a computation as `invoke` does, with the random numbers of call `number`.

        Args:
            number: Number of the call, which decides its random numbers. `num_calls`
                does not count the call. With None, the call gets the next number.
            comp: The computation or MergeableCompForm.
            arg: The argument of `comp`.
        """
        started = time.monotonic()  # reading an argument may take longer than the call
        thread = self._open_thread()
        comp, argument = read_invocation(comp, arg, self.read_limits, self.lists)
        spec = self._main.rounds.new_call(started=started, number=number)
        result = thread.wait_for(self._invoke(comp, argument, spec, self._group.get()))
        return plain_values.from_plain(result, comp.type_signature.result)

    def start(
        self,
        comp: Any,
        prepare: Callable[[], Awaitable[Plain]],
        deliver: Callable[[Components], None],
        number: int | None = None,
    ) -> concurrent.futures.Future[None]:
        """Start a call whose result is delivered as components, without reading them.

        A component is a tensor or a sequence of the result. On Ray, large components
        stay in the object store, and `fetch` reads one.

        Args:
            comp: Computation whose result has no values placed at clients.
            prepare: Async function that returns the plain argument, which may have
                stored components. It runs on another thread.
            deliver: Function that receives the components of the result, in the order
                of `ray_fed.values.components`. It runs on another thread.
            number: Number of the call, see `invoke_at`.

        Returns:
            A future that is done after `deliver`, or has the error of the call.

        Raises:
            ContextStateError: The context was closed.
        """
        thread = self._open_thread()
        spec = self._main.rounds.new_call(by_component=True, number=number)
        group = self._group.get()

        async def run() -> None:
            argument = await prepare()  # may wait for the result of an earlier call
            begun = dataclasses.replace(spec, started=time.monotonic())
            deliver(await self._invoke(comp, argument, begun, group))

        return thread.submit(run())

    def fetch(self, component: ArgumentPart) -> concurrent.futures.Future[Plain]:
        """Start to read a component that `start` delivered. Return a future of it.

        Raises ContextStateError if the context was closed.
        """
        return self.submit(self._backend.fetch(component))

    def submit(
        self, coroutine: Coroutine[Any, Any, _T]
    ) -> concurrent.futures.Future[_T]:
        """Start a coroutine on the thread that runs the calls of this context.

        Raises ContextStateError if the context was closed.
        """
        return self._open_thread().submit(coroutine)

    def _open_thread(self) -> LoopThread | CallingThread:
        if self._thread is None:
            raise errors.ContextStateError(
                "Expected an open context, found it closed: call ray_fed.init again."
            )
        if self._pid != os.getpid():
            raise errors.ContextStateError(
                "Expected a context of this process, found the context of the process"
                " that this one was forked from, whose threads do not run here: start"
                ' processes by `spawn`, as in multiprocessing.get_context("spawn"), and'
                " call ray_fed.init in each; or fork before you use TensorFlow and Ray."
            )
        self._backend.check()
        return self._thread

    async def _invoke(
        self, comp: Any, arg: Plain, spec: RoundRequest, group: _Group
    ) -> Plain:
        called = comp.up_to_merge if isinstance(comp, MergeableCompForm) else comp
        async with group.startup.telling(called):
            self._checks.check(comp)
            if isinstance(comp, MergeableCompForm):
                chain = MergeableCompChain.of(comp)
            elif isinstance(chain := self._chains.get(comp), Fallback):
                return await group.rounds.run_whole(comp, arg, spec, chain)
            return await group.rounds.run_chain(chain, arg, spec)

    def _facts(self) -> dict[str, Any]:
        counted = self._config.workers.count or self._backend.num_workers
        place = f" ({self._backend.place})" if self._backend.place else ""
        groups = {"groups": ", ".join(self._groups)} if self._groups else {}
        return {
            "backend": self._config.backend + place,
            "workers": counted if isinstance(counted, int | tuple) else "one a CPU",
            **groups,
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
        """Stop the workers, and a Ray that the context started. May be called again."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self.lists.clear()
        if self._pid == os.getpid():  # a forked process has no threads and no workers
            thread.close()
            self._backend.close()
        _uninstall(self)

    def __enter__(self) -> "ExecutionContext":  # noqa: PYI034 (may be another one)
        return self.holders.enter(self)

    def __exit__(self, *error: object) -> None:
        self.holders.leave(self)


def _uninstall(context: ExecutionContext) -> None:
    # If the context is this thread's default, later calls must raise an error.
    if flf.get_context_stack().current is context:
        flf.set_default_context(_ClosedContext())


class _ClosedContext(flf.SyncContext):
    @override
    def invoke(self, comp: Any, arg: Any) -> Any:
        raise errors.ContextStateError(
            "Expected an open context, found it closed: call ray_fed.init again."
        )


def _to_chain(comp: flf.ConcreteComputation) -> MergeableCompChain | Fallback:
    try:
        with blocks.depth_in_words():
            return compile_to_chain(comp)
    except errors.CompileError as error:
        said = str(error).rstrip(".")
        return Fallback(f"a computation without a mergeable form ({said})")


def _call_s(config: Config) -> float | None:
    # None turns kernels off, as debugging steps through one client at a time.
    if config.debug or not config.kernels.enabled:
        return None
    return config.kernels.call_s

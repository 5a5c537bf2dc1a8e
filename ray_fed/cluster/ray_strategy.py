"""Runs federated operations on Ray workers, where all values stay.

    RayFederatingStrategy   divides clients into chunks by index. Each operation is one
                            call to the worker of each chunk.
    RemoteExecutor          runs an executor's four methods on one worker. Results stay
                            on the worker, and the driver has their keys.
    WorkerConnection        has the present worker, and after a loss the next worker.
                            Only this class repeats work.

A leaf is a few neighboring clients whose values are added up one after another. An
aggregation makes one partial result for each leaf. The unplaced executor, which has the
server's values, merges the partials.

A `RemoteValue` knows how it was made: from a plain value, or by a call on other values.
If its worker is lost, the connection gets another worker from its `WorkerSource`, and
the value is made again there. The source counts losses, and raises an error once a
budget of `config.retry` is spent.
"""

import asyncio
import collections
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import federated_language as fl
import ray
import ray.exceptions
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
from ray_fed.cluster import failures, object_store
from ray_fed.cluster.failures import Failure
from ray_fed.cluster.joining import Job
from ray_fed.cluster.worker_actor import NotLoadedError
from ray_fed.executors.fan_out import gather_by_index
from ray_fed.executors.strategy import FederatingStrategy, Placed, PlacedArg
from ray_fed.language import blocks, structs, type_checks
from ray_fed.language.blocks import Function
from ray_fed.language.structs import Plain, Struct
from ray_fed.plan import diagnostics, merge_tree, random_keys
from ray_fed.plan.fingerprint import WorkerDescription
from ray_fed.plan.outcomes import Attempt, Evaluated
from ray_fed.plan.plans import KeySelection
from ray_fed.values import stored
from ray_fed.values.client_references import ClientRun
from ray_fed.values.lru_cache import LruCache
from ray_fed.values.stored import Stored, StoredClients, StoredComponents
from ray_fed.worker.stacks import merge_values

_T = TypeVar("_T")

_DROPPED_TOGETHER = 64
"""Number of unused values after which one call drops them all on the worker."""

_ANSWER_S = 10.0
"""Seconds that a worker may take to say what it runs. A stopped process never does."""

_LATE_S = 1.0
"""Seconds that a call may take to reach a worker."""


class LostWorkerError(errors.ClusterError):
    """The worker died, hung, ran out of memory, or was restarted during work.

    Attributes:
        worker: The lost worker.
        error: Ray's error, a WorkerMemoryError, a TimeoutError if the worker hung, or a
            NotLoadedError if Ray has started another process.
    """

    def __init__(self, worker: "Worker", error: BaseException) -> None:
        super().__init__(f"Expected `{worker.name}` to answer, found it gone.")
        self.worker = worker
        self.error = error

    def count(
        self, lost: list[Attempt], budgets: Mapping[str, int], begun_s: float
    ) -> None:
        """Append this loss to the lost attempts of the work, and check the budgets.

        A NotLoadedError does not count, because the loss of the former process does.

        Args:
            lost: Earlier lost attempts at the same work, to which this appends.
            budgets: Number of failures of each class that the work may have.
            begun_s: Time at which the work asked for its first worker.

        Raises:
            DeadlineError: The work hung too often.
            RetryBudgetError: The work failed too often in another way.
        """
        if isinstance(self.error, NotLoadedError):
            return
        worker, failure = self.worker, self._find_cause()
        lost.append(
            Attempt.on(
                worker.name,
                worker.described,
                attempt=len(lost) + 1,
                started_s=worker.leased_s - begun_s,
                seconds=time.monotonic() - worker.leased_s,
                ended=failure.failure_class,
                detail=failure.detail,
            )
        )
        failures.check_budgets(lost, budgets, failure)

    def _find_cause(self) -> Failure:
        name, error = f"`{self.worker.name}`", self.error
        if isinstance(error, TimeoutError):
            return Failure(
                "hang",
                f"{name} had not finished within the time of its subround"
                " (`subrounds.timeout_s`), and was ended.",
            )
        name = f"{name} on node {self.worker.node}"
        if isinstance(error, errors.WorkerMemoryError):
            about = error.location.client_index, error.cause_text
            return Failure("memory", f"{name}: {error.message}", *about)
        failure = failures.find_cause(error, self.worker.described)
        return Failure(failure.failure_class, f"{name}: {failure.detail}")


class Worker:
    """A worker process that a connection uses until the process is lost.

    Args:
        handle: Ray's handle of the actor.
        scope: Unique name for the values that the actor stores for this connection.
        name: Name of the worker, such as "worker 0".
        described: Description that the worker sent, or None if it is unknown.
        job: Job of Ray that the handle belongs to. Pass None in a task, whose process
            cannot leave its job.
    """

    def __init__(
        self,
        handle: Any,
        scope: str,
        name: str,
        described: WorkerDescription | None = None,
        job: Job | None = None,
    ) -> None:
        self.handle = handle
        self._job = job
        self.scope = scope
        self.name = name
        self.described = described
        self.leased_s = time.monotonic()

    @property
    def node(self) -> str:
        """Address of the worker's machine, or "unknown"."""
        return "unknown" if self.described is None else self.described.address

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of `LeafWorker` with this scope and `args`. Return its result.

        Raises LostWorkerError if the worker was lost, ContextStateError if this process
        has left the worker's Ray, and any error of the method.
        """
        with self.reached():
            return await self._answer(
                getattr(self.handle, method).remote(self.scope, *args)
            )

    def drop(self, keys: list[int]) -> None:
        """Tell the worker to drop values of this scope, without waiting for it."""
        if self._job is not None:
            self._job.check()
        self.handle.drop.remote(self.scope, keys)

    async def _answer(self, reference: Any) -> Any:
        return await (reference if self._job is None else self._job.answer(reference))

    @contextlib.contextmanager
    def reached(self) -> Generator[None]:
        """Raise the errors of `call` in place of Ray's errors in the `with` block."""
        try:
            with contextlib.nullcontext() if self._job is None else self._job.watched():
                yield
        except ray.exceptions.RayError as error:
            # Ray also wraps the loss of a call's argument in a RayTaskError.
            is_task = isinstance(error, ray.exceptions.RayTaskError)
            cause = failures.unwrap(error) if is_task else error
            if isinstance(cause, errors.WorkerMemoryError):
                # The worker's own values may fill the memory, so end its process.
                ray.kill(self.handle, no_restart=False)
            elif not failures.is_loss(cause) and not isinstance(cause, NotLoadedError):
                raise cause from None
            raise LostWorkerError(self, cause) from error

    async def evaluate(self, work: "WorkerWork", num_stored: int = 0) -> Evaluated:
        """Evaluate a whole plan in one call, and return its outcome.

        With `num_stored` = 0, the outcome has encoded values. Otherwise this is the
        number of the plan's values, which stay in the object store as `Stored`.
        """
        if num_stored:
            evaluate = self.handle.evaluate.options(num_returns=1 + num_stored)
            with self.reached():
                head, *references = evaluate.remote(self.scope, *work.for_worker())
                try:
                    answer = [await self._answer(head), *references]
                except BaseException:
                    if self._job is not None:
                        self._job.read_errors([head, *references])
                    raise
        else:
            answer = await self.call("evaluate", *work.for_worker())
        evaluated, noted, described = object_store.unpack_result(answer)
        if self.described and self.described.fingerprint != described.fingerprint:
            another = NotLoadedError("Expected the same process, found another.")
            raise LostWorkerError(self, another)  # Ray restarted it on another machine
        self.described = described
        diagnostics.note(noted)
        return evaluated

    async def in_time(
        self, work: Coroutine[Any, Any, _T], timeout_s: float | None
    ) -> _T:
        """Return the result of work on this worker.

        If the worker runs the work for over `timeout_s`, its process is killed, and
        LostWorkerError is raised. Time in which the work waits for other work on the
        same worker does not count.
        """
        if timeout_s is None:
            return await work
        running, left_s = asyncio.ensure_future(work), timeout_s
        try:
            while not (await asyncio.wait({running}, timeout=left_s))[0]:
                left_s = timeout_s - await self._running_s(timeout_s)
                if left_s <= 0:
                    ray.kill(self.handle, no_restart=False)
                    raise LostWorkerError(self, TimeoutError())
            return running.result()
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running})

    async def _running_s(self, timeout_s: float) -> float:
        # How long the worker has run this work, or `timeout_s` if it does not answer.
        try:
            asked = self._answer(self.handle.running_s.remote())
            scope, seconds = await asyncio.wait_for(asked, _ANSWER_S)
        except TimeoutError:
            return timeout_s
        except ray.exceptions.RayError:
            return 0.0  # the worker died, and the call of the work raises an error
        return seconds + _LATE_S if scope == self.scope else 0.0


class WorkerSource(Protocol):
    """Gives workers to a `WorkerConnection`, and counts their losses."""

    async def lease(self, loss: LostWorkerError | None) -> Worker:
        """Return the next worker, which has no values of this connection yet.

        `loss` is the loss of the former worker, or None for the first worker. Raises
        ClusterError if there is no worker, or if a budget of losses is spent.
        """
        ...

    async def settle(self) -> None:
        """Record that work has succeeded after it lost a worker."""
        ...


class WorkerConnection:
    """Runs work on one worker, and on another worker after a loss.

    Values on the worker have keys, which this object assigns.

    Args:
        source: Source of the workers, which this object does not own.
        timeout_s: Seconds that one piece of work may run, or None for no limit.
    """

    def __init__(self, source: WorkerSource, timeout_s: float | None = None) -> None:
        self._source = source
        self._timeout_s = timeout_s
        self._leased: asyncio.Task[Worker] | None = None
        self._keys = itertools.count()
        self._dropped: collections.deque[int] = collections.deque()

    def new_key(self) -> int:
        """Return an unused key for a value."""
        return next(self._keys)

    def drop(self, key: int) -> None:
        """Free the worker's value under a key. A later call of `run` does this."""
        self._dropped.append(key)

    def close(self) -> None:
        """Stop waiting for a worker. The worker and its values stay as they are."""
        if self._leased is not None:
            self._leased.cancel()

    async def run(self, work: Callable[[Worker], Coroutine[Any, Any, _T]]) -> _T:
        """Run `work(worker)`. After a loss, run it again on the next worker.

        Raises ClusterError if there is no further worker or a budget is spent, and any
        error of `work` that is not a LostWorkerError.
        """
        source = self._source
        if self._leased is None or has_failed(self._leased):
            self._leased = _lease(source, None)
        leased, is_first = self._leased, True
        while True:
            # Other work may wait for the same lease, so a cancelled caller must not
            # cancel it.
            worker = await asyncio.shield(leased)
            try:
                self._send_dropped(worker)
                result = await worker.in_time(work(worker), self._timeout_s)
            except LostWorkerError as loss:
                # Other work may have lost the same worker, and leased the next already.
                if self._leased is leased:
                    self._leased = _lease(source, loss)
                leased, is_first = self._leased, False
            else:
                if not is_first:
                    await source.settle()
                return result

    def _send_dropped(self, worker: Worker) -> None:
        if len(self._dropped) >= _DROPPED_TOGETHER:
            keys = [self._dropped.popleft() for _ in range(len(self._dropped))]
            worker.drop(keys)


def _lease(source: WorkerSource, loss: LostWorkerError | None) -> asyncio.Task[Worker]:
    leased = asyncio.ensure_future(source.lease(loss))
    leased.add_done_callback(has_failed)  # asyncio prints errors that nobody reads
    return leased


def has_failed(task: asyncio.Task[Any]) -> bool:
    """Return whether a task was cancelled or raised an error."""
    return task.done() and (task.cancelled() or task.exception() is not None)


flf = fl.framework
_NAME = "RemoteExecutor"

_SHARED_VALUES = 256
"""Number of functions and stored values that one executor keeps on its worker."""

Make: TypeAlias = Callable[[Worker, int], Coroutine[Any, Any, Any]]
"""Function that makes a value on a worker, and stores it there under a key. It first
makes the other values that it needs."""


class WorkerWork(Protocol):
    """A plan that is packed for workers. `subround.Work` implements this."""

    def for_worker(self) -> list[Any]:
        """Return the arguments of `LeafWorker.evaluate` that follow its scope."""
        ...

    def deal(self, num_workers: int) -> "tuple[Sequence[WorkerWork], int]":
        """Divide the plan among workers, see `subround.Work.deal`."""
        ...


class RemoteValue(flf.ExecutorValue):
    """A value on a worker, which the worker makes when the value is first needed.

    If the worker is lost, the next worker makes the value again.

    Args:
        connection: Connection to the worker.
        key: Key under which the worker stores the value.
        type_signature: Type of the value.
        make: Function that makes the value. Each call must make an equal value.
    """

    def __init__(
        self,
        connection: WorkerConnection,
        key: int,
        type_signature: fl.Type,
        make: Make,
    ) -> None:
        self.connection = connection
        self.key = key
        self._type_signature = type_signature
        self._make = make
        self._made: tuple[Worker, asyncio.Task[Any]] | None = None

    def __del__(self) -> None:
        self.connection.drop(self.key)

    @property
    @override
    def reference(self) -> int:
        return self.key

    @property
    @override
    def type_signature(self) -> fl.Type:
        return self._type_signature

    async def on(self, worker: Worker) -> int:
        """Make the value on `worker` if it is not there yet. Return its key there."""
        if (
            self._made is None
            or self._made[0] is not worker
            or has_failed(self._made[1])
        ):
            making = asyncio.ensure_future(self._make(worker, self.key))
            making.add_done_callback(has_failed)  # asyncio prints errors left unread
            self._made = worker, making
        await asyncio.shield(self._made[1])  # other work may wait for it, too
        return self.key

    async def ready(self) -> Self:
        """Make the value on the connection's worker if needed. Return this object."""
        await self.connection.run(self.on)
        return self

    async def fetch(self, method: str) -> Any:
        """Call a method of `LeafWorker` with this value's key. Return its result."""

        async def call(worker: Worker) -> Any:
            return await worker.call(method, await self.on(worker))

        return await self.connection.run(call)

    @override
    async def compute(self) -> Any:
        """Return the value, with structs of federated_language for named structs."""
        return plain_values.to_structs(
            await self.fetch("compute"), self._type_signature
        )


def _encoded(value: Any) -> Any:
    return value.reference if isinstance(value, Stored) else object_store.encode(value)


class RemoteExecutor(flf.Executor):
    """An executor whose methods run on one worker, where all values stay.

    Args:
        connection: Connection to the worker, which this executor does not own.
        arrays: Names and references of the frozen arrays in the functions, as in
            `plans.Finish`. With None, the executor stores the arrays of this process.
    """

    def __init__(
        self,
        connection: WorkerConnection,
        arrays: tuple[tuple[str, Any], ...] | None = None,
    ) -> None:
        self._connection = connection
        self._arrays = arrays
        self._shared: LruCache[Any, RemoteValue] = LruCache(_SHARED_VALUES)

    @override
    def close(self) -> None:
        self._shared.clear()

    def holds(self, value: flf.ExecutorValue) -> bool:
        """Return whether a value is on the worker of this executor."""
        return isinstance(value, RemoteValue) and value.connection is self._connection

    def derive(self, type_spec: fl.Type, make: Make) -> RemoteValue:
        """Return a new value, which the worker makes by `make` when it is needed."""
        key = self._connection.new_key()
        return RemoteValue(self._connection, key, type_spec, make)

    def embed(self, value: Any, type_spec: fl.Type) -> RemoteValue:
        """Return a value that the worker makes from a plain value when needed."""
        serialized = blocks.serialize_type(type_spec)

        async def make(worker: Worker, key: int) -> None:
            await worker.call("embed", key, value, serialized)

        return self.derive(type_spec, make)

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> RemoteValue:
        type_spec = None if type_spec is None else fl.to_type(type_spec)
        if isinstance(value, RemoteValue):
            return self._own(value)
        block = blocks.to_block(value)
        if block is not None:
            value = Function(blocks.serialize(block))
        if isinstance(value, Function | KeySelection):
            return await self._embed_function(value)
        if type_spec is None:
            raise errors.UnsupportedError(
                f"Expected a type for {structs.show(value)}, found none."
            )
        if isinstance(value, Stored | StoredComponents):
            return await self._share(
                (value, type_spec), lambda: self._embed_stored(value, type_spec)
            )
        value = plain_values.to_plain(value, type_spec)
        return await self.embed(value, type_spec).ready()

    def _embed_stored(
        self, value: Stored | StoredComponents, type_spec: fl.Type
    ) -> RemoteValue:
        # Ray resolves references only at the top level of a call's arguments.
        serialized = blocks.serialize_type(type_spec)
        method, parts = "embed_stored", (value,)
        if isinstance(value, StoredComponents):
            method, parts = "embed_parts", value.components
        encoded = list(map(_encoded, parts))

        async def make(worker: Worker, key: int) -> None:
            await worker.call(method, key, serialized, *encoded)

        return self.derive(type_spec, make)

    async def _embed_function(self, function: Function | KeySelection) -> RemoteValue:
        if isinstance(function, KeySelection):
            type_spec = function.type_signature
            name = b"select" + function.function
        else:
            type_spec = function.building_block().type_signature
            name = function.computation

        arrays = self._arrays
        if arrays is None:
            arrays = object_store.store_arrays(name)

        def derive() -> RemoteValue:
            async def make(worker: Worker, key: int) -> None:
                await worker.call("embed", key, function, None, arrays)

            return self.derive(type_spec, make)

        if isinstance(function, Function) and function.captured:
            return await derive().ready()
        return await self._share(name, derive)

    async def _share(self, name: Any, build: Callable[[], RemoteValue]) -> RemoteValue:
        return await self._shared.get(name, build).ready()

    def evaluate(self, work: WorkerWork) -> Coroutine[Any, Any, Evaluated]:
        """Evaluate a plan on the worker, see `Worker.evaluate`."""
        return self._connection.run(lambda worker: worker.evaluate(work))

    def _own(self, value: object) -> RemoteValue:
        remote = type_checks.narrow(value, RemoteValue, _NAME)
        if not self.holds(remote):
            raise errors.ValueMismatchError(
                "Expected a value on this executor's worker, found a value on another"
                " worker: compute the value there, and embed the result here."
            )
        return remote

    @override
    async def create_call(
        self, comp: flf.ExecutorValue, arg: flf.ExecutorValue | None = None
    ) -> RemoteValue:
        function = self._own(comp)
        argument = None if arg is None else self._own(arg)
        type_spec = type_checks.check_call(function, argument)
        draw = random_keys.current_or_random()

        async def make(worker: Worker, key: int) -> None:
            argument_key = None if argument is None else await argument.on(worker)
            keys = (key, await function.on(worker), argument_key)
            diagnostics.note(await worker.call("invoke", *keys, draw))

        return await self.derive(type_spec.result, make).ready()

    @override
    async def create_struct(self, elements: Any) -> RemoteValue:
        members = [
            (name, self._own(member))
            for name, member in structs.iter_elements(structs.to_struct(elements))
        ]

        async def make(worker: Worker, key: int) -> None:
            keys = [(name, await member.on(worker)) for name, member in members]
            await worker.call("combine", key, keys)

        type_spec = fl.StructType((name, m.type_signature) for name, m in members)
        return await self.derive(type_spec, make).ready()

    @override
    async def create_selection(
        self, source: Any, index: int | None = None, name: str | None = None
    ) -> RemoteValue:
        struct = self._own(source)
        position = type_checks.select_index(struct.type_signature, index, name)

        async def make(worker: Worker, key: int) -> None:
            await worker.call("select", key, await struct.on(worker), position)

        type_spec = type_checks.struct_type(struct.type_signature)[position]
        return await self.derive(type_spec, make).ready()


class RayPlaced:
    """The values of all clients: for each chunk of clients, in order, a remote value.

    `member` is the type of one client's value.
    """

    def __init__(self, member: fl.Type, chunks: list[RemoteValue]) -> None:
        self.member = member
        self.chunks = chunks

    async def compute(self) -> list[Plain]:
        """Return the clients' plain values in client order."""
        fetched = await gather_by_index(
            chunk.fetch("fetch_chunk") for chunk in self.chunks
        )
        return [member for chunk in fetched for member in chunk]


class RayFederatingStrategy(FederatingStrategy):
    """Runs federated operations on workers, each for one chunk of neighboring clients.

    The strategy owns none of its executors.

    Args:
        unplaced: Executor that merges partial results.
        workers: Executors of the workers. A worker gets at most one chunk.
        num_clients: Number of clients of the cohort.
        clients_per_leaf: Number of clients of a leaf, see `merge_tree.cut_leaves`.
    """

    def __init__(
        self,
        unplaced: flf.Executor,
        workers: Sequence[RemoteExecutor],
        num_clients: int,
        clients_per_leaf: int | None = None,
    ) -> None:
        self._unplaced = unplaced
        self.num_clients = num_clients
        leaves = merge_tree.cut_leaves(num_clients, clients_per_leaf)
        runs = merge_tree.cut_runs(len(leaves), len(workers))
        self._workers = list(workers[: len(runs)])
        self._leaves = [[leaves[index] for index in run] for run in runs]
        self._chunks = [range(cut[0].start, cut[-1].stop) for cut in self._leaves]

    @override
    async def place(self, value: Any, type_spec: fl.FederatedType) -> Any:
        if type_spec.placement == fl.SERVER:
            return value
        member = type_spec.member
        if type_spec.all_equal:
            label = "a value equal at all clients"
            embedded = await self._embed_everywhere(value, member, label)
            everywhere = zip(self._workers, embedded, self._chunks, strict=True)
            return RayPlaced(member, [_repeat(w, v, len(c)) for w, v, c in everywhere])
        stored.check_cardinality(value, type_spec, self.num_clients)
        members = plain_values.to_plain(value, type_spec, "a value placed at clients")
        chunks = [
            _place_members(worker, members, chunk, member)
            for worker, chunk in zip(self._workers, self._chunks, strict=True)
        ]
        return RayPlaced(member, chunks)

    async def _embed_everywhere(
        self, value: Any, type_spec: fl.Type, label: str
    ) -> list[RemoteValue]:
        # If any worker lacks the value, it is read once and stored once for all.
        embedded = value if isinstance(value, RemoteValue) else None
        if embedded is not None and all(w.holds(embedded) for w in self._workers):
            return [embedded for _ in self._workers]
        shared = value
        if isinstance(value, flf.ExecutorValue):
            shared = await value.compute()
        shared, _ = object_store.store(plain_values.to_plain(shared, type_spec, label))

        async def embed_on(worker: RemoteExecutor) -> RemoteValue:
            if embedded is not None and worker.holds(embedded):
                return embedded
            if isinstance(shared, Stored):
                return await worker.create_value(shared, type_spec)
            return worker.embed(shared, type_spec)

        return await gather_by_index(embed_on(worker) for worker in self._workers)

    async def _on_each_chunk(
        self, work: Callable[[RemoteExecutor, int], Coroutine[Any, Any, Any]]
    ) -> list[Any]:
        return await gather_by_index(
            work(worker, index) for index, worker in enumerate(self._workers)
        )

    @override
    async def map(
        self, function: Function | None, arg: PlacedArg | None, member: fl.Type
    ) -> Placed:
        draw = random_keys.current_or_random()

        async def map_chunk(worker: RemoteExecutor, index: int) -> RemoteValue:
            embedded = None if function is None else await worker.create_value(function)
            argument = None if arg is None else _chunk(arg, index)

            async def make(on: Worker, key: int) -> None:
                function_key = None if embedded is None else await embedded.on(on)
                argument_keys = None if arg is None else await _keys(argument, on)
                keys = (key, function_key, argument_keys)
                called = on.call("map", *keys, self._chunks[index], draw)
                diagnostics.note(await called)

            return await worker.derive(member, make).ready()

        return RayPlaced(member, await self._on_each_chunk(map_chunk))

    @override
    async def reduce(
        self,
        arg: Placed,
        zero: flf.ExecutorValue,
        accumulate: Function,
        merge: Function,
    ) -> flf.ExecutorValue:
        placed = type_checks.narrow(arg, RayPlaced, "RayFederatingStrategy")
        zeros = await self._embed_everywhere(zero, zero.type_signature, "zero")
        draw = random_keys.current_or_random()

        async def reduce_chunk(worker: RemoteExecutor, index: int) -> list[RemoteValue]:
            function = await worker.create_value(accumulate)
            sources = (placed.chunks[index], zeros[index], function)
            leaves = _reduce_leaves(worker, sources, self._leaves[index], draw)
            return await gather_by_index(leaf.ready() for leaf in leaves)

        reduced = await self._on_each_chunk(reduce_chunk)
        partials = [partial for chunk in reduced for partial in chunk]
        function = await self._unplaced.create_value(merge)
        merged = await gather_by_index(self._to_unplaced(p) for p in partials)
        nodes = [(index, index + 1) for index in range(len(merged))]
        return await merge_values(self._unplaced, function, merged, nodes)

    async def evaluate(self, subround: WorkerWork) -> Evaluated:
        """Evaluate a packed subround on all workers, and return the joined outcome.

        Each worker evaluates neighboring chunks in one call. The values of the outcome
        are encoded and in client order.
        """
        parts, num_kept = subround.deal(len(self._workers))
        if len(parts) == 1:
            return await self._workers[0].evaluate(parts[0])
        evaluated = await gather_by_index(
            worker.evaluate(part)
            for worker, part in zip(self._workers, parts, strict=False)
        )
        return _join(evaluated, num_kept)

    async def _to_unplaced(self, partial: RemoteValue) -> flf.ExecutorValue:
        if isinstance(self._unplaced, RemoteExecutor) and self._unplaced.holds(partial):
            return partial
        computed = await partial.compute()
        return await self._unplaced.create_value(computed, partial.type_signature)

    @override
    def close(self) -> None:
        self._workers.clear()


def _join(parts: Sequence[Evaluated], num_kept: int) -> Evaluated:
    """Join the outcomes of a subround's parts, which are in client order.

    The encoded values of a part are one value for each leaf or subtree, and then
    `num_kept` lists. A list has the values that the part's clients keep for later.
    """
    others = [v for part in parts for v in part.values[: len(part.values) - num_kept]]
    kept = [
        [member for values in column for member in object_store.decode(values)]
        for column in zip(
            *(part.values[len(part.values) - num_kept :] for part in parts), strict=True
        )
    ]
    return Evaluated(
        [*others, *map(object_store.encode, kept)],
        sum(part.kernel_leaves for part in parts),
        next((part.no_kernel for part in parts if part.no_kernel is not None), None),
        sum(part.busy_s for part in parts),
    )


def _place_members(
    worker: RemoteExecutor, members: Any, chunk: range, member: fl.Type
) -> RemoteValue:
    serialized = blocks.serialize_type(member)
    part = members[chunk.start : chunk.stop]
    bounds = None
    if isinstance(part, ClientRun):
        part, _ = object_store.store(part)
    if isinstance(part, StoredClients):
        bounds = (part.start, part.stop)
        part = part.reference

    draw = random_keys.current()

    async def make(on: Worker, key: int) -> None:
        await on.call("place", key, part, bounds, serialized, chunk.start, draw)

    return worker.derive(member, make)


def _repeat(worker: RemoteExecutor, source: RemoteValue, count: int) -> RemoteValue:
    async def make(on: Worker, key: int) -> None:
        await on.call("repeat", key, await source.on(on), count)

    return worker.derive(source.type_signature, make)


def _reduce_leaves(
    worker: RemoteExecutor,
    sources: tuple[RemoteValue, RemoteValue, RemoteValue],
    leaves: list[range],
    draw: random_keys.DrawKey,
) -> list[RemoteValue]:
    """Return the partial result of each leaf of a chunk. One call makes them all.

    `sources` are the chunk, the initial value of an accumulator, and the function that
    adds a client's value to an accumulator. `leaves` are ranges of client indices.
    """
    result = type_checks.function_type(sources[2].type_signature).result

    keys: list[int] = []

    async def make_all(on: Worker, _: int) -> None:
        source_keys = [await source.on(on) for source in sources]
        diagnostics.note(await on.call("reduce", keys, source_keys, leaves, draw))

    whole = worker.derive(result, make_all)

    async def make(on: Worker, _: int) -> None:
        await whole.on(on)

    partials = [worker.derive(result, make) for _ in leaves]
    keys += [partial.key for partial in partials]
    return partials


def _chunk(arg: PlacedArg, index: int) -> Any:
    """Return one chunk of an argument. A struct becomes (name, chunk) pairs."""
    if isinstance(arg, Struct):
        return [
            (name, _chunk(element, index))
            for name, element in structs.iter_elements(arg)
        ]
    return type_checks.narrow(arg, RayPlaced, "RayFederatingStrategy").chunks[index]


async def _keys(argument: Any, on: Worker) -> Any:
    if isinstance(argument, RemoteValue):
        return await argument.on(on)
    return [(name, await _keys(element, on)) for name, element in argument]

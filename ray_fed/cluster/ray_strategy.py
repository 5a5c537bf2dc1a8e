"""The documented strategy and executor over workers: values stay on them.

    RayFederatingStrategy   clients, cut into chunks by index: one call a chunk and verb
    RemoteExecutor          the four verbs over one worker: only names come back
    WorkerConnection        the worker of now, and the next one after a loss

What is equal for all clients is put once, and embedded on each worker once. A partial
comes back for each leaf and is merged by the unplaced executor; where that is the same
worker, it never leaves it.

A value knows how it was made: from a plain value, or by a call on other values. So it
is made again on another worker where its own is lost and the source of workers has one
to give. Inside of a subround it has none: Ray repeats the subround.
"""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import federated_language as fl
import ray.exceptions
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
from ray_fed.cluster import failures, object_store
from ray_fed.cluster.joining import Job
from ray_fed.executors.loops import gather_by_index
from ray_fed.executors.strategy import FederatingStrategy, Placed, PlacedArg
from ray_fed.language import blocks, structs, type_checks
from ray_fed.language.blocks import Function
from ray_fed.language.structs import Plain, Struct
from ray_fed.plan import diagnostics, merge_tree, random_keys
from ray_fed.plan.fingerprint import WorkerDescription
from ray_fed.plan.outcomes import Evaluated
from ray_fed.plan.plans import KeySelection
from ray_fed.values import stored
from ray_fed.values.client_references import ClientRun
from ray_fed.values.lru_cache import LruCache
from ray_fed.values.stored import Stored, StoredClients, StoredComponents
from ray_fed.worker.stacks import merge_values

_T = TypeVar("_T")

_DROPPED_TOGETHER = 64
"""Values that nobody refers to any more are dropped so many at once."""


class LostWorkerError(errors.ClusterError):
    """A worker is gone, and what it did.

    Attributes:
        worker: that is gone.
        error: what Ray said.
    """

    def __init__(self, worker: "Worker", error: BaseException) -> None:
        super().__init__(f"Expected `{worker.name}` to answer, found it gone.")
        self.worker = worker
        self.error = error

    def find_cause(self) -> failures.Failure:
        """Return why, as far as the cluster knows, which is asked."""
        failure = failures.find_cause(self.error, self.worker.described)
        detail = f"`{self.worker.name}` on node {self.worker.node}: {failure.detail}"
        return dataclasses.replace(failure, detail=detail)


class Worker:
    """One process that serves a connection, until it is lost.

    Args:
        handle: of the actor.
        scope: names the values of this use on the actor; unique.
        name: of the worker.
        described: what it said of itself.
        job: that the handle is of, in a process that may leave it; None: in a task.

    Attributes:
        found_no_memory: whether work of this use did not find the memory that it needs.
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
        self.found_no_memory = False

    @property
    def node(self) -> str:
        """The address of its machine."""
        return "unknown" if self.described is None else self.described.address

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the actor, in this scope, and return its result.

        Raises:
            LostWorkerError: the worker is gone.
            ContextStateError: this process has left the Ray that it is on.
            Exception: what the method raised.
        """
        with self.reached():
            return await self._answer(
                getattr(self.handle, method).remote(self.scope, *args)
            )

    def drop(self, keys: list[int]) -> None:
        """Drop values of this scope, some time later.

        Raises:
            ContextStateError: this process has left the Ray that it is on.
        """
        if self._job is not None:
            self._job.check()
        self.handle.drop.remote(self.scope, keys)

    async def _answer(self, reference: Any) -> Any:
        return await (reference if self._job is None else self._job.answer(reference))

    @contextlib.contextmanager
    def reached(self) -> Generator[None]:
        """Raise what an answer, or what the worker holds, raised inside: see `call`."""
        try:
            with contextlib.nullcontext() if self._job is None else self._job.watched():
                yield
        except ray.exceptions.RayError as error:
            # The argument of a call may have been lost, not the worker.
            is_task = isinstance(error, ray.exceptions.RayTaskError)
            cause = failures.unwrap(error) if is_task else error
            if failures.is_loss(cause):
                raise LostWorkerError(self, cause) from error
            self.found_no_memory = isinstance(cause, errors.WorkerMemoryError)
            raise cause from None

    async def evaluate(self, work: "WorkerWork", num_stored: int = 0) -> Evaluated:
        """Evaluate all of a plan in one call; values are encoded.

        The call ends between clients where nobody waits for it.

        Args:
            work: the plan.
            num_stored: how many values are left in the object store, `Stored`; 0: none.
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
        evaluated, noted, self.described = object_store.unpack_result(answer)
        diagnostics.note(noted)
        return evaluated


class WorkerSource(Protocol):
    """Where a connection has its workers from."""

    async def lease(self, loss: LostWorkerError | None) -> Worker:
        """Return a worker whose scope is open and empty.

        Args:
            loss: of the worker before; None for the first.

        Raises:
            ClusterError: there is none, or no more.
        """
        ...

    async def settle(self) -> None:
        """Take note that work which lost a worker has ended well on another."""
        ...


class WorkerConnection:
    """Runs work on one worker, and names the values that are made there.

    Args:
        source: of the worker, and of the next one; not owned. Or the only worker.
    """

    def __init__(self, source: WorkerSource | Worker) -> None:
        self._source = source
        self._leased: asyncio.Task[Worker] | None = None
        self._keys = itertools.count()
        self._dropped: collections.deque[int] = collections.deque()

    def new_key(self) -> int:
        """Return a name for a value that no worker of this connection has yet."""
        return next(self._keys)

    def drop(self, key: int) -> None:
        """Let a value go, some time after all work that was begun before."""
        self._dropped.append(key)

    def run(
        self, work: Callable[[Worker], Coroutine[Any, Any, _T]]
    ) -> Coroutine[Any, Any, _T]:
        """Run work on the worker; again, on the next one, if that one is lost.

        Raises:
            ClusterError: the source had no other worker to give.
            Exception: what the work raised.
        """
        source = self._source
        if not isinstance(source, Worker):
            return self._run_leased(source, work)
        self._send_dropped(source)
        return work(source)

    async def _run_leased(
        self, source: WorkerSource, work: Callable[[Worker], Coroutine[Any, Any, _T]]
    ) -> _T:
        if self._leased is None or has_failed(self._leased):
            self._leased = _lease(source, None)
        leased, is_first = self._leased, True
        while True:
            worker = await asyncio.shield(leased)
            try:
                self._send_dropped(worker)
                result = await work(worker)
            except LostWorkerError as loss:
                if self._leased is leased:  # all work that lost it shares the next one
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
    """Return whether a task ended without a result, so that it may be tried again."""
    return task.done() and (task.cancelled() or task.exception() is not None)


flf = fl.framework
_NAME = "RemoteExecutor"

_SHARED_VALUES = 256
"""Functions and stored values that one executor keeps embedded."""

Make: TypeAlias = Callable[[Worker, int], Coroutine[Any, Any, Any]]
"""Makes a value on a worker, under a key; needs what it is made of there first."""


class WorkerWork(Protocol):
    """A plan, packed for workers: `subround.Work`."""

    def for_worker(self) -> list[Any]:
        """Return what `LeafWorker.evaluate` takes for it."""
        ...

    def deal(self, num_workers: int) -> "tuple[Sequence[WorkerWork], int]":
        """Return its parts for several workers; see `subround.Work.deal`."""
        ...


class RemoteValue(flf.ExecutorValue):
    """A value on the worker of a connection, made when it is first needed there.

    Args:
        connection: whose worker it is on.
        key: of the value there.
        type_signature: of the value.
        make: how to make it; the same each time.
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
        """Return the key, once the value is on a worker of the connection."""
        if (
            self._made is None
            or self._made[0] is not worker
            or has_failed(self._made[1])
        ):
            making = asyncio.ensure_future(self._make(worker, self.key))
            making.add_done_callback(has_failed)  # or asyncio prints what nobody reads
            self._made = worker, making
        await asyncio.shield(self._made[1])
        return self.key

    async def ready(self) -> Self:
        """Return the value, once it is on the worker of now."""
        await self.connection.run(self.on)
        return self

    async def fetch(self, method: str) -> Any:
        """Return what a method of the worker says of the value."""

        async def call(worker: Worker) -> Any:
            return await worker.call(method, await self.on(worker))

        return await self.connection.run(call)

    @override
    async def compute(self) -> Any:
        """Return the value as any executor does: structures with their names."""
        return plain_values.to_structs(
            await self.fetch("compute"), self._type_signature
        )


def _encoded(value: Any) -> Any:
    return value.reference if isinstance(value, Stored) else object_store.encode(value)


class RemoteExecutor(flf.Executor):
    """Delegates every verb to the leaf stack of one worker.

    Args:
        connection: to the worker; not owned.
    """

    def __init__(self, connection: WorkerConnection) -> None:
        self._connection = connection
        self._shared: LruCache[Any, RemoteValue] = LruCache(_SHARED_VALUES)

    @override
    def close(self) -> None:
        self._shared.clear()

    def holds(self, value: flf.ExecutorValue) -> bool:
        """Return whether a value lives where this executor's do."""
        return isinstance(value, RemoteValue) and value.connection is self._connection

    def derive(self, type_spec: fl.Type, make: Make) -> RemoteValue:
        """Return a value that is made when it is first needed."""
        key = self._connection.new_key()
        return RemoteValue(self._connection, key, type_spec, make)

    def embed(self, value: Any, type_spec: fl.Type) -> RemoteValue:
        """Return a plain value, embedded when needed."""
        serialised = blocks.serialise_type(type_spec)

        async def make(worker: Worker, key: int) -> None:
            await worker.call("embed", key, value, serialised)

        return self.derive(type_spec, make)

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> RemoteValue:
        type_spec = None if type_spec is None else fl.to_type(type_spec)
        if isinstance(value, RemoteValue):
            return self._own(value)
        block = blocks.to_block(value)
        if block is not None:
            value = Function(blocks.serialise(block))
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
        # References at the top level of a call: Ray brings them to the worker itself.
        serialised = blocks.serialise_type(type_spec)
        method, parts = "embed_stored", (value,)
        if isinstance(value, StoredComponents):
            method, parts = "embed_parts", value.components
        encoded = list(map(_encoded, parts))

        async def make(worker: Worker, key: int) -> None:
            await worker.call(method, key, serialised, *encoded)

        return self.derive(type_spec, make)

    async def _embed_function(self, function: Function | KeySelection) -> RemoteValue:
        if isinstance(function, KeySelection):
            type_spec = function.type_signature
            name = b"select" + function.function
        else:
            type_spec = function.building_block().type_signature
            name = function.computation

        def derive() -> RemoteValue:
            async def make(worker: Worker, key: int) -> None:
                await worker.call("embed", key, function, None)

            return self.derive(type_spec, make)

        if isinstance(function, Function) and function.captured:
            return await derive().ready()
        return await self._share(name, derive)

    async def _share(self, name: Any, build: Callable[[], RemoteValue]) -> RemoteValue:
        """Return the value that is shared under a name; build it if there is none."""
        return await self._shared.get(name, build).ready()

    def evaluate(self, work: WorkerWork) -> Coroutine[Any, Any, Evaluated]:
        """Have the worker evaluate a plan: see `Worker.evaluate`."""
        return self._connection.run(lambda worker: worker.evaluate(work))

    def _own(self, value: object) -> RemoteValue:
        remote = type_checks.narrow(value, RemoteValue, _NAME)
        if not self.holds(remote):
            raise errors.ValueMismatchError(
                "Expected a value on this executor's worker, found one on another:"
                " compute it and embed what it is."
            )
        return remote

    @override
    async def create_call(
        self, comp: flf.ExecutorValue, arg: flf.ExecutorValue | None = None
    ) -> RemoteValue:
        function = self._own(comp)
        argument = None if arg is None else self._own(arg)
        type_spec = function.type_signature
        if not isinstance(type_spec, fl.FunctionType):
            raise errors.ValueMismatchError(
                f"Expected a function to call, found a value of type `{type_spec}`."
            )
        type_checks.check_argument(type_spec, argument)
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
    """Values of clients on actors: one name for each chunk, in client order."""

    def __init__(self, member: fl.Type, chunks: list[RemoteValue]) -> None:
        self.member = member
        self.chunks = chunks

    async def compute(self) -> list[Plain]:
        """Return the clients' values in client order, plain."""
        fetched = await gather_by_index(
            chunk.fetch("fetch_chunk") for chunk in self.chunks
        )
        return [member for chunk in fetched for member in chunk]


class RayFederatingStrategy(FederatingStrategy):
    """Runs contiguous chunks of clients on workers.

    Args:
        unplaced: where partials are merged; not owned.
        workers: one a chunk, at most; not owned.
        num_clients: size of the cohort.
        clients_per_leaf: see `merge_tree.cut_leaves`.
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
        """Return a value on each worker; read once, put once, if some lack it."""
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
        """Have workers evaluate a packed subround: some of its chunks each, at once.

        Each runs its chunks by the kernel of the subround, and interprets in its own
        process what that cannot do. Values are encoded.
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
    """Return what a subround came to from what parts of it did, in order.

    Args:
        parts: values encoded: those of leaves or subtrees, then those that are kept.
        num_kept: how many of these there are, each with a value for each client.
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
    serialised = blocks.serialise_type(member)
    part = members[chunk.start : chunk.stop]
    bounds = None
    if isinstance(part, ClientRun):
        part, _ = object_store.store(part)
    if isinstance(part, StoredClients):
        bounds = (part.start, part.stop)
        part = part.reference

    draw = random_keys.current()

    async def make(on: Worker, key: int) -> None:
        await on.call("place", key, part, bounds, serialised, chunk.start, draw)

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
    """Return the partials of a chunk's leaves; one call makes them all.

    Args:
        worker: that the chunk is on.
        sources: the chunk, zero, and the accumulate function.
        leaves: of the chunk, by index in the cohort.
        draw: what the accumulation draws from.
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
    """Return one chunk of an argument: a value, or (name, chunk) pairs."""
    if isinstance(arg, Struct):
        return [
            (name, _chunk(element, index))
            for name, element in structs.iter_elements(arg)
        ]
    return type_checks.narrow(arg, RayPlaced, "RayFederatingStrategy").chunks[index]


async def _keys(argument: Any, on: Worker) -> Any:
    """Return the keys of what `_chunk` returned, in its place."""
    if isinstance(argument, RemoteValue):
        return await argument.on(on)
    return [(name, await _keys(element, on)) for name, element in argument]

"""Clients on actors: contiguous chunks by index, values stay where they are.

One call a chunk and intrinsic carries all clients of the chunk. What is equal for all
clients is put once and embedded on each actor once. A partial comes back for each leaf
and is merged by the unplaced executor; where that is the same actor, it never leaves
it. A chunk that is lost with its actor is made again on the next one, from its own
history: what was placed, the functions that were mapped, the numbers that they drew.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import federated_language as fl
from typing_extensions import override

import ray_fed.values.plain_values as plain_values
from ray_fed.cluster.store import object_store
from ray_fed.cluster.task.connection import Worker
from ray_fed.cluster.task.remote_executor import RemoteExecutor, RemoteValue
from ray_fed.cluster.task.work import Work
from ray_fed.executors.loops import gather_by_index
from ray_fed.executors.strategy import FederatingStrategy, Placed, PlacedArg
from ray_fed.language import blocks, structs, type_checks
from ray_fed.language.blocks import Function
from ray_fed.language.structs import Plain, Struct
from ray_fed.plan import diagnostics, merge_tree, random_keys
from ray_fed.plan.outcomes import Evaluated
from ray_fed.values import stored
from ray_fed.values.client_references import ClientRun
from ray_fed.values.stored import Stored, StoredClients
from ray_fed.worker.merging import merge_values

flf = fl.framework


class RayPlaced:
    """Values of clients on actors: one name for each chunk, in client order."""

    def __init__(self, member: fl.Type, chunks: list[RemoteValue]) -> None:
        self._member = member
        self.chunks = chunks

    @property
    def member(self) -> fl.Type:
        """The type of one client's value."""
        return self._member

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
    async def place(self, value: Any, type_spec: fl.FederatedType) -> Placed:
        member = type_spec.member
        if type_spec.all_equal:
            return RayPlaced(member, await self._place_all_equal(value, member))
        stored.check_cardinality(value, type_spec, self.num_clients)
        members = plain_values.to_plain(value, type_spec, "a value placed at clients")
        chunks = [
            _place_members(worker, members, chunk, member)
            for worker, chunk in zip(self._workers, self._chunks, strict=True)
        ]
        return RayPlaced(member, chunks)

    async def _place_all_equal(self, value: Any, member: fl.Type) -> list[RemoteValue]:
        embedded = await self._embed_everywhere(
            value, member, "a value equal at all clients"
        )
        return [
            _repeat(worker, source, len(chunk))
            for worker, source, chunk in zip(
                self._workers, embedded, self._chunks, strict=True
            )
        ]

    async def _embed_everywhere(
        self, value: Any, type_spec: fl.Type, label: str
    ) -> list[RemoteValue]:
        """Return a value on each worker; read once, put once, if some lack it."""
        embedded = value if isinstance(value, RemoteValue) else None
        if embedded is not None and all(w.holds(embedded) for w in self._workers):
            return [embedded for _ in self._workers]
        found = value
        if isinstance(value, flf.ExecutorValue):
            found = await value.compute()
        found, _ = object_store.store(plain_values.to_plain(found, type_spec, label))

        async def embed_on(worker: RemoteExecutor) -> RemoteValue:
            if embedded is not None and worker.holds(embedded):
                return embedded
            if isinstance(found, Stored):
                return await worker.create_value(found, type_spec)
            return worker.embed(found, type_spec)

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
        draw = random_keys.pinned()

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
        draw = random_keys.pinned()

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

    @override
    async def fold(self, subround: Work, arg: Plain = None) -> Evaluated:
        """Have workers evaluate a packed subround: some of its chunks each, at once.

        A worker interprets what no graph can do in its own process, so that there
        always is a result.
        """
        del arg  # packed, too
        parts, num_kept = subround.deal(len(self._workers))
        evaluated = await gather_by_index(
            worker.evaluate(part)
            for worker, part in zip(self._workers, parts, strict=False)
        )
        return evaluated[0] if len(parts) == 1 else _join(evaluated, num_kept)

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
        found = [await source.on(on) for source in sources]
        diagnostics.note(await on.call("reduce", keys, found, leaves, draw))

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

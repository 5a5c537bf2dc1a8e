"""Clients on actors: contiguous chunks by index, values stay where they are.

One call a chunk and intrinsic carries all clients of the chunk. What is equal for all
clients is put on each actor once. A partial comes back for each leaf and is merged by
the unplaced executor; where that is the same actor, it never leaves it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import federated_language as fl
from typing_extensions import override

import ray_fed.blocks as blocks
import ray_fed.draws as draws
import ray_fed.plain as plain
import ray_fed.plan as plan
import ray_fed.values as values
from ray_fed.blocks import Function
from ray_fed.cluster.remote_executor import RemoteExecutor, RemoteValue
from ray_fed.executors.evaluation import merge_values
from ray_fed.executors.fanout import gather_by_index
from ray_fed.executors.strategy import FederatingStrategy, Placed, PlacedArg
from ray_fed.values import Plain, StoredClients, Struct

flf = fl.framework


class RayPlaced:
    """Values of clients on actors: a key for each chunk, made when first needed."""

    def __init__(
        self,
        member: fl.Type,
        make: Callable[[], Coroutine[Any, Any, list[RemoteValue]]],
    ) -> None:
        self._member = member
        self._make = make
        self._chunks: asyncio.Task[list[RemoteValue]] | None = None

    @property
    def member(self) -> fl.Type:
        """The type of one client's value."""
        return self._member

    async def chunks(self) -> list[RemoteValue]:
        """Return the chunks, in client order."""
        if self._chunks is None:
            self._chunks = asyncio.ensure_future(self._make())
        return await asyncio.shield(self._chunks)

    async def compute(self) -> list[Plain]:
        """Return the clients' values in client order, plain."""
        chunks = await self.chunks()
        fetched = await gather_by_index(
            chunk.connection.call("fetch_chunk", chunk.key) for chunk in chunks
        )
        return [member for chunk in fetched for member in chunk]


class RayFederatingStrategy(FederatingStrategy):
    """Runs contiguous chunks of clients on workers.

    Args:
        unplaced: where partials are merged; not owned.
        workers: one a chunk, at most; not owned.
        num_clients: size of the cohort.
        clients_per_leaf: see `plan.leaf_size`.
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
        leaves = plan.cut_leaves(num_clients, clients_per_leaf)
        runs = plan.cut_runs(len(leaves), len(workers))
        self._workers = list(workers[: len(runs)])
        self._leaves = [[leaves[index] for index in run] for run in runs]
        self._chunks = [range(cut[0].start, cut[-1].stop) for cut in self._leaves]

    @override
    async def place(self, value: Any, type_spec: fl.FederatedType) -> Placed:
        member = type_spec.member
        if type_spec.all_equal:
            return RayPlaced(member, lambda: self._place_all_equal(value, member))
        values.check_cardinality(value, type_spec, self.num_clients)
        members = plain.to_plain(value, type_spec, "a value placed at clients")
        return RayPlaced(member, lambda: self._place_members(members, member))

    async def _place_all_equal(self, value: Any, member: fl.Type) -> list[RemoteValue]:
        async def place(worker: RemoteExecutor, chunk: range) -> RemoteValue:
            embedded = value
            if isinstance(value, flf.ExecutorValue) and not _lives_on(value, worker):
                embedded = await value.compute()
            embedded = await worker.create_value(embedded, member)
            key = worker.connection.new_key()
            await worker.connection.call("repeat", key, embedded.key, len(chunk))
            return RemoteValue(worker.connection, key, member)

        return await self._on_each_chunk(place)

    async def _place_members(self, members: Any, member: fl.Type) -> list[RemoteValue]:
        serialised = blocks.serialise_type(member)

        async def place(worker: RemoteExecutor, chunk: range) -> RemoteValue:
            key = worker.connection.new_key()
            part = members[chunk.start : chunk.stop]
            bounds = None
            if isinstance(part, StoredClients):
                bounds = (part.start, part.stop)
                part = part.reference
            await worker.connection.call("place", key, part, bounds, serialised)
            return RemoteValue(worker.connection, key, member)

        return await self._on_each_chunk(place)

    async def _on_each_chunk(
        self, work: Callable[[RemoteExecutor, range], Coroutine[Any, Any, Any]]
    ) -> list[Any]:
        return await gather_by_index(
            work(worker, chunk)
            for worker, chunk in zip(self._workers, self._chunks, strict=True)
        )

    @override
    async def map(
        self, function: Function | None, arg: PlacedArg | None, member: fl.Type
    ) -> Placed:
        async def map_chunk(worker: RemoteExecutor, chunk: range) -> RemoteValue:
            index = self._chunks.index(chunk)
            argument = None if arg is None else await _chunk_keys(arg, index)
            function_key = None
            if function is not None:
                function_key = (await worker.create_value(function)).key
            key = worker.connection.new_key()
            keys = (key, function_key, argument)
            arguments = (*keys, chunk, draws.current())
            draws.note_unkeyed(await worker.connection.call("map", *arguments))
            return RemoteValue(worker.connection, key, member)

        chunks = await self._on_each_chunk(map_chunk)

        async def made() -> list[RemoteValue]:
            return chunks

        return RayPlaced(member, made)

    @override
    async def reduce(
        self,
        arg: Placed,
        zero: flf.ExecutorValue,
        accumulate: Function,
        merge: Function,
    ) -> flf.ExecutorValue:
        placed = values.narrow(arg, RayPlaced, "RayFederatingStrategy")
        chunks = await placed.chunks()

        async def reduce_chunk(
            worker: RemoteExecutor, chunk: range
        ) -> list[flf.ExecutorValue]:
            index = self._chunks.index(chunk)
            start: Any = zero
            if not _lives_on(zero, worker):
                start = await zero.compute()
            start = await worker.create_value(start, zero.type_signature)
            function = await worker.create_value(accumulate)
            leaves = [
                range(leaf.start - chunk.start, leaf.stop - chunk.start)
                for leaf in self._leaves[index]
            ]
            keys = [worker.connection.new_key() for _ in leaves]
            sources = (chunks[index].key, start.key, function.key)
            arguments = (keys, sources, leaves, draws.current())
            draws.note_unkeyed(await worker.connection.call("reduce", *arguments))
            result = values.function_type(function.type_signature).result
            return [RemoteValue(worker.connection, key, result) for key in keys]

        reduced = await self._on_each_chunk(reduce_chunk)
        partials = [partial for chunk in reduced for partial in chunk]
        function = await self._unplaced.create_value(merge)
        merged = await gather_by_index(self._to_unplaced(p) for p in partials)
        nodes = [(index, index + 1) for index in range(len(merged))]
        return await merge_values(self._unplaced, function, merged, nodes)

    async def _to_unplaced(self, partial: RemoteValue) -> flf.ExecutorValue:
        if _lives_on(partial, self._unplaced):
            return partial
        computed = await partial.compute()
        return await self._unplaced.create_value(computed, partial.type_signature)

    @override
    def close(self) -> None:
        self._workers.clear()


def _lives_on(value: flf.ExecutorValue, executor: flf.Executor) -> bool:
    return (
        isinstance(value, RemoteValue)
        and isinstance(executor, RemoteExecutor)
        and value.connection is executor.connection
    )


async def _chunk_keys(arg: PlacedArg, index: int) -> Any:
    """Return the keys of one chunk of an argument: an int, or (name, keys) pairs."""
    if isinstance(arg, Struct):
        return [
            (name, await _chunk_keys(element, index))
            for name, element in values.iter_elements(arg)
        ]
    placed = values.narrow(arg, RayPlaced, "RayFederatingStrategy")
    return (await placed.chunks())[index].key

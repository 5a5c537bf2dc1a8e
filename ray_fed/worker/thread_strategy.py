"""Clients on executors of this process, usually one a thread."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import federated_language as fl
from typing_extensions import override

from ray_fed.executors.fanout import gather_by_index
from ray_fed.executors.strategy import FederatingStrategy, Placed, PlacedArg
from ray_fed.language import structs, type_checks
from ray_fed.language.blocks import Function
from ray_fed.language.structs import Plain, Struct
from ray_fed.plan import merge_tree
from ray_fed.values import plain_values, stored
from ray_fed.worker import client_chunks
from ray_fed.worker.merging import merge_plain

ExecutorValue = fl.framework.ExecutorValue


class LocalPlaced:
    """Values of clients, a list for each group, embedded when first needed."""

    def __init__(
        self,
        member: fl.Type,
        embed: Callable[[], Coroutine[Any, Any, list[list[ExecutorValue]]]],
    ) -> None:
        self._member = member
        self._embed = embed
        self._groups: asyncio.Future[list[list[ExecutorValue]]] | None = None

    @property
    def member(self) -> fl.Type:
        """The type of one client's value."""
        return self._member

    async def groups(self) -> list[list[ExecutorValue]]:
        """Return the embedded values, one list a group, in client order."""
        if self._groups is None:
            self._groups = asyncio.ensure_future(self._embed())
        return await self._groups

    async def compute(self) -> list[Plain]:
        """Return the clients' values in client order, plain."""
        return [
            plain_values.to_plain(await value.compute(), self._member)
            for group in await self.groups()
            for value in group
        ]


class LocalStrategy(FederatingStrategy):
    """Runs each group of contiguous clients on an executor of its own.

    Args:
        unplaced: where partials are merged; not owned.
        targets: one a group; owned.
        groups: the clients of each target; together the whole cohort, in order.
        clients_per_leaf: see `merge_tree.cut_leaves`.
    """

    def __init__(
        self,
        unplaced: fl.framework.Executor,
        targets: Sequence[fl.framework.Executor],
        groups: Sequence[range],
        clients_per_leaf: int | None = None,
    ) -> None:
        self._unplaced = unplaced
        self._targets = targets
        self._groups = groups
        self.num_clients = sum(len(group) for group in groups)
        self._leaves = merge_tree.cut_leaves(self.num_clients, clients_per_leaf)

    @override
    async def place(self, value: Any, type_spec: fl.FederatedType) -> Placed:
        member = type_spec.member
        if type_spec.all_equal:
            if not isinstance(value, ExecutorValue):
                value = plain_values.to_plain(
                    value, member, "a value equal at all clients"
                )
            return LocalPlaced(member, lambda: self._embed_all_equal(value, member))
        stored.check_cardinality(value, type_spec, self.num_clients)
        members = plain_values.to_plain(value, type_spec, "a value placed at clients")

        async def embed() -> list[list[ExecutorValue]]:
            return await gather_by_index(
                client_chunks.embed_members(
                    target, members[group.start : group.stop], member, group.start
                )
                for target, group in zip(self._targets, self._groups, strict=True)
            )

        return LocalPlaced(member, embed)

    async def _embed_all_equal(
        self, value: Any, member: fl.Type
    ) -> list[list[ExecutorValue]]:
        if isinstance(value, ExecutorValue):
            value = plain_values.to_plain(await value.compute(), member)
        embedded = await gather_by_index(
            target.create_value(value, member) for target in self._targets
        )
        return [
            [value] * len(group)
            for value, group in zip(embedded, self._groups, strict=True)
        ]

    @override
    async def map(
        self, function: Function | None, arg: PlacedArg | None, member: fl.Type
    ) -> Placed:
        chunks: list[Any] = [None] * len(self._targets)
        if arg is not None:
            chunks = [await _chunk(arg, g) for g in range(len(self._targets))]
        results = await gather_by_index(
            client_chunks.map_members(target, function, chunk, group)
            for target, chunk, group in zip(
                self._targets, chunks, self._groups, strict=True
            )
        )

        async def embedded() -> list[list[ExecutorValue]]:
            return results

        return LocalPlaced(member, embedded)

    @override
    async def reduce(
        self,
        arg: Placed,
        zero: ExecutorValue,
        accumulate: Function,
        merge: Function,
    ) -> ExecutorValue:
        placed = type_checks.narrow(arg, LocalPlaced, "LocalStrategy")
        groups = await placed.groups()
        zero_type = zero.type_signature
        zero_plain = plain_values.to_plain(await zero.compute(), zero_type, "zero")

        async def reduce_group(index: int) -> list[Plain]:
            target, group = self._targets[index], self._groups[index]
            leaves = [leaf for leaf in self._leaves if leaf.start in group]
            function = await target.create_value(accumulate)
            partials: list[Plain] = []
            for leaf in leaves:
                members = await self._leaf_members(leaf, index, groups, placed.member)
                start = await target.create_value(zero_plain, zero_type)
                partial = await client_chunks.accumulate_members(
                    target, start, members, function, leaf
                )
                partials.append(
                    plain_values.to_plain(
                        await partial.compute(), partial.type_signature
                    )
                )
            return partials

        reduced = await gather_by_index(
            reduce_group(index) for index in range(len(self._groups))
        )
        partials = [partial for group in reduced for partial in group] or [zero_plain]
        return await merge_plain(self._unplaced, partials, merge)

    async def _leaf_members(
        self,
        leaf: range,
        index: int,
        groups: list[list[ExecutorValue]],
        member: fl.Type,
    ) -> list[ExecutorValue]:
        """Return the leaf's values on a target, fetching those of other groups."""
        members: list[ExecutorValue] = []
        for group, embedded in zip(self._groups, groups, strict=True):
            for client_index in range(
                max(leaf.start, group.start), min(leaf.stop, group.stop)
            ):
                value = embedded[client_index - group.start]
                if group is not self._groups[index]:
                    fetched = plain_values.to_plain(await value.compute(), member)
                    value = await self._targets[index].create_value(fetched, member)
                members.append(value)
        return members

    @override
    def close(self) -> None:
        for target in self._targets:
            target.close()


async def _chunk(arg: PlacedArg, group: int) -> Any:
    if isinstance(arg, Struct):
        return structs.Struct(
            [
                (name, await _chunk(element, group))
                for name, element in structs.iter_elements(arg)
            ]
        )
    return (await type_checks.narrow(arg, LocalPlaced, "LocalStrategy").groups())[group]

"""Clients of one device: by the four verbs, or folded by one graph."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import cast

import federated_language as fl
from typing_extensions import override

from ray_fed.language.structs import Plain
from ray_fed.plan import diagnostics, fused, plans
from ray_fed.plan.outcomes import Evaluated
from ray_fed.values.stored import ArgumentPart, ClientValues
from ray_fed.worker import client_fold, stacks
from ray_fed.worker.client_selections import select
from ray_fed.worker.device_stack import DeviceStack
from ray_fed.worker.merging import fetch
from ray_fed.worker.thread_strategy import LocalStrategy


class DeviceStrategy(LocalStrategy):
    """Runs all clients on the stack of one device.

    Args:
        stack: of the device; runs everything that is not placed, too.
        num_clients: size of the cohort.
        clients_per_leaf: see `merge_tree.cut_leaves`.
    """

    def __init__(
        self, stack: DeviceStack, num_clients: int, clients_per_leaf: int | None
    ) -> None:
        super().__init__(stack, [stack], [range(num_clients)], clients_per_leaf)
        self._stack = stack

    @override
    async def fold(
        self, subround: plans.Subround, arg: Plain = None
    ) -> Evaluated | plans.NoKernel:
        kernel = cast("plans.Kernel", subround.kernel)
        handed: Sequence[ClientValues] = ()
        if kernel.first is not None:
            first = dataclasses.replace(subround, kernel=kernel.first, merge=None)
            ran = await self.fold(first, arg)
            if isinstance(ran, plans.NoKernel):
                return ran
            handed = cast("Sequence[ClientValues]", ran.values)
        inputs = await self._compute_shared(subround, kernel, arg)
        data: list[ClientValues] = [_part(arg, path) for path in kernel.data]
        data += handed
        constants = inputs[kernel.num_aggregations :]
        for selection in kernel.selections:
            place = selection.keys
            keys = handed[place] if isinstance(place, int) else _part(arg, place)
            selected = await select(self._stack, selection, constants, keys)
            if isinstance(selected, plans.NoKernel):
                return selected
            data.append(selected)
        return await client_fold.fold(self._stack, subround, inputs, data)

    async def _compute_shared(
        self, subround: plans.Subround, kernel: plans.Kernel, arg: Plain
    ) -> Sequence[Plain]:
        """Return zeros and constants: plain, or tensors in tuples."""
        given = tuple(_part(arg, path) for path in kernel.parts)
        work = fused.ServerWork(kernel.server)
        graph = await self._stack.embed_fused(work)
        if not isinstance(graph, plans.NoKernel):
            try:
                found = await self._stack.call_fused(graph, [given])
            except Exception as error:  # noqa: BLE001 (the executors say what it is)
                diagnostics.note([diagnostics.Interpreted.of(work.label, error)])
            else:
                return graph.reference.nest(iter(found.reference))
        size = len(subround.leaves[0])
        stack = federated_stack(self._stack, size, subround.clients_per_leaf)
        function = await stack.create_value(self._stack.parse(kernel.server))
        parameter = cast("fl.FunctionType", function.type_signature).parameter
        argument = None
        if parameter is not None:
            argument = await stack.create_value(given, parameter)
        called = await stack.create_call(function, argument)
        return cast("Sequence[Plain]", await fetch(called.reference.reference))


def federated_stack(
    stack: DeviceStack, num_clients: int, clients_per_leaf: int | None
) -> stacks.FederatedStack:
    """Return a stack that runs any computation on one device."""
    return stacks.FederatedStack(
        lambda _: DeviceStrategy(stack, num_clients, clients_per_leaf), stack
    )


def _part(arg: Plain, path: plans.Path) -> ArgumentPart:
    return functools.reduce(lambda part, index: part[index], path, arg)

"""Folds the clients of a subround by one graph, leaf by leaf, in short calls."""

import asyncio
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.plan import fused, merge_tree, plans
from ray_fed.plan.outcomes import Evaluated
from ray_fed.values import read_limits, tensor_structures
from ray_fed.values.client_references import ClientRun
from ray_fed.worker.client_store import ClientStore
from ray_fed.worker.device_stack import DeviceStack
from ray_fed.worker.merging import fetch, merge_subtrees

flf = fl.framework

_LAID_BYTES = 128 * 2**20
"""Data of clients that a worker copies at once; laying it has a fixed cost."""


class _Fold:
    """Folds leaves of a subround, one after another, with one graph.

    Args:
        stack: whose executor runs the graph.
        function: the graph, embedded in that executor.
        content: of the fused work that it was built of.
        inputs: zeros and constants, plain or tensors.
        subround: whose leaves these are.
    """

    def __init__(
        self,
        stack: DeviceStack,
        function: flf.ExecutorValue,
        content: bytes,
        inputs: Sequence[Any],
        subround: plans.Subround,
    ) -> None:
        self._stack, self._function = stack, function
        self._graph: Any = function.reference
        self._pace = stack.pace_of(content)
        self._zeros, self._constants = self._graph.inputs(inputs)
        self._call_s = subround.call_s
        self._leaf_size = subround.clients_per_leaf
        self._trees = subround.subtrees
        self._leaves_a_call = _count_fitting(self._graph.bytes_of_partial)
        self._merges = self._graph.merges
        self._stacked: list[Sequence[Any]] = []

    def kept(self) -> list[list[Any]]:
        """Return what was kept of all clients so far: a list for each value."""
        return self._graph.kept(self._stacked)

    @property
    def partial(self) -> fl.Type:
        """The type of a partial."""
        return self._graph.partial

    def lay(
        self,
        clients: range,
        kernel: plans.Kernel,
        data: Sequence[Sequence[Any]],
        store: ClientStore,
    ) -> Any:
        """Return the data of clients, by index in the cohort, as graphs take it."""
        with_shapes = self._graph.refuse_shapes(self._leaf_size) is None
        laid = _lay(self._graph, kernel, data, store, with_shapes=with_shapes)
        return self._graph.lay(laid, clients)

    async def leaves(
        self, leaves: Sequence[range], first_leaf: int, laid: Any
    ) -> list["Partial"]:
        """Return the partials of whole subtrees that cover some leaves, in order.

        Args:
            leaves: positions of each leaf's clients in what was laid; adjacent.
            first_leaf: index among all leaves of the first of these.
            laid: what `lay` returned.

        Raises:
            FailedLeafError: the clients' work raised.
        """
        partials: list[Partial] = []
        size = self._leaf_size
        shapes = [self._graph.shape_of(leaf, laid, size) for leaf in leaves]
        accumulators, start, done = self._zeros, leaves[0].start, 0
        while done < len(leaves):
            read_limits.check()
            await asyncio.sleep(0)  # lets a cancelled call end here
            count = self._pace.count(leaves[-1].stop - start, self._call_s)
            fitting = [
                leaf
                for leaf in leaves[done : _end_of_run(shapes, done)]
                if leaf.stop <= start + count
            ]
            goes_on = start > leaves[done].start
            taken = fitting[: 1 if goes_on else self._leaves_a_call]
            alike = laid.of_shape(shapes[done])
            if taken:
                taken[0] = range(start, taken[0].stop)
                stop = done + len(taken)
                subtrees = self._subtrees_of(first_leaf + done, first_leaf + stop)
                found = await self._run(taken, subtrees, accumulators, alike, done)
                partials.extend(map(Partial, subtrees, found))
                accumulators, start, done = self._zeros, taken[-1].stop, stop
            else:
                count = max(1, count // self._graph.at_once) * self._graph.at_once
                piece = range(start, min(start + count, leaves[done].stop))
                subtree = (first_leaf + done, first_leaf + done + 1)
                ran = await self._run([piece], [subtree], accumulators, alike, done)
                (accumulators,) = ran
                start = piece.stop
                if start == leaves[done].stop:
                    partials.append(Partial(subtree, accumulators))
                    accumulators, done = self._zeros, done + 1
        return partials

    def _subtrees_of(self, first: int, stop: int) -> list[merge_tree.Subtree]:
        if not self._merges:
            return [(leaf, leaf + 1) for leaf in range(first, stop)]
        return [
            subtree
            for tree in self._trees
            for subtree in merge_tree.subtrees(first, stop, tree)
        ]

    async def _run(
        self,
        leaves: Sequence[range],
        subtrees: Sequence[merge_tree.Subtree],
        accumulators: Sequence[Any],
        laid: Any,
        index: int,
    ) -> list[Sequence[Any]]:
        started = time.monotonic()
        try:
            found, stacked = await self._call(leaves, subtrees, accumulators, laid)
        except Exception as error:
            failed = await self._find_failed(leaves, laid, index)
            raise FailedLeafError(failed) from error
        self._stacked.append(stacked)
        num_clients = leaves[-1].stop - leaves[0].start
        if num_clients:
            self._pace.note(num_clients, time.monotonic() - started)
        return found

    async def _call(
        self,
        leaves: Sequence[range],
        subtrees: Sequence[merge_tree.Subtree],
        accumulators: Sequence[Any],
        laid: Any,
    ) -> tuple[list[Sequence[Any]], Sequence[Any]]:
        given = leaves, subtrees, accumulators, self._constants, laid
        return (await self._stack.call_fused(self._function, *given)).reference

    async def _find_failed(
        self, leaves: Sequence[range], laid: Any, index: int
    ) -> int | None:
        """Return the index of the first of some leaves whose work raises, alone."""
        if len(leaves) == 1:
            return index
        for failed, leaf in enumerate(leaves, index):
            try:
                await self._call([leaf], [(0, 1)], self._zeros, laid)
            except Exception:  # noqa: BLE001 (as it did before)
                return failed
        return None


def _count_fitting(num_bytes: int | None) -> int:
    """Return how many partials one call may return, at least one.

    Args:
        num_bytes: of each, may be zero; None where that is not known.
    """
    if num_bytes is None:
        return 1
    return max(1, _LAID_BYTES // max(1, num_bytes))


def _end_of_run(items: Sequence[Any], start: int) -> int:
    """Return the index after the items from `start` on that are equal to its one."""
    end = start
    while end < len(items) and items[end] == items[start]:
        end += 1
    return end


class FailedLeafError(Exception):
    """Clients' work raised in a kernel.

    Attributes:
        leaf: index of the first such leaf among those that ran; None: not known.
    """

    def __init__(self, leaf: int | None) -> None:
        super().__init__()
        self.leaf = leaf


@dataclasses.dataclass(frozen=True)
class Partial:
    """What a subtree of leaves came to.

    Attributes:
        subtree: the subtree.
        accumulators: tensors, or arrays.
    """

    subtree: merge_tree.Subtree
    accumulators: Sequence[Any]


async def fold(
    stack: DeviceStack,
    subround: plans.Subround,
    inputs: Sequence[Any],
    data: Sequence[Sequence[Any]],
) -> Evaluated | plans.NoKernel:
    """Return the partial of each of `subround.subtrees`, and what is kept of clients.

    Args:
        stack: runs graphs, holds clients, and merges what no graph merges.
        subround: with a kernel, and a merge.
        inputs: what `server` of the kernel returned, plain or of tensors.
        data: for each of `data` of the kernel the plain values of all clients of the
            subround, in order; or runs of clients, which stand for them.
    """
    kernel = cast("plans.Kernel", subround.kernel)
    merge = fused.PartialMerge(cast("bytes", subround.merge))
    merger = await stack.embed_fused(merge)
    one_a_leaf = subround.clients_per_leaf == 1 and all(map(len, subround.leaves))
    merges = not isinstance(merger, plans.NoKernel)
    work = fused.ClientFold(kernel, merge if merges else None, one_a_leaf)
    function = await stack.embed_fused(work)
    if isinstance(function, plans.NoKernel):
        return function
    run = _Fold(stack, function, work.content, list(inputs), subround)
    try:
        partials = await _run_groups(run, subround, data, stack.clients)
    except errors.ClusterError:
        raise
    except Exception as error:  # noqa: BLE001 (the interpreter will say what it is)
        cause = error.__cause__ if isinstance(error, FailedLeafError) else error
        leaf = getattr(error, "leaf", None)
        return plans.NoKernel(f"{type(cause).__name__} in a kernel", leaf)
    if isinstance(merger, plans.NoKernel):
        embedded: list[flf.ExecutorValue] = [
            await stack.create_value(
                tensor_structures.unflatten(iter(partial.accumulators), run.partial),
                run.partial,
            )
            for partial in partials
        ]
        merged = await merge_subtrees(subround, embedded, stack)
        found = [await fetch(value) for value in merged]
    else:
        found = await _merge_subtrees(stack, merger, subround.subtrees, partials)
    kept = run.kept() if kernel.num_kept else []
    return Evaluated([*found, *kept], len(subround.leaves))


async def _run_groups(
    run: _Fold,
    subround: plans.Subround,
    data: Sequence[Sequence[Any]],
    store: ClientStore,
) -> list[Partial]:
    kernel = cast("plans.Kernel", subround.kernel)
    first, done = subround.leaves[0].start, 0
    partials: list[Partial] = []
    for group in _groups(subround.leaves, data, store):
        clients = range(group[0].start, group[-1].stop)
        part = [m[clients.start - first : clients.stop - first] for m in data]
        laid = run.lay(clients, kernel, part, store)
        inside = [
            range(leaf.start - clients.start, leaf.stop - clients.start)
            for leaf in group
        ]
        try:
            partials += await run.leaves(inside, subround.first_leaf + done, laid)
        except FailedLeafError as error:
            if error.leaf is not None:
                error.leaf += done
            raise
        done += len(group)
    return partials


def _lay(
    graph: Any,
    kernel: plans.Kernel,
    data: Sequence[Sequence[Any]],
    store: ClientStore,
    *,
    with_shapes: bool,
) -> Sequence[Any]:
    """Return the values of clients as tensors; those that were laid before are kept."""

    def make() -> Sequence[Any]:
        read = [store.read_all(members) for members in data]
        return graph.lay_values(read, with_shapes=with_shapes)

    runs = [members for members in data if isinstance(members, ClientRun)]
    if not runs or len(runs) < len(data) or any(map(store.differs_by_call, runs)):
        return make()
    key = (kernel.content, with_shapes, *(run.key for run in runs))
    tokens = frozenset(run.source.token for run in runs)
    return store.keep(key, tokens, make, graph.count_bytes)


def _groups(
    leaves: Sequence[range], data: Sequence[Sequence[Any]], store: ClientStore
) -> Iterator[list[range]]:
    """Yield runs of leaves whose data is laid at once: few copies, of bounded size."""
    group: list[range] = []
    num_bytes = 0
    first = leaves[0].start
    for leaf in leaves:
        inside = slice(leaf.start - first, leaf.stop - first)
        size = sum(store.count_bytes(members[inside]) for members in data)
        if group and num_bytes + size > _LAID_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(leaf)
        num_bytes += size
    yield group


async def _merge_subtrees(
    stack: DeviceStack,
    merger: flf.ExecutorValue,
    subtrees: Sequence[merge_tree.Subtree],
    partials: Sequence[Partial],
) -> list[Any]:
    """Return the plain partial of each subtree, out of those that are inside of it."""
    merged: list[Any] = []
    graph: Any = merger.reference
    for subtree in subtrees:
        inside = [p for p in partials if subtree[0] <= p.subtree[0] < subtree[1]]
        held = [p.accumulators for p in inside]
        for left, right, _ in merge_tree.merge_order([p.subtree for p in inside]):
            called = await stack.call_fused(merger, held[left], held[right])
            held[left] = called.reference
        merged.append(graph.to_plain(held[0]))
    return merged

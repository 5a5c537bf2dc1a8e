"""Folds the clients of a subround by one graph: its data, its leaves, its merges.

What keys of clients select: evaluated once a key for all clients of a subround.

Folds leaf after leaf by calls of one graph, each of which takes a bounded time.

A call covers whole leaves where they fit, or some clients of one leaf: then the next
call goes on from the accumulators that this one returned, with the same bits.
"""

import asyncio
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
from ray_fed.executors.interpretation import split_rows
from ray_fed.language.structs import Plain
from ray_fed.plan import diagnostics, merge_tree
from ray_fed.plan.outcomes import Evaluated
from ray_fed.values import read_limits, stored, tensor_structures
from ray_fed.values.client_references import ClientRun
from ray_fed.values.stored import ClientValues
from ray_fed.worker.client_store import ClientStore
from ray_fed.worker.device_stack import DeviceStack
from ray_fed.worker.merging import fetch, merge_subtrees


async def select(
    stack: DeviceStack,
    selection: plans.Selection,
    constants: Sequence[Plain],
    keys: ClientValues,
) -> list[Plain] | plans.NoKernel:
    """Return the sequence that each client's keys select, or why no graph does it.

    Args:
        stack: runs the graph, and holds clients.
        selection: of one key.
        constants: of the kernel, plain or tensors in tuples.
        keys: i32[keys] of each client, plain or a run of clients.
    """
    function = await stack.embed_fused(plans.KeySelection(selection.function))
    if isinstance(function, plans.NoKernel):
        return function
    of_clients: list[NDArray[np.int32]] = list(stack.clients.read_all(keys))
    if not of_clients:
        return []
    flat = np.concatenate(of_clients)
    limit = int(np.asarray(constants[selection.max_key]))
    if len(flat) and not 0 <= flat.min() <= flat.max() <= limit:
        return plans.NoKernel("a key that is out of range")
    different, places = np.unique(flat, return_inverse=True)
    try:
        called = await stack.call_fused(function, constants, different)
    except errors.ClusterError:
        raise
    except Exception as error:
        if diagnostics.is_defect(error):
            raise
        return plans.NoKernel(f"{type(error).__name__} in a selection")
    rows = [tensor[places] for tensor in called.reference]
    return list(split_rows(rows, of_clients))


if TYPE_CHECKING:
    from ray_fed.tensorflow.kernels.client_batches import LaidClients, LaidData
    from ray_fed.tensorflow.kernels.client_kernel import ClientKernel

flf = fl.framework

LAID_BYTES = 128 * 2**20
"""Data of clients that a worker copies at once; laying it has a fixed cost."""

Accumulators: TypeAlias = Sequence[Any]
"""The tensors of a partial, in the order of its type: TensorFlow's, or arrays."""

Stacked: TypeAlias = Sequence[Any]
"""For each tensor of what is kept of clients one tensor with the values of all."""


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
        accumulators: the tensors of the partial.
    """

    subtree: merge_tree.Subtree
    accumulators: Accumulators


class LeafCalls:
    """Folds leaves of a subround, one after another, by calls of one graph.

    Args:
        stack: whose executor runs the graph.
        function: the graph, embedded in that executor.
        content: identifies the graph, to remember how long its calls take.
        inputs: zeros and constants, plain or tensors.
        subround: whose leaves these are.
    """

    def __init__(
        self,
        stack: DeviceStack,
        function: flf.ExecutorValue,
        content: bytes,
        inputs: Sequence[Plain],
        subround: plans.Subround,
    ) -> None:
        self._stack, self._function = stack, function
        self.graph: ClientKernel = function.reference
        self._pace = stack.pace_of(content)
        self._zeros, self._constants = self.graph.inputs(inputs)
        self._call_s = subround.call_s
        self._leaf_size = subround.clients_per_leaf
        self._trees = subround.subtrees
        self._leaves_a_call = _count_fitting(self.graph.bytes_of_partial)
        self._stacked: list[Stacked] = []

    @property
    def needs_shapes(self) -> bool:
        """Whether the shapes of clients decide which graph folds them."""
        return self.graph.refuse_shapes(self._leaf_size) is None

    def kept(self) -> list[list[Plain]]:
        """Return what was kept of all clients so far: a list for each value."""
        return self.graph.kept(self._stacked)

    def lay(self, data: "LaidData", clients: range) -> "LaidClients":
        """Return the data of clients, by index in the cohort, as the graph takes it."""
        return self.graph.lay(data, clients)

    async def fold(
        self, leaves: Sequence[range], first_leaf: int, laid: "LaidClients"
    ) -> list[Partial]:
        """Return the partials of whole subtrees that cover some leaves, in order.

        Args:
            leaves: positions of each leaf's clients in what was laid; adjacent.
            first_leaf: index among all leaves of the first of these.
            laid: the clients.

        Raises:
            FailedLeafError: the clients' work raised.
        """
        partials: list[Partial] = []
        shapes = [self.graph.shape_of(each, laid, self._leaf_size) for each in leaves]
        accumulators: Accumulators = self._zeros
        start, done = leaves[0].start, 0
        while done < len(leaves):
            read_limits.check()
            await asyncio.sleep(0)  # lets a cancelled call end here
            count = self._pace.count(leaves[-1].stop - start, self._call_s)
            fitting = [
                leaf
                for leaf in leaves[done : _end_of_equal(shapes, done)]
                if leaf.stop <= start + count
            ]
            goes_on = start > leaves[done].start
            taken = fitting[: 1 if goes_on else self._leaves_a_call]
            alike = laid.of_shape(shapes[done])
            if taken:
                taken[0] = range(start, taken[0].stop)
                stop = done + len(taken)
                subtrees = self._subtrees_of(first_leaf + done, first_leaf + stop)
                found = await self._call(taken, subtrees, accumulators, alike, done)
                partials.extend(map(Partial, subtrees, found))
                accumulators, start, done = self._zeros, taken[-1].stop, stop
            else:
                count = max(1, count // self.graph.at_once) * self.graph.at_once
                piece = range(start, min(start + count, leaves[done].stop))
                subtree = (first_leaf + done, first_leaf + done + 1)
                found = await self._call([piece], [subtree], accumulators, alike, done)
                (accumulators,) = found
                start = piece.stop
                if start == leaves[done].stop:
                    partials.append(Partial(subtree, accumulators))
                    accumulators, done = self._zeros, done + 1
        return partials

    def _subtrees_of(self, first: int, stop: int) -> list[merge_tree.Subtree]:
        if not self.graph.merges:
            return [(leaf, leaf + 1) for leaf in range(first, stop)]
        return [
            subtree
            for tree in self._trees
            for subtree in merge_tree.subtrees(first, stop, tree)
        ]

    async def _call(
        self,
        leaves: Sequence[range],
        subtrees: Sequence[merge_tree.Subtree],
        accumulators: Accumulators,
        laid: "LaidClients",
        index: int,
    ) -> Sequence[Accumulators]:
        """Call the graph; time the call; name the leaf whose work raises, by index."""
        started = time.monotonic()
        try:
            found, stacked = await self._run(leaves, subtrees, accumulators, laid)
        except Exception as error:
            failed = await self._find_failed(leaves, laid, index)
            raise FailedLeafError(failed) from error
        self._stacked.append(stacked)
        num_clients = leaves[-1].stop - leaves[0].start
        if num_clients:
            self._pace.note(num_clients, time.monotonic() - started)
        return found

    async def _run(
        self,
        leaves: Sequence[range],
        subtrees: Sequence[merge_tree.Subtree],
        accumulators: Accumulators,
        laid: "LaidClients",
    ) -> tuple[Sequence[Accumulators], Stacked]:
        given = leaves, subtrees, accumulators, self._constants, laid
        return (await self._stack.call_fused(self._function, *given)).reference

    async def _find_failed(
        self, leaves: Sequence[range], laid: "LaidClients", index: int
    ) -> int | None:
        """Return the index of the first of some leaves whose work raises, alone."""
        if len(leaves) == 1:
            return index
        for failed, leaf in enumerate(leaves, index):
            try:
                await self._run([leaf], [(0, 1)], self._zeros, laid)
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
    return max(1, LAID_BYTES // max(1, num_bytes))


def _end_of_equal(items: Sequence[object], start: int) -> int:
    """Return the index after the items that equal the one at `start`, from there on."""
    end = start
    while end < len(items) and items[end] == items[start]:
        end += 1
    return end


if TYPE_CHECKING:
    from ray_fed.tensorflow.kernels.client_batches import LaidData, LaidPart


async def fold(
    stack: DeviceStack,
    subround: plans.Subround,
    inputs: Sequence[Plain],
    data: Sequence[ClientValues],
) -> Evaluated | plans.NoKernel:
    """Return the partial of each of `subround.subtrees`, and what is kept of clients.

    Args:
        stack: runs graphs, holds clients, and merges what no graph merges.
        subround: with a kernel; without a merge, no partial is returned.
        inputs: what `server` of the kernel returned, plain or of tensors.
        data: for each of `data` of the kernel the plain values of all clients of the
            subround, in order; or runs of clients, which stand for them.
    """
    kernel = cast("plans.Kernel", subround.kernel)
    merge: plans.PartialMerge | None = None
    merger: flf.ExecutorValue | plans.NoKernel = plans.NoKernel("nothing to merge")
    if subround.merge is not None:
        merge = plans.PartialMerge(subround.merge)
        merger = await stack.embed_fused(merge)
    one_a_leaf = subround.clients_per_leaf == 1 and all(map(len, subround.leaves))
    merges = not isinstance(merger, plans.NoKernel)
    work = plans.ClientFold(kernel, merge if merges else None, one_a_leaf)
    function = await stack.embed_fused(work)
    if isinstance(function, plans.NoKernel):
        return function
    calls = LeafCalls(stack, function, work.content, list(inputs), subround)
    try:
        partials = await _fold_groups(calls, subround, data, stack.clients)
    except errors.ClusterError:
        raise
    except Exception as error:  # noqa: BLE001 (the interpreter will say what it is)
        cause = error.__cause__ if isinstance(error, FailedLeafError) else error
        if cause is not None and diagnostics.is_defect(cause):
            raise cause from None
        leaf = getattr(error, "leaf", None)
        return plans.NoKernel(f"{type(cause).__name__} in a kernel", leaf)
    if subround.merge is None:
        found = []
    elif isinstance(merger, plans.NoKernel):
        found = await _merge_interpreted(stack, subround, partials, calls.graph.partial)
    else:
        found = await _merge_subtrees(stack, merger, subround.subtrees, partials)
    kept = calls.kept() if kernel.num_kept else []
    return Evaluated([*found, *kept], len(subround.leaves))


async def _fold_groups(
    calls: LeafCalls,
    subround: plans.Subround,
    data: Sequence[ClientValues],
    store: ClientStore,
) -> list[Partial]:
    kernel = cast("plans.Kernel", subround.kernel)
    first, done = subround.leaves[0].start, 0
    partials: list[Partial] = []
    for group in _groups(subround.leaves, data, store):
        clients = range(group[0].start, group[-1].stop)
        of_group = [m[clients.start - first : clients.stop - first] for m in data]
        laid = calls.lay(_lay(calls, kernel, of_group, store), clients)
        inside = [
            range(leaf.start - clients.start, leaf.stop - clients.start)
            for leaf in group
        ]
        try:
            partials += await calls.fold(inside, subround.first_leaf + done, laid)
        except FailedLeafError as error:
            if error.leaf is not None:
                error.leaf += done
            raise
        done += len(group)
    return partials


def _lay(
    calls: LeafCalls,
    kernel: plans.Kernel,
    data: Sequence[ClientValues],
    store: ClientStore,
) -> "LaidData":
    """Return the data of clients as tensors, from the store where it was laid before.

    Only runs of clients are laid once: their keys say which data they stand for, but
    for files, which may change. Where all parts are runs, they are in the store as one,
    otherwise each by itself.
    """
    graph, with_shapes = calls.graph, calls.needs_shapes
    runs = {
        part: members
        for part, members in enumerate(data)
        if isinstance(members, ClientRun) and not store.differs_by_call(members)
    }

    have_files: set[int] = set()

    def lay_part(part: int) -> "LaidPart":
        values = store.read_all(data[part])
        if any(map(stored.holds_external, values)):
            have_files.add(part)
        return graph.lay_part(part, values, store.keep)

    def count(laid: "LaidPart | LaidData") -> float:
        return math.inf if have_files else laid.count_bytes()  # the store takes no such

    def find_part(part: int) -> "LaidPart":
        run = runs.get(part) if len(runs) < len(data) else None
        key = (kernel.content, "part", part, None if run is None else run.key)
        if run is None or not store.is_repeated(key):
            return lay_part(part)
        tokens = frozenset([run.source.token])
        return store.keep(key, tokens, lambda: lay_part(part), count)

    def lay() -> "LaidData":
        parts = list(map(find_part, range(len(data))))
        return graph.join(parts, with_shapes=with_shapes)

    if not runs or len(runs) < len(data):
        return lay()
    key = (kernel.content, with_shapes, *(run.key for run in runs.values()))
    tokens = frozenset(run.source.token for run in runs.values())
    return store.keep(key, tokens, lay, count)


def _groups(
    leaves: Sequence[range], data: Sequence[ClientValues], store: ClientStore
) -> Iterator[list[range]]:
    """Yield groups of leaves whose data is laid at once: few copies of bounded size."""
    group: list[range] = []
    num_bytes = 0
    first = leaves[0].start
    for leaf in leaves:
        inside = slice(leaf.start - first, leaf.stop - first)
        size = sum(store.count_bytes(members[inside]) for members in data)
        if group and num_bytes + size > LAID_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(leaf)
        num_bytes += size
    yield group


async def _merge_interpreted(
    stack: DeviceStack,
    subround: plans.Subround,
    partials: Sequence[Partial],
    type_spec: fl.Type,
) -> list[Plain]:
    """Return the plain partial of each subtree where no graph merges two partials."""
    embedded: list[flf.ExecutorValue] = [
        await stack.create_value(
            tensor_structures.unflatten(iter(partial.accumulators), type_spec),
            type_spec,
        )
        for partial in partials
    ]
    merged = await merge_subtrees(subround, embedded, stack)
    return [await fetch(value) for value in merged]


async def _merge_subtrees(
    stack: DeviceStack,
    merger: flf.ExecutorValue,
    subtrees: Sequence[merge_tree.Subtree],
    partials: Sequence[Partial],
) -> list[Plain]:
    """Return the plain partial of each subtree, out of the partials inside of it."""
    merged: list[Plain] = []
    for subtree in subtrees:
        inside = [p for p in partials if subtree[0] <= p.subtree[0] < subtree[1]]
        held = [p.accumulators for p in inside]
        for left, right, _ in merge_tree.merge_order([p.subtree for p in inside]):
            called = await stack.call_fused(merger, held[left], held[right])
            held[left] = called.reference
        merged.append(merger.reference.to_plain(held[0]))
    return merged

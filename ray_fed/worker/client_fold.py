"""Folds the clients of a subround by one graph: its data, its leaves, its merges."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.language.structs import Plain
from ray_fed.plan import diagnostics, fused, merge_tree, plans
from ray_fed.plan.outcomes import Evaluated
from ray_fed.values import stored, tensor_structures
from ray_fed.values.client_references import ClientRun
from ray_fed.values.stored import ClientValues
from ray_fed.worker import leaf_calls
from ray_fed.worker.client_store import ClientStore
from ray_fed.worker.device_stack import DeviceStack
from ray_fed.worker.leaf_calls import FailedLeafError, LeafCalls, Partial
from ray_fed.worker.merging import fetch, merge_subtrees

if TYPE_CHECKING:
    from ray_fed.tensorflow.kernels.client_tensors import LaidPart
    from ray_fed.tensorflow.kernels.laid_clients import LaidData

flf = fl.framework


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
    merge: fused.PartialMerge | None = None
    merger: flf.ExecutorValue | plans.NoKernel = plans.NoKernel("nothing to merge")
    if subround.merge is not None:
        merge = fused.PartialMerge(subround.merge)
        merger = await stack.embed_fused(merge)
    one_a_leaf = subround.clients_per_leaf == 1 and all(map(len, subround.leaves))
    merges = not isinstance(merger, plans.NoKernel)
    work = fused.ClientFold(kernel, merge if merges else None, one_a_leaf)
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
        if group and num_bytes + size > leaf_calls.LAID_BYTES:
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

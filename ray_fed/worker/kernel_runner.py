"""Runs the clients of a subround by one graph, leaf after leaf.

    run_kernel    a subround by its kernel: what clients do first, what is the same for
                  all of them, what their keys select, then their leaves
    run_leaves    the leaves, in groups whose data is copied at once
    LeafCalls     calls of the graph, each of which takes a bounded time

A call covers whole leaves where they fit, or some clients of one leaf: then the next
call goes on from the accumulators that this one returned, with the same bits.
"""

import asyncio
import dataclasses
import functools
import math
import operator
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
from ray_fed.plan.plans import Fallback
from ray_fed.values import read_limits, stored, tensor_structures
from ray_fed.values.client_references import ClientRun
from ray_fed.values.stored import ArgumentPart, ClientValues
from ray_fed.worker.client_store import ClientStore
from ray_fed.worker.stacks import (
    DeviceStack,
    call_on,
    fetch,
    local_stack,
    merge_subtrees,
)


async def run_kernel(
    device: DeviceStack, subround: plans.Subround, arg: Plain
) -> Evaluated | Fallback:
    """Return what a subround comes to by its kernel, or why leaves are interpreted.

    Args:
        device: runs graphs, holds clients, and interprets what is the same for all.
        subround: with a kernel.
        arg: what its computation takes, with the values of all its clients.
    """
    kernel = cast("plans.Kernel", subround.kernel)
    carried: Sequence[ClientValues] = ()
    if kernel.first is not None:
        first = dataclasses.replace(subround, kernel=kernel.first, merge=None)
        ran = await run_kernel(device, first, arg)
        if isinstance(ran, Fallback):
            return ran
        carried = cast("Sequence[ClientValues]", ran.values)
    inputs = await _compute_shared(device, subround, kernel, arg)
    data: list[ClientValues] = [_part(arg, path) for path in kernel.data]
    data += carried
    constants = inputs[kernel.num_aggregations :]
    for selection in kernel.selections:
        place = selection.keys
        keys = carried[place] if isinstance(place, int) else _part(arg, place)
        selected = _select(device, selection, constants, keys)
        if isinstance(selected, Fallback):
            return selected
        data.append(selected)
    return await run_leaves(device, subround, inputs, data)


def _part(arg: Plain, path: plans.Path) -> ArgumentPart:
    return functools.reduce(operator.getitem, path, arg)


async def _compute_shared(
    device: DeviceStack, subround: plans.Subround, kernel: plans.Kernel, arg: Plain
) -> Sequence[Plain]:
    """Return zeros and constants: plain, or tensors in tuples."""
    parts = tuple(_part(arg, path) for path in kernel.parts)
    graph = device.eager.kernels.server(kernel.server)
    if not isinstance(graph, Fallback):
        try:
            return graph.nest(iter(device.eager.run_kernel(graph, [parts])))
        except Exception as error:  # noqa: BLE001 (the executors say what it is)
            work = "zeros and constants at the server"
            diagnostics.note([diagnostics.WorkInterpreted.of(work, error)])
    size = subround.clients_per_leaf
    stack = local_stack(len(subround.leaves[0]), [device], device, size)
    called = await call_on(stack, device.parse(kernel.server), [parts])
    return cast("Sequence[Plain]", await fetch(called.reference.reference))


def _select(
    device: DeviceStack,
    selection: plans.Selection,
    constants: Sequence[Plain],
    keys: ClientValues,
) -> list[Plain] | Fallback:
    """Return the sequence that each client's keys select, or why no graph does it.

    Args:
        device: runs the graph, once for each key, and holds clients.
        selection: of one key.
        constants: of the kernel, plain or tensors in tuples.
        keys: i32[keys] of each client, plain or a run of clients.
    """
    graph = device.eager.kernels.selection(selection.function)
    if isinstance(graph, Fallback):
        return graph
    of_clients: list[NDArray[np.int32]] = list(device.clients.read_all(keys))
    if not of_clients:
        return []
    flat = np.concatenate(of_clients)
    limit = int(np.asarray(constants[selection.max_key]))
    if len(flat) and not 0 <= flat.min() <= flat.max() <= limit:
        return Fallback("a key that is out of range")
    different, places = np.unique(flat, return_inverse=True)
    try:
        tensors = device.eager.run_kernel(graph, constants, different)
    except errors.ClusterError:
        raise
    except Exception as error:
        if diagnostics.is_defect(error):
            raise
        return Fallback(f"{type(error).__name__} in a selection")
    return list(split_rows([tensor[places] for tensor in tensors], of_clients))


if TYPE_CHECKING:
    from ray_fed.tensorflow.kernels.client_batches import (
        LaidClients,
        LaidData,
        LaidPart,
    )
    from ray_fed.tensorflow.kernels.client_kernel import ClientKernel, MergeKernel

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


Partials: TypeAlias = dict[merge_tree.Subtree, Accumulators]
"""What adjacent subtrees of leaves came to, in order."""


class LeafCalls:
    """Runs leaves of a subround, one after another, by calls of one graph.

    Args:
        device: whose executor runs the graph.
        graph: the graph.
        content: identifies the graph, to remember how long its calls take.
        inputs: zeros and constants, plain or tensors.
        subround: whose leaves these are.
    """

    def __init__(
        self,
        device: DeviceStack,
        graph: "ClientKernel",
        content: bytes,
        inputs: Sequence[Plain],
        subround: plans.Subround,
    ) -> None:
        self._run = functools.partial(device.eager.run_kernel, graph)
        self.graph = graph
        self._pace = device.pace_of(content)
        self._zeros, self._constants = self.graph.inputs(inputs)
        self._call_s = subround.call_s
        self._leaf_size = subround.clients_per_leaf
        self._trees = subround.subtrees
        size = self.graph.bytes_of_partial  # None: not known
        self._leaves_a_call = 1 if size is None else max(1, LAID_BYTES // max(1, size))
        self.stacked: list[Stacked] = []

    async def run(
        self, leaves: Sequence[range], first_leaf: int, laid: "LaidClients"
    ) -> Partials:
        """Return the partials of whole subtrees that cover some leaves, in order.

        Args:
            leaves: positions of each leaf's clients in what was laid; adjacent.
            first_leaf: index among all leaves of the first of these.
            laid: the clients.

        Raises:
            FailedLeafError: the clients' work raised.
        """
        partials: Partials = {}
        shape_of = self.graph.shaped.shape_of
        shapes = [shape_of(leaf, laid, self._leaf_size) for leaf in leaves]
        accumulators: Accumulators = self._zeros
        start, done = leaves[0].start, 0
        while done < len(leaves):
            read_limits.check()
            await asyncio.sleep(0)  # lets a cancelled call end here
            count = self._pace.count(leaves[-1].stop - start, self._call_s)
            # A leaf that was begun ends alone: others begin at zero, it does not.
            goes_on = start > leaves[done].start
            # Whole leaves of one shape, as many as one call is to take.
            whole: list[range] = []
            for leaf, shape in zip(leaves[done:], shapes[done:], strict=True):
                is_full = len(whole) == (1 if goes_on else self._leaves_a_call)
                if is_full or shape != shapes[done] or leaf.stop > start + count:
                    break
                whole.append(leaf)
            alike = dataclasses.replace(laid, shape=shapes[done])
            if whole:
                whole[0] = range(start, whole[0].stop)
                stop = done + len(whole)
                subtrees = self._subtrees_of(first_leaf + done, first_leaf + stop)
                results = self._call(whole, subtrees, accumulators, alike, done)
                partials.update(zip(subtrees, results, strict=True))
                accumulators, start, done = self._zeros, whole[-1].stop, stop
            else:
                # The next leaf is longer than a call: a piece of it, to be resumed.
                count = max(1, count // self.graph.at_once) * self.graph.at_once
                piece = range(start, min(start + count, leaves[done].stop))
                subtree = (first_leaf + done, first_leaf + done + 1)
                results = self._call([piece], [subtree], accumulators, alike, done)
                (accumulators,) = results
                start = piece.stop
                if start == leaves[done].stop:
                    partials[subtree] = accumulators
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

    def _call(
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
            results, stacked = self._run(
                leaves, subtrees, accumulators, self._constants, laid
            )
        except Exception as error:
            failed = self._find_failed(leaves, laid, index)
            raise FailedLeafError(failed) from error
        self.stacked.append(stacked)
        num_clients = leaves[-1].stop - leaves[0].start
        if num_clients:
            self._pace.note(num_clients, time.monotonic() - started)
        return results

    def _find_failed(
        self, leaves: Sequence[range], laid: "LaidClients", index: int
    ) -> int | None:
        """Return the index of the first of some leaves whose work raises, alone."""
        if len(leaves) == 1:
            return index
        for failed, leaf in enumerate(leaves, index):
            try:
                self._run([leaf], [(0, 1)], self._zeros, self._constants, laid)
            except Exception:  # noqa: BLE001 (as it did before)
                return failed
        return None


async def run_leaves(
    device: DeviceStack,
    subround: plans.Subround,
    inputs: Sequence[Plain],
    data: Sequence[ClientValues],
) -> Evaluated | Fallback:
    """Return the partial of each of `subround.subtrees`, and what is kept of clients.

    Args:
        device: runs graphs, holds clients, and merges what no graph merges.
        subround: with a kernel; without a merge, no partial is returned.
        inputs: what `server` of the kernel returned, plain or of tensors.
        data: for each of `data` of the kernel the plain values of all clients of the
            subround, in order; or runs of clients, which stand for them.
    """
    kernel, merge = cast("plans.Kernel", subround.kernel), subround.merge
    # Leaves of one client each do without the loop over clients.
    one_per_leaf = subround.clients_per_leaf == 1 and all(map(len, subround.leaves))
    kernels = device.eager.kernels
    graph = kernels.clients(kernel, merge, one_per_leaf=one_per_leaf)
    if isinstance(graph, Fallback):
        return graph
    content = b"%d" % one_per_leaf + kernel.content + (merge or b"")
    calls = LeafCalls(device, graph, content, list(inputs), subround)
    first, done = subround.leaves[0].start, 0
    partials: Partials = {}
    try:
        for group in _groups(subround.leaves, data, device.clients):
            clients = range(group[0].start, group[-1].stop)
            of_group = [m[clients.start - first : clients.stop - first] for m in data]
            laid = _lay(graph, subround, of_group, device.clients)
            inside = [
                range(leaf.start - clients.start, leaf.stop - clients.start)
                for leaf in group
            ]
            partials |= await calls.run(
                inside, subround.first_leaf + done, graph.lay(laid, clients)
            )
            done += len(group)
    except errors.ClusterError:
        raise
    except Exception as error:  # noqa: BLE001 (the interpreter will say what it is)
        cause, leaf = error, None
        if isinstance(error, FailedLeafError):
            cause = error.__cause__
            leaf = None if error.leaf is None else done + error.leaf
        if isinstance(cause, Fallback):
            return Fallback(cause.reason, leaf)
        if cause is not None and diagnostics.is_defect(cause):
            raise cause from None
        return Fallback(f"{type(cause).__name__} in a kernel", leaf)
    kept = graph.kept(calls.stacked) if kernel.num_kept else []
    if merge is None:
        return Evaluated([*kept], len(subround.leaves))
    merger = kernels.merge(merge)
    if isinstance(merger, Fallback):
        merged = await _merge_interpreted(device, subround, partials, graph.partial)
    else:
        merged = _merge_subtrees(device, merger, subround.subtrees, partials)
    return Evaluated([*merged, *kept], len(subround.leaves))


def _lay(
    graph: "ClientKernel",
    subround: plans.Subround,
    data: Sequence[ClientValues],
    store: ClientStore,
) -> "LaidData":
    """Return the data of clients as tensors, from the store where it was laid before.

    Only runs of clients are laid once: their keys say which data they stand for, but
    for files, which may change. Where all parts are runs, they are in the store as one,
    otherwise each by itself.
    """
    content = cast("plans.Kernel", subround.kernel).content
    # Whether the shapes of clients decide which graph runs them.
    with_shapes = graph.shaped.refuse_shapes(subround.clients_per_leaf) is None
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

    def lay() -> "LaidData":
        parts: list[LaidPart] = []
        for part in range(len(data)):
            run = runs.get(part) if len(runs) < len(data) else None
            key = (content, "part", part, None if run is None else run.key)
            if run is None or not store.is_repeated(key):
                parts.append(lay_part(part))
                continue
            make, tokens = functools.partial(lay_part, part), [run.source.token]
            parts.append(store.keep(key, frozenset(tokens), make, count))
        return graph.join(parts, with_shapes=with_shapes)

    if not runs or len(runs) < len(data):
        return lay()
    key = (content, with_shapes, *(run.key for run in runs.values()))
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
    device: DeviceStack,
    subround: plans.Subround,
    partials: Partials,
    type_spec: fl.Type,
) -> list[Plain]:
    """Return the plain partial of each subtree where no graph merges two partials."""
    embedded: list[flf.ExecutorValue] = [
        await device.create_value(
            tensor_structures.unflatten(iter(accumulators), type_spec), type_spec
        )
        for accumulators in partials.values()
    ]
    merged = await merge_subtrees(subround, embedded, device)
    return [await fetch(value) for value in merged]


def _merge_subtrees(
    device: DeviceStack,
    merger: "MergeKernel",
    subtrees: Sequence[merge_tree.Subtree],
    partials: Partials,
) -> list[Plain]:
    """Return the plain partial of each subtree, out of the partials inside of it."""
    merged: list[Plain] = []
    for subtree in subtrees:
        inside = [tree for tree in partials if subtree[0] <= tree[0] < subtree[1]]
        accumulators = [partials[tree] for tree in inside]
        for left, right, _ in merge_tree.merge_order(inside):
            pair = accumulators[left], accumulators[right]
            accumulators[left] = device.eager.run_kernel(merger, *pair)
        merged.append(merger.to_plain(accumulators[0]))
    return merged

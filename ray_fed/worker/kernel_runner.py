"""Runs the clients of a subround by its kernel, a TensorFlow graph for many clients.

    run_kernel    a subround: preceding work, shared values, selections, leaves
    run_leaves    the leaves, in groups whose data is copied at once
    LeafCalls     the calls of the graph, each of bounded time

A leaf is a few neighboring clients whose values are accumulated one after another. A
call of the graph runs several whole leaves, or some clients of one leaf. In the second
case, the next call resumes from the returned accumulators, with the same bits.
"""

import asyncio
import dataclasses
import functools
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.plan.plans as plans
from ray_fed.executors.interpretation import split_rows
from ray_fed.language import trees
from ray_fed.language.structs import Plain
from ray_fed.plan import diagnostics, merge_tree
from ray_fed.plan.outcomes import Evaluated
from ray_fed.plan.plans import Fallback
from ray_fed.values import read_limits, stored
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
    device: DeviceStack,
    subround: plans.Subround,
    arg: Plain,
    meanwhile: Callable[[], object] | None = None,
) -> Evaluated | Fallback:
    """Run a subround by its kernel, or return the reason why executors must do this.

    `arg` is the argument with the values of the subround's clients. `meanwhile` is a
    function to call while clients run, see `run_leaves`.
    """
    # A kernel may need clients' values from another kernel, which runs first.
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
    return await run_leaves(device, subround, inputs, data, meanwhile)


def _part(arg: Plain, path: plans.Path) -> ArgumentPart:
    return functools.reduce(operator.getitem, path, arg)


async def _compute_shared(
    device: DeviceStack, subround: plans.Subround, kernel: plans.Kernel, arg: Plain
) -> Sequence[Plain]:
    # Accumulators' initial values and constants for all clients are computed once, by a
    # graph if possible.
    parts = tuple(_part(arg, path) for path in kernel.parts)
    graph = device.eager.kernels.server(kernel.server)
    if not isinstance(graph, Fallback):
        try:
            arrays = device.eager.run_kernel(graph, [parts])
            return trees.nest(iter(arrays), graph.result)
        except Exception as error:  # noqa: BLE001 (executors do the work instead)
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
    # The graph runs once, for all different keys of all clients. A client's keys are
    # i32[keys].
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
    except Exception as error:
        if diagnostics.is_final(error):
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
"""Maximum bytes of clients' data to copy at once. Each copy has a fixed cost."""

Accumulators: TypeAlias = Sequence[Any]
"""The tensors (or arrays) of one partial result, in the order of its type."""

Stacked: TypeAlias = Sequence[Any]
"""The tensors of values that clients keep. The first dimension is the client."""


class FailedLeafError(Exception):
    """A call of the graph failed in the work of a client.

    `leaf` is the index in the cohort of the first leaf that failed, or None.
    """

    def __init__(self, leaf: int | None) -> None:
        super().__init__()
        self.leaf = leaf


Partials: TypeAlias = dict[merge_tree.Subtree, Accumulators]
"""The partial of each subtree. The subtrees are adjacent and in order."""


class LeafCalls:
    """Runs leaves of a subround in order, by calls of one graph.

    The bytes `content` identify the graph, to find its `Pace`. `inputs` are
    accumulators' initial values, and then constants for all clients. After calls,
    `stacked` has the values that clients keep, for each call.
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
        size = self.graph.bytes_of_partial  # None if unknown
        self._leaves_a_call = 1 if size is None else max(1, LAID_BYTES // max(1, size))
        self.stacked: list[Stacked] = []

    async def run(
        self, leaves: Sequence[range], first_leaf: int, laid: "LaidClients"
    ) -> Partials:
        """Run neighboring leaves, and return their partial results, in order.

        If the graph also merges, a partial may be the result of several leaves (a
        subtree of the merge tree).

        Args:
            leaves: Positions in `laid` of each leaf's clients.
            first_leaf: Index in the cohort of the first of these leaves.
            laid: Data of the clients, as tensors.

        Raises:
            FailedLeafError: A client's work failed.
        """
        partials: Partials = {}
        shape_of = self.graph.shaped.shape_of
        shapes = [shape_of(leaf, laid, self._leaf_size) for leaf in leaves]
        # A leaf can take several calls. It resumes from the accumulators of the last
        # call.
        accumulators: Accumulators = self._zeros
        start, done = leaves[0].start, 0
        while done < len(leaves):
            read_limits.check()
            await asyncio.sleep(0)  # a cancelled call ends here
            count = self._pace.count(leaves[-1].stop - start, self._call_s)
            # All leaves of a call start from the same accumulators. So a call that
            # resumes a leaf has only this leaf.
            goes_on = start > leaves[done].start
            # Take whole leaves of one shape, up to the limits of one call.
            whole: list[range] = []
            for leaf, shape in zip(leaves[done:], shapes[done:], strict=True):
                is_full = len(whole) == (1 if goes_on else self._leaves_a_call)
                if is_full or shape != shapes[done] or leaf.stop > start + count:
                    break
                whole.append(leaf)
            alike = dataclasses.replace(laid, shape=shapes[done])
            if not whole:
                # The next leaf takes longer than a call, so take some of its clients.
                count = max(1, count // self.graph.at_once) * self.graph.at_once
                whole = [range(start, min(start + count, leaves[done].stop))]
            whole[0] = range(start, whole[0].stop)
            stop = done + len(whole)
            subtrees = self._subtrees_of(first_leaf + done, first_leaf + stop)
            results = self._call(whole, subtrees, accumulators, alike)
            start = whole[-1].stop
            if start < leaves[stop - 1].stop:
                (accumulators,) = results
                continue
            of_leaves = dict(zip(subtrees, results, strict=True))
            # A sum is finite only if all its parts are finite. So a check of the sums
            # replaces a check of each client in the graph.
            are_checked = laid.are_checked or not self.graph.relies_on_sums
            if not are_checked and not _are_finite(results):
                of_leaves = await self._run_again(
                    leaves[done:stop], first_leaf + done, laid
                )
            partials |= of_leaves
            accumulators, done = self._zeros, stop
        return partials

    async def _run_again(
        self, leaves: Sequence[range], first_leaf: int, laid: "LaidClients"
    ) -> Partials:
        # Each leaf runs alone, and its clients are checked only if its own sum is not
        # finite. Otherwise its bits would depend on the other leaves of the call.
        if len(leaves) == 1:
            laid = dataclasses.replace(laid, are_checked=True)
            return await self.run(leaves, first_leaf, laid)
        partials: Partials = {}
        for index, leaf in enumerate(leaves, first_leaf):
            partials |= await self.run([leaf], index, laid)
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
    ) -> Sequence[Accumulators]:
        started = time.monotonic()
        try:
            results, stacked = self._run(
                leaves, subtrees, accumulators, self._constants, laid
            )
        except Exception as error:
            failed = self._find_failed(leaves, laid, subtrees[0][0])
            raise FailedLeafError(failed) from error
        self.stacked.append(stacked)
        num_clients = leaves[-1].stop - leaves[0].start
        if num_clients:
            self._pace.note(num_clients, time.monotonic() - started)
        return results

    def _find_failed(
        self, leaves: Sequence[range], laid: "LaidClients", first_leaf: int
    ) -> int | None:
        # The index in the cohort of the first leaf that fails if it runs alone.
        if len(leaves) == 1:
            return first_leaf
        checked = dataclasses.replace(laid, are_checked=True)
        for failed, leaf in enumerate(leaves, first_leaf):
            try:
                self._run([leaf], [(0, 1)], self._zeros, self._constants, checked)
            except Exception:  # noqa: BLE001 (any error of the leaf counts)
                return failed
        return None


def _are_finite(partials: Sequence[Accumulators]) -> bool:
    arrays = (array for partial in partials for array in partial)
    return all(np.isfinite(a).all() for a in arrays if a.dtype.kind in "fc")


async def run_leaves(
    device: DeviceStack,
    subround: plans.Subround,
    inputs: Sequence[Plain],
    data: Sequence[ClientValues],
    meanwhile: Callable[[], object] | None = None,
) -> Evaluated | Fallback:
    """Run the leaves of a subround by its kernel, or return why executors must do this.

    The result has the merged partial of each of `subround.subtrees` (if the plan has a
    merge), and then the values that clients keep. `inputs` are accumulators' initial
    values, and then constants. `data` has the values of all clients in order, for each
    part of the kernel's data. If the graph is new, `meanwhile` is called on another
    thread while clients run.
    """
    kernel, merge = cast("plans.Kernel", subround.kernel), subround.merge
    # If each leaf has one client, the graph needs no loop over clients.
    one_per_leaf = subround.clients_per_leaf == 1 and all(map(len, subround.leaves))
    kernels = device.eager.kernels
    graph = kernels.clients(
        kernel, merge, one_per_leaf=one_per_leaf, meanwhile=meanwhile
    )
    if isinstance(graph, Fallback):
        return graph
    content = b"%d" % one_per_leaf + kernel.content + (merge or b"")
    calls = LeafCalls(device, graph, content, list(inputs), subround)
    first, done = subround.leaves[0].start, 0
    partials: Partials = {}
    try:
        # Group by group, because copies of all clients' data may not fit in memory.
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
    except Exception as error:  # noqa: BLE001 (executors do the work instead)
        cause, leaf = error, None
        if isinstance(error, FailedLeafError):
            cause = error.__cause__
            if error.leaf is not None:
                leaf = error.leaf - subround.first_leaf
        # `evaluation` runs this leaf first without a graph, and so finds the client
        # whose work failed.
        if isinstance(cause, Fallback):
            return Fallback(cause.reason, leaf)
        if cause is not None and diagnostics.is_final(cause):
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
    """Return the data of clients as tensors, from a cache if possible.

    Only the tensors of a `ClientRun` are cached, because its key identifies its data.
    If all parts of the data are of this class, they are cached together, otherwise
    separately. Data in files is not cached, because files can change.
    """
    content = cast("plans.Kernel", subround.kernel).content
    # Shapes are needed only if they can decide which graph runs the clients.
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
        # The store does not keep a value of infinite size.
        return math.inf if have_files else laid.count_bytes()

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
    # Divides leaves into groups of at most `LAID_BYTES` of data.
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
    embedded: list[flf.ExecutorValue] = [
        await device.create_value(
            trees.unflatten(iter(accumulators), type_spec), type_spec
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
    merged: list[Plain] = []
    for subtree in subtrees:
        inside = [tree for tree in partials if subtree[0] <= tree[0] < subtree[1]]
        accumulators = [partials[tree] for tree in inside]
        for left, right, _ in merge_tree.merge_order(inside):
            pair = accumulators[left], accumulators[right]
            accumulators[left] = device.eager.run_kernel(merger, *pair)
        merged.append(merger.to_plain(accumulators[0]))
    return merged

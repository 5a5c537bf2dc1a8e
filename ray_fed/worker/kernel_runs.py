"""Runs the kernel of a subround over a leaf stack, leaf by leaf, in short calls.

Where this runs is where TensorFlow is: on a thread of this process, or in an actor.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar, cast

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.executors.scopes import ResolvedValue
from ray_fed.executors.threads import ThreadDelegatingExecutor
from ray_fed.language import blocks
from ray_fed.plan import merge_tree, plans
from ray_fed.values import components, stored, tensor_structures
from ray_fed.values.client_references import ClientMember, ClientRun
from ray_fed.values.lru_cache import LruCache
from ray_fed.worker.client_store import ClientStore
from ray_fed.worker.evaluation import KernelRan, KernelRunner, fetch, merge_subtrees
from ray_fed.worker.kernel_cache import KernelCache, Pace

flf = fl.framework
_T = TypeVar("_T")
_CACHED_BLOCKS = 128
"""Computations that one worker keeps parsed: parsing takes as long as small rounds."""

_LAID_BYTES = 128 * 2**20
"""Data of clients that a worker copies at once; laying it has a fixed cost."""


class KernelRun:
    """Runs leaves of a subround, one after another, with one kernel.

    Args:
        loaded: the graph and its pace.
        inputs: zeros and constants, plain.
        subround: whose leaves these are.
        check: called before each call; what it raises ends the run.
    """

    def __init__(
        self,
        loaded: tuple[Any, Pace],
        inputs: Sequence[Any],
        subround: plans.Subround,
        check: Callable[[], None],
    ) -> None:
        self._graph, self._pace = loaded
        self._zeros, self._constants = self._graph.inputs(inputs)
        self._call_s = subround.call_s
        self._leaf_size = subround.clients_per_leaf
        self._trees = subround.subtrees
        self._check = check
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
        return self._graph.lay(_lay(self._graph, kernel, data, store), clients)

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
            self._check()
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
                nodes = self._nodes(first_leaf + done, first_leaf + stop)
                found = self._run(taken, nodes, accumulators, alike, done)
                partials.extend(map(Partial, nodes, found))
                accumulators, start, done = self._zeros, taken[-1].stop, stop
            else:
                count = max(1, count // self._graph.at_once) * self._graph.at_once
                piece = range(start, min(start + count, leaves[done].stop))
                node = (first_leaf + done, first_leaf + done + 1)
                (accumulators,) = self._run([piece], [node], accumulators, alike, done)
                start = piece.stop
                if start == leaves[done].stop:
                    partials.append(Partial(node, accumulators))
                    accumulators, done = self._zeros, done + 1
        return partials

    def _nodes(self, first: int, stop: int) -> list[merge_tree.Subtree]:
        if not self._merges:
            return [(leaf, leaf + 1) for leaf in range(first, stop)]
        return [
            node
            for tree in self._trees
            for node in merge_tree.subtrees(first, stop, tree)
        ]

    def _run(
        self,
        leaves: Sequence[range],
        nodes: Sequence[merge_tree.Subtree],
        accumulators: Sequence[Any],
        laid: Any,
        index: int,
    ) -> list[Sequence[Any]]:
        started = time.monotonic()
        try:
            found, stacked = self._graph.run(
                leaves, nodes, accumulators, self._constants, laid
            )
        except Exception as error:
            raise FailedLeafError(self._find_failed(leaves, laid, index)) from error
        self._stacked.append(stacked)
        num_clients = leaves[-1].stop - leaves[0].start
        if num_clients:
            self._pace.note(num_clients, time.monotonic() - started)
        return found

    def _find_failed(
        self, leaves: Sequence[range], laid: Any, index: int
    ) -> int | None:
        """Return the index of the first of some leaves whose work raises, alone."""
        if len(leaves) == 1:
            return index
        for failed, leaf in enumerate(leaves, index):
            try:
                self._graph.run([leaf], [(0, 1)], self._zeros, self._constants, laid)
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
        node: the subtree.
        accumulators: tensors, or arrays.
    """

    node: merge_tree.Subtree
    accumulators: Sequence[Any]


async def run_kernel(
    executor: "LeafStack",
    subround: plans.Subround,
    inputs: Sequence[Any],
    data: Sequence[Sequence[Any]],
    check: Callable[[], None] = lambda: None,
) -> KernelRan | plans.NoKernel:
    """Return the partial of each of `subround.subtrees`.

    And what is kept of the clients.

    Args:
        executor: has kernels and clients, and merges what no graph merges.
        subround: with a kernel, and a merge.
        inputs: what `server` of the kernel returned, plain or of tensors.
        data: for each of `data` of the kernel the plain values of all clients of the
            subround, in order; or runs of clients, which stand for them.
        check: called before each call; what it raises ends the run.
    """
    kernel = cast("plans.Kernel", subround.kernel)
    kernels = executor.kernels
    merge = kernels.load_merge(cast("bytes", subround.merge))
    one_a_leaf = subround.clients_per_leaf == 1 and all(map(len, subround.leaves))
    loaded = kernels.load(kernel, merge, one_a_leaf=one_a_leaf)
    if isinstance(loaded, plans.NoKernel):
        return loaded
    run = KernelRun(loaded, list(inputs), subround, check)
    try:
        partials = await _run_groups(run, subround, data, executor.clients)
    except errors.ClusterError:
        raise
    except Exception as error:  # noqa: BLE001 (the interpreter will say what it is)
        cause = error.__cause__ if isinstance(error, FailedLeafError) else error
        leaf = getattr(error, "leaf", None)
        return plans.NoKernel(f"{type(cause).__name__} in a kernel", leaf)
    if isinstance(merge, plans.NoKernel):
        embedded: list[flf.ExecutorValue] = [
            await executor.create_value(
                tensor_structures.unflatten(iter(partial.accumulators), run.partial),
                run.partial,
            )
            for partial in partials
        ]
        merged = await merge_subtrees(subround, embedded, executor)
        found = [await fetch(value) for value in merged]
    else:
        partials = _merge_nodes(subround.subtrees, partials, merge)
        found = [
            loaded[0].nest(map(_computed, partial.accumulators)) for partial in partials
        ]
    return KernelRan(found, run.kept() if kernel.num_kept else [])


async def _run_groups(
    run: KernelRun,
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
    graph: Any, kernel: plans.Kernel, data: Sequence[Sequence[Any]], store: ClientStore
) -> Sequence[Any]:
    """Return the values of clients as tensors; those that were laid before are kept."""

    def make() -> Sequence[Any]:
        return graph.lay_values([store.read_all(members) for members in data])

    runs = [members for members in data if isinstance(members, ClientRun)]
    if not runs or len(runs) < len(data):
        return make()
    key = (kernel.content, *(run.key for run in runs))
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


def _merge_nodes(
    nodes: Sequence[merge_tree.Subtree], partials: Sequence[Partial], merge: Any
) -> list[Partial]:
    """Return the partial of each node, out of those of subtrees inside of it."""
    merged: list[Partial] = []
    for node in nodes:
        inside = [p for p in partials if node[0] <= p.node[0] < node[1]]
        held = [p.accumulators for p in inside]
        for left, right, _ in merge_tree.merge_order([p.node for p in inside]):
            held[left] = merge(held[left], held[right])
        merged.append(Partial(node, held[0]))
    return merged


def _try(graph: Any, *args: Any) -> Any:
    """Return the result of a graph at the server, or None where there is none."""
    if isinstance(graph, plans.NoKernel):
        return None
    try:
        tensors = graph(*args)
    except Exception:  # noqa: BLE001 (the executors will say what it is)
        return None
    return None if tensors is None else graph.nest(iter(tensors))


def _computed(value: Any) -> Any:
    """Return tensors in tuples, or an array, as a plain value."""
    if isinstance(value, tuple):
        return tuple(map(_computed, cast("tuple[Any, ...]", value)))
    return value.numpy() if hasattr(value, "numpy") else value


class LeafStack(ReferenceResolvingExecutor, KernelRunner):
    """A leaf stack that runs kernels beside the four verbs.

    Args:
        target_executor: of the stack; owned.
        device: name of its device; None leaves it to TensorFlow.
        client_bytes: of clients' data that is kept between rounds.
    """

    def __init__(
        self,
        target_executor: flf.Executor,
        device: str | None,
        client_bytes: int,
    ) -> None:
        super().__init__(target_executor)
        self.kernels = KernelCache(device)
        self.clients = ClientStore(client_bytes)
        self._blocks: LruCache[bytes, flf.ComputationBuildingBlock]
        self._blocks = LruCache(_CACHED_BLOCKS)

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> ResolvedValue:
        if isinstance(value, ClientMember):
            value = self.clients.read(value)
        if isinstance(value, stored.StoredComponents):
            value = components.join(value.components, fl.to_type(type_spec))
        return await super().create_value(value, type_spec)

    @override
    def parse(self, serialised: bytes) -> flf.ComputationBuildingBlock:
        """Return the block of a serialised computation, parsed when first asked for."""
        return self._blocks.get(serialised, lambda: blocks.parse_block(serialised))

    @override
    def run_at_server(self, function: bytes, argument: Any) -> Any:
        """Return what a serialised function comes to as tensors in tuples, or None.

        None where only executors can do it, or are to say what it raises.

        Args:
            function: of values at the server.
            argument: plain, or tensors in tuples.
        """
        graph = self.kernels.load_server(function)
        return _try(graph, [argument])

    @override
    def run_finish(
        self, finish: plans.Finish, partials: Sequence[Any], before: Sequence[Any]
    ) -> tuple[Any] | None:
        """Return the result of a finish, plain; or None, as `run_at_server` does."""
        if finish.merge is None:
            return None
        graph = self.kernels.load_finish(finish, len(before))
        pairs = [
            (left, right) for left, right, _ in merge_tree.merge_order(finish.subtrees)
        ]
        found = _try(graph, before, partials, pairs)
        return None if found is None else (_computed(found),)

    @override
    async def run_kernel(
        self,
        subround: plans.Subround,
        inputs: Sequence[Any],
        data: Sequence[Sequence[Any]],
        check: Callable[[], None] = lambda: None,
    ) -> KernelRan | plans.NoKernel:
        """See `run_kernel` of the module."""
        return await run_kernel(self, subround, inputs, data, check)

    @override
    def close(self) -> None:
        self.kernels.close()
        self.clients.close()
        self._blocks.clear()
        super().close()


class ThreadedLeaf(ThreadDelegatingExecutor):
    """A leaf stack on a thread of its own, and what is to run there beside it.

    Args:
        leaf: owned.
        name: of the thread.
    """

    def __init__(self, leaf: LeafStack, name: str) -> None:
        super().__init__(leaf, name)
        self.leaf = leaf

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the thread of the leaf stack, which it may call freely."""
        return await self._delegate(work)

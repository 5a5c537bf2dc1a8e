"""Folds leaf after leaf by calls of one graph, each of which takes a bounded time.

A call covers whole leaves where they fit, or some clients of one leaf: then the next
call goes on from the accumulators that this one returned, with the same bits.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import federated_language as fl

from ray_fed.language.structs import Plain
from ray_fed.plan import merge_tree, plans
from ray_fed.values import read_limits
from ray_fed.worker.device_stack import DeviceStack

if TYPE_CHECKING:
    from ray_fed.tensorflow.kernels.client_kernel import ClientKernel
    from ray_fed.tensorflow.kernels.laid_clients import LaidClients, LaidData

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

"""The work of many clients and its accumulation as one graph, with values in and out.

    lay_part      plain data of clients  -> tensors, for any round     client_tensors
    join          all parts of the data                                laid_clients
    lay           the random states of one round
    inputs        plain zeros, constants -> tensors
    run           tensors -> partials of subtrees                      leaf_loops
    to_plain      partials -> plain values

A call may stop at any client and the next go on from there: the bits are the same.
"""

import functools
from collections.abc import Sequence
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

from ray_fed.language.structs import Plain
from ray_fed.plan import diagnostics, merge_tree, plans, random_keys
from ray_fed.tensorflow.external import held_rows
from ray_fed.tensorflow.kernels.client_tensors import LaidPart
from ray_fed.tensorflow.kernels.client_work import ClientWork, refuse_many
from ray_fed.tensorflow.kernels.grafts import Grafts
from ray_fed.tensorflow.kernels.graph_functions import as_tensors
from ray_fed.tensorflow.kernels.graph_values import flatten
from ray_fed.tensorflow.kernels.laid_clients import LaidClients, LaidData, UniformShape
from ray_fed.tensorflow.kernels.leaf_loops import LeafFold, LeafLoop
from ray_fed.tensorflow.kernels.merge_kernels import MergeKernel
from ray_fed.tensorflow.kernels.shaped_graphs import ShapedGraphs
from ray_fed.tensorflow.loading import normal
from ray_fed.values import tensor_structures
from ray_fed.values.stored import ClientValues

_CACHED_INDICES = 64
"""Cuts of cohorts whose indices a kernel keeps as tensors."""

_OF_TYPE = tf.Tensor, np.ndarray, np.generic
"""Plain values of tensors, which were checked against their types before."""


class ClientKernel:
    """The graph of one `plans.Kernel`, and its values in and out.

    Args:
        kernel: what the compiler planned.
        merge: of two partials; None: none are merged here.
        device: name of the device to run on; None leaves it to TensorFlow.
        one_a_leaf: whether each leaf is of one client, which spares the inner loop.

    Attributes:
        merges: whether it merges partials.
        at_once: how many clients of a leaf of one shape work at once; a call that
            covers some of a leaf covers a multiple of these.
        nest: returns the plain value of a partial's tensors.

    Raises:
        UnfitError: the work needs what a kernel cannot do.
    """

    def __init__(
        self,
        kernel: plans.Kernel,
        merge: MergeKernel | None,
        device: str | None,
        *,
        one_a_leaf: bool = False,
    ) -> None:
        self._merge, self._device = merge, device
        self.merges = merge is not None
        self.at_once = kernel.vectorised_clients
        self._client = client = ClientWork(kernel)
        self.nest = tensor_structures.nester(client.partial)
        refuse_many(len(client.specs), "to accumulate")
        given = [*client.partial.items(), *client.constants.items()]
        self._given = fl.StructType([type_spec for _, type_spec in given])
        self._loop = loop = LeafLoop(client, merge)
        with tf.device(device):
            fold = loop.fold_one if one_a_leaf else loop.fold_any
            self._function = loop.trace(LeafFold(fold))
            self._shaped = ShapedGraphs(kernel, client, loop, device)
            loop.work_grafts.create()
            loop.fold_grafts.create()
            self._no_states = tf.zeros([0, 0, random_keys.STATE_SIZE], tf.int64)
        # A cohort is cut alike from round to round.
        self._indices = functools.lru_cache(maxsize=_CACHED_INDICES)(
            functools.partial(_make_indices, device)
        )

    @property
    def may_be_shared(self) -> bool:
        """Whether several threads may run it at once, as nothing of it changes."""
        grafts = self._loop.work_grafts, self._loop.fold_grafts
        has_state = any(each.has_state for each in grafts)
        merge_has_state = self._merge is not None and self._merge.has_state
        return not self._shaped.is_asked_for and not has_state and not merge_has_state

    def close(self) -> None:
        """Free what the graph keeps between calls."""
        self._loop.work_grafts.close()
        self._loop.fold_grafts.close()

    def refuse_shapes(self, leaf_size: int) -> str | None:
        """Return why the shapes of clients decide nothing; None where they do.

        Args:
            leaf_size: how many clients the leaves of the cohort have.
        """
        return self._shaped.refuse_shapes(leaf_size)

    def lay_part(
        self, part: int, values: ClientValues, keep: held_rows.Keep
    ) -> LaidPart:
        """Return one part of some clients' data as tensors, to be used in any round.

        Args:
            part: index in `plans.Kernel.data`.
            values: the clients' plain values there, in order.
            keep: keeps what files hold.
        """
        with tf.device(self._device):
            return self._client.layout.lay_part(part, values, keep)

    def join(self, parts: Sequence[LaidPart], *, with_shapes: bool) -> LaidData:
        """Return some clients' data, all of whose parts were laid.

        Args:
            parts: in the order of `plans.Kernel.data`.
            with_shapes: whether `shape_of` is to know the shapes of the clients.
        """
        with tf.device(self._device):
            return LaidData.of(self._client.layout, parts, with_shapes=with_shapes)

    def shape_of(
        self, leaf: range, laid: LaidClients, leaf_size: int
    ) -> UniformShape | None:
        """Return the shape of all clients of a leaf, where `run` is to know of it.

        Args:
            leaf: positions of its clients, all of them, among those that were laid.
            laid: what `lay` returned.
            leaf_size: how many clients the leaves of the cohort have.
        """
        return self._shaped.shape_of(leaf, laid, leaf_size)

    def lay(self, data: LaidData, clients: range) -> LaidClients:
        """Return some clients' data as `run` takes it in this round.

        Args:
            data: what `join` returned.
            clients: their places among those that `random_keys.at_client` counts.
        """
        states = self._states(self._loop.work_grafts, clients)
        with random_keys.at_step("accumulate"):
            fold_states = self._states(self._loop.fold_grafts, clients)
        return LaidClients((states, fold_states), data)

    def _states(self, grafts: Grafts, clients: range) -> tf.Tensor:
        """Return the states of random ops, i64[clients, sites, 3]."""
        if not grafts.sites:
            return self._no_states
        shape = len(clients), len(grafts.sites), random_keys.STATE_SIZE
        states = np.empty(shape, np.int64)
        for of_client, position in zip(states, clients, strict=True):
            with random_keys.at_client(position):
                for index, site in enumerate(grafts.sites):
                    of_client[index] = random_keys.state(site.content, site.path)
        with tf.device(self._device):
            return tf.constant(states)

    def inputs(self, given: Sequence[Plain]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return zeros and constants, plain or tensors, as `run` takes them.

        Args:
            given: what `server` of the kernel returned: the zero of each aggregation,
                then what is the same for all clients.
        """
        values = tensor_structures.flatten(tuple(given))
        zeros, constants = self._loop.specs, self._loop.constant_specs
        with tf.device(self._device):
            if all(isinstance(value, _OF_TYPE) for value in values):
                tensors = as_tensors(values, [*zeros, *constants])
            else:
                tensors = flatten(normal.normalise(given, self._given))
        return tensors[: len(zeros)], tensors[len(zeros) :]

    def run(
        self,
        leaves: Sequence[range],
        nodes: Sequence[merge_tree.Subtree],
        accumulators: Sequence[Any],
        constants: Sequence[tf.Tensor],
        laid: LaidClients,
    ) -> tuple[list[list[Any]], list[tf.Tensor]]:
        """Fold clients that were laid, and merge inside of subtrees.

        Args:
            leaves: positions of each leaf's clients among these; adjacent.
            nodes: the subtrees to return, by index among all leaves.
            accumulators: before the first client of each leaf: tensors, or what this
                method returned.
            constants: the same for all.
            laid: what `lay` returned, of the shape that all of the leaves have.

        Returns:
            The accumulators of each subtree, as numpy values that are views of one
            transfer; and what is kept of these clients, stacked.
        """
        grafts = self._loop.work_grafts, self._loop.fold_grafts
        diagnostics.note([note for each in grafts for note in each.unkeyed])
        size = len(self._loop.specs)
        with tf.device(self._device):
            arguments = [
                *self._indices(tuple(leaves), tuple(nodes)),
                *laid.states,
                *as_tensors(accumulators, self._loop.specs),
                *constants,
                *laid.data.tensors,
            ]
            results = self._shaped.call(laid.shape, arguments, self._function)
            self._shaped.note_refusals()
            stacked = [tensor.numpy() for tensor in results[:size]]
            partials = [[array[i] for array in stacked] for i in range(len(nodes))]
            return partials, results[size:]

    @functools.cached_property
    def bytes_of_partial(self) -> int | None:
        """Bytes of one leaf's accumulators; None where their types do not say."""
        specs = self._loop.specs
        is_known = all(spec.shape.is_fully_defined() for spec in specs)
        if not is_known or any(spec.dtype == tf.string for spec in specs):
            return None
        return sum(spec.shape.num_elements() * spec.dtype.size for spec in specs)

    def kept(self, stacked: Sequence[Sequence[tf.Tensor]]) -> list[list[Plain]]:
        """Return the plain values of each of what is kept, in client order.

        Args:
            stacked: what calls of `run` kept, in order.
        """
        return self._client.kept_values(stacked)

    @property
    def type_signature(self) -> fl.FunctionType:
        """Of a leaf: beside accumulators and constants it takes clients, laid out."""
        taken = [(None, self._client.partial), (None, self._client.constants)]
        return fl.FunctionType(fl.StructType(taken), self._client.partial)

    def to_plain(self, returned: tuple[list[list[Any]], list[tf.Tensor]]) -> Plain:
        """Return the plain partials that `run` returned, and what is kept."""
        partials, stacked = returned
        return [self.nest(iter(partial)) for partial in partials], self.kept([stacked])

    @property
    def partial(self) -> fl.StructType:
        """The type of a partial."""
        return self._client.partial


def _make_indices(
    device: str | None, leaves: tuple[range, ...], nodes: tuple[merge_tree.Subtree, ...]
) -> tuple[tf.Tensor, ...]:
    """Return the bounds of leaves, the merges inside of nodes, and what is left."""
    roots = [start - nodes[0][0] for start, _ in nodes]
    merges = [
        (root + left, root + right)
        for root, node in zip(roots, nodes, strict=True)
        for left, right, _ in merge_tree.merge_order([(i, i + 1) for i in range(*node)])
    ]
    with tf.device(device):
        return (
            tf.constant([(leaf.start, leaf.stop) for leaf in leaves], tf.int64),
            tf.constant(merges, tf.int32, [len(merges), 2]),
            tf.constant(roots, tf.int32),
        )

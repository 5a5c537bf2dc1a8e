"""Graphs that fold the clients of leaf after leaf, and merge the partials.

    for each leaf                begins at zero
        for each of its clients  data sliced: no padding, no second trace
            work, accumulate     constants are the same for all, outside of the loops
    for each pair                merge, as the tree of leaves has it
        -> partials of subtrees; what is kept of each client, stacked

One iteration at a time, so that variables and random states are those of one client.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ray_fed.language.structs import Struct
from ray_fed.plan import random_keys
from ray_fed.tensorflow.kernels.client_work import ClientWork, specs_of
from ray_fed.tensorflow.kernels.grafts import Grafts
from ray_fed.tensorflow.kernels.graph_functions import GraphFunction, as_graph, before
from ray_fed.tensorflow.kernels.graph_values import flatten
from ray_fed.tensorflow.kernels.merge_kernels import MergeKernel, empty_array, merge_all
from ray_fed.tensorflow.kernels.shaped_clients import flatten_all
from ray_fed.values import tensor_structures

_INDEX = tf.TensorSpec([], tf.int64)
_PAIRS = {dtype: tf.TensorSpec([None, 2], dtype) for dtype in (tf.int32, tf.int64)}
_INDICES = tf.TensorSpec([None], tf.int32)

ClientBounds = tuple[tf.Tensor, tf.Tensor]
"""The first client of a leaf, and the one after its last client: i64[] each."""


@dataclasses.dataclass(frozen=True)
class LoopInputs:
    """What the loops of a kernel take from outside, as tensors of its graph.

    Attributes:
        first: the first client of this call.
        work_states: see `LaidClients.states`.
        fold_states: see `LaidClients.states`.
        constants: a struct.
        data: the data of the clients.
    """

    first: tf.Tensor
    work_states: tf.Tensor
    fold_states: tf.Tensor
    constants: Struct
    data: Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class LeafFold:
    """A way to fold the clients of one leaf.

    Attributes:
        fold: takes the clients, then accumulators and arrays of what is kept, as they
            are before these clients; returns a tensor that the next leaf waits for,
            then accumulators and arrays as they are after these clients.
        prepare: returns the data of all clients as `fold` takes it, once a call.
    """

    fold: Callable[[ClientBounds, Sequence[Any], LoopInputs], list[Any]]
    prepare: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] = list


class LeafLoop:
    """Builds the graphs of one kernel.

    Args:
        client: what is done with each client.
        merge: of two partials; None: no partials are merged in the graph.

    Attributes:
        specs: of the accumulators.
        constant_specs: of the constants.
        work_grafts: the computations that were put in as clients' work.
        fold_grafts: the computations that were put in to accumulate.
    """

    def __init__(self, client: ClientWork, merge: MergeKernel | None) -> None:
        self._client, self._merge = client, merge
        self.specs = client.specs
        self.constant_specs = specs_of(client.constants)
        self.work_grafts, self.fold_grafts = Grafts(), Grafts()

    def trace(self, leaf_fold: LeafFold) -> GraphFunction:
        """Return the graph that folds the clients of each leaf in one way."""
        build = functools.partial(self._build, leaf_fold)
        try:
            return as_graph(build, self._signature())
        finally:
            self.work_grafts.leave_graph()
            self.fold_grafts.leave_graph()

    def _signature(self) -> list[tf.TensorSpec]:
        states = tf.TensorSpec([None, None, random_keys.STATE_SIZE], tf.int64)
        return [
            *(_PAIRS[tf.int64], _PAIRS[tf.int32], _INDICES, states, states),
            *(*self.specs, *self.constant_specs),
            *self._client.layout.specs,
        ]

    def _build(
        self,
        leaf_fold: LeafFold,
        bounds: tf.Tensor,
        merges: tf.Tensor,
        roots: tf.Tensor,
        work_states: tf.Tensor,
        fold_states: tf.Tensor,
        *tensors: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Fold leaf after leaf, merge what is to be merged, return what is left."""
        size = len(self.specs)
        zeros, rest = tensors[:size], tensors[size:]
        num_constants = len(self.constant_specs)
        constants = iter(rest[:num_constants])
        given = LoopInputs(
            bounds[0, 0],
            work_states,
            fold_states,
            tensor_structures.unflatten(constants, self._client.constants),
            leaf_fold.prepare(rest[num_constants:]),
        )
        starts, stops = tf.unstack(bounds, axis=1)
        num_leaves = tf.shape(bounds)[0]

        def fold(leaf: tf.Tensor, *carried: Any) -> list[Any]:
            clients = tf.gather(starts, leaf), tf.gather(stops, leaf)
            end, *folded = leaf_fold.fold(clients, [*zeros, *carried[size:]], given)
            written = [
                array.write(leaf, tensor)
                for array, tensor in zip(carried[:size], folded[:size], strict=True)
            ]
            with tf.control_dependencies([end]):
                return [leaf + 1, *written, *folded[size:]]

        partials = [empty_array(spec, num_leaves) for spec in self.specs]
        kept = self._kept_arrays(bounds[-1, 1] - given.first)
        _, *held = tf.while_loop(
            before(num_leaves),
            fold,
            [tf.constant(0), *partials, *kept],
            shape_invariants=[
                tf.TensorShape([]),
                *(array.flow.shape for array in [*partials, *kept]),
            ],
            parallel_iterations=1,
        )
        partials = held[:size]
        if self._merge is not None:
            partials = merge_all(self._merge, merges, partials)
        return [
            *(array.gather(roots) for array in partials),
            *(array.stack() for array in held[size:]),
        ]

    def fold_any(
        self, clients: ClientBounds, held: Sequence[Any], given: LoopInputs
    ) -> list[Any]:
        """Fold any number of clients, of any shapes: see `LeafFold.fold`."""

        def step(index: tf.Tensor, *carried: Any) -> list[Any]:
            return self._step(index, carried, given)

        shapes = [spec.shape for spec in self.specs]
        kept_shapes = [array.flow.shape for array in held[len(self.specs) :]]
        first, stop = clients
        return tf.while_loop(
            before(stop),
            step,
            [first, *held],
            shape_invariants=[_INDEX.shape, *shapes, *kept_shapes],
            parallel_iterations=1,
        )

    def fold_one(
        self, clients: ClientBounds, held: Sequence[Any], given: LoopInputs
    ) -> list[Any]:
        """Do what `fold_any` does, for exactly one client: without the inner loop."""
        return self._step(clients[0], held, given)

    def _step(
        self, index: tf.Tensor, carried: Sequence[Any], given: LoopInputs
    ) -> list[Any]:
        """Do and accumulate the work of one client; first the next client's index."""
        size = len(self.specs)
        accumulators, arrays = carried[:size], carried[size:]
        self.work_grafts.ends = []
        self.work_grafts.use_states(lambda site: given.work_states[index, site])
        self.fold_grafts.use_states(lambda site: given.fold_states[index, site])
        member = self._client.layout.member(given.data, index)
        constants = flatten(given.constants)
        worked = self._client.work(self.work_grafts, constants, member)
        count = len(worked) - len(self._client.kept)
        position = tf.cast(index - given.first, tf.int32)
        outside = flatten_all(worked[count:])
        written = [
            array.write(position, tensor)
            for array, tensor in zip(arrays, outside, strict=True)
        ]
        inside = flatten_all(worked[:count])
        added = self._client.fold(self.fold_grafts, accumulators, inside, constants)
        with tf.control_dependencies(self.work_grafts.ends):
            following = index + 1
        return [following, *added, *written]

    def _kept_arrays(self, count: tf.Tensor) -> list[Any]:
        return [
            empty_array(spec, tf.cast(count, tf.int32))
            for spec in specs_of(self._client.kept)
        ]

"""The work of many clients and its accumulation as one graph, with values in and out.

    lay_part      plain data of clients  -> tensors, for any round     ClientLayout
    join          all parts of the data                                LaidData
    lay           the random states of one round
    inputs        plain zeros, constants -> tensors
    run           tensors -> partials of subtrees                      LeafLoop

A call may stop at any client and the next go on from there: the bits are the same.

    for each leaf                begins at zero
        for each of its clients  data sliced: no padding, no second trace
            work, accumulate     constants are the same for all, outside of the loops
    for each pair                merge, as the tree of leaves has it
        -> partials of subtrees; what is kept of each client, stacked

One iteration at a time, so that variables and random states are those of one client.

A leaf whose clients are all of one shape may be compiled by XLA, or fold several
clients at once. Settings, the rule in `jit` and what the work does decide; a leaf that
gets no graph of its own is folded by the graph for clients of any shape, and the reason
is noted.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

import ray_fed.plan.plans as plans
import ray_fed.tensorflow.external_data as external_data
from ray_fed.language import blocks, structs, type_checks
from ray_fed.language.structs import Plain, Struct
from ray_fed.plan import diagnostics, merge_tree, random_keys
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow import normal_forms
from ray_fed.tensorflow.kernels import jit
from ray_fed.tensorflow.kernels.client_batches import (
    ClientWork,
    LaidClients,
    LaidData,
    LaidPart,
    ShapedClients,
    UniformShape,
    Window,
    flatten_all,
)
from ray_fed.tensorflow.kernels.graph_builder import (
    GraphBuilder,
    GraphImporter,
    flatten,
    parameter_of,
    refuse_many,
    specs_of,
)
from ray_fed.tensorflow.kernels.graph_functions import (
    GraphFunction,
    as_graph,
    as_tensors,
    before,
)
from ray_fed.values import tensor_structures
from ray_fed.values.stored import ClientValues
from ray_fed.values.tensor_structures import nester, unflatten


class MergeKernel:
    """The graph that merges two partials.

    Args:
        merge: serialised <U, U> -> U.
        device: name of the device to run on; None leaves it to TensorFlow.

    Attributes:
        may_be_shared: whether several threads may run it at once.
        partial: type of a partial.

    Raises:
        Fallback: the merge draws random numbers, or does what a graph cannot do:
            executors run it, each merge with the key of its subtree.
    """

    may_be_shared = True

    def __init__(self, merge: bytes, device: str | None) -> None:
        self._merge = blocks.parse_block(merge)
        self._pair = type_checks.struct_type(parameter_of(self._merge))
        self.partial = self._pair[0]
        self._nest = nester(self.partial)
        self._device = device
        with tf.device(device):
            self._specs = specs_of(self._pair)
            self._function = as_graph(self.trace, self._specs)

    def trace(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Return the accumulators of two partials merged, inside of a graph."""
        pair = unflatten(iter(tensors), self._pair)
        return flatten(GraphBuilder(GraphImporter()).call(self._merge, pair))

    def run(self, left: Sequence[Any], right: Sequence[Any]) -> list[tf.Tensor]:
        """Return the accumulators of two partials, tensors or arrays, merged."""
        with tf.device(self._device):
            return self._function(as_tensors([*left, *right], self._specs))

    def to_plain(self, returned: Sequence[Any]) -> structs.Plain:
        """Return the plain value of a partial's tensors, or arrays."""
        return self._nest(
            leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf for leaf in returned
        )


def merge_all(
    merge: MergeKernel, pairs: tf.Tensor, partials: Sequence[Any]
) -> list[Any]:
    """Merge partials inside of a graph, each pair into the place of its left one.

    Args:
        merge: of two partials.
        pairs: indices of left and right, i32[pairs, 2], in order.
        partials: a TensorArray for each tensor of a partial.
    """
    sides = tf.unstack(pairs, axis=1)

    def step(index: tf.Tensor, *arrays: Any) -> list[Any]:
        left, right = (tf.gather(side, index) for side in sides)
        merged = merge.trace(
            *(array.read(left) for array in arrays),
            *(array.read(right) for array in arrays),
        )
        written = zip(arrays, merged, strict=True)
        return [index + 1, *(array.write(left, tensor) for array, tensor in written)]

    _, *merged = tf.while_loop(
        before(tf.shape(pairs)[0]),
        step,
        [tf.constant(0), *partials],
        parallel_iterations=1,
    )
    return merged


def empty_array(spec: tf.TensorSpec, size: Any) -> Any:
    """Return an array inside of a graph whose elements may be read many times."""
    return tf.TensorArray(
        spec.dtype, size, element_shape=spec.shape, clear_after_read=False
    )


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
        work_importer: the computations that were put in as clients' work.
        fold_importer: the computations that were put in to accumulate.
    """

    def __init__(self, client: ClientWork, merge: MergeKernel | None) -> None:
        self._client, self._merge = client, merge
        self.specs = client.specs
        self.constant_specs = specs_of(client.constants)
        self.work_importer, self.fold_importer = GraphImporter(), GraphImporter()

    def trace(self, leaf_fold: LeafFold) -> GraphFunction:
        """Return the graph that folds the clients of each leaf in one way."""
        build = functools.partial(self._build, leaf_fold)
        try:
            return as_graph(build, self._signature())
        finally:
            self.work_importer.leave_graph()
            self.fold_importer.leave_graph()

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
        inputs = LoopInputs(
            bounds[0, 0],
            work_states,
            fold_states,
            unflatten(constants, self._client.constants),
            leaf_fold.prepare(rest[num_constants:]),
        )
        starts, stops = tf.unstack(bounds, axis=1)
        num_leaves = tf.shape(bounds)[0]

        def fold(leaf: tf.Tensor, *carried: Any) -> list[Any]:
            clients = tf.gather(starts, leaf), tf.gather(stops, leaf)
            # Each leaf begins at zero; what is kept of clients goes on to the next.
            end, *folded = leaf_fold.fold(clients, [*zeros, *carried[size:]], inputs)
            written = [
                array.write(leaf, tensor)
                for array, tensor in zip(carried[:size], folded[:size], strict=True)
            ]
            # The next leaf begins once the last client of this one is done.
            with tf.control_dependencies([end]):
                return [leaf + 1, *written, *folded[size:]]

        partials = [empty_array(spec, num_leaves) for spec in self.specs]
        num_clients = tf.cast(bounds[-1, 1] - inputs.first, tf.int32)
        kept = [empty_array(s, num_clients) for s in specs_of(self._client.kept)]
        _, *arrays = tf.while_loop(
            before(num_leaves),
            fold,
            [tf.constant(0), *partials, *kept],
            shape_invariants=[
                tf.TensorShape([]),
                *(array.flow.shape for array in [*partials, *kept]),
            ],
            parallel_iterations=1,
        )
        # Merged in the same call, partials need not leave the graph one by one.
        partials = arrays[:size]
        if self._merge is not None:
            partials = merge_all(self._merge, merges, partials)
        return [
            *(array.gather(roots) for array in partials),
            *(array.stack() for array in arrays[size:]),
        ]

    def fold_clients(
        self, clients: ClientBounds, initial: Sequence[Any], inputs: LoopInputs
    ) -> list[Any]:
        """Fold any number of clients, of any shapes: see `LeafFold.fold`."""

        def step(index: tf.Tensor, *carried: Any) -> list[Any]:
            return self._step(index, carried, inputs)

        shapes = [spec.shape for spec in self.specs]
        kept_shapes = [array.flow.shape for array in initial[len(self.specs) :]]
        first, stop = clients
        return tf.while_loop(
            before(stop),
            step,
            [first, *initial],
            shape_invariants=[_INDEX.shape, *shapes, *kept_shapes],
            parallel_iterations=1,
        )

    def fold_client(
        self, clients: ClientBounds, initial: Sequence[Any], inputs: LoopInputs
    ) -> list[Any]:
        """Do what `fold_clients` does, for exactly one client: without a loop."""
        return self._step(clients[0], initial, inputs)

    def _step(
        self, index: tf.Tensor, carried: Sequence[Any], inputs: LoopInputs
    ) -> list[Any]:
        """Do and accumulate the work of one client; first the next client's index."""
        size = len(self.specs)
        accumulators, arrays = carried[:size], carried[size:]
        self.work_importer.ends = []
        self.work_importer.use_states(lambda site: inputs.work_states[index, site])
        self.fold_importer.use_states(lambda site: inputs.fold_states[index, site])
        member = self._client.layout.member(inputs.data, index)
        constants = flatten(inputs.constants)
        worked = self._client.work(self.work_importer, constants, member)
        count = len(worked) - len(self._client.kept)
        position = tf.cast(index - inputs.first, tf.int32)
        outside = flatten_all(worked[count:])
        written = [
            array.write(position, tensor)
            for array, tensor in zip(arrays, outside, strict=True)
        ]
        inside = flatten_all(worked[:count])
        added = self._client.fold(self.fold_importer, accumulators, inside, constants)
        with tf.control_dependencies(self.work_importer.ends):
            following = index + 1
        return [following, *added, *written]


@dataclasses.dataclass(frozen=True)
class _ShapedGraph:
    """The graph for leaves of one shape.

    Attributes:
        function: None where the graph for clients of any shape folds these leaves.
        not_jit: why XLA does not compile it; None where XLA does.
    """

    function: GraphFunction | None
    not_jit: str | None


class ShapedGraphs:
    """The graphs of one kernel by shape, each built when first needed.

    Args:
        kernel: its options `jit` and `vectorised_clients` count here.
        client: what is done with each client.
        loop: builds the graphs.
        device: name of the device to run on; None leaves it to TensorFlow.
    """

    def __init__(
        self,
        kernel: plans.Kernel,
        client: ClientWork,
        loop: LeafLoop,
        device: str | None,
    ) -> None:
        self._client, self._loop, self._device = client, loop, device
        self._jit, self._at_once = kernel.jit, kernel.vectorised_clients
        self._ops = loop.work_importer.ops | loop.fold_importer.ops
        self._never_jit = "off" if kernel.jit == "off" else None
        if kernel.jit == "auto":
            self._never_jit = jit.refuse_ops(self._ops, jit.kind_of(device))
        self._refusals: set[str] = set()
        self._graphs: dict[UniformShape, _ShapedGraph] = {}
        self._compiled: set[UniformShape] = set()
        self._lock = threading.Lock()

    @property
    def is_asked_for(self) -> bool:
        """Whether settings ask for other graphs than that of clients of any shape."""
        return self._jit == "on" or self._at_once > 1

    def refuse_shapes(self, leaf_size: int) -> str | None:
        """Return why the shapes of clients decide nothing; None where they do.

        Args:
            leaf_size: how many clients the leaves of the cohort have.
        """
        if self._at_once > 1:
            return None
        if self._never_jit is not None or self._jit == "on":
            return self._never_jit
        return jit.refuse_window(Window.of(leaf_size).size)

    def shape_of(
        self, leaf: range, laid: LaidClients, leaf_size: int
    ) -> UniformShape | None:
        """Return the shape of a leaf's clients, where there is a graph for it.

        Args:
            leaf: positions of all clients of the leaf among those that were laid.
            laid: the clients.
            leaf_size: how many clients the leaves of the cohort have.
        """
        kinds = laid.data.kinds[leaf.start : leaf.stop]
        is_mixed = len(laid.data.shapes) > 1 and (kinds != kinds[:1]).any()
        if is_mixed:
            reason = "clients of a leaf have data of several shapes"
            self._note_off(reason)
            if self.is_asked_for:
                diagnostics.note([diagnostics.WorkUnshaped(reason)])
            return None
        of_clients = laid.data.shapes[kinds[0]] if len(kinds) else None
        if of_clients is None:
            if leaf:
                refused = self.refuse_shapes(leaf_size)
                self._note_off(refused or "data without one shape")
            return None
        shape = UniformShape(of_clients, Window.of(leaf_size))
        with self._lock:  # other threads may run this kernel, too
            if shape not in self._graphs:
                self._graphs[shape] = self._specialise(shape)
        graph = self._graphs[shape]
        if graph.not_jit is not None:
            self._note_off(graph.not_jit)
        return None if graph.function is None else shape

    def call(
        self,
        shape: UniformShape | None,
        arguments: list[tf.Tensor],
        for_any_shape: GraphFunction,
    ) -> list[tf.Tensor]:
        """Call the graph for leaves of a shape.

        Args:
            shape: what `shape_of` returned for each of the leaves.
            arguments: of the graph.
            for_any_shape: the graph to call where there is none for the shape.
        """
        graph = None if shape is None else self._graphs[shape]
        if shape is None or graph is None or graph.function is None:
            return for_any_shape(arguments)
        try:
            results = graph.function(arguments)
        except tf.errors.ResourceExhaustedError:
            raise
        except tf.errors.OpError as error:
            if graph.not_jit is not None or shape in self._compiled:
                raise
            # XLA compiles at the first call. What it refuses, it always refuses.
            reason = f"{type(error).__name__} of XLA"
            self._graphs[shape] = self._refuse(reason)
            self._note_off(reason)
            return for_any_shape(arguments)
        self._compiled.add(shape)
        if self._jit == "auto" and graph.not_jit is None:
            diagnostics.note([diagnostics.JitDecision(jit=True, reason=jit.GAIN)])
        return results

    def note_refusals(self) -> None:
        """Note why leaves of one shape got no graph although settings ask for it."""
        diagnostics.note(map(diagnostics.WorkUnshaped, tuple(self._refusals)))

    def _note_off(self, reason: str) -> None:
        if self._jit == "auto":
            diagnostics.note([diagnostics.JitDecision(jit=False, reason=reason)])

    def _refuse(self, reason: str) -> _ShapedGraph:
        if self.is_asked_for:
            self._refusals.add(reason)
        return _ShapedGraph(None, reason)

    def _refuse_jit(self, shape: UniformShape) -> str | None:
        """Return why XLA does not compile leaves of a shape; None where it does."""
        if self._jit != "auto" or self._never_jit is not None:
            return self._never_jit
        specs = [*self._loop.specs, *self._loop.constant_specs]
        shapes = [spec.shape.as_list() if spec.shape else None for spec in specs]
        extents = self._client.layout.extents(shape.clients)
        all_shapes = [*shapes, *(extent.shape for extent in extents)]
        kind = jit.kind_of(self._device)
        return jit.refuse_sizes(self._ops, shape.window.size, all_shapes, kind)

    def _specialise(self, shape: UniformShape) -> _ShapedGraph:
        """Return the graph for leaves of a shape, or why there is none."""
        not_jit = self._refuse_jit(shape)
        if not_jit is not None and self._at_once == 1:
            return _ShapedGraph(None, not_jit)
        if len(self._client.kept):
            return self._refuse("values are kept of clients")
        clients = ShapedClients(
            self._client,
            shape.clients,
            window=shape.window,
            at_once=self._at_once,
            jit=not_jit is None,
        )

        def fold(
            bounds: ClientBounds, initial: Sequence[Any], inputs: LoopInputs
        ) -> list[Any]:
            constants = flatten(inputs.constants)
            return [bounds[1], *clients.fold(bounds, initial, constants, inputs.data)]

        try:
            with tf.device(self._device):
                traced = self._loop.trace(LeafFold(fold, clients.prepare))
                return _ShapedGraph(traced, not_jit)
        except Exception as error:
            first: BaseException = error
            # TensorFlow raises others over the one that says why.
            while not isinstance(first, Fallback) and first.__context__ is not None:
                first = first.__context__
            if isinstance(first, Fallback):
                return self._refuse(first.reason)
            if diagnostics.is_defect(error):
                raise
            return self._refuse(diagnostics.first_line(first))


_CACHED_INDICES = 64
"""Cuts of cohorts whose indices a kernel keeps as tensors."""

_TENSOR_TYPES = tf.Tensor, np.ndarray, np.generic
"""Plain values of tensors, which were checked against their types before."""


class ClientKernel:
    """The graph of one `plans.Kernel`, and its values in and out.

    Args:
        kernel: what the compiler planned.
        merge: of two partials; None: none are merged here.
        device: name of the device to run on; None leaves it to TensorFlow.
        one_a_leaf: whether each leaf is of one client, which spares the inner loop.

    Attributes:
        shaped: its graphs for leaves whose clients are all of one shape.
        merges: whether it merges partials.
        at_once: how many clients of a leaf of one shape work at once; a call that
            covers some of a leaf covers a multiple of these.

    Raises:
        Fallback: the work needs what a kernel cannot do.
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
        refuse_many(len(client.specs), "to accumulate")
        elements = [*client.partial.items(), *client.constants.items()]
        self._server_type = fl.StructType([type_spec for _, type_spec in elements])
        self._loop = loop = LeafLoop(client, merge)
        with tf.device(device):
            fold = loop.fold_client if one_a_leaf else loop.fold_clients
            self._function = loop.trace(LeafFold(fold))
            self.shaped = ShapedGraphs(kernel, client, loop, device)
            loop.work_importer.create()
            loop.fold_importer.create()
            self._no_states = tf.zeros([0, 0, random_keys.STATE_SIZE], tf.int64)
        # A cohort is cut alike from round to round.
        self._indices = functools.lru_cache(maxsize=_CACHED_INDICES)(
            functools.partial(_make_indices, device)
        )

    @property
    def may_be_shared(self) -> bool:
        """Whether several threads may run it at once: it keeps no random states."""
        importers = self._loop.work_importer, self._loop.fold_importer
        keep_states = any(each.keeps_states for each in importers)
        return not keep_states and not self.shaped.is_asked_for

    def close(self) -> None:
        """Free what the graph keeps between calls."""
        self._loop.work_importer.close()
        self._loop.fold_importer.close()

    def lay_part(
        self, part: int, values: ClientValues, keep: external_data.Keep
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
            with_shapes: whether `shaped` is to know the shapes of the clients.
        """
        with tf.device(self._device):
            return LaidData.of(self._client.layout, parts, with_shapes=with_shapes)

    def lay(self, data: LaidData, clients: range) -> LaidClients:
        """Return some clients' data as `run` takes it in this round.

        Args:
            data: what `join` returned.
            clients: their places among those that `random_keys.at_client` counts.
        """
        states = self._states(self._loop.work_importer, clients)
        with random_keys.at_step("accumulate"):
            fold_states = self._states(self._loop.fold_importer, clients)
        return LaidClients((states, fold_states), data)

    def _states(self, importer: GraphImporter, clients: range) -> tf.Tensor:
        """Return the states of random ops, i64[clients, sites, 3]."""
        if not importer.sites:
            return self._no_states
        shape = len(clients), len(importer.sites), random_keys.STATE_SIZE
        states = np.empty(shape, np.int64)
        for of_client, position in zip(states, clients, strict=True):
            with random_keys.at_client(position):
                for index, site in enumerate(importer.sites):
                    of_client[index] = random_keys.state(site.content, site.path)
        with tf.device(self._device):
            return tf.constant(states)

    def inputs(
        self, server_values: Sequence[Plain]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return zeros and constants, plain or tensors, as `run` takes them.

        Args:
            server_values: what `server` of the kernel returned: the zero of each
                aggregation, then what is the same for all clients.
        """
        values = tensor_structures.flatten(tuple(server_values))
        zeros, constants = self._loop.specs, self._loop.constant_specs
        with tf.device(self._device):
            if all(isinstance(value, _TENSOR_TYPES) for value in values):
                tensors = as_tensors(values, [*zeros, *constants])
            else:
                tensors = flatten(
                    normal_forms.normalise(server_values, self._server_type)
                )
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
        importers = self._loop.work_importer, self._loop.fold_importer
        diagnostics.note([note for each in importers for note in each.unkeyed])
        size = len(self._loop.specs)
        with tf.device(self._device):
            arguments = [
                *self._indices(tuple(leaves), tuple(nodes)),
                *laid.states,
                *as_tensors(accumulators, self._loop.specs),
                *constants,
                *laid.data.tensors,
            ]
            results = self.shaped.call(laid.shape, arguments, self._function)
            self.shaped.note_refusals()
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
        clients: list[Any] = []
        for tensors in stacked:
            arrays = [tensor.numpy() for tensor in tensors]
            clients.extend(map(list, zip(*arrays, strict=True)))
        nest = nester(self._client.kept)
        plain = [nest(iter(leaves)) for leaves in clients]
        return [[member[k] for member in plain] for k in range(len(self._client.kept))]

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

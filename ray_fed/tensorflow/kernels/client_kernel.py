"""The client kernel: one graph that does the work of many clients and accumulates it.

A leaf is a few neighboring clients whose results are accumulated in order, and a
partial is the result of a leaf or of merged leaves. The caller uses these methods:

    lay_part      plain data of clients  -> tensors, for any round     ClientLayout
    join          all parts of the data                                LaidData
    lay           the random states of one round
    inputs        plain zeros, constants -> tensors
    run           tensors -> partials of subtrees                      LeafLoop

A call of `run` can end after any client, and the next call resumes with the same bits.

    for each leaf                starts from the zeros
        for each of its clients  slices the data: no padding, no second trace
            work, accumulate     constants are the same for all clients
    for each pair                merges partials along the merge tree
        -> partials of subtrees, and the kept values of all clients, stacked

Iterations run one after another, so that variables and random states belong to one
client at a time.

If all clients of a leaf have data of one shape, XLA can compile the leaf, or several
clients can run at once. Settings, the rule in `jit` and the work decide this. Otherwise
the graph for clients of any shape runs the leaf, and a note has the reason.
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
from ray_fed.language import blocks, structs, trees, type_checks
from ray_fed.language.structs import Plain, Struct
from ray_fed.plan import diagnostics, merge_tree, random_keys
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow import normal_forms
from ray_fed.tensorflow.kernels import jit
from ray_fed.tensorflow.kernels.client_batches import (
    FAILED_CHECK,
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
    RandomOp,
    parameter_of,
    refuse_many,
    specs_of,
)
from ray_fed.tensorflow.kernels.graph_functions import (
    GraphFunction,
    NumberedGraph,
    as_graph,
    as_tensors,
    before,
)
from ray_fed.values.stored import ClientValues


class MergeKernel:
    """The graph that merges two partials.

    `merge` is a serialized function <partial, partial> -> partial. The constructor
    raises Fallback if the merge draws random numbers or cannot be a graph. Executors
    then run each merge.
    """

    def __init__(self, merge: bytes, device: str | None) -> None:
        self._merge = blocks.parse_block(merge)
        self._pair = type_checks.struct_type(parameter_of(self._merge))
        self.partial = self._pair[0]
        self._device = device
        with tf.device(device):
            self._specs = specs_of(self._pair)
            self._function = as_graph(self.trace, self._specs)

    def trace(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Return the merge of two partials in a graph.

        `tensors` has the tensors of the left partial, and then of the right one.
        """
        pair = trees.unflatten(iter(tensors), self._pair)
        return trees.flatten(GraphBuilder(GraphImporter()).call(self._merge, pair))

    def run(self, left: Sequence[Any], right: Sequence[Any]) -> list[tf.Tensor]:
        """Return the merge of two partials, which are tensors or arrays."""
        with tf.device(self._device):
            return self._function(as_tensors([*left, *right], self._specs))

    def to_plain(self, returned: Sequence[Any]) -> structs.Plain:
        """Return a partial's tensors or arrays as its plain value."""
        arrays = [x.numpy() if isinstance(x, tf.Tensor) else x for x in returned]
        return trees.nest(iter(arrays), self.partial)


def merge_all(
    merge: MergeKernel, pairs: tf.Tensor, partials: Sequence[Any]
) -> list[Any]:
    """Merge partials in a graph. Each merge replaces the left partial.

    `pairs` has the indices of left and right partials, i32[pairs, 2], in order.
    `partials` has a TensorArray for each tensor of a partial, as does the result.
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
    """Return a TensorArray for tensors of a spec that can be read several times."""
    return tf.TensorArray(
        spec.dtype, size, element_shape=spec.shape, clear_after_read=False
    )


_INDEX = tf.TensorSpec([], tf.int64)
_PAIRS = {dtype: tf.TensorSpec([None, 2], dtype) for dtype in (tf.int32, tf.int64)}
_INDICES = tf.TensorSpec([None], tf.int32)
_NUMBERS = tf.TensorSpec([None], tf.float64)

ClientBounds = tuple[tf.Tensor, tf.Tensor]
"""The first client of a leaf and one past its last client, i64[] each."""


@dataclasses.dataclass(frozen=True)
class LoopInputs:
    """The inputs of a kernel's loops, as tensors of its graph.

    `first` is the index of the first client of this call. The states are as in
    `LaidClients.states`, and the numbers are as in `GraphImporter.numbers`. `data` has
    the data of all clients.
    """

    first: tf.Tensor
    work_states: tf.Tensor
    fold_states: tf.Tensor
    constants: Struct
    data: Sequence[tf.Tensor]
    numbers: tf.Tensor


@dataclasses.dataclass(frozen=True)
class LeafFold:
    """A way to accumulate the clients of one leaf, in a graph.

    Attributes:
        fold: Function of three arguments: the clients, a list with the accumulators and
            then the arrays of kept values, and the inputs. It returns a tensor that the
            next leaf waits for, and then the new accumulators and arrays.
        prepare: Function from the data of all clients to the form that `fold` takes. It
            runs once in each call of the kernel.
    """

    fold: Callable[[ClientBounds, Sequence[Any], LoopInputs], list[Any]]
    prepare: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] = list


class LeafLoop:
    """Builds the graphs of one kernel. With a `merge` of None, they merge nothing."""

    def __init__(
        self, client: ClientWork, merge: MergeKernel | None, *, trusts_sums: bool
    ) -> None:
        self._client, self._merge = client, merge
        self.trusts_sums = trusts_sums
        self.specs = client.specs
        self.constant_specs = specs_of(client.constants)
        self.work_importer = GraphImporter(trusts_sums=trusts_sums)
        self.fold_importer = GraphImporter()
        self.importers = self.work_importer, self.fold_importer

    def trace(self, leaf_fold: LeafFold, key: str | None = None) -> GraphFunction:
        """Return the graph that uses `leaf_fold`. For `key`, see `as_graph`."""
        build = functools.partial(self._build, leaf_fold)
        try:
            return as_graph(build, self._signature(), key, self)
        finally:
            for importer in self.importers:
                importer.leave_graph()

    def save(self) -> Any:
        """Return what the importers recorded, or None if the graph cannot be cached."""
        if any(each.keeps_states or each.unkeyed for each in self.importers):
            return None
        return [
            [
                [[site.path, site.content.hex()] for site in each.sites],
                sorted(each.ops),
                each.relies_on_sums,
            ]
            for each in self.importers
        ]

    def restore(self, saved: Any) -> None:
        """Set the records that `save` returned."""
        for importer, (sites, ops, relies_on_sums) in zip(
            self.importers, saved, strict=True
        ):
            importer.relies_on_sums = relies_on_sums
            importer.sites += [
                RandomOp(tuple(path), bytes.fromhex(content)) for path, content in sites
            ]
            importer.ops.update(ops)

    def _signature(self) -> list[tf.TensorSpec]:
        states = tf.TensorSpec([None, None, random_keys.STATE_SIZE], tf.int64)
        return [
            *(_PAIRS[tf.int64], _PAIRS[tf.int32], _INDICES, _NUMBERS, states, states),
            *(*self.specs, *self.constant_specs),
            *self._client.layout.specs,
        ]

    def _build(
        self,
        leaf_fold: LeafFold,
        bounds: tf.Tensor,
        merges: tf.Tensor,
        roots: tf.Tensor,
        numbers: tf.Tensor,
        work_states: tf.Tensor,
        fold_states: tf.Tensor,
        *tensors: tf.Tensor,
    ) -> list[tf.Tensor]:
        # The arguments are in the order of `_signature`. `roots` has the positions of
        # the partials that remain after the merges.
        self.work_importer.numbers = self.fold_importer.numbers = numbers
        size = len(self.specs)
        zeros, rest = tensors[:size], tensors[size:]
        num_constants = len(self.constant_specs)
        constants = iter(rest[:num_constants])
        inputs = LoopInputs(
            bounds[0, 0],
            work_states,
            fold_states,
            trees.unflatten(constants, self._client.constants),
            leaf_fold.prepare(rest[num_constants:]),
            numbers,
        )
        starts, stops = tf.unstack(bounds, axis=1)
        num_leaves = tf.shape(bounds)[0]

        def fold(leaf: tf.Tensor, *carried: Any) -> list[Any]:
            clients = tf.gather(starts, leaf), tf.gather(stops, leaf)
            # Each leaf starts from the zeros and appends to the arrays of kept values.
            end, *folded = leaf_fold.fold(clients, [*zeros, *carried[size:]], inputs)
            written = [
                array.write(leaf, tensor)
                for array, tensor in zip(carried[:size], folded[:size], strict=True)
            ]
            # The next leaf starts when the last client of this one has finished.
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
        # Partials that are merged in the same call need not leave the graph.
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
        """Accumulate the clients of a leaf, of any shapes: a `LeafFold.fold`."""

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
        """Accumulate a leaf with one client, without a loop: a `LeafFold.fold`."""
        return self._step(clients[0], initial, inputs)

    def _step(
        self, index: tf.Tensor, carried: Sequence[Any], inputs: LoopInputs
    ) -> list[Any]:
        size = len(self.specs)
        accumulators, arrays = carried[:size], carried[size:]
        # An importer numbers its random ops in the order of import. So each trace must
        # import the same computations in the same order.
        self.work_importer.ends = []
        self.work_importer.use_states(lambda site: inputs.work_states[index, site])
        self.fold_importer.use_states(lambda site: inputs.fold_states[index, site])
        member = self._client.layout.member(inputs.data, index)
        constants = trees.flatten(inputs.constants)
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
    """The graph for leaves whose clients all have one shape.

    Attributes:
        function: The graph, or None if the graph for clients of any shape is used.
        not_jit: The reason why XLA does not compile the graph, or None if it does.
    """

    function: GraphFunction | None
    not_jit: str | None


class ShapedGraphs:
    """The graphs of one kernel for clients of one shape, each built on first use.

    The kernel's options `jit` and `vectorized_clients` decide which graphs there are.
    """

    def __init__(
        self,
        kernel: plans.Kernel,
        client: ClientWork,
        loop: LeafLoop,
        device: str | None,
    ) -> None:
        self._client, self._loop, self._device = client, loop, device
        self._jit, self._at_once = kernel.jit, kernel.vectorized_clients
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
        """Whether settings explicitly request graphs for clients of one shape."""
        return self._jit == "on" or self._at_once > 1

    def refuse_shapes(self, leaf_size: int) -> str | None:
        """Return the reason why no graph needs the shapes of clients, or None.

        `leaf_size` is the number of clients of the cohort's largest leaf.
        """
        if self._at_once > 1:
            return None
        if self._never_jit is not None or self._jit == "on":
            return self._never_jit
        return jit.refuse_window(Window.of(leaf_size).size)

    def shape_of(
        self, leaf: range, laid: LaidClients, leaf_size: int
    ) -> UniformShape | None:
        """Return the shape of a leaf's clients if there is a graph for it, or None.

        `leaf` has the positions of the leaf's clients in `laid`.
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
        with self._lock:  # other threads can run this kernel at the same time
            if shape not in self._graphs:
                self._graphs[shape] = self._specialize(shape)
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
        """Call the graph for a result of `shape_of`, and return its results.

        `for_any_shape` is called if there is no graph, or if XLA refuses to compile it
        in its first call.
        """
        graph = None if shape is None else self._graphs[shape]
        if shape is None or graph is None or graph.function is None:
            return for_any_shape(arguments)
        try:
            results = graph.function(arguments)
        except tf.errors.ResourceExhaustedError:
            raise
        except tf.errors.OpError as error:
            if FAILED_CHECK in str(error):
                self._compiled.add(shape)
            if graph.not_jit is not None or shape in self._compiled:
                raise
            # XLA compiles in the first call. A graph that it refuses is never retried.
            reason = f"{type(error).__name__} of XLA"
            self._graphs[shape] = self._refuse(reason)
            self._note_off(reason)
            return for_any_shape(arguments)
        self._compiled.add(shape)
        if self._jit == "auto" and graph.not_jit is None:
            diagnostics.note([diagnostics.JitDecision(jit=True, reason=jit.GAIN)])
        return results

    def note_refusals(self) -> None:
        """Note for the report why requested graphs for one shape do not exist."""
        diagnostics.note(map(diagnostics.WorkUnshaped, tuple(self._refusals)))

    def _note_off(self, reason: str) -> None:
        if self._jit == "auto":
            diagnostics.note([diagnostics.JitDecision(jit=False, reason=reason)])

    def _refuse(self, reason: str) -> _ShapedGraph:
        if self.is_asked_for:
            self._refusals.add(reason)
        return _ShapedGraph(None, reason)

    def _refuse_jit(self, shape: UniformShape) -> str | None:
        if self._jit != "auto" or self._never_jit is not None:
            return self._never_jit
        specs = [*self._loop.specs, *self._loop.constant_specs]
        shapes = [spec.shape.as_list() if spec.shape else None for spec in specs]
        extents = self._client.layout.extents(shape.clients)
        all_shapes = [*shapes, *(extent.shape for extent in extents)]
        kind = jit.kind_of(self._device)
        return jit.refuse_sizes(self._ops, shape.window.size, all_shapes, kind)

    def _specialize(self, shape: UniformShape) -> _ShapedGraph:
        not_jit = self._refuse_jit(shape)
        if not_jit is not None and self._at_once == 1:
            return _ShapedGraph(None, not_jit)
        if len(self._client.kept):
            return self._refuse("clients' values are kept for later stages")
        clients = ShapedClients(
            self._client,
            shape.clients,
            window=shape.window,
            at_once=self._at_once,
            jit=not_jit is None,
            trusts_sums=self._loop.trusts_sums,
        )

        def fold(
            bounds: ClientBounds, initial: Sequence[Any], inputs: LoopInputs
        ) -> list[Any]:
            constants = [*trees.flatten(inputs.constants), inputs.numbers]
            return [bounds[1], *clients.fold(bounds, initial, constants, inputs.data)]

        try:
            with tf.device(self._device):
                traced = self._loop.trace(LeafFold(fold, clients.prepare))
                return _ShapedGraph(traced, not_jit)
        except Exception as error:
            first: BaseException = error
            # TensorFlow wraps the first error, which has the reason, in others.
            while not isinstance(first, Fallback) and first.__context__ is not None:
                first = first.__context__
            if isinstance(first, Fallback):
                return self._refuse(first.reason)
            if diagnostics.is_final(error):
                raise
            return self._refuse(diagnostics.first_line(first))


_CACHED_INDICES = 64
"""Number of different `leaves` and `nodes` of `run` that are cached as tensors."""

_TENSOR_TYPES = tf.Tensor, np.ndarray, np.generic
"""Classes of tensors in plain values. Such values are already checked."""


class ClientKernel(NumberedGraph):
    """The graph of one `plans.Kernel`, and the conversion of its inputs and results.

    The constructor raises Fallback if no graph can do the work.

    Args:
        kernel: The work.
        merge: The merge of two partials, or None to leave partials unmerged.
        device: Name of the device, or None for TensorFlow's default.
        one_a_leaf: Whether each leaf has one client, so that no inner loop is needed.
        key: See `as_graph`.

    Attributes:
        shaped: The graphs for leaves whose clients all have one shape.
        relies_on_sums: Whether clients are not checked one by one. If a partial is not
            finite, run its leaf again with `LaidClients.are_checked`.
        at_once: Number of clients of one shape that run at once. A call for a part of a
            leaf must cover a multiple of this number.
    """

    def __init__(
        self,
        kernel: plans.Kernel,
        merge: MergeKernel | None,
        device: str | None,
        *,
        one_a_leaf: bool = False,
        key: str | None = None,
    ) -> None:
        super().__init__(device)
        self._merge = merge
        self.merges = merge is not None
        self.at_once = kernel.vectorized_clients
        self._client = client = ClientWork(kernel)
        self._one_a_leaf = one_a_leaf
        refuse_many(len(client.specs), "to accumulate")
        elements = [*client.partial.items(), *client.constants.items()]
        self._server_type = fl.StructType([type_spec for _, type_spec in elements])
        self._loops: list[LeafLoop] = []
        self._key = key
        # Copies with other numbers share this graph.
        self._checking = functools.cache(self._trace_checking)
        # Kept values are not in any sum, so sums cannot show that they are not finite.
        self._function = self._trace(trusts_sums=not kernel.num_kept)
        self._loop = loop = self._loops[0]
        self.relies_on_sums = loop.work_importer.relies_on_sums
        self.shaped = ShapedGraphs(kernel, client, loop, device)
        with tf.device(device):
            self._no_states = tf.zeros([0, 0, random_keys.STATE_SIZE], tf.int64)
        # Cohorts are usually divided in the same way in each round.
        self._indices = functools.lru_cache(maxsize=_CACHED_INDICES)(
            functools.partial(_make_indices, device)
        )

    def _trace(self, *, trusts_sums: bool) -> GraphFunction:
        loop = LeafLoop(self._client, self._merge, trusts_sums=trusts_sums)
        with tf.device(self._device):
            fold = loop.fold_client if self._one_a_leaf else loop.fold_clients
            key = self._key and f"{self._key}{trusts_sums:d}"
            function = loop.trace(LeafFold(fold), key)
            for importer in loop.importers:
                importer.create()
        self._loops.append(loop)
        return function

    def _trace_checking(self) -> GraphFunction:
        if not self.relies_on_sums:
            return self._function
        return self._trace(trusts_sums=False)

    @property
    def may_be_shared(self) -> bool:
        """Whether several threads can run this kernel at once."""
        keep_states = any(each.keeps_states for each in self._loop.importers)
        return not keep_states and not self.shaped.is_asked_for

    def close(self) -> None:
        """Free the states of random ops that stay between calls."""
        for importer in [each for loop in self._loops for each in loop.importers]:
            importer.close()

    def lay_part(
        self, part: int, values: ClientValues, keep: external_data.Keep
    ) -> LaidPart:
        """Return one part of clients' data as tensors. Any round can use them.

        `part` is an index in `plans.Kernel.data`. `keep` caches the content of files.
        """
        with tf.device(self._device):
            return self._client.layout.lay_part(part, values, keep)

    def join(self, parts: Sequence[LaidPart], *, with_shapes: bool) -> LaidData:
        """Join the parts of clients' data, in the order of `plans.Kernel.data`.

        Pass `with_shapes` if `shaped` needs the shapes of the clients.
        """
        with tf.device(self._device):
            return LaidData.of(self._client.layout, parts, with_shapes=with_shapes)

    def lay(self, data: LaidData, clients: range) -> LaidClients:
        """Add the states of random ops to clients' data, for `run` in this round.

        `clients` has the clients' positions for `random_keys.at_client`.
        """
        states = self._states(self._loop.work_importer, clients)
        with random_keys.at_step("accumulate"):
            fold_states = self._states(self._loop.fold_importer, clients)
        return LaidClients((states, fold_states), data)

    def _states(self, importer: GraphImporter, clients: range) -> tf.Tensor:
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
        """Return the zeros and the constants of a call as tensors, for `run`.

        `server_values` is the result of the kernel's `server`: zeros and then
        constants, as plain values or tensors.
        """
        values = trees.flatten(tuple(server_values))
        zeros, constants = self._loop.specs, self._loop.constant_specs
        with tf.device(self._device):
            if all(isinstance(value, _TENSOR_TYPES) for value in values):
                tensors = as_tensors(values, [*zeros, *constants])
            else:
                tensors = trees.flatten(
                    normal_forms.normalize(server_values, self._server_type)
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
        """Accumulate clients, and merge the partials inside subtrees.

        Args:
            leaves: Positions in `laid` of each leaf's clients. The leaves are adjacent.
            nodes: The subtrees to return a partial for, by index among all leaves.
            accumulators: The accumulators before the first client of each leaf: the
                zeros, or accumulators that an earlier call returned.
            constants: The constants, see `inputs`.
            laid: The result of `lay`, with the shape of all these leaves.

        Returns:
            The accumulators of each subtree as NumPy arrays, and the kept values of
            these clients, stacked in client order.
        """
        importers = self._loop.importers
        diagnostics.note([note for each in importers for note in each.unkeyed])
        size = len(self._loop.specs)
        with tf.device(self._device):
            arguments = [
                *self._indices(tuple(leaves), tuple(nodes)),
                self._numbers,
                *laid.states,
                *as_tensors(accumulators, self._loop.specs),
                *constants,
                *laid.data.tensors,
            ]
            if laid.are_checked:
                results = self._checking()(arguments)
            else:
                results = self.shaped.call(laid.shape, arguments, self._function)
            self.shaped.note_refusals()
            stacked = [tensor.numpy() for tensor in results[:size]]
            partials = [[array[i] for array in stacked] for i in range(len(nodes))]
            return partials, results[size:]

    @functools.cached_property
    def bytes_of_partial(self) -> int | None:
        """Bytes of one leaf's accumulators, or None if their types do not tell."""
        specs = self._loop.specs
        is_known = all(spec.shape.is_fully_defined() for spec in specs)
        if not is_known or any(spec.dtype == tf.string for spec in specs):
            return None
        return sum(spec.shape.num_elements() * spec.dtype.size for spec in specs)

    def kept(self, stacked: Sequence[Sequence[tf.Tensor]]) -> list[list[Plain]]:
        """Return a list of clients' plain values for each kept value.

        `stacked` has the kept values that calls of `run` returned, in order.
        """
        clients: list[Any] = []
        for tensors in stacked:
            arrays = [tensor.numpy() for tensor in tensors]
            clients.extend(map(list, zip(*arrays, strict=True)))
        kept = self._client.kept
        plain = [trees.nest(iter(leaves), kept) for leaves in clients]
        return [[member[k] for member in plain] for k in range(len(kept))]

    @property
    def partial(self) -> fl.StructType:
        """Type of a partial."""
        return self._client.partial


def _make_indices(
    device: str | None, leaves: tuple[range, ...], nodes: tuple[merge_tree.Subtree, ...]
) -> tuple[tf.Tensor, ...]:
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

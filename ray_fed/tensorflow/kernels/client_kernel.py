"""A leaf's client work and accumulation as one graph that loops over clients.

    for each leaf                begins at zero; a lone one may go on from another call
        for each of its clients  data sliced: no padding, no second trace
            work, accumulate     constants are the same for all, outside of the loops
    for each pair                merge, as the tree of leaves has it
        -> partials of subtrees; what is kept of each client, stacked

A call may stop at any client and the next go on from there: the bits are the same. One
iteration at a time, so that variables and random states are those of one client.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ray_fed.plan import diagnostics, merge_tree, plans, random_keys
from ray_fed.tensorflow.kernels import jit
from ray_fed.tensorflow.kernels.client_tensors import ClientShape, UnfitError, flatten
from ray_fed.tensorflow.kernels.client_work import ClientWork, refuse_many, specs_of
from ray_fed.tensorflow.kernels.grafts import Grafts
from ray_fed.tensorflow.kernels.graph_functions import (
    Function,
    as_graph,
    as_tensors,
    before,
)
from ray_fed.tensorflow.kernels.merge_kernels import MergeKernel, empty_array, merge_all
from ray_fed.tensorflow.kernels.shaped_clients import ShapedClients, Window, flatten_all
from ray_fed.tensorflow.loading import normal
from ray_fed.values import tensor_structures

_INDEX = tf.TensorSpec([], tf.int64)
_PAIRS = {dtype: tf.TensorSpec([None, 2], dtype) for dtype in (tf.int32, tf.int64)}
_INDICES = tf.TensorSpec([None], tf.int32)

_CACHED_INDICES = 64
"""Cuts of cohorts whose indices a kernel keeps as tensors."""

_OF_TYPE = tf.Tensor, np.ndarray, np.generic
"""Plain values of tensors, which were checked against their types before."""


@dataclasses.dataclass(frozen=True)
class UniformShape:
    """What a graph for clients of one shape is made for.

    Attributes:
        clients: shape of each.
        window: of their rows.
    """

    clients: ClientShape
    window: Window


@dataclasses.dataclass(frozen=True)
class LaidClients:
    """What a kernel takes of some clients.

    Attributes:
        states: of random work, and of random accumulation: i64[clients, sites, 3] each.
        data: what `lay_values` returned.
        shape: that `shape_of` returned for the leaves that are to run.
    """

    states: tuple[tf.Tensor, tf.Tensor]
    data: "LaidData"
    shape: UniformShape | None = None

    def of_shape(self, shape: UniformShape | None) -> "LaidClients":
        """Return the same, for leaves of a shape."""
        return dataclasses.replace(self, shape=shape)


@dataclasses.dataclass(frozen=True)
class LaidData:
    """The data of some clients, for any round.

    Attributes:
        tensors: laid as `client_data` does.
        shapes: that clients have, each once; None for those without.
        kinds: of each client the index of its shape; empty where nobody asks for it.
    """

    tensors: Sequence[tf.Tensor]
    shapes: Sequence[ClientShape | None]
    kinds: NDArray[np.intp]


@dataclasses.dataclass(frozen=True)
class _Given:
    """What the loops of a kernel take from outside, as tensors of its graph.

    Attributes:
        first: client of this call.
        work_states: see `LaidClients.states`.
        fold_states: see `LaidClients.states`.
        constants: a struct.
        data: of the clients.
    """

    first: tf.Tensor
    work_states: tf.Tensor
    fold_states: tf.Tensor
    constants: Any
    data: Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class _Way:
    """A way to fold clients.

    Attributes:
        fold: returns accumulators, and arrays of what is kept, after some clients;
            before them what the next leaf waits for.
        prepare: returns the data of all clients as that takes it, once a call.
    """

    fold: Callable[[tuple[tf.Tensor, tf.Tensor], Sequence[Any], _Given], list[Any]]
    prepare: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] = list


@dataclasses.dataclass(frozen=True)
class _Shaped:
    """What runs leaves of clients of one shape.

    Attributes:
        function: None where they run as others do.
        not_jit: why XLA does not compile it; None where it does.
    """

    function: "Function | None"
    not_jit: str | None


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
        refusals: why some leaves of one shape run as others do, in words.
        nest: returns the plain value of a partial's leaves.

    Raises:
        UnfitError: the work needs what a kernel cannot do.
    """

    def __init__(
        self,
        kernel: plans.Kernel,
        merge: "MergeKernel | None",
        device: str | None,
        *,
        one_a_leaf: bool = False,
    ) -> None:
        self._merge = merge
        self.merges = merge is not None
        self._client = client = ClientWork(kernel)
        self._constants, self._partial = client.constants, client.partial
        self.nest = tensor_structures.nester(client.partial)
        self._layout, self._specs = client.layout, client.specs
        refuse_many(len(self._specs), "to accumulate")
        self._constant_specs = specs_of(client.constants)
        given = [*client.partial.items(), *client.constants.items()]
        self._given = fl.StructType([type_spec for _, type_spec in given])
        self._shapes = [spec.shape for spec in self._specs]
        self._jit = kernel.jit
        self._never_jit = "off" if kernel.jit == "off" else None
        self.at_once = kernel.vectorised_clients
        self.refusals: set[str] = set()
        self._shaped: dict[UniformShape, _Shaped] = {}
        self._compiled: set[UniformShape] = set()
        self._lock = threading.Lock()
        self._work_grafts, self._fold_grafts = Grafts(), Grafts()
        self._device = device
        with tf.device(device):
            fold = self._fold_one if one_a_leaf else self._fold_any
            self._function = self._trace(_Way(fold))
            self._ops = self._work_grafts.ops | self._fold_grafts.ops
            if kernel.jit == "auto":
                self._never_jit = jit.refuse_ops(self._ops, device)
            self._work_grafts.create()
            self._fold_grafts.create()
            self._no_states = tf.zeros([0, 0, random_keys.STATE_SIZE], tf.int64)
        # A cohort is cut alike from round to round.
        self._indices = functools.lru_cache(maxsize=_CACHED_INDICES)(
            functools.partial(_make_indices, device)
        )

    @property
    def may_be_shared(self) -> bool:
        """Whether several threads may run it at once, as nothing of it changes."""
        parts = [self._work_grafts, self._fold_grafts]
        has_state = any(part.has_state for part in parts)
        merge_has_state = self._merge is not None and self._merge.has_state
        return not self._is_asked and not has_state and not merge_has_state

    def close(self) -> None:
        """Free what the graph keeps between calls."""
        self._work_grafts.close()
        self._fold_grafts.close()

    def _signature(self) -> list[tf.TensorSpec]:
        states = tf.TensorSpec([None, None, random_keys.STATE_SIZE], tf.int64)
        return [
            *(_PAIRS[tf.int64], _PAIRS[tf.int32], _INDICES, states, states),
            *(*self._specs, *self._constant_specs),
            *self._layout.specs,
        ]

    def _trace(self, way: _Way) -> "Function":
        """Return the graph over leaves whose clients are folded in a way."""
        return as_graph(functools.partial(self._build, way), self._signature())

    def _build(
        self,
        way: _Way,
        bounds: tf.Tensor,
        merges: tf.Tensor,
        roots: tf.Tensor,
        work_states: tf.Tensor,
        fold_states: tf.Tensor,
        *tensors: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Fold leaf after leaf, merge what is to be merged, return what is left."""
        size = len(self._specs)
        zeros, rest = tensors[:size], tensors[size:]
        num_constants = len(self._constant_specs)
        given = _Given(
            bounds[0, 0],
            work_states,
            fold_states,
            tensor_structures.unflatten(iter(rest[:num_constants]), self._constants),
            way.prepare(rest[num_constants:]),
        )
        starts, stops = tf.unstack(bounds, axis=1)
        num_leaves = tf.shape(bounds)[0]

        def fold(leaf: tf.Tensor, *carried: Any) -> list[Any]:
            clients = tf.gather(starts, leaf), tf.gather(stops, leaf)
            end, *folded = way.fold(clients, [*zeros, *carried[size:]], given)
            written = [
                array.write(leaf, tensor)
                for array, tensor in zip(carried[:size], folded[:size], strict=True)
            ]
            with tf.control_dependencies([end]):
                return [leaf + 1, *written, *folded[size:]]

        partials = [empty_array(spec, num_leaves) for spec in self._specs]
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

    def _fold_any(
        self,
        clients: tuple[tf.Tensor, tf.Tensor],
        held: Sequence[Any],
        given: "_Given",
    ) -> list[Any]:
        """Fold clients of any sizes into accumulators and arrays of what is kept."""

        def step(index: tf.Tensor, *carried: Any) -> list[Any]:
            return self._step(index, carried, given)

        kept_shapes = [array.flow.shape for array in held[len(self._specs) :]]
        first, stop = clients
        return tf.while_loop(
            before(stop),
            step,
            [first, *held],
            shape_invariants=[_INDEX.shape, *self._shapes, *kept_shapes],
            parallel_iterations=1,
        )

    def _fold_one(
        self,
        clients: tuple[tf.Tensor, tf.Tensor],
        held: Sequence[Any],
        given: "_Given",
    ) -> list[Any]:
        """Do what `_fold_any` does, for exactly one client."""
        return self._step(clients[0], held, given)

    def _step(
        self, index: tf.Tensor, carried: Sequence[Any], given: "_Given"
    ) -> list[Any]:
        """Run one client, accumulate what it comes to; the index of the next, first."""
        size = len(self._specs)
        accumulators, arrays = carried[:size], carried[size:]
        self._work_grafts.ends = []
        self._work_grafts.use_states(lambda site: given.work_states[index, site])
        self._fold_grafts.use_states(lambda site: given.fold_states[index, site])
        member = self._layout.member(given.data, index)
        constants = flatten(given.constants)
        worked = self._client.work(self._work_grafts, constants, member)
        count = len(worked) - len(self._client.kept)
        position = tf.cast(index - given.first, tf.int32)
        outside = flatten_all(worked[count:])
        written = [
            array.write(position, tensor)
            for array, tensor in zip(arrays, outside, strict=True)
        ]
        inside = flatten_all(worked[:count])
        added = self._client.fold(self._fold_grafts, accumulators, inside, constants)
        with tf.control_dependencies(self._work_grafts.ends):
            following = index + 1
        return [following, *added, *written]

    def _kept_arrays(self, count: tf.Tensor) -> list[Any]:
        return [
            empty_array(spec, tf.cast(count, tf.int32))
            for spec in specs_of(self._client.kept)
        ]

    def refuse_shapes(self, leaf_size: int) -> str | None:
        """Return why the shapes of clients are of no interest; None where they are.

        Args:
            leaf_size: how many clients the leaves of the cohort have.
        """
        if self.at_once > 1:
            return None
        if self._never_jit is not None or self._jit == "on":
            return self._never_jit
        return jit.refuse_window(Window.of(leaf_size).size)

    def lay_values(
        self, data: Sequence[Sequence[Any]], *, with_shapes: bool
    ) -> LaidData:
        """Return some clients' data as tensors, to be used in any round.

        Args:
            data: of each of `plans.Kernel.data` the clients' plain values, in order.
            with_shapes: whether `shape_of` is to know the shapes of the clients.
        """
        with tf.device(self._device):
            tensors = self._layout.lay(list(zip(*data, strict=True)))
            if with_shapes:
                return LaidData(tensors, *self._layout.shapes(tensors))
            return LaidData(tensors, [], np.empty(0, np.intp))

    @staticmethod
    def count_bytes(data: LaidData) -> int:
        """Return about how many bytes tensors that were laid hold."""
        return sum(map(_count_bytes, data.tensors))

    def shape_of(
        self, leaf: range, laid: LaidClients, leaf_size: int
    ) -> UniformShape | None:
        """Return the shape of all clients of a leaf, where `run` is to know of it.

        Args:
            leaf: positions of its clients, all of them, among those that were laid.
            laid: what `lay` returned.
            leaf_size: how many clients the leaves of the cohort have.
        """
        kinds = laid.data.kinds[leaf.start : leaf.stop]
        is_mixed = len(laid.data.shapes) > 1 and (kinds != kinds[:1]).any()
        if is_mixed:
            reason = "clients of a leaf have data of several shapes"
            self._note_off(reason)
            if self._is_asked:
                diagnostics.note([diagnostics.Unshaped(reason)])
            return None
        of_clients = laid.data.shapes[kinds[0]] if len(kinds) else None
        if of_clients is None:
            if leaf:
                refused = self.refuse_shapes(leaf_size)
                self._note_off(refused or "data without one shape")
            return None
        shape = UniformShape(of_clients, Window.of(leaf_size))
        with self._lock:  # other threads may run this kernel, too
            if shape not in self._shaped:
                self._shaped[shape] = self._specialise(shape)
        shaped = self._shaped[shape]
        if shaped.not_jit is not None:
            self._note_off(shaped.not_jit)
        return None if shaped.function is None else shape

    @property
    def _is_asked(self) -> bool:
        """Whether settings ask for other graphs than that of clients of any shape."""
        return self._jit == "on" or self.at_once > 1

    def _note_off(self, reason: str) -> None:
        if self._jit == "auto":
            diagnostics.note([diagnostics.JitDecision(jit=False, reason=reason)])

    def _refuse(self, reason: str) -> "_Shaped":
        if self._is_asked:
            self.refusals.add(reason)
        return _Shaped(None, reason)

    def _refuse_jit(self, shape: UniformShape) -> str | None:
        """Return why XLA does not compile leaves of clients of a shape, if so."""
        if self._jit != "auto" or self._never_jit is not None:
            return self._never_jit
        specs = [*self._specs, *self._constant_specs]
        shapes = [spec.shape.as_list() if spec.shape else None for spec in specs]
        extents = self._layout.extents(shape.clients)
        given = [*shapes, *(extent.shape for extent in extents)]
        return jit.refuse_sizes(self._ops, shape.window.size, given)

    def _specialise(self, shape: UniformShape) -> "_Shaped":
        """Return the graph for leaves of clients of a shape, or why there is none."""
        not_jit = self._refuse_jit(shape)
        if not_jit is not None and self.at_once == 1:
            return _Shaped(None, not_jit)
        if len(self._client.kept):
            return self._refuse("values are kept of clients")
        clients = ShapedClients(
            self._client,
            self._layout,
            shape.clients,
            window=shape.window,
            at_once=self.at_once,
            jit=not_jit is None,
        )

        def fold(
            inside: tuple[tf.Tensor, tf.Tensor], held: Sequence[Any], given: _Given
        ) -> list[Any]:
            constants = flatten(given.constants)
            return [inside[1], *clients.fold(inside, held, constants, given.data)]

        try:
            with tf.device(self._device):
                return _Shaped(self._trace(_Way(fold, clients.prepare)), not_jit)
        except UnfitError as error:  # TensorFlow may put a traceback before its text
            told = str(error).rpartition(f"{UnfitError.__name__}: ")[2]
            return self._refuse(told.strip())
        except Exception as error:  # noqa: BLE001 (what TensorFlow does not vectorise)
            first = _first_of(error)
            first_line = str(first).partition("\n")[0]
            return self._refuse(f"{type(first).__name__}: {first_line}")

    def lay(self, data: LaidData, clients: range) -> LaidClients:
        """Return some clients' data as `run` takes it in this round.

        Args:
            data: what `lay_values` returned.
            clients: their places among those that `random_keys.at_client` counts.
        """
        states = self._states(self._work_grafts, clients)
        with random_keys.at_step("accumulate"):
            fold_states = self._states(self._fold_grafts, clients)
        return LaidClients((states, fold_states), data)

    def _states(self, grafts: Grafts, clients: range) -> tf.Tensor:
        """Return the states of random ops, i64[clients, sites, 3]."""
        if not grafts.sites:
            return self._no_states
        shape = len(clients), len(grafts.sites), random_keys.STATE_SIZE
        states = np.empty(shape, np.int64)
        for row, position in zip(states, clients, strict=True):
            with random_keys.at_client(position):
                for index, site in enumerate(grafts.sites):
                    row[index] = random_keys.state(site.content, site.path)
        with tf.device(self._device):
            return tf.constant(states)

    def inputs(self, given: Sequence[Any]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return zeros and constants, plain or tensors, as `run` takes them.

        Args:
            given: what `server` of the kernel returned: the zero of each aggregation,
                then what is the same for all clients.
        """
        leaves = tensor_structures.flatten(tuple(given))
        with tf.device(self._device):
            if all(isinstance(leaf, _OF_TYPE) for leaf in leaves):
                tensors = as_tensors(leaves, [*self._specs, *self._constant_specs])
            else:
                tensors = flatten(normal.normalise(given, self._given))
        size = len(self._specs)
        return tensors[:size], tensors[size:]

    def run(
        self,
        leaves: Sequence[range],
        nodes: Sequence[merge_tree.Subtree],
        accumulators: Sequence[Any],
        constants: Sequence[tf.Tensor],
        laid: LaidClients,
    ) -> tuple[list[list[Any]], list[tf.Tensor]]:
        """Return the accumulators of some subtrees of those clients that were laid.

        As numpy values: views of what one transfer brought.

        And what is kept of these clients, stacked.

        Args:
            leaves: positions of each leaf's clients among these; adjacent.
            nodes: the subtrees to return, by index among all leaves.
            accumulators: before the first client of each leaf: tensors, or what this
                returned.
            constants: the same for all.
            laid: what `lay` returned, of the shape that all of the leaves have.
        """
        diagnostics.note([*self._work_grafts.unkeyed, *self._fold_grafts.unkeyed])
        with tf.device(self._device):
            arguments = [
                *self._indices(tuple(leaves), tuple(nodes)),
                *laid.states,
                *as_tensors(accumulators, self._specs),
                *constants,
                *laid.data.tensors,
            ]
            ran = self._call(arguments, laid.shape)
            diagnostics.note(map(diagnostics.Unshaped, tuple(self.refusals)))
            columns = [tensor.numpy() for tensor in ran[: len(self._specs)]]
            rows = [[column[i] for column in columns] for i in range(len(nodes))]
            return rows, ran[len(self._specs) :]

    def _call(
        self, arguments: list[tf.Tensor], shape: UniformShape | None
    ) -> list[tf.Tensor]:
        shaped = None if shape is None else self._shaped[shape]
        if shape is None or shaped is None or shaped.function is None:
            return self._function(arguments)
        try:
            ran = shaped.function(arguments)
        except tf.errors.ResourceExhaustedError:
            raise
        except tf.errors.OpError as error:
            if shaped.not_jit is not None or shape in self._compiled:
                raise
            # XLA compiles at the first call. What it refuses, it always refuses.
            reason = f"{type(error).__name__} of XLA"
            self._shaped[shape] = self._refuse(reason)
            self._note_off(reason)
            return self._function(arguments)
        self._compiled.add(shape)
        if self._jit == "auto" and shaped.not_jit is None:
            diagnostics.note([diagnostics.JitDecision(jit=True, reason=jit.GAIN)])
        return ran

    @functools.cached_property
    def bytes_of_partial(self) -> int | None:
        """Bytes of one leaf's accumulators; None where their types do not say."""
        is_known = all(shape.is_fully_defined() for shape in self._shapes)
        if not is_known or any(spec.dtype == tf.string for spec in self._specs):
            return None
        return sum(spec.shape.num_elements() * spec.dtype.size for spec in self._specs)

    def kept(self, stacked: Sequence[Sequence[tf.Tensor]]) -> list[list[Any]]:
        """Return the plain values of each of what is kept, in client order.

        Args:
            stacked: what calls of `run` kept, in order.
        """
        return self._client.kept_values(stacked)

    @property
    def type_signature(self) -> fl.FunctionType:
        """Of a leaf: beside accumulators and constants it takes clients, laid out."""
        taken = fl.StructType([(None, self._partial), (None, self._constants)])
        return fl.FunctionType(taken, self._partial)

    def to_plain(self, returned: tuple[list[list[Any]], list[tf.Tensor]]) -> Any:
        """Return the plain partials that `run` returned, and what is kept."""
        partials, stacked = returned
        return [self.nest(iter(partial)) for partial in partials], self.kept([stacked])

    @property
    def partial(self) -> fl.StructType:
        """The type of a partial."""
        return self._partial


def _count_bytes(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.cast(tf.strings.length(tensor), tf.int64)))
    return int(tf.size(tensor)) * tensor.dtype.size


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


def _first_of(error: BaseException) -> BaseException:
    """Return what was raised before other errors, as TensorFlow tells of it, fail."""
    while error.__context__ is not None:
        error = error.__context__
    return error

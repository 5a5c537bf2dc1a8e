"""Graphs of the server's work and of `federated_select`, and the cache of all kernels.

A kernel is one graph that replaces many calls of executors, with the same bits. Kernels
are cached by their content. All threads share the kernels without state.
"""

import dataclasses
import functools
import hashlib
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, TypeVar, cast

import federated_language as fl
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.framework import config  # no public name

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
from ray_fed.language import blocks, structs, trees, type_checks
from ray_fed.plan import diagnostics
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow import normal_forms
from ray_fed.tensorflow.graphs import numbers
from ray_fed.tensorflow.kernels import jit
from ray_fed.tensorflow.kernels.client_kernel import (
    ClientKernel,
    MergeKernel,
    empty_array,
    merge_all,
)
from ray_fed.tensorflow.kernels.graph_builder import (
    GraphBuilder,
    GraphImporter,
    leaf_types,
    parameter_of,
    refuse_many,
    specs_of,
)
from ray_fed.tensorflow.kernels.graph_functions import (
    NumberedGraph,
    as_graph,
    as_pruned_graph,
    as_tensors,
    before,
    stack,
)
from ray_fed.values import components, stored
from ray_fed.values.lru_cache import LruCache

_CACHED_PAIRS = 64
"""Number of different `pairs` of `run` that a graph caches as tensors."""


class ServerGraph(NumberedGraph):
    """The graph of a function of values at the server, after a merge of partials.

    The constructor raises Fallback if the function draws random numbers, has effects,
    or cannot be a graph for another reason. Executors compute the same bits.

    Args:
        function: The serialized function. Its argument may contain values of clients
            only if it does not read them. With None, the result is the merged partial.
        device: Name of the device, or None for TensorFlow's default.
        merge: The merge of two partials, or None if there are no partials. The merged
            partial is the last part of the argument, or the whole argument.
        num_others: Number of parts of the argument before the merged partial.
        key: See `as_graph`.
    """

    def __init__(
        self,
        function: bytes | None,
        device: str | None,
        merge: MergeKernel | None = None,
        num_others: int = 0,
        key: str | None = None,
    ) -> None:
        super().__init__(device)
        self._merge = merge
        block = None if function is None else blocks.parse_block(function)
        result, types = _types_of(block, num_others, merge)
        self.result = result
        self._num_results = len(specs_of(result))  # refuses sequences
        divided = [
            part for index, t in enumerate(types) for part in _parts(t, (index,))
        ]
        signature = [spec for _, member in divided for spec in specs_of(member)]
        # The arguments are other values, stacked partials, pairs to merge, and numbers.
        self._merged_from = len(signature)
        self._merge_specs: list[tf.TensorSpec] = []
        if merge is not None:
            some = tf.TensorShape([None])
            self._merge_specs = [
                tf.TensorSpec(some.concatenate(spec.shape), spec.dtype)
                for spec in specs_of(merge.partial)
            ]
            signature += [*self._merge_specs, tf.TensorSpec([None, 2], tf.int32)]
        refuse_many(max(len(signature), self._num_results), "at the server")
        num_values = len(signature)
        signature.append(tf.TensorSpec([None], tf.float64))

        def build(*arguments: tf.Tensor) -> list[tf.Tensor]:
            *tensors, numbers = arguments
            fed = iter(tensors)
            elements = [(None, _fill(type_spec, fed)) for type_spec in types]
            if merge is not None:
                elements.append((None, _merge(merge, list(fed))))
            argument = _struct(elements) if len(elements) > 1 else _only(elements)
            if block is None:
                return trees.flatten(argument)
            # `run` refuses a division by a count of 0, outside of the graph.
            counts: list[tf.Tensor] = []
            importer = GraphImporter(allowed="checks")
            importer.numbers = numbers
            builder = GraphBuilder(importer, counts)
            result = trees.flatten(builder.call(block, argument))
            is_empty = [tf.equal(count, 0) for count in counts]
            return [*result, tf.reduce_any(is_empty)] if counts else result

        with tf.device(device):
            self._run, read = as_pruned_graph(build, signature, key)
        self._reads_numbers = num_values in read
        self._read_indices = frozenset(read)
        self._reads = list(_reads(divided, self._read_indices))
        self._read_specs = [
            signature[index] for index in read if index < self._merged_from
        ]
        self._pairs = functools.lru_cache(maxsize=_CACHED_PAIRS)(_make_pairs)

    def run(
        self,
        parts: Sequence[Any],
        partials: Sequence[Any] = (),
        pairs: Sequence[tuple[int, int]] = (),
    ) -> list[tf.Tensor]:
        """Return the tensors of the result.

        Args:
            parts: The parts of the argument before the merged partial, as plain values
                or tensors in tuples. Parts that the function does not read can be
                anything.
            partials: The plain partials to merge.
            pairs: Positions of the two partials of each merge, in order. The merged
                partial replaces the left one.

        Raises:
            Fallback: The function divides by a count of zero. Executors then raise an
                error that explains it.
        """
        with tf.device(self._device):
            tensors = [*self._read(parts), *self._stack(partials, pairs)]
            ran = self._run([*tensors, *[self._numbers] * self._reads_numbers])
        if len(ran) > self._num_results and ran.pop():
            raise Fallback("a mean with a count of zero at the server")
        return ran

    def to_plain(self, returned: Sequence[tf.Tensor]) -> structs.Plain:
        """Return the tensors that `run` returned as a plain value."""
        return trees.nest((tensor.numpy() for tensor in returned), self.result)

    def _read(self, parts: Sequence[Any]) -> list[tf.Tensor]:
        read_leaves: list[Any] = []
        for path, member, wanted in self._reads:
            part = functools.reduce(operator.getitem, path, parts)
            if isinstance(part, stored.StoredComponents):
                part = components.join(part.components, member)
            leaves = (
                trees.flatten(normal_forms.normalize(part, member))
                if stored.holds_external(part)
                else trees.flatten(part)
            )
            read_leaves += [leaves[index] for index in wanted]
        return as_tensors(read_leaves, self._read_specs)

    def _stack(
        self, partials: Sequence[Any], pairs: Sequence[tuple[int, int]]
    ) -> list[tf.Tensor]:
        if self._merge is None:
            return []
        flattened = [trees.flatten(partial) for partial in partials]
        columns = zip(zip(*flattened, strict=True), self._merge_specs, strict=True)
        stacked = [stack(column, spec.dtype) for column, spec in columns]
        tensors = [*stacked, self._pairs(tuple(pairs))]
        first = self._merged_from
        return [t for i, t in enumerate(tensors, first) if i in self._read_indices]


def _make_pairs(pairs: tuple[tuple[int, int], ...]) -> tf.Tensor:
    return tf.constant(pairs, tf.int32, [len(pairs), 2])


def _reads(
    parts: Sequence[tuple[plans.Path, fl.Type]], read_indices: AbstractSet[int]
) -> Iterator[tuple[plans.Path, fl.Type, list[int]]]:
    first = 0
    for path, member in parts:
        size = len(leaf_types(member))
        wanted = [index for index in range(size) if first + index in read_indices]
        if wanted:
            yield path, member, wanted
        first += size


def _types_of(
    block: fl.framework.ComputationBuildingBlock | None,
    num_others: int,
    merge: MergeKernel | None,
) -> tuple[fl.Type, list[fl.Type]]:
    if block is None:
        return type_checks.narrow(merge, MergeKernel, "a graph").partial, []
    type_spec = type_checks.function_type(block.type_signature)
    result, parameter = _without_placements(type_spec.result), type_spec.parameter
    if merge is None:
        return result, [] if parameter is None else [parameter]
    if not num_others or parameter is None:
        return result, []
    elements = type_checks.struct_type(parameter).items()
    return result, [element for _, element in elements][:num_others]


def _merge(merge: MergeKernel, tensors: Sequence[tf.Tensor]) -> Any:
    *stacked, pairs = tensors
    if not stacked:
        raise Fallback("partials without tensors")
    count = tf.shape(stacked[0])[0]
    arrays = [
        empty_array(spec, count).unstack(tensor)
        for spec, tensor in zip(specs_of(merge.partial), stacked, strict=True)
    ]
    merged = (array.read(0) for array in merge_all(merge, pairs, arrays))
    return trees.unflatten(merged, merge.partial)


def _parts(
    type_spec: fl.Type, path: plans.Path
) -> Iterator[tuple[plans.Path, fl.Type]]:
    if type_checks.is_placed_struct(type_spec):
        for index, (_, element) in enumerate(
            type_checks.struct_type(type_spec).items()
        ):
            yield from _parts(element, (*path, index))
    elif _is_taken(type_spec):
        yield path, _without_placements(type_spec)


def _is_taken(type_spec: fl.Type) -> bool:
    if type_checks.differs_by_client(type_spec):
        return False
    kinds = fl.SequenceType | fl.FunctionType
    return not fl.framework.type_contains(type_spec, lambda t: isinstance(t, kinds))


def _fill(type_spec: fl.Type, tensors: Iterator[tf.Tensor]) -> Any:
    # `tensors` has the tensors of the parts that `_parts` yields, in the same order.
    if type_checks.is_placed_struct(type_spec):
        pairs = type_checks.struct_type(type_spec).items()
        elements = [(name, _fill(element, tensors)) for name, element in pairs]
        return _struct(elements)
    if _is_taken(type_spec):
        return trees.unflatten(tensors, _without_placements(type_spec))
    return Fallback(f"a value of type `{type_spec}` at the server")


def _only(elements: Sequence[tuple[str | None, Any]]) -> Any:
    if elements and isinstance(elements[0][1], Fallback):
        raise elements[0][1]
    return elements[0][1] if elements else None


def _struct(elements: Sequence[tuple[str | None, Any]]) -> Any:
    if any(isinstance(element, _SomeOf | Fallback) for _, element in elements):
        return _SomeOf([element for _, element in elements])
    return structs.Struct(elements)


class _SomeOf:
    """A struct in which some elements are not arguments of the graph.

    To select such an element raises its Fallback.
    """

    def __init__(self, elements: Sequence[Any]) -> None:
        self._elements = elements

    def __getitem__(self, index: int) -> Any:
        element = self._elements[index]
        if isinstance(element, Fallback):
            raise element
        return element


def _without_placements(type_spec: fl.Type) -> fl.Type:
    return trees.map_types(_member, type_spec)


def _member(type_spec: fl.Type) -> fl.Type:
    if type_checks.differs_by_client(type_spec):
        raise Fallback(f"a value of type `{type_spec}`")
    is_placed = isinstance(type_spec, fl.FederatedType)
    return type_spec.member if is_placed else type_spec


class SelectionGraph:
    """The graph of `plans.Selection.function`, in a loop over many keys.

    It has the same bits as a call for each key. The constructor raises Fallback if the
    function draws random numbers or has state, or if the shape of an element is
    unknown.
    """

    def __init__(self, function: bytes, device: str | None) -> None:
        self._device = device
        self._block = blocks.parse_block(function)
        element = type_checks.function_type(self._block.type_signature).result
        self._constants, _ = type_checks.struct_type(parameter_of(self._block))
        self._elements = specs_of(element)
        if not all(spec.shape.is_fully_defined() for spec in self._elements):
            raise Fallback(f"a selection of `{element}`")
        self._signature = specs_of(self._constants)
        keys = tf.TensorSpec([None], tf.int32)
        with tf.device(device):
            self._function = as_graph(self._trace, [*self._signature, keys])

    def _trace(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        *constants, keys = tensors
        packed = trees.unflatten(iter(constants), self._constants)
        importer = GraphImporter(allowed="none")

        def step(index: tf.Tensor, *arrays: Any) -> list[Any]:
            pair = structs.Struct([(None, packed), (None, tf.gather(keys, index))])
            elements = trees.flatten(GraphBuilder(importer).call(self._block, pair))
            written = zip(arrays, elements, strict=True)
            return [index + 1, *(array.write(index, t) for array, t in written)]

        count = tf.shape(keys)[0]
        empty = [
            tf.TensorArray(spec.dtype, count, element_shape=spec.shape)
            for spec in self._elements
        ]
        _, *arrays = tf.while_loop(
            before(count), step, [tf.constant(0), *empty], parallel_iterations=1
        )
        return [array.stack() for array in arrays]

    def run(
        self, constants: Sequence[Any], keys: NDArray[np.int32]
    ) -> list[NDArray[Any]]:
        """Return one array for each tensor of an element. Row i is for `keys[i]`.

        Args:
            constants: The values that all keys share, such as the array from which
                elements are selected, as plain values or tensors in tuples.
            keys: The keys, i32[keys].
        """
        flat = trees.flatten(tuple(constants))
        with tf.device(self._device):
            tensors = as_tensors(flat, self._signature)
            ran = self._function([*tensors, tf.constant(keys, tf.int32)])
        return [tensor.numpy() for tensor in ran]


_CACHED_GRAPHS = 64
"""Number of graphs that an executor caches. A graph of a small model takes a few MB."""


class KernelGraph(Protocol):
    """A graph that an executor calls instead of a series of computations."""

    @property
    def run(self) -> Callable[..., Any]:
        """The method that runs the graph and returns its tensors."""
        ...


_Kernel = TypeVar("_Kernel", bound=KernelGraph)
_Refused = tuple[Fallback, Sequence[diagnostics.WorkInterpreted]]


_shared: LruCache[bytes, KernelGraph] = LruCache(_CACHED_GRAPHS)
"""Kernels without state, which all threads and contexts of a process share."""

_sharing = threading.RLock()  # reentrant, because a kernel may contain a merge


def _get_shared(key: bytes, make: Callable[[], KernelGraph]) -> KernelGraph:
    with _sharing:  # another thread waits instead of building the same kernel
        kernel = _shared.find(key)
        if kernel is None:
            kernel = make()
            if not isinstance(kernel, ClientKernel) or kernel.may_be_shared:
                _shared.put(key, kernel)
        return kernel


def _split(kernel: plans.Kernel) -> tuple[plans.Kernel, list[float]]:
    (work, accumulate), values = numbers.take_out(kernel.work, kernel.accumulate)
    return dataclasses.replace(kernel, work=work, accumulate=accumulate), values


class KernelCache:
    """Builds kernels on first use and caches them by content.

        clients     zeros, constants and clients -> partials of subtrees of leaves
        merge       two partials -> one
        server      arguments of a function at the server -> its result
        finish      partials -> the merged partial -> result of the after-merge function
        selection   constants, keys -> the element for each key

    Each method returns a `Fallback` if no graph can do the work. Executors then do it
    step by step, with the same bits. The least recently used kernels are closed. An
    error that shows a mistake in ray_fed is raised.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        # Only the reason of a refusal is cached. A raised error would keep its frames
        # alive, and the arguments in them.
        self._kernels: LruCache[bytes, KernelGraph | _Refused]
        self._kernels = LruCache(_CACHED_GRAPHS, _close)
        # Kernels that differ in their numbers share a graph.
        self._take_out = functools.lru_cache(_CACHED_GRAPHS)(numbers.take_out)
        self._split = functools.lru_cache(_CACHED_GRAPHS)(_split)

    def clients(
        self,
        kernel: plans.Kernel,
        merge: bytes | None,
        *,
        one_per_leaf: bool = False,
        meanwhile: Callable[[], object] | None = None,
    ) -> ClientKernel | Fallback:
        """Return the graph of the clients' work and its accumulation in leaves.

        With a `merge` of None, or one that cannot be a graph, the graph merges nothing.
        `meanwhile` is called on another thread after a new graph was built.
        """
        shared, values = self._split(kernel)

        def build(key: str) -> ClientKernel:
            merger = None if merge is None else self.merge(merge)
            if isinstance(merger, Fallback):
                merger = None
            device = self._device
            built = ClientKernel(
                shared, merger, device, one_a_leaf=one_per_leaf, key=key
            )
            if meanwhile is not None:
                threading.Thread(target=meanwhile).start()
            return built

        content = b"clients%d" % one_per_leaf + shared.content + (merge or b"")
        graph = self._get(content, "the work of clients", build)
        return graph if isinstance(graph, Fallback) else graph.with_numbers(values)

    def merge(self, merge: bytes) -> MergeKernel | Fallback:
        """Return the graph of a serialized merge of two partials."""
        return self._get(
            b"merge" + merge,
            "the merge of two partials",
            lambda _: MergeKernel(merge, self._device),
        )

    def server(self, function: bytes) -> ServerGraph | Fallback:
        """Return the graph of a serialized function of values at the server."""
        (shared,), values = self._take_out(function)
        graph = self._get(
            b"server" + shared,
            "zeros and constants at the server",
            lambda key: ServerGraph(shared, self._device, key=key),
        )
        return graph if isinstance(graph, Fallback) else graph.with_numbers(values)

    def finish(
        self, merge: bytes, computation: bytes | None, num_others: int
    ) -> ServerGraph | Fallback:
        """Return the graph of the remaining merges and of the `after_merge` of a round.

        The arguments are as in `ServerGraph`. `computation` is the serialized function.
        """
        merger = self.merge(merge)
        if isinstance(merger, Fallback):
            return merger
        (after,), values = self._take_out(computation or b"")
        graph = self._get(
            b"finish%d %d " % (num_others, len(merge)) + merge + after,
            "the finish of a round",
            lambda key: ServerGraph(
                after or None, self._device, merger, num_others, key
            ),
        )
        return graph if isinstance(graph, Fallback) else graph.with_numbers(values)

    def selection(self, function: bytes) -> SelectionGraph | Fallback:
        """Return the graph of a `plans.Selection.function` for many keys."""
        return self._get(
            b"select" + function,
            "what keys select",
            lambda _: SelectionGraph(function, self._device),
        )

    def _get(
        self, content: bytes, label: str, build: Callable[[str], _Kernel]
    ) -> _Kernel | Fallback:
        def try_build() -> KernelGraph | _Refused:
            shared = repr(self._device).encode() + content
            # Another device, or determinism, needs other ops for the same work.
            where = jit.kind_of(self._device), config.is_op_determinism_enabled()
            key = hashlib.sha256(repr(where).encode() + shared).hexdigest()
            try:
                return _get_shared(shared, lambda: build(key))
            except Fallback as fallback:
                return Fallback(fallback.reason), []
            except errors.UnsupportedError as error:
                return Fallback(str(error)), []
            except errors.RayFedError as error:
                return Fallback(diagnostics.first_line(error)), []
            except Exception as error:  # noqa: BLE001 (TensorFlow may raise any class)
                note = diagnostics.WorkInterpreted.of(label, error)
                return Fallback(note.reason), [note]

        kernel = self._kernels.get(content, try_build)
        if isinstance(kernel, tuple):
            fallback, notes = kernel
            diagnostics.note(notes)
            return fallback
        return cast("_Kernel", kernel)

    def close(self) -> None:
        """Drop all graphs."""
        self._kernels.clear()


def _close(kernel: KernelGraph | _Refused) -> None:
    if isinstance(kernel, ClientKernel):
        kernel.close()

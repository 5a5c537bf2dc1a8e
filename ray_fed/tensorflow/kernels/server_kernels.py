"""Work at the server, and what keys select, as one graph each.

Executors would make many calls. What a function at the server has for many keys is a
graph that loops over them, with the bits of one call a key. Graphs are kept by content;
threads share those without state.
"""

import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, TypeVar, cast

import federated_language as fl
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
from ray_fed.language import blocks, structs, type_checks
from ray_fed.plan import diagnostics
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow import normal_forms
from ray_fed.tensorflow.kernels.client_kernel import (
    ClientKernel,
    MergeKernel,
    empty_array,
    merge_all,
)
from ray_fed.tensorflow.kernels.graph_builder import (
    GraphBuilder,
    GraphImporter,
    flatten,
    leaf_types,
    parameter_of,
    refuse_many,
    specs_of,
)
from ray_fed.tensorflow.kernels.graph_functions import (
    as_graph,
    as_pruned_graph,
    as_tensors,
    before,
    stack,
)
from ray_fed.values import components, stored, tensor_structures
from ray_fed.values.lru_cache import LruCache

_CACHED_PAIRS = 64
"""Merge trees whose pairs a graph keeps as tensors."""


class ServerGraph:
    """The graph of a function of values at the server, without draws or effects.

    Variables that it creates, as Keras optimisers do, are made anew in each call.

    Its results have the bits of executors' results: TensorFlow optimises each
    computation in it for itself.

    Args:
        function: serialised; its argument may hold values of clients that it does not
            read. None returns the merged partial.
        device: name of the device to run on; None leaves it to TensorFlow.
        merge: of two partials. The merged partial is the last part of the argument, or
            all of it. None: no partials are merged.
        num_others: the number of parts of the argument before the merged partial.

    Attributes:
        nest: takes the tensors of the result, and returns its plain value.
        may_be_shared: whether several threads may run it at once.

    Raises:
        Fallback: it needs what only executors can do.
    """

    may_be_shared = True

    def __init__(
        self,
        function: bytes | None,
        device: str | None,
        merge: MergeKernel | None = None,
        num_others: int = 0,
    ) -> None:
        self._device, self._merge = device, merge
        block = None if function is None else blocks.parse_block(function)
        result, types = _types_of(block, num_others, merge)
        self.nest = tensor_structures.nester(result)
        self._num_results = len(specs_of(result))  # refuses sequences
        divided = [
            part for index, t in enumerate(types) for part in _parts(t, (index,))
        ]
        signature = [spec for _, member in divided for spec in specs_of(member)]
        self._merged_from = len(signature)
        self._merge_specs: list[tf.TensorSpec] = []
        if merge is not None:  # takes partials, stacked, and the pairs to merge
            some = tf.TensorShape([None])
            self._merge_specs = [
                tf.TensorSpec(some.concatenate(spec.shape), spec.dtype)
                for spec in specs_of(merge.partial)
            ]
            signature += [*self._merge_specs, tf.TensorSpec([None, 2], tf.int32)]
        refuse_many(max(len(signature), self._num_results), "at the server")

        def build(*tensors: tf.Tensor) -> list[tf.Tensor]:
            fed = iter(tensors)
            elements = [(None, _fill(type_spec, fed)) for type_spec in types]
            if merge is not None:
                elements.append((None, _merge(merge, list(fed))))
            argument = _struct(elements) if len(elements) > 1 else _only(elements)
            if block is None:
                return flatten(argument)
            counts: list[tf.Tensor] = []
            builder = GraphBuilder(GraphImporter(allowed="variables"), counts)
            result = flatten(builder.call(block, argument))
            is_empty = [tf.equal(count, 0) for count in counts]
            return [*result, tf.reduce_any(is_empty)] if counts else result

        with tf.device(device):
            self._run, read = as_pruned_graph(build, signature)
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
            parts: each part of the argument but the merged partial: plain, or
                tensors in tuples; a part that the function does not read may be any.
            partials: the plain partials to merge.
            pairs: positions of the two partials of each merge, in order; the result
                takes the place of the left one.

        Raises:
            Fallback: the function divides by a count of zero; executors raise an
                error that says so.
        """
        with tf.device(self._device):
            tensors = [*self._read(parts), *self._stack(partials, pairs)]
            ran = self._run(tensors)
        if len(ran) > self._num_results and ran.pop():
            raise Fallback("a mean of nothing at the server")
        return ran

    def to_plain(self, returned: Sequence[tf.Tensor]) -> structs.Plain:
        """Return the plain value of the tensors of the result."""
        return self.nest(tensor.numpy() for tensor in returned)

    def _read(self, parts: Sequence[Any]) -> list[tf.Tensor]:
        read_leaves: list[Any] = []
        for path, member, wanted in self._reads:
            part = functools.reduce(operator.getitem, path, parts)
            if isinstance(part, stored.StoredComponents):
                part = components.join(part.components, member)
            leaves = (
                flatten(normal_forms.normalise(part, member))
                if stored.holds_external(part)
                else tensor_structures.flatten(part)
            )
            read_leaves += [leaves[index] for index in wanted]
        return as_tensors(read_leaves, self._read_specs)

    def _stack(
        self, partials: Sequence[Any], pairs: Sequence[tuple[int, int]]
    ) -> list[tf.Tensor]:
        if self._merge is None:
            return []
        flattened = [tensor_structures.flatten(partial) for partial in partials]
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
    """Yield each part that a graph reads, and which of its tensors."""
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
    """Return the type of a graph's result, and of what it takes beside partials."""
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
    """Return what partials come to, inside of a graph."""
    *stacked, pairs = tensors
    if not stacked:
        raise Fallback("partials without tensors")
    count = tf.shape(stacked[0])[0]
    arrays = [
        empty_array(spec, count).unstack(tensor)
        for spec, tensor in zip(specs_of(merge.partial), stacked, strict=True)
    ]
    merged = (array.read(0) for array in merge_all(merge, pairs, arrays))
    return tensor_structures.unflatten(merged, merge.partial)


def _parts(
    type_spec: fl.Type, path: plans.Path
) -> Iterator[tuple[plans.Path, fl.Type]]:
    """Yield each part that a graph can be given, without its placement."""
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
    """Return what stands for an argument inside of a graph."""
    if type_checks.is_placed_struct(type_spec):
        pairs = type_checks.struct_type(type_spec).items()
        elements = [(name, _fill(element, tensors)) for name, element in pairs]
        return _struct(elements)
    if _is_taken(type_spec):
        return tensor_structures.unflatten(tensors, _without_placements(type_spec))
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
    """A struct of which the graph is not given every part."""

    def __init__(self, elements: Sequence[Any]) -> None:
        self._elements = elements

    def __getitem__(self, index: int) -> Any:
        element = self._elements[index]
        if isinstance(element, Fallback):
            raise element
        return element


def _without_placements(type_spec: fl.Type) -> fl.Type:
    if type_checks.differs_by_client(type_spec):
        raise Fallback(f"a value of type `{type_spec}`")
    if isinstance(type_spec, fl.FederatedType):
        return type_spec.member
    if isinstance(type_spec, fl.StructType):
        elements = type_spec.items()
        return fl.StructType([(name, _without_placements(e)) for name, e in elements])
    return type_spec


class SelectionGraph:
    """The graph of a function of constants and a key, for many keys.

    Args:
        function: serialised, <constants, key> -> element.
        device: name of the device to run on; None leaves it to TensorFlow.

    Attributes:
        may_be_shared: whether several threads may run it at once.

    Raises:
        Fallback: it draws random numbers, has state, or an element is of no shape
            that is known.
    """

    may_be_shared = True

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
        packed = tensor_structures.unflatten(iter(constants), self._constants)
        importer = GraphImporter(allowed="none")

        def step(index: tf.Tensor, *arrays: Any) -> list[Any]:
            pair = structs.Struct([(None, packed), (None, tf.gather(keys, index))])
            elements = flatten(GraphBuilder(importer).call(self._block, pair))
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
        """Return each tensor of the elements, one a key in the first dimension.

        Args:
            constants: plain, or tensors in tuples.
            keys: i32[keys].
        """
        flat = tensor_structures.flatten(tuple(constants))
        with tf.device(self._device):
            tensors = as_tensors(flat, self._signature)
            ran = self._function([*tensors, tf.constant(keys, tf.int32)])
        return [tensor.numpy() for tensor in ran]


_CACHED_GRAPHS = 64
"""Graphs that one executor keeps; one of a small model holds a few MB."""


class Kernel(Protocol):
    """A graph that an executor runs: several computations, many times, as one."""

    @property
    def may_be_shared(self) -> bool:
        """Whether several threads may run it at once."""
        ...

    @property
    def run(self) -> Callable[..., Any]:
        """Runs the graph, and returns its tensors."""
        ...


_Kernel = TypeVar("_Kernel", bound=Kernel)
_Refused = tuple[Fallback, Sequence[diagnostics.WorkInterpreted]]


_shared: LruCache[bytes, Kernel] = LruCache(_CACHED_GRAPHS)
"""Kernels that keep nothing: one for all threads of a process, and its contexts."""

_sharing = threading.RLock()  # one may be built of another: of a merge


def _get_shared(key: bytes, make: Callable[[], Kernel]) -> Kernel:
    """Return the kernel of a key; make it, and share it, if there is none."""
    with _sharing:  # who else wants it waits, and need not build it too
        kernel = _shared.find(key)
        if kernel is None:
            kernel = make()
            if kernel.may_be_shared:
                _shared.put(key, kernel)
        return kernel


class Kernels:
    """Kernels by content, each built when first asked for; the least used are closed.

        clients     zeros, constants and clients -> partials of subtrees of leaves
        merge       two partials -> one
        server      what a function at the server takes -> its result
        finish      partials -> merged, and what comes after that at the server
        selection   constants, keys -> what a function at the server has for each key

    What cannot be one graph is a `Fallback`, and computed step by step, with the same
    bits.

    Args:
        device: name of the device to run on; None leaves it to TensorFlow.

    Raises:
        Exception: building a graph found a mistake in ray_fed.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        # A refusal by its reason: an error keeps each frame that it was raised through,
        # and with those the arguments of a call.
        self._kernels: LruCache[bytes, Kernel | _Refused]
        self._kernels = LruCache(_CACHED_GRAPHS, _close)

    def clients(
        self, kernel: plans.Kernel, merge: bytes | None, *, one_per_leaf: bool = False
    ) -> ClientKernel | Fallback:
        """Return the graph of clients' work and its accumulation, leaf by leaf.

        Args:
            kernel: functions of one client.
            merge: serialised, of two partials, for subtrees; None: nothing is merged.
                One that is no graph is left to whoever calls this one.
            one_per_leaf: whether each of the leaves that are to run has one client.
        """

        def build() -> ClientKernel:
            merger = None if merge is None else self.merge(merge)
            if isinstance(merger, Fallback):
                merger = None
            device = self._device
            return ClientKernel(kernel, merger, device, one_a_leaf=one_per_leaf)

        content = b"clients%d" % one_per_leaf + kernel.content + (merge or b"")
        return self._get(content, "the work of clients", build)

    def merge(self, merge: bytes) -> MergeKernel | Fallback:
        """Return the graph that merges two partials; `merge` is serialised."""
        return self._get(
            b"merge" + merge,
            "the merge of two partials",
            lambda: MergeKernel(merge, self._device),
        )

    def server(self, function: bytes) -> ServerGraph | Fallback:
        """Return the graph of a serialised function of values at the server."""
        return self._get(
            b"server" + function,
            "zeros and constants at the server",
            lambda: ServerGraph(function, self._device),
        )

    def finish(
        self, merge: bytes, computation: bytes | None, num_others: int
    ) -> ServerGraph | Fallback:
        """Return the graph that ends a round.

        Args:
            merge: serialised, of two partials.
            computation: serialised; None returns what was merged.
            num_others: how many parts it takes before what was merged.
        """
        merger = self.merge(merge)
        if isinstance(merger, Fallback):
            return merger
        return self._get(
            b"finish%d %d " % (num_others, len(merge)) + merge + (computation or b""),
            "the finish of a round",
            lambda: ServerGraph(computation, self._device, merger, num_others),
        )

    def selection(self, function: bytes) -> SelectionGraph | Fallback:
        """Return the graph of what keys select: see `plans.KeySelection`."""
        return self._get(
            b"select" + function,
            "what keys select",
            lambda: SelectionGraph(function, self._device),
        )

    def _get(
        self, content: bytes, label: str, build: Callable[[], _Kernel]
    ) -> _Kernel | Fallback:
        def try_build() -> Kernel | _Refused:
            try:
                return _get_shared(repr(self._device).encode() + content, build)
            except Fallback as fallback:
                return Fallback(fallback.reason), []
            except errors.UnsupportedError as error:
                return Fallback(str(error)), []
            except errors.RayFedError as error:
                return Fallback(diagnostics.first_line(error)), []
            except Exception as error:  # noqa: BLE001 (TensorFlow refuses with any)
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


def _close(kernel: Kernel | _Refused) -> None:
    if isinstance(kernel, ClientKernel):
        kernel.close()

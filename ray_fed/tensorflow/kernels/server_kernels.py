"""Work at the server and what keys select: each as one graph.

Work at the server as one graph, where executors would make many calls.

What a function at the server has for many keys, as one graph that loops over them.

Its bits are those of one call a key.

The graphs of fused work, by content: those without state are shared by threads.
"""

import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import federated_language as fl
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
from ray_fed.language import blocks, structs, type_checks
from ray_fed.plan import diagnostics
from ray_fed.plan.plans import Fused
from ray_fed.tensorflow.kernels.client_kernel import ClientKernel
from ray_fed.tensorflow.kernels.client_work import parameter_of, refuse_many, specs_of
from ray_fed.tensorflow.kernels.graph_builder import (
    Grafts,
    Interpreter,
    UnfitError,
    flatten,
    leaf_types,
)
from ray_fed.tensorflow.kernels.graph_functions import (
    as_graph,
    as_pruned_graph,
    as_tensors,
    before,
)
from ray_fed.tensorflow.kernels.merge_kernels import MergeKernel, empty_array, merge_all
from ray_fed.tensorflow.loading import normal
from ray_fed.tensorflow.tensors import copies
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
        type_signature: the parameter has the parts that the graph reads, then the
            partials, then the pairs of partials to merge.
        may_be_shared: whether several threads may run it at once.

    Raises:
        UnfitError: it needs what only executors can do.
    """

    def __init__(
        self,
        function: bytes | None,
        device: str | None,
        merge: MergeKernel | None = None,
        num_others: int = 0,
    ) -> None:
        self._device, self._merge = device, merge
        self.may_be_shared = merge is None or merge.may_be_shared
        block = None if function is None else blocks.parse_block(function)
        result, taken = _types_of(block, num_others, merge)
        self.nest = tensor_structures.nester(result)
        self._num_results = len(specs_of(result))  # refuses sequences
        divided = [
            part for index, t in enumerate(taken) for part in _parts(t, (index,))
        ]
        self.type_signature = _signature(divided, merge, result)
        signature = [spec for _, member in divided for spec in specs_of(member)]
        self._merged_from = len(signature)
        self._merge_specs = [] if merge is None else _merge_signature(merge)
        signature += self._merge_specs
        refuse_many(max(len(signature), self._num_results), "at the server")

        def build(*tensors: tf.Tensor) -> list[tf.Tensor]:
            fed = iter(tensors)
            given = [(None, _fill(type_spec, fed)) for type_spec in taken]
            if merge is not None:
                given.append((None, _merge(merge, list(fed))))
            argument = _struct(given) if len(given) > 1 else _only(given)
            if block is None:
                return flatten(argument)
            counts: list[tf.Tensor] = []
            interpreter = Interpreter(Grafts(allowed="variables"), counts)
            result = flatten(interpreter.call(block, argument))
            is_empty = [tf.equal(count, 0) for count in counts]
            return [*result, tf.reduce_any(is_empty)] if counts else result

        with tf.device(device):
            self._run, read = as_pruned_graph(build, signature)
        self._taken = frozenset(read)
        self._reads = list(_reads(divided, self._taken))
        self._read_specs = [
            signature[index] for index in read if index < self._merged_from
        ]
        self._pairs = functools.lru_cache(maxsize=_CACHED_PAIRS)(_make_pairs)

    def run(
        self,
        given: Sequence[Any],
        partials: Sequence[Any] = (),
        pairs: Sequence[tuple[int, int]] = (),
    ) -> list[tf.Tensor]:
        """Return the tensors of the result.

        Args:
            given: each part of the argument but the merged partial: plain, or
                tensors in tuples; a part that the function does not read may be any.
            partials: the plain partials to merge.
            pairs: positions of the two partials of each merge, in order; the result
                takes the place of the left one.

        Raises:
            UnfitError: the function divides by a count of zero; executors raise an
                error that says so.
        """
        with tf.device(self._device):
            tensors = [*self._read(given), *self._stack(partials, pairs)]
            ran = self._run(tensors)
        if len(ran) > self._num_results and ran.pop():
            raise UnfitError("a mean of nothing at the server")
        return ran

    def to_plain(self, returned: Sequence[tf.Tensor]) -> structs.Plain:
        """Return the plain value of the tensors of the result."""
        return self.nest(tensor.numpy() for tensor in returned)

    def _read(self, given: Sequence[Any]) -> list[tf.Tensor]:
        given_read: list[Any] = []
        for path, member, wanted in self._reads:
            part = functools.reduce(operator.getitem, path, given)
            if isinstance(part, stored.StoredComponents):
                part = components.join(part.components, member)
            leaves = (
                flatten(normal.normalise(part, member))
                if stored.holds_external(part)
                else tensor_structures.flatten(part)
            )
            given_read += [leaves[index] for index in wanted]
        return as_tensors(given_read, self._read_specs)

    def _stack(
        self, partials: Sequence[Any], pairs: Sequence[tuple[int, int]]
    ) -> list[tf.Tensor]:
        if self._merge is None:
            return []
        held = [tensor_structures.flatten(given) for given in partials]
        columns = zip(zip(*held, strict=True), self._merge_specs[:-1], strict=True)
        stacked = [copies.stack(column, spec.dtype) for column, spec in columns]
        tensors = [*stacked, self._pairs(tuple(pairs))]
        first = self._merged_from
        return [t for i, t in enumerate(tensors, first) if i in self._taken]


def _signature(
    divided: Sequence[tuple[plans.Path, fl.Type]],
    merge: MergeKernel | None,
    result: fl.Type,
) -> fl.FunctionType:
    taken = [member for _, member in divided]
    if merge is not None:
        pairs = fl.TensorType(np.int32, [None, 2])
        taken += [fl.SequenceType(merge.partial), pairs]
    return fl.FunctionType(fl.StructType([(None, t) for t in taken]), result)


def _make_pairs(pairs: tuple[tuple[int, int], ...]) -> tf.Tensor:
    return tf.constant(pairs, tf.int32, [len(pairs), 2])


def _reads(
    parts_taken: Sequence[tuple[plans.Path, fl.Type]], taken: AbstractSet[int]
) -> Iterator[tuple[plans.Path, fl.Type, list[int]]]:
    """Yield each part that a graph reads, and which of its tensors."""
    first = 0
    for path, member in parts_taken:
        size = len(leaf_types(member))
        wanted = [index for index in range(size) if first + index in taken]
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


def _merge_signature(merge: MergeKernel) -> list[tf.TensorSpec]:
    """Return the specs of partials, stacked, and of the pairs to merge."""
    specs = [
        tf.TensorSpec(tf.TensorShape([None]).concatenate(spec.shape), spec.dtype)
        for spec in specs_of(merge.partial)
    ]
    return [*specs, tf.TensorSpec([None, 2], tf.int32)]


def _merge(merge: MergeKernel, tensors: Sequence[tf.Tensor]) -> Any:
    """Return what partials come to, inside of a graph."""
    *stacked, pairs = tensors
    if not stacked:
        raise UnfitError("partials without tensors")
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
    return UnfitError(f"a value of type `{type_spec}` at the server")


def _only(elements: Sequence[tuple[str | None, Any]]) -> Any:
    if elements and isinstance(elements[0][1], UnfitError):
        raise elements[0][1]
    return elements[0][1] if elements else None


def _struct(elements: Sequence[tuple[str | None, Any]]) -> Any:
    if any(isinstance(element, _SomeOf | UnfitError) for _, element in elements):
        return _SomeOf([element for _, element in elements])
    return structs.Struct(elements)


class _SomeOf:
    """A struct of which the graph is not given every part."""

    def __init__(self, elements: Sequence[Any]) -> None:
        self._elements = elements

    def __getitem__(self, index: int) -> Any:
        element = self._elements[index]
        if isinstance(element, UnfitError):
            raise element
        return element


def _without_placements(type_spec: fl.Type) -> fl.Type:
    if type_checks.differs_by_client(type_spec):
        raise UnfitError(f"a value of type `{type_spec}`")
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
        type_signature: of the function.
        may_be_shared: whether several threads may run it at once.

    Raises:
        UnfitError: it draws random numbers, has state, or an element is of no shape
            that is known.
    """

    may_be_shared = True

    def __init__(self, function: bytes, device: str | None) -> None:
        self._device = device
        self._block = blocks.parse_block(function)
        self.type_signature = type_checks.function_type(self._block.type_signature)
        self._constants, _ = type_checks.struct_type(parameter_of(self._block))
        self._elements = specs_of(self.type_signature.result)
        if not all(spec.shape.is_fully_defined() for spec in self._elements):
            raise UnfitError(f"a selection of `{self.type_signature.result}`")
        self._signature = specs_of(self._constants)
        keys = tf.TensorSpec([None], tf.int32)
        with tf.device(device):
            self._function = as_graph(self._trace, [*self._signature, keys])

    def _trace(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        *constants, keys = tensors
        packed = tensor_structures.unflatten(iter(constants), self._constants)
        grafts = Grafts(allowed="none")

        def step(index: tf.Tensor, *arrays: Any) -> list[Any]:
            pair = structs.Struct([(None, packed), (None, tf.gather(keys, index))])
            found = flatten(Interpreter(grafts).call(self._block, pair))
            written = zip(arrays, found, strict=True)
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
        given = tensor_structures.flatten(tuple(constants))
        with tf.device(self._device):
            tensors = as_tensors(given, self._signature)
            ran = self._function([*tensors, tf.constant(keys, tf.int32)])
        return [tensor.numpy() for tensor in ran]

    def to_plain(self, returned: list[NDArray[Any]]) -> structs.Plain:
        """Return the tensors of the elements."""
        return returned


_CACHED_GRAPHS = 64
"""Graphs that one executor keeps; one of a small model holds a few MB."""


class FusedGraph(Protocol):
    """The graph of fused work."""

    @property
    def type_signature(self) -> fl.FunctionType:
        """The type of the function that it is."""
        ...

    @property
    def may_be_shared(self) -> bool:
        """Whether several threads may run it at once, as nothing of it changes."""
        ...

    @property
    def run(self) -> Callable[..., Any]:
        """Runs the graph, and returns its tensors."""
        ...

    def to_plain(self, returned: Any) -> Any:
        """Return what `run` returned as a plain value."""
        ...


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """Why fused work cannot be one graph.

    Attributes:
        reason: in a few words.
        note: where TensorFlow raised an error.
    """

    reason: str
    note: diagnostics.Interpreted | None = None


class _SharedGraphs:
    """Graphs without state: one for all threads of a process, and for its contexts."""

    def __init__(self) -> None:
        self._graphs: LruCache[bytes, FusedGraph] = LruCache(_CACHED_GRAPHS)
        self._lock = threading.RLock()  # a fold is built of a merge

    def get(self, key: bytes, make: Callable[[], FusedGraph]) -> FusedGraph:
        """Return the graph of a key; make it, and share it, if there is none."""
        with self._lock:  # who else wants it waits, and need not build it too
            found = self._graphs.find(key)
            if found is None:
                found = make()
                if found.may_be_shared:
                    self._graphs.put(key, found)
            return found


_SHARED = _SharedGraphs()


class FusedGraphs:
    """Graphs by content, the least recently used dropped and closed.

    Args:
        device: name of the device to run on; None leaves it to TensorFlow.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        # A refusal by its reason: an error keeps each frame that it was raised through,
        # and with those the arguments of a call.
        self._graphs: LruCache[bytes, FusedGraph | _Refusal]
        self._graphs = LruCache(_CACHED_GRAPHS, _close)

    def get(self, work: Fused) -> FusedGraph:
        """Return the graph of fused work, built when first asked for.

        Raises:
            UnsupportedError: it cannot be one graph; why, in a few words.
            Exception: building the graph found a mistake in ray_fed.
        """
        found = self._graphs.get(work.content, lambda: self._try_build(work))
        if isinstance(found, _Refusal):
            if found.note is not None:
                diagnostics.note([found.note])
            raise errors.UnsupportedError(found.reason)
        return found

    def _try_build(self, work: Fused) -> FusedGraph | _Refusal:
        key = repr(self._device).encode() + work.content
        try:
            return _SHARED.get(key, lambda: self._build(work))
        except (UnfitError, errors.UnsupportedError) as error:
            return _Refusal(str(error))
        except errors.RayFedError as error:
            return _Refusal(diagnostics.first_line(error))
        except Exception as error:  # noqa: BLE001 (TensorFlow refuses with any class)
            note = diagnostics.Interpreted.of(work.label, error)
            return _Refusal(note.reason, note)

    def _build(self, work: Fused) -> FusedGraph:
        match work:
            case plans.PartialMerge():
                return MergeKernel(work.merge, self._device)
            case plans.ServerWork():
                return ServerGraph(work.function, self._device)
            case plans.RoundFinish():
                merge = self._merge(work.merge)
                return ServerGraph(
                    work.computation, self._device, merge, work.num_others
                )
            case plans.KeySelection():
                return SelectionGraph(work.function, self._device)
            case plans.ClientFold():
                merge = None if work.merge is None else self._merge(work.merge)
                return ClientKernel(
                    work.kernel, merge, self._device, one_a_leaf=work.one_a_leaf
                )
            case _:
                raise errors.UnsupportedError(f"no graph of {type(work).__name__}")

    def _merge(self, merge: plans.PartialMerge) -> MergeKernel:
        found: Any = self.get(merge)
        return found

    def close(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()


def _close(graph: FusedGraph | _Refusal) -> None:
    if isinstance(graph, ClientKernel):
        graph.close()

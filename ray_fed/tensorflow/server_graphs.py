"""What is computed at the server as a graph: executors would make many calls of it."""

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import federated_language as fl
import tensorflow as tf

import ray_fed.blocks as blocks
import ray_fed.parts as parts
import ray_fed.plan as plan
import ray_fed.tensorflow.normal as normal
import ray_fed.values as values
from ray_fed.plain import pack
from ray_fed.tensorflow.client_data import UnfitError, flatten, leaf_types
from ray_fed.tensorflow.client_work import specs_of
from ray_fed.tensorflow.grafts import Grafts
from ray_fed.tensorflow.graph_functions import as_pruned_graph
from ray_fed.tensorflow.symbolic import Interpreter


class ServerGraph:
    """The graph of a function of values at the server, without draws or effects.

    It has the bits that executors have: each computation in it is optimised for itself.

    Args:
        function: serialised; what it takes may hold values of clients, unread.
        device: name of the device to run on; None leaves it to TensorFlow.

    Attributes:
        result: type of its result, placements left out.
        may_be_shared: whether several threads may run it at once.

    Raises:
        UnfitError: it needs what only executors can do.
    """

    may_be_shared = True

    def __init__(self, function: bytes, device: str | None) -> None:
        self._device = device
        block = blocks.parse_block(function)
        type_spec = values.function_type(block.type_signature)
        self.result = _without_placements(type_spec.result)
        specs_of(self.result)  # refuses sequences
        parameter = type_spec.parameter
        self._parts = [] if parameter is None else list(_parts(parameter, ()))
        members = [member for _, member in self._parts]
        signature = [spec for member in members for spec in specs_of(member)]

        def build(*tensors: tf.Tensor) -> list[tf.Tensor]:
            fed = iter(tensors)
            argument = None if parameter is None else _fill(parameter, fed)
            if isinstance(argument, UnfitError):
                raise argument
            counts: list[tf.Tensor] = []
            grafts = Grafts(stateless=True)
            result = flatten(Interpreter(grafts, counts).call(block, argument))
            is_empty = [tf.equal(count, 0) for count in counts]
            return [*result, tf.reduce_any(is_empty)] if counts else result

        with tf.device(device):
            self._run, self._taken = as_pruned_graph(build, signature)
        self._num_results = len(leaf_types(self.result))

    def __call__(self, argument: Any) -> list[tf.Tensor] | None:
        """Return the tensors of the result; None where executors are to raise.

        Args:
            argument: plain, or tensors in structs; parts that are not read are any.
        """
        with tf.device(self._device):
            ran = self._run(self._read(argument))
        if len(ran) > self._num_results and ran.pop():
            return None
        return ran

    def _read(self, argument: Any) -> list[tf.Tensor]:
        tensors: list[tf.Tensor] = []
        first, taken = 0, set(self._taken)
        for path, member in self._parts:
            stop = first + len(leaf_types(member))
            if not taken.isdisjoint(range(first, stop)):
                part = functools.reduce(operator.getitem, path, argument)
                if isinstance(part, values.StoredParts):
                    part = parts.join(part.parts, member)
                leaves = flatten(normal.normalise(part, member))
                tensors += [leaves[i - first] for i in range(first, stop) if i in taken]
            first = stop
        return tensors


def _parts(type_spec: fl.Type, path: plan.Path) -> Iterator[tuple[plan.Path, fl.Type]]:
    """Yield each part that a graph can be given, without its placement."""
    if _is_divided(type_spec):
        for index, (_, element) in enumerate(values.struct_type(type_spec).items()):
            yield from _parts(element, (*path, index))
    elif _is_taken(type_spec):
        yield path, _without_placements(type_spec)


def _is_divided(type_spec: fl.Type) -> bool:
    is_struct = isinstance(type_spec, fl.StructType)
    return is_struct and fl.framework.contains_federated_types(type_spec)


def _is_taken(type_spec: fl.Type) -> bool:
    if values.differs_by_client(type_spec):
        return False
    kinds = fl.SequenceType | fl.FunctionType
    return not fl.framework.type_contains(type_spec, lambda t: isinstance(t, kinds))


def _fill(type_spec: fl.Type, tensors: Iterator[tf.Tensor]) -> Any:
    """Return what stands for an argument inside of a graph."""
    if _is_divided(type_spec):
        pairs = values.struct_type(type_spec).items()
        elements = [(name, _fill(element, tensors)) for name, element in pairs]
        if any(isinstance(e, _SomeOf | UnfitError) for _, e in elements):
            return _SomeOf([element for _, element in elements])
        return values.Struct(elements)
    if _is_taken(type_spec):
        return pack(tensors, _without_placements(type_spec))
    return UnfitError(f"a value of type `{type_spec}` at the server")


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
    if values.differs_by_client(type_spec):
        raise UnfitError(f"a value of type `{type_spec}`")
    if isinstance(type_spec, fl.FederatedType):
        return type_spec.member
    if isinstance(type_spec, fl.StructType):
        elements = type_spec.items()
        return fl.StructType([(name, _without_placements(e)) for name, e in elements])
    return type_spec

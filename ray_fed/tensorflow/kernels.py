"""A leaf's client work and accumulation as one graph that loops over clients.

Merges of partials are graphs, too: the interpreter would make many calls of each.

    accumulators, constants      the same for all clients: outside of the loop
    data of clients first..last  sliced inside of it: no padding, no second trace
        -> accumulators after these clients; what is kept of each, stacked

A call may stop at any client and the next go on from there: the bits are the same. One
iteration at a time, so that variables and random states are those of one client.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import federated_language as fl
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import ray_fed.blocks as blocks
import ray_fed.draws as draws
import ray_fed.notes as notes
import ray_fed.plan as plan
import ray_fed.tensorflow.normal as normal
import ray_fed.tensorflow.specs as specs
import ray_fed.values as values
from ray_fed.plain import pack
from ray_fed.tensorflow.client_data import ClientLayout, UnfitError, flatten, leaf_types
from ray_fed.tensorflow.grafts import Grafts
from ray_fed.tensorflow.symbolic import Interpreter

_INDEX = tf.TensorSpec([], tf.int64)
Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class LaidClients:
    """What a kernel takes of some clients.

    Attributes:
        states: of random accumulation, i64[sites, 3].
        states_of_clients: of random work, i64[clients, sites, 3].
        tensors: the data, laid as `client_data` does.
    """

    states: tf.Tensor
    states_of_clients: tf.Tensor
    tensors: Sequence[tf.Tensor]


class ClientKernel:
    """The graph of one `plan.Kernel`, and its values in and out.

    Args:
        kernel: what the compiler planned.
        device: name of the device to run on; None leaves it to TensorFlow.

    Raises:
        UnfitError: the work needs what a kernel cannot do.
    """

    def __init__(self, kernel: plan.Kernel, device: str | None) -> None:
        self._work = blocks.parse_block(kernel.work)
        self._accumulate = blocks.parse_block(kernel.accumulate)
        client = values.struct_type(_parameter(self._work))
        self._constants = values.struct_type(client[0])
        self._data_type = values.struct_type(client[1])
        self._partial = values.struct_type(_parameter(self._accumulate))[0]
        worked = list(values.struct_type(_result(self._work)).items())
        self._kept = fl.StructType(worked[kernel.num_aggregations :])
        self._layout = ClientLayout(self._data_type)
        self._work_grafts, self._fold_grafts = Grafts(), Grafts()
        self._device = device
        with tf.device(device):
            self._function = tf.compat.v1.wrap_function(self._loop, self._signature())
            self._work_grafts.create()
            self._fold_grafts.create()

    def close(self) -> None:
        """Free what the graph keeps between calls."""
        self._work_grafts.close()
        self._fold_grafts.close()

    def _signature(self) -> list[tf.TensorSpec]:
        states = tf.TensorSpec([None, draws.STATE_SIZE], tf.int64)
        of_clients = tf.TensorSpec([None, None, draws.STATE_SIZE], tf.int64)
        tensors = [*leaf_types(self._partial), *leaf_types(self._constants)]
        return [
            _INDEX,
            _INDEX,
            states,
            of_clients,
            *(specs.to_spec(_tensor_type(leaf)) for leaf in tensors),
            *self._layout.specs,
        ]

    def _loop(
        self,
        first: tf.Tensor,
        stop: tf.Tensor,
        states: tf.Tensor,
        states_of_clients: tf.Tensor,
        *tensors: tf.Tensor,
    ) -> list[tf.Tensor]:
        partials = [specs.to_spec(_tensor_type(t)) for t in leaf_types(self._partial)]
        num_constants = len(leaf_types(self._constants))
        taken, rest = tensors[: len(partials)], tensors[len(partials) :]
        constants = pack(iter(rest[:num_constants]), self._constants)
        data = rest[num_constants:]
        kept = self._kept_arrays(stop - first)

        def step(index: tf.Tensor, *carried: Any) -> list[Any]:
            accumulators, arrays = carried[: len(partials)], carried[len(partials) :]
            self._work_grafts.use_states(lambda site: states_of_clients[index, site])
            self._fold_grafts.use_states(lambda site: states[site])
            member = self._layout.member(data, index)
            client = values.Struct([(None, constants), (None, member)])
            worked = list(Interpreter(self._work_grafts).call(self._work, client))
            count = len(worked) - len(self._kept)
            position = tf.cast(index - first, tf.int32)
            outside = flatten(values.to_struct(worked[count:]))
            written = [
                array.write(position, tensor)
                for array, tensor in zip(arrays, outside, strict=True)
            ]
            folded = values.Struct(
                [
                    (None, pack(iter(accumulators), self._partial)),
                    (None, values.to_struct(worked[:count])),
                    (None, constants),
                ]
            )
            added = Interpreter(self._fold_grafts).call(self._accumulate, folded)
            return [index + 1, *flatten(added), *written]

        def is_before_stop(index: tf.Tensor, *_: Any) -> tf.Tensor:
            return index < stop

        _, *added = tf.while_loop(
            is_before_stop,
            step,
            [first, *taken, *kept],
            shape_invariants=[
                _INDEX.shape,
                *(spec.shape for spec in partials),
                *(array.flow.shape for array in kept),
            ],
            parallel_iterations=1,
        )
        stacked = [array.stack() for array in added[len(partials) :]]
        return [*added[: len(partials)], *stacked]

    def _kept_arrays(self, count: tf.Tensor) -> list[Any]:
        return [
            tf.TensorArray(
                spec.dtype, tf.cast(count, tf.int32), element_shape=spec.shape
            )
            for spec in (specs.to_spec(_tensor_type(t)) for t in leaf_types(self._kept))
        ]

    def lay_values(self, data: Sequence[Sequence[Any]]) -> list[tf.Tensor]:
        """Return some clients' data as tensors, to be used in any round.

        Args:
            data: of each of `plan.Kernel.data` the clients' plain values, in order.
        """
        with tf.device(self._device):
            return self._layout.lay(list(zip(*data, strict=True)))

    @staticmethod
    def count_bytes(tensors: Sequence[tf.Tensor]) -> int:
        """Return about how many bytes tensors that were laid hold."""
        return sum(int(tf.size(tensor)) * tensor.dtype.size for tensor in tensors)

    def lay(self, tensors: Sequence[tf.Tensor], clients: range) -> LaidClients:
        """Return some clients' data as `run` takes it in this round.

        Args:
            tensors: what `lay_values` returned.
            clients: their places among those that `draws.at_client` counts.
        """
        of_clients: list[Any] = [
            self._states(self._work_grafts, position)
            for position in (clients if self._work_grafts.sites else ())
        ]
        shape = [len(of_clients), len(self._work_grafts.sites), draws.STATE_SIZE]
        with tf.device(self._device):
            return LaidClients(
                tf.constant(self._states(self._fold_grafts, None), tf.int64),
                tf.constant(np.reshape(of_clients, shape), tf.int64),
                tensors,
            )

    def _states(self, grafts: Grafts, position: int | None) -> Array:
        states = np.empty([len(grafts.sites), draws.STATE_SIZE], np.int64)
        at = contextlib.nullcontext() if position is None else draws.at_client(position)
        with at:
            for index, site in enumerate(grafts.sites):
                states[index] = draws.state(site.content, site.path)
        return states

    def tensors(self, plain: values.Plain, *, is_partial: bool) -> list[tf.Tensor]:
        """Return plain accumulators or constants as `run` takes them."""
        type_spec = self._partial if is_partial else self._constants
        with tf.device(self._device):
            return flatten(normal.normalise(plain, type_spec))

    def run(
        self,
        clients: range,
        accumulators: Sequence[tf.Tensor],
        constants: Sequence[tf.Tensor],
        laid: LaidClients,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return the accumulators after some clients of those that were laid.

        And what is kept of these clients, stacked.

        Args:
            clients: positions among these.
            accumulators: before the first of them.
            constants: the same for all.
            laid: what `lay` returned.
        """
        notes.note([*self._work_grafts.unkeyed, *self._fold_grafts.unkeyed])
        with tf.device(self._device):
            bounds = [
                tf.constant(end, tf.int64) for end in (clients.start, clients.stop)
            ]
            arguments = [*bounds, laid.states, laid.states_of_clients]
            arguments += [*accumulators, *constants, *laid.tensors]
            captured = self._function.captured_inputs
            ran = self._function._call_flat(arguments, captured)  # noqa: SLF001
            return ran[: len(accumulators)], ran[len(accumulators) :]

    def kept(self, stacked: Sequence[Sequence[tf.Tensor]]) -> list[list[Any]]:
        """Return the plain values of each of what is kept, in client order.

        Args:
            stacked: what calls of `run` kept, in order.
        """
        clients: list[Any] = []
        for tensors in stacked:
            arrays = [tensor.numpy() for tensor in tensors]
            clients.extend(map(list, zip(*arrays, strict=True)))
        plain = [_to_tuples(iter(leaves), self._kept) for leaves in clients]
        return [[member[k] for member in plain] for k in range(len(self._kept))]

    def partial(
        self, accumulators: Sequence[tf.Tensor]
    ) -> tuple[values.Struct[Any], fl.Type]:
        """Return accumulators as the normal form of a partial, and its type."""
        return pack(iter(accumulators), self._partial), self._partial


class MergeKernel:
    """The graph that merges two partials.

    Args:
        merge: serialised <U, U> -> U.
        device: name of the device to run on; None leaves it to TensorFlow.

    Raises:
        UnfitError: it needs what a graph cannot do, or draws.
    """

    def __init__(self, merge: bytes, device: str | None) -> None:
        self._merge = blocks.parse_block(merge)
        self._pair = values.struct_type(_parameter(self._merge))
        self._device = device
        tensors = [_tensor_type(leaf) for leaf in leaf_types(self._pair)]
        with tf.device(device):
            self._function = tf.compat.v1.wrap_function(
                self._build, [specs.to_spec(tensor) for tensor in tensors]
            )

    def _build(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        grafts = Grafts()
        pair = pack(iter(tensors), self._pair)
        merged = Interpreter(grafts).call(self._merge, pair)
        if grafts.sites:
            raise UnfitError("a merge that draws")
        return flatten(merged)

    def close(self) -> None:
        """Do nothing: the graph keeps nothing between calls."""

    def __call__(
        self, left: Sequence[tf.Tensor], right: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the accumulators of two partials merged."""
        with tf.device(self._device):
            captured = self._function.captured_inputs
            return self._function._call_flat([*left, *right], captured)  # noqa: SLF001


def _to_tuples(leaves: Iterator[Any], type_spec: fl.Type) -> Any:
    if not isinstance(type_spec, fl.StructType):
        return next(leaves)
    return tuple(_to_tuples(leaves, element) for _, element in type_spec.items())


def _result(block: fl.framework.ComputationBuildingBlock) -> fl.Type:
    return values.function_type(block.type_signature).result


def _parameter(block: fl.framework.ComputationBuildingBlock) -> fl.Type:
    return cast("fl.Type", values.function_type(block.type_signature).parameter)


def _tensor_type(leaf: fl.TensorType | fl.SequenceType) -> fl.TensorType:
    if isinstance(leaf, fl.SequenceType):
        raise UnfitError(f"a value of type `{leaf}` to accumulate")
    return leaf

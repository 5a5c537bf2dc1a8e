"""Merges of partials as graphs, where the interpreter would make many calls each."""

from collections.abc import Sequence
from typing import Any

import federated_language as fl
import tensorflow as tf

from ray_fed.language import blocks, structs, type_checks
from ray_fed.tensorflow.kernels.client_work import parameter_of, specs_of
from ray_fed.tensorflow.kernels.graph_builder import Grafts, Interpreter, flatten
from ray_fed.tensorflow.kernels.graph_functions import as_graph, as_tensors, before
from ray_fed.values import tensor_structures


class MergeKernel:
    """The graph that merges two partials.

    Args:
        merge: serialised <U, U> -> U.
        device: name of the device to run on; None leaves it to TensorFlow.

    Attributes:
        type_signature: <U, U> -> U.
        has_state: whether the merge has state or effects.
        partial: type of a partial.

    Raises:
        UnfitError: the merge draws random numbers, or does what a graph cannot do:
            executors run it, each merge with the key of its subtree.
    """

    def __init__(self, merge: bytes, device: str | None) -> None:
        self.has_state = False
        self._merge = blocks.parse_block(merge)
        self._pair = type_checks.struct_type(parameter_of(self._merge))
        self.partial = self._pair[0]
        self.type_signature = fl.FunctionType(self._pair, self.partial)
        self._nest = tensor_structures.nester(self.partial)
        self._device = device
        with tf.device(device):
            self._specs = specs_of(self._pair)
            self._function = as_graph(self.trace, self._specs)

    @property
    def may_be_shared(self) -> bool:
        """Whether several threads may run it at once."""
        return not self.has_state

    def trace(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Return the accumulators of two partials merged, inside of a graph."""
        grafts = Grafts()
        pair = tensor_structures.unflatten(iter(tensors), self._pair)
        merged = Interpreter(grafts).call(self._merge, pair)
        self.has_state |= grafts.has_state
        return flatten(merged)

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

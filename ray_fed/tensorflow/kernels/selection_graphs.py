"""What a function at the server has for many keys, as one graph that loops over them.

Its bits are those of one call a key.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ray_fed.language import blocks, structs, type_checks
from ray_fed.tensorflow.kernels.client_work import parameter_of, specs_of
from ray_fed.tensorflow.kernels.grafts import Grafts
from ray_fed.tensorflow.kernels.graph_functions import as_graph, as_tensors, before
from ray_fed.tensorflow.kernels.graph_values import UnfitError, flatten
from ray_fed.tensorflow.kernels.symbolic import Interpreter
from ray_fed.values import tensor_structures


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

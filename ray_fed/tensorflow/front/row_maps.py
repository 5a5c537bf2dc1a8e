"""A TensorFlow function over the rows of a client, traced once in a process."""

from collections.abc import Callable
from typing import Any

import federated_language as fl
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tensorflow.tensors.datasets as datasets
import ray_fed.values.plain_values as plain_values
from ray_fed.language import blocks
from ray_fed.plan import random_keys
from ray_fed.tensorflow.front.tracing import computation
from ray_fed.tensorflow.tensors import specs
from ray_fed.values import tensor_structures
from ray_fed.values.columnar_sequence import Column, ColumnarSequence


class RowMap:
    """Maps rows by a function over tensors; pickled as the function.

    Args:
        function: from a row, in the containers of its type, to another one.
        row: the type of a row; all shapes are known.

    Attributes:
        function: as it was given.
        result: the type of what the function returns.

    Raises:
        ValueMismatchError: a shape in one of the types is not known.
        UnsupportedError: the function draws random numbers.
    """

    def __init__(self, function: Callable[[Any], Any], row: fl.Type) -> None:
        traced = computation(function, row)
        serialised = blocks.serialize_computation(traced)
        if random_keys.may_draw(serialised):
            raise errors.UnsupportedError(
                "Expected a function of a row alone to map, found one that draws random"
                " numbers: draw them in the client's work, which has keys for it."
            )
        self.function = function
        self._row = row
        self.result: fl.Type = traced.type_signature.result
        for type_spec in (row, self.result):
            _check_shapes(type_spec)
        self._traced: Any = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"function": _untraced(self.function), "_traced": None}

    def apply(self, rows: ColumnarSequence, label: str) -> ColumnarSequence:
        """Return the rows that the function makes.

        Args:
            rows: of a client.
            label: what it has, for errors.
        """
        types = tensor_structures.flatten_type(self._row)
        with tf.device("/device:CPU:0"):
            if self._traced is None:
                self._traced = tf.function(self._map, autograph=False)
            tensors = [
                tf.constant(column.rows, specs.to_tf_dtype(tensor))
                for column, tensor in zip(rows.columns, types, strict=True)
            ]
            stacked = self._traced(tensors, tf.constant(rows.length))
        batched = tensor_structures.batch_type(self.result)
        plain = plain_values.to_plain(stacked, batched, label)
        columns = tuple(map(Column, tensor_structures.flatten(plain)))
        return ColumnarSequence(columns, rows.length)

    def _call(self, tensors: list[tf.Tensor]) -> Any:
        row = datasets.build(tensors, self._row)
        row = datasets.to_containers(row, self._row, canonical=False)
        if _is_tf_function(self.function):
            return self.function(row)
        return tf.function(self.function)(row)  # converted by autograph

    def _map(self, tensors: list[tf.Tensor], length: tf.Tensor) -> Any:
        def call(index: tf.Tensor) -> Any:
            return self._call([tensor[index] for tensor in tensors])

        spec = datasets.element_spec(self.result, canonical=False)
        return tf.map_fn(call, tf.range(length), fn_output_signature=spec)


def _is_tf_function(function: Any) -> bool:
    return hasattr(function, "get_concrete_function")


def _untraced(function: Any) -> Callable[[Any], Any]:
    """Return a function that can be pickled, which no traced `tf.function` can be."""
    if not _is_tf_function(function):
        return function
    return function._clone(None)  # noqa: SLF001 (no public way keeps its options)


def _check_shapes(type_spec: fl.Type) -> None:
    for tensor in tensor_structures.flatten_type(type_spec):
        if tensor.shape is None or None in tensor.shape:
            raise errors.ValueMismatchError(
                "Expected rows of known shapes before and after a mapped function,"
                f" found `{type_spec}`."
            )

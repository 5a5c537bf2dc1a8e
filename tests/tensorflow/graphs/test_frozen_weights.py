"""Graphs name large constants, and use the memory that the process has for them."""

# pyright: reportUnknownLambdaType=false

import gc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.framework import serialize_computation
from ray_fed.tensorflow.graphs import frozen_weights
from ray_fed.tensorflow.traced_graph import Constant
from ray_fed.values import frozen_arrays
from ray_fed.values.frozen_arrays import FrozenArray

DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "int32"]


def make(dtype: str) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(3).integers(-9, 9, (300, 300))
    return values.astype(tf.as_dtype(dtype).as_numpy_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_is_a_view_of_memory_that_cannot_be_written(dtype: str) -> None:
    written = make(dtype)
    aligned: Any = tf.constant(written)._numpy()
    array = FrozenArray.of(aligned)
    array.content.flags.writeable = False

    [(kept, tensor)] = frozen_weights.load(
        [(array.name, tf.as_dtype(dtype), written.shape)]
    )

    assert kept is array
    found: Any = tensor
    assert np.shares_memory(found._numpy(), array.content)
    np.testing.assert_array_equal(found.numpy(), written)


def test_memory_without_alignment_is_copied() -> None:
    content = np.arange(80, dtype=np.uint8)
    start = 1 - content.__array_interface__["data"][0] % 4
    array = frozen_arrays.add("ray_fed_frozen_odd", content[start : start + 64])

    [(_, tensor)] = frozen_weights.load([(array.name, tf.uint8, [64])])

    np.testing.assert_array_equal(tensor, content[start : start + 64])


@pytest.mark.parametrize("dtype", DTYPES)
def test_computations_use_what_they_name(dtype: str) -> None:
    constant = Constant(tf.constant(make(dtype)))

    @rtf.computation(np.float32)
    def summed(x: Any) -> Any:
        add = tf.function(
            lambda y: y + tf.reduce_sum(tf.cast(constant.read(), "float32"))
        )
        return tf.while_loop(lambda y: y < 0, lambda y: [add(y) + 1e9], [x])[0] + add(x)

    @rtf.computation(np.float32)
    def outer(x: Any) -> Any:
        return summed(x) + summed(x + 1)

    total = make(dtype).astype(np.float64).sum()
    assert len(serialize_computation(outer)) < 60_000
    assert frozen_arrays.names_in(serialize_computation(outer)) == (constant.digest,)
    assert summed(np.float32(2)) == pytest.approx(4 + total)
    assert outer(np.float32(2)) == pytest.approx(10 + 2 * total)


def test_small_constants_are_part_of_graphs() -> None:
    constant = Constant(tf.ones([10]))

    @rtf.computation(np.float32)
    def summed(x: Any) -> Any:
        return x + tf.reduce_sum(constant.read())

    assert frozen_arrays.names_in(serialize_computation(summed)) == ()
    assert summed(np.float32(2)) == 12


def test_weights_that_are_gone_are_named() -> None:
    constants = [Constant(tf.random.stateless_uniform([200, 200], (1, 2)))]

    @rtf.computation(np.float32)
    def summed(x: Any) -> Any:
        return x + tf.reduce_sum(constants[0].read())

    constants.clear()
    gc.collect()  # the traced graph refers to itself

    with pytest.raises(errors.ContextStateError, match=r"keep the `learning\.Model`"):
        summed(np.float32(2))

"""Arrays as tensors: the same values in memory of their own, freed with the tensor."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ray_fed.tensorflow.kernels.graph_functions import as_tensor, concatenate, stack

DTYPES = [
    *(tf.bool, tf.int32, tf.uint8, tf.float32, tf.float64, tf.complex64, tf.bfloat16),
]


def numbers(shape: tuple[int, ...], dtype: tf.DType) -> Any:
    """Return an array that tells orders of its elements apart."""
    counted = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    if dtype == tf.bool:  # has no third value: 0, 1, 1, 0, 1, 0, 0, 1, ...
        counted = np.bitwise_count(counted) % 2
    return counted.astype(dtype.as_numpy_dtype)


def address_of(tensor: Any) -> int:
    """Return where a tensor's values lie."""
    return np.asarray(memoryview(tensor)).__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_an_array_becomes_a_tensor_of_the_same(dtype: tf.DType) -> None:
    for shape in [(), (0, 2), (5, 7)]:
        array = numbers(shape, dtype)

        found = as_tensor(array, dtype)

        assert (found.dtype, found.shape) == (dtype, shape)
        assert found.numpy().tobytes() == array.tobytes()


def test_scalars_and_strings_become_tensors() -> None:
    assert as_tensor(np.float32(2.5), tf.float32).numpy() == np.float32(2.5)
    assert as_tensor(b"one", tf.string).numpy() == b"one"
    words = [np.array([b"one"], object), np.array([b"two", b""], object)]
    found = concatenate(words, tf.string)
    assert found.numpy().tolist() == [b"one", b"two", b""]


def test_arrays_are_laid_end_to_end() -> None:
    rows = np.arange(9, dtype=np.float32).reshape(3, 3)

    found = concatenate([rows[:2], rows[2:2], rows[2:]], tf.float32)

    assert found.numpy().tolist() == rows.tolist()


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.bool])
def test_arrays_and_scalars_are_stacked(dtype: tf.DType) -> None:
    arrays = list(numbers((3, 2, 3), dtype))
    scalars = list(numbers((3,), dtype))

    for parts in (arrays, scalars, [array.T for array in arrays]):
        found = stack(parts, dtype)
        assert (found.dtype, found.shape) == (dtype, np.shape(parts))
        assert found.numpy().tobytes() == np.stack(parts).tobytes()


def test_arrays_of_other_shapes_are_not_stacked() -> None:
    with pytest.raises(ValueError, match="same shape"):
        stack([np.zeros([3]), np.zeros([1])], tf.float64)


def test_views_of_any_layout_are_copied() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    array.setflags(write=False)

    for view in (array.T, array[::2, 1:], array[::-1]):
        alone = as_tensor(view, tf.float32)
        laid = concatenate([view], tf.float32)
        assert (alone.shape, laid.shape) == (view.shape, view.shape)
        assert alone.numpy().tobytes() == laid.numpy().tobytes() == view.tobytes()


def test_a_tensor_does_not_see_what_is_written_later() -> None:
    array = np.zeros(1000, np.float32)
    one, whole = (
        as_tensor(array, tf.float32),
        concatenate([array], tf.float32),
    )

    array[:] = 1

    assert not one.numpy().any()
    assert not whole.numpy().any()


@pytest.mark.parametrize("size", [1, 3, 1000, 100_000])
def test_memory_is_aligned_as_tensorflow_wants_it(size: int) -> None:
    held = [as_tensor(np.zeros(size, np.int8), tf.int8) for _ in range(20)]

    assert {address_of(tensor) % 64 for tensor in held} == {0}


def test_memory_is_freed_with_the_tensor() -> None:
    part = np.ones([1000, 1000], np.float32)
    tracemalloc.start()
    try:
        tensor = concatenate([part, part], tf.float32)
        held = tracemalloc.get_traced_memory()[0]
        total = float(tf.reduce_sum(tensor))
        del tensor
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert total == 2e6
    assert held > 2 * part.nbytes
    assert left < part.nbytes / 100

"""Layouts of sequences: what is laid end to end is read back element by element."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ray_fed.values import columnar_sequence

FLOAT32 = np.dtype(np.float32)


def test_fixed_shapes_are_stacked_without_splits() -> None:
    tensors = [np.full((2, 3), index, np.float32) for index in range(4)]

    column = columnar_sequence.lay_column(tensors, FLOAT32, (2, 3))

    assert column.splits is None
    assert column.rows.shape == (4, 2, 3)
    assert column.rows.dtype == np.float32
    np.testing.assert_array_equal(column[3], tensors[3])
    assert column.batch_size is None
    scalars = columnar_sequence.lay_column(
        [np.int64(3), np.int64(5)], np.dtype("i8"), ()
    )
    assert scalars.splits is None
    np.testing.assert_array_equal(scalars.rows, np.array([3, 5], np.int64))


def test_unknown_leading_dimension_is_concatenated_with_splits() -> None:
    tensors = [np.full((size, 2), size, np.float32) for size in (3, 0, 1)]

    column = columnar_sequence.lay_column(tensors, FLOAT32, (None, 2))

    assert column.rows.shape == (4, 2)
    assert column.splits is not None
    assert column.splits.tolist() == [0, 3, 3, 4]
    assert column.splits.dtype == np.int64


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((None, None), id="two unknown dimensions"),
        pytest.param((2, None), id="unknown trailing dimension"),
        pytest.param(None, id="unknown rank"),
    ],
)
def test_other_unknown_dimensions_keep_each_tensor(
    shape: columnar_sequence.Dims,
) -> None:
    tensors = [np.ones((2, size), np.float32) for size in (3, 1)]

    column = columnar_sequence.lay_column(tensors, FLOAT32, shape)

    assert column.splits is None
    assert column.rows.dtype == object
    assert [column[index].shape for index in range(2)] == [(2, 3), (2, 1)]
    scalar = columnar_sequence.lay_column([np.float32(2)], FLOAT32, None)[0]
    assert np.asarray(scalar).dtype == np.float32


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        pytest.param((5,), (0, 5), id="fixed"),
        pytest.param((None, 5), (0, 5), id="ragged"),
        pytest.param((None, None), (0,), id="free"),
    ],
)
def test_no_element_keeps_the_shape_of_the_rest(
    shape: columnar_sequence.Dims, expected: tuple[int, ...]
) -> None:
    column = columnar_sequence.lay_column([], FLOAT32, shape)

    assert column.rows.shape == expected


def test_strings_keep_trailing_zero_bytes() -> None:
    column = columnar_sequence.lay_column(
        [np.array([b"a\0", b""], object), np.array([b"long"], object)],
        np.dtype(object),
        (None,),
    )

    assert np.asarray(column[0]).tolist() == [b"a\0", b""]
    assert np.asarray(column[1]).tolist() == [b"long"]


@given(
    sizes=st.lists(st.integers(0, 5), max_size=6),
    width=st.integers(0, 3),
)
def test_ragged_elements_are_read_back_as_they_were_laid(
    sizes: list[int], width: int
) -> None:
    total = sum(sizes) * width
    numbers = iter(np.arange(total, dtype=np.float32))
    tensors = [
        np.array([next(numbers) for _ in range(size * width)], np.float32).reshape(
            size, width
        )
        for size in sizes
    ]

    column = columnar_sequence.lay_column(tensors, FLOAT32, (None, width))

    for index, tensor in enumerate(tensors):
        np.testing.assert_array_equal(column[index], tensor)


@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=3), elements=st.just(1.5)))
def test_fixed_elements_are_read_back_as_they_were_laid(array: Any) -> None:
    column = columnar_sequence.lay_column(list(array), FLOAT32, array.shape[1:])

    np.testing.assert_array_equal(column.rows, array)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param([], None, id="empty"),
        pytest.param([4], 4, id="one"),
        pytest.param([4, 4, 4], 4, id="even"),
        pytest.param([4, 4, 2], 4, id="smaller last"),
        pytest.param([4, 4, 5], None, id="larger last"),
        pytest.param([4, 2, 4], None, id="smaller middle"),
        pytest.param([4, 0], None, id="empty last"),
    ],
)
def test_batch_size_is_that_of_all_but_the_last(
    sizes: list[int], expected: int | None
) -> None:
    column = columnar_sequence.lay_column(
        [np.zeros(size, np.float32) for size in sizes], FLOAT32, (None,)
    )

    assert column.batch_size == expected


def test_rows_yield_one_tuple_an_element() -> None:
    images = columnar_sequence.lay_column(
        [np.zeros(2, np.float32), np.ones(2, np.float32)], FLOAT32, (2,)
    )
    labels = columnar_sequence.lay_column(
        [np.int32(7), np.int32(8)], np.dtype(np.int32), ()
    )

    elements = list(columnar_sequence.ColumnarSequence((images, labels), 2))

    assert [element[0].tolist() for element in elements] == [[0, 0], [1, 1]]
    assert [element[1] for element in elements] == [7, 8]
    assert list(columnar_sequence.ColumnarSequence((), 3)) == [(), (), ()]


def test_num_bytes_counts_rows_and_splits() -> None:
    ragged = columnar_sequence.lay_column(
        [np.zeros((3, 2), np.float32)], FLOAT32, (None, 2)
    )
    stacked = columnar_sequence.lay_column([np.int32(1)], np.dtype(np.int32), ())

    assert (
        columnar_sequence.ColumnarSequence((ragged, stacked), 1).num_bytes
        == 3 * 2 * 4 + 2 * 8 + 4
    )


def test_num_bytes_counts_strings_and_rows_of_their_own_shapes() -> None:
    pointers = 2 * np.dtype(object).itemsize
    members: list[Any] = [b"abc", b"de"]
    texts = columnar_sequence.lay_column(members, np.dtype(object), ())
    shapes = [np.zeros(shape, np.float32) for shape in [(2, 3), (4, 0)]]
    ragged = columnar_sequence.lay_column(shapes, FLOAT32, (None, None))

    assert columnar_sequence.ColumnarSequence((texts,), 2).num_bytes == pointers + 5
    assert (
        columnar_sequence.ColumnarSequence((ragged,), 2).num_bytes
        == pointers + 2 * 3 * 4
    )


def test_stacked_elements_can_be_laid_with_splits() -> None:
    stacked = columnar_sequence.Column(np.arange(12, dtype=np.float32).reshape(2, 3, 2))

    ragged = stacked.with_splits()

    assert ragged.rows.shape == (6, 2)
    assert ragged.splits is not None
    assert ragged.splits.tolist() == [0, 3, 6]
    for index in range(2):
        np.testing.assert_array_equal(ragged[index], stacked[index])
    assert ragged.with_splits() is ragged

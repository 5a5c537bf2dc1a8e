"""Elements that are alike are laid by column, and give what one by one gives."""

import collections
import itertools
import time
from typing import Any

import federated_language as fl
import ml_dtypes
import numpy as np
import pytest

import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
from ray_fed.language.trees import flatten
from ray_fed.values import read_limits
from ray_fed.values.plain_values import lay_alike

FLOAT = fl.TensorType(np.float32)
INT = fl.TensorType(np.int32)
BATCH = fl.StructType(
    [
        ("x", fl.TensorType(np.float32, [None, 2])),
        ("y", fl.TensorType(np.int32, [None])),
    ]
)


def _batch(size: int) -> dict[str, Any]:
    return {
        "y": np.arange(size, dtype=np.int32),
        "x": np.arange(2 * size, dtype=np.float32).reshape(size, 2),
    }


@pytest.mark.parametrize(
    ("elements", "type_spec"),
    [
        ([1.5, 2.5, -0.0], FLOAT),
        ([1, 2, 3], FLOAT),
        ([1, -2, 2**31 - 1], INT),
        ([2**64 - 1, 2**63], fl.TensorType(np.uint64)),
        ([True, False], fl.TensorType(np.bool_)),
        ([1j, 2.0 + 1j], fl.TensorType(np.complex64)),
        ([float("nan"), float("inf")], FLOAT),
        ([0.1, 0.2], fl.TensorType(ml_dtypes.bfloat16)),
        ([np.float32(1), np.float32(2)], FLOAT),
        ([_batch(3), _batch(3), _batch(1)], BATCH),
        ([np.ones((2, 2), np.float32)] * 3, fl.TensorType(np.float32, [2, 2])),
        ([np.ones((1, 2), np.float32)] * 3, fl.TensorType(np.float32, [None, None])),
        ([np.float32(3) * np.ones((), np.float32)] * 2, FLOAT),
        ([{"a": {"b": 1.0}}, {"a": {"b": 2.0}}], fl.to_type([("a", [("b", FLOAT)])])),
    ],
)
def test_alike_elements_are_laid_as_one_by_one(
    elements: list[Any], type_spec: fl.Type
) -> None:
    columns = lay_alike(elements, type_spec)
    assert columns is not None
    one_by_one = [plain_values.to_plain(e, type_spec, "it") for e in elements]
    for index, expected in enumerate(one_by_one):
        found = [column[index] for column in columns]
        leaves = flatten(expected)
        assert len(found) == len(leaves)
        for tensor, leaf in zip(found, leaves, strict=True):
            np.testing.assert_array_equal(tensor, leaf)
            assert np.asarray(tensor).dtype == np.asarray(leaf).dtype
            assert np.shape(tensor) == np.shape(leaf)


@pytest.mark.parametrize(
    ("elements", "type_spec"),
    [
        ([], FLOAT),
        ([1.0, True], FLOAT),  # a truth value is no float
        ([1.5, 2], INT),
        ([2**64 - 1, 0], fl.TensorType(np.uint64)),  # numpy makes floats of them
        ([1.0, 1e300], FLOAT),
        ([2**24 + 1, 1], FLOAT),
        ([2**63 + 1, -1], FLOAT),
        ([2**31, 0], INT),
        ([1.0, [2.0]], FLOAT),
        ([1.0, None], FLOAT),
        ([b"a", b"b"], FLOAT),
        ([np.float64(1), np.float64(2)], FLOAT),
        (
            [np.ma.masked_array(np.ones(2, np.float32), True)],
            fl.TensorType(np.float32, [2]),
        ),
        ([np.ones(2, np.float64)], fl.TensorType(np.float32, [2])),
        ([np.ones(3, np.float32)], fl.TensorType(np.float32, [2])),
        (["a", "b"], fl.TensorType(np.str_)),
        ([{"x": 1.0}, {"y": 1.0}], fl.to_type([("x", FLOAT)])),
        ([{"x": 1.0, "y": 2.0}], fl.to_type([("x", FLOAT)])),
        ([collections.OrderedDict(x=1.0)], fl.to_type([("x", FLOAT)])),
        ([{}], fl.to_type([(None, FLOAT)])),
    ],
)
def test_all_other_elements_are_left_to_be_checked_one_by_one(
    elements: list[Any], type_spec: fl.Type
) -> None:
    assert lay_alike(elements, type_spec) is None


@pytest.mark.parametrize(
    ("elements", "index"),
    [([1.0, 2.0, True], 2), ([1.0, 1e300, 2.0], 1), ([2**24 + 1, 1], 0)],
)
def test_error_names_the_element_that_is_wrong(elements: list[Any], index: int) -> None:
    with pytest.raises(
        errors.ValueMismatchError, match=rf"element {index} of it to be of type"
    ):
        plain_values.to_plain(elements, fl.SequenceType(FLOAT), "it")


def test_endless_numbers_reach_their_bound_soon() -> None:
    endless = (float(number) for number in itertools.count())
    start = time.perf_counter()
    with (
        read_limits.limited(read_limits.Limits(2**22)),
        pytest.raises(errors.ValueMismatchError, match="to end within 4194304 bytes"),
    ):
        plain_values.to_plain(endless, fl.SequenceType(FLOAT), "it")
    assert time.perf_counter() - start < 3  # one by one: 14 s

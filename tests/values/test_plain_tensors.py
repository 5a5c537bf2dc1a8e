"""Arrays of many clients are gathered as each by itself is checked, or not at all."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
from ray_fed.values.plain_values import gather_arrays

VECTOR = fl.TensorType(np.float32, [2])
ROWS = fl.TensorType(np.int32, [None])
NESTED = fl.StructType([("x", VECTOR), ("more", [ROWS, VECTOR])])


def member(start: int) -> Any:
    vector = np.arange(start, start + 2, dtype=np.float32)
    return (vector, [np.arange(start, dtype=np.int32), vector + 1])


@pytest.mark.parametrize(
    ("type_spec", "values"),
    [
        (VECTOR, [member(i)[0] for i in range(3)]),
        (NESTED, [member(i) for i in range(3)]),
        (fl.StructType([NESTED]), [(member(i),) for i in range(3)]),
    ],
    ids=["tensors", "structs", "structs in structs"],
)
def test_arrays_are_gathered_as_they_are_checked_one_by_one(
    type_spec: fl.Type, values: list[Any]
) -> None:
    expected = [plain_values.to_plain(value, type_spec) for value in values]

    found = gather_arrays(values, type_spec)

    np.testing.assert_equal(found, expected)
    assert found is not None
    assert [type(value) for value in found] == [type(value) for value in expected]


FLOATS = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("type_spec", "values"),
    [
        (VECTOR, []),
        (VECTOR, [FLOATS, [0.0, 1.0]]),
        (VECTOR, [FLOATS, np.zeros(3, np.float32)]),
        (VECTOR, [FLOATS, np.zeros(2, np.float64)]),
        (VECTOR, [FLOATS, FLOATS.astype(">f4")]),
        (fl.TensorType(np.int64, [1]), [np.zeros(1, np.longlong)]),
        (VECTOR, [FLOATS, np.ma.masked_array(FLOATS, [True, False])]),
        (fl.TensorType(np.float32), [np.zeros((), np.float32)]),
        (fl.TensorType(np.str_, [1]), [np.array([""], "U1")]),
        (fl.StructType([VECTOR, VECTOR]), [(FLOATS, FLOATS), (FLOATS,)]),
        (fl.StructType([VECTOR, VECTOR]), [{"x": FLOATS, "y": FLOATS}]),
        (fl.StructType([]), [(), ()]),
        (fl.SequenceType(VECTOR), [[FLOATS]]),
    ],
    ids=str,
)
def test_others_are_left_to_the_check_of_each(
    type_spec: fl.Type, values: list[Any]
) -> None:
    assert gather_arrays(values, type_spec) is None


def test_wrong_value_among_arrays_is_named() -> None:
    at_clients = fl.FederatedType(NESTED, fl.CLIENTS)
    wrong = (FLOATS, [np.zeros(3, np.int64), FLOATS])

    with pytest.raises(
        errors.ValueMismatchError,
        match=r"`more\.0` of the value of .* position 1 .* int64",
    ):
        plain_values.to_plain([member(1), wrong], at_clients)

"""Alike values of clients are stacked, and come back with their bits and dtypes."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ray_fed.values import stored
from ray_fed.values.stacked_members import StackedMembers


def array(start: int, dtype: Any = np.float32) -> Any:
    return np.arange(start, start + 6, dtype=dtype).reshape(2, 3)


ALIKE = {
    "arrays": [array(0), array(6), array(12)],
    "scalars": [np.int32(3), np.int32(-1)],
    "structs": [(array(i), (np.float64(i), array(i, np.int8))) for i in range(3)],
    "empty structs beside": [((), np.int64(i)) for i in range(2)],
    "empty arrays": [np.zeros((0, 3)), np.zeros((0, 3))],
    "bfloat16": [array(i, ml_dtypes.bfloat16) for i in range(2)],
    "special": [np.array([np.nan, -0.0]), np.array([np.inf, 0.0])],
    "Fortran's order": [np.asfortranarray(array(0)), np.asfortranarray(array(3))],
}


def leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [leaf for element in value for leaf in leaves(element)]
    return [value]


@pytest.mark.parametrize("name", ALIKE)
def test_members_come_back(name: str) -> None:
    members = ALIKE[name]

    stacked = StackedMembers.of(members)

    assert stacked is not None
    assert len(stacked.arrays) == len(leaves(members[0]))
    assert stored.count_bytes(stacked) == stored.count_bytes(members)
    found = stacked.members()
    np.testing.assert_equal(found, members)
    for one, other in zip(found, members, strict=True):
        for leaf, expected in zip(leaves(one), leaves(other), strict=True):
            assert type(leaf) is type(expected)
            assert leaf.dtype == expected.dtype
            assert leaf.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "value",
    [
        [],
        [array(0)],
        (array(0), array(1)),
        [array(0), array(0, np.float64)],
        [array(0), array(0)[:1]],
        [np.float32(1), np.zeros((), np.float32)],
        [(array(0), array(0)), (array(0),)],
        [(array(0),), array(0)],
        [(array(0), (array(0),)), ((array(0),), array(0))],
        [b"text", b"text"],
        [np.array([b"a"], object)] * 2,
        [(), ()],
        [np.zeros(100_000), np.ones(100_000)],
    ],
    ids=[
        "none",
        "one",
        "a struct",
        "dtypes",
        "shapes",
        "kinds",
        "lengths",
        "depths",
        "nestings",
        "text",
        "arrays of text",
        "nothing in them",
        "large ones",
    ],
)
def test_others_are_not_stacked(value: Any) -> None:
    assert StackedMembers.of(value) is None

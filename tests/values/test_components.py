"""Values taken into tensors and sequences, and put together again."""

import collections
from typing import Any, NamedTuple

import federated_language as fl
import numpy as np
import pytest

from ray_fed.values import components


class Pair(NamedTuple):
    first: Any
    second: Any


INT, FLOAT = fl.TensorType(np.int32), fl.TensorType(np.float32)
SEQUENCE = fl.SequenceType([INT, FLOAT])
NESTED = fl.StructType([("a", INT), ("b", fl.StructType([FLOAT, SEQUENCE]))])
CASES = [
    pytest.param(INT, 7, [INT], [7], id="tensor"),
    pytest.param(
        SEQUENCE, "rows", [SEQUENCE], ["rows"], id="sequence is one component"
    ),
    pytest.param(
        NESTED, (1, (2, 3)), [INT, FLOAT, SEQUENCE], [1, 2, 3], id="nested struct"
    ),
    pytest.param(fl.StructType([]), (), [], [], id="empty struct"),
    pytest.param(
        fl.FederatedType(NESTED, fl.SERVER),
        (1, (2, 3)),
        [INT, FLOAT, SEQUENCE],
        [1, 2, 3],
        id="at server",
    ),
    pytest.param(
        fl.StructType([fl.FederatedType(INT, fl.SERVER), ("x", FLOAT)]),
        (1, 2),
        [INT, FLOAT],
        [1, 2],
        id="struct of placed values",
    ),
]


@pytest.mark.parametrize(("type_spec", "value", "types", "expected"), CASES)
def test_parts_are_in_the_order_of_their_types(
    type_spec: fl.Type, value: Any, types: list[fl.Type], expected: list[Any]
) -> None:
    assert components.component_types(type_spec) == types
    assert components.split(value, type_spec) == expected


@pytest.mark.parametrize(("type_spec", "value", "types", "expected"), CASES)
def test_join_undoes_split(
    type_spec: fl.Type, value: Any, types: list[fl.Type], expected: list[Any]
) -> None:
    assert components.join(expected, type_spec) == value


@pytest.mark.parametrize(
    ("type_spec", "expected"),
    [
        pytest.param(
            fl.StructType([("a", INT), ("b", FLOAT)]),
            collections.OrderedDict(a="0", b="1"),
            id="all named",
        ),
        pytest.param(fl.StructType([INT, FLOAT]), ("0", "1"), id="none named"),
        pytest.param(
            fl.StructWithPythonType([INT, FLOAT], list), ["0", "1"], id="a list"
        ),
        pytest.param(
            fl.FederatedType(
                fl.StructWithPythonType([("first", INT), ("second", SEQUENCE)], Pair),
                fl.SERVER,
            ),
            Pair("0", "1"),
            id="a named tuple at the server",
        ),
    ],
)
def test_containers_are_those_of_the_type(type_spec: fl.Type, expected: Any) -> None:
    found = components.to_containers(["0", "1"], type_spec)

    assert found == expected
    assert type(found) is type(expected)


def test_half_named_struct_has_no_container() -> None:
    with pytest.raises(ValueError, match="mix of named"):
        components.to_containers(["0", "1"], fl.StructType([("a", INT), FLOAT]))

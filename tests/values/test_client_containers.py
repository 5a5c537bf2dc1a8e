"""Many values in their containers, as federated_language packs one."""

from collections import OrderedDict
from typing import Any, NamedTuple

import attrs
import federated_language as fl
import numpy as np
import pytest

import ray_fed.values.plain_values as plain_values


class Pair(NamedTuple):
    x: Any
    y: Any


class Empty(NamedTuple):
    pass


@attrs.define
class Point:
    x: Any
    y: Any


NAMED = [("x", np.int32), ("y", [np.float32, np.str_])]
VALUES = [(1, (2.0, b"a")), (3, (4.0, b"b")), (5, (6.0, b"c"))]

CONTAINERS = {
    "none, with names": (NAMED, None, OrderedDict),
    "none, without names": ([t for _, t in NAMED], None, tuple),
    "list": ([t for _, t in NAMED], list, list),
    "dict": (NAMED, dict, dict),
    "OrderedDict": (NAMED, OrderedDict, OrderedDict),
    "named tuple": (NAMED, Pair, Pair),
    "attrs": (NAMED, Point, Point),
}


def pack_members(members: list[Any], member: fl.Type) -> Any:
    return plain_values.from_plain(members, fl.FederatedType(member, fl.CLIENTS))


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_member_is_packed_as_federated_language_packs_it(name: str) -> None:
    elements, container, expected_type = CONTAINERS[name]
    type_spec = (
        fl.StructType(elements)
        if container is None
        else fl.StructWithPythonType(elements, container)
    )
    expected = [
        fl.framework.type_to_py_container(
            plain_values.to_structs(value, type_spec), type_spec
        )
        for value in VALUES
    ]

    found = pack_members(VALUES, type_spec)

    assert found == expected
    assert [type(member) for member in found] == [expected_type] * len(VALUES)


def test_containers_without_fields_are_made() -> None:
    type_spec = fl.StructWithPythonType(
        [np.int32, fl.StructWithPythonType([], Empty), fl.StructType([])], list
    )

    found = pack_members([(1, (), ()), (2, (), ())], type_spec)

    assert found == [[1, Empty(), ()], [2, Empty(), ()]]
    assert [type(member[1]) for member in found] == [Empty, Empty]


def test_sequences_of_members_become_lists() -> None:
    type_spec = fl.StructType([("s", fl.SequenceType(np.int32))])
    sent = [{"s": [1, 2]}, {"s": []}, {"s": [3]}]
    plain = [plain_values.to_plain(value, type_spec) for value in sent]

    found = pack_members(plain, type_spec)

    assert found == sent


def test_type_without_a_container_is_refused() -> None:
    mixed = fl.StructType([("x", np.int32), np.int32])

    with pytest.raises(ValueError, match="mix of named and unnamed"):
        pack_members([(1, 2)], mixed)


def test_no_members_are_packed_to_none() -> None:
    found = pack_members([], fl.StructType([np.int32]))

    assert found == []


def test_containers_in_a_struct_of_placed_values_are_their_own() -> None:
    member = fl.StructWithPythonType(NAMED, Pair)
    result = fl.StructWithPythonType(
        [
            ("state", fl.FederatedType(member, fl.SERVER)),
            ("kept", fl.FederatedType(member, fl.CLIENTS)),
        ],
        dict,
    )

    found = plain_values.from_plain((VALUES[0], VALUES), result)

    assert found == {
        "state": Pair(1, [2.0, b"a"]),
        "kept": [Pair(x, list(y)) for x, y in VALUES],
    }
    assert type(found["state"]) is Pair
    assert [type(member) for member in found["kept"]] == [Pair] * 3

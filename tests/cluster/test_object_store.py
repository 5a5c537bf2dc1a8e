"""References travel beside an argument, in short lists, and come back in place."""

from typing import Any

import numpy as np
import pytest

from ray_fed.cluster import object_store
from ray_fed.values import Stored, StoredClients, StoredParts

PARTS = StoredParts((Stored("e"), np.float32(1), Stored("a")))
FINISH = ([Stored("a"), Stored("b")], [(Stored("c"), (np.int32(3), Stored("a")))])
LEAVES = [
    (StoredClients("d", 2, 4), PARTS, [np.int32(1), np.int32(2)]),
    (StoredClients("d", 4, 5), PARTS, [np.int32(3)]),
]


@pytest.mark.parametrize("argument", [FINISH, LEAVES], ids=["finish", "leaves"])
def test_attached_argument_is_the_detached_one(argument: Any) -> None:
    found = object_store.attach(*object_store.detach(argument))

    assert repr(found) == repr(argument)  # `StoredParts` equal themselves alone


def test_each_reference_travels_once() -> None:
    _, held = object_store.detach(FINISH)

    assert held == [["a", "b", "c"]]


def test_no_reference_stays_in_the_argument() -> None:
    bare, _ = object_store.detach(LEAVES)

    assert not any(f"reference='{name}'" in repr(bare) for name in "ade")


def test_many_references_travel_in_short_lists() -> None:
    partials = [Stored(f"partial {index}") for index in range(1000)]

    bare, held = object_store.detach((partials, []))

    assert max(len(together) for together in held) <= 256
    assert object_store.attach(bare, held) == (partials, [])


def test_parts_of_several_leaves_stay_one_value() -> None:
    first, second = object_store.attach(*object_store.detach(LEAVES))

    assert first[1] is second[1]


def test_clients_are_passed_on_unread() -> None:
    clients = [Stored("no value of a client is stored by itself")]

    bare, held = object_store.detach([(clients,)])

    assert bare[0][0] is clients
    assert held == []


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (FINISH, (["A", "B"], [("C", (np.int32(3), "A"))])),
        ([(StoredClients("d", 1, 3), [np.int32(3)])], [(["E", "F"], [np.int32(3)])]),
        ([(StoredClients(None, 0, 2),)], [(StoredClients(None, 0, 2),)]),
    ],
    ids=["values", "clients", "stand-in for clients"],
)
def test_values_take_the_places_of_their_references(
    argument: Any, expected: Any
) -> None:
    stored = {"a": "A", "b": "B", "c": "C", "d": ["D", "E", "F"], None: None}
    bare, held = object_store.detach_values(argument)

    found = object_store.attach_values(bare, [stored[name] for name in held])

    assert found == expected


def test_values_take_the_places_of_parts() -> None:
    bare, _ = object_store.detach_values([(PARTS,)])

    ((found,),) = object_store.attach_values(bare, ["E", "A"])

    assert found.parts == ("E", np.float32(1), "A")

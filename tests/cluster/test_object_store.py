"""References travel beside an argument, in short lists, and come back in place."""

import pickle
from typing import Any

import numpy as np
import pytest

from ray_fed.cluster import object_store
from ray_fed.plan.diagnostics import WorkUnshaped
from ray_fed.plan.fingerprint import Fingerprint, Versions, WorkerDescription
from ray_fed.plan.outcomes import Evaluated
from ray_fed.values.stacked_members import StackedMembers
from ray_fed.values.stored import Stored, StoredClients, StoredComponents

COMPONENTS = StoredComponents((Stored("e"), np.float32(1), Stored("a")))
FINISH = ((Stored("a"), Stored("b")), ((Stored("c"), (np.int32(3), Stored("a"))),))
SUBROUND = (
    StoredClients("d", 2, 4),
    COMPONENTS,
    [np.int32(1), np.int32(2)],
    (COMPONENTS,),
)


@pytest.mark.parametrize("argument", [FINISH, SUBROUND], ids=["finish", "subround"])
def test_unpacked_argument_is_the_packed_one(argument: Any) -> None:
    found = object_store.unpack(object_store.pack("plan", argument))

    # `StoredComponents` equal themselves alone
    assert repr(found) == repr(("plan", argument))


def test_each_reference_travels_once() -> None:
    assert object_store.pack("plan", FINISH).values == ["a", "b", "c"]


def test_no_reference_stays_in_the_argument() -> None:
    _, bare = pickle.loads(object_store.pack("plan", SUBROUND).work)

    assert not any(f"reference='{name}'" in repr(bare) for name in "ade")


def test_many_references_travel_in_short_lists() -> None:
    references = [f"partial {index}" for index in range(1000)]

    lists = object_store.short_lists(references)

    assert max(map(len, lists)) <= 256
    assert [reference for together in lists for reference in together] == references


def test_parts_that_come_twice_stay_one_value() -> None:
    _, found = object_store.unpack(object_store.pack("plan", SUBROUND))

    assert found[1] is found[3][0]


def test_clients_are_passed_on_unread() -> None:
    clients = [Stored("no value of a client is stored by itself")]

    packed = object_store.pack("plan", (clients,))

    assert object_store.unpack(packed) == ("plan", (clients,))
    assert packed.values == []


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (FINISH, (("A", "B"), (("C", (np.int32(3), "A")),))),
        ((StoredClients("d", 1, 3), [np.int32(3)]), (["E", "F"], [np.int32(3)])),
        ((StoredClients(None, 0, 2),), (StoredClients(None, 0, 2),)),
    ],
    ids=["values", "clients", "stand-in for clients"],
)
def test_values_take_the_places_of_their_references(
    argument: Any, expected: Any
) -> None:
    stored = {"a": "A", "b": "B", "c": "C", "d": ["D", "E", "F"], None: None}
    packed = object_store.pack("plan", argument)

    resolved = [stored[name] for name in packed.values]
    found = object_store.unpack_resolved(packed.work, resolved, [])

    assert found == ("plan", expected)


def test_values_take_the_places_of_parts() -> None:
    packed = object_store.pack("plan", (COMPONENTS,))

    _, (found,) = object_store.unpack_resolved(packed.work, ["E", "A"], [])

    assert found.components == ("E", np.float32(1), "A")


@pytest.mark.parametrize(
    "value",
    [b"text", b"x" * 100_000, np.float32(1), (np.zeros(3), b"x"), [np.int32(1)]],
    ids=["text", "long text", "scalar", "structure", "clients"],
)
def test_what_is_encoded_is_bytes_and_comes_back(value: Any) -> None:
    encoded = object_store.encode(value)

    assert isinstance(encoded, bytes)
    np.testing.assert_equal(object_store.decode(encoded), value)


@pytest.mark.parametrize(("count", "kind"), [(3, bytes), (3000, StackedMembers)])
def test_clients_that_are_alike_are_stored_stacked(count: int, kind: type) -> None:
    clients = [(np.arange(i, i + 4), np.float32(i)) for i in range(count)]

    encoded = object_store.encode(clients)

    assert type(encoded) is kind
    np.testing.assert_equal(object_store.decode(encoded), clients)


def test_large_arrays_are_stored_as_they_are() -> None:
    value = (np.zeros(100_000),)

    assert object_store.encode(value) is value
    assert object_store.decode(value) is value


def test_result_of_a_plan_comes_back_with_encoded_values() -> None:
    ran = Evaluated([np.int32(1), np.zeros(100_000)], kernel_leaves=2)
    note = WorkUnshaped("a reason")

    prints = Fingerprint("2", "CPU", "avx", onednn=True, threads=1)
    worker = WorkerDescription(7, "10.0.0.1", "node", Versions.read(), prints)
    packed = object_store.pack_result(ran, [note], worker)

    found, noted, by = object_store.unpack_result(packed)

    assert by == worker
    assert found.kernel_leaves == 2
    assert list(noted) == [note]
    assert object_store.decode(found.values[0]) == 1
    assert found.values[1] is ran.values[1]

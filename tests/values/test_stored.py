"""Stored values, and what executors read of values placed at clients."""

import pickle
from typing import Any

import federated_language as fl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ray_fed.errors as errors
from ray_fed.values import stored as stored_
from ray_fed.values.stored import StoredClients

AT_CLIENTS = fl.FederatedType(np.int32, fl.CLIENTS)
AT_SERVER = fl.FederatedType(np.int32, fl.SERVER)
NAMED = fl.StructType([("x", np.int32), ("y", np.float32)])


def test_slice_of_stored_clients_copies_nothing() -> None:
    clients = StoredClients("key", 10, 20)

    assert clients[2:5] == StoredClients("key", 12, 15)
    assert len(clients[2:5]) == 3


@given(
    length=st.integers(0, 6),
    start=st.none() | st.integers(-8, 8),
    stop=st.none() | st.integers(-8, 8),
)
def test_stored_clients_slice_as_a_list_does(
    length: int, start: int | None, stop: int | None
) -> None:
    sliced: StoredClients = StoredClients("key", 4, 4 + length)[start:stop]

    expected = list(range(4, 4 + length))[start:stop]
    assert len(sliced) == len(expected)
    assert not expected or (sliced.start, sliced.stop) == (
        expected[0],
        expected[-1] + 1,
    )


def test_stored_clients_have_no_single_client() -> None:
    with pytest.raises(TypeError, match="Expected a slice"):
        StoredClients("key", 0, 3)[0]


def test_stored_clients_take_no_step() -> None:
    with pytest.raises(ValueError, match="step of 1, found 2"):
        StoredClients("key", 0, 4)[::2]


def test_stored_clients_are_a_cohort_to_federated_language() -> None:
    found = fl.framework.infer_cardinalities(StoredClients("key", 5, 9), AT_CLIENTS)

    assert found == {fl.CLIENTS: 4}


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(stored_.Stored("key"), id="one value"),
        pytest.param(StoredClients("key", 1, 3), id="clients"),
    ],
)
def test_stored_value_pickles(stored: object) -> None:
    assert pickle.loads(pickle.dumps(stored)) == stored


def test_map_placed_visits_placed_parts_whole() -> None:
    type_spec = fl.to_type([AT_CLIENTS, ("b", fl.to_type([AT_SERVER, NAMED]))])
    seen: list[tuple[str, Any]] = []

    def note(part_type: fl.Type, part: Any) -> Any:
        seen.append((str(part_type), part))
        return len(seen)

    mapped = stored_.map_placed(note, ([1, 2], (3, (4, 5.0))), type_spec)

    assert mapped == (1, (2, 3))
    assert seen == [
        ("{int32}@CLIENTS", [1, 2]),
        ("int32@SERVER", 3),
        ("<x=int32,y=float32>", (4, 5.0)),
    ]


def test_map_placed_of_an_unplaced_struct_is_one_part() -> None:
    assert stored_.map_placed(lambda _, part: [part], (1, 2.0), NAMED) == [(1, 2.0)]


@pytest.mark.parametrize("value", [[1, 2, 3], (1, 2, 3), StoredClients("key", 4, 7)])
def test_check_cardinality_accepts_one_value_a_client(value: object) -> None:
    stored_.check_cardinality(value, AT_CLIENTS, 3)


def test_check_cardinality_says_both_lengths() -> None:
    with pytest.raises(
        errors.CardinalityError, match=r"Expected 3 values .* found 2\."
    ):
        stored_.check_cardinality([1, 2], AT_CLIENTS, 3)


@pytest.mark.parametrize("value", [3, "abc", b"abc", {1, 2, 3}, np.zeros(3)])
def test_check_cardinality_refuses_what_is_no_sequence(value: object) -> None:
    with pytest.raises(errors.ValueMismatchError, match="a list or tuple"):
        stored_.check_cardinality(value, AT_CLIENTS, 3)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(np.zeros(3, np.float32), 12, id="array"),
        pytest.param(np.float32(1), 4, id="scalar"),
        pytest.param([np.zeros(2, np.int8), (np.zeros(3, np.int8),)], 5, id="nested"),
        pytest.param(b"abc", 3, id="bytes"),
        pytest.param(np.array([b"abc", b""], object), 16 + 3, id="strings"),
        pytest.param((), 0, id="empty"),
        pytest.param(7, 0, id="no array"),
    ],
)
def test_count_bytes_adds_arrays(value: Any, expected: int) -> None:
    assert stored_.count_bytes(value) == expected


@pytest.mark.parametrize(
    "value",
    [b"ab", bytearray(b"ab"), memoryview(b"ab"), "ab", {1, 2}],
    ids=lambda value: type(value).__name__,
)
def test_text_memory_and_sets_are_no_cohort(value: Any) -> None:
    type_spec = fl.FederatedType(np.int32, fl.CLIENTS)

    with pytest.raises(errors.ValueMismatchError, match="a value for each client"):
        stored_.check_cardinality(value, type_spec, 2)

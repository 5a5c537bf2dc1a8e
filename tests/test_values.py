"""Structs, stored values and the checks that executors share."""

import collections
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.language import structs, type_checks
from ray_fed.language.structs import Struct
from ray_fed.values import stored as stored_
from ray_fed.values.stored import StoredClients

AT_CLIENTS = fl.FederatedType(np.int32, fl.CLIENTS)
ALL_EQUAL = fl.FederatedType(np.int32, fl.CLIENTS, True)
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


@pytest.mark.parametrize(
    ("type_spec", "at_clients", "by_client"),
    [
        pytest.param(AT_CLIENTS, True, True, id="clients"),
        pytest.param(ALL_EQUAL, True, False, id="clients, all equal"),
        pytest.param(AT_SERVER, False, False, id="server"),
        pytest.param(fl.TensorType(np.int32), False, False, id="unplaced"),
    ],
)
def test_predicates_tell_placements_apart(
    type_spec: fl.Type, at_clients: bool, by_client: bool
) -> None:
    assert type_checks.is_at_clients(type_spec) is at_clients
    assert type_checks.differs_by_client(type_spec) is by_client


def test_check_assignable_accepts_all_equal_for_any() -> None:
    type_checks.check_assignable(AT_CLIENTS, ALL_EQUAL, "an argument")


def test_check_assignable_says_both_types() -> None:
    with pytest.raises(errors.ValueMismatchError) as caught:
        type_checks.check_assignable(AT_SERVER, AT_CLIENTS, "a sum")

    assert str(caught.value) == (
        "Expected a sum of type `int32@SERVER`, found `{int32}@CLIENTS`."
    )


def test_narrow_returns_what_it_was_given() -> None:
    value = "embedded"

    assert type_checks.narrow(value, str, "a test") is value


def test_narrow_refuses_what_another_executor_embedded() -> None:
    with pytest.raises(
        errors.ValueMismatchError, match="embedded in a test, found `int`"
    ):
        type_checks.narrow(3, str, "a test")


@pytest.mark.parametrize(
    "container",
    [
        pytest.param({"x": 1, "y": 2}, id="dict"),
        pytest.param(collections.OrderedDict(x=1, y=2), id="ordered dict"),
        pytest.param(Struct([("x", 1), ("y", 2)]), id="struct"),
    ],
)
def test_to_struct_keeps_names_in_order(container: object) -> None:
    assert list(structs.iter_elements(structs.to_struct(container))) == [
        ("x", 1),
        ("y", 2),
    ]


def test_to_struct_of_a_list_has_no_names() -> None:
    assert list(structs.iter_elements(structs.to_struct([1, [2]]))) == [
        (None, 1),
        (None, [2]),
    ]


def test_struct_elements_are_labelled_by_name_or_index() -> None:
    type_spec = fl.StructType([("x", np.int32), np.float32])

    elements = structs.struct_elements((1, 2.0), type_spec, "argument")

    assert [(str(t), label, element) for t, label, element in elements] == [
        ("int32", "argument.x", 1),
        ("float32", "argument.1", 2.0),
    ]


def test_struct_elements_of_a_mapping_need_names() -> None:
    with pytest.raises(errors.ValueMismatchError, match="named"):
        structs.struct_elements({"x": 1}, fl.StructType([np.int32]))


@pytest.mark.parametrize("found", [["x"], ["x", "y", "z"]], ids=["missing", "more"])
def test_struct_elements_of_a_mapping_names_what_it_has(found: list[str]) -> None:
    type_spec = fl.StructType([("x", np.int32), ("y", np.int32)])

    with pytest.raises(errors.ValueMismatchError) as caught:
        structs.struct_elements(dict.fromkeys(found, 1), type_spec)

    assert f"elements named ['x', 'y'], found {found}" in str(caught.value)


def test_struct_elements_of_a_class_is_no_container() -> None:
    @dataclasses.dataclass
    class Point:
        x: int

    with pytest.raises(errors.ValueMismatchError, match="a container"):
        structs.struct_elements(Point, fl.StructType([("x", np.int32)]))


def test_show_cuts_long_values() -> None:
    shown = structs.show(list(range(1000)))

    assert len(shown) < 300
    assert shown.endswith("...]` of Python type `list`")


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


@pytest.mark.parametrize(
    ("index", "name", "expected"),
    [
        pytest.param(0, None, 0, id="first"),
        pytest.param(1, None, 1, id="last"),
        pytest.param(None, "y", 1, id="name"),
    ],
)
def test_select_index_finds_the_position(
    index: int | None, name: str | None, expected: int
) -> None:
    assert type_checks.select_index(NAMED, index, name) == expected


@pytest.mark.parametrize(
    ("type_spec", "index", "name", "error"),
    [
        pytest.param(NAMED, None, None, errors.UnsupportedError, id="neither"),
        pytest.param(NAMED, 0, "x", errors.UnsupportedError, id="both"),
        pytest.param(NAMED, 2, None, errors.ValueMismatchError, id="past the end"),
        pytest.param(NAMED, -1, None, errors.ValueMismatchError, id="negative"),
        pytest.param(NAMED, None, "z", errors.ValueMismatchError, id="unknown name"),
        pytest.param(AT_SERVER, 0, None, errors.ValueMismatchError, id="no struct"),
    ],
)
def test_select_index_refuses(
    type_spec: fl.Type, index: int | None, name: str | None, error: type[Exception]
) -> None:
    with pytest.raises(error, match="Expected"):
        type_checks.select_index(type_spec, index, name)


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


class _Argument(fl.framework.ExecutorValue):
    def __init__(self, type_spec: fl.Type) -> None:
        self._type = type_spec

    @property
    @override
    def type_signature(self) -> fl.Type:
        return self._type

    @property
    @override
    def reference(self) -> Any:
        raise NotImplementedError

    @override
    async def compute(self) -> Any:
        raise NotImplementedError


_INT = _Argument(fl.TensorType(np.int32))
_FLOAT = _Argument(fl.TensorType(np.float32))
_TAKES_INT = fl.FunctionType(np.int32, np.int32)
_TAKES_NOTHING = fl.FunctionType(None, np.int32)


@pytest.mark.parametrize(
    ("type_spec", "argument"),
    [
        pytest.param(_TAKES_INT, _INT, id="assignable"),
        pytest.param(_TAKES_NOTHING, None, id="none taken, none given"),
    ],
)
def test_check_argument_accepts(
    type_spec: fl.FunctionType, argument: _Argument | None
) -> None:
    type_checks.check_argument(type_spec, argument)


@pytest.mark.parametrize(
    ("type_spec", "argument", "message"),
    [
        pytest.param(_TAKES_NOTHING, _INT, "no argument", id="one too many"),
        pytest.param(_TAKES_INT, None, "found none", id="one missing"),
        pytest.param(_TAKES_INT, _FLOAT, "found `float32`", id="another type"),
    ],
)
def test_check_argument_refuses(
    type_spec: fl.FunctionType, argument: _Argument | None, message: str
) -> None:
    with pytest.raises(errors.ValueMismatchError, match=message):
        type_checks.check_argument(type_spec, argument)


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
    ("type_spec", "expected"),
    [
        pytest.param(fl.StructType([]), True, id="empty struct"),
        pytest.param(NAMED, False, id="struct"),
        pytest.param(AT_SERVER, False, id="no struct"),
    ],
)
def test_is_empty_struct(type_spec: fl.Type, expected: bool) -> None:
    assert type_checks.is_empty_struct(type_spec) is expected


@pytest.mark.parametrize(
    ("narrowed", "type_spec"),
    [
        pytest.param(type_checks.struct_type, NAMED, id="struct"),
        pytest.param(type_checks.function_type, _TAKES_INT, id="function"),
    ],
)
def test_type_that_is_known_is_returned(
    narrowed: Callable[[fl.Type], fl.Type], type_spec: fl.Type
) -> None:
    assert narrowed(type_spec) is type_spec


def test_member_type_is_what_is_placed() -> None:
    assert type_checks.member_type(AT_CLIENTS) == cast(
        "fl.Type", fl.TensorType(np.int32)
    )


@pytest.mark.parametrize(
    "value",
    [b"ab", bytearray(b"ab"), memoryview(b"ab"), "ab", {1, 2}],
    ids=lambda value: type(value).__name__,
)
def test_text_memory_and_sets_are_no_cohort(value: Any) -> None:
    type_spec = fl.FederatedType(np.int32, fl.CLIENTS)

    with pytest.raises(errors.ValueMismatchError, match="a value for each client"):
        stored_.check_cardinality(value, type_spec, 2)

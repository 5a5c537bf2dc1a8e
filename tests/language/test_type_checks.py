"""The checks of types that executors share."""

from collections.abc import Callable
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.language import type_checks

AT_CLIENTS = fl.FederatedType(np.int32, fl.CLIENTS)
ALL_EQUAL = fl.FederatedType(np.int32, fl.CLIENTS, True)
AT_SERVER = fl.FederatedType(np.int32, fl.SERVER)
NAMED = fl.StructType([("x", np.int32), ("y", np.float32)])


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

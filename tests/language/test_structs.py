"""Structs keep names in order, and say what they expected."""

import collections
import dataclasses

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.language import structs
from ray_fed.language.structs import Struct


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

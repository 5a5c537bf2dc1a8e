"""Types and values are walked in one order."""

import federated_language as fl
import numpy as np

from ray_fed.language import trees
from ray_fed.language.structs import Struct

_NESTED = fl.to_type([("a", np.int32), ("b", [fl.SequenceType(np.float32), np.bool_])])


def test_leaves_are_in_the_order_of_their_type() -> None:
    value = (1, ([2.0], True))

    flat = trees.leaves(value, _NESTED)

    assert flat == trees.flatten(value) == [1, [2.0], True]
    assert [str(leaf) for leaf in trees.leaf_types(_NESTED)] == [
        "int32",
        "float32*",
        "bool",
    ]
    assert trees.leaf_types(None) == trees.leaves(None, None) == []
    assert trees.nest(iter(flat), _NESTED) == value
    structs = trees.unflatten(iter(flat), _NESTED)
    assert structs == Struct([("a", 1), ("b", Struct([(None, [2.0]), (None, True)]))])
    assert trees.flatten(structs) == trees.leaves(structs, _NESTED) == flat
    assert trees.map_leaves(lambda leaf, _: leaf, value, _NESTED) == structs


def test_paths_have_indices_where_there_are_no_names() -> None:
    assert [path for path, _ in trees.named_leaves(_NESTED)] == [
        ("a",),
        ("b", 0),
        ("b", 1),
    ]


def test_placed_walk_keeps_structs_without_placed_parts() -> None:
    state, pair = (
        fl.FederatedType([np.int32] * 2, fl.SERVER),
        fl.to_type([np.int32] * 2),
    )
    placed = fl.StructType([state, pair])

    assert trees.leaf_types(placed, trees.is_unstructured) == [state, pair]
    flat = trees.leaves(((1, 2), (3, 4)), placed, trees.is_unstructured)
    assert flat == [(1, 2), (3, 4)]
    assert trees.nest(iter(flat), placed, trees.is_unstructured) == ((1, 2), (3, 4))


def test_mapped_type_keeps_its_containers() -> None:
    row = fl.StructWithPythonType([("x", np.int32)], dict)

    mapped = trees.map_types(lambda leaf: fl.TensorType(leaf.dtype, [3]), row)

    assert mapped == fl.StructWithPythonType([("x", (np.int32, [3]))], dict)


def test_bytes_of_an_open_type_are_unknown() -> None:
    assert trees.count_bytes(fl.to_type([np.int64, (np.float32, [2, 3])])) == 32
    assert trees.count_bytes(fl.to_type([np.int64, (np.float32, [None])])) is None
    assert trees.count_bytes(fl.to_type([np.str_])) is None
    assert trees.count_bytes(_NESTED) is None

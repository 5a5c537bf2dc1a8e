"""The layout of many clients' values, and one client's out of it."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.values.plain_values as plain_values
from ray_fed.language import trees
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.kernels.client_batches import ClientLayout
from ray_fed.tensorflow.kernels.graph_builder import GraphSequence
from ray_fed.values.columnar_sequence import Sizes

VECTOR = fl.TensorType(np.float32, [2])
ROWS = fl.TensorType(np.float32, [None, 2])
LABELS = fl.TensorType(np.int32, [None])


def rows(count: int, start: float = 0.0) -> Any:
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2) + np.float32(start)


def keep_nothing(key: Any, tokens: Any, make: Any, count: Any) -> Any:
    del key, tokens, count
    return make()


def lay(member: fl.Type, clients: list[Any]) -> tuple[ClientLayout, list[tf.Tensor]]:
    layout = ClientLayout(fl.StructType([member]))
    plain = [plain_values.to_plain(client, member) for client in clients]
    return layout, layout.join([layout.lay_part(0, plain, keep_nothing)])


def members(member: fl.Type, clients: list[Any]) -> list[Any]:
    """Return each client's value, taken out of the layout inside of one graph."""
    layout, tensors = lay(member, clients)
    traces: list[None] = []

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64), *layout.specs])
    def member_at(index: Any, *laid: Any) -> Any:
        traces.append(None)
        tensors: list[Any] = []
        for leaf in trees.flatten(layout.member(laid, index)):
            is_sequence = isinstance(leaf, GraphSequence)
            tensors += [*leaf.columns, leaf.length] if is_sequence else [leaf]
        return tensors

    found = [
        [tensor.numpy().tolist() for tensor in member_at(np.int64(index), *tensors)]
        for index in range(len(clients))
    ]
    assert len(traces) == 1
    return found


def test_batched_sequences_keep_each_client_s_splits() -> None:
    sequence = fl.SequenceType(fl.StructType([("x", ROWS), ("y", LABELS)]))
    sizes = [[2, 2, 1], [], [3], [0, 1]]
    clients = [
        [{"x": rows(size, 10 * size), "y": [size] * size} for size in batches]
        for batches in sizes
    ]

    found = members(sequence, clients)

    assert [client[1] for client in found] == [[0, 2, 4, 5], [0], [0, 3], [0, 0, 1]]
    assert [client[3] for client in found] == [[0, 2, 4, 5], [0], [0, 3], [0, 0, 1]]
    assert [client[2] for client in found] == [[2, 2, 2, 2, 1], [], [3, 3, 3], [1]]
    assert [client[4] for client in found] == [3, 0, 1, 2]
    assert found[0][0] == [*rows(2, 20).tolist()] * 2 + rows(1, 10).tolist()


@pytest.mark.parametrize("member", [VECTOR, ROWS, fl.SequenceType(ROWS)], ids=str)
def test_no_clients_are_laid_too(member: fl.Type) -> None:
    layout, tensors = lay(member, [])

    assert len(tensors) == len(layout.specs)
    for tensor, spec in zip(tensors, layout.specs, strict=True):
        assert spec.is_compatible_with(tensor)


@pytest.mark.parametrize(
    "member",
    [
        fl.TensorType(np.int32, [None, None]),
        fl.TensorType(np.int32, None),
        fl.SequenceType(fl.TensorType(np.int32, [2, None])),
    ],
    ids=str,
)
def test_other_unknown_dimensions_do_not_fit(member: fl.Type) -> None:
    with pytest.raises(Fallback, match="client data of type"):
        ClientLayout(fl.StructType([member]))


def test_parts_laid_one_by_one_are_clients_whose_data_is_a_struct() -> None:
    parts = [fl.SequenceType(ROWS), VECTOR, fl.StructType([LABELS, np.int32])]
    clients = [
        ([rows(2), rows(1)], rows(1)[0], ([3], 4)),
        ([], rows(1, 5)[0], ([], 6)),
        ([rows(3, 7)], rows(1, 9)[0], ([8, 9], 10)),
    ]
    whole = fl.StructType(parts)
    layout = ClientLayout(whole)

    tensors = layout.join(
        [
            layout.lay_part(
                part,
                [plain_values.to_plain(c[part], type_spec) for c in clients],
                keep_nothing,
            )
            for part, type_spec in enumerate(parts)
        ]
    )

    _, expected = lay(whole, clients)
    for found, other, spec in zip(tensors, expected, layout.specs, strict=True):
        assert spec.is_compatible_with(found)
        np.testing.assert_array_equal(found, other)


@pytest.mark.parametrize(
    ("member", "clients", "expected"),
    [
        (VECTOR, [rows(1)[0]] * 2, [((2,),)] * 2),
        (ROWS, [rows(2), rows(0)], [((2, 2),), ((0, 2),)]),
        (
            fl.SequenceType(VECTOR),
            [list(rows(3)), []],
            [(Sizes(3, (None,)),), (Sizes(0, (None,)),)],
        ),
        (
            fl.SequenceType((ROWS, LABELS)),
            [
                [(rows(size), [0] * (size + 1)) for size in sizes]
                for sizes in ([2, 2], [], [2, 1], [1])
            ],
            [(Sizes(2, (2, 3)),), (Sizes(0, (0, 0)),), None, (Sizes(1, (1, 2)),)],
        ),
        (
            fl.StructType([fl.SequenceType(LABELS), ROWS]),
            [([[0], [1]], rows(1)), ([[0], [1, 2]], rows(1))],
            [(Sizes(2, (1,)), (1, 2)), None],
        ),
        (np.str_, ["a", "b"], []),
        (fl.StructType([]), [(), ()], []),
    ],
    ids=["vectors", "rows", "sequences", "batches", "structs", "text", "nothing"],
)
def test_clients_have_shapes_where_elements_are_alike(
    member: Any, clients: list[Any], expected: list[Any]
) -> None:
    layout, tensors = lay(fl.to_type(member), clients)

    shapes, kinds = layout.shapes(tensors)

    assert [shapes[kind] for kind in kinds] == expected
    assert len(set(shapes)) == len(shapes)

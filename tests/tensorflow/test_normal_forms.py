"""The normal form: what normalizing gives, and that doing it again changes nothing."""

# pyright: reportUnknownLambdaType=false

from collections.abc import Callable
from typing import Any, NamedTuple

import federated_language as fl
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.tensorflow.tensors.datasets as datasets
import ray_fed.values.plain_values as plain_values
from ray_fed.language import structs
from ray_fed.tensorflow import normal_forms


class Point(NamedTuple):
    z: Any
    a: Any


NAMED = fl.StructType([("z", np.int32), ("a", fl.StructType([np.str_, np.bool_]))])
SEQUENCE = fl.SequenceType(np.int32)
POINTS = fl.SequenceType([("z", np.int32), ("a", np.int32)])


def variable(value: Any) -> Any:
    return tf.Variable(value)


def sliced(value: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices(value)


def is_same(left: Any, right: Any) -> bool:
    """Return whether two normal forms hold the very same objects."""
    if not isinstance(left, structs.Struct):
        return left is right
    pairs = zip(structs.iter_elements(left), structs.iter_elements(right), strict=True)
    return isinstance(right, structs.Struct) and all(
        name == other_name and is_same(member, other)
        for (name, member), (other_name, other) in pairs
    )


VALUES = [
    pytest.param(lambda: 5, np.int32, id="int"),
    pytest.param(lambda: 0.1, np.float32, id="float"),
    pytest.param(lambda: True, np.bool_, id="bool"),
    pytest.param(lambda: "text", np.str_, id="str"),
    pytest.param(lambda: np.ones([2, 2]), (np.float64, (2, None)), id="array"),
    pytest.param(lambda: ml_dtypes.bfloat16(2), ml_dtypes.bfloat16, id="bfloat16"),
    pytest.param(lambda: tf.constant([1, 2]), (np.int32, (2,)), id="tensor"),
    pytest.param(lambda: variable([1, 2]), (np.int32, (None,)), id="variable"),
    pytest.param(lambda: (1, ("x", True)), NAMED, id="tuples"),
    pytest.param(lambda: {"a": ["x", True], "z": 1}, NAMED, id="mapping"),
    pytest.param(
        lambda: structs.Struct([(None, 1), (None, (b"x", True))]), NAMED, id="struct"
    ),
    pytest.param(tuple, [], id="empty struct"),
    pytest.param(lambda: [1, 2], SEQUENCE, id="list"),
    pytest.param(lambda: iter([1, 2]), SEQUENCE, id="iterator"),
    pytest.param(lambda: np.arange(3, dtype=np.int32), SEQUENCE, id="array of rows"),
    pytest.param(lambda: sliced([1, 2]), SEQUENCE, id="dataset"),
    pytest.param(lambda: sliced(([1], [2])), POINTS, id="dataset of tuples"),
    pytest.param(lambda: sliced(Point([1], [2])), POINTS, id="dataset of namedtuples"),
    pytest.param(lambda: sliced({"z": [1], "a": [2]}), POINTS, id="dataset of dicts"),
    pytest.param(
        lambda: plain_values.to_plain([1, 2], SEQUENCE), SEQUENCE, id="plain sequence"
    ),
    pytest.param(lambda: [(1, [2])], [[np.int32, SEQUENCE]], id="nested"),
]


@pytest.mark.parametrize(("make", "spec"), VALUES)
def test_normalizing_twice_is_normalizing_once(
    make: Callable[[], Any], spec: Any
) -> None:
    type_spec = fl.to_type(spec)

    once = normal_forms.normalize(make(), type_spec)
    twice = normal_forms.normalize(once, type_spec)

    assert is_same(once, twice)


class TestForms:
    def test_variables_are_read(self) -> None:
        kept = variable(1)

        result = normal_forms.normalize(kept, fl.to_type(np.int32))
        kept.assign(2)

        assert not isinstance(result, tf.Variable)
        assert result.numpy() == 1

    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(lambda: sliced(Point([1], [2])), id="dataset of namedtuples"),
            pytest.param(lambda: sliced(([1], [2])), id="dataset of tuples"),
            pytest.param(lambda: sliced({"z": [1], "a": [2]}), id="dataset of dicts"),
            pytest.param(lambda: iter([{"a": 2, "z": 1}]), id="iterator of dicts"),
        ],
    )
    def test_sequences_are_datasets_with_their_fields_in_place(
        self, make: Callable[[], Any]
    ) -> None:
        result = normal_forms.normalize(make(), POINTS)

        [element] = normal_forms.compute(result, POINTS)
        assert isinstance(result, tf.data.Dataset)
        assert (element.z, element.a) == (1, 2)

    def test_sequences_that_are_there_are_held_with_their_fields_in_place(self) -> None:
        result = normal_forms.normalize([Point(1, 2), {"a": 4, "z": 3}], POINTS)

        elements = normal_forms.compute(result, POINTS)
        assert isinstance(result, datasets.HeldSequence)
        assert [(element.z, element.a) for element in elements] == [(1, 2), (3, 4)]
        assert result.tensors is result.tensors
        assert [t.numpy().tolist() for t in result.tensors] == [[1, 3], [2, 4], 2]
        dataset = datasets.to_elements(result.dataset, POINTS.element)
        assert [(element.z, element.a) for element in dataset] == [(1, 2), (3, 4)]

    def test_held_sequences_take_the_type_they_are_passed_as(self) -> None:
        fixed = fl.SequenceType(fl.TensorType(np.float32, (2,)))
        ragged = fl.SequenceType(fl.TensorType(np.float32, (None,)))
        held = normal_forms.normalize([[1.0, 2.0], [3.0, 4.0]], fixed)

        result = normal_forms.normalize(held, ragged)

        assert normal_forms.normalize(held, fixed) is held
        assert normal_forms.normalize(result, ragged) is result
        rows, splits, length = (tensor.numpy() for tensor in result.tensors)
        assert rows.tolist() == [1, 2, 3, 4]
        assert (splits.tolist(), length) == ([0, 2, 4], 2)
        with pytest.raises(errors.ValueMismatchError, match="a sequence"):
            normal_forms.normalize(result, fixed)

    def test_what_is_computed_of_a_held_sequence_is_the_callers(self) -> None:
        vectors = fl.SequenceType(fl.TensorType(np.float32, (2,)))
        held = normal_forms.normalize([[1.0, 2.0]], vectors)

        normal_forms.compute(held, vectors)[0][:] = 0

        assert normal_forms.compute(held, vectors)[0].tolist() == [1, 2]


class TestRefusals:
    @pytest.mark.parametrize(
        ("value", "spec"),
        [
            pytest.param((1, 2), [np.int32], id="another length"),
            pytest.param({"x": 1}, [("y", np.int32)], id="other names"),
            pytest.param({"x": 1}, [np.int32], id="names for none"),
            pytest.param(5, [np.int32], id="no container"),
            pytest.param(5, SEQUENCE, id="no iterable"),
            pytest.param("ab", fl.SequenceType(np.str_), id="str for a sequence"),
            pytest.param({1: 2}, SEQUENCE, id="dict for a sequence"),
            pytest.param({1, 2}, SEQUENCE, id="set for a sequence"),
            pytest.param(bytearray(b"ab"), SEQUENCE, id="memory for a sequence"),
            pytest.param([1, 2.5], SEQUENCE, id="an element of another type"),
            pytest.param(
                len, fl.FunctionType(np.int32, np.int32), id="Python function"
            ),
        ],
    )
    def test_what_is_not_of_the_type(self, value: Any, spec: Any) -> None:
        with pytest.raises(errors.ValueMismatchError, match=r"^Expected "):
            normal_forms.normalize(value, fl.to_type(spec))

    @pytest.mark.parametrize(
        ("make", "spec"),
        [
            pytest.param(lambda: tf.constant(1.0), np.int32, id="dtype of a tensor"),
            pytest.param(
                lambda: tf.constant([1]), (np.int32, (2,)), id="shape of a tensor"
            ),
            pytest.param(lambda: variable(1.0), np.int32, id="dtype of a variable"),
            pytest.param(
                lambda: tf.data.Dataset.range(2), SEQUENCE, id="dtype of a dataset"
            ),
            pytest.param(
                lambda: sliced({"a": [2], "z": [1]}), POINTS, id="names of a dataset"
            ),
            pytest.param(
                lambda: tf.sparse.from_dense([1]),
                (np.int32, (None,)),
                id="sparse tensor",
            ),
        ],
    )
    def test_what_tensorflow_types_otherwise(
        self, make: Callable[[], Any], spec: Any
    ) -> None:
        with pytest.raises(errors.ValueMismatchError, match=r"^Expected "):
            normal_forms.normalize(make(), fl.to_type(spec))

    def test_symbolic_tensors(self) -> None:
        with tf.Graph().as_default():
            symbolic = tf.compat.v1.placeholder(tf.int32, [])

        with pytest.raises(errors.ValueMismatchError, match="the symbolic tensor"):
            normal_forms.normalize(symbolic, fl.to_type(np.int32))

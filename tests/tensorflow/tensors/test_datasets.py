"""Sequences as datasets, and back: no value changes place, whatever the containers."""

# pyright: reportUnknownLambdaType=false

import collections
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import federated_language as fl
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.tensorflow.tensors.datasets as datasets
import ray_fed.values.plain_values as plain_values
from ray_fed.values import columnar_sequence


class Point(NamedTuple):
    z: Any
    a: Any


@attrs.define
class Record:
    z: Any
    a: Any


NAMED = fl.StructType([("z", np.int32), ("a", np.int32)])
BATCH = fl.TensorType(np.float32, (None, 2))
PAIR = fl.TensorType(np.float32, (2,))


def rows_of(
    elements: list[Any], element: fl.Type
) -> columnar_sequence.ColumnarSequence:
    return plain_values.to_plain(elements, fl.SequenceType(element))


def listed(value: Any) -> Any:
    """Return arrays, structs and tuples as nested lists, to compare with ==."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes | int | float):
        return value
    return [listed(member) for member in value]


def sliced(value: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices(value)


def number_of(dataset: Any) -> list[Any]:
    return [listed(tf.nest.flatten(e)) for e in dataset.as_numpy_iterator()]


def filled(*shape: int) -> Any:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


READ: dict[str, tuple[Callable[[], Any], fl.Type]] = {
    "scalars": (lambda: sliced(np.array([3, 1, 2], np.int32)), fl.TensorType(np.int32)),
    "vectors": (lambda: sliced(filled(3, 2)), PAIR),
    "strings": (lambda: sliced([b"a\0", b""]), fl.TensorType(np.str_)),
    "bfloat16": (
        lambda: sliced(tf.constant([1, 2], tf.bfloat16)),
        fl.TensorType(ml_dtypes.bfloat16),
    ),
    "named, in another order": (lambda: sliced({"a": [1, 2], "z": [3, 4]}), NAMED),
    "batches": (lambda: sliced(filled(4, 2)).batch(2, drop_remainder=True), BATCH),
    "a ragged last batch": (lambda: sliced(filled(5, 2)).batch(2), BATCH),
    "none": (lambda: sliced(filled(3, 2)).take(0), PAIR),
    "none that pass": (
        lambda: sliced([1, 2]).filter(lambda x: x > 2),
        fl.TensorType(np.int32),
    ),
    "two unknown dimensions": (
        lambda: sliced(filled(2, 3, 2)),
        fl.TensorType(np.float32, (None, None)),
    ),
}


class TestToRows:
    """Read at once or one by one: the same rows."""

    @pytest.mark.parametrize("case", READ)
    def test_dataset_has_the_rows_of_its_elements(self, case: str) -> None:
        make, element = READ[case]
        dataset = make()

        read = plain_values.to_plain(dataset, fl.SequenceType(element))

        expected = rows_of(list(dataset.as_numpy_iterator()), element)
        assert read.length == expected.length
        for column, other in zip(read.columns, expected.columns, strict=True):
            assert column.rows.dtype == other.rows.dtype
            assert list(map(listed, column.rows)) == list(map(listed, other.rows))
            assert (column.splits is None) == (other.splits is None)
            if column.splits is not None:
                assert listed(column.splits) == listed(other.splits)

    @pytest.mark.parametrize("case", ["vectors", "strings", "batches"])
    def test_elements_of_one_shape_are_read_at_once(
        self, case: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make, element = READ[case]
        dataset = make()
        monkeypatch.delattr(tf.data.Dataset, "__iter__")

        assert len(plain_values.to_plain(dataset, fl.SequenceType(element))) > 0

    def test_reading_to_the_end_runs_no_op_that_fails(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The end of TensorFlow's own iteration is an error, which spreads to other
        # threads.
        rows = tf.data.Dataset.range(3)
        known, unknown = rows, rows.filter(lambda _: True)
        monkeypatch.delattr(type(iter(rows)), "__next__")
        monkeypatch.setattr(tf.data.Dataset, "as_numpy_iterator", None)
        element = fl.TensorType(np.int64)

        assert len(plain_values.to_plain(known, fl.SequenceType(element))) == 3
        assert len(plain_values.to_plain(unknown, fl.SequenceType(element))) == 3
        assert datasets.to_elements(unknown, element) == [0, 1, 2]

    def test_element_of_another_type_is_named(self) -> None:
        dataset = sliced({"a": [1], "z": np.array([3])})

        with pytest.raises(
            errors.ValueMismatchError, match=r"`z` of element 0 .*int64"
        ):
            plain_values.to_plain(dataset, fl.SequenceType(NAMED))

    def test_dataset_without_end_is_refused(self) -> None:
        dataset = sliced([1]).repeat()

        with pytest.raises(errors.ValueMismatchError, match="without end: take"):
            plain_values.to_plain(dataset, fl.SequenceType(np.int32))


class TestFromRows:
    @pytest.mark.parametrize(
        ("elements", "element", "kind"),
        [
            pytest.param(
                [([1.0, 2.0], 3), ([4.0, 5.0], 6)],
                fl.StructType([fl.TensorType(np.float32, (2,)), np.int32]),
                "TensorSlice",
                id="fixed shapes are sliced",
            ),
            pytest.param(
                [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]], [[9.0, 0.0]]],
                BATCH,
                "Batch",
                id="regular batches are batched",
            ),
            pytest.param([[[1.0, 2.0]]], BATCH, "Batch", id="one batch is batched"),
            pytest.param(
                [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]],
                BATCH,
                "FlatMap",
                id="irregular batches are generated",
            ),
            pytest.param(
                [([[1.0, 2.0]], 3)],
                fl.StructType([BATCH, np.int32]),
                "FlatMap",
                id="batches beside a fixed shape are generated",
            ),
            pytest.param(
                [
                    ([[1.0, 2.0]] * 2, [[3.0, 4.0]] * 2),
                    ([[5.0, 6.0]], [[7.0, 8.0]] * 2),
                ],
                fl.StructType([BATCH, BATCH]),
                "FlatMap",
                id="last batches of two sizes are generated",
            ),
            pytest.param(
                [[[b"a"]], [[b"b", b"c"]]],
                fl.TensorType(np.str_, (None, None)),
                "FlatMap",
                id="other unknown dimensions are generated",
            ),
            pytest.param(
                [[1.5, 2.5], [3.5, 4.5]],
                fl.TensorType(ml_dtypes.bfloat16, (2,)),
                "TensorSlice",
                id="bfloat16",
            ),
            pytest.param([], fl.to_type(np.int32), "TensorSlice", id="empty"),
            pytest.param([], BATCH, "FlatMap", id="empty of batches"),
        ],
    )
    def test_holds_the_elements_in_order(
        self, elements: list[Any], element: fl.Type, kind: str
    ) -> None:
        dataset = datasets.from_columns(rows_of(elements, element), element)

        assert kind in type(dataset).__name__
        assert listed(datasets.to_elements(dataset, element)) == listed(elements)
        assert dataset.element_spec == datasets.element_spec(element)

    def test_can_be_read_many_times(self) -> None:
        element = fl.StructType([BATCH, np.int32])
        dataset = datasets.from_columns(rows_of([([[1.0, 2.0]], 3)], element), element)

        passes = [number_of(dataset) for _ in range(2)]

        assert passes == [[[[[1.0, 2.0]], 3]]] * 2


class TestFromIterable:
    def test_checks_elements_as_they_come(self) -> None:
        dataset = datasets.from_iterable(iter([1, 2.5]), fl.to_type(np.int32))
        elements = iter(dataset)

        assert int(next(elements)) == 1
        with pytest.raises(tf.errors.OpError, match="Expected element 1 to be of type"):
            next(elements)

    def test_takes_structures_by_name(self) -> None:
        dataset = datasets.from_iterable(
            iter([{"a": 2, "z": 1}, Point(3, 4), Record(5, 6)]), NAMED
        )

        assert listed(datasets.to_elements(dataset, NAMED)) == [[1, 2], [3, 4], [5, 6]]


CONTAINERS = [
    pytest.param({"z": [1], "a": [2]}, True, id="dict"),
    pytest.param(collections.OrderedDict(z=[1], a=[2]), True, id="OrderedDict"),
    pytest.param(Point([1], [2]), False, id="namedtuple"),
    pytest.param(Record([1], [2]), False, id="attrs"),
    pytest.param(([1], [2]), False, id="tuple"),
]


class TestToCanonical:
    @pytest.mark.parametrize(("slices", "is_canonical"), CONTAINERS)
    def test_orders_tensors_by_sorted_names(
        self, slices: Any, is_canonical: bool
    ) -> None:
        dataset = sliced(slices)

        canonical = datasets.to_canonical(dataset, NAMED)

        assert number_of(canonical) == [[2, 1]]
        assert (canonical is dataset) == is_canonical

    def test_leaves_sorted_names_and_tuples_alone(self) -> None:
        dataset = sliced(([1], Point([2], [3])))
        element = fl.StructType(
            [np.int32, fl.StructType([("x", np.int32), ("y", np.int32)])]
        )

        assert datasets.to_canonical(dataset, element) is dataset

    def test_reaches_into_nested_structures(self) -> None:
        dataset = sliced((Point([1], ([2], Point([3], [4]))),))
        element = fl.StructType(
            [fl.StructType([("z", np.int32), ("a", fl.StructType([np.int32, NAMED]))])]
        )

        canonical = datasets.to_canonical(dataset, element)

        assert number_of(canonical) == [[2, 4, 3, 1]]


class TestToElements:
    def test_are_of_their_type(self) -> None:
        dataset = tf.data.Dataset.range(2)

        with pytest.raises(errors.ValueMismatchError, match="Expected the value"):
            datasets.to_elements(dataset, fl.to_type(np.int32))

"""Sequences are read in steps: with every element, within a bound, until cancelled."""

# pyright: reportUnknownLambdaType=false

import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.tensorflow.tensors.datasets as datasets
import ray_fed.values.plain_values as plain_values
from ray_fed.values import read_limits

BOUND = 20_000
LIMITS = read_limits.Limits(BOUND, "Raise `the.setting`.")
FLOATS = fl.TensorType(np.float32, (3,))
RAGGED = fl.TensorType(np.float32, (None, 2))
UNKNOWN = fl.TensorType(np.float32, (None, None))


def _floats(index: int) -> Any:
    return np.full(3, index, np.float32)


def _ragged(index: int) -> Any:
    return np.full((index % 4, 2), index, np.float32)


def _unknown(index: int) -> Any:
    return np.full((index % 3, index % 2), index, np.float32)


def _string(index: int) -> Any:
    return str(index).encode() * 5


ELEMENTS: dict[str, tuple[Callable[[int], Any], fl.TensorType]] = {
    "int": (int, fl.TensorType(np.int64)),
    "floats": (_floats, FLOATS),
    "ragged": (_ragged, RAGGED),
    "unknown": (_unknown, UNKNOWN),
    "string": (_string, fl.TensorType(np.str_)),
}
CASES = pytest.mark.parametrize("case", ELEMENTS)


def _spec(type_spec: fl.TensorType) -> tf.TensorSpec:
    return cast("tf.TensorSpec", datasets.element_spec(type_spec))


class Source:
    """Elements one after another, endless or not; counts those that were asked for."""

    def __init__(self, make: Callable[[int], Any], length: int | None) -> None:
        self._make = make
        self._length = length
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        for index in itertools.islice(itertools.count(), self._length):
            self.count += 1
            yield self._make(index)


def _iterable(source: Source, _: fl.TensorType) -> Any:
    return iter(source)


def _dataset(source: Source, type_spec: fl.TensorType) -> Any:
    return tf.data.Dataset.from_generator(
        lambda: iter(source), output_signature=_spec(type_spec)
    )


KINDS = pytest.mark.parametrize("kind", [_iterable, _dataset])


@CASES
@pytest.mark.parametrize(
    ("kind", "length"),
    # Past the first step of the most elements: 4,096 of an iterable, 64 of a dataset.
    [(_iterable, 0), (_iterable, 10_000), (_dataset, 0), (_dataset, 200)],
)
def test_every_element_is_read_in_order(kind: Any, case: str, length: int) -> None:
    make, type_spec = ELEMENTS[case]
    given = kind(Source(make, length), type_spec)

    found = plain_values.to_plain(given, fl.SequenceType(type_spec))

    assert found.length == length
    for index, (tensor,) in enumerate(found):
        np.testing.assert_array_equal(tensor, make(index))


def test_large_dataset_of_known_size_is_read_in_order() -> None:
    rows = np.arange(20_000 * 512, dtype=np.float32).reshape(20_000, 512)
    labels = np.arange(20_000)
    dataset = tf.data.Dataset.from_tensor_slices((rows, labels))
    pair = fl.StructType([fl.TensorType(np.float32, (512,)), np.int64])

    found = plain_values.to_plain(dataset, fl.SequenceType(pair))

    np.testing.assert_array_equal(found.columns[0].rows, rows)
    np.testing.assert_array_equal(found.columns[1].rows, labels)


@KINDS
@CASES
def test_endless_sequence_ends_at_the_bound(kind: Any, case: str) -> None:
    make, type_spec = ELEMENTS[case]
    source = Source(make, None)
    given = kind(source, type_spec)

    with (
        read_limits.limited(LIMITS),
        pytest.raises(errors.ValueMismatchError, match=r"20000 bytes.*`the.setting`"),
    ):
        plain_values.to_plain(given, fl.SequenceType(type_spec))

    assert source.count < BOUND


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(lambda: tf.data.Dataset.range(10**15), id="very long"),
        pytest.param(
            lambda: tf.data.Dataset.range(10).repeat().filter(lambda x: x > 3),
            id="filtered",
        ),
        pytest.param(
            lambda: tf.data.Dataset.range(10).repeat().map(tf.as_string), id="strings"
        ),
        pytest.param(
            lambda: tf.data.Dataset.range(9).flat_map(
                lambda x: tf.data.Dataset.from_tensors(x).repeat()
            ),
            id="flat map",
        ),
        pytest.param(lambda: range(10**15), id="range"),
        pytest.param(itertools.count, id="count"),
    ],
)
def test_other_endless_sequences_end_too(endless: Callable[[], Any]) -> None:
    given = endless()
    is_text = getattr(given, "element_spec", tf.TensorSpec([])).dtype == tf.string
    type_spec = fl.SequenceType(np.str_ if is_text else np.int64)

    with (
        read_limits.limited(LIMITS),
        pytest.raises(errors.ValueMismatchError, match="end"),
    ):
        plain_values.to_plain(given, type_spec)


def test_elements_without_tensors_end_at_the_bound() -> None:
    given = (() for _ in itertools.count())

    with (
        read_limits.limited(LIMITS),
        pytest.raises(errors.ValueMismatchError, match="20000 bytes"),
    ):
        plain_values.to_plain(given, fl.SequenceType(fl.StructType([])))


def test_lists_are_not_held_to_the_bound() -> None:
    given = [np.zeros(3, np.float32)] * BOUND

    with read_limits.limited(LIMITS):
        found = plain_values.to_plain(given, fl.SequenceType(FLOATS))

    assert found.length == BOUND


@KINDS
def test_reading_ends_when_nobody_waits(kind: Any) -> None:
    source = Source(_floats, None)

    def check() -> None:
        if source.count > 500:
            raise read_limits.AbandonedError("nobody")

    with (
        read_limits.limited(read_limits.limits(), check),
        pytest.raises(read_limits.AbandonedError),
    ):
        plain_values.to_plain(kind(source, FLOATS), fl.SequenceType(FLOATS))

    assert source.count < 5_000

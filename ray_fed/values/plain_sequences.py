"""Sequences at the edge: datasets and iterables, read in bounded steps to columns."""

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import federated_language as fl
import numpy as np

import ray_fed.errors as errors
from ray_fed.language.structs import Plain, show, struct_elements
from ray_fed.values import columnar_sequence, read_limits
from ray_fed.values.alike_elements import lay_alike
from ray_fed.values.plain_tensors import fits_shape
from ray_fed.values.stored import is_listed
from ray_fed.values.tensor_structures import flatten, flatten_type, storage_dtype

ToPlain: TypeAlias = Callable[[object, fl.Type, str], Plain]
"""From a value, its type and its name in errors to the plain value."""

_STEP_ELEMENTS = 4096
"""The most elements of an iterable that are read at once."""

_UNKNOWN_ELEMENTS = 64
"""Elements of a dataset of unknown length that are read at once: each may take long."""

_AT_ONCE_BYTES = 2**24
"""The most bytes of a dataset of known size that is read in one step."""

_INFINITE = -1
"""The size that TensorFlow gives for a dataset without end."""

_ALL = 2**62
"""The size of a batch that holds all elements."""


def to_plain_sequence(
    value: object, type_spec: fl.SequenceType, label: str, to_plain: ToPlain
) -> Plain:
    """Check a dataset, a list or another iterable and return its columns.

    Args:
        value: what a caller gave.
        type_spec: the declared type.
        label: what the value is called in an error.
        to_plain: checks one element, for what TensorFlow does not stack.

    Raises:
        ValueMismatchError: the value is not of the type.
    """
    if isinstance(value, columnar_sequence.ColumnarSequence):
        return value
    element = type_spec.element
    if hasattr(value, "as_numpy_iterator"):
        laid = _read_stacked(value, element, label)
        if laid is not None:
            return laid
        value = iterate_dataset(value)
    tried = _iterate(value)
    if tried is None:
        raise errors.ValueMismatchError(
            f"Expected {label} to be a dataset, a list or another iterable of"
            f" `{element}`, found {show(value)}: pass a list of its elements, one a"
            " row, or one a batch where the type has batches."
        )
    return _read_elements(value, tried, type_spec, label, to_plain)


def iterate_dataset(dataset: Any) -> Iterator[Any]:
    """Yield the elements of a dataset and end without an op that fails, as `iter` does.

    In TensorFlow 2.21 an op that fails on one thread, as the last of `iter` does, makes
    ops of other threads fail with its error where those run on another CPU device.
    """
    iterator = iter(dataset)
    while (found := iterator.get_next_as_optional()).has_value():
        yield found.get_value()


def _iterate(value: object) -> Iterator[Any] | None:
    """Return an iterator over an object that lists values; None for any other."""
    if not is_listed(value):
        return None
    try:
        return iter(cast("Iterable[Any]", value))
    except TypeError:  # a tensor without dimensions
        return None


def _read_elements(
    value: Any,
    elements: Iterator[Any],
    type_spec: fl.SequenceType,
    label: str,
    to_plain: ToPlain,
) -> columnar_sequence.ColumnarSequence:
    """Read an iterator over a value step by step; a list or an array is one step."""
    element = type_spec.element
    at_hand = isinstance(value, list | tuple | np.ndarray)
    meter = read_limits.Meter(label)
    size = len(value) or 1 if at_hand else 1
    runs: list[list[columnar_sequence.Column]] = []
    length = 0
    while step := list(itertools.islice(elements, size)):
        if _is_endless(value):
            raise _endless(label, f"itertools.{type(value).__name__}")
        alike = lay_alike(step, element)
        runs.append(alike or _lay(step, element, label, length, to_plain))
        length += len(step)
        if not at_hand:
            num_bytes = sum(map(columnar_sequence.count_column_bytes, runs[-1]))
            meter.add(max(num_bytes, len(step)))  # elements may have no tensors
            size = read_limits.next_step(len(step), num_bytes, _STEP_ELEMENTS)
    runs = runs or [_lay([], element, label, 0, to_plain)]
    return columnar_sequence.ColumnarSequence(
        tuple(map(columnar_sequence.join_columns, zip(*runs, strict=True))), length
    )


def _lay(
    elements: Sequence[Any], element: fl.Type, label: str, start: int, to_plain: ToPlain
) -> list[columnar_sequence.Column]:
    """Check elements of a sequence, the first at position `start`, and lay them."""
    leaves = [
        flatten(to_plain(member, element, f"{label}[{index}]"))
        for index, member in enumerate(elements, start)
    ]
    return [
        columnar_sequence.lay_column(
            [leaf[index] for leaf in leaves], storage_dtype(t), t.shape
        )
        for index, t in enumerate(flatten_type(element))
    ]


def _read_stacked(
    dataset: Any, element: fl.Type, label: str
) -> columnar_sequence.ColumnarSequence | None:
    """Return the columns of a dataset as TensorFlow stacks its elements, or None.

    None where TensorFlow does not stack them (elements of different shapes, or no
    elements), and where one is not of the type: `_read_elements`, ten times slower,
    then raises an error that names the element.
    """
    length = _length_of(dataset, label)
    try:
        specs = list(_tensors_of(dataset.element_spec, element, label))
        if not all(spec.shape.is_fully_defined() for _, spec in specs):
            return None
        size = _step_size(specs, length)
        batches = (
            iterate_dataset(dataset.batch(size)) if size else iter([_all_of(dataset)])
        )
    except Exception:  # noqa: BLE001 (`_read_elements` will say what it is)
        return None
    runs: list[list[columnar_sequence.Column]] = []
    meter = read_limits.Meter(label)
    for run in _read_batches(batches, element, label):
        if run is None:
            return None
        meter.add(sum(map(columnar_sequence.count_column_bytes, run)))
        runs.append(run)
    columns = tuple(map(columnar_sequence.join_columns, zip(*runs, strict=True)))
    return (
        columnar_sequence.ColumnarSequence(columns, columns[0].length)
        if columns
        else None
    )


def _length_of(dataset: Any, label: str) -> int:
    """Return how many elements a dataset says it has; negative: it does not know."""
    length = int(dataset.cardinality()) if hasattr(dataset, "cardinality") else -2
    if length == _INFINITE:
        raise _endless(label, "a dataset")
    return length


def _endless(label: str, found: str) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f"Expected {label} to end, found {found} without end: take as many elements of"
        " it as the client has."
    )


def _is_endless(value: object) -> bool:
    """Return whether an iterable that has elements is known to have no end."""
    if isinstance(value, itertools.repeat):
        return operator.length_hint(cast("Any", value), _INFINITE) == _INFINITE
    return isinstance(value, itertools.count | itertools.cycle)


def _step_size(specs: Sequence[tuple[fl.TensorType, Any]], length: int) -> int:
    """Return how many elements of a dataset to read at once; 0 for all of them."""
    num_bytes = sum(
        storage_dtype(t).itemsize * spec.shape.num_elements() for t, spec in specs
    )
    has_strings = any(storage_dtype(t).kind == "O" for t, _ in specs)
    is_small = 0 <= length * num_bytes <= _AT_ONCE_BYTES
    if is_small and (not has_strings or length <= _STEP_ELEMENTS):
        return 0
    fitting = max(1, read_limits.STEP_BYTES // max(1, num_bytes))
    largest = _UNKNOWN_ELEMENTS if length < 0 else _STEP_ELEMENTS
    return min(fitting, largest)


def _all_of(dataset: Any) -> Any:
    return dataset.batch(_ALL).get_single_element()


def _read_batches(
    batches: Iterator[Any], element: fl.Type, label: str
) -> Iterator[list[columnar_sequence.Column] | None]:
    """Yield the columns of each batch of a dataset; None, last, if one is not read."""
    while True:
        try:
            stacked = next(batches, None)
            if stacked is None:
                return
            leaves = [
                (t, leaf.numpy()) for t, leaf in _tensors_of(stacked, element, label)
            ]
        except Exception:  # noqa: BLE001 (`_read_elements` will say what it is)
            yield None
            return
        columns = [_column_of(stacked, leaf_type) for leaf_type, stacked in leaves]
        laid = [column for column in columns if column is not None]
        yield laid if laid and len(laid) == len(columns) else None


def _tensors_of(
    value: Any, type_spec: fl.Type, label: str
) -> Iterator[tuple[fl.TensorType, Any]]:
    """Yield the tensors of a structure of tensors, each with its type."""
    if isinstance(type_spec, fl.StructType):
        for element_type, element_label, element in struct_elements(
            value, type_spec, label
        ):
            yield from _tensors_of(element, element_type, element_label)
    else:
        (tensor_type,) = flatten_type(type_spec)
        yield tensor_type, value


def _column_of(
    stacked: Any, type_spec: fl.TensorType
) -> columnar_sequence.Column | None:
    """Return elements' tensors, stacked, as a column; None: not of this type."""
    declared = type_spec.shape
    is_of_type = stacked.dtype == storage_dtype(type_spec) and fits_shape(
        stacked.shape[1:], declared
    )
    if not is_of_type or declared is None or None in declared[1:]:
        return None
    column = columnar_sequence.Column(stacked)
    return column.with_splits() if None in declared else column

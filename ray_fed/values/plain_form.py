"""Values at the edge: checked once against their federated type, then trusted.

Python hands in structures of many containers; the inside knows one *plain* form:

    TensorType      numpy scalar or array; bytes for strings (arrays of object)
    StructType      tuple, in the order of the type
    SequenceType    `Rows`
    FederatedType   the member's form; a list of it where clients differ

Anywhere in it, `External` may stand for the value that a file holds. A `ClientRun` may
stand for the values of clients, and a `ClientMember` for one.

Plain values pickle, need neither names nor TensorFlow, and are read-only by
convention.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.language import blocks
from ray_fed.language.structs import Plain, Struct, is_raw_memory, show, struct_elements
from ray_fed.language.type_checks import check_assignable, differs_by_client
from ray_fed.values import read_limits, sequence_rows
from ray_fed.values.client_references import ClientMember, as_run
from ray_fed.values.stored import (
    External,
    Stored,
    StoredClients,
    StoredParts,
    is_listed,
)


def to_plain(value: object, type_spec: fl.Type, label: str = "the value") -> Plain:
    """Check a Python value against its type and return its plain form.

    What is stored already (`Stored` and its kin) is passed on unread.

    Args:
        value: what a caller gave: numbers, numpy arrays, eager tensors, datasets,
            containers of them; or what an executor computed.
        type_spec: the declared type; holds no functions.
        label: what the value is called in an error.

    Returns:
        The value in this module's plain form.

    Raises:
        ValueMismatchError: the value is not of the type. Nothing is cast, but Python
            numbers take the dtype that is declared when they fit it exactly.
    """
    if isinstance(value, fl.framework.Data) and not differs_by_client(type_spec):
        value = _plain_data(value, type_spec, label)
    if isinstance(value, Stored | StoredParts | External | ClientMember):
        return value
    match type_spec:
        case fl.TensorType():
            return _plain_tensor(value, type_spec, label)
        case fl.StructType():
            return tuple(
                to_plain(element, element_type, element_label)
                for element_type, element_label, element in struct_elements(
                    value, type_spec, label
                )
            )
        case fl.SequenceType():
            return _plain_sequence(value, type_spec, label)
        case fl.FederatedType():
            return _plain_federated(value, type_spec, label)
        case _:
            raise errors.ValueMismatchError(
                f"Expected {label} to be of a type with values, found `{type_spec}`."
            )


def _plain_data(value: fl.framework.Data, type_spec: fl.Type, label: str) -> External:
    if isinstance(type_spec, fl.FederatedType):
        type_spec = type_spec.member
    found = value.type_signature
    if isinstance(found, fl.FederatedType) and not differs_by_client(found):
        found = found.member
    check_assignable(type_spec, found, label)
    return External(blocks.data_uri(value))


def _plain_federated(value: object, type_spec: fl.FederatedType, label: str) -> Plain:
    if type_spec.all_equal:
        return to_plain(value, type_spec.member, label)
    if isinstance(value, StoredClients):
        return value
    run = as_run(value, type_spec.member)
    if run is not None:
        return run
    if not isinstance(value, Sequence) or not is_listed(value):
        raise errors.ValueMismatchError(
            f"Expected {label} to be a list with a value for each client, as"
            f" `{type_spec}` is placed at {type_spec.placement}, found {show(value)}."
        )
    return [
        to_plain(member, type_spec.member, f"{label}[{index}]")
        for index, member in enumerate(cast("Sequence[Any]", value))
    ]


def _plain_sequence(value: object, type_spec: fl.SequenceType, label: str) -> Plain:
    if isinstance(value, sequence_rows.Rows):
        return value
    element = type_spec.element
    if hasattr(value, "as_numpy_iterator"):
        laid = _rows_at_once(value, element, label)
        if laid is not None:
            return laid
        value = cast("Any", value).as_numpy_iterator()
    tried = _iterate(value)
    if tried is None:
        raise errors.ValueMismatchError(
            f"Expected {label} to be a dataset, a list or another iterable of"
            f" `{element}`, found {show(value)}: pass a list of its elements, one a"
            " row, or one a batch where the type has batches."
        )
    return _read_rows(value, tried, element, label)


def _iterate(value: object) -> Iterator[Any] | None:
    """Return an iterator over what lists values; None for what does not."""
    if not is_listed(value):
        return None
    try:
        return iter(cast("Iterable[Any]", value))
    except TypeError:  # a tensor without dimensions
        return None


def _read_rows(
    value: Any, elements: Iterator[Any], element: fl.Type, label: str
) -> sequence_rows.Rows:
    """Read an iterator over a value step by step; what is at hand is one step."""
    at_hand = isinstance(value, list | tuple | np.ndarray)
    meter = read_limits.Meter(label)
    size = len(value) or 1 if at_hand else 1
    runs: list[list[sequence_rows.Column]] = []
    length = 0
    while step := list(itertools.islice(elements, size)):
        plain = [
            to_plain(member, element, f"{label}[{index}]")
            for index, member in enumerate(step, length)
        ]
        runs.append(_lay(plain, element))
        length += len(step)
        if not at_hand:
            num_bytes = sum(map(sequence_rows.count_column_bytes, runs[-1]))
            meter.add(max(num_bytes, len(step)))  # elements may have no tensors
            size = read_limits.next_step(len(step), num_bytes, _STEP_ELEMENTS)
    runs = runs or [_lay([], element)]
    return sequence_rows.Rows(
        tuple(map(sequence_rows.join_columns, zip(*runs, strict=True))), length
    )


def _lay(elements: Sequence[Plain], element: fl.Type) -> list[sequence_rows.Column]:
    """Return plain elements of a sequence as columns."""
    leaves = [flatten(plain) for plain in elements]
    return [
        sequence_rows.lay_rows(
            [leaf[index] for leaf in leaves], storage_dtype(t), t.shape
        )
        for index, t in enumerate(flatten_type(element))
    ]


_STEP_ELEMENTS = 4096
"""Elements of an iterable that are read at once, at most."""

_UNKNOWN_ELEMENTS = 64
"""Elements of a dataset of unknown length that are read at once: each may take long."""

_AT_ONCE_BYTES = 2**24
"""Of a dataset of known size that is read in one step."""

_INFINITE = -1
"""What TensorFlow says of the size of a dataset without end."""

_ALL = 2**62
"""Elements of a batch that holds all there are."""


def _rows_at_once(
    dataset: Any, element: fl.Type, label: str
) -> sequence_rows.Rows | None:
    """Return the rows of a dataset as TensorFlow stacks them, or None.

    None where it does not (elements of many shapes, or none) or where they are not of
    their type: whoever reads them one by one, a tenth as fast, says which is not.
    """
    length = _length_of(dataset, label)
    try:
        specs = list(_leaves_of(dataset.element_spec, element, label))
        if not all(spec.shape.is_fully_defined() for _, spec in specs):
            return None
        size = _step_size(specs, length)
        batches = iter(dataset.batch(size)) if size else iter([_all_of(dataset)])
    except Exception:  # noqa: BLE001 (who reads one by one will say what it is)
        return None
    runs: list[list[sequence_rows.Column]] = []
    meter = read_limits.Meter(label)
    for run in _read_batches(batches, element, label):
        if run is None:
            return None
        meter.add(sum(map(sequence_rows.count_column_bytes, run)))
        runs.append(run)
    columns = tuple(map(sequence_rows.join_columns, zip(*runs, strict=True)))
    return sequence_rows.Rows(columns, columns[0].length) if columns else None


def _length_of(dataset: Any, label: str) -> int:
    """Return how many elements a dataset says it has; negative: it does not know."""
    length = int(dataset.cardinality()) if hasattr(dataset, "cardinality") else -2
    if length == _INFINITE:
        raise errors.ValueMismatchError(
            f"Expected {label} to be a dataset that ends, found one without end: take"
            " as many elements of it as the client has."
        )
    return length


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
) -> Iterator[list[sequence_rows.Column] | None]:
    """Yield the columns of each batch of a dataset; None, last, if one is not read."""
    while True:
        try:
            stacked = next(batches, None)
            if stacked is None:
                return
            leaves = [
                (t, leaf.numpy()) for t, leaf in _leaves_of(stacked, element, label)
            ]
        except Exception:  # noqa: BLE001 (who reads one by one will say what it is)
            yield None
            return
        columns = [_column_of(stacked, leaf_type) for leaf_type, stacked in leaves]
        laid = [column for column in columns if column is not None]
        yield laid if laid and len(laid) == len(columns) else None


def _leaves_of(
    value: Any, type_spec: fl.Type, label: str
) -> Iterator[tuple[fl.TensorType, Any]]:
    """Yield the leaves of a structure of tensors, each with its type."""
    if isinstance(type_spec, fl.StructType):
        for element_type, element_label, element in struct_elements(
            value, type_spec, label
        ):
            yield from _leaves_of(element, element_type, element_label)
    else:
        (tensor_type,) = flatten_type(type_spec)
        yield tensor_type, value


def _column_of(stacked: Any, type_spec: fl.TensorType) -> sequence_rows.Column | None:
    """Return elements' tensors, stacked, as a column; None: not of this type."""
    declared = type_spec.shape
    is_of_type = stacked.dtype == storage_dtype(type_spec) and _fits_shape(
        stacked.shape[1:], declared
    )
    if not is_of_type or declared is None or None in declared[1:]:
        return None
    column = sequence_rows.Column(stacked)
    return column.with_splits() if None in declared else column


def storage_dtype(type_spec: fl.TensorType) -> np.dtype[Any]:
    """Return the dtype of plain arrays of the type: object for strings."""
    dtype = np.dtype(type_spec.dtype)
    return np.dtype(object) if dtype.type is np.str_ else dtype


def flatten_type(type_spec: fl.Type) -> list[fl.TensorType]:
    """Return the tensors of a structure of tensors, in order.

    Raises:
        ValueMismatchError: the type holds something else.
    """
    match type_spec:
        case fl.TensorType():
            return [type_spec]
        case fl.StructType():
            return [
                tensor
                for _, element in type_spec.items()
                for tensor in flatten_type(element)
            ]
        case _:
            raise errors.ValueMismatchError(
                f"Expected a structure of tensors, found `{type_spec}`."
            )


def flatten(plain: Plain) -> list[Any]:
    """Return the leaves of a plain value of structures, in the order of its type."""
    if type(plain) is not tuple:
        return [plain]
    elements = cast("tuple[Any, ...]", plain)
    return [leaf for element in elements for leaf in flatten(element)]


def pack(leaves: Iterator[Any], type_spec: fl.Type) -> Struct[Any] | Any:
    """Return leaves in the order of their type as nested structs."""
    if not isinstance(type_spec, fl.StructType):
        return next(leaves)
    return Struct((name, pack(leaves, element)) for name, element in type_spec.items())


def nester(type_spec: fl.Type) -> Callable[[Iterator[Any]], Plain]:
    """Return what turns leaves in the order of a type into plain values of it."""
    if not isinstance(type_spec, fl.StructType):
        return next
    inside = [nester(element) for _, element in type_spec.items()]
    return lambda leaves: tuple([nest(leaves) for nest in inside])


def _plain_tensor(value: object, type_spec: fl.TensorType, label: str) -> Plain:
    if hasattr(value, "numpy") and hasattr(value, "dtype"):
        value = _numpy_of(value, label)
    if isinstance(value, np.ma.MaskedArray):  # its hidden elements would come to light
        raise errors.ValueMismatchError(
            f"Expected {label} to be of type `{type_spec}`, found an array with a mask:"
            " pass `filled(...)` of it."
        )
    dtype: type[np.generic] = np.dtype(type_spec.dtype).type
    if dtype is np.str_:
        array = _string_array(value, type_spec, label)
    elif isinstance(value, np.ndarray | np.generic):
        if value.dtype.type is not dtype:
            raise _tensor_error(value, type_spec, label)
        array = np.asarray(value)
    else:
        array = _array_of_numbers(value, type_spec, label)
    if not _fits_shape(array.shape, type_spec.shape):
        raise errors.ValueMismatchError(
            f"Expected {label} to be of type `{type_spec}`, found an array of shape"
            f" {array.shape}."
        )
    return array[()] if array.ndim == 0 else array


def _numpy_of(value: Any, label: str) -> Any:
    try:
        return value.numpy()
    except (AttributeError, NotImplementedError) as error:
        raise _symbolic_error(value, label) from error


def _symbolic_error(value: object, label: str) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f"Expected {label} to be a value, found the symbolic tensor `{value}`: call the"
        " computation outside of TensorFlow graphs."
    )


def _fits_shape(found: tuple[int, ...], declared: sequence_rows.Dims) -> bool:
    if declared is None:
        return True
    return len(found) == len(declared) and all(
        size is None or size == actual
        for actual, size in zip(found, declared, strict=True)
    )


def _tensor_error(
    value: object, type_spec: fl.TensorType, label: str
) -> errors.ValueMismatchError:
    found = (
        f"an array of dtype {value.dtype}"
        if isinstance(value, np.ndarray | np.generic)
        else show(value)
    )
    return errors.ValueMismatchError(
        f"Expected {label} to be of type `{type_spec}`, found {found}: nothing is"
        f" cast, so convert it first."
    )


def _string_array(value: object, type_spec: fl.TensorType, label: str) -> Any:
    try:
        array = np.asarray(value)
    except (ValueError, RecursionError) as error:  # ragged, or lists too deep
        raise _tensor_error(value, type_spec, label) from error
    if array.dtype.kind not in "USO":
        raise _tensor_error(value, type_spec, label)
    # numpy drops trailing NULs of its own byte strings, so strings stay objects.
    strings = np.empty(array.shape, object)
    items = np.asarray(value, object) if array.dtype.kind != "O" else array
    for index in np.ndindex(array.shape):
        item = items[index]
        if not isinstance(item, str | bytes):
            raise _tensor_error(value, type_spec, label)
        try:
            strings[index] = item.encode() if isinstance(item, str) else bytes(item)
        except UnicodeEncodeError as error:  # a lone surrogate
            raise _tensor_error(value, type_spec, label) from error
    return strings


_NUMBER_KINDS: Mapping[str, str] = {
    "b": "b",
    "i": "iufcV",
    "u": "iufcV",
    "f": "fcV",
    "c": "c",
}
"""Kinds of dtype (V is bfloat16) that Python numbers of a kind may take."""


_PYTHON_NUMBERS = {bool, int, float, complex}


def _holds_numbers(value: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether nested lists hold Python's own numbers, or arrays of a dtype.

    What has a dtype of its own is not cast; what is memory has no numbers at all.
    """
    if isinstance(value, list | tuple):
        members = cast("Sequence[Any]", value)
        if set(map(type, members)) <= _PYTHON_NUMBERS:
            return True
        return all(_holds_numbers(member, dtype) for member in members)
    if hasattr(value, "dtype") or hasattr(value, "__array__"):
        return np.asarray(value).dtype == dtype
    return not is_raw_memory(value)


_EXACT = 2**53
"""Whole numbers up to this one are compared as float64 without loss."""


def _are_equal(array: NDArray[Any], numbers: NDArray[Any]) -> bool:
    """Return whether numbers are the same after a cast, to the last digit."""
    if not (array == numbers).all():
        return False
    if numbers.dtype.kind not in "iu" or array.dtype.kind in "iu":
        return True
    if (np.maximum(numbers, 0) <= _EXACT).all() and (numbers >= -_EXACT).all():
        return True
    cast_back = [int(number) for number in np.real(array).ravel().tolist()]
    return cast_back == numbers.ravel().tolist()


def _array_of_numbers(value: object, type_spec: fl.TensorType, label: str) -> Any:
    dtype = np.dtype(type_spec.dtype)
    try:
        if not _holds_numbers(value, dtype):
            raise _tensor_error(value, type_spec, label)
        found = np.asarray(value)
    except (ValueError, RecursionError) as error:  # ragged, or lists too deep
        raise _tensor_error(value, type_spec, label) from error
    except NotImplementedError as error:
        raise _symbolic_error(value, label) from error
    if found.size == 0:
        return found.astype(dtype)
    if dtype.kind not in _NUMBER_KINDS.get(found.dtype.kind, ""):
        raise _tensor_error(value, type_spec, label)
    with np.errstate(over="ignore"):
        array = found.astype(dtype)
    exact = found.dtype.kind == "f" or _are_equal(array, found)
    if not exact or not (np.isfinite(array) | ~np.isfinite(found)).all():
        raise _tensor_error(value, type_spec, label)
    return array


def from_plain(plain: Plain, type_spec: fl.Type) -> Any:
    """Return a plain value in the Python containers that its type declares.

    Args:
        plain: of type `type_spec`.
        type_spec: without containers, structs with names become OrderedDict, without
            names tuple, as federated_language documents.

    Returns:
        numpy values at the leaves, bytes for strings, a list for a sequence.
    """
    return fl.framework.type_to_py_container(to_structs(plain, type_spec), type_spec)


def to_structs(plain: Plain, type_spec: fl.Type) -> Any:
    """Return a plain value as executors compute it: Structs, lists of elements."""
    match type_spec:
        case fl.StructType():
            return Struct(
                (name, to_structs(element, element_type))
                for (name, element_type), element in zip(
                    type_spec.items(), plain, strict=True
                )
            )
        case fl.SequenceType():
            return [pack(iter(tensors), type_spec.element) for tensors in plain]
        case fl.FederatedType() if not type_spec.all_equal:
            return [to_structs(member, type_spec.member) for member in plain]
        case fl.FederatedType():
            return to_structs(plain, type_spec.member)
        case _:
            return plain

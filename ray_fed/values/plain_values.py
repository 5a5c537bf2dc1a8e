"""Converts users' values to plain values, with a check of their type, and back.

Users pass many kinds of containers, datasets and numbers. Inside ray_fed there are only
*plain values*:

    TensorType      numpy scalar or array; bytes for strings (arrays of object)
    StructType      tuple, in the order of the type
    SequenceType    `ColumnarSequence`
    FederatedType   the member's plain value, or a list with one for each client

Three objects can replace a plain value that is not read yet: `External` a value in a
file, `ClientRun` a list of clients' values, and `ClientMember` one client's value.

Plain values can be pickled, need neither names nor TensorFlow, and are read-only by
convention. Their types are not checked again.
"""

import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.language import blocks, trees, type_checks
from ray_fed.language.structs import Plain, Struct, is_raw_memory, show, struct_elements
from ray_fed.values import columnar_sequence, read_limits
from ray_fed.values.client_references import (
    CODES,
    ClientMember,
    ListCache,
    NamedClients,
    advise_label_type,
    as_run,
)
from ray_fed.values.stored import (
    External,
    Stored,
    StoredClients,
    StoredComponents,
    is_listed,
)
from ray_fed.values.tensor_structures import flatten_type, storage_dtype

_PACKED_TYPES = 256
"""Number of types whose conversion to containers is cached."""


def to_plain_tensor(value: object, type_spec: fl.TensorType, label: str) -> Plain:
    """Convert a value to a NumPy scalar or array, or raise ValueMismatchError."""
    if isinstance(value, fl.program.MaterializableValueReference):
        raise _tensor_error(value, type_spec, label)  # numpy would compute its value
    if hasattr(value, "numpy") and hasattr(value, "dtype"):
        value = _numpy_of(value, label)
    if isinstance(value, np.ma.MaskedArray):  # its masked elements would be used
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
    if not fits_shape(array.shape, type_spec.shape):
        raise errors.ValueMismatchError(
            f"Expected {label} to be of type `{type_spec}`, found an array of shape"
            f" {array.shape}: {_advise_shape(array, type_spec, label)}."
        )
    return array[()] if array.ndim == 0 else array


def own(plain: Plain) -> Plain:
    """Return a plain value that no other code can change, with read-only arrays.

    Only writable arrays are copied.
    """
    match plain:
        case tuple() | list():
            members = cast("Sequence[Plain]", plain)
            return type(plain)(own(member) for member in members)
        case columnar_sequence.ColumnarSequence():
            return plain.own()
        case np.ndarray():
            return columnar_sequence.own(plain)
        case _:
            return plain


def copy_plain(plain: Plain) -> Plain:
    """Return a copy of a plain value. Its arrays are writable and share no memory."""
    if isinstance(plain, tuple):
        return tuple(map(copy_plain, cast("tuple[Plain, ...]", plain)))
    if isinstance(plain, columnar_sequence.ColumnarSequence | np.ndarray):
        return plain.copy()
    return plain


def gather_arrays(values: Sequence[Any], type_spec: fl.Type) -> list[Plain] | None:
    """Convert values that have only NumPy arrays, in tuples or lists for structs.

    This takes a tenth of the time of a check of each value. The result is None if a
    value has another form, or may not have the type.
    """
    if isinstance(type_spec, fl.TensorType):
        return list(values) if _are_arrays(values, type_spec) else None
    if not isinstance(type_spec, fl.StructType) or not len(type_spec):
        return None
    are_listed = set(map(type, values)) <= {tuple, list}
    if not are_listed or set(map(len, values)) != {len(type_spec)}:
        return None
    columns = [
        gather_arrays(column, element)
        for column, (_, element) in zip(
            zip(*values, strict=True), type_spec.items(), strict=True
        )
    ]
    found = [column for column in columns if column is not None]
    return list(zip(*found, strict=True)) if len(found) == len(columns) else None


def _are_arrays(values: Sequence[Any], type_spec: fl.TensorType) -> bool:
    if set(map(type, values)) != {np.ndarray}:
        return False
    dtype = np.dtype(type_spec.dtype)
    if dtype.kind == "U":
        return False
    found = {value.dtype for value in values}
    if any(one != dtype or one.type is not dtype.type for one in found):
        return False
    shapes = {value.shape for value in values}
    return all(shape and fits_shape(shape, type_spec.shape) for shape in shapes)


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


def fits_shape(found: columnar_sequence.Dims, declared: columnar_sequence.Dims) -> bool:
    """Return whether the known dimensions of a shape fit a declared shape."""
    if found is None or declared is None:
        return True
    return len(found) == len(declared) and all(
        size is None or size == actual or actual is None
        for actual, size in zip(found, declared, strict=True)
    )


def _is_of_labels(label: str) -> bool:
    return label.startswith(("`y` of ", "`y."))


def _advise_shape(array: Any, type_spec: fl.TensorType, label: str) -> str:
    """Return advice for an error: how to reshape an array, or change the model."""
    is_in_batch = "batch " in label and (type_spec.shape or (0,))[0] is None
    is_vector_label = _is_of_labels(label) and array.ndim > 0  # may lack a column
    if (
        is_in_batch
        and not is_vector_label
        and fits_shape(array.shape, (type_spec.shape or ())[1:])
    ):
        return (
            "this is one row, so put the client's rows together in batches, such as by"
            " `np.stack` of 32 inputs and of their labels, or pass each row as an"
            " element to `ClientData.from_values` and call `batch(32)` of what that"
            " returns"
        )
    if not _is_of_labels(label):
        return "reshape it, or declare another type, such as by the input of a model"
    path, dims = label.split("`")[1], type_spec.shape or ()
    if _is_one_hot(array, type_spec):
        return (
            "these labels are one-hot: for a sparse loss pass classes, such as"
            f" `{path}.argmax(axis=-1).astype({np.dtype(type_spec.dtype).name!r})`, or"
            " take `CategoricalCrossentropy`; for a binary one,"
            f" {advise_label_type(array.dtype, array.shape)}"
        )
    step = f"reshape `{path}`"
    if array.shape[-1:] == (1,) and fits_shape(array.shape[:-1], dims):
        step = f"these labels have a column, so pass `{path}[{':, ' * len(dims)}0]`"
    elif tuple(dims[-1:]) == (1,) and fits_shape(array.shape, dims[:-1]):
        step = f"pass `{path}[{':, ' * array.ndim}None]`, which has a column"
    return f"{step}, or {advise_label_type(array.dtype, array.shape)}"


def _is_one_hot(array: Any, type_spec: fl.TensorType) -> bool:
    is_of_numbers = type_spec.dtype.kind in "iu" and array.dtype.kind in "biuf"
    has_classes = array.size > 0 and array.shape[-1:] > (1,)
    is_of_rows = has_classes and fits_shape(array.shape[:-1], type_spec.shape)
    if not (is_of_numbers and is_of_rows):
        return False
    ones = array == 1
    return bool((ones.sum(axis=-1) == 1).all() and (ones | (array == 0)).all())


def _tensor_error(
    value: object, type_spec: fl.TensorType, label: str
) -> errors.ValueMismatchError:
    found = (
        f"an array of dtype {value.dtype}"
        if isinstance(value, np.ndarray | np.generic)
        else show(value)
    )
    then = "it is not cast, so convert it first"
    if hasattr(value, "to_numpy"):  # of pandas
        then += ", such as by `.to_numpy()`"
    wanted = np.dtype(type_spec.dtype)
    if isinstance(value, np.ndarray) and wanted.kind != "U":
        array = cast("NDArray[Any]", value)
        then += f", such as by `.astype({wanted.name!r})`"
        if array.dtype.kind in "USO":
            then = (
                f"take codes of the labels, such as {CODES}"
                if _is_of_labels(label)
                else "convert it first, or take strings by an input of the model with"
                ' `dtype="string"`'
            )
        elif _is_of_labels(label):
            if fits_shape(array.shape, type_spec.shape):
                then += f"; or {advise_label_type(array.dtype, array.shape)}"
            elif _is_one_hot(array, type_spec):
                then = _advise_shape(array, type_spec, label)
            else:
                then += f"; {_advise_shape(array, type_spec, label)}"
    return errors.ValueMismatchError(
        f"Expected {label} to be of type `{type_spec}`, found {found}: {then}."
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
"""For each kind of Python numbers, the kinds of dtype to convert to. V is bfloat16."""


_PYTHON_NUMBERS = {bool, int, float, complex}


def _holds_numbers(value: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether nested lists have only Python numbers, or arrays of a dtype.

    Arrays are not cast. Raw memory, such as `bytes`, has no numbers.
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
"""Whole numbers up to this number are exact in float64."""


def _are_equal(array: NDArray[Any], numbers: NDArray[Any]) -> bool:
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


_KINDS: Mapping[type, str] = {bool: "b", int: "iu", float: "f", complex: "c"}
"""The kinds of dtype that represent a list of Python numbers exactly."""


def lay_alike(
    elements: Sequence[Any], element: fl.Type
) -> list[columnar_sequence.Column] | None:
    """Return the elements of a sequence as columns if they are all alike, or None.

    Elements are alike if they are numbers of one Python type, arrays of one dtype, or
    dicts of these with the same names. If they are not, or may not have the type, the
    caller must check them one by one, which takes about 13 us for each tensor.
    """
    values = _leaves(elements, element) if elements else None
    if values is None:
        return None
    columns = [
        _lay_tensors(leaf, type_spec)
        for leaf, type_spec in zip(values, flatten_type(element), strict=True)
    ]
    laid = [column for column in columns if column is not None]
    return laid if len(laid) == len(columns) else None


def _leaves(elements: Sequence[Any], element: fl.Type) -> list[Sequence[Any]] | None:
    """Return all values of each tensor of the type, or None if elements differ."""
    if isinstance(element, fl.TensorType):
        return [elements]
    if not isinstance(element, fl.StructType) or set(map(type, elements)) != {dict}:
        return None
    members = list(element.items())
    names = {name for name, _ in members}
    if not all(member.keys() == names for member in elements):
        return None
    inside = [
        _leaves([member[name] for member in elements], member_type)
        for name, member_type in members
    ]
    if any(leaves is None for leaves in inside):
        return None
    return [values for leaves in inside for values in leaves or ()]


def _lay_tensors(
    values: Sequence[Any], type_spec: fl.TensorType
) -> columnar_sequence.Column | None:
    dtype = storage_dtype(type_spec)
    kinds = set(map(type, values))
    if dtype.hasobject or len(kinds) != 1:
        return None
    (kind,) = kinds
    if kind is np.ndarray:
        if not all(
            value.dtype == dtype and fits_shape(value.shape, type_spec.shape)
            for value in values
        ):
            return None
        return columnar_sequence.lay_column(values, dtype, type_spec.shape)
    return _lay_numbers(values, type_spec) if type_spec.shape == () else None


def _lay_numbers(
    values: Sequence[Any], type_spec: fl.TensorType
) -> columnar_sequence.Column | None:
    kind = type(values[0])
    if kind not in _KINDS and not issubclass(kind, np.generic):
        return None
    found = np.asarray(values)
    if kind in _KINDS and found.dtype.kind not in _KINDS[kind]:
        return None  # whole numbers that are too large for any dtype
    all_of_them = fl.TensorType(type_spec.dtype, [len(values)])
    given: object = values if kind in _KINDS else found
    try:
        array = to_plain_tensor(given, all_of_them, "elements")
    except errors.ValueMismatchError:
        return None  # the check of each element finds the wrong one
    return columnar_sequence.Column(array)


_STEP_ELEMENTS = 4096
"""Maximum number of elements of an iterable to read at once."""

_UNKNOWN_ELEMENTS = 64
"""Number of elements to read at once from a dataset of unknown length."""

_AT_ONCE_BYTES = 2**24
"""Maximum bytes of a dataset of known size that is read in one step."""

_INFINITE = -1
"""TensorFlow's cardinality of a dataset without end."""

_ALL = 2**62
"""A batch size that is larger than any dataset."""


def to_plain_sequence(value: object, type_spec: fl.SequenceType, label: str) -> Plain:
    """Convert a dataset, list or other iterable to columns, or raise an error."""
    if isinstance(value, columnar_sequence.ColumnarSequence):
        return value
    element = type_spec.element
    if is_dataset(value):
        laid = _read_stacked(value, element, label)
        if laid is not None:
            return laid
        value = iterate_dataset(value)
        return _read_elements(value, value, type_spec, label)
    tried = _iterate(value)
    if tried is None:
        raise errors.ValueMismatchError(
            f"Expected {label} to be a dataset, a list or another iterable of"
            f" `{element}`, found {show(value)}: pass a list of rows, or of batches if"
            " the type has batches. A single batch is `[batch]`."
        )
    if not isinstance(value, list | tuple | np.ndarray):
        tried = _detach_each(tried, element, label)
    return _read_elements(value, tried, type_spec, label)


def is_dataset(value: object) -> bool:
    """Return whether a value is a TensorFlow dataset, without loading TensorFlow."""
    return hasattr(value, "as_numpy_iterator")


def iterate_dataset(dataset: Any) -> Iterator[Any]:
    """Yield the elements of a dataset, without an op that fails at its end.

    The last op of `iter` fails. In TensorFlow 2.21, an op that fails on one thread
    makes ops of other threads fail with its error if they run on another CPU device.
    """
    iterator = iter(dataset)
    while (found := iterator.get_next_as_optional()).has_value():
        yield found.get_value()


def _iterate(value: object) -> Iterator[Any] | None:
    """Return an iterator over an object that lists values, or None."""
    if not is_listed(value) or isinstance(
        value, fl.program.MaterializableValueReference
    ):
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
) -> columnar_sequence.ColumnarSequence:
    """Read `elements` of `value` in steps. A list or an array is read in one step."""
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
        runs.append(alike or _lay(step, element, label, length))
        length += len(step)
        if not at_hand:
            num_bytes = sum(column.num_bytes for column in runs[-1])
            meter.add(max(num_bytes, len(step)))  # elements may have no tensors
            size = read_limits.next_step(len(step), num_bytes, _STEP_ELEMENTS)
    runs = runs or [_lay([], element, label, 0)]
    return columnar_sequence.ColumnarSequence(
        tuple(map(columnar_sequence.join_columns, zip(*runs, strict=True))), length
    )


def _lay(
    elements: Sequence[Any], element: fl.Type, label: str, start: int
) -> list[columnar_sequence.Column]:
    """Check elements and return their columns. Errors number elements from `start`."""
    types, name = flatten_type(element), _name_of_each(element)
    leaves = [
        trees.flatten(to_plain(member, element, f"{name} {index} of {label}"))
        for index, member in enumerate(elements, start)
    ]
    return [
        columnar_sequence.lay_column(
            [leaf[index] for leaf in leaves], storage_dtype(t), t.shape
        )
        for index, t in enumerate(types)
    ]


def _name_of_each(element: fl.Type) -> str:
    types = flatten_type(element)
    is_batch = any(t.shape and t.shape[0] is None for t in types)
    return "batch" if is_batch else "element"


def _detach_each(
    elements: Iterator[Any], element: fl.Type, label: str
) -> Iterator[Any]:
    """Yield copies of elements, because an iterable may reuse one buffer for all."""
    for index, value in enumerate(elements):
        detached = _detach(value)
        if detached is None:
            name = f"{_name_of_each(element)} {index} of {label}"
            detached = own(to_plain(value, element, name))
        yield detached


def _detach(value: Any) -> Any:
    """Return a copy of an element that is a number, an array or a dict, or None."""
    kind = type(value)
    if kind is np.ndarray:
        return value.copy()
    if kind in _PYTHON_NUMBERS or isinstance(value, np.generic):
        return value
    if kind is not dict:
        return None
    copies = {name: _detach(member) for name, member in value.items()}
    return None if any(copy is None for copy in copies.values()) else copies


def _read_stacked(
    dataset: Any, element: fl.Type, label: str
) -> columnar_sequence.ColumnarSequence | None:
    """Return the columns of a dataset whose elements TensorFlow can batch.

    This is ten times faster than `_read_elements`. The result is None if there are no
    elements, shapes differ, or an element has another type. `_read_elements` then
    raises an error that names the element.
    """
    length = _length_of(dataset, label)
    try:
        specs = list(_tensors_of(dataset.element_spec, element, label))
        if not all(spec.shape.is_fully_defined() for _, spec in specs):
            return None
        size = _step_size(specs, length)
        batches = (
            iterate_dataset(dataset.batch(size))
            if size
            else iter([dataset.batch(_ALL).get_single_element()])
        )
    except Exception:  # noqa: BLE001 (`_read_elements` reads it instead)
        return None
    runs: list[list[columnar_sequence.Column]] = []
    meter = read_limits.Meter(label)
    for run in _read_batches(batches, element, label):
        if run is None:
            return None
        meter.add(sum(column.num_bytes for column in run))
        runs.append(run)
    columns = tuple(map(columnar_sequence.join_columns, zip(*runs, strict=True)))
    return (
        columnar_sequence.ColumnarSequence(columns, columns[0].length)
        if columns
        else None
    )


def _length_of(dataset: Any, label: str) -> int:
    """Return the number of a dataset's elements, or a negative number if unknown."""
    length = int(dataset.cardinality()) if hasattr(dataset, "cardinality") else -2
    if length == _INFINITE:
        raise _endless(label, "a dataset")
    return length


def _endless(label: str, found: str) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f"Expected {label} to end, found {found} without end: take the number of"
        " elements that the client has."
    )


def _is_endless(value: object) -> bool:
    if isinstance(value, itertools.repeat):
        return operator.length_hint(cast("Any", value), _INFINITE) == _INFINITE
    return isinstance(value, itertools.count | itertools.cycle)


def _step_size(specs: Sequence[tuple[fl.TensorType, Any]], length: int) -> int:
    """Return how many elements of a dataset to read at once, or 0 for all."""
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


def _read_batches(
    batches: Iterator[Any], element: fl.Type, label: str
) -> Iterator[list[columnar_sequence.Column] | None]:
    """Yield the columns of each batch. Yield None and end if a batch is unreadable."""
    while True:
        try:
            stacked = next(batches, None)
            if stacked is None:
                return
            leaves = [
                (t, leaf.numpy()) for t, leaf in _tensors_of(stacked, element, label)
            ]
        except Exception:  # noqa: BLE001 (`_read_elements` reads it instead)
            yield None
            return
        columns = [_column_of(stacked, leaf_type) for leaf_type, stacked in leaves]
        laid = [column for column in columns if column is not None]
        yield laid if laid and len(laid) == len(columns) else None


def _tensors_of(
    value: Any, type_spec: fl.Type, label: str
) -> Iterator[tuple[fl.TensorType, Any]]:
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
    """Return a batch of elements' tensors as a column, or None if types differ."""
    declared = type_spec.shape
    is_of_type = stacked.dtype == storage_dtype(type_spec) and fits_shape(
        stacked.shape[1:], declared
    )
    if not is_of_type or declared is None or None in declared[1:]:
        return None
    column = columnar_sequence.Column(columnar_sequence.lock(stacked))
    return column.with_splits() if None in declared else column


def from_plain(plain: Plain, type_spec: fl.Type) -> Any:
    """Convert a plain value to the Python containers that its type declares.

    A struct without a container becomes an OrderedDict if it has names, otherwise a
    tuple. Strings are bytes, and a sequence is a list. federated_language takes about
    30 us for each tensor, mostly to inspect the type. Here each type is inspected once.
    """
    return _build_pack(type_spec)(plain)


@functools.lru_cache(maxsize=_PACKED_TYPES)
def _build_pack(type_spec: fl.Type) -> Callable[[Plain], Any]:
    match type_spec:
        case fl.FederatedType(all_equal=True):
            return _build_pack(type_spec.member)
        case fl.FederatedType():
            pack_member = _build_pack(type_spec.member)
            return lambda plain: list(map(pack_member, plain))
        case fl.SequenceType():
            return functools.partial(_pack_sequence, type_spec.element)
        case fl.StructType():
            names = [name or "" for name, _ in type_spec.items()]
            inside = [_build_pack(element) for _, element in type_spec.items()]
            make = _build_maker(type_spec, names)
            return lambda plain: make(
                [pack(element) for pack, element in zip(inside, plain, strict=True)]
            )
        case _:
            return lambda plain: plain


def _pack_sequence(element: fl.Type, plain: Iterable[Any]) -> list[Any]:
    pack = _build_pack(element)
    return [
        # The executors of a custom strategy may return structs with names.
        pack(trees.nest(iter(tensors), element))
        if type(tensors) is tuple
        else fl.framework.type_to_py_container(tensors, element)
        for tensors in plain
    ]


def _build_maker(
    type_spec: fl.StructType, names: Sequence[str]
) -> Callable[[Iterable[Any]], Any]:
    """Return a function that builds a struct's container from its elements."""
    container: Any = type_spec.python_container
    has_fields = hasattr(container, "_fields") or (container and attrs.has(container))
    takes_names = has_fields or (container and issubclass(container, dict))
    is_listed = not has_fields and issubclass(container or object, list | tuple)
    is_mixed = any(names) and not all(names)
    if is_mixed or (any(names) and is_listed) or (takes_names and not all(names)):
        raise ValueError(
            "Expected structs with names for all elements or for none, as their Python"
            f" container has, found `{type_spec}` for"
            f" {container or 'a mix of named and unnamed elements'}."
        )
    if not has_fields and not any(names):
        return container or tuple

    build = cast("Callable[..., Any]", container or OrderedDict)

    def make(elements: Iterable[Any]) -> Any:
        named = zip(names, elements, strict=True)
        return build(**dict(named)) if has_fields else build(named)

    return make


def to_plain(
    value: object,
    type_spec: fl.Type,
    label: str = "the value",
    lists: ListCache | None = None,
) -> Plain:
    """Convert a user's value to a plain value, with a check of its type.

    `Stored`, `StoredComponents`, `External` and `ClientMember` are returned unread.
    Values are not cast, but Python numbers take the declared dtype if it represents
    them exactly. Raises ValueMismatchError if the value does not have the type. `label`
    names the value in the error.
    """
    if isinstance(value, fl.framework.Data) and not type_checks.differs_by_client(
        type_spec
    ):
        value = _plain_data(value, type_spec, label)
    if isinstance(value, Stored | StoredComponents | External | ClientMember):
        return value
    match type_spec:
        case fl.TensorType():
            return to_plain_tensor(value, type_spec, label)
        case fl.StructType():
            return tuple(
                to_plain(element, element_type, element_label, lists)
                for element_type, element_label, element in struct_elements(
                    value, type_spec, label
                )
            )
        case fl.SequenceType():
            return to_plain_sequence(value, type_spec, label)
        case fl.FederatedType():
            return _plain_federated(value, type_spec, label, lists)
        case _:
            raise errors.ValueMismatchError(
                f"Expected {label} to be of a type with values, found `{type_spec}`."
            )


def _plain_data(value: fl.framework.Data, type_spec: fl.Type, label: str) -> External:
    if isinstance(type_spec, fl.FederatedType):
        type_spec = type_spec.member
    found = value.type_signature
    if isinstance(found, fl.FederatedType) and not type_checks.differs_by_client(found):
        found = found.member
    type_checks.check_assignable(type_spec, found, label)
    return External(blocks.data_uri(value))


def _plain_federated(
    value: object, type_spec: fl.FederatedType, label: str, lists: ListCache | None
) -> Plain:
    if type_spec.all_equal:
        return to_plain(value, type_spec.member, label)
    if isinstance(value, StoredClients):
        return value
    run = as_run(value, type_spec.member)
    if run is not None:
        return run
    if not isinstance(value, Sequence) or not is_listed(value):
        then = ": pass `list(clients.values())`" if isinstance(value, Mapping) else ""
        if isinstance(value, np.ndarray):
            then = ": pass a list, such as `list(clients)`"
        raise errors.ValueMismatchError(
            f"Expected {label} to be a list with a value for each client, as"
            f" `{type_spec}` is placed at {type_spec.placement}, found"
            f" {show(value)}{then}."
        )

    def read(members: Sequence[Any]) -> list[Plain]:
        is_at_hand = isinstance(members, list | tuple)
        if is_at_hand:
            # The usual case, which takes a tenth of the time.
            arrays = gather_arrays(members, type_spec.member)
            if arrays is not None:
                return arrays
        found: list[Plain] = []
        for index, member in enumerate(members):
            name = f"{label} of the client at position {index}"
            try:
                # Other sequences may read each client into the same buffer.
                plain = to_plain(member, type_spec.member, name)
                found.append(plain if is_at_hand else own(plain))
            except errors.ValueMismatchError as error:
                error.location = errors.Location(client_index=index)
                raise
        return found

    members = cast("Sequence[Any]", value)
    if isinstance(members, NamedClients):
        return NamedClients(read(members), members.ids)
    if lists is None or type(value) not in (list, tuple):
        return read(members)
    return lists.find(members, type_spec.member, read)


def to_plain_around_datasets(value: object, type_spec: fl.Type, label: str) -> Any:
    """Convert a user's value as `to_plain` does, but keep datasets unread."""
    match type_spec:
        case fl.SequenceType() if is_dataset(value):
            return value
        case fl.StructType() if _holds_sequences(type_spec):
            names = [name for name, _ in type_spec.items()]
            members = [
                to_plain_around_datasets(element, element_type, element_label)
                for element_type, element_label, element in struct_elements(
                    value, type_spec, label
                )
            ]
            return Struct(zip(names, members, strict=True))
        case fl.FederatedType(member=member, all_equal=False) if _has_datasets(
            value, member
        ):
            clients = cast("list[Any]", value)
            return [to_plain_around_datasets(each, member, label) for each in clients]
        case _:
            return to_plain(value, type_spec, label)


def _holds_sequences(type_spec: fl.Type) -> bool:
    return fl.framework.type_contains(
        type_spec, lambda part: isinstance(part, fl.SequenceType)
    )


def _has_datasets(values: object, member: fl.Type) -> bool:
    if not isinstance(values, list) or not _holds_sequences(member):
        return False
    return any(_has_dataset(value, member) for value in cast("list[Any]", values))


def _has_dataset(value: object, type_spec: fl.Type) -> bool:
    match type_spec:
        case fl.SequenceType():
            return is_dataset(value)
        case fl.StructType():
            try:
                elements = struct_elements(value, type_spec)
            except errors.ValueMismatchError:
                return False
            return any(_has_dataset(element, t) for t, _, element in elements)
        case _:
            return False


def as_structs(value: Any, type_spec: fl.Type | None) -> Any:
    """Return a caller's value with a Struct for each struct of `type_spec`.

    A value that does not fit the type is returned unchanged.
    """
    match type_spec:
        case fl.StructType():
            try:
                elements = struct_elements(value, type_spec)
            except errors.ValueMismatchError:
                return value
            return Struct(
                (name, as_structs(element, element_type))
                for (name, _), (element_type, _, element) in zip(
                    type_spec.items(), elements, strict=True
                )
            )
        case fl.FederatedType(member=fl.StructType() as member, all_equal=False):
            if not isinstance(value, list | tuple):
                return value
            clients = cast("Sequence[Any]", value)
            return [as_structs(client, member) for client in clients]
        case fl.FederatedType(all_equal=True):
            return as_structs(value, type_spec.member)
        case _:
            return value


def to_structs(plain: Plain, type_spec: fl.Type) -> Any:
    """Return a plain value in the form that executors use, with Structs and lists."""
    match type_spec:
        case fl.StructType():
            return trees.map_leaves(to_structs, plain, type_spec)
        case fl.SequenceType():
            element = type_spec.element
            return [
                # The executors of a custom strategy may return Structs.
                trees.unflatten(iter(member), element)
                if type(member) is tuple
                else member
                for member in plain
            ]
        case fl.FederatedType() if not type_spec.all_equal:
            return [to_structs(member, type_spec.member) for member in plain]
        case fl.FederatedType():
            return to_structs(plain, type_spec.member)
        case _:
            return plain

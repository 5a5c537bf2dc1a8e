"""Values at the edge: checked once against their federated type, then trusted.

Python hands in structures of many containers; the inside knows *plain values*:

    TensorType      numpy scalar or array; bytes for strings (arrays of object)
    StructType      tuple, in the order of the type
    SequenceType    `ColumnarSequence`
    FederatedType   the member's plain value; a list where clients differ

Anywhere in it, `External` may stand for the value that a file holds. A `ClientRun` may
stand for the values of clients, and a `ClientMember` for one.

Plain values pickle, need neither names nor TensorFlow, and are read-only by
convention.

Tensors at the edge: numbers, arrays and strings, checked against their type.

Elements of a sequence that are all alike, laid as columns without a look at each.

What lists and generators yield is nearly always alike: numbers of one Python type,
arrays of one dtype, dicts of those with the same names. Such elements are checked and
laid by column; all others, and all that are wrong, are left to the checks of one
element, which cost about 13 us a tensor and name in their error what is wrong.

Sequences at the edge: datasets and iterables, read in bounded steps to columns.

The values of many clients in the Python containers that their type declares.

federated_language takes some 30 us a tensor to pack a value, most of it to look at the
type. Here the type is looked at once for all clients.
"""

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
from ray_fed.language import blocks, type_checks
from ray_fed.language.structs import Plain, Struct, is_raw_memory, show, struct_elements
from ray_fed.values import columnar_sequence, read_limits
from ray_fed.values.client_references import (
    CODES,
    ClientMember,
    ListCache,
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
from ray_fed.values.tensor_structures import (
    flatten,
    flatten_type,
    storage_dtype,
    unflatten,
)


def to_plain_tensor(value: object, type_spec: fl.TensorType, label: str) -> Plain:
    """Check a value against the type of a tensor and return it as numpy's.

    Raises:
        ValueMismatchError: the value is not of the type.
    """
    if hasattr(value, "numpy") and hasattr(value, "dtype"):
        value = _numpy_of(value, label)
    if isinstance(value, np.ma.MaskedArray):  # its hidden elements would come to light
        raise errors.ValueMismatchError(
            f"Expected {label} to be of type `{type_spec}`, found an array with a mask:"
            " pass `filled(...)` of it."
        )
    dtype: type[np.generic] = np.dtype(type_spec.dtype).type
    if isinstance(value, fl.program.MaterializableValueReference):
        raise _tensor_error(value, type_spec, label)  # numpy would wait for its value
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


def gather_arrays(values: Sequence[Any], type_spec: fl.Type) -> list[Plain] | None:
    """Return values of one type as plain ones if they hold nothing but numpy's arrays.

    A tenth of the time of a check of each value by itself.

    Args:
        values: tuples or lists, nested as the type's structs; unchecked.
        type_spec: of each.

    Returns:
        None where a value is another one, or may be a wrong one.
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
    """Return whether a shape, as far as it is known, is one that a type declares."""
    if found is None or declared is None:
        return True
    return len(found) == len(declared) and all(
        size is None or size == actual or actual is None
        for actual, size in zip(found, declared, strict=True)
    )


def _is_of_labels(label: str) -> bool:
    return label.startswith(("`y` of ", "`y."))


def _advise_shape(array: Any, type_spec: fl.TensorType, label: str) -> str:
    """Return how an array gets a declared shape, or a model the array's."""
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
    """Return whether an array has a row with one 1 for each whole number of a type."""
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


_KINDS: Mapping[type, str] = {bool: "b", int: "iu", float: "f", complex: "c"}
"""Kinds of dtype that numpy gives a list of Python numbers, each exact."""


def lay_alike(
    elements: Sequence[Any], element: fl.Type
) -> list[columnar_sequence.Column] | None:
    """Return elements of a sequence as columns; None: check and lay one by one.

    Args:
        elements: what a caller gave, unchecked.
        element: the declared type of each.
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
    """Return for each tensor of the type its values, one an element; None: unlike."""
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
    """Return numbers of one Python type as a column."""
    kind = type(values[0])
    if kind not in _KINDS and not issubclass(kind, np.generic):
        return None
    found = np.asarray(values)
    if kind in _KINDS and found.dtype.kind not in _KINDS[kind]:
        return None  # whole numbers that fit no one dtype
    all_of_them = fl.TensorType(type_spec.dtype, [len(values)])
    given: object = values if kind in _KINDS else found
    try:
        array = to_plain_tensor(given, all_of_them, "elements")
    except errors.ValueMismatchError:
        return None  # the check of one element says which
    return columnar_sequence.Column(array)


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


def to_plain_sequence(value: object, type_spec: fl.SequenceType, label: str) -> Plain:
    """Check a dataset, a list or another iterable and return its columns.

    Args:
        value: what a caller gave.
        type_spec: the declared type.
        label: what the value is called in an error.

    Raises:
        ValueMismatchError: the value is not of the type.
    """
    if isinstance(value, columnar_sequence.ColumnarSequence):
        return value
    element = type_spec.element
    if is_dataset(value):
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
    return _read_elements(value, tried, type_spec, label)


def is_dataset(value: object) -> bool:
    """Return whether a value is a dataset of TensorFlow's, which need not be loaded."""
    return hasattr(value, "as_numpy_iterator")


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
        runs.append(alike or _lay(step, element, label, length))
        length += len(step)
        if not at_hand:
            num_bytes = sum(map(columnar_sequence.count_column_bytes, runs[-1]))
            meter.add(max(num_bytes, len(step)))  # elements may have no tensors
            size = read_limits.next_step(len(step), num_bytes, _STEP_ELEMENTS)
    runs = runs or [_lay([], element, label, 0)]
    return columnar_sequence.ColumnarSequence(
        tuple(map(columnar_sequence.join_columns, zip(*runs, strict=True))), length
    )


def _lay(
    elements: Sequence[Any], element: fl.Type, label: str, start: int
) -> list[columnar_sequence.Column]:
    """Check elements of a sequence, the first at position `start`, and lay them."""
    types = flatten_type(element)
    kind = "batch" if any(t.shape and t.shape[0] is None for t in types) else "element"
    leaves = [
        flatten(to_plain(member, element, f"{kind} {index} of {label}"))
        for index, member in enumerate(elements, start)
    ]
    return [
        columnar_sequence.lay_column(
            [leaf[index] for leaf in leaves], storage_dtype(t), t.shape
        )
        for index, t in enumerate(types)
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
            iterate_dataset(dataset.batch(size))
            if size
            else iter([dataset.batch(_ALL).get_single_element()])
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


def pack_members(members: Sequence[Plain], type_spec: fl.Type) -> list[Any]:
    """Return plain values of one type in the containers of the type.

    Args:
        members: in any order, which stays.
        type_spec: of each.
    """
    if not members:
        return []
    first, *others = members
    pack_one = _build_pack(type_spec)
    # Of the first it is checked, too, that its type has containers.
    return [from_plain(first, type_spec), *map(pack_one, others)]


def _build_pack(type_spec: fl.Type) -> Callable[[Plain], Any]:
    if isinstance(type_spec, fl.TensorType):
        return lambda plain: plain
    if not isinstance(type_spec, fl.StructType):
        return lambda plain: from_plain(plain, type_spec)
    names = [name or "" for name, _ in type_spec.items()]
    inside = [_build_pack(element) for _, element in type_spec.items()]
    make = _build_maker(type_spec.python_container, names)
    return lambda plain: make(
        [pack_one(element) for pack_one, element in zip(inside, plain, strict=True)]
    )


def _build_maker(
    container: Any, names: Sequence[str]
) -> Callable[[Iterable[Any]], Any]:
    """Return what makes a container of its elements, in the order of its type."""
    if hasattr(container, "_fields") or (container and attrs.has(container)):
        return lambda elements: container(**dict(zip(names, elements, strict=True)))
    if not any(names):
        return container or tuple

    def make(elements: Iterable[Any]) -> Any:
        return (container or OrderedDict)(zip(names, elements, strict=True))

    return make


def to_plain(
    value: object,
    type_spec: fl.Type,
    label: str = "the value",
    lists: ListCache | None = None,
) -> Plain:
    """Check a Python value against its type and return the plain value.

    `Stored`, `StoredComponents`, `External` and `ClientMember` are returned unread.

    Args:
        value: what a caller gave: numbers, numpy arrays, eager tensors, datasets,
            containers of them; or what an executor computed.
        type_spec: the declared type; holds no functions.
        label: what the value is called in an error.
        lists: keeps lists of clients that come again; None: nobody does.

    Returns:
        The plain value.

    Raises:
        ValueMismatchError: the value is not of the type. Nothing is cast, but Python
            numbers take the dtype that is declared when they fit it exactly.
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
        if isinstance(members, list | tuple):  # another one may read each as it comes
            arrays = gather_arrays(members, type_spec.member)
            if arrays is not None:
                return arrays
        found: list[Plain] = []
        for index, member in enumerate(members):
            name = f"{label} of the client at position {index}"
            try:
                found.append(to_plain(member, type_spec.member, name))
            except errors.ValueMismatchError as error:
                error.location = errors.Location(client_index=index)
                raise
        return found

    members = cast("Sequence[Any]", value)
    if lists is None or type(value) not in (list, tuple):
        return read(members)
    return lists.find(members, type_spec.member, read)


def from_plain(plain: Plain, type_spec: fl.Type) -> Any:
    """Return a plain value in the Python containers that its type declares.

    Args:
        plain: of type `type_spec`.
        type_spec: without containers, structs with names become OrderedDict, without
            names tuple, as federated_language documents.

    Returns:
        numpy values at the leaves, bytes for strings, a list for a sequence.
    """
    if type_checks.is_placed_struct(type_spec):
        # What has its containers already is left as it is.
        placed = type_checks.struct_type(type_spec)
        plain = Struct(
            (name, from_plain(element, element_type))
            for (name, element_type), element in zip(placed.items(), plain, strict=True)
        )
        return fl.framework.type_to_py_container(plain, placed)
    if isinstance(type_spec, fl.FederatedType) and not type_spec.all_equal:
        return pack_members(plain, type_spec.member)
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
            element = type_spec.element
            return [
                # Any strategy's own executors may have computed it: then it is one.
                unflatten(iter(tensors), element) if type(tensors) is tuple else tensors
                for tensors in plain
            ]
        case fl.FederatedType() if not type_spec.all_equal:
            return [to_structs(member, type_spec.member) for member in plain]
        case fl.FederatedType():
            return to_structs(plain, type_spec.member)
        case _:
            return plain

"""Values as executors see them: structs, stored values, and checks of their types.

With `blocks` and `tensorflow.graph` the only way into what federated_language keeps
private.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import attrs
import federated_language as fl
import numpy as np
from federated_language.common_libs import structure
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.rows as rows

Struct = structure.Struct
"""What federated_language packs arguments into and executors compute structs to."""

Plain = Any
"""A value in the form that `ray_fed.plain` describes."""

_T = TypeVar("_T")
_CACHED_TYPES = 1024
"""Of which is kept what they hold: walking through one takes longer than a call."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """Stands for a plain value that lives in an object store.

    Attributes:
        reference: whatever the store gave for it; opaque here.
        num_bytes: of the value's arrays, about; 0 where nobody counted.
    """

    reference: object
    num_bytes: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True, eq=False)
class StoredParts:
    """Stands for a plain value some of whose parts live in an object store.

    Equal to nothing but itself, so that an executor can tell that it has embedded it.

    Attributes:
        parts: `Stored` or plain, in the order of `ray_fed.parts`.
    """

    parts: tuple[object, ...]


@dataclasses.dataclass(frozen=True)
class External:
    """Stands for the value that a file holds, until an executor reads it.

    Attributes:
        uri: names the file in the executor's file system.
    """

    uri: str


class ClientSequence(Sequence[Any]):
    """Base of what stands for a list with a value for each client."""


@dataclasses.dataclass(frozen=True)
class StoredClients(ClientSequence):
    """A contiguous run of client values that lives in an object store as one list.

    Attributes:
        reference: whatever the store gave for the list; opaque here.
        start: index in that list of the first client of this run.
        stop: one past the last.
    """

    reference: object
    start: int
    stop: int

    @override
    def __len__(self) -> int:
        return self.stop - self.start

    @override
    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            raise TypeError("Expected a slice of stored clients, found an index.")
        start, stop, step = cast("slice[Any, Any, Any]", index).indices(len(self))
        if step != 1:
            raise ValueError(f"Expected a step of 1, found {step}.")
        stop = max(start, stop)
        return StoredClients(self.reference, self.start + start, self.start + stop)


def is_at_clients(type_spec: fl.Type) -> bool:
    """Return whether the type is a federated type placed at clients."""
    return isinstance(type_spec, fl.FederatedType) and type_spec.placement == fl.CLIENTS


def differs_by_client(type_spec: fl.Type) -> bool:
    """Return whether values of the type are one a client, hence a list."""
    return isinstance(type_spec, fl.FederatedType) and not type_spec.all_equal


@functools.lru_cache(maxsize=_CACHED_TYPES)
def holds_clients(type_spec: fl.Type) -> bool:
    """Return whether some part of a type differs by client."""
    return fl.framework.type_contains(type_spec, differs_by_client)


@functools.lru_cache(maxsize=_CACHED_TYPES)
def holds_functions(type_spec: fl.Type) -> bool:
    """Return whether some part of a type is a function."""
    return fl.framework.type_contains(
        type_spec, lambda part: isinstance(part, fl.FunctionType)
    )


@functools.lru_cache(maxsize=_CACHED_TYPES)
def _holds_placed(type_spec: fl.StructType) -> bool:
    return fl.framework.contains_federated_types(type_spec)


def is_placed_struct(type_spec: fl.Type) -> bool:
    """Return whether a type is a struct with placed parts: to be taken apart."""
    return isinstance(type_spec, fl.StructType) and _holds_placed(type_spec)


def check_assignable(target: fl.Type, source: fl.Type, label: str) -> None:
    """Raise unless a value of type `source` may stand where `target` is declared.

    Raises:
        ValueMismatchError: it may not.
    """
    if not target.is_assignable_from(source):
        raise errors.ValueMismatchError(
            f"Expected {label} of type `{target}`, found `{source}`."
        )


def narrow(value: object, cls: type[_T], label: str) -> _T:
    """Return `value` as a `cls`, which `label` embeds.

    Raises:
        ValueMismatchError: the value was embedded by another executor.
    """
    if not isinstance(value, cls):
        raise errors.ValueMismatchError(
            f"Expected a value embedded in {label}, found `{type(value).__name__}`:"
            " pass what its create_value returned."
        )
    return value


def iter_elements(value: Struct[_T]) -> Iterator[tuple[str | None, _T]]:
    """Yield (name, element) of a struct, in order."""
    return iter(structure.to_elements(value))


def to_struct(elements: object) -> Struct[Any]:
    """Return any container of elements as a struct of one level.

    Raises:
        ValueMismatchError: `elements` is no container.
    """
    if isinstance(elements, Struct):
        return cast("Struct[Any]", elements)
    try:
        return structure.from_container(elements)
    except TypeError as error:
        raise errors.ValueMismatchError(
            "Expected a list, tuple, dict or struct of embedded values, found"
            f" {show(elements)}."
        ) from error


def struct_elements(
    value: object, type_spec: fl.StructType, label: str = "value"
) -> list[tuple[fl.Type, str, Any]]:
    """Split a Python container into the elements that its type declares.

    Names are matched by name where both sides have them; a container without names
    takes those of its type.

    Args:
        value: a struct, mapping, named tuple, attrs or dataclass object, list or tuple.
        type_spec: of the value.
        label: what the value is called in an error.

    Returns:
        (type, label, element) in the order of the type.

    Raises:
        ValueMismatchError: the container has other elements than its type.
    """
    names = [name for name, _ in type_spec.items()]
    found_names, found = _container_items(value, type_spec, label)
    if isinstance(value, Mapping) and set(found_names) != set(names):
        raise _names_error(label, names, found_names)
    if len(found) != len(names):
        raise errors.ValueMismatchError(
            f"Expected {label} to have {len(names)} elements as in `{type_spec}`,"
            f" found {len(found)}."
        )
    if isinstance(value, Mapping):
        by_name = dict(zip(found_names, found, strict=True))
        found = [by_name[name] for name in names]
    elif any(f is not None and f != n for f, n in zip(found_names, names, strict=True)):
        raise _names_error(label, names, found_names)
    return [
        (element_type, f"{label}.{name or index}", element)
        for index, ((name, element_type), element) in enumerate(
            zip(type_spec.items(), found, strict=True)
        )
    ]


def _names_error(
    label: str, names: Sequence[str | None], found: Sequence[object]
) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f"Expected {label} to have elements named {names}, found {list(found)}."
    )


def _container_items(  # noqa: PLR0911 (one return a kind of container)
    value: object, type_spec: fl.StructType, label: str
) -> tuple[list[Any], list[Any]]:
    match value:
        case Struct():
            pairs = structure.to_elements(cast("Struct[Any]", value))
            return [name for name, _ in pairs], [element for _, element in pairs]
        case Mapping():
            mapping = cast("Mapping[Any, Any]", value)
            return list(mapping.keys()), list(mapping.values())
        case tuple() if hasattr(value, "_asdict"):
            items: dict[str, Any] = value._asdict()  # pyright: ignore[reportAttributeAccessIssue]
            return list(items), list(items.values())
        case list() | tuple():
            elements = list(cast("Iterable[Any]", value))
            return [None] * len(elements), elements
        case _ if attrs.has(type(value)):
            items = attrs.asdict(cast("Any", value), recurse=False)
            return list(items), list(items.values())
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [field.name for field in dataclasses.fields(value)]
            return list(fields), [getattr(value, name) for name in fields]
        case _:
            raise errors.ValueMismatchError(
                f"Expected {label} to be a container of `{type_spec}`, found"
                f" {show(value)}."
            )


def show(value: object) -> str:
    """Return a value and its Python type for an error message, cut when long."""
    return f"`{errors.describe(value)}` of Python type `{type(value).__name__}`"


def map_placed(
    fn: Callable[[fl.Type, Any], Any], value: object, type_spec: fl.Type
) -> Any:
    """Apply `fn` to each placed or unplaced part of an argument.

    Structures that hold federated types are taken apart to tuples; every other part
    is handed whole to `fn(type, part)`.
    """
    if is_placed_struct(type_spec):
        pairs = list(struct_type(type_spec).items())
        if type(value) is tuple and len(value) == len(pairs):  # plain: in order
            elements = zip(
                (element_type for _, element_type in pairs), value, strict=True
            )
        else:
            found = struct_elements(value, struct_type(type_spec))
            elements = ((element_type, element) for element_type, _, element in found)
        return tuple(map_placed(fn, element, e) for e, element in elements)
    return fn(type_spec, value)


def slice_clients(arg: Any, type_spec: fl.Type | None, clients: range) -> Any:
    """Return an argument with the values of some contiguous clients only."""
    if type_spec is None:
        return None

    def cut(part_type: fl.Type, part: Any) -> Any:
        if differs_by_client(part_type):
            return part[clients.start : clients.stop]
        return part

    return map_placed(cut, arg, type_spec)


def select_index(type_spec: fl.Type, index: int | None, name: str | None) -> int:
    """Return the position that an index or a name selects from a struct type.

    Raises:
        ValueMismatchError: the type is no struct, or has no such element.
        UnsupportedError: both or neither of `index` and `name` are given.
    """
    if (index is None) == (name is None):
        raise errors.UnsupportedError(
            f"Expected either an index or a name, found index={index!r}, name={name!r}."
        )
    if not isinstance(type_spec, fl.StructType):
        raise errors.ValueMismatchError(
            f"Expected a struct to select from, found a value of type `{type_spec}`."
        )
    names = [element_name for element_name, _ in type_spec.items()]
    if name is not None and name in names:
        return names.index(name)
    if isinstance(index, int | np.integer) and 0 <= index < len(names):
        return int(index)
    raise errors.ValueMismatchError(
        f"Expected an element of `{type_spec}`, found"
        f" {index if name is None else name!r}."
    )


def is_raw_memory(value: object) -> bool:
    """Return whether an object is memory whose bytes numpy would take for numbers.

    Such are bytes, bytearray, memoryview, mmap, array.array and arrays of ctypes; not
    arrays of numpy or tensors, which have a dtype.
    """
    if hasattr(value, "dtype"):
        return False
    try:
        memoryview(cast("Any", value)).release()
    except TypeError:
        return False
    return True


def is_listed(value: object) -> bool:
    """Return whether an object lists values in an order: no text, no set."""
    if isinstance(value, str | Mapping | set | frozenset) or is_raw_memory(value):
        return False
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def client_sequence(value: object, type_spec: fl.Type) -> Sequence[Any]:
    """Return a value placed at clients as the sequence it must be.

    Raises:
        ValueMismatchError: it is neither a list nor a tuple, and stands for none.
    """
    if not isinstance(value, list | tuple | ClientSequence):
        raise errors.ValueMismatchError(
            f"Expected a list or tuple with a value for each client for `{type_spec}`,"
            f" found {show(value)}."
        )
    return cast("Sequence[Any]", value)


def check_cardinality(
    value: object, type_spec: fl.FederatedType, num_clients: int
) -> None:
    """Raise unless a value is a sequence with one element a client.

    Raises:
        ValueMismatchError: it is neither a list nor a tuple, and stands for none.
        CardinalityError: it has another length.
    """
    found = len(client_sequence(value, type_spec))
    if found != num_clients:
        raise errors.CardinalityError(
            f"Expected {num_clients} values for `{type_spec}`, one a client, found"
            f" {found}."
        )


def check_argument(
    type_spec: fl.FunctionType, argument: fl.framework.ExecutorValue | None
) -> None:
    """Raise unless a function of the type may be called with the argument.

    Raises:
        ValueMismatchError: it may not.
    """
    if type_spec.parameter is None and argument is not None:
        raise errors.ValueMismatchError(
            f"Expected no argument for `{type_spec}`, found one of type"
            f" `{argument.type_signature}`."
        )
    if type_spec.parameter is not None and argument is None:
        raise errors.ValueMismatchError(
            f"Expected an argument of type `{type_spec.parameter}`, found none."
        )
    if argument is not None and type_spec.parameter is not None:
        check_assignable(type_spec.parameter, argument.type_signature, "an argument")


def check_no_argument(type_spec: fl.FunctionType, arg: object) -> None:
    """Raise where there is an argument for a function that takes none.

    Raises:
        ValueMismatchError: there is.
    """
    if type_spec.parameter is None and arg is not None:
        raise errors.ValueMismatchError(
            f"Expected no argument for `{type_spec}`, found {show(arg)}."
        )


def check_count(value: object, name: str, least: int = 1) -> int:
    """Return a count that a caller gave as an int.

    Args:
        value: what was given.
        name: of the argument.
        least: that it may be.

    Raises:
        CardinalityError: it is a number below the least.
        ValueMismatchError: it is no whole number.
    """
    if isinstance(value, int | float | np.number) and value < least:
        raise errors.CardinalityError(
            f"Expected `{name}` of at least {least}, found {name}={value}."
        )
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise errors.ValueMismatchError(
            f"Expected a whole number for `{name}`, found {show(value)}."
        )
    return int(value)


def member_type(type_spec: fl.Type) -> fl.Type:
    """Return the member of a federated type."""
    return cast("fl.FederatedType", type_spec).member


def is_empty_struct(type_spec: fl.Type) -> bool:
    """Return whether a type is that of a struct without elements."""
    return isinstance(type_spec, fl.StructType) and len(type_spec) == 0


def struct_type(type_spec: fl.Type) -> fl.StructType:
    """Return a type that is known to be a struct's as one."""
    return cast("fl.StructType", type_spec)


def function_type(type_spec: fl.Type) -> fl.FunctionType:
    """Return a type that is known to be a function's as one."""
    return cast("fl.FunctionType", type_spec)


def holds_stored(value: Any) -> bool:
    """Return whether a `Stored` is an element of nested tuples."""
    return isinstance(value, tuple) and any(
        isinstance(element, Stored) or holds_stored(element)
        for element in cast("tuple[Any, ...]", value)
    )


def holds_external(value: Any) -> bool:
    """Return whether an `External` is an element of nested tuples, or the value."""
    if isinstance(value, tuple):
        return any(map(holds_external, cast("tuple[Any, ...]", value)))
    return isinstance(value, External)


def count_bytes(value: Any) -> int:
    """Return about how many bytes of arrays a plain value holds."""
    if isinstance(value, tuple | list):
        return sum(count_bytes(member) for member in cast("Sequence[Any]", value))
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, np.ndarray):
        return rows.bytes_of(value)
    size = getattr(value, "nbytes", None)
    return int(getattr(value, "num_bytes", 0) if size is None else size)

"""Values as executors see them: structs, stored values, and checks of their types.

With `blocks` and `tensorflow.graph` the only way into what federated_language keeps
private.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import federated_language as fl
import numpy as np
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.language.structs import Plain, is_raw_memory, show, struct_elements
from ray_fed.language.type_checks import (
    differs_by_client,
    is_placed_struct,
    struct_type,
)
from ray_fed.values import columnar_sequence


@dataclasses.dataclass(frozen=True)
class Stored:
    """Stands for a plain value that lives in an object store.

    Attributes:
        reference: the store's own reference to it; opaque here.
        num_bytes: of the value's arrays, about; 0 where it is not known.
    """

    reference: object
    num_bytes: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True, eq=False)
class StoredComponents:
    """Stands for a plain value some of whose components live in an object store.

    Equal to nothing but itself, so that an executor can tell that it has embedded it.

    Attributes:
        components: `Stored` or plain, in the order of `ray_fed.values.components`.
    """

    components: tuple[object, ...]


@dataclasses.dataclass(frozen=True)
class External:
    """Stands for the value that a file holds, until an executor reads it.

    Attributes:
        uri: names the file in the executor's file system.
    """

    uri: str


class ClientSequence(Sequence[Plain]):
    """Base of objects that stand for a list with one value for each client."""


ClientValues: TypeAlias = Sequence[Plain]
"""The values of some clients, in client order: a list, or a `ClientSequence`."""

ArgumentPart: TypeAlias = Plain
"""A part of an argument that is placed, or not, as a whole: a plain value,
`ClientValues`, or what stands for a value: `Stored`, `StoredComponents`, `External`."""


@dataclasses.dataclass(frozen=True)
class StoredClients(ClientSequence):
    """A contiguous run of client values that lives in an object store as one list.

    Attributes:
        reference: the store's own reference to the list; opaque here.
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


def placed_parts(
    value: object, type_spec: fl.Type
) -> list[tuple[fl.Type, ArgumentPart]]:
    """Return the type and the value of each placed or unplaced part of an argument.

    Only structures that hold federated types are taken apart.
    """
    if not is_placed_struct(type_spec):
        return [(type_spec, value)]
    struct = struct_type(type_spec)
    elements: Iterable[tuple[fl.Type, Any]]
    if type(value) is tuple and len(value) == len(struct):  # plain: in order
        elements = zip((part for _, part in struct.items()), value, strict=True)
    else:
        elements = ((part, e) for part, _, e in struct_elements(value, struct))
    return [each for part, e in elements for each in placed_parts(e, part)]


def join_placed(parts: Iterator[Any], type_spec: fl.Type) -> Any:
    """Return an argument, or a result, of its parts; its structures are tuples."""
    if not is_placed_struct(type_spec):
        return next(parts)
    return tuple([join_placed(parts, e) for _, e in struct_type(type_spec).items()])


def slice_clients(arg: Plain, type_spec: fl.Type | None, clients: range) -> Plain:
    """Return an argument with the values of some contiguous clients only."""
    if type_spec is None:
        return None
    parts = (
        part[clients.start : clients.stop] if differs_by_client(part_type) else part
        for part_type, part in placed_parts(arg, type_spec)
    )
    return join_placed(parts, type_spec)


def is_listed(value: object) -> bool:
    """Return whether an object lists values in an order: no text, no set."""
    if isinstance(value, str | Mapping | set | frozenset) or is_raw_memory(value):
        return False
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def client_sequence(value: object, type_spec: fl.Type) -> ClientValues:
    """Return a value placed at clients as the sequence it must be.

    Raises:
        ValueMismatchError: it is neither a list nor a tuple, and stands for none.
    """
    if not isinstance(value, list | tuple | ClientSequence):
        raise errors.ValueMismatchError(
            f"Expected a list or tuple with a value for each client for `{type_spec}`,"
            f" found {show(value)}."
        )
    return cast("ClientValues", value)


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


def holds_stored(value: Plain) -> bool:
    """Return whether a `Stored` is an element of nested tuples."""
    return isinstance(value, tuple) and any(
        isinstance(element, Stored) or holds_stored(element)
        for element in cast("tuple[Any, ...]", value)
    )


def holds_external(value: Plain) -> bool:
    """Return whether an `External` is an element of nested tuples, or the value."""
    if isinstance(value, tuple):
        return any(map(holds_external, cast("tuple[Any, ...]", value)))
    return isinstance(value, External)


def count_bytes(value: Plain) -> int:
    """Return about how many bytes of arrays a plain value holds."""
    if isinstance(value, tuple | list):
        return sum(count_bytes(member) for member in cast("Sequence[Any]", value))
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, np.ndarray):
        return columnar_sequence.bytes_of(value)
    size = getattr(value, "nbytes", None)
    return int(getattr(value, "num_bytes", 0) if size is None else size)


def count_rows(value: Plain) -> float | None:
    """Return how many elements the sequences of a plain value have; None: no such."""
    if isinstance(value, columnar_sequence.ColumnarSequence):
        return float(max([value.length, *(len(c.rows) for c in value.columns)]))
    if not isinstance(value, tuple):
        return None
    counts = [count_rows(member) for member in cast("tuple[Any, ...]", value)]
    return sum(known) if (known := [c for c in counts if c is not None]) else None


def count_rows_of_each(values: Sequence[Plain]) -> list[float] | None:
    """Return `count_rows` of each of some values; None where one has no sequence."""
    counts = [count for count in map(count_rows, values) if count is not None]
    return counts if len(counts) == len(values) else None

"""Placeholders for values that are stored elsewhere, such as in Ray's object store."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import federated_language as fl
import numpy as np
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.language import trees
from ray_fed.language.structs import Plain, is_raw_memory, show, struct_elements
from ray_fed.language.type_checks import (
    differs_by_client,
    is_placed_struct,
    struct_type,
)
from ray_fed.values import columnar_sequence


@dataclasses.dataclass(frozen=True)
class Stored:
    """A plain value in an object store.

    Only the store reads `reference`. `num_bytes` is about the size of the value's
    arrays, or 0 if unknown.
    """

    reference: object
    num_bytes: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True, eq=False)
class StoredComponents:
    """A plain value with some components in an object store.

    It is equal only to itself, so that an executor can recognize it. Its components are
    `Stored` or plain, in the order of `ray_fed.values.components`.
    """

    components: tuple[object, ...]


@dataclasses.dataclass(frozen=True)
class External:
    """A value in a file that is not read yet. The executor can open the URI."""

    uri: str


class ClientSequence(Sequence[Plain]):
    """Base class of objects that stand for a list with one value for each client."""


ClientValues: TypeAlias = Sequence[Plain]
"""The values of some clients, in client order: a list, or a `ClientSequence`."""

ArgumentPart: TypeAlias = Plain
"""A part of an argument: a plain value, `ClientValues`, or an object that stands for a
value, such as `Stored`, `StoredComponents` or `External`."""


@dataclasses.dataclass(frozen=True)
class StoredClients(ClientSequence):
    """The values of contiguous clients, as a range of a list in an object store.

    Only the store reads `reference`.
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
    """Return the type and the value of each part of an argument, in order.

    Only structs that contain federated types are divided into parts.
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


def slice_clients(arg: Plain, type_spec: fl.Type | None, clients: range) -> Plain:
    """Return an argument with the values of the given clients only, by index."""
    if type_spec is None:
        return None
    parts = (
        part[clients.start : clients.stop] if differs_by_client(part_type) else part
        for part_type, part in placed_parts(arg, type_spec)
    )
    return trees.nest(parts, type_spec, trees.is_unstructured)


def is_listed(value: object) -> bool:
    """Return whether an object lists values in order. Strings and sets do not."""
    if isinstance(value, str | Mapping | set | frozenset) or is_raw_memory(value):
        return False
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def client_sequence(value: object, type_spec: fl.Type) -> ClientValues:
    """Return `value` if it is a sequence of clients' values, or raise an error."""
    if not isinstance(value, list | tuple | ClientSequence):
        raise errors.ValueMismatchError(
            f"Expected a list or tuple with a value for each client for `{type_spec}`,"
            f" found {show(value)}."
        )
    return cast("ClientValues", value)


def check_cardinality(
    value: object, type_spec: fl.FederatedType, num_clients: int
) -> None:
    """Raise unless a value is a sequence with one element for each client.

    The error is a ValueMismatchError, or a CardinalityError for another length.
    """
    found = len(client_sequence(value, type_spec))
    if found != num_clients:
        raise errors.CardinalityError(
            f"Expected {num_clients} values for `{type_spec}`, one for each client,"
            f" found {found}."
        )


def holds_stored(value: Plain) -> bool:
    """Return whether nested tuples contain a `Stored`."""
    return isinstance(value, tuple) and any(
        isinstance(leaf, Stored) for leaf in trees.flatten(value)
    )


def holds_external(value: Plain) -> bool:
    """Return whether a value is or contains an `External`."""
    return any(isinstance(leaf, External) for leaf in trees.flatten(value))


def count_bytes(value: Plain) -> int:
    """Return the approximate bytes of arrays in a plain value."""
    if isinstance(value, tuple | list):
        return sum(count_bytes(member) for member in cast("Sequence[Any]", value))
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, np.ndarray):
        return columnar_sequence.bytes_of(value)
    size = getattr(value, "nbytes", None)
    return int(getattr(value, "num_bytes", 0) if size is None else size)


def count_rows(value: Plain) -> float | None:
    """Return the number of rows in a value's sequences, or None without sequences."""
    counts = [
        float(max([each.length, *(len(c.rows) for c in each.columns)]))
        for each in _sequences_in(value)
    ]
    return sum(counts) if counts else None


def _sequences_in(value: Plain) -> list[columnar_sequence.ColumnarSequence]:
    kind = columnar_sequence.ColumnarSequence
    return [leaf for leaf in trees.flatten(value) if isinstance(leaf, kind)]


def sizes_of_sequences(value: Plain) -> list[int]:
    """Return the rows of each batch in a value, or the lengths of other sequences."""
    sizes: list[int] = []
    for each in _sequences_in(value):
        for first in each.columns[:1]:
            splits = first.splits
            sizes += [each.length] if splits is None else np.diff(splits).tolist()
    return sizes


def count_rows_of_each(values: Sequence[Plain]) -> list[float] | None:
    """Return `count_rows` of each value, or None if a value has no sequence."""
    counts = [count for count in map(count_rows, values) if count is not None]
    return counts if len(counts) == len(values) else None

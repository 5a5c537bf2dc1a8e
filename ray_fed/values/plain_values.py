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
"""

from collections.abc import Sequence
from typing import Any, cast

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.language import blocks, type_checks
from ray_fed.language.structs import Plain, Struct, show, struct_elements
from ray_fed.values.client_containers import pack_members
from ray_fed.values.client_references import ClientMember, as_run
from ray_fed.values.plain_sequences import to_plain_sequence
from ray_fed.values.plain_tensors import gather_arrays, to_plain_tensor
from ray_fed.values.stored import (
    External,
    Stored,
    StoredClients,
    StoredComponents,
    is_listed,
)
from ray_fed.values.tensor_structures import unflatten


def to_plain(value: object, type_spec: fl.Type, label: str = "the value") -> Plain:
    """Check a Python value against its type and return the plain value.

    `Stored`, `StoredComponents`, `External` and `ClientMember` are returned unread.

    Args:
        value: what a caller gave: numbers, numpy arrays, eager tensors, datasets,
            containers of them; or what an executor computed.
        type_spec: the declared type; holds no functions.
        label: what the value is called in an error.

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
                to_plain(element, element_type, element_label)
                for element_type, element_label, element in struct_elements(
                    value, type_spec, label
                )
            )
        case fl.SequenceType():
            return to_plain_sequence(value, type_spec, label, to_plain)
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
    if isinstance(found, fl.FederatedType) and not type_checks.differs_by_client(found):
        found = found.member
    type_checks.check_assignable(type_spec, found, label)
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
    members = cast("Sequence[Any]", value)
    if isinstance(value, list | tuple):  # another one may read each as it comes
        arrays = gather_arrays(members, type_spec.member)
        if arrays is not None:
            return arrays
    return [
        to_plain(member, type_spec.member, f"{label}[{index}]")
        for index, member in enumerate(members)
    ]


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
        return pack_members(plain, type_spec.member, from_plain)
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
            return [unflatten(iter(tensors), type_spec.element) for tensors in plain]
        case fl.FederatedType() if not type_spec.all_equal:
            return [to_structs(member, type_spec.member) for member in plain]
        case fl.FederatedType():
            return to_structs(plain, type_spec.member)
        case _:
            return plain

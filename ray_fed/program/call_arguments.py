"""Arguments of federated programs: checked at once, resolved when a call may run."""

from collections.abc import Coroutine, Iterable, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from typing import Any, cast

import federated_language as fl

from ray_fed.executors.fanout import gather_by_index
from ray_fed.language import structs, type_checks
from ray_fed.program.value_references import RayValueReference
from ray_fed.values import components, plain_values

Reference = fl.program.MaterializableValueReference


def check(value: object, type_spec: fl.Type, label: str) -> Any:
    """Check an argument against its type; references by theirs, without reading them.

    Returns:
        The plain argument, with references in place of tensors and sequences.

    Raises:
        ValueMismatchError: the argument is not of its type.
    """
    match type_spec:
        case fl.StructType():
            elements = structs.struct_elements(value, type_spec, label)
            return tuple(
                check(element, element_type, element_label)
                for element_type, element_label, element in elements
            )
        case fl.FederatedType() if type_spec.placement == fl.SERVER:
            return check(value, type_spec.member, label)
        case fl.TensorType() | fl.SequenceType() if isinstance(value, Reference):
            type_checks.check_assignable(type_spec, value.type_signature, label)
            return value
        case fl.FederatedType() if type_checks.differs_by_client(type_spec):
            return plain_values.to_plain(_to_list(value), type_spec, label)
        case _:
            return plain_values.to_plain(value, type_spec, label)


def _to_list(value: object) -> object:
    """Return what a data source selected as a list of what each client has.

    What has no length may have no end, and what is no sequence may have no order:
    mappings, sets, and arrays or datasets, which are values of one client.
    """
    is_of_one = hasattr(value, "__array__") or hasattr(value, "as_numpy_iterator")
    if is_of_one or isinstance(value, Sequence | Mapping | AbstractSet):
        return value
    if isinstance(value, Sized) and isinstance(value, Iterable):
        return list(cast("Iterable[object]", value))
    return value


async def resolve(checked: Any, type_spec: fl.Type) -> Any:
    """Return a checked argument once every reference in it has its value.

    What this kind of context keeps stays where it is; any other reference is read.

    Raises:
        Exception: the failure of a call that should have made one of the values.
    """
    held = components.split(checked, type_spec)
    types = components.component_types(type_spec)
    pending = {
        index: _resolve(component, component_type)
        for index, (component, component_type) in enumerate(
            zip(held, types, strict=True)
        )
        if isinstance(component, Reference)
    }
    resolved = await gather_by_index(pending.values())
    for index, component in zip(pending, resolved, strict=True):
        held[index] = component
    return components.join(held, type_spec)


def _resolve(reference: Reference, type_spec: fl.Type) -> Coroutine[Any, Any, Any]:
    if isinstance(reference, RayValueReference):
        return reference.held()
    return _read(reference, type_spec)


async def _read(reference: Reference, type_spec: fl.Type) -> Any:
    return plain_values.to_plain(
        await reference.get_value(), type_spec, "a referenced value"
    )

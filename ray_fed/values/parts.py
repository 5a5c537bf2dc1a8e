"""A value in parts: its tensors and sequences one by one, in the order of its type.

Parts of a result are stored each by itself, so that whoever reads a metric does not
move a model, and a part is freed when nobody holds it any more.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import federated_language as fl

from ray_fed.language.structs import Plain, Struct


def part_types(type_spec: fl.Type) -> list[fl.Type]:
    """Return the types of a value's parts: whatever is neither struct nor placement."""
    match type_spec:
        case fl.StructType():
            return [
                part for _, element in type_spec.items() for part in part_types(element)
            ]
        case fl.FederatedType() if type_spec.all_equal:
            return part_types(type_spec.member)
        case _:
            return [type_spec]


def split(value: Plain, type_spec: fl.Type) -> list[Any]:
    """Return the parts of a plain value, in the order of `part_types`."""
    match type_spec:
        case fl.StructType():
            return [
                part
                for (_, element_type), element in zip(
                    type_spec.items(), value, strict=True
                )
                for part in split(element, element_type)
            ]
        case fl.FederatedType() if type_spec.all_equal:
            return split(value, type_spec.member)
        case _:
            return [value]


def join(parts: Sequence[Any], type_spec: fl.Type) -> Plain:
    """Return the plain value of which these are the parts: undoes `split`."""
    return _join(iter(parts), type_spec)


def _join(parts: Iterator[Any], type_spec: fl.Type) -> Plain:
    match type_spec:
        case fl.StructType():
            return tuple(_join(parts, element) for _, element in type_spec.items())
        case fl.FederatedType() if type_spec.all_equal:
            return _join(parts, type_spec.member)
        case _:
            return next(parts)


def to_containers(parts: Sequence[Any], type_spec: fl.Type) -> Any:
    """Return parts, whatever they are, in the Python containers of their type.

    Raises:
        ValueError: the type has a struct for which there is no container.
    """
    struct = _to_structs(iter(parts), type_spec)
    return fl.framework.type_to_py_container(struct, type_spec)


def _to_structs(parts: Iterator[Any], type_spec: fl.Type) -> Any:
    match type_spec:
        case fl.StructType():
            return Struct(
                (name, _to_structs(parts, element))
                for name, element in type_spec.items()
            )
        case fl.FederatedType() if type_spec.all_equal:
            return _to_structs(parts, type_spec.member)
        case _:
            return next(parts)

"""The components of a value: its tensors and sequences, in the order of its type.

Each component of a result is stored by itself: a program that reads a metric does not
move the model, and a component is freed once nothing refers to it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import federated_language as fl
import numpy as np

from ray_fed.language.structs import Plain, Struct

Components: TypeAlias = Sequence[Plain]
"""The components of a value in the order of its type; each is plain, or `Stored`."""


def component_types(type_spec: fl.Type) -> list[fl.Type]:
    """Return the types of a value's components: all that are no structs."""
    match type_spec:
        case fl.StructType():
            return [
                component
                for _, element in type_spec.items()
                for component in component_types(element)
            ]
        case fl.FederatedType() if type_spec.all_equal:
            return component_types(type_spec.member)
        case _:
            return [type_spec]


def split(value: Plain, type_spec: fl.Type) -> list[Plain]:
    """Return the components of a plain value, in the order of `component_types`."""
    match type_spec:
        case fl.StructType():
            return [
                component
                for (_, element_type), element in zip(
                    type_spec.items(), value, strict=True
                )
                for component in split(element, element_type)
            ]
        case fl.FederatedType() if type_spec.all_equal:
            return split(value, type_spec.member)
        case _:
            return [value]


def join(components: Iterable[Plain], type_spec: fl.Type) -> Plain:
    """Return the plain value that has these components: undoes `split`."""
    left = iter(components)
    match type_spec:
        case fl.StructType():
            return tuple(join(left, element) for _, element in type_spec.items())
        case fl.FederatedType() if type_spec.all_equal:
            return join(left, type_spec.member)
        case _:
            return next(left)


def to_containers(components: Components, type_spec: fl.Type) -> Any:
    """Return components, whatever they are, in the Python containers of their type.

    Raises:
        ValueError: the type has a struct for which there is no container.
    """
    struct = _to_structs(iter(components), type_spec)
    alone, _ = fl.framework.transform_type_postorder(type_spec, _as_one)
    return fl.framework.type_to_py_container(struct, alone)


def _as_one(type_spec: fl.Type) -> tuple[fl.Type, bool]:
    """Return a type that has no container, for what clients have: one component."""
    if isinstance(type_spec, fl.FederatedType) and not type_spec.all_equal:
        return fl.TensorType(np.int32), True
    return type_spec, False


def _to_structs(components: Iterator[Plain], type_spec: fl.Type) -> Plain:
    match type_spec:
        case fl.StructType():
            return Struct(
                (name, _to_structs(components, element))
                for name, element in type_spec.items()
            )
        case fl.FederatedType() if type_spec.all_equal:
            return _to_structs(components, type_spec.member)
        case _:
            return next(components)

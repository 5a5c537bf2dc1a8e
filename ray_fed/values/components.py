"""The components of a value: its tensors and sequences, in the order of its type.

Each component of a result is stored separately. A program that reads a metric does not
transfer the model, and a component is freed when no code refers to it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import federated_language as fl
import numpy as np

from ray_fed.language import trees
from ray_fed.language.structs import Plain

Components: TypeAlias = Sequence[Plain]
"""The components of a value in the order of its type. Each is plain or `Stored`."""


def component_types(type_spec: fl.Type) -> list[fl.Type]:
    """Return the types of a value's components."""
    return trees.leaf_types(_unplaced(type_spec))


def split(value: Plain, type_spec: fl.Type) -> list[Plain]:
    """Return the components of a plain value, in the order of `component_types`."""
    return trees.leaves(value, _unplaced(type_spec))


def join(components: Iterable[Plain], type_spec: fl.Type) -> Plain:
    """Return the plain value that has these components."""
    return trees.nest(iter(components), _unplaced(type_spec))


def _unplaced(type_spec: fl.Type) -> fl.Type:
    """Replace the types of values that all clients share by their member types."""
    alone, _ = fl.framework.transform_type_postorder(type_spec, _member)
    return alone


def _member(type_spec: fl.Type) -> tuple[fl.Type, bool]:
    if isinstance(type_spec, fl.FederatedType) and type_spec.all_equal:
        return type_spec.member, True
    return type_spec, False


def to_containers(components: Components, type_spec: fl.Type) -> Any:
    """Put components, or any objects instead, into the Python containers of a type."""
    struct = trees.unflatten(iter(components), _unplaced(type_spec))
    alone, _ = fl.framework.transform_type_postorder(type_spec, _as_one)
    return fl.framework.type_to_py_container(struct, alone)


def _as_one(type_spec: fl.Type) -> tuple[fl.Type, bool]:
    """Replace the type of values that differ by client by the type of one tensor."""
    if isinstance(type_spec, fl.FederatedType) and not type_spec.all_equal:
        return fl.TensorType(np.int32), True
    return type_spec, False

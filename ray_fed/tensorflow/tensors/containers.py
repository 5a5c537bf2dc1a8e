"""Python containers of the tensors that an element of a sequence, or a value, has.

tf.data orders the tensors of an element by sorted names wherever the container is
a mapping. Sequences are therefore always bound as nested OrderedDicts and tuples
(the *canonical* containers), which every process derives from the type alone.
"""

import collections
from collections.abc import Mapping
from typing import Any, cast

import federated_language as fl

from ray_fed.language.structs import to_struct
from ray_fed.tensorflow.tensors import specs


def element_spec(element: fl.Type, *, canonical: bool = True) -> Any:
    """Return the structure of TensorSpecs of a sequence's element.

    Args:
        element: tensors, possibly in nested structures.
        canonical: in canonical containers; else in those that the type declares.
    """
    if isinstance(element, fl.TensorType):
        return specs.to_spec(element)
    if not isinstance(element, fl.StructType):
        raise TypeError(f"Expected elements made of tensors, found `{element}`.")
    members = [
        (name, element_spec(member, canonical=canonical))
        for name, member in element.items()
    ]
    return build_container(members, None if canonical else element.python_container)


def build_container(
    elements: list[tuple[str | None, Any]], container: type[Any] | None
) -> Any:
    """Return elements in a container; by default OrderedDict with names, else tuple.

    Raises:
        TypeError: some elements have names and some have not.
    """
    names = [name for name, _ in elements if name is not None]
    if names and len(names) != len(elements):
        raise TypeError(
            f"Expected all elements or none to have names, found {len(names)} names"
            f" for {len(elements)} elements: TensorFlow has no container for that."
        )
    if container is None:
        container = collections.OrderedDict if names else tuple
    build: Any = container
    if not names:
        return build(value for _, value in elements)
    if issubclass(container, Mapping):
        return build(elements)
    return build(**dict(cast("list[tuple[str, Any]]", elements)))


def contains_unordered(element: fl.Type, found: fl.Type | None = None) -> bool:
    """Return whether containers order tensors unlike canonical ones do.

    Args:
        element: its names decide the canonical order.
        found: the same structure in the containers to look at; None: `element`.
    """
    found = element if found is None else found
    if not isinstance(element, fl.StructType) or not isinstance(found, fl.StructType):
        return False
    names = [name for name, _ in element.items()]
    container = found.python_container
    reorders = (
        None not in names
        and container is not None
        and not issubclass(container, Mapping)
        and names != sorted(cast("list[str]", names))
    )
    members = zip(element.items(), found.items(), strict=True)
    return reorders or any(contains_unordered(e, f) for (_, e), (_, f) in members)


def to_containers(value: Any, element: fl.Type, *, canonical: bool) -> Any:
    """Return a structure of tensors in the containers of its type."""
    if not isinstance(element, fl.StructType):
        return value
    members = zip(element.items(), to_struct(value), strict=True)
    return build_container(
        [
            (name, to_containers(member, member_type, canonical=canonical))
            for (name, member_type), member in members
        ],
        None if canonical else element.python_container,
    )

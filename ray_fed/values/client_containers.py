"""The values of many clients in the Python containers that their type declares.

federated_language takes some 30 us a tensor to pack a value, most of it to look at the
type. Here the type is looked at once for all clients.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import attrs
import federated_language as fl

from ray_fed.language.structs import Plain

Pack: TypeAlias = Callable[[Plain], Any]
"""From a plain value to what is made of it."""


def pack_members(
    members: Sequence[Plain], type_spec: fl.Type, pack: Callable[[Plain, fl.Type], Any]
) -> list[Any]:
    """Return plain values of one type in the containers of the type.

    Args:
        members: in any order, which stays.
        type_spec: of each.
        pack: does the same for one value, and checks that its type has containers.
    """
    if not members:
        return []
    first, *others = members
    pack_one = _build_pack(type_spec, pack)
    return [pack(first, type_spec), *map(pack_one, others)]


def _build_pack(type_spec: fl.Type, pack: Callable[[Plain, fl.Type], Any]) -> Pack:
    if isinstance(type_spec, fl.TensorType):
        return lambda plain: plain
    if not isinstance(type_spec, fl.StructType):
        return lambda plain: pack(plain, type_spec)
    names = [name or "" for name, _ in type_spec.items()]
    inside = [_build_pack(element, pack) for _, element in type_spec.items()]
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

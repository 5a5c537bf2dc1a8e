"""Walks through types that are nested structs, and through values of such types.

A leaf is a part of a type that is not a struct: a tensor, a sequence, a function or a
federated type. Leaves are in the order of the type.

    type                           <a=int32,b=<float32*,bool>>
    leaf_types                     [int32, float32*, bool]
    named_leaves                   ("a",) int32, ("b", 0) float32*, ("b", 1) bool
    value                          (1, ([2.0], True))
    leaves                         [1, [2.0], True]
    nest, of these leaves          (1, ([2.0], True))
    unflatten, of these leaves     <a=1,b=<[2.0],True>>

An argument with placements is walked with `is_leaf=is_unstructured`: a struct is taken
apart only if it has placed parts.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, cast

import federated_language as fl
import numpy as np

from ray_fed.language.structs import Struct
from ray_fed.language.type_checks import is_placed_struct

IsLeaf: TypeAlias = Callable[[fl.Type], bool]
"""Returns whether a type is a leaf, so that a walk does not take it apart. It must be
true for every type that is not a struct."""

Path: TypeAlias = tuple[str | int, ...]
"""The way from a type to a leaf in it, outermost first: the name of each element on the
way, or its index if it has no name."""


def is_no_struct(type_spec: fl.Type) -> bool:
    """Return whether a type is not a struct."""
    return not isinstance(type_spec, fl.StructType)


def is_unstructured(type_spec: fl.Type) -> bool:
    """Return whether a type is not a struct, or is a struct without placed parts."""
    return not is_placed_struct(type_spec)


def leaf_types(
    type_spec: fl.Type | None, is_leaf: IsLeaf = is_no_struct
) -> list[fl.Type]:
    """Return the types of all leaves. A type of None has no leaves."""
    if type_spec is None:
        return []
    if is_leaf(type_spec):
        return [type_spec]
    return [leaf for each in type_spec.children() for leaf in leaf_types(each, is_leaf)]


def named_leaves(type_spec: fl.Type, path: Path = ()) -> Iterator[tuple[Path, fl.Type]]:
    """Yield the path and the type of each leaf. `path` leads to `type_spec` itself."""
    if not isinstance(type_spec, fl.StructType):
        yield path, type_spec
        return
    for index, (name, element) in enumerate(type_spec.items()):
        yield from named_leaves(element, (*path, name or index))


def leaves(
    value: Any, type_spec: fl.Type | None, is_leaf: IsLeaf = is_no_struct
) -> list[Any]:
    """Return the leaves of a value in nested tuples or Structs, in the type's order."""
    if type_spec is None:
        return []
    if is_leaf(type_spec):
        return [value]
    pairs = zip(value, type_spec.children(), strict=True)
    return [leaf for pair in pairs for leaf in leaves(*pair, is_leaf)]


def flatten(value: Any) -> list[Any]:
    """Return the leaves of nested tuples or Structs, if no leaf is a tuple."""
    if type(value) is not tuple and not isinstance(value, Struct):
        return [value]
    return [leaf for each in cast("Any", value) for leaf in flatten(each)]


def unflatten(remaining: Iterator[Any], type_spec: fl.Type) -> Any:
    """Build a value of `type_spec` in nested Structs from the next leaves."""
    if not isinstance(type_spec, fl.StructType):
        return next(remaining)
    return Struct((name, unflatten(remaining, e)) for name, e in type_spec.items())


def nest(
    remaining: Iterator[Any], type_spec: fl.Type, is_leaf: IsLeaf = is_no_struct
) -> Any:
    """Build a value of `type_spec` in nested tuples from the next leaves."""
    if is_leaf(type_spec):
        return next(remaining)
    return tuple([nest(remaining, e, is_leaf) for e in type_spec.children()])


def map_leaves(
    function: Callable[[Any, Any], Any], value: Any, type_spec: fl.Type
) -> Any:
    """Return a value as nested Structs, with `function(leaf, leaf type)` as leaves."""
    if not isinstance(type_spec, fl.StructType):
        return function(value, type_spec)
    return Struct(
        (name, map_leaves(function, member, element))
        for (name, element), member in zip(type_spec.items(), value, strict=True)
    )


def map_types(function: Callable[[Any], fl.Type], type_spec: fl.Type) -> fl.Type:
    """Return a type with `function(leaf)` for each leaf, in the same containers."""
    if not isinstance(type_spec, fl.StructType):
        return function(type_spec)
    elements = [(name, map_types(function, e)) for name, e in type_spec.items()]
    if type_spec.python_container is None:
        return fl.StructType(elements)
    return fl.StructWithPythonType(elements, type_spec.python_container)


def count_bytes(type_spec: fl.Type) -> int | None:
    """Return the number of bytes of a value, or None if its type does not decide it."""
    num_bytes = 0
    for leaf in leaf_types(type_spec):
        dtype, shape = getattr(leaf, "dtype", np.str_), getattr(leaf, "shape", None)
        if shape is None or None in shape or np.dtype(dtype).type is np.str_:
            return None
        num_bytes += np.dtype(dtype).itemsize * math.prod(shape)
    return num_bytes

"""Converts Python containers to structs: federated_language's tuples, named or not."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import attrs
import federated_language as fl
from federated_language.common_libs import structure

import ray_fed.errors as errors

_T = TypeVar("_T")


Struct = structure.Struct
"""The class that federated_language and executors use for struct values in Python."""


Plain = Any
"""A plain value: NumPy arrays in tuples and lists (`ray_fed.values.plain_values`)."""


def iter_elements(value: Struct[_T]) -> Iterator[tuple[str | None, _T]]:
    """Yield the name, or None, and the value of each element of a struct, in order."""
    return iter(structure.to_elements(value))


def to_struct(elements: object) -> Struct[Any]:
    """Return a container as a struct. Containers inside it stay as they are.

    Raises ValueMismatchError for an object that is not a container.
    """
    if isinstance(elements, Struct):
        return cast("Struct[Any]", elements)
    try:
        return structure.from_container(elements)
    except TypeError as error:
        raise errors.ValueMismatchError(
            "Expected a list, tuple, dict or struct of embedded values, found"
            f" {show(elements)}."
        ) from error


def struct_elements(
    value: object, type_spec: fl.StructType, label: str = "value"
) -> list[tuple[fl.Type, str, Any]]:
    """Return the elements of a Python container, in the order of its struct type.

    A mapping is matched with the type by name, and any other container by position.

    Args:
        value: A Struct, mapping, list, tuple, attrs object or dataclass.
        type_spec: The expected type.
        label: Name of `value` in error messages.

    Returns:
        For each element: its type, its name for error messages, and the element.

    Raises:
        ValueMismatchError: `value` is not a container, or the number or the names of
            its elements differ from the type.
    """
    names = [name for name, _ in type_spec.items()]
    found_names, elements = _container_items(value, type_spec, label)
    if isinstance(value, Mapping) and set(found_names) != set(names):
        raise _names_error(label, names, found_names)
    if len(elements) != len(names):
        raise errors.ValueMismatchError(
            f"Expected {label} to have {len(names)} elements as in `{type_spec}`,"
            f" found {len(elements)}{_advise(names, found_names)}."
        )
    if isinstance(value, Mapping):
        by_name = dict(zip(found_names, elements, strict=True))
        elements = [by_name[name] for name in names]
    elif any(f is not None and f != n for f, n in zip(found_names, names, strict=True)):
        raise _names_error(label, names, found_names)
    return [
        (element_type, _name_inside(label, str(name or index)), element)
        for index, ((name, element_type), element) in enumerate(
            zip(type_spec.items(), elements, strict=True)
        )
    ]


def _name_inside(label: str, name: str) -> str:
    if " of " not in label:
        return f"{label}.{name}"
    # A label with several words is "`path` of the argument", for example.
    path, is_nested, rest = label.partition("` of ")
    return f"{path}.{name}` of {rest}" if is_nested else f"`{name}` of {label}"


def _names_error(
    label: str, names: Sequence[str | None], actual: Sequence[object]
) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f"Expected {label} to have elements named {names}, found {list(actual)}"
        f"{_advise(names, actual)}."
    )


def _advise(names: Sequence[str | None], actual: Sequence[object]) -> str:
    # For example, a user passes a result in place of its state to `next`.
    for part, whole in (("state", "result"), ("weights", "state")):
        if part in actual and part not in names:
            return f": pass its `{part}`, such as `{whole}.{part}`"
    if {"weights", "round_index"} <= {*names}:
        return ": the state is the first argument, as in `next(state, data)`"
    return ""


def _container_items(
    value: object, type_spec: fl.StructType, label: str
) -> tuple[list[Any], list[Any]]:
    match value:
        case Struct():
            pairs = structure.to_elements(cast("Struct[Any]", value))
            return [name for name, _ in pairs], [element for _, element in pairs]
        case Mapping():
            mapping = cast("Mapping[Any, Any]", value)
            return list(mapping.keys()), list(mapping.values())
        case tuple() if hasattr(value, "_asdict"):
            items: dict[str, Any] = value._asdict()  # pyright: ignore[reportAttributeAccessIssue]
            return list(items), list(items.values())
        case list() | tuple():
            elements = list(cast("Iterable[Any]", value))
            return [None] * len(elements), elements
        case _ if attrs.has(type(value)):
            items = attrs.asdict(cast("Any", value), recurse=False)
            return list(items), list(items.values())
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [field.name for field in dataclasses.fields(value)]
            return list(fields), [getattr(value, name) for name in fields]
        case _:
            raise errors.ValueMismatchError(
                f"Expected {label} to be a container of `{type_spec}`, found"
                f" {show(value)}."
            )


def show(value: object) -> str:
    """Return the text of a value and its Python type for an error message, cut."""
    return f"`{errors.describe(value)}` of Python type `{type(value).__name__}`"


def is_raw_memory(value: object) -> bool:
    """Return whether an object is raw memory without a dtype.

    Examples are bytes, bytearray, memoryview, mmap, array.array and ctypes arrays.
    NumPy would read their bytes as numbers. NumPy arrays and tensors have a dtype.
    """
    if hasattr(value, "dtype"):
        return False
    try:
        memoryview(cast("Any", value)).release()
    except TypeError:
        return False
    return True

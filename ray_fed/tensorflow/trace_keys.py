"""Hashes functions of ray_fed, as keys for the cache of their graphs.

Functions with equal hashes trace the same graph. The hash covers a function's name and
bytecode, and the values in its closure and defaults. For the code of ray_fed and Keras
that the function calls, the cache has a folder for each version
(`ray_fed.tensorflow.graphs.kept_graphs`). A function that contains code or objects of a
user has no hash, and is traced each time. The values of `Number`s are not part of the
hash, because a graph takes them as inputs.
"""

import functools
import hashlib
import importlib
import inspect
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import federated_language as fl
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config  # no public name

from ray_fed.language import blocks
from ray_fed.tensorflow.traced_graph import Number

_KNOWN_MODULES = (
    *("ray_fed.", "builtins", "collections", "federated_language.", "keras."),
    *("numpy", "tensorflow."),
)
_PLAIN_CLASSES = ("__keras_tensor__", "__numpy__", "__tensor__", "__tuple__")
"""Names of classes in a Keras config that stand for plain values."""

_LONGEST_ARRAY = 64
"""Maximum elements of an array that is part of a hash."""


class UndescribedError(Exception):
    """The error for a value that no hash can cover, such as a user's object."""


@runtime_checkable
class Described(Protocol):
    """An object whose graphs depend on some of its values only."""

    def describe_for_graphs(self) -> Any:
        """Return the values on which graphs depend that use this object."""
        ...


def find_key(
    function: Any, parameter: fl.Type | None, *others: Any
) -> tuple[str, list[Number]] | None:
    """Return a hash of the graph that a function traces, and the function's `Number`s.

    `parameter` is the type of its argument, and `others` are other values on which the
    graph depends. The result is None if the hash cannot cover a value.
    """
    import keras

    numbers: list[Number] = []
    settings = (
        keras.config.floatx(),
        keras.config.epsilon(),
        keras.config.image_data_format(),
        keras.config.dtype_policy().name,
        keras.config.is_flash_attention_enabled(),
        tf.config.functions_run_eagerly(),
        config.is_op_determinism_enabled(),
        len(tf.config.list_physical_devices("GPU")) > 0,
    )
    try:
        described = _describe([function, parameter, *others], numbers)
    except Exception:  # noqa: BLE001 (such as one of a property; it is traced)
        return None
    content = repr((described, settings)).encode()
    return hashlib.sha256(content).hexdigest(), numbers


def _describe(value: Any, numbers: list[Number]) -> Any:
    def describe(part: Any) -> Any:
        return _describe(part, numbers)

    match value:
        case None | bool() | int() | float() | str() | bytes():
            return type(value).__name__, value
        case Number():
            if value not in numbers:
                numbers.append(value)
            return "number", numbers.index(value)
        case np.ndarray() | np.generic() if np.size(value) <= _LONGEST_ARRAY:
            return str(value.dtype), np.shape(value), np.asarray(value).tobytes()
        case tf.DType() | np.dtype():
            return str(value)
        case tf.TensorSpec():
            return str(value.shape), value.dtype.name, value.name
        case list() | tuple():
            return _name(type(value)), [describe(each) for each in value]
        case Mapping():
            pairs = cast("Mapping[Any, Any]", value).items()
            return _name(type(value)), [(describe(k), describe(v)) for k, v in pairs]
        case type():
            return _name(value)
        case fl.Type():
            return _describe_type(value)
        case fl.framework.ConcreteComputation():
            content = hashlib.sha256(blocks.serialize_computation(value)).hexdigest()
            return content, _describe_type(value.type_signature)
        case set() | frozenset() if not value:
            return "no members"
        case types.MethodType():
            return describe(value.__func__), describe(value.__self__)
        case functools.partial():
            return [describe(each) for each in (value.func, value.args, value.keywords)]
        case types.FunctionType():
            return _describe_function(value, describe)
        case _ if hasattr(value, "__wrapped__"):  # by TensorFlow, for autograph
            return describe(inspect.unwrap(value))
        case Described():
            return _name(type(value)), describe(value.describe_for_graphs())
        case _ if type(value).__module__.startswith("ray_fed."):
            return _name(type(value)), describe(vars(value))
        case _ if type(value).__module__.startswith("keras."):
            return describe_keras(value), describe(settings_of(value))
        case _:
            raise UndescribedError(str(type(value)))


def _describe_function(function: Any, describe: Any) -> Any:
    unwrapped = inspect.unwrap(function)
    if unwrapped is not function:
        return describe(unwrapped)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = [function.__defaults__, function.__kwdefaults__]
    code = function.__code__
    return _name(function), code.co_code, code.co_names, describe(cells + defaults)


def _name(named: Any) -> str:
    module = str(named.__module__)
    if not module.startswith(_KNOWN_MODULES):
        raise UndescribedError(f"{module}.{named.__qualname__}")
    return f"{module}.{named.__qualname__}"


def _describe_type(type_spec: Any) -> Any:
    match type_spec:
        case fl.StructType():
            container = getattr(type_spec, "python_container", None)
            name = None if container is None else _name(container)
            return name, [(n, _describe_type(e)) for n, e in type_spec.items()]
        case fl.SequenceType():
            return "sequence", _describe_type(type_spec.element)
        case fl.FederatedType():
            return str(type_spec.placement), _describe_type(type_spec.member)
        case fl.FunctionType():
            return [
                _describe_type(type_spec.parameter),
                _describe_type(type_spec.result),
            ]
        case _:
            return str(type_spec)


def describe_keras(value: Any) -> Any:
    """Return the config of an object of Keras as text.

    Raises UndescribedError if the config contains code or objects of another package.
    """
    import keras

    # The config of a loss or metric has the name of its function, but not its module.
    function = getattr(value, "_fn", getattr(value, "fn", None))
    plain = _PLAIN_CLASSES
    if isinstance(function, types.FunctionType) and _name(function):
        plain = (*plain, "function")
    try:
        written: Any = keras.saving.serialize_keras_object(value)
    except Exception as error:  # a config may hold anything
        raise UndescribedError(str(error)) from error
    _check_config(written, plain)
    return repr(written)


def settings_of(value: Any, *, public: bool = False) -> dict[str, Any]:
    """Return the attributes of a Keras object by name, only public ones if `public`.

    They complete its config: for example, the config of `Huber` lacks `delta`.
    """
    named = {n: v for n, v in vars(value).items() if not (public and n.startswith("_"))}
    return {name: _without_keras(part) for name, part in named.items()}


def _without_keras(value: Any) -> Any:
    match value:
        case list() | tuple() | set() | frozenset():
            parts = cast("Sequence[Any]", value)
            return [_without_keras(part) for part in parts]
        case Mapping():
            pairs = cast("Mapping[Any, Any]", value).items()
            return [(_without_keras(k), _without_keras(v)) for k, v in pairs]
        case types.FunctionType() if str(value.__module__).startswith("keras."):
            return value.__qualname__  # `build`, for example, refers to its layer
        case _ if type(value).__module__.startswith("keras."):
            return type(value)
        case _:
            return value


def _check_config(written: Any, plain: Sequence[str]) -> None:
    if isinstance(written, Mapping):
        pairs = cast("Mapping[str, Any]", written)
        if "class_name" in pairs:
            module = pairs.get("module")
            is_own = isinstance(module, str) and module.startswith("keras")
            is_plain = pairs["class_name"] in plain
            if not (is_own or is_plain) or pairs["class_name"] == "__lambda__":
                raise UndescribedError(str(pairs["class_name"]))
        for each in pairs.values():
            _check_config(each, plain)
    elif isinstance(written, list | tuple):
        for each in cast("list[Any]", written):
            _check_config(each, plain)


def containers_of(type_spec: fl.Type) -> Iterator[str]:
    """Yield "module:name" of the container of each struct in a type, or "" for none."""
    match type_spec:
        case fl.StructType():
            container = getattr(type_spec, "python_container", None)
            named = (
                f"{container.__module__}:{container.__qualname__}" if container else ""
            )
            yield named
            for _, element in type_spec.items():  # noqa: PERF102 (not a dictionary)
                yield from containers_of(element)
        case fl.SequenceType():
            yield from containers_of(type_spec.element)
        case _:
            pass


def with_containers(type_spec: Any, places: Iterator[str]) -> Any:
    """Return a type with the containers whose names `containers_of` yielded."""
    match type_spec:
        case fl.StructType():
            place = next(places)
            members = [(n, with_containers(e, places)) for n, e in type_spec.items()]
            if not place:
                return fl.StructType(members)
            module, name = place.split(":")
            container = operator.attrgetter(name)(importlib.import_module(module))
            return fl.StructWithPythonType(members, container)
        case fl.SequenceType():
            return fl.SequenceType(with_containers(type_spec.element, places))
        case _:
            return type_spec

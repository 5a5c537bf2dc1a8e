"""Arguments that are of their type, or that may not be."""

# pyright: reportUnknownLambdaType=false

import collections
import decimal
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

from ray_fed import errors
from tests.properties.malformed import (
    REFUSED,
    Case,
    Either,
    Expected,
    Place,
    Right,
    same,
)
from tests.properties.malformed_oracle import (
    NotOfTypeError,
    UnsureError,
    encode,
    expect,
)

INT, FLOAT = fl.TensorType(np.int32), fl.TensorType(np.float32)
VECTOR = fl.TensorType(np.int32, [3])
ROWS = fl.TensorType(np.float32, [None, 2])
PAIR = fl.StructType([("a", INT), ("b", fl.StructType([FLOAT, np.str_]))])

PARAMETERS: tuple[fl.Type, ...] = (
    INT, FLOAT, fl.TensorType(np.bool_), fl.TensorType(np.str_),
    fl.TensorType(np.uint8), fl.TensorType(np.float64), VECTOR, ROWS, PAIR,
    fl.StructType([INT, FLOAT]), fl.SequenceType(INT), fl.SequenceType(PAIR),
    fl.FederatedType(INT, fl.CLIENTS), fl.FederatedType(PAIR, fl.CLIENTS),
    fl.FederatedType(fl.SequenceType(FLOAT), fl.CLIENTS),
    fl.FederatedType(VECTOR, fl.SERVER),
)  # fmt: skip


def nested(depth: int, value: Any = 1) -> Any:
    """Return a value in so many lists."""
    for _ in range(depth):
        value = [value]
    return value


def cycle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


class Mute:
    """An object without a text."""

    def __repr__(self) -> str:  # pyright: ignore[reportImplicitOverride]
        raise RuntimeError("no text")


MAKERS: tuple[Callable[[], Any], ...] = (
    *(
        lambda value=value: value
        for value in (
            0, 1, -1, 255, 256, 2**24 + 1, 2**31, 2**63, 2**64, 10**400, 10**5000,
            True, False, 0.0, 1.5, -0.0, 1e300, math.nan, math.inf, 1j, None, "a",
            "\u00e9", "\ud800", "a\0", "", b"x", b"", bytearray(4), memoryview(b"1234"),
            ..., int, set[int](), frozenset({1}), range(3), [1, 2, 3], [1.0, 2.0, 3.0],
            [True, False, True], [[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0]], [], (),
            {}, {"a": 1}, {"a": 1, "b": (1.5, "x")}, {"a": 1, "b": (1.5, "x"), "c": 2},
            {1: 2}, (1, 1.5), (1, (1.5, "x")), ["a", "b"], [None, None, None], [1, [2]],
            decimal.Decimal(1), slice(1), "123", 2**53 + 1,
        )
    ),
    *(
        lambda value=value: value
        for value in (
            np.int32(3), np.int64(3), np.uint8(3), np.float32(1.5), np.float64(1.5),
            np.bool_(True), np.str_("a"), np.bytes_(b"a"), np.datetime64("2020"),
            np.array([1, 2, 3], np.int32), np.array([1, 2, 3]), np.array(3, np.int32),
            np.array([[1, 2]], np.float32), np.array([[1, 2]], np.float64),
            np.zeros((0, 2), np.float32), np.array([None]), np.array(["a"]),
            np.array(b"a"), np.zeros(2, "V4"), np.zeros(1, [("a", "i4")]),
        )
    ),
    lambda: np.ma.masked_equal(np.array([1, 2, 3], np.int32), 2),
    lambda: tf.constant(3), lambda: tf.constant([1, 2, 3]), lambda: tf.constant("a"),
    lambda: tf.ragged.constant([[1], [2, 3]]), lambda: tf.sparse.eye(2),
    lambda: tf.data.Dataset.range(3), lambda: tf.data.Dataset.range(3).repeat(),
    lambda: (i for i in range(3)), lambda: nested(40), lambda: nested(1_000),
    lambda: nested(100_000), cycle, object, lambda: (lambda: 1), Mute,
)  # fmt: skip
"""What makes each of the values that stand in another's place."""


def _right_value(generator: random.Random, type_spec: Any) -> Any:
    """Return a value that users write for a type."""
    match type_spec:
        case fl.StructType():
            pairs = [
                (name, _right_value(generator, each))
                for name, each in type_spec.items()
            ]
            if pairs[0][0] is None:
                return tuple(value for _, value in pairs)
            return dict(generator.sample(pairs, len(pairs)))
        case fl.SequenceType():
            count = generator.randrange(4)
            return [_right_value(generator, type_spec.element) for _ in range(count)]
        case fl.FederatedType() if not type_spec.all_equal:
            count = generator.randrange(1, 4)
            return [_right_value(generator, type_spec.member) for _ in range(count)]
        case fl.FederatedType():
            return _right_value(generator, type_spec.member)
        case _:
            shape = type_spec.shape or ()
            dtype = np.dtype(type_spec.dtype)
            if dtype.kind == "U":
                return generator.choice(["", "a", "\u00e9", b"\0"])
            sizes = [2 if size is None else size for size in shape]
            found = np.array(generator.randrange(2), dtype)
            return np.full(sizes, found)[()] if sizes else found.item()


def _replaced(generator: random.Random, value: Any) -> Any:
    """Return a value with another one in the place of it or of a part."""
    if isinstance(value, dict) and generator.random() < 0.7:
        name = generator.choice(list(value))
        return {**value, name: _replaced(generator, value[name])}
    if isinstance(value, list | tuple) and value and generator.random() < 0.7:
        index = generator.randrange(len(value))
        items = list(value)
        items[index] = _replaced(generator, items[index])
        return type(value)(items)
    return generator.choice(MAKERS)()


def arguments(generator: random.Random, place: Place) -> Iterator[Case]:
    """Yield calls of the identity of every type with what may not be of it."""
    identities = [
        (spec, fl.federated_computation(lambda x: x, spec)) for spec in PARAMETERS
    ]
    while True:
        type_spec, comp = generator.choice(identities)
        value = _right_value(generator, type_spec)
        if generator.random() < 0.9:
            value = _replaced(generator, value)
        label = f"{type_spec}: {errors.describe(value)}"
        run = lambda comp=comp, value=value: place.context.invoke(comp, value)  # noqa: E731
        yield Case("argument", label, run, _expected(value, type_spec))


def _expected(value: Any, type_spec: fl.Type) -> Expected:
    try:
        return Right(expect(value, type_spec))
    except (NotOfTypeError, RecursionError):
        return REFUSED
    except UnsureError:
        return Either(lambda found: _is_as_numpy(found, value, type_spec))


def _is_as_numpy(found: Any, value: Any, type_spec: fl.Type) -> bool:
    try:
        return same(found, _as_numpy(value, type_spec))
    except (TypeError, ValueError):
        return False


def _as_numpy(value: Any, type_spec: Any) -> Any:
    """Return what numpy makes of a value for whose kind the documents say nothing."""
    match type_spec:
        case fl.TensorType():
            dtype = np.dtype(type_spec.dtype)
            if isinstance(value, str | bytes):  # numpy drops NULs at the end
                return encode(value)
            array = np.asarray(value)
            if dtype.kind != "U":
                return array.astype(dtype, casting="same_kind")[()]
            return array.astype("S")[()] if array.ndim else encode(array.item())
        case fl.StructType():
            names = [name for name, _ in type_spec.items()]
            is_named = isinstance(value, dict)
            items = [value[name] for name in names] if is_named else value
            pairs = zip(type_spec.items(), items, strict=True)
            found = [(name, _as_numpy(item, each)) for (name, each), item in pairs]
            if found[0][0] is None:
                return [item for _, item in found]
            return collections.OrderedDict(found)
        case fl.SequenceType():
            return [_as_numpy(item, type_spec.element) for item in value]
        case fl.FederatedType() if not type_spec.all_equal:
            return [_as_numpy(item, type_spec.member) for item in value]
        case _:
            return _as_numpy(value, type_spec.member)

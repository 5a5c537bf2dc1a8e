"""Computations with arguments and results that NumPy computes.

The tests run each case on every executor stack (`executors/test_contract`) and in every
context (`contexts/test_cases`).
"""

# pyright: reportUnknownLambdaType=false

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import federated_language as fl
import numpy as np
import tensorflow as tf

from ray_fed import tensorflow as rtf

flf = fl.framework
federated_computation = cast("Callable[..., Any]", fl.federated_computation)


class Point(NamedTuple):
    z: Any
    a: Any


def at_clients(member: Any, *, all_equal: bool = False) -> fl.FederatedType:
    return fl.FederatedType(member, fl.CLIENTS, all_equal=all_equal)


def at_server(member: Any) -> fl.FederatedType:
    return fl.FederatedType(member, fl.SERVER)


FLOAT = at_clients(np.float32)
INT = at_clients(np.int32)
TEXT = at_clients(np.str_)
SERVER_FLOAT = at_server(np.float32)
VECTOR = at_clients(fl.TensorType(np.float32, (2,)))
MODEL = collections.OrderedDict(
    w=fl.TensorType(np.float32, (2,)), b=[np.float32, np.int32]
)
FLOATS_MODEL = collections.OrderedDict(
    w=fl.TensorType(np.float32, (2,)), b=[np.float32, np.float64]
)
MODELS = at_clients(MODEL)
ALL_EQUAL = at_clients(np.float32, all_equal=True)
INTEGERS = fl.StructType([("a", fl.TensorType(np.int32, (2,))), ("b", np.int64)])
EMPTY = fl.StructType([])
HOLLOW_FLOAT = fl.TensorType(np.float32, (0, 3))
HOLLOW_INT = fl.TensorType(np.int32, (2, 0))
HOLLOW = fl.StructType([HOLLOW_INT, fl.TensorType(np.float32, (0,))])
SEQUENCE = at_clients(fl.SequenceType(np.int32))
POINTS = at_clients(fl.SequenceType(Point(np.int32, np.int32)))


@rtf.computation(np.float32)
def double(x: Any) -> Any:
    return 2 * x


@rtf.computation(np.float32, np.float32)
def add(x: Any, y: Any) -> Any:
    return x + y


@rtf.computation(np.float32)
def square(x: Any) -> Any:
    return x * x * tf.constant(1.1)


@rtf.computation(np.int32)
def name_of(x: Any) -> Any:
    return tf.strings.as_string(x)


@rtf.computation(np.float32)
def to_point(x: Any) -> Any:
    return Point(z=x, a=-x)


@rtf.computation(np.int32)
def increment(x: Any) -> Any:
    return x + 1


@rtf.computation(np.int32, np.int32)
def add_ints(x: Any, y: Any) -> Any:
    return x + y


@rtf.computation(np.str_, np.str_)
def join(x: Any, y: Any) -> Any:
    return tf.strings.join([x, y])


@rtf.computation(np.str_)
def bracket(x: Any) -> Any:
    return tf.strings.join(["<", x, ">"])


@rtf.computation
def seven() -> Any:
    return np.float32(7)


@rtf.computation
def model() -> Any:
    return collections.OrderedDict(w=tf.constant([1.0, 2.0]), b=[3.0, 4])


@rtf.computation(fl.SequenceType(Point(np.int32, np.int32)))
def tens_and_ones(points: Any) -> Any:
    return points.reduce(0, lambda total, point: total + 10 * point.z + point.a)


@rtf.computation(fl.SequenceType(np.int32))
def longer(dataset: Any) -> Any:
    return dataset.concatenate(dataset.map(lambda x: 10 * x))


@rtf.computation(fl.TensorType(np.float32, (3,)), np.int32)
def gather(state: Any, key: Any) -> Any:
    return state[key]


@rtf.computation(np.float32)
def nothing_of(_: Any) -> Any:
    return ()


@rtf.computation(EMPTY)
def same_nothing(nothing: Any) -> Any:
    return nothing


@rtf.computation(EMPTY, np.float32)
def second(_: Any, y: Any) -> Any:
    return y


def plus_their_sum(x: Any) -> Any:
    return fl.federated_map(add, (x, fl.federated_broadcast(fl.federated_sum(x))))


def mean(values: Any) -> Any:
    return fl.federated_mean(values)


def weighted_mean(values: Any, weights: Any) -> Any:
    return fl.federated_mean(values, weights)


def numbers(num_clients: int) -> list[float]:
    return [float(n + 1) for n in range(num_clients)]


def ints(num_clients: int) -> list[int]:
    return [3 * n - 2 for n in range(num_clients)]


def texts(num_clients: int) -> list[str]:
    return [chr(ord("a") + n) for n in range(num_clients)]


def vectors(num_clients: int) -> list[list[float]]:
    return [[n + 0.5, -n * 1.0] for n in range(num_clients)]


def models(num_clients: int) -> list[Any]:
    return [{"b": [n + 0.25, n], "w": [n * 1.0, 2.0]} for n in range(num_clients)]


def sequences(num_clients: int) -> list[list[int]]:
    return [list(range(n)) for n in range(num_clients)]


def points(num_clients: int) -> list[list[Point]]:
    return [[Point(n, k) for k in range(n)] for n in range(num_clients)]


def integers(num_clients: int) -> list[Any]:
    return [{"a": [n - 5, 7 * n], "b": 2**40 - n} for n in range(num_clients)]


def hollows(num_clients: int) -> list[Any]:
    one = [np.zeros([2, 0], np.int32), np.zeros([0], np.float32)]
    return [one] * num_clients


@dataclasses.dataclass(frozen=True)
class Case:
    """A computation, its arguments, and its result as NumPy computes it.

    Attributes:
        make: Function that builds the computation.
        args: Function from a number of clients to the arguments.
        expected: Function from a number of clients to the result.
        needs_clients: Whether there is no result without clients.
    """

    make: Callable[[], Any]
    args: Callable[[int], tuple[Any, ...]]
    expected: Callable[[int], Any]
    needs_clients: bool = False


def of(fn: Callable[..., Any], *types: Any) -> Callable[[], Any]:
    return lambda: federated_computation(fn, *types)


def nothing(_: int) -> tuple[Any, ...]:
    return ()


def all_equal_map() -> Any:
    """Return a call of map_all_equal, which federated_language never makes itself."""
    block = flf.create_federated_map_all_equal(
        double.to_compiled_building_block(), flf.Reference("x", ALL_EQUAL)
    )
    return flf.ConcreteComputation.from_building_block(
        flf.Lambda("x", ALL_EQUAL, block)
    )


def all_equal_map_of_a_map() -> Any:
    function = double.to_compiled_building_block()
    argument = flf.Reference("x", at_server(np.float32))
    everywhere = flf.create_federated_broadcast(argument)
    once = flf.create_federated_map_all_equal(function, everywhere)
    return to_function(argument, flf.create_federated_map_all_equal(function, once))


def all_equal_map_of_a_lambda() -> Any:
    argument = flf.Reference("x", fl.StructType([ALL_EQUAL, np.float32]))
    value, captured = (flf.Selection(argument, index=index) for index in range(2))
    member = flf.Reference("member", captured.type_signature)
    sum_ = flf.Call(add.to_compiled_building_block(), flf.Struct([member, captured]))
    function = flf.Lambda(member.name, member.type_signature, sum_)
    return to_function(argument, flf.create_federated_map_all_equal(function, value))


def with_a_name() -> Any:
    """Return a call of a lambda. Argument and result are structures with a name."""
    named = at_clients([("a", np.float32)], all_equal=True)
    same = federated_computation(lambda x: x, named)

    @federated_computation(at_clients([np.float32], all_equal=True))
    def call(x: Any) -> Any:
        return same(x)

    return call


def value_of_an_argument(placement: Any) -> Any:
    """Return a call of federated_value without a literal.

    `fl.federated_value` would warn of this value.
    """
    member = fl.to_type(MODEL)
    block = flf.create_federated_value(flf.Reference("x", member), placement)
    return flf.ConcreteComputation.from_building_block(flf.Lambda("x", member, block))


def aggregate(
    clients: fl.FederatedType, partial: Any, zero: Callable[[], Any], *steps: Any
) -> Callable[[], Any]:
    """Return a function that makes an aggregation whose result is the merged partial.

    `clients` is the type of clients' values, `partial` is the type of a partial, and
    `zero` returns the first partial. `steps` are two TensorFlow functions, which
    accumulate and merge.
    """

    def make() -> Any:
        accumulate = rtf.computation(steps[0], partial, clients.member)
        merge = rtf.computation(steps[1], partial, partial)
        whole = rtf.computation(lambda x: x, partial)
        return federated_computation(
            lambda x: fl.federated_aggregate(x, zero(), accumulate, merge, whole),
            clients,
        )

    return make


def joined(x: Any, y: Any) -> Any:
    return tf.strings.join([x, y])


def merge_counts(x: Any, y: Any) -> Any:
    return collections.OrderedDict(
        total=x["total"] + y["total"], count=x["count"] + y["count"]
    )


def merge_names(x: Any, y: Any) -> Any:
    names = tf.strings.join([x["names"], y["names"]])
    return collections.OrderedDict(names=names, total=x["total"] + y["total"])


def modular_sum(member: Any, modulus: Any) -> Callable[[], Any]:
    """Return a function that makes a modular sum as TensorFlow Federated writes it."""

    def make() -> Any:
        clients = flf.Reference("x", at_clients(member))
        return to_function(clients, modular_call(clients, literals(modulus)))

    return make


def modular_call(clients: Any, modulus: Any) -> Any:
    result = at_server(clients.type_signature.member)
    parameter = [clients.type_signature, modulus.type_signature]
    uri, type_spec = "federated_secure_modular_sum", fl.FunctionType(parameter, result)
    return flf.Call(flf.Intrinsic(uri, type_spec), flf.Struct([clients, modulus]))


def literals(value: Any) -> Any:
    if isinstance(value, list):
        return flf.Struct([literals(member) for member in value])
    array = np.asarray(value)
    return flf.Literal(value, fl.TensorType(array.dtype.type, array.shape))


def computed_modulus() -> Any:
    argument = flf.Reference("x", fl.StructType([INT, np.int32]))
    clients, number = (flf.Selection(argument, index=index) for index in range(2))
    modulus = flf.Call(increment.to_compiled_building_block(), number)
    return to_function(argument, modular_call(clients, modulus))


def to_function(argument: Any, result: Any) -> Any:
    function = flf.Lambda(argument.name, argument.type_signature, result)
    return flf.ConcreteComputation.from_building_block(function)


def generic_arithmetic() -> Any:
    number = fl.TensorType(np.float32)
    pair = flf.Reference("x", fl.StructType([number, number]))
    operator = fl.FunctionType(pair.type_signature, number)
    uris = ["generic_plus", "generic_multiply", "generic_divide"]
    results = [flf.Call(flf.Intrinsic(uri, operator), pair) for uri in uris]
    return to_function(pair, flf.Struct(results))


def generic_zero(type_spec: Any) -> Any:
    function = flf.Lambda(None, None, flf.Intrinsic("generic_zero", type_spec))
    return flf.ConcreteComputation.from_building_block(function)


def from_generic_zero() -> Any:
    member = VECTOR.member
    clients = flf.Reference("x", VECTOR)
    plus = flf.Intrinsic("generic_plus", fl.FunctionType([member, member], member))
    zero, same = flf.Intrinsic("generic_zero", member), flf.create_identity(member)
    call = flf.create_federated_aggregate(clients, zero, plus, plus, same)
    return to_function(clients, call)


def shifted_aggregate() -> Any:
    @federated_computation(FLOAT, np.float32)
    def aggregate(values: Any, shift: Any) -> Any:
        accumulate = federated_computation(
            lambda x, y: add(add(x, shift), y), np.float32, np.float32
        )
        merge = federated_computation(lambda x, y: add(y, x), np.float32, np.float32)
        report = federated_computation(lambda x: (x, shift), np.float32)
        return fl.federated_aggregate(values, np.float32(0), accumulate, merge, report)

    return aggregate


CASES: Mapping[str, Case] = {
    "value of a literal at clients": Case(
        of(lambda: fl.federated_value(5, fl.CLIENTS)),
        nothing, lambda _: 5,
    ),
    "value of a literal at the server": Case(
        of(lambda: fl.federated_value(2.5, fl.SERVER)), nothing, lambda _: 2.5
    ),
    "value of an argument at clients": Case(
        lambda: value_of_an_argument(fl.CLIENTS),
        lambda _: (models(4)[3],), lambda _: models(4)[3],
    ),
    "value of an argument at the server": Case(
        lambda: value_of_an_argument(fl.SERVER),
        lambda _: (models(4)[3],), lambda _: models(4)[3],
    ),
    "eval at clients": Case(
        of(lambda: fl.federated_eval(seven, fl.CLIENTS)), nothing, lambda n: [7.0] * n
    ),
    "eval of a struct at clients": Case(
        of(lambda: fl.federated_eval(model, fl.CLIENTS)),
        nothing, lambda n: [{"w": [1.0, 2.0], "b": [3.0, 4]}] * n,
    ),
    "eval at the server": Case(
        of(lambda: fl.federated_eval(seven, fl.SERVER)), nothing, lambda _: 7.0
    ),
    "map": Case(
        of(lambda x: fl.federated_map(double, x), FLOAT),
        lambda n: (numbers(n),), lambda n: [2 * x for x in numbers(n)],
    ),
    "map of a map": Case(
        of(lambda x: fl.federated_map(double, fl.federated_map(double, x)), FLOAT),
        lambda n: (numbers(n),), lambda n: [4 * x for x in numbers(n)],
    ),
    "map to a named tuple": Case(
        of(lambda x: fl.federated_map(to_point, x), FLOAT),
        lambda n: (numbers(n),), lambda n: [Point(x, -x) for x in numbers(n)],
    ),
    "map of strings": Case(
        of(lambda x: fl.federated_map(bracket, x), TEXT),
        lambda n: (texts(n),), lambda n: [f"<{x}>".encode() for x in texts(n)],
    ),
    "map of sequences": Case(
        of(lambda x: fl.federated_map(tens_and_ones, x), POINTS),
        lambda n: (points(n),),
        lambda n: [sum(10 * p.z + p.a for p in c) for c in points(n)],
    ),
    "map to sequences": Case(
        of(lambda x: fl.federated_map(longer, x), SEQUENCE),
        lambda n: (sequences(n),),
        lambda n: [c + [10 * x for x in c] for c in sequences(n)],
    ),
    "map of two values": Case(
        of(lambda x, y: fl.federated_map(add, (x, y)), FLOAT, FLOAT),
        lambda n: (numbers(n), numbers(n)[::-1]), lambda n: [n + 1.0] * n,
    ),
    "map of a value that all clients have": Case(
        of(lambda x: fl.federated_map(double, x), ALL_EQUAL),
        lambda _: (3.0,), lambda n: [6.0] * n,
    ),
    "an all-equal value as it is": Case(
        of(lambda x: x, at_clients(MODEL, all_equal=True)),
        lambda _: (models(4)[3],), lambda _: models(4)[3],
    ),
    "all-equal values beside others": Case(
        of(
            lambda x, y: {
                "e": (fl.federated_broadcast(x), y["e"]), "c": y["c"], "s": x,
            },
            SERVER_FLOAT, {"c": FLOAT, "e": at_clients(EMPTY, all_equal=True)},
        ),
        lambda n: (3.0, {"e": (), "c": numbers(n)}),
        lambda n: {"e": [3.0, []], "c": numbers(n), "s": 3.0},
    ),
    "map of an all-equal value to one, twice": Case(
        all_equal_map_of_a_map,
        lambda _: (3.0,), lambda _: 12.0,
    ),
    "map of an all-equal value to one by a lambda": Case(
        all_equal_map_of_a_lambda,
        lambda _: (3.0, 4.0), lambda _: 7.0,
    ),
    "an all-equal value with other names": Case(
        with_a_name, lambda _: ([2.0],), lambda _: {"a": 2.0},
    ),
    "map of an all-equal value to one": Case(
        all_equal_map,
        lambda _: (3.0,), lambda _: 6.0,
    ),
    "map of a lambda": Case(
        of(
            lambda x: fl.federated_map(
                federated_computation(lambda v: {"d": double(v), "v": v}, np.float32), x
            ),
            FLOAT,
        ),
        lambda n: (numbers(n),),
        lambda n: [{"d": 2 * x, "v": x} for x in numbers(n)],
    ),
    "map of a lambda that captures": Case(
        of(
            lambda x, y: fl.federated_map(
                federated_computation(lambda v: add(v, y), np.float32), x
            ),
            FLOAT, np.float32,
        ),
        lambda n: (numbers(n), 100.0),
        lambda n: [x + 100 for x in numbers(n)],
    ),
    "apply": Case(
        of(lambda x: fl.federated_map(double, x), SERVER_FLOAT),
        lambda _: (3.0,), lambda _: 6.0,
    ),
    "apply of a lambda that captures": Case(
        of(
            lambda x, y: fl.federated_map(
                federated_computation(lambda v: (add(v, y), y), np.float32), x
            ),
            SERVER_FLOAT, np.float32,
        ),
        lambda _: (3.0, 4.0), lambda _: (7.0, 4.0),
    ),
    "broadcast": Case(
        of(fl.federated_broadcast, at_server(MODEL)),
        lambda _: (models(4)[3],), lambda _: models(4)[3],
    ),
    "map of a broadcast": Case(
        of(lambda x: fl.federated_map(double, fl.federated_broadcast(x)), SERVER_FLOAT),
        lambda _: (3.0,), lambda n: [6.0] * n,
    ),
    "map of a broadcast beside a value": Case(
        of(
            lambda x, y: fl.federated_map(add, (fl.federated_broadcast(y), x)),
            FLOAT, SERVER_FLOAT,
        ),
        lambda n: (numbers(n), 10.0), lambda n: [x + 10 for x in numbers(n)],
    ),
    "zip at clients": Case(
        of(lambda x, y: fl.federated_zip((x, y)), FLOAT, TEXT),
        lambda n: (numbers(n), texts(n)),
        lambda n: [
            (x, y.encode()) for x, y in zip(numbers(n), texts(n), strict=True)
        ],
    ),
    "zip of nested structures at clients": Case(
        of(lambda x, y: fl.federated_zip({"z": x, "a": [y, (x,)]}), FLOAT, MODELS),
        lambda n: (numbers(n), models(n)),
        lambda n: [
            {"z": x, "a": [y, (x,)]}
            for x, y in zip(numbers(n), models(n), strict=True)
        ],
    ),
    "zip of what all clients have": Case(
        of(
            lambda x, y: fl.federated_zip((x, fl.federated_broadcast(y))),
            FLOAT, SERVER_FLOAT,
        ),
        lambda n: (numbers(n), 9.0), lambda n: [(x, 9.0) for x in numbers(n)],
    ),
    "zip at the server": Case(
        of(
            lambda x, y: fl.federated_zip({"z": x, "a": (y, [x])}),
            SERVER_FLOAT, at_server(MODEL),
        ),
        lambda _: (3.0, models(2)[1]),
        lambda _: {"z": 3.0, "a": (models(2)[1], [3.0])},
    ),
    "sum": Case(
        of(fl.federated_sum, FLOAT),
        lambda n: (numbers(n),), lambda n: sum(numbers(n)),
    ),
    "sum of ints": Case(
        of(fl.federated_sum, INT),
        lambda n: (ints(n),), lambda n: sum(ints(n)),
    ),
    "sum of vectors": Case(
        of(fl.federated_sum, VECTOR),
        lambda n: (vectors(n),),
        lambda n: np.sum(vectors(n), axis=0) if n else [0.0, 0.0],
    ),
    "sum of structures": Case(
        of(fl.federated_sum, MODELS),
        lambda n: (models(n),),
        lambda n: {
            "w": [sum(range(n)), 2.0 * n],
            "b": [sum(range(n)) + 0.25 * n, sum(range(n))],
        },
    ),
    "sum of what all clients have": Case(
        of(lambda x: fl.federated_sum(fl.federated_broadcast(x)), SERVER_FLOAT),
        lambda _: (3.0,), lambda n: 3.0 * n,
    ),
    "mean": Case(
        of(mean, FLOAT),
        lambda n: (numbers(n),), lambda n: np.mean(numbers(n)), needs_clients=True,
    ),
    "mean of structures": Case(
        of(mean, at_clients(FLOATS_MODEL)),
        lambda n: ([{"w": [x, 2.0], "b": [0.5, x]} for x in numbers(n)],),
        lambda n: {"w": [np.mean(numbers(n)), 2.0], "b": [0.5, np.mean(numbers(n))]},
        needs_clients=True,
    ),
    "weighted mean": Case(
        of(weighted_mean, FLOAT, FLOAT),
        lambda n: (numbers(n), [2.0 ** k for k in range(n)]),
        lambda n: np.float32(
            np.average(numbers(n), weights=[2.0**k for k in range(n)])
        ),
        needs_clients=True,
    ),
    "weighted mean of structures by ints": Case(
        of(weighted_mean, at_clients(FLOATS_MODEL), INT),
        lambda n: (
            [{"w": [4.0 * x, 2.0], "b": [0.5, 4.0 * x]} for x in numbers(n)], [2] * n,
        ),
        lambda n: {
            "w": [4 * np.mean(numbers(n)), 2.0], "b": [0.5, 4 * np.mean(numbers(n))],
        },
        needs_clients=True,
    ),
    "sum of structures without elements": Case(
        of(fl.federated_sum, at_clients(EMPTY)),
        lambda n: ([()] * n,), lambda _: [],
    ),
    "sum of tensors without elements": Case(
        of(fl.federated_sum, at_clients(HOLLOW)),
        lambda n: (hollows(n),), lambda _: hollows(1)[0],
    ),
    "sum of a structure with and without elements": Case(
        of(fl.federated_sum, at_clients([EMPTY, HOLLOW, np.int32])),
        lambda n: ([((), hollow, 2) for hollow in hollows(n)],),
        lambda n: [[], hollows(1)[0], 2 * n],
    ),
    "mean of tensors without elements": Case(
        of(mean, at_clients(HOLLOW_FLOAT)),
        lambda n: ([np.zeros([0, 3], np.float32)] * n,), lambda _: [],
        needs_clients=True,
    ),
    "weighted mean of structures without elements": Case(
        of(weighted_mean, at_clients([EMPTY, HOLLOW_FLOAT]), FLOAT),
        lambda n: ([((), np.zeros([0, 3], np.float32))] * n, numbers(n)),
        lambda _: [[], []], needs_clients=True,
    ),
    "min of tensors without elements": Case(
        of(fl.federated_min, at_clients(HOLLOW_INT)),
        lambda n: ([np.zeros([2, 0], np.int32)] * n,), lambda _: [[], []],
    ),
    "max of structures without elements": Case(
        of(fl.federated_max, at_clients(EMPTY)),
        lambda n: ([()] * n,), lambda _: [],
    ),
    "secure sum of tensors without elements": Case(
        of(lambda x: fl.federated_secure_sum(x, 100), at_clients(HOLLOW_INT)),
        lambda n: ([np.zeros([2, 0], np.int32)] * n,), lambda _: [[], []],
    ),
    "aggregate to a structure without elements": Case(
        aggregate(FLOAT, EMPTY, tuple, lambda x, _: x, lambda x, _: x),
        lambda n: (numbers(n),), lambda _: [],
    ),
    "aggregate to a vector of strings": Case(
        aggregate(
            TEXT, fl.TensorType(np.str_, (2,)),
            rtf.computation(lambda: tf.constant(["", ""])), joined, joined,
        ),
        lambda n: (texts(n),), lambda n: ["".join(texts(n)).encode()] * 2,
    ),
    "aggregate to strings of any number": Case(
        aggregate(
            TEXT, fl.TensorType(np.str_, (None,)),
            rtf.computation(lambda: tf.zeros([0], tf.string)),
            lambda x, y: tf.concat([x, [y]], 0), lambda x, y: tf.concat([x, y], 0),
        ),
        lambda n: (texts(n),), lambda n: [text.encode() for text in texts(n)],
    ),
    "aggregate to a string beside a number": Case(
        aggregate(
            FLOAT, collections.OrderedDict(names=np.str_, total=np.float32),
            lambda: collections.OrderedDict(names="", total=0.0),
            lambda held, x: merge_names(held, {"names": "x", "total": x}), merge_names,
        ),
        lambda n: (numbers(n),),
        lambda n: {"names": b"x" * n, "total": sum(numbers(n))},
    ),
    "map of structures without elements": Case(
        of(lambda x: fl.federated_map(same_nothing, x), at_clients(EMPTY)),
        lambda n: ([()] * n,), lambda n: [[]] * n,
    ),
    "zip of structures without elements": Case(
        of(
            lambda x, y: fl.federated_zip((x, y)),
            at_clients(EMPTY), at_clients(HOLLOW),
        ),
        lambda n: ([()] * n, hollows(n)),
        lambda n: [[[], hollow] for hollow in hollows(n)],
    ),
    "a state without elements in a round": Case(
        of(
            lambda state, x: (
                fl.federated_sum(
                    fl.federated_map(second, (fl.federated_broadcast(state), x))
                ),
                state,
            ),
            at_server(EMPTY), FLOAT,
        ),
        lambda n: ((), numbers(n)), lambda n: (sum(numbers(n)), []),
    ),
    "sums in two stages": Case(
        of(
            lambda x: fl.federated_sum(plus_their_sum(fl.federated_map(double, x))),
            FLOAT,
        ),
        lambda n: (numbers(n),), lambda n: (n + 1) * 2.0 * sum(numbers(n)),
    ),
    "sums in two stages without elements": Case(
        of(
            lambda x: fl.federated_sum(
                fl.federated_map(second, (
                    fl.federated_broadcast(
                        fl.federated_sum(fl.federated_map(nothing_of, x))
                    ),
                    x,
                ))
            ),
            FLOAT,
        ),
        lambda n: (numbers(n),), lambda n: sum(numbers(n)),
    ),
    "min": Case(
        of(fl.federated_min, INT),
        lambda n: (ints(n)[::-1],), lambda n: min(ints(n), default=2**31 - 1),
    ),
    "max": Case(
        of(fl.federated_max, FLOAT),
        lambda n: (numbers(n),), lambda n: max(numbers(n), default=-np.inf),
    ),
    "min of structures": Case(
        of(fl.federated_min, MODELS),
        lambda n: (models(n),),
        lambda n: {
            "w": [0.0, 2.0] if n else [np.inf, np.inf],
            "b": [0.25, 0] if n else [np.inf, 2**31 - 1],
        },
    ),
    "aggregate": Case(
        of(
            lambda x: fl.federated_aggregate(x, np.float32(0), add, add, double), FLOAT
        ),
        lambda n: (numbers(n),), lambda n: 2 * sum(numbers(n)),
    ),
    "aggregate in client order": Case(
        of(lambda x: fl.federated_aggregate(x, "", join, join, bracket), TEXT),
        lambda n: (texts(n),), lambda n: f"<{''.join(texts(n))}>".encode(),
    ),
    "aggregate to another type": Case(
        aggregate(
            FLOAT, collections.OrderedDict(total=np.float32, count=np.int32),
            lambda: collections.OrderedDict(total=0.0, count=0),
            lambda held, x: merge_counts(held, {"total": x, "count": 1}), merge_counts,
        ),
        lambda n: (numbers(n),),
        lambda n: {"total": sum(numbers(n)), "count": n},
    ),
    "aggregate with lambdas that capture": Case(
        shifted_aggregate,
        lambda n: (numbers(n), 100.0),
        lambda n: (sum(numbers(n)) + 100 * n, 100.0),
    ),
    "secure sum": Case(
        of(lambda x: fl.federated_secure_sum(x, 100), INT),
        lambda n: (ints(n),), lambda n: sum(ints(n)),
    ),
    "secure sum of few bits": Case(
        of(lambda x: fl.federated_secure_sum_bitwidth(x, 8), INT),
        lambda n: ([k * k for k in range(n)],), lambda n: sum(k * k for k in range(n)),
    ),
    "secure modular sum": Case(
        modular_sum(np.int32, np.int32(7)),
        lambda n: (ints(n),), lambda n: int(np.sum(ints(n)) % 7),
    ),
    "secure modular sum of structures": Case(
        modular_sum(INTEGERS, [np.int32(3), np.int64(2**40 + 1)]),
        lambda n: (integers(n),),
        lambda n: {
            "a": np.sum([c["a"] for c in integers(n)] or [[0, 0]], axis=0) % 3,
            "b": sum(c["b"] for c in integers(n)) % (2**40 + 1),
        },
    ),
    "secure modular sum of structures by one modulus": Case(
        modular_sum(INTEGERS, np.int32(5)),
        lambda n: (integers(n),),
        lambda n: {
            "a": np.sum([c["a"] for c in integers(n)] or [[0, 0]], axis=0) % 5,
            "b": sum(c["b"] for c in integers(n)) % 5,
        },
    ),
    "secure modular sum by a modulus for each element": Case(
        modular_sum(
            fl.TensorType(np.int32, (2,)), np.array([3, 10], np.int32)
        ),
        lambda n: ([c["a"] for c in integers(n)],),
        lambda n: np.sum([c["a"] for c in integers(n)] or [[0, 0]], axis=0) % [3, 10],
    ),
    "secure modular sum near the largest integer": Case(
        modular_sum(np.int32, np.int32(2**31 - 1)),
        lambda n: ([2**31 - 2 - k for k in range(n)],),
        lambda n: sum(2**31 - 2 - k for k in range(n)) % (2**31 - 1),
    ),
    "secure modular sum of small unsigned integers": Case(
        modular_sum(np.uint8, np.int32(255)),
        lambda n: ([254 - k for k in range(n)],),
        lambda n: sum(254 - k for k in range(n)) % 255,
    ),
    "secure modular sum of tensors without elements": Case(
        modular_sum(HOLLOW_INT, np.int32(3)),
        lambda n: ([np.zeros([2, 0], np.int32)] * n,), lambda _: [[], []],
    ),
    "secure modular sum by a modulus that is computed": Case(
        computed_modulus,
        lambda n: (ints(n), 6), lambda n: int(np.sum(ints(n)) % 7),
    ),
    "aggregate from a generic zero": Case(
        from_generic_zero,
        lambda n: (vectors(n),),
        lambda n: np.sum(vectors(n), axis=0) if n else [0.0, 0.0],
    ),
    "generic sum, product and quotient": Case(
        generic_arithmetic,
        lambda _: (3.0, 4.0), lambda _: (7.0, 12.0, 0.75),
    ),
    "generic zero": Case(
        lambda: generic_zero(fl.StructType(MODEL)), nothing,
        lambda _: {"w": [0.0, 0.0], "b": [0.0, 0]},
    ),
    "select": Case(
        of(
            lambda keys, state: fl.federated_select(
                keys, fl.federated_value(2, fl.SERVER), state, gather
            ),
            at_clients(fl.TensorType(np.int32, (2,))),
            at_server(fl.TensorType(np.float32, (3,))),
        ),
        lambda n: ([[k % 3, 2] for k in range(n)], [0.0, 10.0, 20.0]),
        lambda n: [[10.0 * (k % 3), 20.0] for k in range(n)],
    ),
    "secure select": Case(
        of(
            lambda keys, state: fl.federated_secure_select(
                keys, fl.federated_value(2, fl.SERVER), state, gather
            ),
            at_clients(fl.TensorType(np.int32, (1,))),
            at_server(fl.TensorType(np.float32, (3,))),
        ),
        lambda n: ([[k % 3] for k in range(n)], [0.0, 10.0, 20.0]),
        lambda n: [[10.0 * (k % 3)] for k in range(n)],
    ),
    "sequence map": Case(
        of(lambda x: fl.sequence_map(increment, x), SEQUENCE),
        lambda n: (sequences(n),),
        lambda n: [[x + 1 for x in c] for c in sequences(n)],
    ),
    "sequence reduce": Case(
        of(
            lambda x: fl.sequence_reduce(
                x, fl.federated_value(5, fl.CLIENTS), add_ints
            ),
            SEQUENCE,
        ),
        lambda n: (sequences(n),),
        lambda n: [5 + sum(c) for c in sequences(n)],
    ),
    "sequence sum": Case(
        of(fl.sequence_sum, SEQUENCE),
        lambda n: (sequences(n),),
        lambda n: [sum(c) for c in sequences(n)],
    ),
    "sequence sum at the server": Case(
        of(fl.sequence_sum, at_server(fl.SequenceType(np.int32))),
        lambda _: ([1, 2, 3],), lambda _: 6,
    ),
    "sequence map without a placement": Case(
        of(lambda x: fl.sequence_map(increment, x), fl.SequenceType(np.int32)),
        lambda _: ([1, 2],), lambda _: [2, 3],
    ),
    "literals": Case(
        of(lambda: (10, 2.5, "x", {"b": True, "a": [np.int64(2**40)]})),
        nothing, lambda _: (10, 2.5, b"x", {"b": True, "a": [2**40]}),
    ),
    "a literal beside client values": Case(
        of(
            lambda x: fl.federated_map(add, (x, fl.federated_value(0.5, fl.CLIENTS))),
            FLOAT,
        ),
        lambda n: (numbers(n),), lambda n: [x + 0.5 for x in numbers(n)],
    ),
    "work without a placement": Case(
        of(lambda x, y: {"r": add(double(x), y), "x": x}, np.float32, np.float32),
        lambda _: (3.0, 4.0), lambda _: {"r": 10.0, "x": 3.0},
    ),
    "structures of placed and unplaced values": Case(
        of(
            lambda x: [x["c"], fl.federated_sum(x["c"]), (x["u"][0], x["u"][1])],
            {"c": FLOAT, "u": (np.int32, SERVER_FLOAT)},
        ),
        lambda n: ({"u": (7, 8.0), "c": numbers(n)},),
        lambda n: [numbers(n), sum(numbers(n)), (7, 8.0)],
    ),
    "a round with a state": Case(
        of(
            lambda state, x: (
                fl.federated_map(
                    add, (state, fl.federated_sum(fl.federated_map(add, (
                        x, fl.federated_broadcast(state)
                    ))))
                ),
                fl.federated_max(x),
            ),
            SERVER_FLOAT, FLOAT,
        ),
        lambda n: (10.0, numbers(n)),
        lambda n: (
            10 + sum(numbers(n)) + 10.0 * n, max(numbers(n), default=-np.inf),
        ),
    ),
    "client values as they are": Case(
        of(lambda x: x, at_clients(fl.StructType([MODEL, fl.SequenceType(np.int32)]))),
        lambda n: (list(zip(models(n), sequences(n), strict=True)),),
        lambda n: list(zip(models(n), sequences(n), strict=True)),
    ),
}  # fmt: skip


A_FEW = (
    "eval of a struct at clients",  # values that come from no argument
    "zip of nested structures at clients",  # structures and selections of them
    "weighted mean of structures by ints",  # sums and means
    "aggregate to another type",  # zero, accumulate, merge and report
    "secure sum",  # a check at each client
    "select",  # the server's value and each client's keys
    "a round with a state",  # broadcast, map, sum, maximum, and work at the server
    "structures of placed and unplaced values",  # the verbs of structures
)
"""One case of each family of intrinsics, and of each method of an executor.

A stack of three leaves and a context of `create_context` run every case. Other stacks
and contexts have the same parts, so they run only these cases.
"""


@functools.cache
def computation_of(name: str) -> Any:
    return CASES[name].make()


def simple(value: Any) -> Any:
    """Return nested lists and dicts of Python numbers, to compare with ==."""
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return {name: simple(member) for name, member in pairs}
    if isinstance(value, list | tuple):
        return [simple(member) for member in cast("list[Any]", value)]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value

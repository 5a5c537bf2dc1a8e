"""One contract for every stack: what numpy says, the same bits, the same errors.

A stack is a fixture that returns a function from a number of clients to an executor;
its name stands in `LOCAL_STACKS`, or it is the one on real Ray. What the documented
debugging stack may refuse (lambdas and sequence intrinsics at clients) is marked
`needs_lambdas`.
"""

# pyright: reportUnknownLambdaType=false

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import plain
from ray_fed import tensorflow as rtf
from ray_fed.cluster.direct import RayExecutorFactory
from ray_fed.executors import stack

flf = fl.framework
StackFor = Callable[..., flf.Executor]
Evaluate = Callable[..., Any]
federated_computation = cast("Callable[..., Any]", fl.federated_computation)


@pytest.fixture
def one_leaf(local_stack_for: StackFor) -> StackFor:
    return lambda num_clients: local_stack_for(num_clients, 1)


@pytest.fixture
def three_leaves(local_stack_for: StackFor) -> StackFor:
    return lambda num_clients: local_stack_for(num_clients, 3)


@pytest.fixture
def debugging(debugging_stack_for: StackFor) -> StackFor:
    return debugging_stack_for


@pytest.fixture
def debugging_in_pairs(debugging_stack_for: StackFor) -> StackFor:
    return lambda num_clients: debugging_stack_for(num_clients, clients_per_thread=2)


@pytest.fixture
def direct() -> Iterator[StackFor]:
    """Over one leaf that runs clients and server in the caller's own thread."""
    leaf = stack.leaf_stack()
    yield lambda num_clients: stack.local_stack(num_clients, [leaf], leaf)
    leaf.close()


@pytest.fixture
def on_ray(ray_executors: RayExecutorFactory) -> StackFor:
    return lambda num_clients: ray_executors.create_executor({fl.CLIENTS: num_clients})


LOCAL_STACKS = ["direct", "one_leaf", "three_leaves", "debugging", "debugging_in_pairs"]
ON_RAY = pytest.param("on_ray", marks=pytest.mark.ray)


@pytest.fixture(params=[*LOCAL_STACKS, ON_RAY])
def stack_for(request: pytest.FixtureRequest) -> StackFor:
    return request.getfixturevalue(request.param)


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


@dataclasses.dataclass(frozen=True)
class Case:
    """A computation, its arguments, and what numpy says of its result.

    Attributes:
        make: builds the computation.
        args: from a number of clients to the arguments.
        expected: from a number of clients to the result.
        needs_lambdas: the stack runs lambdas and sequence intrinsics.
        needs_clients: there is no result without clients.
    """

    make: Callable[[], Any]
    args: Callable[[int], tuple[Any, ...]]
    expected: Callable[[int], Any]
    needs_lambdas: bool = False
    needs_clients: bool = False


def of(fn: Callable[..., Any], *types: Any) -> Callable[[], Any]:
    return lambda: federated_computation(fn, *types)


def nothing(_: int) -> tuple[Any, ...]:
    return ()


def all_equal_map() -> Any:
    """Return a call of map_all_equal, which federated_language writes nowhere."""
    block = flf.create_federated_map_all_equal(
        double.to_compiled_building_block(), flf.Reference("x", ALL_EQUAL)
    )
    return flf.ConcreteComputation.from_building_block(
        flf.Lambda("x", ALL_EQUAL, block)
    )


def value_of_an_argument(placement: Any) -> Any:
    """Return a call of federated_value, which warns of all but literals."""
    member = fl.to_type(MODEL)
    block = flf.create_federated_value(flf.Reference("x", member), placement)
    return flf.ConcreteComputation.from_building_block(flf.Lambda("x", member, block))


def sum_and_count() -> Any:
    accumulator = collections.OrderedDict(total=np.float32, count=np.int32)

    @rtf.computation(accumulator, np.float32)
    def accumulate(partial: Any, x: Any) -> Any:
        return collections.OrderedDict(
            total=partial["total"] + x, count=partial["count"] + 1
        )

    @rtf.computation(accumulator, accumulator)
    def merge(x: Any, y: Any) -> Any:
        return collections.OrderedDict(
            total=x["total"] + y["total"], count=x["count"] + y["count"]
        )

    report = rtf.computation(lambda x: x, accumulator)
    zero = collections.OrderedDict(total=0.0, count=0)
    return federated_computation(
        lambda x: fl.federated_aggregate(x, zero, accumulate, merge, report), FLOAT
    )


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
        nothing, lambda _: 5, needs_clients=True,
    ),
    "value of a literal at the server": Case(
        of(lambda: fl.federated_value(2.5, fl.SERVER)), nothing, lambda _: 2.5
    ),
    "value of an argument at clients": Case(
        lambda: value_of_an_argument(fl.CLIENTS),
        lambda _: (models(4)[3],), lambda _: models(4)[3], needs_clients=True,
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
    "map of an all-equal value to one": Case(
        all_equal_map,
        lambda _: (3.0,), lambda _: 6.0, needs_clients=True,
    ),
    "map of a lambda": Case(
        of(
            lambda x: fl.federated_map(
                federated_computation(lambda v: {"d": double(v), "v": v}, np.float32), x
            ),
            FLOAT,
        ),
        lambda n: (numbers(n),),
        lambda n: [{"d": 2 * x, "v": x} for x in numbers(n)], needs_lambdas=True,
    ),
    "map of a lambda that captures": Case(
        of(
            lambda x, y: fl.federated_map(
                federated_computation(lambda v: add(v, y), np.float32), x
            ),
            FLOAT, np.float32,
        ),
        lambda n: (numbers(n), 100.0),
        lambda n: [x + 100 for x in numbers(n)], needs_lambdas=True,
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
        lambda _: (models(4)[3],), lambda _: models(4)[3], needs_clients=True,
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
        lambda n: (models(n),), lambda _: models(1)[0] | {"w": [0.0, 2.0]},
        needs_clients=True,
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
        sum_and_count,
        lambda n: (numbers(n),),
        lambda n: {"total": sum(numbers(n)), "count": n},
    ),
    "aggregate with lambdas that capture": Case(
        shifted_aggregate,
        lambda n: (numbers(n), 100.0),
        lambda n: (sum(numbers(n)) + 100 * n, 100.0), needs_lambdas=True,
    ),
    "secure sum": Case(
        of(lambda x: fl.federated_secure_sum(x, 100), INT),
        lambda n: (ints(n),), lambda n: sum(ints(n)),
    ),
    "secure sum of few bits": Case(
        of(lambda x: fl.federated_secure_sum_bitwidth(x, 8), INT),
        lambda n: ([k * k for k in range(n)],), lambda n: sum(k * k for k in range(n)),
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
    "sequence map": Case(
        of(lambda x: fl.sequence_map(increment, x), SEQUENCE),
        lambda n: (sequences(n),),
        lambda n: [[x + 1 for x in c] for c in sequences(n)], needs_lambdas=True,
    ),
    "sequence reduce": Case(
        of(
            lambda x: fl.sequence_reduce(
                x, fl.federated_value(5, fl.CLIENTS), add_ints
            ),
            SEQUENCE,
        ),
        lambda n: (sequences(n),),
        lambda n: [5 + sum(c) for c in sequences(n)], needs_lambdas=True,
    ),
    "sequence sum": Case(
        of(fl.sequence_sum, SEQUENCE),
        lambda n: (sequences(n),),
        lambda n: [sum(c) for c in sequences(n)], needs_lambdas=True,
    ),
    "sequence sum at the server": Case(
        of(fl.sequence_sum, at_server(fl.SequenceType(np.int32))),
        lambda _: ([1, 2, 3],), lambda _: 6, needs_lambdas=True,
    ),
    "sequence map without a placement": Case(
        of(lambda x: fl.sequence_map(increment, x), fl.SequenceType(np.int32)),
        lambda _: ([1, 2],), lambda _: [2, 3], needs_lambdas=True,
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


SUPPORTED = [
    pytest.param(
        stack_name,
        name,
        num_clients,
        id=f"{stack_name}-{name}-{num_clients} clients",
        marks=[pytest.mark.ray] * (stack_name == "on_ray"),
    )
    for stack_name in [*LOCAL_STACKS, "on_ray"]
    for name, case in CASES.items()
    for num_clients in (0, 1, 4)
    if not (case.needs_lambdas and stack_name.startswith("debugging"))
    and not (case.needs_clients and not num_clients)
]


@pytest.mark.claim(
    "debugging.13",
    "federating.01",
    "semantics.17",
    "semantics.55",
    "semantics.57",
    "semantics.58",
    "semantics.61",
)
@pytest.mark.parametrize(
    ("stack_for", "name", "num_clients"), SUPPORTED, indirect=["stack_for"]
)
def test_computes_what_numpy_says(
    stack_for: StackFor, evaluate: Evaluate, name: str, num_clients: int
) -> None:
    case, comp = CASES[name], computation_of(name)

    result = evaluate(stack_for(num_clients), comp, *case.args(num_clients))

    assert simple(result) == simple(case.expected(num_clients))
    plain.to_plain(result, comp.type_signature.result)  # the dtypes are the declared


@federated_computation(FLOAT, FLOAT, at_clients(MODEL))
def statistics(x: Any, w: Any, m: Any) -> Any:
    return {
        "sum": fl.federated_sum(x),
        "mean": fl.federated_mean(x),
        "weighted": fl.federated_mean(x, w),
        "models": fl.federated_sum(m),
        "squares": fl.federated_sum(fl.federated_map(square, x)),
        "aggregate": fl.federated_aggregate(x, np.float32(0.1), add, add, double),
    }


def bits(value: Any) -> Any:
    if isinstance(value, Mapping):
        members = cast("Mapping[str, Any]", value).values()
        return [bits(member) for member in members]
    if isinstance(value, list | tuple):
        return [bits(member) for member in cast("list[Any]", value)]
    return value.tobytes()


@pytest.mark.claim("semantics.60")
@pytest.mark.parametrize("stack_name", [*LOCAL_STACKS[1:], ON_RAY])
@pytest.mark.parametrize("num_clients", [1, 2, 13, 33])
def test_gives_the_same_bits_on_every_stack(
    request: pytest.FixtureRequest,
    evaluate: Evaluate,
    stack_name: str,
    num_clients: int,
) -> None:
    rng = np.random.default_rng(num_clients)
    x, w = rng.normal(size=(2, num_clients)).astype(np.float32)
    m = [
        {"w": rng.normal(size=2).astype(np.float32), "b": [np.float32(rng.normal()), k]}
        for k in range(num_clients)
    ]

    expected, found = (
        evaluate(
            request.getfixturevalue(name)(num_clients),
            statistics,
            list(x),
            list(abs(w)),
            m,
        )
        for name in ["direct", stack_name]
    )

    assert bits(found) == bits(expected)
    np.testing.assert_allclose(found["mean"], np.mean(x), rtol=1e-4, atol=1e-6)


@pytest.mark.claim("federating.34", "semantics.60")
def test_returns_results_in_client_order_when_the_first_is_slowest(
    stack_for: StackFor, evaluate: Evaluate
) -> None:
    @rtf.computation(np.int32)
    def count_down(x: Any) -> Any:
        steps = tf.while_loop(lambda n: n > 0, lambda n: [n - 1], [4000 // (x * x)])[0]
        return x + steps

    mapped = federated_computation(
        lambda x: (
            fl.federated_map(count_down, x),
            fl.federated_aggregate(
                fl.federated_map(name_of, x), "", join, join, bracket
            ),
        ),
        INT,
    )
    clients = list(range(1, 8))

    values, names = evaluate(stack_for(7), mapped, clients)

    assert values == clients
    assert names == b"<1234567>"


@rtf.computation(np.float32)
def positive(x: Any) -> Any:
    with tf.control_dependencies([tf.debugging.Assert(x > 0, ["not positive"])]):
        return tf.identity(x)


@rtf.computation(np.float32, np.float32)
def add_positive(x: Any, y: Any) -> Any:
    with tf.control_dependencies([tf.debugging.Assert(y > 0, ["not positive"])]):
        return x + y


class TestErrors:
    """Of the same class and words, and an executor that works afterwards."""

    @pytest.mark.claim("semantics.54")
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(of(mean, FLOAT), id="mean"),
            pytest.param(
                of(lambda x: fl.federated_mean(x, x), FLOAT), id="weighted mean"
            ),
        ],
    )
    def test_no_clients_have_no_mean(
        self, stack_for: StackFor, evaluate: Evaluate, make: Callable[[], Any]
    ) -> None:
        with pytest.raises(
            errors.CardinalityError, match="at least one client for federated_mean, fou"
        ):
            evaluate(stack_for(0), make(), [])

    @pytest.mark.claim("semantics.48")
    @pytest.mark.parametrize("length", [0, 2, 4])
    def test_the_wrong_number_of_clients(
        self, stack_for: StackFor, evaluate: Evaluate, length: int
    ) -> None:
        comp = computation_of("map")

        with pytest.raises(
            errors.CardinalityError, match=f"Expected 3 values .*, found {length}"
        ):
            evaluate(stack_for(3), comp, [1.0] * length)

    @pytest.mark.parametrize(
        "value",
        [
            pytest.param([1.0, "x"], id="another type"),
            pytest.param([1.0, np.float64(2)], id="another dtype"),
            pytest.param([1.0, [2.0]], id="another shape"),
            pytest.param(5.0, id="no list"),
        ],
    )
    def test_client_values_that_are_not_of_their_type(
        self, stack_for: StackFor, evaluate: Evaluate, value: Any
    ) -> None:
        with pytest.raises(errors.ValueMismatchError, match=r"^Expected "):
            evaluate(stack_for(2), computation_of("map"), value)

    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(of(lambda x: fl.federated_map(positive, x), FLOAT), id="map"),
            pytest.param(
                of(
                    lambda x: fl.federated_aggregate(
                        x, np.float32(0), add_positive, add, double
                    ),
                    FLOAT,
                ),
                id="accumulation",
            ),
        ],
    )
    def test_a_client_whose_work_fails_is_named(
        self, stack_for: StackFor, evaluate: Evaluate, make: Callable[[], Any]
    ) -> None:
        executor = stack_for(5)

        with pytest.raises(errors.ComputationError) as caught:
            evaluate(executor, make(), [1.0, 1.0, 1.0, -1.0, 1.0])

        message = re.sub(
            r"`\w+` \((\w+.py):\d+", r"`NAME` (\1:LINE", caught.value.message
        )
        assert message == (
            "The computation `NAME` (test_contract.py:LINE) raised"
            " InvalidArgumentError: assertion failed: [not positive]"
        )
        assert caught.value.location.client_index == 3
        assert evaluate(executor, computation_of("map"), [1.0] * 5) == [2.0] * 5

    @pytest.mark.claim("semantics.59")
    def test_a_value_above_the_bound_of_a_secure_sum(
        self, stack_for: StackFor, evaluate: Evaluate
    ) -> None:
        comp = computation_of("secure sum")

        with pytest.raises(errors.ComputationError, match=r"most 100 .*\[client 1[],]"):
            evaluate(stack_for(2), comp, [100, 101])

    def test_a_key_above_the_last(
        self, stack_for: StackFor, evaluate: Evaluate
    ) -> None:
        comp = computation_of("select")

        with pytest.raises(errors.ComputationError, match=r"max_key=2.*\[client 1[],]"):
            evaluate(stack_for(2), comp, [[0, 1], [3, 0]], [0.0, 1.0, 2.0])

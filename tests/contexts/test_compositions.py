"""Random compositions of intrinsics give what plain numpy says.

A program is a list of steps over values that are there already, each with the numpy
value that it stands for. TensorFlow computations come from a pool, traced once.
"""

# pyright: reportUnknownLambdaType=false

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_fed
import ray_fed.worker.stacks as stacks
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext
from tests.executor_calls import evaluate

import tensorflow as tf  # isort: skip

quick = settings(max_examples=50)

INT, FLOAT = fl.TensorType(np.int32), fl.TensorType(np.float32)
VECTOR = fl.TensorType(np.float32, [2])
LEAVES: dict[str, fl.TensorType] = {"int": INT, "float": FLOAT, "vector": VECTOR}

Member = str | tuple[Any, ...]
"""A key of LEAVES, or a tuple of such for a struct."""


def type_of(member: Member) -> fl.Type:
    if isinstance(member, str):
        return LEAVES[member]
    return fl.StructType([type_of(part) for part in member])


def numbers(kind: str, *values: float) -> Any:
    (value,) = values
    shape: Any = LEAVES[kind].shape or ()
    return np.full(shape, value, LEAVES[kind].dtype)[()]


UNARY: dict[str, Callable[[Any], Any]] = {
    "double": lambda x: x + x,
    "negate": lambda x: -x,
    "square": lambda x: x * x,
    "twice, then itself": lambda x: (x + x) - x * x,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "plus": lambda x, y: x + y,
    "minus": lambda x, y: x - y,
    "square plus": lambda x, y: x + y * y,
}
MAPS = {
    (name, kind): rtf.computation(fn, type_spec)
    for name, fn in UNARY.items()
    for kind, type_spec in LEAVES.items()
}
PAIRS = {
    (name, kind): rtf.computation(fn, type_spec, type_spec)
    for name, fn in BINARY.items()
    for kind, type_spec in LEAVES.items()
}

NUM_KEYS = 4
LAST_KEY = NUM_KEYS - 1


@rtf.computation(INT)
def keys_of(x: Any) -> Any:
    return tf.math.floormod(tf.stack([x, x + 1]), NUM_KEYS)


def rows_by(kind: str) -> tuple[Any, Any]:
    """Return what a key selects of a value at the server, and the sum of such rows."""
    type_spec = LEAVES[kind]
    zero = numbers(kind, 0)
    pick = rtf.computation(
        lambda state, key: state + tf.cast(key, state.dtype), type_spec, INT
    )
    add_up = rtf.computation(
        lambda rows: rows.reduce(tf.constant(zero), lambda held, row: held + row),
        fl.SequenceType(type_spec),
    )
    return pick, add_up


ROWS = {kind: rows_by(kind) for kind in LEAVES}


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of a program: at server, at clients (a list), or equal at all clients."""

    where: str
    member: Member
    expected: Any


@dataclasses.dataclass
class Program:
    """What a computation is built from: steps, and which values it returns."""

    num_clients: int
    arguments: list[Value]
    steps: list[Callable[[list[Any]], Any]]
    values: list[Value]
    results: list[int]

    def build(self) -> Any:
        places: dict[str, Callable[[fl.Type], fl.Type]] = {
            "server": lambda member: fl.FederatedType(member, fl.SERVER),
            "clients": lambda member: fl.FederatedType(member, fl.CLIENTS),
            "equal": lambda m: fl.FederatedType(m, fl.CLIENTS, all_equal=True),
        }
        types = [places[v.where](type_of(v.member)) for v in self.arguments]

        def body(arg: Any) -> Any:
            found = [arg[index] for index in range(len(types))]
            for step in self.steps:
                found.append(step(found))
            return tuple(found[index] for index in self.results)

        return fl.federated_computation(body, fl.StructType(types))


def at(expected: Any, where: str, fn: Callable[[Any], Any]) -> Any:
    return [fn(x) for x in expected] if where == "clients" else fn(expected)


def tree(member: Member, fn: Callable[..., Any], *values: Any) -> Any:
    """Apply a function to the leaves of values of a member."""
    if isinstance(member, str):
        return fn(*values)
    parts = zip(member, *values, strict=True)
    return tuple(tree(part, fn, *found) for part, *found in parts)


def kinds(member: Member) -> set[str]:
    if isinstance(member, str):
        return {member}
    return {kind for part in member for kind in kinds(part)}


def fold(value: Value, num_clients: int, fn: Callable[..., Any]) -> Any:
    members = value.expected if value.where == "clients" else None
    if members is None:
        members = [value.expected] * num_clients
    return tree(value.member, lambda *leaves: fn(np.stack(leaves)), *members)


class Composer:
    """Draws one step after another that fits the values that are there."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.num_clients = draw(st.integers(1, 6))
        self.values = [
            Value(where, kind, self.leaf(kind, where))
            for where, kind in [
                ("clients", "int"), ("clients", "float"), ("clients", "vector"),
                ("server", "int"), ("server", "float"), ("equal", "float"),
            ]
        ]  # fmt: skip
        weights = st.integers(1, 4).map(np.float32)
        self.weights = len(self.values)
        drawn = [draw(weights) for _ in range(self.num_clients)]
        self.values.append(Value("clients", "float", drawn))
        self.arguments = list(self.values)
        self.steps: list[Callable[[list[Any]], Any]] = []

    def leaf(self, kind: str, where: str) -> Any:
        number = st.integers(-8, 8)
        count = self.num_clients if where == "clients" else 1
        found = [numbers(kind, self.draw(number)) for _ in range(count)]
        return found if where == "clients" else found[0]

    def pick(self, fits: Callable[[Value], bool]) -> int | None:
        found = [index for index, value in enumerate(self.values) if fits(value)]
        return self.draw(st.sampled_from(found)) if found else None

    def add(self, value: Value, step: Callable[[list[Any]], Any]) -> None:
        self.values.append(value)
        self.steps.append(step)

    def apply(self) -> None:
        """federated_map or federated_apply, of one computation or of a lambda."""
        index = self.pick(lambda v: isinstance(v.member, str))
        assert index is not None
        value = self.values[index]
        name = self.draw(st.sampled_from(list(UNARY)))
        comp, fn = MAPS[name, str(value.member)], UNARY[name]
        if self.draw(st.booleans()):
            inner, once = comp, fn
            lambda_type = type_of(value.member)
            comp = fl.federated_computation(lambda x: inner(inner(x)), lambda_type)
            fn = lambda x: once(once(x))  # noqa: E731
        expected = at(value.expected, value.where, fn)
        self.add(
            dataclasses.replace(
                value, where=_mapped(value), expected=self._spread(value, expected)
            ),
            lambda found: fl.federated_map(comp, found[index]),
        )

    def _spread(self, value: Value, expected: Any) -> Any:
        return [expected] * self.num_clients if value.where == "equal" else expected

    def combine(self) -> None:
        """A computation of two arguments on a zipped pair."""
        left = self.pick(lambda v: isinstance(v.member, str) and v.where != "equal")
        assert left is not None
        first = self.values[left]
        right = self.pick(lambda v: (v.where, v.member) == (first.where, first.member))
        assert right is not None
        second = self.values[right]
        name = self.draw(st.sampled_from(list(BINARY)))
        comp, fn = PAIRS[name, str(first.member)], BINARY[name]
        expected = (
            [fn(x, y) for x, y in zip(first.expected, second.expected, strict=True)]
            if first.where == "clients"
            else fn(first.expected, second.expected)
        )
        self.add(
            Value(first.where, first.member, expected),
            lambda found: fl.federated_map(comp, (found[left], found[right])),
        )

    def zip(self) -> None:
        """federated_zip of two values of one placement, of any members."""
        left = self.pick(lambda v: v.where != "equal")
        assert left is not None
        first = self.values[left]
        right = self.pick(lambda v: v.where == first.where)
        assert right is not None
        second = self.values[right]
        pair: Any = (first.expected, second.expected)
        if first.where == "clients":
            pair = list(zip(*pair, strict=True))
        self.add(
            Value(first.where, (first.member, second.member), pair),
            lambda found: fl.federated_zip((found[left], found[right])),
        )

    def select(self) -> None:
        """An element of a federated struct."""
        index = self.pick(lambda v: not isinstance(v.member, str))
        if index is None:
            return
        value = self.values[index]
        position = self.draw(st.integers(0, len(value.member) - 1))
        expected = at(value.expected, value.where, lambda x: x[position])
        self.add(
            Value(
                _mapped(value), value.member[position], self._spread(value, expected)
            ),
            lambda found: found[index][position],
        )

    def broadcast(self) -> None:
        index = self.pick(lambda v: v.where == "server")
        assert index is not None
        value = self.values[index]
        self.add(
            dataclasses.replace(value, where="equal"),
            lambda found: fl.federated_broadcast(found[index]),
        )

    def reduce(self) -> None:
        """federated_sum, min or max, of any member."""
        index = self.pick(lambda v: v.where != "server")
        assert index is not None
        value = self.values[index]
        intrinsic, fn = self.draw(
            st.sampled_from(
                [
                    (fl.federated_sum, lambda x: x.sum(axis=0, dtype=x.dtype)),
                    (fl.federated_min, lambda x: x.min(axis=0)),
                    (fl.federated_max, lambda x: x.max(axis=0)),
                ]
            )
        )
        self.add(
            Value("server", value.member, fold(value, self.num_clients, fn)),
            lambda found: intrinsic(found[index]),
        )

    def mean(self) -> None:
        """federated_mean of floats, weighted or not."""
        index = self.pick(
            lambda v: v.where != "server" and "int" not in kinds(v.member)
        )
        assert index is not None
        value = self.values[index]
        weights = None
        if self.draw(st.booleans()):
            weights = np.asarray(self.values[self.weights].expected)

        def average(x: Any) -> Any:
            return np.average(x, axis=0, weights=weights).astype(np.float32)[()]

        self.add(
            Value("server", value.member, fold(value, self.num_clients, average)),
            lambda found: fl.federated_mean(
                found[index], None if weights is None else found[self.weights]
            ),
        )

    def aggregate(self) -> None:
        """federated_aggregate: the sum of squares, doubled."""
        index = self.pick(lambda v: v.where != "server" and isinstance(v.member, str))
        assert index is not None
        value = self.values[index]
        kind = str(value.member)

        def squares(x: Any) -> Any:
            return 2 * (x * x).sum(axis=0, dtype=x.dtype)

        self.add(
            Value("server", kind, fold(value, self.num_clients, squares)),
            lambda found: fl.federated_aggregate(
                found[index],
                numbers(kind, 0),
                PAIRS["square plus", kind],
                PAIRS["plus", kind],
                MAPS["double", kind],
            ),
        )

    def choose(self) -> None:
        """federated_select by keys that clients compute, and the sum of its rows."""
        index = self.pick(lambda v: (v.where, v.member) == ("clients", "int"))
        state = self.pick(lambda v: v.where == "server" and isinstance(v.member, str))
        assert index is not None
        assert state is not None
        of_server = self.values[state]
        kind = str(of_server.member)
        pick, add_up = ROWS[kind]

        def rows(x: Any) -> Any:
            keys = [x % NUM_KEYS, (x + np.int32(1)) % NUM_KEYS]
            return sum(of_server.expected + numbers(kind, key) for key in keys)

        def step(found: list[Any]) -> Any:
            largest = fl.federated_value(LAST_KEY, fl.SERVER)
            keys = fl.federated_map(keys_of, found[index])
            selected = fl.federated_select(keys, largest, found[state], pick)
            return fl.federated_map(add_up, selected)

        expected = [rows(x) for x in self.values[index].expected]
        self.add(Value("clients", kind, expected), step)

    def program(self) -> Program:
        steps: list[Callable[[], None]] = [
            self.apply, self.combine, self.zip, self.select, self.broadcast,
            self.reduce, self.mean, self.aggregate, self.choose,
        ]  # fmt: skip
        for step in self.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=8)):
            step()
        indices = st.integers(0, len(self.values) - 1)
        results = self.draw(st.lists(indices, min_size=1, max_size=4))
        return Program(
            self.num_clients, self.arguments, self.steps, self.values, results
        )


def _mapped(value: Value) -> str:
    """Where a result of federated_map of a value is."""
    return "clients" if value.where == "equal" else value.where


@st.composite
def programs(draw: st.DrawFn) -> Program:
    with np.errstate(over="ignore"):
        return Composer(draw).program()


def check(program: Program, run: Callable[[Any, Program, list[Any]], Any]) -> None:
    arguments = [value.expected for value in program.arguments]
    found = run(program.build(), program, arguments)

    largest = max(np.max(np.abs(leaf)) for v in program.values for leaf in leaves(v))
    for index, result in zip(program.results, found, strict=True):
        value = program.values[index]
        wanted = value.expected
        assert_close(result, wanted, value, float(largest))


def leaves(value: Value) -> list[Any]:
    members = value.expected if value.where == "clients" else [value.expected]
    collected: list[Any] = []
    for member in members:
        tree(value.member, lambda leaf: collected.append(np.float64(leaf)), member)
    return collected


def assert_close(found: Any, wanted: Any, value: Value, largest: float) -> None:
    if value.where == "clients":
        assert len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            tree(value.member, lambda x, y: leaf_close(x, y, largest), *pair)
    else:
        tree(value.member, lambda x, y: leaf_close(x, y, largest), found, wanted)


def leaf_close(found: Any, wanted: Any, largest: float) -> None:
    """Integers are equal; floats may differ by the rounding of the largest value."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if found.dtype.kind == "i":
        assert found.tolist() == wanted.tolist()
    else:
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * largest)


@pytest.fixture(scope="module")
def context() -> Iterator[ExecutionContext]:
    config = ray_fed.Config(backend="local", workers=2, subrounds=3, clients_per_leaf=2)
    with ray_fed.create_context(config) as built:
        yield built


@pytest.fixture(scope="module")
def threads() -> Iterator[list[Any]]:
    built = stacks.threaded_stacks(2)
    yield built
    for leaf in built:
        leaf.close()


def check_in_context(context: ExecutionContext, program: Program) -> None:
    check(program, lambda comp, _, args: context.invoke(comp, args))


def check_directly(threads: list[Any], program: Program) -> None:
    def run(comp: Any, program: Program, args: list[Any]) -> Any:
        executor = stacks.local_stack(program.num_clients, threads, threads[0], 2)
        return evaluate(executor, comp, args)

    check(program, run)


@quick
@given(program=programs())
def test_context(context: ExecutionContext, program: Program) -> None:
    check_in_context(context, program)


@quick
@given(program=programs())
def test_executor_stack(threads: list[Any], program: Program) -> None:
    check_directly(threads, program)

"""Random values of random federated types come back from wherever they are sent."""

# pyright: reportUnknownLambdaType=false

import asyncio
import collections
import pickle
from collections.abc import Iterator
from typing import Any

import federated_language as fl
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ray_fed.values.plain_values as plain_values
import ray_fed.worker.stacks as stacks
from ray_fed.executors.eager_tf import EagerTFExecutor

NUM_CLIENTS = 3
SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large]

quick = settings(max_examples=60, suppress_health_check=SLOW_TO_DRAW)
many = settings(max_examples=1000, suppress_health_check=SLOW_TO_DRAW)
fewer = settings(many, max_examples=500)


MAX_DEPTH = 4

_DTYPES: list[Any] = [
    np.bool_, np.int8, np.uint8, np.int16, np.int32, np.int64, np.float16, np.float32,
    np.float64, np.complex64, ml_dtypes.bfloat16, np.str_,
]  # fmt: skip
_SHAPES: list[Any] = [(), (), (0,), (3,), (None,), (2, 1), (None, 2)]
_NAMES = ("a", "b", "z", "c")

_tensors = st.builds(fl.TensorType, st.sampled_from(_DTYPES), st.sampled_from(_SHAPES))


def _structs(element: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(elements: list[Any], names: list[str] | None) -> fl.StructType:
        if names is None:
            return fl.StructType(elements)
        return fl.StructType(list(zip(names, elements, strict=False)))

    names = st.none() | st.permutations(_NAMES)
    return st.builds(build, st.lists(element, max_size=3), names)


def unplaced_types(
    depth: int = MAX_DEPTH, *, sequences: bool = True
) -> st.SearchStrategy[Any]:
    """Types of tensors, structures and sequences, nested at most so deep."""
    if depth <= 1:
        return _tensors
    kinds = [_tensors, _structs(unplaced_types(depth - 1, sequences=sequences))]
    if sequences:
        elements = unplaced_types(depth - 1, sequences=False).filter(_has_tensors)
        kinds.append(elements.map(fl.SequenceType))
    return st.one_of(kinds)


def _has_tensors(type_spec: fl.Type) -> bool:
    """Whether every part of a type has a tensor: a dataset cannot hold an empty one."""
    if isinstance(type_spec, fl.StructType):
        return len(type_spec) > 0 and all(_has_tensors(t) for _, t in type_spec.items())
    return True


def federated_types(depth: int = MAX_DEPTH) -> st.SearchStrategy[Any]:
    """Federated types, and structures of them, nested at most so deep."""
    placed = st.one_of(
        st.builds(fl.FederatedType, unplaced_types(depth - 1), st.just(fl.SERVER)),
        st.builds(
            lambda member, equal: fl.FederatedType(member, fl.CLIENTS, all_equal=equal),
            unplaced_types(depth - 1),
            st.booleans(),
        ),
    )
    if depth <= 2:
        return placed
    return placed | _structs(federated_types(depth - 1))


def values_of(type_spec: fl.Type, num_clients: int) -> st.SearchStrategy[Any]:
    """Values of a type, in the containers that results of the type have."""
    match type_spec:
        case fl.TensorType():
            return _arrays(type_spec)
        case fl.StructType():
            names = [name for name, _ in type_spec.items()]
            members = st.tuples(
                *(values_of(element, num_clients) for _, element in type_spec.items())
            )
            if names and names[0] is not None:
                return members.map(
                    lambda found: collections.OrderedDict(
                        zip(names, found, strict=True)
                    )
                )
            return members
        case fl.SequenceType():
            return st.lists(values_of(type_spec.element, num_clients), max_size=3)
        case fl.FederatedType() if not type_spec.all_equal:
            member = values_of(type_spec.member, num_clients)
            return st.lists(member, min_size=num_clients, max_size=num_clients)
        case fl.FederatedType():
            return values_of(type_spec.member, num_clients)
        case _:
            raise TypeError(f"Expected a type with values, found `{type_spec}`.")


@st.composite
def _arrays(draw: st.DrawFn, type_spec: fl.TensorType) -> Any:
    dims = type_spec.shape or ()
    shape = tuple(draw(st.integers(0, 3)) if dim is None else dim for dim in dims)
    dtype = np.dtype(type_spec.dtype)
    size = int(np.prod(shape, dtype=np.int64))
    if dtype.type is np.str_:
        items = draw(st.lists(st.binary(max_size=3), min_size=size, max_size=size))
        array = np.empty(size, object)
        array[:] = items
    else:
        data = draw(st.binary(min_size=size * 16, max_size=size * 16))
        array = _from_bytes(np.frombuffer(data, np.int64), size, dtype)
    return array.reshape(shape)[()]


def _from_bytes(words: Any, size: int, dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return words[:size] % 2 == 0
    if dtype.kind in "iu":
        return words[:size].astype(dtype)
    if dtype.kind == "c":
        parts = words[: 2 * size].astype(np.int32).astype(np.float32)
        return parts.view(dtype)
    return (words[:size].astype(np.int16) / 8).astype(dtype)


def are_same(left: Any, right: Any) -> bool:
    """Return whether two values have the same containers, dtypes, shapes and bits."""
    if isinstance(left, collections.OrderedDict):
        return are_same(list(left.items()), list(getattr(right, "items", list)()))
    if isinstance(left, list | tuple):
        is_like = type(left) is type(right) and len(left) == len(right)
        return is_like and all(
            are_same(*pair) for pair in zip(left, right, strict=True)
        )
    if isinstance(left, bytes | str):
        return left == right
    left, right = np.asarray(left), np.asarray(right)
    is_like = left.dtype == right.dtype and left.shape == right.shape
    return is_like and repr(left.tolist()) == repr(right.tolist())


async def embed_and_compute(executor: fl.framework.Executor, typed: Any) -> Any:
    value, type_spec = typed
    embedded = await executor.create_value(value, type_spec)
    computed = await embedded.compute()
    return fl.framework.type_to_py_container(computed, type_spec)


def typed_of(types: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return types.flatmap(
        lambda type_spec: st.tuples(
            values_of(type_spec, NUM_CLIENTS), st.just(type_spec)
        )
    )


unplaced = typed_of(unplaced_types())
placed = typed_of(federated_types())


@pytest.fixture(scope="module")
def leaf() -> Iterator[fl.framework.Executor]:
    executor = EagerTFExecutor()
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def federated() -> Iterator[fl.framework.Executor]:
    leaves = stacks.threaded_stacks(2)
    executor = stacks.local_stack(NUM_CLIENTS, leaves, leaves[0], 1)
    yield executor
    for built in (executor, *leaves):
        built.close()


def check_plain(typed: Any) -> None:
    value, type_spec = typed
    sent = plain_values.to_plain(value, type_spec)
    received = pickle.loads(pickle.dumps(sent))

    assert are_same(plain_values.from_plain(sent, type_spec), value)
    assert are_same(plain_values.from_plain(received, type_spec), value)


def check_executor(executor: fl.framework.Executor, typed: Any) -> None:
    found = asyncio.run(embed_and_compute(executor, typed))

    assert are_same(found, typed[0])


@quick
@given(unplaced | placed)
def test_plain_and_wire_form(typed: Any) -> None:
    check_plain(typed)


@quick
@given(typed=unplaced)
def test_leaf_executor(leaf: fl.framework.Executor, typed: Any) -> None:
    check_executor(leaf, typed)


@quick
@given(typed=placed)
def test_federated_stack(federated: fl.framework.Executor, typed: Any) -> None:
    check_executor(federated, typed)


@pytest.mark.slow
@pytest.mark.timeout(500)
@many
@given(unplaced | placed)
def test_many_plain_and_wire_forms(typed: Any) -> None:
    check_plain(typed)


@pytest.mark.slow
@pytest.mark.timeout(500)
@many
@given(typed=unplaced)
def test_leaf_executor_with_many(leaf: fl.framework.Executor, typed: Any) -> None:
    check_executor(leaf, typed)


@pytest.mark.slow
@pytest.mark.timeout(500)
@fewer
@given(typed=placed)
def test_federated_stack_with_many(
    federated: fl.framework.Executor, typed: Any
) -> None:
    check_executor(federated, typed)

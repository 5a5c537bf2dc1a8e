"""What TensorFlow Federated serialized runs here, to its own results."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import foreign_cases
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import framework
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext

FIXTURES = pathlib.Path(__file__).parent / "fixtures"

WITH_LAMBDAS_AT_CLIENTS = frozenset(
    ["fed_avg", "fed_sgd", "mime_lite", "fed_eval", "robust", "secure", "sequences"]
)
"""What the debugging stack refuses, as documented: its clients run TensorFlow alone."""

RTOL, ATOL = 1e-5, 1e-6
"""Two versions of TensorFlow, and two orders of summing clients."""


def load(name: str) -> tuple[dict[str, Any], list[Any]]:
    """Return a fixture's computations, by name, and TensorFlow Federated's results."""
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        computations = {
            key.removeprefix("computation/"): framework.deserialize_computation(
                arrays[key].tobytes()
            )
            for key in arrays.files
            if key.startswith("computation/")
        }
        count = len(arrays.files) - len(computations)
        return computations, [arrays[f"result/{index}"] for index in range(count)]


def check(name: str) -> None:
    """Run a fixture's case in the context that is current; compare every tensor."""
    computations, expected = load(name)

    results = foreign_cases.CASES[name](computations)

    found = list(foreign_cases.leaves(results))
    assert len(found) == len(expected) > 0
    for leaf, wanted in zip(found, expected, strict=True):
        if wanted.dtype.kind in "SU":
            assert leaf.astype("S").tolist() == wanted.astype("S").tolist()
        elif wanted.dtype.kind == "f":
            leaf = np.asarray(leaf, np.float64)  # noqa: PLW2901 (bfloat16 too)
            np.testing.assert_allclose(leaf, wanted, RTOL, ATOL)
        else:
            np.testing.assert_array_equal(leaf, wanted)
        assert leaf.shape == wanted.shape


@pytest.fixture
def debugging() -> Iterator[None]:
    factory = framework.thread_debugging_executor_factory()
    context = fl.framework.SyncExecutionContext(factory)
    fl.framework.set_default_context(context)
    yield
    for number in range(10):
        factory.clean_up_executor({fl.CLIENTS: number})
    factory.clean_up_executor({})


MANY_GRAPHS = {"fed_sgd", "fed_eval", "mime_lite"}
MANY_GRAPHS.update({"robust", "constant", "compressed", "secure"})
"""Fixtures that take a second or more; `fed_avg` is like them."""


def _slow_if_many(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.slow] * (name in MANY_GRAPHS))


@pytest.mark.parametrize("name", [_slow_if_many(n) for n in foreign_cases.CASES])
def test_fixture_runs_to_the_same_results(
    name: str, local_contexts: Callable[..., ExecutionContext]
) -> None:
    fl.framework.set_default_context(local_contexts(workers=2, subrounds=2))

    check(name)


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize(
    "name",
    [n for n in foreign_cases.CASES if n not in WITH_LAMBDAS_AT_CLIENTS | MANY_GRAPHS],
)
def test_fixture_runs_in_the_debugging_stack(name: str) -> None:
    check(name)


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize("name", sorted(WITH_LAMBDAS_AT_CLIENTS - MANY_GRAPHS))
def test_debugging_stack_says_that_it_refuses_lambdas(name: str) -> None:
    with pytest.raises(errors.UnsupportedError, match="write it as a TensorFlow"):
        check(name)


def _functions(name: str) -> dict[str, bytes]:
    """Return the library functions of a fixture's graphs, by name."""
    computations, _ = load(name)
    found: dict[str, bytes] = {}
    for computation in computations.values():
        graph_def = tf.compat.v1.GraphDef()
        computation.to_proto().tensorflow.graph_def.Unpack(graph_def)
        for function in graph_def.library.function:
            found[function.signature.name] = function.SerializeToString()
    return found


def test_fixtures_have_functions_of_one_name_and_two_bodies() -> None:
    one, other = _functions("control_flow"), _functions("same_names")

    assert any(one[name] != other[name] for name in one.keys() & other.keys())


def test_computation_comes_back_from_its_bytes() -> None:
    @rtf.computation(np.int32)
    def increment(x: Any) -> Any:
        return x + 1

    read = framework.deserialize_computation(framework.serialize_computation(increment))

    assert read.type_signature == increment.type_signature
    assert read == increment


def test_bytes_of_no_computation_are_refused() -> None:
    with pytest.raises(
        errors.CompileError, match="Expected the bytes of a serialized computation"
    ):
        framework.deserialize_computation(b"not a message")


def test_bytes_of_a_value_are_refused() -> None:
    literal = fl.framework.Literal(10, fl.TensorType(np.int32))

    with pytest.raises(errors.CompileError, match="found a value of type `int32`"):
        framework.deserialize_computation(literal.to_proto().SerializeToString())

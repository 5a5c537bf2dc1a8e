"""One contract for every stack: what numpy says, the same bits, the same errors.

A stack is a fixture that returns a function from a number of clients to an executor;
`RUN_BY` says which cases it runs. Errors are those of three leaves and of real Ray.
"""

# pyright: reportUnknownLambdaType=false

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf
from federated_language.compiler import intrinsic_defs

import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
import ray_fed.worker.stacks as stacks
from ray_fed import tensorflow as rtf
from ray_fed.cluster.direct import RayExecutorFactory
from ray_fed.compiler.expressions import called_uris
from ray_fed.language.intrinsics import FEDERATED_SECURE_MODULAR_SUM
from ray_fed.worker.debugging_factory import thread_debugging_executor_factory
from tests.contract_cases import (
    A_FEW,
    CASES,
    FLOAT,
    INT,
    MODEL,
    add,
    at_clients,
    bracket,
    computation_of,
    double,
    federated_computation,
    join,
    mean,
    name_of,
    of,
    simple,
    square,
)
from tests.executor_calls import evaluate

flf = fl.framework
IntrinsicDef = flf.IntrinsicDef
StackFor = Callable[..., flf.Executor]


@pytest.fixture(scope="module")
def debugging() -> Iterator[StackFor]:
    factory = thread_debugging_executor_factory(None)
    built: set[int] = set()

    def build(num_clients: int) -> flf.Executor:
        built.add(num_clients)
        return factory.create_executor({fl.CLIENTS: num_clients})

    yield build
    for num_clients in built:
        factory.clean_up_executor({fl.CLIENTS: num_clients})


@pytest.fixture(scope="module")
def direct() -> Iterator[StackFor]:
    """Over one leaf that runs clients and server in the caller's own thread."""
    leaf = stacks.device_stack()
    yield lambda num_clients: stacks.local_stack(num_clients, [leaf], leaf)
    leaf.close()


@pytest.fixture(scope="module")
def three_leaves() -> Iterator[StackFor]:
    leaves = stacks.threaded_stacks(3)
    (unplaced,) = stacks.threaded_stacks(1)
    yield lambda num_clients: stacks.local_stack(num_clients, leaves, unplaced)
    for leaf in [*leaves, unplaced]:
        leaf.close()


@pytest.fixture(scope="module")
def on_ray(ray_executors: RayExecutorFactory) -> StackFor:
    return lambda num_clients: ray_executors.create_executor({fl.CLIENTS: num_clients})


ON_RAY = pytest.param("on_ray", marks=pytest.mark.ray)


@pytest.fixture(scope="module", params=["three_leaves", ON_RAY])
def stack_for(request: pytest.FixtureRequest) -> StackFor:
    """A stack whose leaves all tests of this module share."""
    return request.getfixturevalue(request.param)


IN_DEBUGGING = (
    "value of an argument at clients",
    "value of an argument at the server",
    "eval at the server",
    "zip at the server",
    "map of an all-equal value to one",
    "mean",
    "min",
    "secure sum of few bits",
    "secure modular sum",
    "secure select",
)
"""One case of each intrinsic that the few lack: all are documented of that stack."""

RUN_BY: Mapping[str, Iterable[str]] = {
    "three_leaves": CASES,
    "debugging": [*A_FEW, *IN_DEBUGGING],
    "on_ray": A_FEW,
}
"""The cases that each stack runs; `A_FEW` says why others run eight."""

SUPPORTED = [
    pytest.param(
        stack_name,
        name,
        num_clients,
        id=f"{stack_name}-{name}-{num_clients} clients",
        marks=[pytest.mark.ray] * (stack_name == "on_ray"),
    )
    for stack_name, names in RUN_BY.items()
    for name in names
    for num_clients in ((0, 4) if stack_name == "three_leaves" else (4,))
    if not (CASES[name].needs_clients and not num_clients)
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
    stack_for: StackFor, name: str, num_clients: int
) -> None:
    case, comp = CASES[name], computation_of(name)

    result = evaluate(stack_for(num_clients), comp, *case.args(num_clients))

    assert simple(result) == simple(case.expected(num_clients))
    plain_values.to_plain(
        result, comp.type_signature.result
    )  # the dtypes are the declared


def uris_of(cases: Iterable[str]) -> set[str]:
    """Return the intrinsics that cases call."""
    return {
        uri
        for name in cases
        for uri in called_uris(computation_of(name).to_building_block())
    }


def defined_uris() -> set[str]:
    """Return the intrinsics that there are, of today and of TensorFlow Federated."""
    defined = [d for d in vars(intrinsic_defs).values() if isinstance(d, IntrinsicDef)]
    assert len(defined) > 20  # the module is private: it may be empty one day
    return {*(d.uri for d in defined), FEDERATED_SECURE_MODULAR_SUM.uri}


def test_cases_have_every_intrinsic_of_the_language() -> None:
    assert defined_uris() <= uris_of(CASES)


@pytest.mark.claim("debugging.13")
def test_cases_of_the_debugging_stack_have_every_federated_intrinsic() -> None:
    supported = {param.values[1] for param in SUPPORTED if "debugging" in param.values}
    called = uris_of(cast("set[str]", supported))

    federated = {uri for uri in defined_uris() if uri.startswith("federated_")}
    assert len(federated) > 15
    assert federated <= called


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
@pytest.mark.parametrize("stack_name", ["three_leaves", "debugging", ON_RAY])
@pytest.mark.parametrize("num_clients", [1, 33])
def test_gives_the_same_bits_on_every_stack(
    request: pytest.FixtureRequest,
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
    by_numpy = {
        "sum": np.sum(x),
        "mean": np.mean(x),
        "weighted": np.average(x, weights=abs(w)),
        "squares": 1.1 * np.sum(x**2),
    }
    for name, wanted in by_numpy.items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-5)
    total = np.sum(np.array([model["w"] for model in m]), axis=0)
    np.testing.assert_allclose(found["models"]["w"], total, rtol=1e-4, atol=1e-5)


@pytest.mark.claim("federating.34", "semantics.60")
def test_returns_results_in_client_order_when_the_first_is_slowest(
    stack_for: StackFor,
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
        self, stack_for: StackFor, make: Callable[[], Any]
    ) -> None:
        with pytest.raises(
            errors.CardinalityError, match="at least one client for federated_mean, fou"
        ):
            evaluate(stack_for(0), make(), [])

    @pytest.mark.claim("semantics.48")
    @pytest.mark.parametrize("length", [0, 4])
    def test_the_wrong_number_of_clients(
        self, stack_for: StackFor, length: int
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
        self, stack_for: StackFor, value: Any
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
        self, stack_for: StackFor, make: Callable[[], Any]
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
    def test_a_value_above_the_bound_of_a_secure_sum(self, stack_for: StackFor) -> None:
        comp = computation_of("secure sum")

        with pytest.raises(
            errors.ComputationError, match=r"most 100 .*\[client at position 1[],]"
        ):
            evaluate(stack_for(2), comp, [100, 101])

    def test_a_key_above_the_last(self, stack_for: StackFor) -> None:
        comp = computation_of("select")

        with pytest.raises(
            errors.ComputationError, match=r"max_key=2.*\[client at position 1[],]"
        ):
            evaluate(stack_for(2), comp, [[0, 1], [3, 0]], [0.0, 1.0, 2.0])

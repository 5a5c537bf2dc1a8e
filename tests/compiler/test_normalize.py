"""Symbolic evaluation: lambdas applied, names resolved, calls in order."""

import federated_language as fl
import numpy as np
import pytest

from ray_fed import errors
from ray_fed.compiler.expressions import free_references
from ray_fed.compiler.normalize import CallGraph, normalize

flf = fl.framework
Block = flf.ComputationBuildingBlock

INT = fl.TensorType(np.int32)
PAIR = fl.StructType([INT, INT])
ONE = flf.Literal(1, INT)
TWO = flf.Literal(2, INT)
X = flf.Reference("x", INT)


def _plus(left: Block, right: Block) -> flf.Call:
    plus = flf.Intrinsic(flf.GENERIC_PLUS.uri, fl.FunctionType(PAIR, INT))
    return flf.Call(plus, flf.Struct([left, right]))


def _print(graph: CallGraph) -> str:
    calls = [f"{name}={call.compact_representation()}" for name, call in graph.calls]
    return "; ".join([*calls, graph.result.compact_representation()])


def test_local_that_is_used_twice_is_called_once() -> None:
    y = flf.Reference("y", INT)
    block = flf.Lambda("x", INT, flf.Block([("y", _plus(X, ONE))], _plus(y, y)))

    assert _print(normalize(block)) == (
        "v0=generic_plus(<argument,1>); v1=generic_plus(<v0,v0>); v1"
    )


def test_lambda_that_is_applied_twice_is_called_twice() -> None:
    increment = flf.Lambda("y", INT, _plus(flf.Reference("y", INT), ONE))
    f = flf.Reference("f", increment.type_signature)
    block = flf.Lambda(
        "x", INT, flf.Block([("f", increment)], flf.Call(f, flf.Call(f, X)))
    )

    assert _print(normalize(block)) == (
        "v0=generic_plus(<argument,1>); v1=generic_plus(<v0,1>); v1"
    )


def test_local_hides_an_outer_name() -> None:
    inner = flf.Block([("x", TWO)], X)
    block = flf.Lambda("x", INT, flf.Struct([inner, X]))

    assert _print(normalize(block)) == "<2,argument>"


def test_lambda_sees_the_names_where_it_was_written() -> None:
    read = flf.Lambda(None, None, X)
    f = flf.Reference("f", read.type_signature)
    block = flf.Lambda(
        None,
        None,
        flf.Block([("x", ONE), ("f", read)], flf.Block([("x", TWO)], flf.Call(f))),
    )

    assert _print(normalize(block)) == "1"


def test_lambda_does_not_see_a_later_local_of_the_same_name() -> None:
    read = flf.Lambda(None, None, X)
    f = flf.Reference("f", read.type_signature)
    block = flf.Lambda(
        None, None, flf.Block([("x", ONE), ("f", read), ("x", TWO)], flf.Call(f))
    )

    assert _print(normalize(block)) == "1"


def test_computation_that_is_no_function_is_refused() -> None:
    with pytest.raises(errors.CompileError, match="Expected a function, found `int32`"):
        normalize(ONE)


def test_free_reference_is_refused_by_name() -> None:
    with pytest.raises(errors.CompileError, match="found `x`"):
        normalize(flf.Lambda("y", INT, X))


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        pytest.param(X, {"x"}, id="reference"),
        pytest.param(ONE, set[str](), id="literal"),
        pytest.param(flf.Lambda("x", INT, X), set[str](), id="bound by a lambda"),
        pytest.param(flf.Lambda("y", INT, X), {"x"}, id="free in a lambda"),
        pytest.param(flf.Lambda(None, None, X), {"x"}, id="lambda of no argument"),
        pytest.param(flf.Block([("x", ONE)], X), set[str](), id="bound by a local"),
        pytest.param(flf.Block([("x", X)], X), {"x"}, id="free in its own local"),
        pytest.param(
            flf.Block([("y", X), ("x", flf.Reference("y", INT))], X),
            {"x"},
            id="free in an earlier local",
        ),
        pytest.param(
            _plus(X, flf.Reference("z", INT)), {"x", "z"}, id="argument of a call"
        ),
        pytest.param(
            flf.Selection(flf.Reference("p", PAIR), index=0), {"p"}, id="selection"
        ),
    ],
)
def test_free_references_are_those_not_bound_inside(
    block: Block, expected: set[str]
) -> None:
    assert free_references(block) == expected

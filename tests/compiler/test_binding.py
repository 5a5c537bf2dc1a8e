"""Functions among the arguments of a computation, bound before it is compiled."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.compiler.binding import bind_functions
from ray_fed.language.structs import Struct

flf = fl.framework
INT = fl.TensorType(np.int32)
FUNCTION = fl.FunctionType(INT, INT)


def computation(parameter: Any, body: str = "arg") -> Any:
    """Return (arg -> arg) for the parameter's type."""
    type_spec = fl.to_type(parameter)
    reference = flf.Reference(body, type_spec)
    block = flf.Lambda(body, type_spec, reference)
    return flf.ConcreteComputation.from_building_block(block)


def show(comp: Any) -> str:
    return comp.to_building_block().compact_representation()


SAME = computation(INT, "x")


def test_function_alone_leaves_no_parameter() -> None:
    bound, rest = bind_functions(computation(FUNCTION), SAME)

    assert show(bound) == "( -> (arg -> arg)((x -> x)))"
    assert bound.type_signature == fl.FunctionType(None, FUNCTION)
    assert rest is None


def test_values_stay_in_order_beside_functions() -> None:
    nested = fl.StructType([("f", FUNCTION), ("c", INT)])
    comp = computation([("f", FUNCTION), ("a", INT), ("n", nested), ("b", INT)])

    bound, rest = bind_functions(comp, {"f": SAME, "a": 1, "n": (SAME, 2), "b": 3})

    assert show(bound) == (
        "(rest -> (arg -> arg)(<f=(x -> x),a=rest[0],n=<f=(x -> x),c=rest[1][0]>,"
        "b=rest[2]>))"
    )
    assert str(bound.type_signature.parameter) == "<a=int32,n=<c=int32>,b=int32>"
    assert rest == Struct([("a", 1), ("n", Struct([("c", 2)])), ("b", 3)])


@pytest.mark.parametrize(
    ("parameter", "arg"),
    [
        pytest.param(INT, 1, id="tensor"),
        pytest.param([INT, INT], (1, 2), id="struct"),
        pytest.param(fl.SequenceType(INT), [1], id="sequence"),
    ],
)
def test_argument_without_functions_is_left_alone(parameter: Any, arg: Any) -> None:
    comp = computation(parameter)

    assert bind_functions(comp, arg) == (comp, arg)
    assert bind_functions("no computation", arg) == ("no computation", arg)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param(3, r"the argument\.f to be a computation", id="number"),
        pytest.param(lambda x: x, "to be a computation", id="Python function"),  # pyright: ignore[reportUnknownLambdaType]
        pytest.param(
            computation(np.float32), r"float32 -> float32", id="of another type"
        ),
    ],
)
def test_what_is_no_such_function_is_told(value: Any, message: str) -> None:
    comp = computation([("f", FUNCTION), ("a", INT)])

    with pytest.raises(errors.ValueMismatchError, match=message):
        bind_functions(comp, (value, 1))

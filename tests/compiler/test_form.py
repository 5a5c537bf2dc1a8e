"""A mergeable form refuses three computations that do not fit together."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest

from ray_fed import errors
from ray_fed.compiler.form import MergeableCompForm

flf = fl.framework

INT = fl.TensorType(np.int32)
FLOAT = fl.TensorType(np.float32)
AT_CLIENTS = fl.FederatedType(INT, fl.CLIENTS)
AT_SERVER = fl.FederatedType(INT, fl.SERVER)


def _comp(parameter: Any, result: fl.Type) -> flf.ConcreteComputation:
    """A computation of a type; what it would compute does not matter here."""
    parameter_type = None if parameter is None else fl.to_type(parameter)
    data = flf.Reference("result", result)
    name = None if parameter is None else "x"
    lambda_ = flf.Lambda(name, parameter_type, data)
    return flf.ConcreteComputation.from_building_block(lambda_)


UP_TO_MERGE = _comp(AT_CLIENTS, AT_SERVER)
MERGE = _comp([INT, INT], INT)
AFTER_MERGE = _comp([AT_CLIENTS, AT_SERVER], AT_SERVER)


def test_form_has_the_type_of_the_computation_that_it_stands_for() -> None:
    form = MergeableCompForm(UP_TO_MERGE, MERGE, AFTER_MERGE)

    assert str(form.type_signature) == "({int32}@CLIENTS -> int32@SERVER)"


@pytest.mark.parametrize("name", ["up_to_merge", "merge", "after_merge"])
@pytest.mark.parametrize("part", [None, 3, len], ids=["none", "number", "function"])
def test_form_of_no_computations_is_refused(name: str, part: Any) -> None:
    parts: dict[str, Any] = {
        "up_to_merge": UP_TO_MERGE,
        "merge": MERGE,
        "after_merge": AFTER_MERGE,
    }

    with pytest.raises(errors.ValueMismatchError, match=f"`{name}` to be of the class"):
        MergeableCompForm(**{**parts, name: part})


def test_form_without_an_argument_takes_the_merged_value_alone() -> None:
    form = MergeableCompForm(_comp(None, AT_SERVER), MERGE, _comp(AT_SERVER, AT_SERVER))

    assert str(form.type_signature) == "( -> int32@SERVER)"


@pytest.mark.claim("semantics.76")
@pytest.mark.parametrize(
    "result",
    [
        pytest.param(AT_CLIENTS, id="at clients"),
        pytest.param(INT, id="unplaced"),
        pytest.param(fl.StructType([AT_SERVER, AT_SERVER]), id="struct of placed"),
    ],
)
def test_up_to_merge_must_return_a_server_placed_value(result: fl.Type) -> None:
    with pytest.raises(errors.UpToMergeTypeError, match=r"fl\.federated_zip"):
        MergeableCompForm(_comp(AT_CLIENTS, result), MERGE, AFTER_MERGE)


@pytest.mark.claim("semantics.77")
@pytest.mark.parametrize(
    ("parameter", "result"),
    [
        pytest.param(None, INT, id="no argument"),
        pytest.param([INT], INT, id="one partial"),
        pytest.param([INT, FLOAT], INT, id="another type"),
        pytest.param([INT, INT], FLOAT, id="result that it does not take"),
        pytest.param([AT_SERVER, AT_SERVER], AT_SERVER, id="placed"),
    ],
)
def test_merge_must_take_two_partials(parameter: Any, result: fl.Type) -> None:
    with pytest.raises(errors.MergeTypeNotAssignableError, match="two results"):
        MergeableCompForm(UP_TO_MERGE, _comp(parameter, result), AFTER_MERGE)


@pytest.mark.claim("semantics.78")
@pytest.mark.parametrize(
    "parameter",
    [
        pytest.param(None, id="no argument"),
        pytest.param(AT_SERVER, id="merged value alone"),
        pytest.param([AT_SERVER, AT_CLIENTS], id="the other way round"),
        pytest.param([AT_CLIENTS, INT], id="unplaced merged value"),
        pytest.param(
            [AT_CLIENTS, fl.FederatedType(FLOAT, fl.SERVER)], id="another type"
        ),
    ],
)
def test_after_merge_must_take_argument_and_merged_value(parameter: Any) -> None:
    with pytest.raises(errors.AfterMergeStructureError, match="Expected `after_merge`"):
        MergeableCompForm(UP_TO_MERGE, MERGE, _comp(parameter, AT_SERVER))


@pytest.mark.claim("semantics.78")
def test_after_merge_of_no_argument_must_not_take_a_pair() -> None:
    with pytest.raises(errors.AfterMergeStructureError, match="`int32@SERVER`"):
        MergeableCompForm(_comp(None, AT_SERVER), MERGE, AFTER_MERGE)


def test_errors_print_the_types_that_were_found() -> None:
    with pytest.raises(errors.MergeTypeNotAssignableError) as caught:
        MergeableCompForm(UP_TO_MERGE, _comp([INT], INT), AFTER_MERGE)

    assert str(caught.value) == (
        "Expected `merge` to take `<int32,int32>`, two results of `up_to_merge` or of"
        " itself, found `(<int32> -> int32)`."
    )

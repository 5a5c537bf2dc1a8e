"""The table of derived aggregations: types that fit one another."""

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.language import intrinsics, type_checks

flf = fl.framework
INT = fl.TensorType(np.int32)
VECTOR = fl.TensorType(np.float32, (3,))
STRUCT = fl.StructType([("a", np.float32), ("b", VECTOR)])
WEIGHTED = fl.StructType([STRUCT, fl.TensorType(np.float32)])

MEMBERS = [
    pytest.param(flf.FEDERATED_SUM.uri, STRUCT, STRUCT, id="sum"),
    pytest.param(flf.FEDERATED_MIN.uri, INT, INT, id="min"),
    pytest.param(flf.FEDERATED_MAX.uri, VECTOR, VECTOR, id="max"),
    pytest.param(flf.FEDERATED_MEAN.uri, STRUCT, STRUCT, id="mean"),
    pytest.param(flf.FEDERATED_WEIGHTED_MEAN.uri, WEIGHTED, STRUCT, id="weighted mean"),
]


def _partial(aggregation: intrinsics.Aggregation) -> fl.Type:
    return type_checks.function_type(aggregation.zero.type_signature).result


def _derive(uri: str, member: fl.Type) -> intrinsics.Aggregation:
    return intrinsics.DERIVED_AGGREGATIONS[uri](member)


@pytest.mark.parametrize(("uri", "member", "result"), MEMBERS)
def test_parts_take_one_anothers_types(
    uri: str, member: fl.Type, result: fl.Type
) -> None:
    aggregation = _derive(uri, member)

    zero, accumulate = aggregation.zero, aggregation.accumulate
    partial = _partial(aggregation)
    assert zero.type_signature == fl.FunctionType(None, partial)
    assert accumulate.type_signature == fl.FunctionType([partial, member], partial)
    assert aggregation.merge.type_signature == fl.FunctionType(
        [partial, partial], partial
    )


@pytest.mark.parametrize(("uri", "member", "result"), MEMBERS)
def test_report_makes_the_declared_result(
    uri: str, member: fl.Type, result: fl.Type
) -> None:
    aggregation = _derive(uri, member)

    partial = _partial(aggregation)
    if aggregation.report is None:
        assert partial == result
    else:
        assert aggregation.report.type_signature == fl.FunctionType(partial, result)


@pytest.mark.parametrize(("uri", "member", "result"), MEMBERS)
def test_parts_are_accepted_by_federated_aggregate(
    uri: str, member: fl.Type, result: fl.Type
) -> None:
    aggregation = _derive(uri, member)
    partial = _partial(aggregation)

    call = flf.create_federated_aggregate(
        flf.Reference("x", fl.FederatedType(member, fl.CLIENTS)),
        flf.Call(aggregation.zero),
        aggregation.accumulate,
        aggregation.merge,
        aggregation.report or flf.create_identity(partial),
    )

    assert call.type_signature == fl.FederatedType(result, fl.SERVER)


@pytest.mark.parametrize(
    ("uri", "names"),
    [
        pytest.param(
            flf.FEDERATED_SUM.uri,
            ("ray_fed_zeros", "generic_plus", "generic_plus", None),
            id="sum",
        ),
        pytest.param(
            flf.FEDERATED_MIN.uri,
            ("ray_fed_largest", "ray_fed_minimum", "ray_fed_minimum", None),
            id="min",
        ),
        pytest.param(
            flf.FEDERATED_MAX.uri,
            ("ray_fed_lowest", "ray_fed_maximum", "ray_fed_maximum", None),
            id="max",
        ),
        pytest.param(
            flf.FEDERATED_MEAN.uri,
            ("ray_fed_zeros", "ray_fed_add_value", "generic_plus", "ray_fed_average"),
            id="mean",
        ),
        pytest.param(
            flf.FEDERATED_WEIGHTED_MEAN.uri,
            (
                "ray_fed_zeros",
                "ray_fed_add_weighted",
                "generic_plus",
                "ray_fed_average",
            ),
            id="weighted mean",
        ),
    ],
)
def test_aggregation_is_made_of_these_intrinsics(
    uri: str, names: tuple[str | None, ...]
) -> None:
    aggregation = _derive(uri, fl.StructType([INT, INT]))

    parts = (
        aggregation.zero,
        aggregation.accumulate,
        aggregation.merge,
        aggregation.report,
    )
    assert tuple(part and part.uri for part in parts) == names


def test_mean_counts_clients_beside_the_sum() -> None:
    aggregation = _derive(flf.FEDERATED_MEAN.uri, VECTOR)

    assert str(_partial(aggregation)) == "<float32[3],int32>"


def test_weighted_mean_counts_weights_and_clients_beside_the_sum() -> None:
    aggregation = _derive(flf.FEDERATED_WEIGHTED_MEAN.uri, fl.StructType([VECTOR, INT]))

    assert str(_partial(aggregation)) == "<float32[3],int32,int32>"


def test_modular_sum_carries_a_modulus_for_each_tensor() -> None:
    member = fl.StructType([("a", INT), ("b", fl.TensorType(np.uint8, (3,)))])

    aggregation = intrinsics.modular_sum(member, fl.TensorType(np.int64))

    partial = fl.StructType([member, fl.StructType([np.int32, np.uint8])])
    assert aggregation.zero.type_signature == fl.FunctionType([np.int64], partial)
    assert aggregation.accumulate.type_signature == fl.FunctionType(
        [partial, member], partial
    )
    assert aggregation.merge.type_signature == fl.FunctionType(
        [partial, partial], partial
    )
    assert aggregation.report is not None
    assert aggregation.report.type_signature == fl.FunctionType(partial, member)


def test_modular_sum_needs_a_modulus_for_each_tensor() -> None:
    three = fl.StructType([INT, INT, INT])

    with pytest.raises(errors.CompileError, match="one for each of 3 tensors, found"):
        intrinsics.modular_sum(three, fl.StructType([INT, INT]))

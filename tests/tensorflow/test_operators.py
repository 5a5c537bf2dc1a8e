"""Arithmetic that the leaf executor runs itself, on nested structures of tensors."""

import asyncio
from typing import Any

import federated_language as fl
import ml_dtypes
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.executors.eager_tf import EagerTFExecutor
from ray_fed.language import intrinsics
from tests.executor_calls import invoke

flf = fl.framework
PAIR = fl.TensorType(np.float32, (2,))
NESTED = fl.StructType([("w", PAIR), ("b", fl.StructType([np.int32, np.float64]))])


def run(definition: Any, arg: Any, parameter: Any, result: Any) -> Any:
    """Call an intrinsic on a leaf executor."""
    called = flf.Intrinsic(definition.uri, fl.FunctionType(parameter, result))
    return asyncio.run(invoke(EagerTFExecutor(), called, arg))


def flat(value: Any) -> list[float]:
    """Return all numbers of nested structs, in order."""
    if isinstance(value, np.ndarray | np.generic):
        return [float(number) for number in np.ravel(value)]
    return [number for member in value for number in flat(member)]


@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        pytest.param(flf.GENERIC_PLUS, [8, 11, 11, 9.5], id="plus"),
        pytest.param(flf.GENERIC_MULTIPLY, [12, 18, 28, 22], id="multiply"),
        pytest.param(flf.GENERIC_DIVIDE, [3, 4.5, 1, 1.375], id="divide"),
        pytest.param(intrinsics.MINIMUM, [2, 2, 4, 4], id="minimum"),
        pytest.param(intrinsics.MAXIMUM, [6, 9, 7, 5.5], id="maximum"),
    ],
)
def test_binary_operators_work_on_each_tensor_of_a_structure(
    definition: Any, expected: list[float]
) -> None:
    left, right = ([6.0, 9.0], (7, 5.5)), ([2.0, 2.0], (4, 4.0))

    result = run(definition, (left, right), [NESTED, NESTED], NESTED)

    assert flat(result) == expected
    assert result.w.dtype == np.float32
    assert (result.b[0].dtype, result.b[1].dtype) == (np.int32, np.float64)


@pytest.mark.parametrize(
    ("dtype", "left", "right"),
    [
        pytest.param(np.int64, 2**40, 2**40, id="int64"),
        pytest.param(np.uint8, 3, 4, id="uint8"),
        pytest.param(ml_dtypes.bfloat16, 1.5, 2.5, id="bfloat16"),
        pytest.param(np.complex64, 1 + 1j, 1 - 2j, id="complex64"),
    ],
)
def test_plus_keeps_the_dtype(dtype: Any, left: Any, right: Any) -> None:
    result = run(flf.GENERIC_PLUS, (left, right), [dtype, dtype], dtype)

    assert result == np.asarray(left, dtype) + np.asarray(right, dtype)
    assert result.dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    ("definition", "dtype", "expected"),
    [
        pytest.param(intrinsics.ZEROS, np.int64, 0, id="zeros of int64"),
        pytest.param(intrinsics.ZEROS, np.complex64, 0, id="zeros of complex64"),
        pytest.param(intrinsics.LARGEST, np.int8, 127, id="largest int8"),
        pytest.param(intrinsics.LARGEST, np.uint16, 65535, id="largest uint16"),
        pytest.param(intrinsics.LARGEST, np.int64, 2**63 - 1, id="largest int64"),
        pytest.param(intrinsics.LARGEST, np.float16, np.inf, id="largest float16"),
        pytest.param(intrinsics.LOWEST, np.int8, -128, id="lowest int8"),
        pytest.param(intrinsics.LOWEST, np.uint16, 0, id="lowest uint16"),
        pytest.param(intrinsics.LOWEST, np.float64, -np.inf, id="lowest float64"),
    ],
)
def test_constants_fill_the_shape_of_their_type(
    definition: Any, dtype: Any, expected: Any
) -> None:
    type_spec = fl.StructType([("x", fl.TensorType(dtype, (2, 3))), (None, dtype)])

    result = run(definition, None, None, type_spec)

    assert result.x.shape == (2, 3)
    assert result.x.dtype == result[1].dtype == np.dtype(dtype)
    assert (result.x == expected).all()
    assert result[1] == expected


@pytest.mark.parametrize("shape", [(None,), (2, None), None], ids=str)
def test_constants_of_unknown_shape_are_refused(shape: Any) -> None:
    type_spec = fl.StructType([np.float32, fl.TensorType(np.float32, shape)])

    with pytest.raises(
        errors.ValueMismatchError, match="Expected an aggregated tensor"
    ):
        run(intrinsics.ZEROS, None, None, type_spec)


class TestAverage:
    def test_of_weights_that_are_all_zero_is_not_a_number(self) -> None:
        partial = fl.StructType([np.float32, np.float32, np.int32])

        result = run(intrinsics.AVERAGE, (0.0, 0.0, 2), partial, np.float32)

        assert np.isnan(result)

    @pytest.mark.parametrize(
        ("arg", "partial"),
        [
            pytest.param((0.0, 0), [np.float32, np.int32], id="mean"),
            pytest.param(
                (0.0, 0.0, 0), [np.float32, np.float32, np.int32], id="weighted mean"
            ),
        ],
    )
    def test_over_no_clients_is_an_error(self, arg: Any, partial: list[Any]) -> None:
        with pytest.raises(
            errors.CardinalityError,
            match="Expected at least one client for federated_mean",
        ):
            run(intrinsics.AVERAGE, arg, partial, np.float32)


class TestBounds:
    """Of secure sums, which are simulated in the clear."""

    @pytest.mark.parametrize(
        ("definition", "values", "bounds"),
        [
            pytest.param(intrinsics.CHECK_MAXIMUM, ([3, -9], 7), (3, 7), id="maximum"),
            pytest.param(intrinsics.CHECK_BITWIDTH, ([3, 0], 7), (2, 3), id="bitwidth"),
        ],
    )
    def test_values_within_pass_unchanged(
        self, definition: Any, values: Any, bounds: Any
    ) -> None:
        member = fl.StructType([fl.TensorType(np.int32, (2,)), np.int64])
        bound = fl.StructType([np.int32, np.int64])

        result = run(definition, (values, bounds), [member, bound], member)

        assert flat(result) == [*values[0], values[1]]

    @pytest.mark.parametrize(
        ("definition", "value", "bound"),
        [
            pytest.param(intrinsics.CHECK_MAXIMUM, 8, 7, id="above the maximum"),
            pytest.param(intrinsics.CHECK_BITWIDTH, 8, 3, id="too many bits"),
            pytest.param(intrinsics.CHECK_BITWIDTH, -1, 3, id="negative"),
        ],
    )
    def test_values_outside_are_refused(
        self, definition: Any, value: int, bound: int
    ) -> None:
        with pytest.raises(ValueError, match=f"at most 7 .*found values from {value}"):
            run(definition, (value, bound), [np.int32, np.int32], np.int32)

"""Which work XLA compiles with `kernels.jit="auto"`: by its ops, sizes and device."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.tensorflow.graphs.graph_message as graph_message
from ray_fed import tensorflow as rtf
from ray_fed.tensorflow.kernels import jit

ROWS = fl.TensorType(np.float32, [4, 3])


def ops_of(work: Any, parameter: fl.Type) -> set[str]:
    computation = rtf.computation(parameter)(work)
    message = computation.to_building_block().to_proto().tensorflow
    return set(jit.op_kinds(graph_message.graph_of(message)))


def multiply(x: Any) -> Any:
    return tf.nn.relu(tf.matmul(x, x, transpose_b=True)) - tf.reduce_mean(x)


def slice_first(x: Any) -> Any:
    return x[1:, 0] * tf.cast(tf.shape(x)[0], tf.float32)


def descend(batches: Any) -> Any:
    def step(weights: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_mean((tf.linalg.matvec(x, weights) - 1.0) ** 2.0)
        gradient: Any = tape.gradient(loss, weights)
        return weights - 0.1 * gradient

    return batches.batch(2).reduce(tf.ones([3]), step)


def convolve(x: Any) -> Any:
    return tf.nn.conv2d(
        x[tf.newaxis, :, :, tf.newaxis], tf.ones([2, 2, 1, 1]), 1, "SAME"
    )


def draw(x: Any) -> Any:
    return x + tf.random.normal([3])


def look_up(x: Any) -> Any:
    return tf.gather(x, tf.cast(x[:, 0], tf.int32))


def index(x: Any) -> Any:
    return x[tf.cast(x[0, 0], tf.int32)]


def sort(x: Any) -> Any:
    return tf.sort(x)


@pytest.mark.parametrize(
    ("work", "parameter"),
    [
        (multiply, ROWS),
        (slice_first, ROWS),
        (descend, fl.SequenceType(fl.TensorType(np.float32, [3]))),
    ],
    ids=["a product", "fixed slices", "steps over a dataset"],
)
def test_arithmetic_and_products_may_be_compiled(work: Any, parameter: fl.Type) -> None:
    ops = ops_of(work, parameter)

    assert jit.refuse_ops(ops, "CPU") is None
    assert jit.refuse_ops(ops, "GPU") is None


@pytest.mark.parametrize(
    ("work", "op"),
    [
        (convolve, "Conv2D"),
        (draw, "RandomStandardNormal"),
        (look_up, "GatherV2 by a computed index"),
        (index, "StridedSlice by a computed index"),
        (sort, "TopKV2"),
    ],
    ids=lambda given: getattr(given, "__name__", None),
)
def test_other_ops_are_never_compiled(work: Any, op: str) -> None:
    ops = ops_of(work, ROWS)

    assert jit.refuse_ops(ops, "CPU") == f"{op}, not known to gain"
    assert jit.refuse_ops(ops, "GPU") == f"{op}, not known to gain"


def test_variables_that_stay_are_told_with_the_reason() -> None:
    reason = jit.KEPT_VARIABLES + "RngReadAndSkip"

    assert jit.refuse_ops(["Bitcast", "Conv2D", reason], "CPU") == reason


def test_xla_skips_checks_of_values() -> None:
    @tf.function(jit_compile=True)
    def check(x: Any) -> Any:
        tf.debugging.Assert(x > 1, ["too small"])
        return x

    assert int(check(tf.constant(0))) == 0


def test_what_was_not_measured_is_not_compiled() -> None:
    assert jit.refuse_ops([], "TPU") == "not measured on a TPU"


@pytest.mark.parametrize(
    ("device", "kind"),
    [(None, "CPU"), ("/CPU:0", "CPU"), ("/device:GPU:1", "GPU"), ("/TPU:0", "TPU")],
)
def test_kind_of_a_device_is_told_by_its_name(device: str | None, kind: str) -> None:
    assert jit.kind_of(device) == kind  # None: TensorFlow has no other here


@pytest.mark.parametrize(
    ("ops", "window", "shapes", "reason"),
    [
        (["MatMul"], 16, [(1000, 1000), None], None),
        (["MatMul"], 8, [(10,)], "few clients in a leaf"),
        (["Mul", "Tanh"], 16, [(10,), (10, 20)], None),
        (["Mul", "Tanh"], 16, [(10,), (100, 100)], "Tanh, where tensors are large"),
        (["Mul", "Tanh"], 64, [(10,), (None, 3)], "Tanh, where tensors are large"),
        (["Mul", "Tanh"], 64, [(10,), None], "Tanh, where tensors are large"),
        (["Sum"], 16, [(100, 100)], None),
        (["Sum"], 16, [(10_000,)], "Sum, where vectors are long"),
        (["ArgMax"], 16, [(10,), (784, 10)], None),
        (["ArgMax"], 16, [(500,)], "ArgMax, where vectors are long"),
        (
            ["Sum over several axes"],
            16,
            [(100, 100)],
            "Sum over several axes, where tensors are large",
        ),
    ],
    ids=[
        "a product",
        "small leaves",
        "small tanh",
        "large tanh",
        "tanh of rows",
        "tanh of anything",
        "sum of rows",
        "sum of a vector",
        "largest of few",
        "largest of many",
        "sum of all",
    ],
)
def test_sizes_decide(
    ops: list[str], window: int, shapes: list[Any], reason: str | None
) -> None:
    assert jit.refuse_sizes(ops, window, shapes, "CPU") == reason


def test_sizes_decide_nothing_on_a_gpu() -> None:
    shapes = [(1_000_000,), (None, 3), None]

    for ops in (["Mul", "Tanh"], ["Sum"], ["Sum over several axes"]):
        assert jit.refuse_sizes(ops, 16, shapes, "GPU") is None
        assert jit.refuse_sizes(ops, 8, shapes, "GPU") == "few clients in a leaf"


def test_sums_of_all_are_told_from_sums_of_rows() -> None:
    def of_all(x: Any) -> Any:
        return tf.reduce_sum(x)

    def of_rows(x: Any) -> Any:
        return tf.reduce_sum(x, 1)

    assert "Sum over several axes" in ops_of(of_all, ROWS)
    assert "Sum" in ops_of(of_rows, ROWS)
    assert "Sum over several axes" not in ops_of(of_rows, ROWS)

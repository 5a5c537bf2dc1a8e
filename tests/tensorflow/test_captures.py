"""Tensors that were computed before a function was traced are constants of it."""

# pyright: reportUnknownLambdaType=false

import pathlib
import subprocess
import sys
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

from ray_fed import tensorflow as rtf

THREE = tf.constant(3)
NAMES = tf.constant(["a", "b"])
PLACES = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(["b", "c", "a"], [2, 3, 1]), -5
)


DATASET = tf.data.Dataset.range(3)
VARIABLE: Any = tf.Variable(tf.constant(3, tf.int64))


@rtf.computation(np.int32)
def add(x: Any) -> Any:
    return x + THREE


@rtf.computation(fl.SequenceType(np.int32))
def in_a_reduction(dataset: Any) -> Any:
    return dataset.reduce(0, lambda total, x: total + x * THREE)


@rtf.computation(np.int32)
def in_loops_and_branches(x: Any) -> Any:
    total = tf.while_loop(
        lambda i, _: i < THREE, lambda i, total: (i + 1, total + THREE), (0, x)
    )[1]
    return tf.cond(x > THREE, lambda: total, lambda: -THREE)


@rtf.computation(np.int32)
def of_strings(x: Any) -> Any:
    return tf.gather(NAMES, x)


@rtf.computation(fl.SequenceType(np.str_))
def of_a_table(dataset: Any) -> Any:
    """Of the table by itself, in a function of a dataset and in a loop."""
    total = dataset.reduce(0, lambda total, x: total * 10 + PLACES.lookup(x))
    for name in NAMES:
        total = total * 10 + PLACES[name]
    return total * 10 + tf.cast(PLACES.size(), tf.int32)


@tf.function
def times_three(x: Any) -> Any:
    return x * THREE


@pytest.mark.parametrize(
    ("comp", "arg", "expected"),
    [
        pytest.param(add, 4, 7, id="an op"),
        pytest.param(in_a_reduction, [1, 2], 9, id="a reduction"),
        pytest.param(in_loops_and_branches, 4, 13, id="a loop"),
        pytest.param(in_loops_and_branches, 1, -3, id="a branch"),
        pytest.param(of_strings, 1, b"b", id="strings"),
        pytest.param(of_a_table, ["c", "d"], 25123, id="a table"),
        pytest.param(rtf.computation(times_three, np.int32), 2, 6, id="a tf.function"),
    ],
)
def test_captured_tensors_are_constants(
    local_contexts: Any, comp: Any, arg: Any, expected: Any
) -> None:
    assert local_contexts(workers=1).invoke(comp, arg) == expected


def test_tensor_that_is_used_twice_is_written_once() -> None:
    large = tf.constant(np.ones(10_000, np.float32))

    @rtf.computation(np.float32)
    def twice(x: Any) -> Any:
        return tf.reduce_sum(large * x) + tf.reduce_sum(large)

    assert twice.to_proto().ByteSize() < 1.5 * 40_000


@pytest.mark.parametrize(
    ("work", "message"),
    [
        pytest.param(
            lambda x: DATASET.reduce(x, lambda so_far, n: so_far + n),
            "such as a dataset",
            id="dataset",
        ),
        pytest.param(lambda x: x + VARIABLE, "a variable", id="variable"),
    ],
)
def test_what_may_change_is_refused(work: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rtf.computation(work, np.int64)


TRACE = """
import numpy as np
from ray_fed import tensorflow as rtf
from ray_fed.tensorflow.tensors import devices

@rtf.computation(np.float32)
def add_one(x):
    return x + 1

print(devices.set_threads(1))
"""


@pytest.mark.slow
def test_tracing_leaves_threads_to_be_set(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "trace.py"
    script.write_text(TRACE)

    found = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True
    )

    assert found.stdout == "True\n"


def test_eager_tensors_are_as_before_once_a_function_is_traced() -> None:
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="EagerTensor"):
        tf.identity(THREE)

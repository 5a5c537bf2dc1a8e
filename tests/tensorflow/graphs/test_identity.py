"""The hash of a computation: the same for the same work, whatever names it got."""

import os
import pathlib
import subprocess
import sys
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf

FLOATS = fl.SequenceType(np.float32)


def build_scaled(factor: float, name: str = "scaled") -> Any:
    @tf.function
    def scale(x: Any) -> Any:
        return tf.multiply(x, factor, name=name)

    @rtf.computation(np.float32)
    def work(x: Any) -> Any:
        return scale(tf.Variable(x, name=name))

    return work


def build_mean(work: Any) -> Any:
    @fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
    def mean(values: Any) -> Any:
        return fl.federated_mean(fl.federated_map(work, values))

    return mean


def build_sum(*, backwards: bool = False) -> Any:
    def add(total: Any, x: Any) -> Any:
        return x + total if backwards else total + x

    @rtf.computation(FLOATS)
    def total(values: Any) -> Any:
        return values.reduce(np.float32(0), add)

    return total


def build_waits(first: int) -> Any:
    """Return work that waits for four nodes, whose names count from `first`."""

    @rtf.computation(np.float32)
    def work(x: Any) -> Any:
        checks = [
            tf.negative(x, name=f"check_{count}") for count in range(first, first + 4)
        ]
        with tf.control_dependencies(checks):
            return tf.identity(x)

    return work


TABLE = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer([f"word {i}" for i in range(50)], range(50)), -1
)


def build_lookup() -> Any:
    @rtf.computation(np.str_)
    def place(word: Any) -> Any:
        return TABLE.lookup(word)

    return place


def test_the_same_work_has_one_hash_whatever_its_names() -> None:
    first = rtf.identify_computation(build_mean(build_scaled(2.0)))
    second = rtf.identify_computation(build_mean(build_scaled(2.0, name="other")))

    assert first == second
    assert len(first) == 64


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (build_scaled(2.0), build_scaled(3.0)),
        (build_mean(build_scaled(2.0)), build_mean(build_scaled(3.0))),
        (build_mean(build_scaled(2.0)), build_scaled(2.0)),
        (build_sum(), build_sum(backwards=True)),
    ],
    ids=["a constant", "a constant inside", "a federation", "inside a function"],
)
def test_other_work_has_another_hash(one: Any, other: Any) -> None:
    assert rtf.identify_computation(one) != rtf.identify_computation(other)


def test_names_do_not_decide_in_which_order_work_waits() -> None:
    hashes = {rtf.identify_computation(build_waits(first)) for first in (1, 7, 8, 9)}

    assert len(hashes) == 1


def test_python_functions_have_no_hash() -> None:
    @rtf.computation(np.float32)
    def work(x: Any) -> Any:
        return tf.numpy_function(np.negative, [x], tf.float32)

    with pytest.raises(errors.UnsupportedError):
        rtf.identify_computation(work)


@pytest.mark.slow
def test_hash_is_the_same_in_another_process() -> None:
    script = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import ray_fed, test_identity as t
import tensorflow as tf
[tf.function(tf.negative)(1.0) for _ in range(3)]
print(t.rtf.identify_computation(t.build_mean(t.build_scaled(2.0))))
print(t.rtf.identify_computation(t.build_sum()))
print(t.rtf.identify_computation(t.build_lookup()))
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONHASHSEED": "3"},
        capture_output=True,
        text=True,
        check=True,
    )

    here = [build_mean(build_scaled(2.0)), build_sum(), build_lookup()]
    assert run.stdout.split() == [rtf.identify_computation(comp) for comp in here]

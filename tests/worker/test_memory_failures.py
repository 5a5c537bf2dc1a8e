"""Work that finds no memory has an error of its own."""

import pytest

import ray_fed.errors as errors
import ray_fed.worker.stacks as stacks

import tensorflow as tf  # isort: skip


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(
            tf.errors.ResourceExhaustedError(None, None, "no room"),
            errors.WorkerMemoryError,
            id="TensorFlow's",
        ),
        pytest.param(MemoryError("no room"), errors.WorkerMemoryError, id="Python's"),
        pytest.param(
            tf.errors.InvalidArgumentError(None, None, "no room"),
            errors.ComputationError,
            id="another one",
        ),
    ],
)
def test_want_of_memory_is_told_apart(
    error: Exception, expected: type[errors.ComputationError]
) -> None:
    described = stacks.describe_failure(error, 7)

    assert type(described) is expected
    assert described.location.client_index == 7
    assert "no room" in str(described)
    assert type(described.located(node="n")) is expected

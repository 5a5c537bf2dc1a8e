"""What a failure of client work tells, and work on a chunk of clients."""

import asyncio
import pickle
import re
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.worker.stacks as stacks
from ray_fed import tensorflow as rtf
from ray_fed.executors.eager_tf import EagerTFExecutor

FLOAT = fl.TensorType(np.float32)


@rtf.computation(np.float32)
def positive(x: Any) -> Any:
    with tf.control_dependencies([tf.debugging.Assert(x > 0, ["not positive"])]):
        return tf.identity(x)


def fail() -> None:
    raise KeyError("mine")


class TestDescribeFailure:
    @pytest.mark.parametrize(
        ("message", "summary"),
        [
            pytest.param("too large", "too large", id="one line"),
            pytest.param("", "no message", id="nothing"),
            pytest.param("a\n\n b\nc\nd\ne", "a b c", id="many lines"),
            pytest.param(
                "Graph execution error:\n\nDetected at node Assert defined at (most"
                ' recent call last):\n  File "x.py", line 1, in run\n\n  File "y.py",'
                " line 2, in go\n    return f(x)\nassertion failed: [no]\n\t"
                " [[{{node Assert}}]] [Op:__inference_pruned_7]",
                "assertion failed: [no]",
                id="graph error with its stack",
            ),
            pytest.param(
                "Graph execution error:\n\nDetected at node Assert defined at (most"
                " recent call last):\n<stack traces unavailable>\nno [Op:Assert]",
                "no",
                id="graph error without its stack",
            ),
            pytest.param(
                'Traceback (most recent call last):\n  File "x.py", line 1, in run\n'
                "    a / b\n    ~~^~~\nno such thing",
                "no such thing",
                id="traceback with markers",
            ),
            pytest.param(
                "{{function_node __inference_wrapped_function_57}} too few [Op:Name]",
                "too few",
                id="of a graph",
            ),
        ],
    )
    def test_says_it_in_few_lines(self, message: str, summary: str) -> None:
        error = stacks.describe_failure(ValueError(message), None)

        assert str(error) == f"A computation raised ValueError: {summary}"

    def test_says_which_label_is_no_class(self) -> None:
        message = (
            "Graph execution error:\n2 root error(s) found.\n  (0) INVALID_ARGUMENT: "
            " Received a label value of -1 which is outside the valid range of [0, 3)."
            "  Label values: 0 -1\n"
        )

        error = stacks.describe_failure(ValueError(message), 4)

        assert str(error) == (
            "Expected labels from 0 to 2, one for each output of the model, found -1:"
            " number the classes from 0, or have a model with more outputs [client at"
            " position 4]"
        )

    def test_names_the_client_and_keeps_the_cause(self) -> None:
        with pytest.raises(KeyError) as caught:
            fail()

        error = stacks.describe_failure(caught.value, 7)

        copied = pickle.loads(pickle.dumps(error))
        assert (
            str(copied)
            == "A computation raised KeyError: 'mine' [client at position 7]"
        )
        assert copied.location == errors.Location(client_index=7)
        assert "test_client_chunks.py" in copied.cause_text

    def test_of_tensorflow_is_short(self) -> None:
        with pytest.raises(errors.ComputationError) as caught:
            asyncio.run(map_clients(positive, [1.0, -1.0], range(5, 7)))

        message = re.sub(r"py:\d+", "py:LINE", str(caught.value))
        assert message == (
            "The computation `positive` (test_client_chunks.py:LINE) raised"
            " InvalidArgumentError: assertion failed: [not positive]"
            " [client at position 6]"
        )


async def map_clients(comp: Any, members: list[float], chunk: range) -> list[Any]:
    executor = EagerTFExecutor()
    function = await executor.create_value(comp)
    arg = await stacks.embed_members(executor, members, FLOAT)
    mapped = await stacks.map_embedded(executor, function, arg, chunk)
    return [await member.compute() for member in mapped]


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

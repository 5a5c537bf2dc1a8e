"""Inputs and labels of a batch have one number of rows, wherever they come from."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.learning.batches import check_batches
from ray_fed.program import ClientData


def batches_of(label: type) -> fl.SequenceType:
    inputs, labels = fl.TensorType(np.float32, [None, 2]), fl.TensorType(label, [None])
    return fl.SequenceType(
        fl.StructWithPythonType([("x", inputs), ("y", labels)], dict)
    )


BATCHES = batches_of(np.int32)


def batch(num_inputs: int, num_labels: int) -> dict[str, Any]:
    return {
        "x": np.zeros([num_inputs, 2], np.float32),
        "y": np.zeros(num_labels, np.int32),
    }


GOOD = [batch(3, 3), batch(1, 1)]
BAD = [batch(3, 3), batch(3, 2)]


def test_values_at_hand_are_named_by_client_and_batch() -> None:
    data = ClientData.from_values({"anna": GOOD, "bert": BAD}, BATCHES)

    check_batches({0: data[0]})
    for held in (data, data.take(2)):
        with pytest.raises(errors.ValueMismatchError, match=r"batch 1 .* 'bert', fo"):
            check_batches(dict(enumerate(held)))


def test_what_a_function_loads_is_named_when_it_is_read() -> None:
    by_name = {"anna": GOOD, "bert": BAD}
    data = ClientData.from_function(by_name, by_name.__getitem__, BATCHES)

    data[1].read()  # nobody asked for batches
    check_batches(dict(enumerate(data)))

    data[0].read()
    with pytest.raises(
        errors.ValueMismatchError, match=r"batch 1 .*'bert', found \[3, 2"
    ):
        data[1].read()


def test_labels_that_are_not_a_number_are_told_with_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoilt = [batch(3, 3) | {"y": np.array([0, np.nan, 1], np.float32)}]
    data = ClientData.from_values({"anna": spoilt}, batches_of(np.float32))

    check_batches({0: data[0]})
    check_batches({0: data[0]})  # told once
    check_batches({5: spoilt, 6: GOOD})
    check_batches({1: spoilt}, ["anna", "bo"])

    told, again, named = caplog.messages
    assert "'anna' has values that are not a number (NaN): 1." in told
    assert "batch 0 of the client `data[5]`" in again
    assert "batch 0 of the client with the id 'bo'" in named

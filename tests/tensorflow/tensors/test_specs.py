"""Federated types of TensorFlow's specifications."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

from ray_fed import tensorflow as rtf

ROW = tf.TensorSpec([4], tf.float32)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (tf.string, fl.TensorType(np.str_)),
        ((tf.int32, [2, None]), fl.TensorType(np.int32, [2, None])),
        (np.bool_, fl.TensorType(np.bool_)),
        ({"x": ROW}, fl.to_type({"x": (np.float32, [4])})),
        (tf.data.DatasetSpec(ROW), fl.SequenceType((np.float32, [4]))),
    ],
    ids=str,
)
def test_types_of_specifications(given: Any, expected: fl.Type) -> None:
    assert rtf.to_type(given) == expected


def test_a_ragged_specification_has_no_type() -> None:
    with pytest.raises(TypeError, match="Expected dense tensors, found `Ragged"):
        rtf.to_type(tf.RaggedTensorSpec([None, None], tf.float32))

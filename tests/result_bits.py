"""Compares results bit by bit."""

from typing import Any

import numpy as np
import tensorflow as tf


def bits(result: Any) -> list[bytes]:
    """Return the bytes of each tensor of a result, in order."""
    return [np.asarray(leaf).tobytes() for leaf in tf.nest.flatten(result)]

"""Logits of the models, from weights and f32[n, pixels]: TensorFlow alone.

Peers that run TensorFlow take these too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def _softmax(weights: Sequence[Any], x: Any) -> Any:
    return tf.matmul(x, weights[0]) + weights[1]


def _mlp(weights: Sequence[Any], x: Any) -> Any:
    for index in (0, 2):
        x = tf.nn.relu(tf.matmul(x, weights[index]) + weights[index + 1])
    return tf.matmul(x, weights[4]) + weights[5]


def _cnn(side: int, channels: int) -> Callable[[Sequence[Any], Any], Any]:
    """Return the logits of two convolutions, a pool and two dense layers."""
    pooled = (side - 4) // 2

    def logits(weights: Sequence[Any], x: Any) -> Any:
        x = tf.reshape(x, [-1, side, side, channels])
        for index in (0, 2):
            x = tf.nn.conv2d(x, weights[index], strides=1, padding="VALID")
            x = tf.nn.relu(x + weights[index + 1])
        x = tf.nn.max_pool2d(x, ksize=2, strides=2, padding="VALID")
        x = tf.reshape(x, [-1, pooled * pooled * 64])
        x = tf.nn.relu(tf.matmul(x, weights[4]) + weights[5])
        return tf.matmul(x, weights[6]) + weights[7]

    return logits


LOGITS: dict[str, Callable[[Sequence[Any], Any], Any]] = {
    "tiny": _softmax,
    "mlp": _mlp,
    "cnn": _cnn(28, 1),
    "cifar10": _cnn(32, 3),
}

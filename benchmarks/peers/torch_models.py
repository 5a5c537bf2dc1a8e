"""The three models in PyTorch, and their weights in TensorFlow's layout and back."""

# pyright: basic, reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import skip_init

_POOLED = (64, 12, 12)
_MATRIX, _CONVOLUTION = 2, 4


def build(workload: str) -> Any:
    """Return a model whose weights are yet to be set."""

    def dense(inputs: int, outputs: int) -> Any:
        return skip_init(nn.Linear, inputs, outputs)

    if workload == "tiny":
        return nn.Sequential(dense(784, 10))
    if workload == "mlp":
        return nn.Sequential(
            dense(784, 200), nn.ReLU(), dense(200, 200), nn.ReLU(), dense(200, 10)
        )
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        skip_init(nn.Conv2d, 1, 32, 3),
        nn.ReLU(),
        skip_init(nn.Conv2d, 32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        dense(12 * 12 * 64, 128),
        nn.ReLU(),
        dense(128, 10),
    )


def from_tensorflow(weights: Sequence[Any]) -> list[Any]:
    """Return tensors in the order of a model's parameters."""
    held = list(weights)
    if held[0].ndim == _CONVOLUTION:
        channels, height, width = _POOLED
        rows = held[4].reshape(height, width, channels, -1)
        held[4] = rows.transpose(2, 0, 1, 3).reshape(held[4].shape)
    turned = [_turn(array, (3, 2, 0, 1)) for array in held]
    return [torch.tensor(np.ascontiguousarray(array)) for array in turned]


def to_tensorflow(parameters: Sequence[Any]) -> list[Any]:
    """Return arrays in TensorFlow's layout; undoes `from_tensorflow`."""
    arrays = [np.asarray(parameter.detach()) for parameter in parameters]
    held = [_turn(array, (2, 3, 1, 0)) for array in arrays]
    if held[0].ndim == _CONVOLUTION:
        rows = held[4].reshape(*_POOLED, -1)
        held[4] = rows.transpose(1, 2, 0, 3).reshape(held[4].shape)
    return held


def _turn(array: Any, axes: tuple[int, ...]) -> Any:
    """Return a kernel with its axes in the other library's order."""
    if array.ndim == _CONVOLUTION:
        return array.transpose(axes)
    return array.T if array.ndim == _MATRIX else array


def set_weights(model: Any, weights: Sequence[Any]) -> None:
    """Copy tensors into a model's parameters."""
    with torch.no_grad():
        for parameter, tensor in zip(model.parameters(), weights, strict=True):
            parameter.copy_(tensor)

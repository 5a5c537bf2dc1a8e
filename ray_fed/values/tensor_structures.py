"""Types of structures of tensors, such as the rows and batches of clients."""

from typing import Any, cast

import federated_language as fl
import numpy as np

import ray_fed.errors as errors
from ray_fed.language import trees


def storage_dtype(type_spec: fl.TensorType) -> np.dtype[Any]:
    """Return the dtype of plain arrays of the type: object for strings."""
    dtype = np.dtype(type_spec.dtype)
    return np.dtype(object) if dtype.type is np.str_ else dtype


def flatten_type(type_spec: fl.Type) -> list[fl.TensorType]:
    """Return the types of a structure's tensors, in order, or raise an error."""
    leaves = trees.leaf_types(type_spec)
    if not all(isinstance(leaf, fl.TensorType) for leaf in leaves):
        raise errors.ValueMismatchError(
            f"Expected a structure of tensors, found `{type_spec}`."
        )
    return cast("list[fl.TensorType]", leaves)


def batch_type(row: fl.Type) -> fl.Type:
    """Return the type of stacked rows: each tensor has one more dimension, in front."""
    flatten_type(row)
    return trees.map_types(_batched, row)


def _batched(tensor: fl.TensorType) -> fl.Type:
    shape = None if tensor.shape is None else [None, *tensor.shape]
    return fl.TensorType(tensor.dtype, shape)

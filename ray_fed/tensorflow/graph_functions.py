"""Functions of tensors as graphs of their own, and the loops in them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

import ray_fed.tensorflow.frames as frames
import ray_fed.tensorflow.loader as loader

Function: TypeAlias = "Callable[[list[tf.Tensor]], list[tf.Tensor]]"


def as_graph(
    function: Callable[..., Sequence[tf.Tensor]], signature: Sequence[tf.TensorSpec]
) -> Function:
    """Return a function of tensors as a graph, with frames for loops."""
    return _as_graph(function, signature, lambda _: True)[0]


def as_pruned_graph(
    function: Callable[..., Sequence[tf.Tensor]], signature: Sequence[tf.TensorSpec]
) -> tuple[Function, list[int]]:
    """Return a function as a graph of those arguments that it reads, and which."""
    return _as_graph(function, signature, lambda fed: bool(fed.consumers()))


def _as_graph(
    function: Callable[..., Sequence[tf.Tensor]],
    signature: Sequence[tf.TensorSpec],
    is_taken: Callable[[tf.Tensor], bool],
) -> tuple[Function, list[int]]:
    graph = tf.Graph()
    with graph.as_default():
        fed = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in signature]
        fetched = [tf.identity(tensor) for tensor in function(*fed)]
    taken = [index for index, tensor in enumerate(fed) if is_taken(tensor)]
    feeds = [fed[index].name for index in taken]
    fetches = [tensor.name for tensor in fetched]
    graph_def = frames.write_frames(graph.as_graph_def(), [*feeds, *fetches])
    specs = [signature[index] for index in taken]
    return loader.import_graph(graph_def, feeds, fetches, specs), taken


def as_tensors(
    given: Iterable[Any], signature: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Return tensors, or arrays of the same types, as a graph takes them."""
    return [
        value if isinstance(value, tf.Tensor) else tf.constant(value, spec.dtype)
        for value, spec in zip(given, signature, strict=True)
    ]


def before(stop: tf.Tensor) -> Callable[..., tf.Tensor]:
    """Return the condition of a loop that counts to a number."""

    def is_before(index: tf.Tensor, *_: Any) -> tf.Tensor:
        return index < stop

    return is_before

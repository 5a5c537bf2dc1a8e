"""Functions of tensors as graphs of their own, and the loops in them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from ray_fed.tensorflow.graphs import loader
from ray_fed.tensorflow.kernels import frames
from ray_fed.tensorflow.tensors import copies

GraphFunction: TypeAlias = Callable[[list[tf.Tensor]], list[tf.Tensor]]
"""A graph, called as a function of its arguments in order."""


_HELD_BYTES = 16 * 2**20
"""Of results that no argument changes, which a graph computes once."""


def as_graph(
    function: Callable[..., Sequence[tf.Tensor]], signature: Sequence[tf.TensorSpec]
) -> GraphFunction:
    """Return a function of tensors as a graph, with frames for loops."""
    graph = tf.Graph()
    with graph.as_default():
        fed = _placeholders(signature)
        fetched = [tf.identity(tensor) for tensor in function(*fed)]
    return _import(graph, fed, fetched, signature)


def as_pruned_graph(
    function: Callable[..., Sequence[tf.Tensor]], signature: Sequence[tf.TensorSpec]
) -> tuple[GraphFunction, list[int]]:
    """Return a function as a graph of those arguments that it reads, and which.

    What no argument changes is computed here, once, and what is an argument is passed
    on: a graph of nothing else is none at all.

    Args:
        function: of tensors; it draws nothing, and has no effects and no state but
            variables that it makes and sets before it reads them.
        signature: of its arguments.
    """
    graph = tf.Graph()
    with graph.as_default():
        fed = _placeholders(signature)
        results = [_without_identity(tensor) for tensor in function(*fed)]
        inside = [tf.identity(tensor) for tensor in results]
    places = {tensor.name: index for index, tensor in enumerate(fed)}
    reads = _arguments_of(graph, fed, results)
    fixed = [inside[index] for index, read in enumerate(reads) if not read]
    held = iter(_import(graph, [], fixed, [])([]) if fixed else ())
    sources: list[int | tf.Tensor | None] = []
    for tensor, read in zip(results, reads, strict=True):
        value = None if read else next(held)
        is_small = value is not None and value.dtype.size * tf.size(value) < _HELD_BYTES
        sources.append(value if is_small else places.get(tensor.name))
    computed = [index for index, source in enumerate(sources) if source is None]
    fetched = [inside[index] for index in computed]
    read = sorted(set[int]().union(*(reads[index] for index in computed)))
    run = _import(graph, [fed[i] for i in read], fetched, [signature[i] for i in read])
    taken = sorted({*read, *(source for source in sources if isinstance(source, int))})

    def call(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        given = dict(zip(taken, tensors, strict=True))
        ran = iter(run([given[index] for index in read]) if computed else ())
        return [
            next(ran)
            if source is None
            else (given[source] if isinstance(source, int) else source)
            for source in sources
        ]

    return call, taken


def _placeholders(signature: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    return [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in signature]


def _import(
    graph: tf.Graph,
    fed: Sequence[tf.Tensor],
    fetched: Sequence[tf.Tensor],
    signature: Sequence[tf.TensorSpec],
) -> GraphFunction:
    feeds, fetches = ([tensor.name for tensor in held] for held in (fed, fetched))
    graph_def = frames.write_frames(graph.as_graph_def(), [*feeds, *fetches])
    return loader.import_graph(graph_def, feeds, fetches, signature)


def _without_identity(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Identity" and not tensor.op.control_inputs:
        (tensor,) = tensor.op.inputs
    return tensor


def _arguments_of(
    graph: tf.Graph, fed: Sequence[tf.Tensor], results: Sequence[tf.Tensor]
) -> list[list[int]]:
    """Return, for each result, the places of arguments that its value may depend on.

    Args:
        graph: of all tensors.
        fed: the arguments.
        results: of the graph.
    """
    masks: dict[Any, int] = {tensor.op: 1 << i for i, tensor in enumerate(fed)}
    before: dict[Any, int] | None = None
    while masks != before:  # twice, as ops follow their inputs, except in loops
        before = dict(masks)
        for op in graph.get_operations():
            mask = masks.get(op, 0)
            for source in [*(tensor.op for tensor in op.inputs), *op.control_inputs]:
                mask |= masks.get(source, 0)
            masks[op] = mask
    read = [masks[tensor.op] for tensor in results]
    return [[i for i in range(len(fed)) if mask >> i & 1] for mask in read]


def as_tensors(
    given: Iterable[Any], signature: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Return tensors, or arrays of the same types, as a graph takes them."""
    return [
        value if isinstance(value, tf.Tensor) else copies.as_tensor(value, spec.dtype)
        for value, spec in zip(given, signature, strict=True)
    ]


def before(stop: tf.Tensor) -> Callable[..., tf.Tensor]:
    """Return the condition of a loop that counts to a number."""

    def is_before(index: tf.Tensor, *_: Any) -> tf.Tensor:
        return index < stop

    return is_before

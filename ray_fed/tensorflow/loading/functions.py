"""TensorFlow messages as functions of normal forms.

Where a message takes sequences, and can do without tf.data, it is loaded so (see
`lowering`); given a dataset that is read lazily it runs as it was written.
"""

import functools
import hashlib
import threading
from collections.abc import Sequence
from typing import cast

import federated_language as fl
import tensorflow as tf

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.lowering as lowering
import ray_fed.tensorflow.lowering.inlining as inlining
import ray_fed.tensorflow.tensors.datasets as datasets
from ray_fed.plan import diagnostics
from ray_fed.tensorflow.external import held_rows
from ray_fed.tensorflow.graphs import identity, joined_messages, loaded_graph
from ray_fed.tensorflow.graphs.graph_message import TensorFlowMessage
from ray_fed.tensorflow.loading import normal
from ray_fed.tensorflow.loading.returned_sequences import (
    ReturnedSequence,
    compose_returned,
)
from ray_fed.values.lru_cache import LruCache


def _device_for(result: fl.Type, device: str | None) -> str | None:
    """Return the device of a function: datasets exist on CPUs only."""
    if device is not None and "CPU" not in device and _contains_sequences(result):
        return "/device:CPU:0"
    return device


def _contains_sequences(type_spec: fl.Type) -> bool:
    return fl.framework.type_contains(
        type_spec, lambda found: isinstance(found, fl.SequenceType)
    )


def load_function(
    message: TensorFlowMessage,
    type_spec: fl.Type,
    device: str | None,
    *,
    lowers: bool = True,
) -> normal.Executable:
    """Return a TensorFlow message as a function from normal form to normal form.

    Args:
        message: a `pb.TensorFlow`.
        type_spec: of the function.
        device: name of the device to run on; None leaves it to TensorFlow.
        lowers: whether it may run without tf.data; else it runs as it was written.
    """
    function_type = cast("fl.FunctionType", type_spec)
    source = loaded_graph.Source(
        graph_message.origin_of(message),
        identity.content_of(message),
        _device_for(function_type.result, device),
        _contains_sequences(function_type.result),
        functools.partial(graph_message.find_place, message),
    )
    written = _Written(message, function_type, source)
    parameter = function_type.parameter
    if parameter is None or not lowers or not _contains_sequences(parameter):
        written.load()
        return normal.Executable(written)
    lowered = _load_lowered(message, function_type, source)
    if isinstance(lowered, lowering.Unlowered):
        written.load()
        written.tell(lowered.reason)
        return normal.Executable(written, lowered.reason)
    return normal.Executable(_Lowered(lowered, written, function_type))


def _load_lowered(
    message: TensorFlowMessage, type_spec: fl.FunctionType, source: loaded_graph.Source
) -> loaded_graph.LoadedGraph | lowering.Unlowered:
    lowered = lowering.lower(message, type_spec)
    if isinstance(lowered, lowering.Unlowered):
        return lowered
    try:
        return loaded_graph.LoadedGraph(
            lowered.graph_def,
            lowered.feeds,
            lowered.fetches,
            lowered.initialize_op,
            source,
        )
    except Exception as error:  # noqa: BLE001 (no graph is refused for its lowering)
        return lowering.Unlowered(f"{type(error).__name__}: {error}")


_COMPOSED = 16
"""Graphs of a computation and of those before it that stay loaded."""


class _Written:
    """A message as it was written, loaded when it is needed.

    Args:
        message: a `pb.TensorFlow`.
        type_spec: of the function.
        source: where the graph comes from.

    Attributes:
        message: as given.
        source: as given.
    """

    def __init__(
        self,
        message: TensorFlowMessage,
        type_spec: fl.FunctionType,
        source: loaded_graph.Source,
    ) -> None:
        self.message = message
        self._type_spec = type_spec
        self.source = source
        self._notes: list[diagnostics.Note] = []
        self._loading = threading.Lock()
        self._graph: loaded_graph.LoadedGraph | None = None

    def load(self) -> loaded_graph.LoadedGraph:
        """Return the loaded graph, the same each time."""
        message = self.message
        with self._loading:
            if self._graph is None:
                feeds: list[str] = []
                if self._type_spec.parameter is not None:
                    feeds = graph_message.bound_names(message.parameter)
                if message.session_token_tensor_name:
                    feeds = [*feeds, message.session_token_tensor_name]
                self._graph = loaded_graph.LoadedGraph(
                    graph_message.graph_of(message),
                    feeds,
                    graph_message.bound_names(message.result),
                    message.initialize_op or None,
                    self.source,
                )
            return self._graph

    def tell(self, reason: str) -> None:
        """Let every call note why the function is not lowered."""
        origin, content = self.source.origin, self.source.content
        self._notes = [diagnostics.Unlowered(origin, content.hex()[:12], reason)]

    def __call__(self, arg: normal.Normal = None) -> normal.Normal:
        message, type_spec = self.message, self._type_spec

        def take() -> list[tf.Tensor]:
            tensors: list[tf.Tensor] = []
            if type_spec.parameter is not None:
                taken = list(normal.flatten(arg, type_spec.parameter))
                tensors = graph_message.to_bound(taken, message.parameter)
            if message.session_token_tensor_name:
                tensors.append(tf.constant(""))
            return tensors

        def run() -> normal.Normal:
            diagnostics.note(self._notes)
            results = graph_message.from_bound(self.load()(take), message.result)
            return normal.unflatten(iter(results), type_spec.result)

        if isinstance(type_spec.result, fl.SequenceType) and self._is_stateless:
            return ReturnedSequence.of(message, type_spec, arg, run)
        return run()

    @functools.cached_property
    def _is_stateless(self) -> bool:
        return inlining.find_effects(self.message) is None


class _Lowered:
    """A message without tf.data; called with a dataset, as it was written."""

    def __init__(
        self,
        lowered: loaded_graph.LoadedGraph,
        written: _Written,
        type_spec: fl.FunctionType,
    ) -> None:
        self._graph = lowered
        self._written = written
        self._type_spec = type_spec
        self._composed: LruCache[bytes, loaded_graph.LoadedGraph | lowering.Unlowered]
        self._composed = LruCache(_COMPOSED)

    def _compose(
        self, leaves: Sequence[normal.Normal]
    ) -> tuple[loaded_graph.LoadedGraph, list[normal.Normal]] | None:
        """Return a graph of what returned sequences were made of, and that."""
        written = self._written
        try:
            found = compose_returned(written.message, self._type_spec, leaves)
        except joined_messages.CannotCompose:
            return None
        message, type_spec, given = found
        key = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
        graph = self._composed.get(
            key, lambda: _load_lowered(message, type_spec, written.source)
        )
        if isinstance(graph, lowering.Unlowered):
            return None
        return graph, given

    def __call__(self, arg: normal.Normal) -> normal.Normal:
        parameter = cast("fl.Type", self._type_spec.parameter)
        graph, leaves = self._graph, normal.leaves_of(arg, parameter)
        if any(isinstance(leaf, ReturnedSequence) for leaf in leaves):
            composed = self._compose(leaves)
            if composed is None:
                return self._written(arg)
            graph, leaves = composed
        leaves = [
            leaf.hold() if isinstance(leaf, held_rows.FileSequence) else leaf
            for leaf in leaves
        ]
        if not all(_is_held(leaf) for leaf in leaves):
            return self._written(arg)
        results = graph(lambda: [t for leaf in leaves for t in _feeds(leaf)])
        return normal.unflatten(iter(results), self._type_spec.result)


def _is_held(leaf: normal.Normal) -> bool:
    return isinstance(leaf, tf.Tensor | datasets.HeldSequence)


def _feeds(leaf: normal.Normal) -> list[tf.Tensor]:
    return leaf.tensors if isinstance(leaf, datasets.HeldSequence) else [leaf]

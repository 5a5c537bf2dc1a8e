"""Loads TensorFlow computations, so that executors can call them.

Arguments and results are in the form that `ray_fed.tensorflow.normal_forms` describes.

A computation that takes sequences runs without tf.data if `ray_fed.tensorflow.lowering`
can rewrite it. With a dataset that is read lazily, the original graph runs.

A sequence that a computation returns is computed when its elements are needed. If
another computation takes it, the two are joined to one graph, without a dataset between
them. Kernels, which run many clients in one graph, do the same, so the bits are equal.
"""

import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import federated_language as fl
import tensorflow as tf

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.loader as loader
import ray_fed.tensorflow.lowering as lowering
import ray_fed.tensorflow.lowering.inlining as inlining
import ray_fed.tensorflow.tensors.datasets as datasets
from ray_fed.language import trees
from ray_fed.plan import diagnostics
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow import external_data, normal_forms
from ray_fed.tensorflow.graphs import identity
from ray_fed.tensorflow.graphs.graph_message import TensorFlowMessage
from ray_fed.tensorflow.normal_forms import Executable, Normal
from ray_fed.values.lru_cache import LruCache

_COMPOSED = 16
"""Number of graphs of joined computations that stay loaded for each computation."""


class ReturnedSequence(datasets.KnownSequence):
    """A sequence that a computation without state returned, not yet computed.

    `message` is the computation. `types` and `leaves` are the types and values of the
    tensors and sequences of its argument. `run` runs it and returns a dataset.
    """

    def __init__(
        self,
        message: TensorFlowMessage,
        types: Sequence[fl.Type],
        leaves: Sequence[Normal],
        element: fl.Type,
        run: Callable[[], "tf.data.Dataset[Any]"],
    ) -> None:
        self.message, self.types, self.leaves = message, types, leaves
        super().__init__(element, run)

    @classmethod
    def of(
        cls,
        message: TensorFlowMessage,
        type_spec: fl.FunctionType,
        arg: Normal,
        run: Callable[[], "tf.data.Dataset[Any]"],
    ) -> Self:
        """Return the sequence that `message` returns for the argument `arg`."""
        leaves = trees.leaves(arg, type_spec.parameter)
        element = cast("fl.SequenceType", type_spec.result).element
        try:
            message, type_spec, leaves = graph_message.compose_all(
                message, type_spec, leaves, ReturnedSequence
            )
        except Fallback:
            leaves = [
                leaf.dataset if isinstance(leaf, ReturnedSequence) else leaf
                for leaf in leaves
            ]
        types = trees.leaf_types(type_spec.parameter)
        return cls(message, types, leaves, element, run)


def _device_for(result: fl.Type, device: str | None) -> str | None:
    # Datasets exist on CPUs only.
    if device is not None and "CPU" not in device and _contains_sequences(result):
        return "/device:CPU:0"
    return device


def _contains_sequences(type_spec: fl.Type) -> bool:
    return fl.framework.type_contains(
        type_spec, lambda part: isinstance(part, fl.SequenceType)
    )


def load_function(
    message: TensorFlowMessage,
    type_spec: fl.Type,
    device: str | None,
    *,
    lowers: bool = True,
) -> Executable:
    """Return a TensorFlow computation as a function that executors can call.

    It runs without tf.data if `lowers` and if possible. `device` is the name of a
    device, or None for TensorFlow's default.
    """
    function_type = cast("fl.FunctionType", type_spec)
    source = loader.Source(
        graph_message.origin_of(message),
        identity.content_of(message),
        _device_for(function_type.result, device),
        _contains_sequences(function_type.result),
        functools.partial(graph_message.find_place, message),
    )
    written = _WrittenFunction(message, function_type, source)
    parameter = function_type.parameter
    if parameter is None or not lowers or not _contains_sequences(parameter):
        written.load()
        return Executable(written)
    lowered = _load_lowered(message, function_type, source)
    if isinstance(lowered, Fallback):
        written.load()
        written.tell(lowered.reason)
        return Executable(written, lowered.reason)
    return Executable(_LoweredFunction(lowered, written, function_type))


def _load_lowered(
    message: TensorFlowMessage, type_spec: fl.FunctionType, source: loader.Source
) -> loader.LoadedGraph | Fallback:
    lowered = lowering.lower(message, type_spec)
    if isinstance(lowered, Fallback):
        return lowered
    try:
        return loader.LoadedGraph(
            lowered.graph_def,
            lowered.feeds,
            lowered.fetches,
            lowered.initialize_op,
            source,
        )
    except Exception as error:  # noqa: BLE001 (no graph is refused for its lowering)
        return Fallback(f"{type(error).__name__}: {error}")


class _WrittenFunction:
    """A computation with its original graph, which is loaded on first use."""

    def __init__(
        self,
        message: TensorFlowMessage,
        type_spec: fl.FunctionType,
        source: loader.Source,
    ) -> None:
        self.message = message
        self._type_spec = type_spec
        self.source = source
        self._notes: list[diagnostics.Note] = []
        self._loading = threading.Lock()
        self._graph: loader.LoadedGraph | None = None

    def load(self) -> loader.LoadedGraph:
        message = self.message
        with self._loading:
            if self._graph is None:
                feeds: list[str] = []
                if self._type_spec.parameter is not None:
                    feeds = graph_message.bound_names(message.parameter)
                if message.session_token_tensor_name:
                    feeds = [*feeds, message.session_token_tensor_name]
                self._graph = loader.LoadedGraph(
                    graph_message.graph_of(message),
                    feeds,
                    graph_message.bound_names(message.result),
                    message.initialize_op or None,
                    self.source,
                )
            return self._graph

    def tell(self, reason: str) -> None:
        origin, content = self.source.origin, self.source.content
        self._notes = [
            diagnostics.ComputationUnlowered(origin, content.hex()[:12], reason)
        ]

    def __call__(self, arg: Normal = None) -> Normal:
        message, type_spec = self.message, self._type_spec

        def take() -> list[tf.Tensor]:
            tensors: list[Any] = []
            if type_spec.parameter is not None:
                leaves = normal_forms.flatten(arg, type_spec.parameter)
                tensors = graph_message.to_bound(leaves, message.parameter)
            if message.session_token_tensor_name:
                tensors.append(tf.constant(""))
            return tensors

        def run() -> Normal:
            diagnostics.note(self._notes)
            results = graph_message.from_bound(self.load()(take), message.result)
            return normal_forms.unflatten(results, type_spec.result)

        if isinstance(type_spec.result, fl.SequenceType) and self._is_stateless:
            return ReturnedSequence.of(message, type_spec, arg, run)
        return run()

    @functools.cached_property
    def _is_stateless(self) -> bool:
        return inlining.find_effects(self.message) is None


class _LoweredFunction:
    """A computation without tf.data. Calls with a dataset run the original graph."""

    def __init__(
        self,
        lowered: loader.LoadedGraph,
        written: _WrittenFunction,
        type_spec: fl.FunctionType,
    ) -> None:
        self._graph = lowered
        self._written = written
        self._type_spec = type_spec
        self._composed: LruCache[bytes, loader.LoadedGraph | Fallback]
        self._composed = LruCache(_COMPOSED)

    def _compose(
        self, leaves: Sequence[Normal]
    ) -> tuple[loader.LoadedGraph, Sequence[Normal]] | None:
        written = self._written
        try:
            composed = graph_message.compose_all(
                written.message, self._type_spec, leaves, ReturnedSequence
            )
        except Fallback:
            return None
        message, type_spec, arguments = composed
        key = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
        graph = self._composed.get(
            key, lambda: _load_lowered(message, type_spec, written.source)
        )
        if isinstance(graph, Fallback):
            return None
        return graph, arguments

    def __call__(self, arg: Normal) -> Normal:
        parameter = cast("fl.Type", self._type_spec.parameter)
        graph, leaves = self._graph, trees.leaves(arg, parameter)
        if any(isinstance(leaf, ReturnedSequence) for leaf in leaves):
            composed = self._compose(leaves)
            if composed is None:
                return self._written(arg)
            graph, leaves = composed
        leaves = [
            leaf.load() if isinstance(leaf, external_data.FileSequence) else leaf
            for leaf in leaves
        ]
        if not all(isinstance(x, tf.Tensor | datasets.HeldSequence) for x in leaves):
            return self._written(arg)

        def take() -> list[tf.Tensor]:
            tensors: list[Any] = []
            for leaf in leaves:
                if isinstance(leaf, datasets.HeldSequence):
                    tensors += leaf.tensors
                else:
                    tensors.append(leaf)
            return tensors

        return normal_forms.unflatten(graph(take), self._type_spec.result)

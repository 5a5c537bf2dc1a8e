"""Chooses the graph for a leaf whose clients are all of one shape.

Such a leaf may be compiled by XLA, or fold several clients at once (`shaped_clients`).
Settings, the rule in `jit` and what the work does decide; a leaf that gets no graph of
its own is folded by the graph for clients of any shape, and the reason is noted.
"""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ray_fed.plan import diagnostics, plans
from ray_fed.tensorflow.kernels import jit
from ray_fed.tensorflow.kernels.client_work import ClientWork
from ray_fed.tensorflow.kernels.graph_functions import GraphFunction
from ray_fed.tensorflow.kernels.graph_values import UnfitError, flatten
from ray_fed.tensorflow.kernels.laid_clients import LaidClients, UniformShape
from ray_fed.tensorflow.kernels.leaf_loops import (
    ClientBounds,
    LeafFold,
    LeafLoop,
    LoopInputs,
)
from ray_fed.tensorflow.kernels.shaped_clients import ShapedClients, Window


@dataclasses.dataclass(frozen=True)
class _ShapedGraph:
    """The graph for leaves of one shape.

    Attributes:
        function: None where the graph for clients of any shape folds these leaves.
        not_jit: why XLA does not compile it; None where XLA does.
    """

    function: GraphFunction | None
    not_jit: str | None


class ShapedGraphs:
    """The graphs of one kernel by shape, each built when first needed.

    Args:
        kernel: its options `jit` and `vectorised_clients` count here.
        client: what is done with each client.
        loop: builds the graphs.
        device: name of the device to run on; None leaves it to TensorFlow.
    """

    def __init__(
        self,
        kernel: plans.Kernel,
        client: ClientWork,
        loop: LeafLoop,
        device: str | None,
    ) -> None:
        self._client, self._loop, self._device = client, loop, device
        self._jit, self._at_once = kernel.jit, kernel.vectorised_clients
        self._ops = loop.work_grafts.ops | loop.fold_grafts.ops
        self._never_jit = "off" if kernel.jit == "off" else None
        if kernel.jit == "auto":
            self._never_jit = jit.refuse_ops(self._ops, jit.kind_of(device))
        self._refusals: set[str] = set()
        self._graphs: dict[UniformShape, _ShapedGraph] = {}
        self._compiled: set[UniformShape] = set()
        self._lock = threading.Lock()

    @property
    def is_asked_for(self) -> bool:
        """Whether settings ask for other graphs than that of clients of any shape."""
        return self._jit == "on" or self._at_once > 1

    def refuse_shapes(self, leaf_size: int) -> str | None:
        """Return why the shapes of clients decide nothing; None where they do.

        Args:
            leaf_size: how many clients the leaves of the cohort have.
        """
        if self._at_once > 1:
            return None
        if self._never_jit is not None or self._jit == "on":
            return self._never_jit
        return jit.refuse_window(Window.of(leaf_size).size)

    def shape_of(
        self, leaf: range, laid: LaidClients, leaf_size: int
    ) -> UniformShape | None:
        """Return the shape of a leaf's clients, where there is a graph for it.

        Args:
            leaf: positions of all clients of the leaf among those that were laid.
            laid: the clients.
            leaf_size: how many clients the leaves of the cohort have.
        """
        kinds = laid.data.kinds[leaf.start : leaf.stop]
        is_mixed = len(laid.data.shapes) > 1 and (kinds != kinds[:1]).any()
        if is_mixed:
            reason = "clients of a leaf have data of several shapes"
            self._note_off(reason)
            if self.is_asked_for:
                diagnostics.note([diagnostics.Unshaped(reason)])
            return None
        of_clients = laid.data.shapes[kinds[0]] if len(kinds) else None
        if of_clients is None:
            if leaf:
                refused = self.refuse_shapes(leaf_size)
                self._note_off(refused or "data without one shape")
            return None
        shape = UniformShape(of_clients, Window.of(leaf_size))
        with self._lock:  # other threads may run this kernel, too
            if shape not in self._graphs:
                self._graphs[shape] = self._specialise(shape)
        graph = self._graphs[shape]
        if graph.not_jit is not None:
            self._note_off(graph.not_jit)
        return None if graph.function is None else shape

    def call(
        self,
        shape: UniformShape | None,
        arguments: list[tf.Tensor],
        for_any_shape: GraphFunction,
    ) -> list[tf.Tensor]:
        """Call the graph for leaves of a shape.

        Args:
            shape: what `shape_of` returned for each of the leaves.
            arguments: of the graph.
            for_any_shape: the graph to call where there is none for the shape.
        """
        graph = None if shape is None else self._graphs[shape]
        if shape is None or graph is None or graph.function is None:
            return for_any_shape(arguments)
        try:
            results = graph.function(arguments)
        except tf.errors.ResourceExhaustedError:
            raise
        except tf.errors.OpError as error:
            if graph.not_jit is not None or shape in self._compiled:
                raise
            # XLA compiles at the first call. What it refuses, it always refuses.
            reason = f"{type(error).__name__} of XLA"
            self._graphs[shape] = self._refuse(reason)
            self._note_off(reason)
            return for_any_shape(arguments)
        self._compiled.add(shape)
        if self._jit == "auto" and graph.not_jit is None:
            diagnostics.note([diagnostics.JitDecision(jit=True, reason=jit.GAIN)])
        return results

    def note_refusals(self) -> None:
        """Note why leaves of one shape got no graph although settings ask for it."""
        diagnostics.note(map(diagnostics.Unshaped, tuple(self._refusals)))

    def _note_off(self, reason: str) -> None:
        if self._jit == "auto":
            diagnostics.note([diagnostics.JitDecision(jit=False, reason=reason)])

    def _refuse(self, reason: str) -> _ShapedGraph:
        if self.is_asked_for:
            self._refusals.add(reason)
        return _ShapedGraph(None, reason)

    def _refuse_jit(self, shape: UniformShape) -> str | None:
        """Return why XLA does not compile leaves of a shape; None where it does."""
        if self._jit != "auto" or self._never_jit is not None:
            return self._never_jit
        specs = [*self._loop.specs, *self._loop.constant_specs]
        shapes = [spec.shape.as_list() if spec.shape else None for spec in specs]
        extents = self._client.layout.extents(shape.clients)
        given = [*shapes, *(extent.shape for extent in extents)]
        kind = jit.kind_of(self._device)
        return jit.refuse_sizes(self._ops, shape.window.size, given, kind)

    def _specialise(self, shape: UniformShape) -> _ShapedGraph:
        """Return the graph for leaves of a shape, or why there is none."""
        not_jit = self._refuse_jit(shape)
        if not_jit is not None and self._at_once == 1:
            return _ShapedGraph(None, not_jit)
        if len(self._client.kept):
            return self._refuse("values are kept of clients")
        clients = ShapedClients(
            self._client,
            self._client.layout,
            shape.clients,
            window=shape.window,
            at_once=self._at_once,
            jit=not_jit is None,
        )

        def fold(
            bounds: ClientBounds, held: Sequence[Any], given: LoopInputs
        ) -> list[Any]:
            constants = flatten(given.constants)
            return [bounds[1], *clients.fold(bounds, held, constants, given.data)]

        try:
            with tf.device(self._device):
                traced = self._loop.trace(LeafFold(fold, clients.prepare))
                return _ShapedGraph(traced, not_jit)
        except UnfitError as error:  # TensorFlow may put a traceback before its text
            told = str(error).rpartition(f"{UnfitError.__name__}: ")[2]
            return self._refuse(told.strip())
        except Exception as error:
            if diagnostics.is_defect(error):
                raise
            return self._refuse(diagnostics.first_line(_first_of(error)))


def _first_of(error: BaseException) -> BaseException:
    """Return the error that was raised first: TensorFlow raises others over it."""
    while error.__context__ is not None:
        error = error.__context__
    return error

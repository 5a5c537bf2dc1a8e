"""Puts TensorFlow computations into a graph that runs them once for each client.

Each call has the variables, tables and random states of its own iteration: they are
set, then initialised, before anything else of that call runs.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import federated_language as fl
import tensorflow as tf

import ray_fed.tensorflow.lowering as lowering
import ray_fed.tensorflow.lowering.bodies as bodies
from ray_fed.plan import diagnostics
from ray_fed.tensorflow.graphs import (
    determinism,
    graph_message,
    identity,
    loader,
    random_states,
    randomness,
)
from ray_fed.tensorflow.graphs.protobufs import GraphDef
from ray_fed.tensorflow.kernels import jit
from ray_fed.tensorflow.kernels.graph_values import GraphSequence, UnfitError
from ray_fed.tensorflow.kernels.pending_sequences import (
    PendingSequence,
    compose_pending,
    message_of,
)
from ray_fed.values.columnar_sequence import Sizes

flf = fl.framework

_OF_VARIABLES = re.compile(
    "VarHandleOp|VarIsInitializedOp|VariableShape|ReadVariableOp|Assert"
    "|Assign(Add|Sub)?VariableOp"
    "|Resource(Gather(Nd)?|Scatter.*|(Sparse)?Apply.*|StridedSliceAssign)"
)
"""Ops whose state ends with a call of a graph: it makes its variables anew."""


@dataclasses.dataclass(frozen=True)
class DrawSite:
    """A random op of a kernel, and what its random numbers depend on.

    Attributes:
        path: names of the locals that its computation is called in.
        content: identifies computation and op.
    """

    path: tuple[str, ...]
    content: bytes


class Grafts:
    """Puts computations into the graph that is current, and knows what they draw.

    Attributes:
        sites: the random ops, in the order of their states.
        unkeyed: the random ops without a state that can be set.
        ends: results of what was put in. Where the next iteration waits for them,
            TensorFlow optimises each computation for itself: it would make one sum of
            several, in an order of its own, and other bits.
        has_state: whether anything that was put in has state or effects.
        ops: kinds of the ops that were put in, see `jit.op_kinds`.

    Args:
        allowed: "any" state and effects; "variables", those that a computation makes
            for itself, and assertions; or "none".
        unrolled: see `lowering.lower`.
        isolated: whether TensorFlow optimises each computation for itself, whatever
            its argument comes from, so that it has the bits of a call of its own.
    """

    def __init__(
        self,
        *,
        allowed: Literal["any", "variables", "none"] = "any",
        unrolled: bool = False,
        isolated: bool = True,
    ) -> None:
        self._allowed = allowed
        self._isolated = isolated
        self._unrolled = unrolled
        self.sites: list[DrawSite] = []
        self.unkeyed: list[diagnostics.Unkeyed] = []
        self.ends: list[tf.Tensor] = []
        self.has_state = False
        self.ops: set[str] = set()
        self._states: list[random_states.RandomStates] = []
        self._state_of: Callable[[int], tf.Tensor] | None = None

    def use_states(self, state_of: Callable[[int], tf.Tensor]) -> None:
        """Say where the states of what is put in next come from.

        Args:
            state_of: from the index of a site to its state, i64[3], in the graph that
                is current.
        """
        self._state_of = state_of

    def leave_graph(self) -> None:
        """Let go of the graph that was current: its tensors hold all of it."""
        self.ends = []
        self._state_of = None

    def shield(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor as one of this graph that what is put in takes.

        Where that is isolated, the tensor is opaque.

        An op that takes a constant, or what another computation just added, is
        otherwise rewritten: x / 3 to x * (1 / 3), sums of sums to one sum.
        """
        if not self._isolated:
            return tf.identity(tensor)
        return tf.compat.v1.placeholder_with_default(tensor, tensor.shape)

    def create(self) -> None:
        """Make the state variables, on the device that is current."""
        for states in self._states:
            states.create()

    def close(self) -> None:
        """Free the state variables."""
        for states in self._states:
            states.close()

    def call(
        self,
        block: flf.CompiledComputation,
        leaves: Sequence[Any],
        path: tuple[str, ...],
    ) -> list[tf.Tensor]:
        """Return the result of a computation, inside of the graph.

        Args:
            block: the computation.
            leaves: of its argument, tensors and sequences.
            path: names of the locals that it is called in.

        Raises:
            UnfitError: it is not of TensorFlow, needs tf.data, has state or effects
                where there may be none, or draws where `use_states` was not called.
        """
        message = message_of(block)
        content = identity.content_of(message)
        lowered, leaves, is_composed = self._lower(block, leaves)
        graph_def = lowered.graph_def
        if found := self._check_state(graph_def):
            if is_composed:  # interpreted, it would draw through tf.data
                raise UnfitError(f"{found[0]} in work on a sequence result")
            self.has_state = True
        determinism.use_deterministic_ops(graph_def)
        states = randomness.key_random_ops(graph_def)
        if self._state_of is None and (states.names or states.unkeyed):
            raise UnfitError("random numbers in work without clients")
        feeds = dict(zip(lowered.feeds, _tensors(leaves), strict=True))
        self._note_unkeyed(graph_message.origin_of(message), content, states)
        assigned = self._assign(graph_def, states, content, path, feeds)
        loader.isolate(graph_def, *assigned, lowered.initialize_op)
        if self._allowed != "any":
            feeds = _without_placeholders(graph_def, feeds, lowered.fetches)
        inside = {name: self.shield(tensor) for name, tensor in feeds.items()}
        results = tf.graph_util.import_graph_def(
            graph_def,
            input_map=inside,
            return_elements=list(lowered.fetches),
            name="call",
        )
        self.ends += results
        return results

    def _check_state(self, graph_def: GraphDef) -> list[str]:
        """Return the ops with state or effects; refuse those that are not allowed."""
        found = bodies.stateful_ops(graph_def)
        if self._allowed == "variables":
            refused = [op for op in found if not _OF_VARIABLES.fullmatch(op)]
        else:
            refused = found if self._allowed == "none" else []
        if refused:
            raise UnfitError(f"{refused[0]}, an op with state or effects")
        return found

    def _lower(
        self, block: flf.CompiledComputation, leaves: Sequence[Any]
    ) -> tuple[lowering.Lowered, Sequence[Any], bool]:
        """Return a computation without tf.data, what it takes, whether it is of two."""
        message, type_spec, given = compose_pending(block, leaves)
        self.ops.update(jit.op_kinds(graph_message.graph_of(message)))
        sizes = _sizes(given)
        lowered = lowering.lower(message, type_spec, sizes, unrolled=self._unrolled)
        if isinstance(lowered, lowering.Unlowered):
            raise UnfitError(lowered.reason)
        return lowered, given, given is not leaves

    def defer(
        self, block: flf.CompiledComputation, leaves: Sequence[Any]
    ) -> PendingSequence:
        """Return the sequence that a computation returns, to be composed.

        Raises:
            UnfitError: it draws, or has state or effects.
        """
        message, type_spec, leaves = compose_pending(block, leaves)
        if found := bodies.find_effects(message):
            raise UnfitError(f"{found} in a sequence result")
        return PendingSequence.of(message, type_spec, leaves)

    def _note_unkeyed(
        self, origin: str, content: bytes, states: random_states.RandomStates
    ) -> None:
        if states.unkeyed:
            ops = tuple(states.unkeyed)
            self.unkeyed.append(diagnostics.Unkeyed(origin, content.hex()[:12], ops))

    def _assign(
        self,
        graph_def: GraphDef,
        states: random_states.RandomStates,
        content: bytes,
        path: tuple[str, ...],
        feeds: dict[str, Any],
    ) -> list[str]:
        """Let a graph set its random states first; return the op that does."""
        if not states.names or self._state_of is None:
            return []
        self._states.append(states)
        placeholders, op = random_states.add_assignments(graph_def, states.names)
        for index, placeholder in enumerate(placeholders):
            feeds[placeholder] = self._state_of(len(self.sites))
            site = DrawSite(path, content + index.to_bytes(4))
            self.sites.append(site)
        return [op]


def _without_placeholders(
    graph_def: GraphDef, feeds: dict[str, Any], fetches: Sequence[str]
) -> dict[str, Any]:
    """Remove the placeholders of feeds, in place; return the feeds that are read.

    They would stay in the graph, unread, where XLA refuses them.
    """
    fetched = {bodies.node_of(name) for name in fetches}
    names = {bodies.node_of(name) for name in feeds} - fetched
    kept = [node for node in graph_def.node if node.name not in names]
    read = {bodies.node_of(source) for node in kept for source in node.input} | fetched
    del graph_def.node[:]
    graph_def.node.extend(kept)
    return {name: fed for name, fed in feeds.items() if bodies.node_of(name) in read}


def _sizes(leaves: Sequence[Any]) -> list[Sizes | None]:
    return [leaf.sizes if isinstance(leaf, GraphSequence) else None for leaf in leaves]


def _tensors(leaves: Sequence[Any]) -> list[tf.Tensor]:
    tensors: list[tf.Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, GraphSequence):
            tensors.extend(leaf.columns)
            tensors.extend([] if leaf.length is None else [leaf.length])
        else:
            tensors.append(leaf)
    return tensors

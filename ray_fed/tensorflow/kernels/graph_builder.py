"""Builds one graph of building blocks and of the TensorFlow computations in them.

Blocks are interpreted inside of the graph that is being built. Values are tensors,
`GraphSequence`s and structs of them; functions are Python functions over these. A value
at the server is its member. Locals are evaluated when first needed, as the executors
do, and draw under the same names. A sequence between two computations is composed away.

A computation runs once for each client. Each call has the variables, tables and random
states of its own iteration: they are set, then initialised, before anything else of it.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import federated_language as fl
import tensorflow as tf

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.loader as loader
import ray_fed.tensorflow.graphs.randomness as randomness
import ray_fed.tensorflow.lowering as lowering
import ray_fed.tensorflow.lowering.inlining as inlining
from ray_fed.language import blocks, intrinsics, type_checks
from ray_fed.language.structs import Struct
from ray_fed.plan import diagnostics
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow import operators
from ray_fed.tensorflow.graphs import identity
from ray_fed.tensorflow.graphs.graph_message import GraphDef, TensorFlowMessage
from ray_fed.tensorflow.kernels import jit
from ray_fed.tensorflow.tensors import specs
from ray_fed.values import columnar_sequence
from ray_fed.values.columnar_sequence import Sizes
from ray_fed.values.tensor_structures import unflatten


@dataclasses.dataclass(frozen=True)
class GraphSequence:
    """A sequence inside of a graph, as a `ColumnarSequence` has its columns.

    Attributes:
        columns: of each column its rows and, where it has them, its splits.
        length: how many elements, i64[]; None with `sizes`.
        sizes: where they were known when traced; then columns have no splits, and the
            elements' dimension first.
    """

    columns: tuple[tf.Tensor, ...]
    length: tf.Tensor | None
    sizes: columnar_sequence.Sizes | None = None


def leaf_types(type_spec: fl.Type) -> list[fl.TensorType | fl.SequenceType]:
    """Return the tensors and sequences of a structure, in order.

    Raises:
        Fallback: it holds something else.
    """
    match type_spec:
        case fl.StructType():
            return [leaf for _, e in type_spec.items() for leaf in leaf_types(e)]
        case fl.TensorType() | fl.SequenceType():
            return [type_spec]
        case _:
            raise Fallback(f"a value of type `{type_spec}`")


_MOST_TENSORS = 500
"""Of a structure; TensorFlow takes minutes to prepare loops over a thousand."""


def refuse_many(num_tensors: int, where: str) -> None:
    """Raise where a structure has more tensors than graphs are built for.

    Raises:
        Fallback: it has.
    """
    if num_tensors > _MOST_TENSORS:
        raise Fallback(f"{num_tensors} tensors {where}")


def parameter_of(block: fl.framework.ComputationBuildingBlock) -> fl.Type:
    """Return the type that a function takes."""
    return cast("fl.Type", type_checks.function_type(block.type_signature).parameter)


def specs_of(type_spec: fl.Type) -> list[tf.TensorSpec]:
    """Return the specs of the tensors of a type.

    Raises:
        Fallback: there are sequences in it.
    """
    all_specs: list[tf.TensorSpec] = []
    for leaf in leaf_types(type_spec):
        if isinstance(leaf, fl.SequenceType):
            raise Fallback(f"a value of type `{leaf}` to accumulate")
        all_specs.append(specs.to_spec(leaf))
    return all_specs


def flatten(value: Any) -> list[Any]:
    """Return the tensors and sequences of a value inside of a graph, in order."""
    if isinstance(value, Struct):
        return [leaf for member in value for leaf in flatten(member)]
    return [value]


flf = fl.framework


@dataclasses.dataclass(frozen=True)
class PendingSequence:
    """A sequence that a computation returns, for another one to be composed with it.

    Attributes:
        message: of the computation; it draws nothing and has no state.
        types: of what it takes, in order.
        leaves: of its argument, tensors and sequences.
    """

    message: TensorFlowMessage
    types: tuple[fl.Type, ...]
    leaves: tuple[Any, ...]


def message_of(block: flf.CompiledComputation) -> TensorFlowMessage:
    """Return the message of a computation.

    Raises:
        Fallback: it is not of TensorFlow.
    """
    proto = block.to_proto()
    if proto.WhichOneof("computation") != "tensorflow":
        raise Fallback(f"a computation of kind {proto.WhichOneof('computation')}")
    return proto.tensorflow


def compose_pending(
    block: flf.CompiledComputation, leaves: Sequence[Any]
) -> tuple[TensorFlowMessage, fl.FunctionType, Sequence[Any]]:
    """Return a computation that takes what its pending sequences are made of.

    With leaves that it takes; those that were given, where none is pending.
    """
    type_spec = cast("fl.FunctionType", block.type_signature)
    return graph_message.compose_all(
        message_of(block), type_spec, leaves, PendingSequence
    )


_VARIABLE_OPS = re.compile(
    "VarHandleOp|VarIsInitializedOp|VariableShape|ReadVariableOp|Assert"
    "|Assign(Add|Sub)?VariableOp"
    "|Resource(Gather(Nd)?|Scatter.*|(Sparse)?Apply.*|StridedSliceAssign)"
)
"""Ops whose state ends with a call of a graph: it makes its variables anew."""


@dataclasses.dataclass(frozen=True)
class RandomOp:
    """A random op of a kernel, and what its random numbers depend on.

    Attributes:
        path: names of the locals that its computation is called in.
        content: identifies computation and op.
    """

    path: tuple[str, ...]
    content: bytes


class GraphImporter:
    """Puts computations into the graph that is current, and knows what they draw.

    Attributes:
        sites: the random ops, in the order of their states.
        unkeyed: the random ops without a state that can be set.
        ends: results of what was put in. Where the next iteration waits for them,
            TensorFlow optimises each computation for itself: it would make one sum of
            several, in an order of its own, and other bits.
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
        self.sites: list[RandomOp] = []
        self.unkeyed: list[diagnostics.RandomOpsUnkeyed] = []
        self.ends: list[tf.Tensor] = []
        self.ops: set[str] = set()
        self._states: list[randomness.RandomStates] = []
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

    def optimization_barrier(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor as one of this graph that what is put in takes.

        Where that is isolated, the tensor is opaque.

        An op that takes a constant, or what another computation just added, is
        otherwise rewritten: x / 3 to x * (1 / 3), sums of sums to one sum.
        """
        if not self._isolated:
            return tf.identity(tensor)
        return tf.compat.v1.placeholder_with_default(tensor, tensor.shape)

    @property
    def keeps_states(self) -> bool:
        """Whether random ops have variables that are kept between calls."""
        return any(states.names for states in self._states)

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
            Fallback: it is not of TensorFlow, needs tf.data, has state or effects
                where there may be none, or draws where `use_states` was not called.
        """
        message = message_of(block)
        content = identity.content_of(message)
        lowered, leaves, is_composed = self._lower(block, leaves)
        graph_def = lowered.graph_def
        stateful = self._check_state(graph_def)
        if stateful and is_composed:  # interpreted, it would draw through tf.data
            raise Fallback(f"{stateful[0]} in work on a sequence result")
        loader.use_deterministic_ops(graph_def)
        states = randomness.key_random_ops(graph_def)
        if self._state_of is None and (states.names or states.unkeyed):
            raise Fallback("random numbers in work without clients")
        feeds = dict(zip(lowered.feeds, _tensors(leaves), strict=True))
        self._note_unkeyed(graph_message.origin_of(message), content, states)
        assigned = self._assign(graph_def, states, content, path, feeds)
        loader.isolate(graph_def, *assigned, lowered.initialize_op)
        if self._allowed != "any":
            feeds = _without_placeholders(graph_def, feeds, lowered.fetches)
        inside = {
            name: self.optimization_barrier(tensor) for name, tensor in feeds.items()
        }
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
        stateful = inlining.stateful_ops(graph_def)
        if self._allowed == "variables":
            refused = [op for op in stateful if not _VARIABLE_OPS.fullmatch(op)]
        else:
            refused = stateful if self._allowed == "none" else []
        if refused:
            raise Fallback(f"{refused[0]}, an op with state or effects")
        return stateful

    def _lower(
        self, block: flf.CompiledComputation, leaves: Sequence[Any]
    ) -> tuple[lowering.Lowered, Sequence[Any], bool]:
        """Return a computation without tf.data, what it takes, whether it is of two."""
        message, type_spec, composed = compose_pending(block, leaves)
        self.ops.update(jit.op_kinds(graph_message.graph_of(message)))
        sizes = _sizes(composed)
        lowered = lowering.lower(message, type_spec, sizes, unrolled=self._unrolled)
        if isinstance(lowered, Fallback):
            raise lowered
        return lowered, composed, composed is not leaves

    def defer(
        self, block: flf.CompiledComputation, leaves: Sequence[Any]
    ) -> PendingSequence:
        """Return the sequence that a computation returns, to be composed.

        Raises:
            Fallback: it draws, or has state or effects.
        """
        message, type_spec, leaves = compose_pending(block, leaves)
        if effects := inlining.find_effects(message):
            raise Fallback(f"{effects} in a sequence result")
        types = graph_message.flat_types(type_spec.parameter)
        return PendingSequence(message, tuple(types), tuple(leaves))

    def _note_unkeyed(
        self, origin: str, content: bytes, states: randomness.RandomStates
    ) -> None:
        if states.unkeyed:
            ops = tuple(states.unkeyed)
            self.unkeyed.append(
                diagnostics.RandomOpsUnkeyed(origin, content.hex()[:12], ops)
            )

    def _assign(
        self,
        graph_def: GraphDef,
        states: randomness.RandomStates,
        content: bytes,
        path: tuple[str, ...],
        feeds: dict[str, Any],
    ) -> list[str]:
        """Let a graph set its random states first; return the op that does."""
        if not states.names or self._state_of is None:
            return []
        self._states.append(states)
        placeholders, op = randomness.add_assignments(graph_def, states)
        for index, placeholder in enumerate(placeholders):
            feeds[placeholder] = self._state_of(len(self.sites))
            site = RandomOp(path, content + index.to_bytes(4))
            self.sites.append(site)
        return [op]


def _without_placeholders(
    graph_def: GraphDef, feeds: dict[str, Any], fetches: Sequence[str]
) -> dict[str, Any]:
    """Remove the placeholders of feeds, in place; return the feeds that are read.

    They would stay in the graph, unread, where XLA refuses them.
    """
    fetched = {graph_message.node_of(name) for name in fetches}
    names = {graph_message.node_of(name) for name in feeds} - fetched
    kept = [node for node in graph_def.node if node.name not in names]
    read = {
        graph_message.node_of(source) for node in kept for source in node.input
    } | fetched
    del graph_def.node[:]
    graph_def.node.extend(kept)
    return {
        name: fed for name, fed in feeds.items() if graph_message.node_of(name) in read
    }


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


Block = flf.ComputationBuildingBlock
Path = tuple[str, ...]
Names = Mapping[str, Callable[[], Any]]

_IN_GRAPHS = operators.OPERATORS.keys() - {
    intrinsics.AVERAGE.uri,
    intrinsics.CHECK_MAXIMUM.uri,
    intrinsics.CHECK_BITWIDTH.uri,
    intrinsics.MODULAR_ZERO.uri,
}
"""What has no need to look at a value while the graph is built."""

_AS_THEY_ARE = frozenset(
    {flf.FEDERATED_VALUE_AT_SERVER.uri, flf.FEDERATED_ZIP_AT_SERVER.uri}
)
"""What does nothing where a value at the server is its member."""


TracedFunction: TypeAlias = Callable[[Any, Path], Any]
"""A function inside of a graph: from its argument, and the locals it runs in."""


class GraphBuilder:
    """Evaluates building blocks in the graph that is current.

    Args:
        importer: puts TensorFlow computations into the graph.
        counts: takes tensors that are to be above zero, for the caller to see to it;
            None: whatever raises where one is zero is unfit.
    """

    def __init__(
        self, importer: GraphImporter, counts: list[tf.Tensor] | None = None
    ) -> None:
        self._importer = importer
        self._counts = counts

    def call(self, function: Block, argument: Any) -> Any:
        """Return the result of a closed lambda.

        Raises:
            Fallback: it needs what only executors can do.
        """
        return self._evaluate(function, {}, ())(argument, ())

    def _evaluate(self, block: Block, names: Names, path: Path) -> Any:
        match block:
            case flf.Reference():
                return names[block.name]()
            case flf.Lambda():
                return self._close(block, names)
            case flf.Block():
                for name, local in block.locals:
                    names = {**names, name: self._local(name, local, names, path)}
                return self._part(block.result, "result", names, path)
            case flf.Struct():
                return Struct(
                    (name, self._part(element, index, names, path))
                    for index, (name, element) in enumerate(block.items())
                )
            case flf.Selection():
                return self._evaluate(block.source, names, path)[block.as_index()]
            case flf.Call():
                argument = None
                function = self._evaluate(block.function, names, path)
                if block.argument is not None:
                    argument = self._part(block.argument, "argument", names, path)
                return function(argument, path)
            case _:
                return self._atom(block)

    def _part(self, part: Block, where: str | int, names: Names, path: Path) -> Any:
        """Evaluate a part of a block; its random numbers depend on its place there."""
        name = blocks.operand_name(part, where)
        return self._evaluate(part, names, path if name is None else (*path, name))

    def _local(
        self, name: str, block: Block, names: Names, path: Path
    ) -> Callable[[], Any]:
        cached: list[Any] = []

        def evaluate() -> Any:
            if not cached:
                cached.append(self._evaluate(block, names, (*path, name)))
            return cached[0]

        return evaluate

    def _close(self, block: flf.Lambda, names: Names) -> TracedFunction:
        def run(argument: Any, path: Path) -> Any:
            inner = dict(names)
            if block.parameter_name is not None:
                inner[block.parameter_name] = lambda: argument
            return self._evaluate(block.result, inner, path)

        return run

    def _atom(self, block: Block) -> Any:
        match block:
            case flf.Literal():
                value: Any = block.value
                return tf.constant(value, specs.to_tf_dtype(block.type_signature))
            case flf.Intrinsic():
                return self._intrinsic(block)
            case flf.CompiledComputation():
                return self._compiled(block)
            case _:
                raise Fallback(f"a building block of kind {type(block).__name__}")

    def _compiled(self, block: flf.CompiledComputation) -> TracedFunction:
        result = cast("fl.FunctionType", block.type_signature).result

        def run(argument: Any, path: Path) -> Any:
            leaves = [] if argument is None else flatten(argument)
            if isinstance(result, fl.SequenceType):
                return self._importer.defer(block, leaves)
            tensors = self._importer.call(block, leaves, path)
            for tensor, leaf in zip(tensors, leaf_types(result), strict=True):
                tensor.set_shape(specs.to_spec(cast("fl.TensorType", leaf)).shape)
            return unflatten(iter(tensors), result)

        return run

    def _intrinsic(self, block: flf.Intrinsic) -> TracedFunction:
        uri, type_spec = block.uri, cast("fl.FunctionType", block.type_signature)

        def operate(argument: Any, _: Path) -> Any:
            parts = [] if argument is None else list(map(flatten, argument))
            shielded = [
                [self._importer.optimization_barrier(t) for t in part] for part in parts
            ]
            return unflatten(iter(operator(shielded, type_spec)), type_spec.result)

        if uri in _IN_GRAPHS:
            operator = operators.OPERATORS[uri]
            return operate
        if uri == intrinsics.AVERAGE.uri and self._counts is not None:
            operator = self._divide_sums
            return operate
        if uri in _AS_THEY_ARE:
            return lambda argument, _: argument
        if uri == flf.FEDERATED_APPLY.uri:
            return lambda argument, path: argument[0](argument[1], path)
        if uri == flf.FEDERATED_EVAL_AT_SERVER.uri:
            return lambda argument, path: argument(None, path)
        raise Fallback(f"`{uri}` at clients")

    def _divide_sums(self, parts: list[Any], type_spec: fl.FunctionType) -> list[Any]:
        cast("list[Any]", self._counts).append(operators.count_of(parts))
        return operators.divide_sums(parts, type_spec)

"""Builds one graph from a building block and the TensorFlow computations in it.

A building block is a node of the syntax tree of a user's computation. It is interpreted
while the graph is built. Values are tensors, `GraphSequence`s and structs of both.
Functions are Python functions of these values. Locals are evaluated on first use, and
random numbers depend on their names, as in executors. If a computation takes the
sequence that another one returns, the two are joined.

A graph of many clients runs a computation once for each client. Variables that the
computation creates become values (`lowering.variables`). Tables, random states and
other variables are initialized at the beginning of each iteration.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import federated_language as fl
import tensorflow as tf

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.loader as loader
import ray_fed.tensorflow.graphs.randomness as randomness
import ray_fed.tensorflow.lowering as lowering
import ray_fed.tensorflow.lowering.inlining as inlining
import ray_fed.tensorflow.lowering.variables as variables
from ray_fed.language import blocks, intrinsics, trees, type_checks
from ray_fed.language.structs import Struct
from ray_fed.plan import diagnostics
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow import operators
from ray_fed.tensorflow.graphs import frozen_weights, identity, numbers
from ray_fed.tensorflow.graphs.graph_message import GraphDef, TensorFlowMessage
from ray_fed.tensorflow.kernels import jit
from ray_fed.tensorflow.tensors import specs
from ray_fed.values import columnar_sequence
from ray_fed.values.columnar_sequence import Sizes


@dataclasses.dataclass(frozen=True)
class GraphSequence:
    """A sequence in a graph, with the columns of a `ColumnarSequence`.

    Attributes:
        columns: For each column its rows and, if it has them, its splits.
        length: Number of elements, i64[], or None with `sizes`.
        sizes: The sizes, or None if the graph must compute them. If they are known,
            columns have no splits, and their first dimension is the element.
    """

    columns: tuple[tf.Tensor, ...]
    length: tf.Tensor | None
    sizes: columnar_sequence.Sizes | None = None


def leaf_types(type_spec: fl.Type) -> list[fl.TensorType | fl.SequenceType]:
    """Return the types of the tensors and sequences in a type, in order.

    Raises Fallback if the type has other parts.
    """
    leaves = trees.leaf_types(type_spec)
    for leaf in leaves:
        if not isinstance(leaf, fl.TensorType | fl.SequenceType):
            raise Fallback(f"a value of type `{leaf}`")
    return cast("list[fl.TensorType | fl.SequenceType]", leaves)


_MOST_TENSORS = 500
"""Maximum tensors of a struct. TensorFlow takes minutes to prepare loops over a
thousand."""


def refuse_many(num_tensors: int, where: str) -> None:
    """Raise Fallback if a graph cannot have `num_tensors` tensors `where`."""
    if num_tensors > _MOST_TENSORS:
        raise Fallback(f"{num_tensors} tensors {where}")


def parameter_of(block: fl.framework.ComputationBuildingBlock) -> fl.Type:
    """Return the type of a function's parameter."""
    return cast("fl.Type", type_checks.function_type(block.type_signature).parameter)


def specs_of(type_spec: fl.Type) -> list[tf.TensorSpec]:
    """Return the specs of the tensors of a type, or raise Fallback for sequences."""
    all_specs: list[tf.TensorSpec] = []
    for leaf in leaf_types(type_spec):
        if isinstance(leaf, fl.SequenceType):
            raise Fallback(f"a value of type `{leaf}` to accumulate")
        all_specs.append(specs.to_spec(leaf))
    return all_specs


flf = fl.framework


@dataclasses.dataclass(frozen=True)
class PendingSequence:
    """A sequence that a computation returns and another computation will take.

    Attributes:
        message: The first computation. It has no state and draws no random numbers.
        types: Types of the tensors and sequences of its argument, in order.
        leaves: The tensors and sequences of its argument.
    """

    message: TensorFlowMessage
    types: tuple[fl.Type, ...]
    leaves: tuple[Any, ...]


def message_of(block: flf.CompiledComputation) -> TensorFlowMessage:
    """Return the `pb.TensorFlow` of a computation. Raise Fallback for other kinds."""
    proto = block.to_proto()
    if proto.WhichOneof("computation") != "tensorflow":
        raise Fallback(f"a computation of kind {proto.WhichOneof('computation')}")
    return proto.tensorflow


def compose_pending(
    block: flf.CompiledComputation, leaves: Sequence[Any]
) -> tuple[TensorFlowMessage, fl.FunctionType, Sequence[Any]]:
    """Join a computation with the pending sequences in `leaves`, see `compose_all`."""
    type_spec = cast("fl.FunctionType", block.type_signature)
    return graph_message.compose_all(
        message_of(block), type_spec, leaves, PendingSequence
    )


@dataclasses.dataclass(frozen=True)
class RandomOp:
    """A random op of a kernel.

    `path` has the names of the locals in which the op's computation is called.
    `content` identifies the computation and the op.
    """

    path: tuple[str, ...]
    content: bytes


class GraphImporter:
    """Imports TensorFlow computations into the current graph, and records their ops.

    Args:
        allowed: Ops with state or effects that may be imported: "any", "checks"
            (assertions), or "none". Variables that became values do not count.
        unrolled: See `lowering.lower`.
        isolated: Whether TensorFlow must optimize each computation separately, so that
            it has the same bits as in a call of its own.
        trusts_sums: Whether to leave out the checks of a client whose failure makes a
            sum over clients infinite or NaN, see `lowering.variables.trust_sums`. The
            caller then checks the sums.

    Attributes:
        sites: The random ops, in the order of their states.
        unkeyed: Notes about the random ops whose state cannot be set.
        ends: Results of the imported computations. The next iteration must wait for
            them, because TensorFlow would otherwise join sums of several computations
            into one, with other bits.
        ops: Kinds of the imported ops, see `jit.op_kinds`.
        numbers: Values of the constants that are marked with an index, f64[numbers],
            see `graphs.numbers`. None if constants have their own values.
        checks: Tensors, bool[], one for each imported computation with checks: whether
            all of its checks passed. Empty if a failed check raises in the graph.
        relies_on_sums: Whether `trusts_sums` left out a check.
    """

    def __init__(
        self,
        *,
        allowed: Literal["any", "checks", "none"] = "any",
        unrolled: bool = False,
        isolated: bool = True,
        trusts_sums: bool = False,
    ) -> None:
        self._allowed = allowed
        self._trusts_sums = trusts_sums
        self.relies_on_sums = False
        self._isolated = isolated
        self._unrolled = unrolled
        self.sites: list[RandomOp] = []
        self.unkeyed: list[diagnostics.RandomOpsUnkeyed] = []
        self.ends: list[tf.Tensor] = []
        self.ops: set[str] = set()
        self.checks: list[tf.Tensor] = []
        self.numbers: tf.Tensor | None = None
        self._states: list[randomness.RandomStates] = []
        self._state_of: Callable[[int], tf.Tensor] | None = None

    def use_states(self, state_of: Callable[[int], tf.Tensor]) -> None:
        """Set the random states of the computations that are imported next.

        `state_of` maps an index in `sites` to a state, i64[3], in the current graph.
        """
        self._state_of = state_of

    def leave_graph(self) -> None:
        """Drop the references to the current graph."""
        self.ends = []
        self.numbers = self._state_of = None

    def optimization_barrier(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor to pass to an imported computation in place of `tensor`."""
        if not self._isolated:
            return tf.identity(tensor)
        # TensorFlow does not optimize across a placeholder. Otherwise it would rewrite
        # x / 3 to x * (1 / 3), and sums of sums to one sum, with other bits.
        return tf.compat.v1.placeholder_with_default(tensor, tensor.shape)

    @property
    def keeps_states(self) -> bool:
        """Whether random ops have variables that stay between calls."""
        return any(states.names for states in self._states)

    def create(self) -> None:
        """Create the state variables on the current device."""
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
        """Import a computation into the current graph and return its results.

        `leaves` are the tensors and sequences of its argument. `path` has the names of
        the locals in which it is called. Raises Fallback if the computation is not of
        TensorFlow, needs tf.data, has ops that are not allowed, or draws random numbers
        without `use_states`.
        """
        message = message_of(block)
        content = identity.content_of(message)
        lowered, leaves, is_composed = self._lower(block, leaves)
        graph_def = lowered.graph_def
        if self._trusts_sums and variables.trust_sums(graph_def):
            self.relies_on_sums = True
        stateful = self._check_state(graph_def)
        if stateful and is_composed:  # executors would draw in tf.data instead
            raise Fallback(f"{stateful[0]} in work on a sequence result")
        loader.use_deterministic_ops(graph_def)
        states = randomness.key_random_ops(graph_def)
        if self._state_of is None and (states.names or states.unkeyed):
            raise Fallback("random numbers in work without clients")
        feeds = dict(zip(lowered.feeds, _tensors(leaves), strict=True))
        if self.numbers is not None:
            for name, mark in numbers.marks_of(graph_def).items():
                feeds[f"{name}:0"] = self.numbers[int(mark)]
        self._note_unkeyed(graph_message.origin_of(message), content, states)
        assigned = self._assign(graph_def, states, content, path, feeds)
        loader.isolate(graph_def, *assigned, lowered.initialize_op)
        feeds |= frozen_weights.write_all(graph_def)
        fetches = [name for name in (*lowered.fetches, lowered.passed) if name]
        if self._allowed != "any":
            feeds = _without_placeholders(graph_def, feeds, fetches)
        inside = {
            name: self.optimization_barrier(tensor) for name, tensor in feeds.items()
        }
        results = tf.graph_util.import_graph_def(
            graph_def,
            input_map=inside,
            return_elements=fetches,
            name="call",
        )
        if lowered.passed is not None:
            self.checks.append(results.pop())
        self.ends += results
        return results

    def _check_state(self, graph_def: GraphDef) -> list[str]:
        stateful = inlining.stateful_ops(graph_def)
        if self._allowed == "checks":
            refused = [op for op in stateful if op != "Assert"]
        else:
            refused = stateful if self._allowed == "none" else []
        if refused:
            raise Fallback(f"{refused[0]}, an op with state or effects")
        return stateful

    def _lower(
        self, block: flf.CompiledComputation, leaves: Sequence[Any]
    ) -> tuple[lowering.Lowered, Sequence[Any], bool]:
        # The last result says whether the computation was joined with another one.
        message, type_spec, composed = compose_pending(block, leaves)
        sizes = _sizes(composed)
        lowered = lowering.lower(
            message,
            type_spec,
            sizes,
            unrolled=self._unrolled,
            isolated=self._isolated,
        )
        if isinstance(lowered, Fallback):
            raise lowered
        kinds = set(jit.op_kinds(graph_message.graph_of(message))) - jit.VALUES
        if lowered.kept_variables is not None:
            kinds.add(jit.KEPT_VARIABLES + lowered.kept_variables)
        self.ops.update(kinds)
        return lowered, composed, composed is not leaves

    def defer(
        self, block: flf.CompiledComputation, leaves: Sequence[Any]
    ) -> PendingSequence:
        """Return the sequence that a computation returns, without importing it.

        `leaves` are the tensors and sequences of its argument. Raises Fallback if the
        computation draws random numbers, or has state or effects.
        """
        message, type_spec, leaves = compose_pending(block, leaves)
        if effects := inlining.find_effects(message):
            raise Fallback(f"{effects} in a sequence result")
        types = trees.leaf_types(type_spec.parameter)
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
    # XLA refuses placeholders that stay in the graph. They are removed in place, and
    # the feeds that the graph reads are returned.
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
"""URIs of the intrinsics that graphs can contain. The others check values in Python."""

_AS_THEY_ARE = frozenset(
    {flf.FEDERATED_VALUE_AT_SERVER.uri, flf.FEDERATED_ZIP_AT_SERVER.uri}
)
"""URIs of the intrinsics that return their argument, because graphs have no placements.
"""


TracedFunction: TypeAlias = Callable[[Any, Path], Any]
"""A function in a graph. It takes the argument, and the names of the locals in which it
is called."""


class GraphBuilder:
    """Evaluates building blocks in the current graph.

    `counts` is a list that receives the counts by which means are divided. The caller
    checks that they are not 0. With None, means raise Fallback.
    """

    def __init__(
        self, importer: GraphImporter, counts: list[tf.Tensor] | None = None
    ) -> None:
        self._importer = importer
        self._counts = counts

    def call(self, function: Block, argument: Any) -> Any:
        """Return the result of a closed function, or raise Fallback."""
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
            leaves = [] if argument is None else trees.flatten(argument)
            if isinstance(result, fl.SequenceType):
                return self._importer.defer(block, leaves)
            tensors = self._importer.call(block, leaves, path)
            for tensor, leaf in zip(tensors, leaf_types(result), strict=True):
                tensor.set_shape(specs.to_spec(cast("fl.TensorType", leaf)).shape)
            return trees.unflatten(iter(tensors), result)

        return run

    def _intrinsic(self, block: flf.Intrinsic) -> TracedFunction:
        uri, type_spec = block.uri, cast("fl.FunctionType", block.type_signature)

        def operate(argument: Any, _: Path) -> Any:
            parts = [] if argument is None else list(map(trees.flatten, argument))
            shielded = [
                [self._importer.optimization_barrier(t) for t in part] for part in parts
            ]
            results = operator(shielded, type_spec)
            return trees.unflatten(iter(results), type_spec.result)

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

"""Runs the body of a graph or function symbolically: it writes an equivalent graph.

Ordinary nodes are copied into the current graph. Ops of tf.data or of variables, and
calls, branches and loops around them, have a *rule*, a Python function. It returns
tensors, or *traced values*: objects for a sequence, an iterator or a variable, which
exist only while the graph is written.

    Batch -> Reduce -> Mul -> Call(f: Iterator...)    original
      rule    rule    copied   rule: runs the body of f in the same way

Effects keep their order. For each original node, *anchors* are the new tensors and ops
that are computed only after the effects of the node. If a node has a control input, its
new form waits for the anchors of that input. The results of a function wait for all its
effects.
"""

import abc
import collections
import contextlib
import dataclasses
import functools
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.python.framework import op_def_registry  # no public name
from typing_extensions import override

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.randomness as randomness
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.graphs.graph_message import (
    FunctionDef,
    GraphDef,
    NodeDef,
    TensorFlowMessage,
    functions_of,
    node_of,
)
from ray_fed.values import read_limits


class TracedValue:
    """A value that exists only while a graph is written, such as a sequence.

    Its *leaves* are the tensors in it that can change. They pass through the loops and
    branches of the graph in its place.
    """

    def leaves(self) -> list[tf.Tensor]:
        """Return the tensors that can change, by default an empty list."""
        return []

    def shapes(self) -> list[tf.TensorShape]:
        """Return static shapes of the leaves that hold in each iteration of a loop."""
        return [leaf.shape for leaf in self.leaves()]

    def with_leaves(self, leaves: Sequence[tf.Tensor]) -> "TracedValue":
        """Return a copy with other leaves, or the value itself if it has none."""
        del leaves
        return self

    def is_like(self, other: Any) -> bool:
        """Return whether `other` can differ from this value in its leaves only."""
        return other is self


class Carried(TracedValue, abc.ABC):
    """A traced value that changes when it is used, such as an iterator or a variable.

    All uses in one body share one object. A loop or branch changes a copy, and then the
    outer object takes the last leaves of the copy. `original` is the outermost object
    of a copy, and otherwise the object itself.
    """

    def __init__(self, original: "Carried | None") -> None:
        self.original = original or self

    @abc.abstractmethod
    @override
    def with_leaves(self, leaves: Sequence[tf.Tensor]) -> "Carried":
        """Return a copy with other leaves, for a loop or branch."""

    @abc.abstractmethod
    def take(self, leaves: Sequence[tf.Tensor]) -> None:
        """Set the leaves of this object to the last leaves of a copy of it."""

    @override
    def is_like(self, other: Any) -> bool:
        return isinstance(other, Carried) and other.original is self.original


class IgnoredResource(TracedValue):
    """A seed generator or a cache of tf.data, which the new graph does not need."""


@dataclasses.dataclass(frozen=True, eq=False)
class SerializedDataset(TracedValue):
    """The serialized graph of a dataset, for the op DatasetFromGraph."""

    sequence: TracedValue


@dataclasses.dataclass(frozen=True)
class Body:
    """The nodes of a graph or of a library function, in one notation.

    An output of a node is named `node:1`, as in a GraphDef, and not `node:name:0`, as
    in a FunctionDef.

    Attributes:
        nodes: Nodes by name, without the arguments.
        arguments: Names of the arguments' tensors.
        results: Names of the results' tensors.
        last: Names of nodes whose effects belong to the body, besides its results.
        first: Names of nodes to write before the others, after their inputs.
    """

    nodes: Mapping[str, NodeDef]
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    last: tuple[str, ...] = ()
    first: tuple[str, ...] = ()


def tensor_of(source: str) -> str:
    """Return the full name of an input tensor, such as `a:0` for `a`."""
    return source if ":" in source else f"{source}:0"


def of_graph(
    graph_def: GraphDef,
    arguments: Sequence[str],
    results: Sequence[str],
    last: Sequence[str],
) -> Body:
    """Return a graph as a `Body`. The names are as in the attributes of `Body`."""
    fed = {node_of(name) for name in arguments}
    nodes = {node.name: node for node in graph_def.node if node.name not in fed}
    return Body(
        nodes,
        tuple(map(tensor_of, arguments)),
        tuple(map(tensor_of, results)),
        tuple(map(node_of, last)),
    )


def of_function(function: FunctionDef) -> Body:
    """Return a library function as a `Body`."""
    arguments = [argument.name for argument in function.signature.input_arg]
    flat = {name: f"{name}:0" for name in arguments}
    for node in function.node_def:
        for index, name in enumerate(output_names(node)):
            flat[f"{node.name}:{name}"] = f"{node.name}:{index}"
    nodes: dict[str, NodeDef] = {}
    for node in function.node_def:
        copied = type(node)()
        copied.CopyFrom(node)
        del copied.input[:]
        copied.input.extend(
            source if source.startswith("^") else flat[source] for source in node.input
        )
        nodes[node.name] = copied
    outputs = function.signature.output_arg
    return Body(
        nodes,
        tuple(flat[name] for name in arguments),
        tuple(flat[function.ret[output.name]] for output in outputs),
        tuple(function.control_ret.values()),
    )


def origin_of(body: Body, result: str) -> str:
    """Return the name of the tensor that a result is, before Identity nodes."""
    while result not in body.arguments:
        node = body.nodes[node_of(result)]
        if node.op != "Identity" or len(node.input) != 1:
            break
        result = tensor_of(node.input[0])
    return result


def _call_of(function: FunctionDef) -> Body:
    signature = function.signature
    node = tf.compat.v1.NodeDef(name=signature.name)
    last = (node.name,) if is_stateful(function) else ()
    node.op = "StatefulPartitionedCall" if last else "PartitionedCall"
    node.attr["f"].func.name = signature.name
    node.attr["Tin"].list.type.extend(argument.type for argument in signature.input_arg)
    node.attr["Tout"].list.type.extend(result.type for result in signature.output_arg)
    arguments = tuple(f"{argument.name}:0" for argument in signature.input_arg)
    node.input.extend(arguments)
    results = tuple(f"{node.name}:{i}" for i in range(len(signature.output_arg)))
    return Body({node.name: node}, arguments, results, last)


def is_stateful(function: FunctionDef) -> bool:
    """Return whether an op in a function has state or effects."""
    return any(definition_of(node).is_stateful for node in function.node_def)


def output_names(node: NodeDef) -> Iterator[str]:
    """Yield "name:index" of each output of a node, as a FunctionDef names outputs."""
    definition = definition_of(node)
    for output in definition.output_arg:
        count = 1
        if output.number_attr:
            count = node.attr[output.number_attr].i
        elif output.type_list_attr:
            count = len(node.attr[output.type_list_attr].list.type)
        for index in range(count):
            yield f"{output.name}:{index}"


def definition_of(node: NodeDef) -> Any:
    """Return TensorFlow's OpDef of a node, or raise Fallback for an unknown op."""
    definition = op_def_registry.get(node.op)
    if definition is None:
        raise Fallback(node.op)
    return definition


def needed(nodes: Mapping[str, NodeDef], roots: Iterable[str]) -> list[str]:
    """Return the names of roots and of the nodes that they depend on, inputs first.

    Raises Fallback if one of these nodes is in a loop of TensorFlow 1.
    """
    names = [name for name in graph_message.reached(nodes, roots) if name in nodes]
    if any(nodes[name].op == "NextIteration" for name in names):
        raise Fallback("NextIteration")
    return names


_CALLS = frozenset(
    {"Case", "If", "PartitionedCall", "StatefulPartitionedCall", "While", "Placeholder"}
)
"""Ops that count as stateful only because of the functions they may call."""


def stateful_ops(graph_def: GraphDef) -> list[str]:
    """Return the kinds of ops with state or effects in a graph, in order."""
    return [
        str(node.op)
        for nodes in graph_message.all_nodes(graph_def)
        for node in nodes
        if node.op not in _CALLS and definition_of(node).is_stateful
    ]


def find_effects(message: TensorFlowMessage) -> str | None:
    """Return a few words about an op with state, effects or random numbers, or None."""
    graph_def = graph_message.graph_of(message)
    if stateful := stateful_ops(graph_def):
        return stateful[0]
    states = randomness.key_random_ops(graph_def)
    return "a random op" if states.names or states.unkeyed else None


def with_functions(graph_def: GraphDef, library: Any, kept: Sequence[str]) -> Any:
    """Return a graph with the nodes that `kept` tensors need, and their functions.

    `library` has functions that `graph_def` lacks. Functions get names that are equal
    in every process, because random ops are numbered in the order of functions.
    """
    nodes = {node.name: node for node in graph_def.node}
    names = set(needed(nodes, map(node_of, kept)))
    functions = {f.signature.name: f for f in library.function}
    functions |= {f.signature.name: f for f in graph_def.library.function}
    built = tf.compat.v1.GraphDef(versions=graph_def.versions)
    built.node.extend(node for node in graph_def.node if node.name in names)
    called = called_functions(built.node, functions)
    built.library.function.extend(functions[name] for name in called)
    built.library.gradient.extend(
        gradient
        for gradient in library.gradient
        if {gradient.function_name, gradient.gradient_func} <= set(called)
    )
    graph_message.rename_functions(built, lambda _, index: f"lowered_{index}")
    return built


def called_functions(
    nodes: Iterable[NodeDef], functions: Mapping[str, FunctionDef]
) -> list[str]:
    """Return the names of the functions that nodes call, directly or indirectly."""
    called: dict[str, None] = {}
    pending = collections.deque(nodes)
    while pending:
        for name in functions_of(pending.popleft()):
            if name in functions and name not in called:
                called[name] = None
                pending.extend(functions[name].node_def)
    return list(called)


Value: TypeAlias = "tf.Tensor | TracedValue"
Anchors: TypeAlias = "list[tf.Tensor | tf.Operation]"
"""Tensors and ops to wait for, in order to run after the effects of a node or body. It
is empty if there are no effects."""

LARGE = 300
"""Minimum nodes of a function that is called instead of copied. Python handles each
copied node three times, and TensorFlow inlines calls by itself."""

_AROUND, _ENTRY = "^ray_fed_around", "^ray_fed_entry"
"""Names of control inputs of copied nodes. All nodes get the first, and nodes with
effects get the second."""


@dataclasses.dataclass
class Site:
    """The argument of a rule: a node, and what the rule needs to replace it.

    Attributes:
        node: The original node.
        inputs: Tensors and traced values, without control inputs. The rule's ops wait
            for the control inputs without its help.
        inliner: The inliner, which runs the functions that the node calls.
        done: A list to which the rule adds anchors, besides its results.
        has_effects: Whether results wait for effects. The rule sets it.
    """

    node: NodeDef
    inputs: "list[Any]"
    inliner: "Inliner"
    done: Anchors = dataclasses.field(default_factory=list)
    has_effects: bool = False

    def call(self, attribute: str, inputs: "Sequence[Any]") -> "list[Any]":
        """Run the function in an attribute of the node, and return its results."""
        name = self.node.attr[attribute].func.name
        return self.inliner.call(name, inputs, done=self.done)

    def opaque(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return an equal tensor that TensorFlow's optimizer cannot look behind."""
        with tf.control_dependencies(None):
            return self.inliner.opaque(tensor)


Rule: TypeAlias = Callable[[Site], "Sequence[Any]"]


class Inliner:
    """Runs graphs, and the functions of one library, symbolically.

    Args:
        functions: FunctionDefs by name.
        data_rules: Rules of ops that are never copied, by kind of op.
        flow_rules: Rules of ops, by kind. Such an op is copied if it takes no traced
            value, and its functions have no op of `data_rules`.
        value_ops: Kinds of ops whose rules compute values and have no other effect.
        opaque: Function that hides the origin of a tensor from TensorFlow's optimizer.
        copies_all: Whether large functions are copied, too. Their ops then have static
            shapes.
    """

    def __init__(
        self,
        functions: Mapping[str, FunctionDef],
        data_rules: Mapping[str, Rule],
        flow_rules: Mapping[str, Rule],
        *,
        value_ops: AbstractSet[str] = frozenset(),
        opaque: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
        copies_all: bool = False,
    ) -> None:
        self._functions = functions
        self._data_rules = data_rules
        self._rules = {**data_rules, **flow_rules}
        self._flow_ops = flow_rules.keys()
        self.value_ops = value_ops
        self.opaque = opaque
        self._copies_all = copies_all
        self._unseen: Sequence[Carried] = ()
        self._unseen_in: Any = None
        self._body = functools.cache(self._parse)
        self._draws = functools.cache(self._search_draws)
        self.touches_data = functools.cache(self._search)

    def _parse(self, name: str) -> Body:
        return of_function(self.function(name))

    def _is_large(self, name: str) -> bool:
        return (
            not self._copies_all
            and len(self.function(name).node_def) >= LARGE
            and not self.touches_data(name)
            and not self._draws(name)  # random ops are numbered in the order of nodes
        )

    def _search_draws(self, name: str) -> bool:
        return any(map(self._may_draw, self.function(name).node_def))

    def _may_draw(self, node: NodeDef) -> bool:
        return randomness.draws(node.op) or any(map(self._draws, functions_of(node)))

    def draws_first(self, body: Body) -> bool:
        """Return whether the nodes `last` of a body, or their inputs, may draw."""
        return any(
            self._may_draw(body.nodes[name]) for name in needed(body.nodes, body.last)
        )

    def function(self, name: str) -> Any:
        """Return the FunctionDef of a name, or raise Fallback if it is missing."""
        if name not in self._functions:
            raise Fallback(f"missing function {name}")
        return self._functions[name]

    def _search(self, name: str) -> bool:
        return any(self.is_symbolic(node) for node in self.function(name).node_def)

    def is_symbolic(self, node: NodeDef) -> bool:
        """Return whether a node is an op of tf.data or `data_rules`, or calls one."""
        if node.op in self._data_rules or _is_of_data(node.op):
            return True
        return any(self.touches_data(name) for name in functions_of(node))

    def reports_effects(self, op: str) -> bool:
        """Return whether the rule of an op says itself if there are effects."""
        return op in self.value_ops or op in self._flow_ops

    def rule_for(self, op: str) -> Rule:
        """Return the rule of an op, or raise Fallback."""
        if op not in self._rules:
            raise Fallback(op)
        return self._rules[op]

    @contextlib.contextmanager
    def carrying(self, values: Sequence[Carried]) -> Generator[None]:
        """Let ops in the `with` block change values that are not inputs of any node.

        An example is whether all checks so far have passed.
        """
        outside = self._unseen, self._unseen_in
        self._unseen, self._unseen_in = values, tf.compat.v1.get_default_graph()
        try:
            yield
        finally:
            self._unseen, self._unseen_in = outside

    def unseen(self) -> list[Carried]:
        """Return the values of `carrying`, or an empty list in a graph inside it."""
        graph: Any = tf.compat.v1.get_default_graph()
        return list(self._unseen) if graph is self._unseen_in else []

    def call(
        self,
        name: str,
        inputs: "Sequence[Any]",
        entry: "Sequence[Any]" = (),
        done: "Anchors | None" = None,
        shapes: Sequence[tf.TensorShape] | None = None,
    ) -> "list[Any]":
        """Run a function of the library in the current graph, and return its results.

        `inputs` are tensors and traced values. Effects of the function wait for
        `entry`, and `done` receives their anchors. If static `shapes` of the results
        are known, a large function is called instead of copied.
        """
        takes_traced = any(isinstance(value, TracedValue) for value in inputs)
        if shapes is None or takes_traced or not self._is_large(name):
            results, anchors = self.run(self._body(name), inputs, entry)
        else:
            results, anchors = self.run(_call_of(self.function(name)), inputs, entry)
            for result, shape in zip(results, shapes, strict=True):
                result.set_shape(shape)
        if done is not None:
            done.extend(anchors)
        return results

    def run(
        self, body: Body, inputs: "Sequence[Any]", entry: "Sequence[Any]" = ()
    ) -> "tuple[list[Any], Anchors]":
        """Run a body in the current graph. Return its results and its anchors."""
        return _Run(self, body, inputs, list(entry)).results()


def _is_of_data(op: str) -> bool:
    return "Dataset" in op or "Iterator" in op or op.startswith("Optional")


def _gate(anchors: Sequence[Any]) -> tf.Tensor:
    # A tensor that waits for all anchors: if a hundred ops wait for a hundred others,
    # there are ten thousand edges. With this tensor, there are two hundred.
    with tf.control_dependencies(anchors):
        return tf.zeros([], tf.bool)


def _as_one(anchors: Anchors) -> Anchors:
    return [_gate(anchors)] if len(anchors) > 1 else anchors


class _Run:
    """One run of a body in the current graph. `entry` is as in `Inliner.call`."""

    def __init__(
        self, inliner: Inliner, body: Body, inputs: Sequence[Any], entry: Anchors
    ) -> None:
        self._inliner = inliner
        self._body = body
        self._entry = [_gate(entry)] if entry else []
        self._values: dict[str, Any] = dict(zip(body.arguments, inputs, strict=True))
        self._anchors: dict[str, Anchors] = {}
        self._effects: set[str] = set()  # nodes that have effects, or wait for some
        self._gate_of = functools.cache(self._join)
        self._pending: dict[str, Any] = {}

    def results(self) -> "tuple[list[Any], Anchors]":
        body = self._body
        roots = [*body.first, *map(node_of, body.results), *body.last]
        for name in needed(body.nodes, roots):
            self._visit(body.nodes[name])
        results = [self._value(name) for name in body.results]
        self._flush()
        done = _as_one(self._waits(body.last))
        if done:
            with tf.control_dependencies(done):
                results = [
                    value if isinstance(value, TracedValue) else tf.identity(value)
                    for value in results
                ]
        return results, done

    def _visit(self, node: NodeDef) -> None:
        read_limits.check_cancelled()  # a large graph takes seconds
        sources = [tensor_of(s) for s in node.input if not s.startswith("^")]
        takes_traced = any(
            isinstance(self._values.get(s), TracedValue) for s in sources
        )
        controls = [node_of(s) for s in node.input if s.startswith("^")]
        is_copied = not takes_traced and not self._inliner.is_symbolic(node)
        if self._follows_effects(node, is_copied=is_copied):
            self._effects.add(node.name)
        # Copied nodes wait here, and are added together before a rule needs one.
        if is_copied:
            waits_for_some = any(
                name in self._pending or self._anchors.get(name) for name in controls
            )
            if node.op != "NoOp" or waits_for_some:
                self._pending[node.name] = node
            return
        rule = self._inliner.rule_for(node.op)
        inputs = [self._value(source) for source in sources]
        is_value = node.op in self._inliner.value_ops
        if is_value:  # it passes on the waits for effects before it
            names = [*controls, *map(node_of, sources)]
            controls = [name for name in names if name in self._effects]
        if any(name in self._pending for name in controls):
            self._flush()
        site = Site(node, inputs, self._inliner)
        # Ops of the rule run after the effects that the original node waits for.
        waits = self._waits(controls)
        with tf.control_dependencies(_as_one([*waits, *self._entry])):
            outputs = list(rule(site))
        for index, output in enumerate(outputs):
            self._values[f"{node.name}:{index}"] = output
        tensors = [output for output in outputs if not isinstance(output, TracedValue)]
        self._anchors[node.name] = waits if is_value else [*tensors[:1], *site.done]
        if site.has_effects or site.done:
            self._effects.add(node.name)

    def _follows_effects(self, node: NodeDef, *, is_copied: bool) -> bool:
        if any(node_of(source) in self._effects for source in node.input):
            return True
        if self._inliner.reports_effects(node.op) and not is_copied:
            return False
        return definition_of(node).is_stateful and not randomness.draws(node.op)

    def _waits(self, names: Sequence[str]) -> Anchors:
        anchors = [each for name in names for each in self._anchors.get(name, [])]
        return list({id(anchor): anchor for anchor in anchors}.values())

    def _join(self, name: str) -> tf.Tensor:
        return _gate(self._anchors[name])

    def _value(self, name: str) -> Any:
        if name not in self._values:
            self._flush()
        return self._values[name]

    def _flush(self) -> None:
        if not self._pending:
            return
        nodes, self._pending = self._pending, {}
        graph_def = tf.compat.v1.GraphDef()
        graph_def.versions.producer = tf.version.GRAPH_DEF_VERSION
        mapped = self._outside()
        for node in nodes.values():
            graph_def.node.append(self._detached(node, nodes, mapped))
        # `_detached` adds the current control dependencies. TensorFlow would compare
        # all pairs of ops for them. The nodes get no name prefix: an argument of a loop
        # is named after a captured tensor, so two nodes could then have one name.
        with tf.control_dependencies(None):
            operations: Any = tf.graph_util.import_graph_def(
                graph_def, input_map=mapped, return_elements=list(nodes), name=""
            )
        for name, operation in zip(nodes, operations, strict=True):
            self._anchors[name] = [operation]
            for index, output in enumerate(operation.outputs):
                self._values[f"{name}:{index}"] = output

    def _outside(self) -> dict[str, tf.Tensor]:
        gate = _gate(())  # it waits for the current control dependencies
        return {_AROUND: gate} if gate.op.control_inputs else {}

    def _detached(
        self, node: NodeDef, nodes: Mapping[str, NodeDef], mapped: dict[str, tf.Tensor]
    ) -> Any:
        copied = type(node)()
        copied.CopyFrom(node)
        copied.attr.pop("_class", None)  # colocation, which refers to old names
        del copied.input[:]
        for source in node.input:
            name = node_of(source)
            if name in nodes:
                copied.input.append(source)
            elif not source.startswith("^"):
                tensor = tensor_of(source)
                mapped[tensor] = _captured(self._values[tensor])
                copied.input.append(source)
            elif self._anchors.get(name):
                mapped[f"^{name}"] = self._gate_of(name)
                copied.input.append(source)
        if _AROUND in mapped:
            copied.input.append(_AROUND)
        if self._entry and definition_of(node).is_stateful:
            [mapped[_ENTRY]] = self._entry
            copied.input.append(_ENTRY)
        return copied


def _captured(tensor: Any) -> tf.Tensor:
    graph: Any = tf.compat.v1.get_default_graph()
    return tensor if tensor.graph is graph else graph.capture(tensor)

"""Runs a body symbolically: copies what is ordinary, hands the rest to rules.

A *rule* stands for an op of tf.data, or for a call or loop around such ops; it gives
tensors, or *traced values* that only other rules understand: a sequence, an iterator.
All other nodes are copied into the current graph as they are, many at a time.

    Batch -> Reduce -> Mul -> Call(f: Iterator...)    written
      rule    rule    copied   rule: f's body is run likewise

Order of effects: a node waits for whatever stood for its control inputs, and the
results of a function wait for everything that must have run in it.

A `Body` is the body of a graph or of a library function in one notation: a GraphDef
names the output of a node `node:1`, a FunctionDef `node:name:0`; a body is written as
the former, with its arguments and results by name. Functions are named alike in every
process: TensorFlow counts what it traces, and random ops are numbered in the order of
functions, which must not depend on that.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.python.framework import op_def_registry  # no public name

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
    """A value that only rules understand.

    In a loop or branch it is carried as its `leaves`.

    Attributes:
        moves: whether using it changes it.
    """

    moves = False

    def leaves(self) -> list[tf.Tensor]:
        """Return the tensors that may change."""
        return []

    def shapes(self) -> list[tf.TensorShape]:
        """Return the static shapes that the leaves have at any time."""
        return [leaf.shape for leaf in self.leaves()]

    def with_leaves(self, leaves: Sequence[tf.Tensor]) -> "TracedValue":
        """Return this with other tensors; itself where it has none."""
        del leaves
        return self

    def is_like(self, other: Any) -> bool:
        """Return whether the other is this but for its leaves."""
        return other is self


class IgnoredResource(TracedValue):
    """A resource of tf.data that nothing lowered needs: a seed generator, a cache."""


@dataclasses.dataclass(frozen=True, eq=False)
class SerializedDataset(TracedValue):
    """A sequence bound as the graph of its dataset; undone by DatasetFromGraph."""

    sequence: TracedValue


@dataclasses.dataclass(frozen=True)
class Body:
    """Nodes with what goes in and what comes out.

    Attributes:
        nodes: by name; arguments are none of them.
        arguments: names of tensors.
        results: names of tensors.
        last: names of nodes that must have run when the body has.
    """

    nodes: Mapping[str, NodeDef]
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    last: tuple[str, ...] = ()


def tensor_of(source: str) -> str:
    """Return an input that is a tensor with its number written out."""
    return source if ":" in source else f"{source}:0"


def of_graph(
    graph_def: GraphDef,
    arguments: Sequence[str],
    results: Sequence[str],
    last: Sequence[str],
) -> Body:
    """Return the body that the nodes of a graph are."""
    fed = {node_of(name) for name in arguments}
    nodes = {node.name: node for node in graph_def.node if node.name not in fed}
    return Body(
        nodes,
        tuple(map(tensor_of, arguments)),
        tuple(map(tensor_of, results)),
        tuple(map(node_of, last)),
    )


def of_function(function: FunctionDef) -> Body:
    """Return the body of a FunctionDef."""
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
    """Return what a result of a body is another name of."""
    while result not in body.arguments:
        node = body.nodes[node_of(result)]
        if node.op != "Identity" or len(node.input) != 1:
            break
        result = tensor_of(node.input[0])
    return result


def _call_of(function: FunctionDef) -> Body:
    """Return a body that calls a function."""
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
    """Return whether an op of a function has state or effects, or may call what has."""
    return any(definition_of(node).is_stateful for node in function.node_def)


def output_names(node: NodeDef) -> Iterator[str]:
    """Yield what a FunctionDef calls the outputs of a node, after the node's name."""
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
    """Return the OpDef of a node."""
    definition = op_def_registry.get(node.op)
    if definition is None:
        raise Fallback(node.op)
    return definition


def needed(nodes: Mapping[str, NodeDef], roots: Iterable[str]) -> list[str]:
    """Return the names of the nodes that roots wait for, each after its inputs.

    Raises:
        Fallback: the nodes are in a loop of TensorFlow 1.
    """
    names = [name for name in graph_message.reached(nodes, roots) if name in nodes]
    if any(nodes[name].op == "NextIteration" for name in names):
        raise Fallback("NextIteration")
    return names


_CALLS = frozenset(
    {"Case", "If", "PartitionedCall", "StatefulPartitionedCall", "While", "Placeholder"}
)
"""Stateful to TensorFlow for what they may call, which is looked at by itself."""


def stateful_ops(graph_def: GraphDef) -> list[str]:
    """Return the kinds of ops of a graph that have state or effects, in order."""
    return [
        str(node.op)
        for nodes in graph_message.all_nodes(graph_def)
        for node in nodes
        if node.op not in _CALLS and definition_of(node).is_stateful
    ]


def find_effects(message: TensorFlowMessage) -> str | None:
    """Return what makes two calls of a computation differ, in a few words, or None."""
    graph_def = graph_message.graph_of(message)
    if stateful := stateful_ops(graph_def):
        return stateful[0]
    states = randomness.key_random_ops(graph_def)
    return "a random op" if states.names or states.unkeyed else None


def with_functions(graph_def: GraphDef, library: Any, kept: Sequence[str]) -> Any:
    """Return what a graph needs to run, with its functions.

    Args:
        graph_def: some functions that it calls may be missing in it.
        library: has these.
        kept: names of nodes and tensors that must stay.
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
    """Return the names of the functions that nodes call, and that these call."""
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
"""What to wait for, in order to run after something; empty: it has no effects."""

LARGE = 300
"""Nodes of a function that is called rather than copied: each copy is made by Python,
thrice, and TensorFlow puts what is called in the place of the call by itself."""

_AROUND, _ENTRY = "^ray_fed_around", "^ray_fed_entry"
"""Control inputs of copied nodes: what all wait for, and what those with effects do."""


@dataclasses.dataclass
class Site:
    """A node that a rule stands for.

    Attributes:
        node: as it was written.
        inputs: its inputs but for control inputs; a rule's ops wait for those.
        inliner: runs the functions that the node calls.
        done: the rule adds what else to wait for, beside its own results.
    """

    node: NodeDef
    inputs: "list[Any]"
    inliner: "Inliner"
    done: Anchors = dataclasses.field(default_factory=list)

    def call(self, attribute: str, inputs: "Sequence[Any]") -> "list[Any]":
        """Inline the function of an attribute."""
        name = self.node.attr[attribute].func.name
        return self.inliner.call(name, inputs, done=self.done)


Rule: TypeAlias = Callable[[Site], "Sequence[Any]"]


class Inliner:
    """Runs functions of one library.

    Args:
        functions: by name, as FunctionDefs.
        data_rules: for ops that are always symbolic.
        flow_rules: for ops that are where their inputs or functions are.
        copies_all: whether also what is large is copied, for static shapes inside.
    """

    def __init__(
        self,
        functions: Mapping[str, FunctionDef],
        data_rules: Mapping[str, Rule],
        flow_rules: Mapping[str, Rule],
        *,
        copies_all: bool = False,
    ) -> None:
        self._functions = functions
        self._data_rules = data_rules
        self._rules = {**data_rules, **flow_rules}
        self._copies_all = copies_all
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
            and not self._draws(name)  # draws are numbered in the order of nodes
        )

    def _search_draws(self, name: str) -> bool:
        nodes = self.function(name).node_def
        return any(
            randomness.draws(node.op) or any(map(self._draws, functions_of(node)))
            for node in nodes
        )

    def function(self, name: str) -> Any:
        """Return the FunctionDef of a name."""
        if name not in self._functions:
            raise Fallback(f"missing function {name}")
        return self._functions[name]

    def _search(self, name: str) -> bool:
        return any(self.is_symbolic(node) for node in self.function(name).node_def)

    def is_symbolic(self, node: NodeDef) -> bool:
        """Return whether a node is of tf.data, or calls what is."""
        if node.op in self._data_rules or _is_of_data(node.op):
            return True
        return any(self.touches_data(name) for name in functions_of(node))

    def rule_for(self, op: str) -> Rule:
        """Return the rule of an op.

        Raises:
            Fallback: it has none.
        """
        if op not in self._rules:
            raise Fallback(op)
        return self._rules[op]

    def call(
        self,
        name: str,
        inputs: "Sequence[Any]",
        entry: "Sequence[Any]" = (),
        done: "Anchors | None" = None,
        shapes: Sequence[tf.TensorShape] | None = None,
    ) -> "list[Any]":
        """Run a function of the library in the current graph.

        Args:
            name: of the function.
            inputs: its arguments.
            entry: what its effects wait for.
            done: receives what to wait for in order to run after its effects.
            shapes: of its results, where known: then it may be called where it is
                large, and not be copied.
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
        """Run a body in the current graph; return its results and what is `last`."""
        return _Run(self, body, inputs, list(entry)).results()


def _is_of_data(op: str) -> bool:
    return "Dataset" in op or "Iterator" in op or op.startswith("Optional")


def _gate(anchors: Sequence[Any]) -> tf.Tensor:
    """Return a tensor of the current graph to wait for instead of the anchors.

    A hundred ops that wait for a hundred others are ten thousand edges; through a gate
    they are two hundred.
    """
    with tf.control_dependencies(anchors):
        return tf.zeros([], tf.bool)


def _as_one(anchors: Anchors) -> Anchors:
    """Return anchors as at most one."""
    return [_gate(anchors)] if len(anchors) > 1 else anchors


class _Run:
    """One body being run in the current graph."""

    def __init__(
        self, inliner: Inliner, body: Body, inputs: Sequence[Any], entry: Anchors
    ) -> None:
        self._inliner = inliner
        self._body = body
        self._entry = [_gate(entry)] if entry else []
        self._values: dict[str, Any] = dict(zip(body.arguments, inputs, strict=True))
        self._anchors: dict[str, Anchors] = {}
        self._gate_of = functools.cache(self._join)
        self._pending: dict[str, Any] = {}

    def results(self) -> "tuple[list[Any], Anchors]":
        body = self._body
        roots = [*map(node_of, body.results), *body.last]
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
        if not takes_traced and not self._inliner.is_symbolic(node):
            self._pending[node.name] = node
            return
        rule = self._inliner.rule_for(node.op)
        inputs = [self._value(source) for source in sources]
        controls = [node_of(s) for s in node.input if s.startswith("^")]
        if any(name in self._pending for name in controls):
            self._flush()
        site = Site(node, inputs, self._inliner)
        waits = [*self._waits(controls), *self._entry]
        with tf.control_dependencies(_as_one(waits)):
            outputs = list(rule(site))
        for index, output in enumerate(outputs):
            self._values[f"{node.name}:{index}"] = output
        tensors = [output for output in outputs if not isinstance(output, TracedValue)]
        self._anchors[node.name] = [*tensors[:1], *site.done]

    def _waits(self, names: Sequence[str]) -> Anchors:
        return [anchor for name in names for anchor in self._anchors.get(name, [])]

    def _join(self, name: str) -> tf.Tensor:
        return _gate(self._anchors[name])

    def _value(self, name: str) -> Any:
        if name not in self._values:
            self._flush()
        return self._values[name]

    def _flush(self) -> None:
        """Copy the nodes that wait to be copied into the current graph."""
        if not self._pending:
            return
        nodes, self._pending = self._pending, {}
        graph_def = tf.compat.v1.GraphDef()
        graph_def.versions.producer = tf.version.GRAPH_DEF_VERSION
        mapped = self._outside()
        for node in nodes.values():
            graph_def.node.append(self._detached(node, nodes, mapped))
        # Without what is around: TensorFlow would compare each op with each other to
        # find which of them wait for it anyway, and finds none; `_detached` adds it.
        # Without a prefix: with one, TensorFlow may give two nodes one name where an
        # argument of a loop, named after what was captured, has that prefix, too.
        with tf.control_dependencies(None):
            operations: Any = tf.graph_util.import_graph_def(
                graph_def, input_map=mapped, return_elements=list(nodes), name=""
            )
        for name, operation in zip(nodes, operations, strict=True):
            self._anchors[name] = [operation]
            for index, output in enumerate(operation.outputs):
                self._values[f"{name}:{index}"] = output

    def _outside(self) -> dict[str, tf.Tensor]:
        """Return what all nodes wait for, as control inputs: nothing, or one."""
        gate = _gate(())  # waits for the control dependencies that are around
        return {_AROUND: gate} if gate.op.control_inputs else {}

    def _detached(
        self, node: NodeDef, nodes: Mapping[str, NodeDef], mapped: dict[str, tf.Tensor]
    ) -> Any:
        """Return a node whose inputs from elsewhere are in `mapped`."""
        copied = type(node)()
        copied.CopyFrom(node)
        copied.attr.pop("_class", None)  # colocated with what may be elsewhere
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
    """Return a tensor as one of the current graph."""
    graph: Any = tf.compat.v1.get_default_graph()
    return tensor if tensor.graph is graph else graph.capture(tensor)

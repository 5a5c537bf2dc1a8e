"""Runs a body symbolically: copies what is ordinary, hands the rest to rules.

A *rule* stands for an op of tf.data, or for a call or loop around such ops; it gives
tensors, or *symbols* that only other rules understand (a sequence, an iterator). All
other nodes are copied into the current graph as they are, many at a time.

    Batch -> Reduce -> Mul -> Call(f: Iterator...)    written
      rule    rule    copied   rule: f's body is run likewise

Order of effects: a node waits for whatever stood for its control inputs, and the
results of a function wait for everything that must have run in it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

import ray_fed.tensorflow.lowering.bodies as bodies
from ray_fed.tensorflow.graphs.protobufs import FunctionDef, NodeDef
from ray_fed.tensorflow.lowering.bodies import CannotLower
from ray_fed.tensorflow.lowering.symbols import Symbol

Value: TypeAlias = "tf.Tensor | Symbol"
Anchors: TypeAlias = "list[tf.Tensor | tf.Operation]"
"""What to wait for, in order to run after something; empty: it has no effects."""

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
    """

    def __init__(
        self,
        functions: Mapping[str, FunctionDef],
        data_rules: Mapping[str, Rule],
        flow_rules: Mapping[str, Rule],
    ) -> None:
        self._functions = functions
        self._data_rules = data_rules
        self._rules = {**data_rules, **flow_rules}
        self._body = functools.cache(self._parse)
        self.touches_data = functools.cache(self._search)

    def _parse(self, name: str) -> bodies.Body:
        return bodies.of_function(self.function(name))

    def function(self, name: str) -> Any:
        """Return the FunctionDef of a name."""
        if name not in self._functions:
            raise CannotLower(f"missing function {name}")
        return self._functions[name]

    def _search(self, name: str) -> bool:
        return any(self.is_symbolic(node) for node in self.function(name).node_def)

    def is_symbolic(self, node: NodeDef) -> bool:
        """Return whether a node is of tf.data, or calls what is."""
        if node.op in self._data_rules or _is_of_data(node.op):
            return True
        return any(self.touches_data(name) for name in bodies.functions_of(node))

    def rule_for(self, op: str) -> Rule:
        """Return the rule of an op.

        Raises:
            CannotLower: it has none.
        """
        if op not in self._rules:
            raise CannotLower(op)
        return self._rules[op]

    def call(
        self,
        name: str,
        inputs: "Sequence[Any]",
        entry: "Sequence[Any]" = (),
        done: "Anchors | None" = None,
    ) -> "list[Any]":
        """Run a function of the library in the current graph.

        Args:
            name: of the function.
            inputs: its arguments.
            entry: what its effects wait for.
            done: receives what to wait for in order to run after its effects.
        """
        results, anchors = self.run(self._body(name), inputs, entry)
        if done is not None:
            done.extend(anchors)
        return results

    def run(
        self, body: bodies.Body, inputs: "Sequence[Any]", entry: "Sequence[Any]" = ()
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
        self, inliner: Inliner, body: bodies.Body, inputs: Sequence[Any], entry: Anchors
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
        roots = [*map(bodies.node_of, body.results), *body.last]
        for name in bodies.needed(body.nodes, roots):
            self._visit(body.nodes[name])
        results = [self._value(name) for name in body.results]
        self._flush()
        done = _as_one(self._waits(body.last))
        if done:
            with tf.control_dependencies(done):
                results = [
                    value if isinstance(value, Symbol) else tf.identity(value)
                    for value in results
                ]
        return results, done

    def _visit(self, node: NodeDef) -> None:
        sources = [bodies.tensor_of(s) for s in node.input if not s.startswith("^")]
        takes_symbol = any(isinstance(self._values.get(s), Symbol) for s in sources)
        if not takes_symbol and not self._inliner.is_symbolic(node):
            self._pending[node.name] = node
            return
        rule = self._inliner.rule_for(node.op)
        inputs = [self._value(source) for source in sources]
        controls = [bodies.node_of(s) for s in node.input if s.startswith("^")]
        if any(name in self._pending for name in controls):
            self._flush()
        site = Site(node, inputs, self._inliner)
        waits = [*self._waits(controls), *self._entry]
        with tf.control_dependencies(_as_one(waits)):
            outputs = list(rule(site))
        for index, output in enumerate(outputs):
            self._values[f"{node.name}:{index}"] = output
        tensors = [output for output in outputs if not isinstance(output, Symbol)]
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
            name = bodies.node_of(source)
            if name in nodes:
                copied.input.append(source)
            elif not source.startswith("^"):
                tensor = bodies.tensor_of(source)
                mapped[tensor] = _captured(self._values[tensor])
                copied.input.append(source)
            elif self._anchors.get(name):
                mapped[f"^{name}"] = self._gate_of(name)
                copied.input.append(source)
        if _AROUND in mapped:
            copied.input.append(_AROUND)
        if self._entry and bodies.definition_of(node).is_stateful:
            [mapped[_ENTRY]] = self._entry
            copied.input.append(_ENTRY)
        return copied


def _captured(tensor: Any) -> tf.Tensor:
    """Return a tensor as one of the current graph."""
    graph: Any = tf.compat.v1.get_default_graph()
    return tensor if tensor.graph is graph else graph.capture(tensor)

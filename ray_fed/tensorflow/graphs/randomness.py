"""Rewrites the random ops of a graph, so that a key alone decides what they draw.

TensorFlow's stateful random ops keep their state where code cannot set it. Each op is
replaced by an op with the same distribution whose state is a variable (Philox; Salmon
et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). The variables are set
before each call, from the key (`ray_fed.plan.random_keys`). An op in a loop updates its
variable, so each iteration draws other numbers. Ops without such a counterpart are
composed of several others.

    RandomUniform(shape)    ->    StatefulUniform(state of this op, Philox, shape)
"""

import uuid
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context  # no public name

from ray_fed.plan import random_keys
from ray_fed.tensorflow.graphs.graph_message import GraphDef, NodeDef

KEPT_PREFIX = b"ray_fed_state_"
"""Prefix of the `shared_name` of state variables, which stay between calls."""


class RandomStates:
    """The state variables of one loaded graph. The graph's owner closes this object.

    Attributes:
        names: Names of the variables that stay between calls, in the order of their
            ops.
        unkeyed: Names and kinds of the random ops that cannot be rewritten.
        in_functions: Names and kinds of the rewritten ops in library functions. If a
            dataset calls the function, the ops draw when the dataset is read.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.unkeyed: list[str] = []
        self.in_functions: list[str] = []
        self._handles: list[Any] = []

    def create(self) -> None:
        """Create the variables on the current device."""
        self._handles = [
            tf.raw_ops.VarHandleOp(
                dtype=tf.int64, shape=[random_keys.STATE_SIZE], shared_name=name
            )
            for name in self.names
        ]

    def set(self, content: bytes) -> None:
        """Set all variables from the key of the running work, on the current device.

        `content` is the hash of the computation, see `identity.content_of`.
        """
        for index, handle in enumerate(self._handles):
            value = tf.constant(
                random_keys.state(content + index.to_bytes(4)), tf.int64
            )
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    def close(self) -> None:
        """Free the variables."""
        # The garbage collector may call this while the thread builds a graph.
        with context.eager_mode():
            for handle in self._handles:
                tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
        self._handles.clear()


def add_assignments(graph_def: GraphDef, states: RandomStates) -> tuple[list[str], str]:
    """Add nodes that set the state variables of a GraphDef, to call it in a graph.

    Variables of ops outside functions become local to the call, and are removed from
    `states.names`.

    Returns:
        The names of placeholders for the states, i64[3] each, and the name of an op
        that runs after all states are set.
    """
    inside = {
        node.attr["shared_name"].s.decode(): node
        for node in graph_def.node
        if node.op == "VarHandleOp"
    }
    group = graph_def.node.add(name="ray_fed_set_states", op="NoOp")
    names, states.names = states.names, [n for n in states.names if n not in inside]
    for index, name in enumerate(names):
        prefix = f"ray_fed_set_states/{index}"
        handle = inside.get(name)
        if handle is None:
            handle = graph_def.node.add(name=f"{prefix}/state", op="VarHandleOp")
            describe_state(handle, name)
        else:
            handle.attr["shared_name"].s = b""
        value = graph_def.node.add(name=f"{prefix}/value", op="Placeholder")
        value.attr["dtype"].type = tf.int64.as_datatype_enum
        value.attr["shape"].shape.dim.add(size=random_keys.STATE_SIZE)
        assign = graph_def.node.add(name=f"{prefix}/assign", op="AssignVariableOp")
        assign.attr["dtype"].type = tf.int64.as_datatype_enum
        assign.input.extend([handle.name, value.name])
        group.input.append(f"^{assign.name}")
    values = [f"ray_fed_set_states/{index}/value:0" for index in range(len(names))]
    return values, group.name


def describe_state(handle: NodeDef, name: str) -> None:
    """Set the attributes of the node of a state variable with a name, in place."""
    handle.attr["dtype"].type = tf.int64.as_datatype_enum
    handle.attr["shape"].shape.dim.add(size=random_keys.STATE_SIZE)
    handle.attr["shared_name"].s = name.encode()
    handle.attr["container"].s = b""


_PARALLEL_CALLS: Mapping[str, tuple[int, tf.DType]] = {
    "MapAndBatchDataset": (-2, tf.int64),
    "ParallelFilterDataset": (-1, tf.int64),
    "ParallelMapDataset": (-1, tf.int32),
    "ParallelMapDatasetV2": (-1, tf.int64),
}
"""For each op that calls a function in parallel: the position of the input with the
number of calls at once, and its dtype."""


def run_in_order(graph_def: GraphDef, *, datasets: bool) -> None:
    """Rewrite a GraphDef in place so that iterations run one after another.

    All iterations of a loop share the state of a random op, so their order decides
    which numbers each of them gets. If `datasets`, functions of datasets may draw, and
    also run one after another.
    """
    bodies = (function.node_def for function in graph_def.library.function)
    for in_function, nodes in [(False, graph_def.node), *((True, b) for b in bodies)]:
        for node in list(nodes):
            if "parallel_iterations" in node.attr:
                node.attr["parallel_iterations"].i = 1
            if datasets and node.op in _PARALLEL_CALLS:
                _call_one_at_a_time(node, nodes, in_function=in_function)
            elif datasets and node.op.startswith("ParallelInterleaveDataset"):
                _interleave_in_order(node)


def _call_one_at_a_time(node: NodeDef, nodes: Any, *, in_function: bool) -> None:
    position, dtype = _PARALLEL_CALLS[node.op]
    one = nodes.add(name=f"{node.name}/ray_fed_one", op="Const", device=node.device)
    one.attr["dtype"].type = dtype.as_datatype_enum
    one.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(1, dtype))
    waits = sum(source.startswith("^") for source in node.input)
    source = f"{one.name}:output:0" if in_function else one.name
    node.input[len(node.input) - waits + position] = source


def _interleave_in_order(node: NodeDef) -> None:
    waits = [source for source in node.input if source.startswith("^")]
    kept = 3 + len(node.attr["Targuments"].list.type)  # up to the length of a block
    inputs = [*node.input[:kept], *waits]
    del node.input[:]
    node.input.extend(inputs)
    node.op = "InterleaveDataset"
    for attribute in ("deterministic", "sloppy"):
        node.attr.pop(attribute, None)


_PHILOX = 1

_TWINS: Mapping[str, tuple[str, str, str]] = {
    "RandomUniform": ("StatefulUniform", "dtype", "T"),
    "RandomUniformInt": ("StatefulUniformInt", "Tout", "T"),
    "RandomStandardNormal": ("StatefulStandardNormalV2", "dtype", "T"),
    "TruncatedNormal": ("StatefulTruncatedNormal", "dtype", "T"),
    "NonDeterministicInts": ("StatefulUniformFullInt", "dtype", "shape_dtype"),
}
"""For each op: the op that replaces it, and the names of its own attributes with the
dtypes of the result and of the shape."""

_SEEDED: Mapping[str, int] = {
    "AnonymousRandomSeedGenerator": 0,
    "AnonymousSeedGenerator": 0,
    "ExperimentalRandomDataset": 0,
    "GlobalShuffleDataset": 1,
    "RandomDataset": 0,
    "RandomDatasetV2": 0,
    "SamplingDataset": 2,
    "ShuffleAndRepeatDataset": 2,
    "ShuffleAndRepeatDatasetV2": 2,
    "ShuffleDataset": 2,
    "ShuffleDatasetV3": 2,
}
"""For each random op of datasets: the position of the first of its two seeds."""

_SHAPED: Mapping[str, tuple[str, str, str]] = {
    "RandomGamma": ("StatelessRandomGammaV2", "T", "dtype"),
    "RandomPoisson": ("StatelessRandomPoisson", "dtype", "Rtype"),
    "RandomPoissonV2": ("StatelessRandomPoisson", "R", "Rtype"),
}
"""For each op with a parameter of its distribution: the stateless op that replaces it,
and the attributes of both with the parameter's dtype. The op takes the shape of the
draws for each element of the parameter. The stateless op takes the shape of the result.
"""

_UNKEYED = frozenset(
    {"AllCandidateSampler", "FixedUnigramCandidateSampler", "FractionalAvgPool",
     "FractionalMaxPool", "LearnedUnigramCandidateSampler",
     "LogUniformCandidateSampler", "ParameterizedTruncatedNormal", "RandomCrop",
     "RandomShuffleQueue", "RandomShuffleQueueV2", "RecordInput", "RiscRandomUniform",
     "SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2",
     "ThreadUnsafeUnigramCandidateSampler", "UniformCandidateSampler"}
)  # fmt: skip
"""Random ops that are not rewritten. They draw other numbers if work is repeated."""


_IN_NAMES = (
    "Random", "StatefulUniform", "StatefulStandard", "StatefulTruncated",
    "NonDeterministicInts", "Multinomial", "TruncatedNormal",
)  # fmt: skip
"""Parts of the names of random ops that the function of a dataset can contain."""


def differs_by_call(op: str) -> bool:
    """Return whether an op in a function of a dataset draws other numbers each time."""
    return any(part in op for part in _IN_NAMES)


def draws(op: str) -> bool:
    """Return whether an op is random: `key_random_ops` rewrites or reports it."""
    return op in _RULES or op in _UNKEYED


def key_random_ops(graph_def: GraphDef) -> RandomStates:
    """Rewrite the random ops of a GraphDef and of its functions, in place.

    Call it before `loader.isolate`, which names functions by their content. The names
    of state variables are part of this content, and differ in each call.
    """
    states = RandomStates()
    _Rewriter(graph_def.node, states, in_function=False).run()
    for function in graph_def.library.function:
        _Rewriter(function.node_def, states, in_function=True).run()
    if states.names:
        run_in_order(graph_def, datasets=bool(states.in_functions))
    return states


class _Rewriter:
    """Rewrites the nodes of one graph or function body."""

    def __init__(self, nodes: Any, states: RandomStates, *, in_function: bool) -> None:
        self._nodes = nodes
        self._states = states
        self._in_function = in_function

    def run(self) -> None:
        for node in list(self._nodes):
            shown = f"{node.name} ({node.op})"
            if node.op in _RULES:
                _RULES[node.op](self, node)
                if self._in_function:
                    self._states.in_functions.append(shown)
            elif node.op in _UNKEYED:
                self._states.unkeyed.append(shown)

    def _add(self, like: NodeDef, suffix: str, op: str, inputs: list[str]) -> Any:
        node = self._nodes.add(name=f"{like.name}/ray_fed_{suffix}", op=op)
        node.device = like.device
        node.input.extend(inputs)
        return node

    def _output(self, node: NodeDef, name: str = "output", index: int = 0) -> str:
        if self._in_function:
            return f"{node.name}:{name}:0"
        return node.name if index == 0 else f"{node.name}:{index}"

    def _constant(self, like: NodeDef, suffix: str, value: Any, dtype: tf.DType) -> str:
        node = self._add(like, suffix, "Const", [])
        node.attr["dtype"].type = dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
        return self._output(node)

    def _state_inputs(self, like: NodeDef, suffix: str = "") -> list[str]:
        name = f"{KEPT_PREFIX.decode()}{uuid.uuid4().hex}"
        self._states.names.append(name)
        handle = self._add(like, f"state{suffix}", "VarHandleOp", [])
        describe_state(handle, name)
        algorithm = self._constant(like, f"philox{suffix}", _PHILOX, tf.int64)
        return [self._output(handle, "resource"), algorithm]

    def replace_by_twin(self, node: NodeDef) -> None:
        twin, dtype, shape_dtype = _TWINS[node.op]
        types = node.attr[dtype].type, node.attr[shape_dtype].type
        inputs = [*self._state_inputs(node), *node.input]
        for attribute in ("seed", "seed2", "T", "Tout"):
            node.attr.pop(attribute, None)
        node.op = twin
        del node.input[:]
        node.input.extend(inputs)
        node.attr["dtype"].type, node.attr["shape_dtype"].type = types

    def _draw_integers(self, like: NodeDef, suffix: str, shape: list[int]) -> str:
        size = self._constant(like, f"shape{suffix}", shape, tf.int32)
        inputs = [*self._state_inputs(like, suffix), size]
        drawn = self._add(like, f"seeds{suffix}", "StatefulUniformFullInt", inputs)
        drawn.attr["dtype"].type = tf.int64.as_datatype_enum
        drawn.attr["shape_dtype"].type = tf.int32.as_datatype_enum
        return self._output(drawn)

    def key_multinomial(self, node: NodeDef) -> None:
        seeds = self._draw_integers(node, "", [2])
        node.op = "StatelessMultinomial"
        node.input.insert(2, seeds)
        node.attr["Tseed"].type = tf.int64.as_datatype_enum
        del node.attr["seed"], node.attr["seed2"]

    def key_shaped(self, node: NodeDef) -> None:
        shape, parameter = node.input[:2]
        op, parameter_dtype, stateless_dtype = _SHAPED[node.op]
        dtype, shape_dtype = node.attr[parameter_dtype].type, node.attr["S"].type
        # The stateless op takes the shape of the whole result: the shape of the draws
        # for one element, followed by the shape of the parameter.
        inner = self._add(node, "inner", "Shape", [parameter])
        inner.attr["T"].type = dtype
        inner.attr["out_type"].type = shape_dtype
        axis = self._constant(node, "axis", 0, tf.int32)
        inputs = [shape, self._output(inner), axis]
        whole = self._add(node, "whole", "ConcatV2", inputs)
        whole.attr["N"].i = 2
        whole.attr["T"].type = shape_dtype
        whole.attr["Tidx"].type = tf.int32.as_datatype_enum
        seeds = self._draw_integers(node, "", [2])
        result = node.attr["dtype"].type if "dtype" in node.attr else dtype
        for attribute in ("seed", "seed2", "S", "T", "R"):
            node.attr.pop(attribute, None)
        node.op = op
        node.input[0] = self._output(whole)
        node.input.insert(1, seeds)
        node.attr["T"].type = shape_dtype
        node.attr["Tseed"].type = tf.int64.as_datatype_enum
        node.attr[stateless_dtype].type = dtype
        node.attr["dtype"].type = result

    def seed(self, node: NodeDef) -> None:
        position = _SEEDED[node.op]
        for offset in range(2):
            node.input[position + offset] = self._draw_integers(node, str(offset), [])

    def sort_by_draws(self, node: NodeDef) -> None:
        # There is no op with a state that shuffles rows, so a uniform number is drawn
        # for each row, and the rows are sorted by these numbers.
        value, *waits = node.input
        dtype = node.attr["T"].type
        shape = self._add(node, "rows", "Shape", [value])
        shape.attr["T"].type = dtype
        shape.attr["out_type"].type = tf.int32.as_datatype_enum
        bounds = [
            self._constant(node, f"bound{index}", bound, tf.int32)
            for index, bound in enumerate(([0], [1], [1]))
        ]
        sliced = [self._output(shape), *bounds]
        vector = self._add(node, "vector", "StridedSlice", sliced)
        vector.attr["T"].type = vector.attr["Index"].type = tf.int32.as_datatype_enum
        drawn = self._add(node, "draws", "StatefulUniform", [
            *self._state_inputs(node), self._output(vector),
        ])  # fmt: skip
        drawn.attr["dtype"].type = tf.float32.as_datatype_enum
        drawn.attr["shape_dtype"].type = tf.int32.as_datatype_enum
        # `TopKV2` needs a scalar: take the maximum of a vector with one element.
        zero = self._constant(node, "zero", 0, tf.int32)
        count = self._add(node, "count", "Max", [self._output(vector), zero])
        count.attr["T"].type = count.attr["Tidx"].type = tf.int32.as_datatype_enum
        order = self._add(node, "order", "TopKV2", [
            self._output(drawn), self._output(count),
        ])  # fmt: skip
        order.attr["T"].type = tf.float32.as_datatype_enum
        node.op = "GatherV2"
        del node.input[:], node.attr["seed"], node.attr["seed2"], node.attr["T"]
        node.input.extend([value, self._output(order, "indices", 1), zero, *waits])
        node.attr["Tparams"].type = dtype
        for attribute in ("Tindices", "Taxis"):
            node.attr[attribute].type = tf.int32.as_datatype_enum


_RULES: Mapping[str, Callable[[_Rewriter, Any], None]] = {
    **dict.fromkeys(_TWINS, _Rewriter.replace_by_twin),
    **dict.fromkeys(_SEEDED, _Rewriter.seed),
    **dict.fromkeys(_SHAPED, _Rewriter.key_shaped),
    "Multinomial": _Rewriter.key_multinomial,
    "RandomShuffle": _Rewriter.sort_by_draws,
}
"""For each op, the method that rewrites it."""

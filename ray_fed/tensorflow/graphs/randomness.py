"""Makes random ops of a loaded graph draw what a key says, however often it runs.

TensorFlow's stateful random ops keep their state inside of the kernel, where nobody
can set it. Each is replaced by its twin that keeps its state (Philox; Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011) in a variable, and the variable is
set before every call. An op in a loop goes on drawing from its variable, so iterations
differ. Ops without such a twin are composed of those that have one.

    RandomUniform(shape)    ->    StatefulUniform(state of this op, Philox, shape)
"""

import uuid
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from ray_fed.tensorflow.graphs import draw_order, loader
from ray_fed.tensorflow.graphs.protobufs import GraphDef, NodeDef
from ray_fed.tensorflow.graphs.random_states import RandomStates, describe_state

_PHILOX = 1

_TWINS: Mapping[str, tuple[str, str, str]] = {
    "RandomUniform": ("StatefulUniform", "dtype", "T"),
    "RandomUniformInt": ("StatefulUniformInt", "Tout", "T"),
    "RandomStandardNormal": ("StatefulStandardNormalV2", "dtype", "T"),
    "TruncatedNormal": ("StatefulTruncatedNormal", "dtype", "T"),
    "NonDeterministicInts": ("StatefulUniformFullInt", "dtype", "shape_dtype"),
}
"""By op: its twin, its attribute of the result's dtype, and that of the shape's."""

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
"""By op of datasets: the input that takes the first of its two seeds."""

_SHAPED: Mapping[str, tuple[str, str, str]] = {
    "RandomGamma": ("StatelessRandomGammaV2", "T", "dtype"),
    "RandomPoisson": ("StatelessRandomPoisson", "dtype", "Rtype"),
    "RandomPoissonV2": ("StatelessRandomPoisson", "R", "Rtype"),
}
"""By op of one parameter: its stateless kind, and on either side the attribute of the
parameter's dtype. A stateless op takes the shape of its result, these that of what
each element of the parameter gives."""

_UNKEYED = frozenset(
    {"AllCandidateSampler", "FixedUnigramCandidateSampler", "FractionalAvgPool",
     "FractionalMaxPool", "LearnedUnigramCandidateSampler",
     "LogUniformCandidateSampler", "ParameterizedTruncatedNormal", "RandomCrop",
     "RandomShuffleQueue", "RandomShuffleQueueV2", "RecordInput", "RiscRandomUniform",
     "SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2",
     "ThreadUnsafeUnigramCandidateSampler", "UniformCandidateSampler"}
)  # fmt: skip
"""Random ops that are left as they are, and draw anew on every attempt."""


def key_random_ops(graph_def: GraphDef) -> RandomStates:
    """Rewrite the random ops of a GraphDef in place, library functions included.

    Args:
        graph_def: to be loaded once; its state variables are named for this load, so
            rewrite before functions are renamed by their content.
    """
    states = RandomStates()
    _Rewriter(graph_def.node, states, in_function=False).run()
    for function in graph_def.library.function:
        _Rewriter(function.node_def, states, in_function=True).run()
    if states.names:
        draw_order.run_in_order(graph_def, datasets=bool(states.in_functions))
    return states


class _Rewriter:
    """Rewrites the nodes of one graph or function body."""

    def __init__(self, nodes: Any, states: RandomStates, *, in_function: bool) -> None:
        self._nodes = nodes
        self._states = states
        self._in_function = in_function

    def run(self) -> None:
        rules: dict[str, Callable[[Any], None]] = {
            **dict.fromkeys(_TWINS, self._replace_by_twin),
            **dict.fromkeys(_SEEDED, self._seed),
            **dict.fromkeys(_SHAPED, self._key_shaped),
            "Multinomial": self._key_multinomial,
            "RandomShuffle": self._sort_by_draws,
        }
        for node in list(self._nodes):
            shown = f"{node.name} ({node.op})"
            if node.op in rules:
                rules[node.op](node)
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
        """Return the inputs that give an op a state of its own."""
        name = f"{loader.KEPT_PREFIX.decode()}{uuid.uuid4().hex}"
        self._states.names.append(name)
        handle = self._add(like, f"state{suffix}", "VarHandleOp", [])
        describe_state(handle, name)
        algorithm = self._constant(like, f"philox{suffix}", _PHILOX, tf.int64)
        return [self._output(handle, "resource"), algorithm]

    def _replace_by_twin(self, node: NodeDef) -> None:
        twin, dtype, shape_dtype = _TWINS[node.op]
        types = node.attr[dtype].type, node.attr[shape_dtype].type
        inputs = [*self._state_inputs(node), *node.input]
        for attribute in ("seed", "seed2", "T", "Tout"):
            if attribute in node.attr:
                del node.attr[attribute]
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

    def _key_multinomial(self, node: NodeDef) -> None:
        seeds = self._draw_integers(node, "", [2])
        node.op = "StatelessMultinomial"
        node.input.insert(2, seeds)
        node.attr["Tseed"].type = tf.int64.as_datatype_enum
        del node.attr["seed"], node.attr["seed2"]

    def _key_shaped(self, node: NodeDef) -> None:
        shape, parameter = node.input[:2]
        op, parameter_dtype, stateless_dtype = _SHAPED[node.op]
        dtype, shape_dtype = node.attr[parameter_dtype].type, node.attr["S"].type
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
            if attribute in node.attr:
                del node.attr[attribute]
        node.op = op
        node.input[0] = self._output(whole)
        node.input.insert(1, seeds)
        node.attr["T"].type = shape_dtype
        node.attr["Tseed"].type = tf.int64.as_datatype_enum
        node.attr[stateless_dtype].type = dtype
        node.attr["dtype"].type = result

    def _seed(self, node: NodeDef) -> None:
        """Draw the two seeds that a shuffle, or what seeds one, takes as inputs."""
        position = _SEEDED[node.op]
        for offset in range(2):
            node.input[position + offset] = self._draw_integers(node, str(offset), [])

    def _sort_by_draws(self, node: NodeDef) -> None:
        """Shuffle rows by sorting one uniform draw for each."""
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

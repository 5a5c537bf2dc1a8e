"""Whether XLA compiles a kernel with `kernels.jit="auto"`: a rule, no measurement.

It depends on the ops of the clients' work, the sizes of what a client has, the size of
the cohort's leaves and the kind of the device. So every worker, and every later run,
decides the same. docs/performance.md has the measurements behind it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

import ray_fed.tensorflow.graphs.graph_message as graph_message
from ray_fed.tensorflow.graphs.graph_message import GraphDef, NodeDef

GAIN = "ops that XLA gains on"

_LEAST_WINDOW = 16
"""XLA compiles for a second or so in each worker, which the few clients of a cohort
that has smaller leaves do not save in tens of rounds."""

_MOST_OF_SLOW = 256
"""Elements of a tensor that ops of `_SLOW` may take: XLA's functions take longer than
TensorFlow's, and it sums all of a tensor one number after another."""

_MOST_OF_VECTORS = 1_000
"""Elements of a vector where there are reductions: of which axes is not asked."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ARITHMETIC = _names("""
    Abs Add AddN AddV2 Cast Ceil ClipByValue Div DivNoNan Equal Floor FloorDiv FloorMod
    Greater GreaterEqual IsFinite IsNan LeakyRelu LeakyReluGrad Less LessEqual
    LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul MulNoNan Neg NotEqual OneHot Pow
    RealDiv Reciprocal Relu Relu6 Relu6Grad ReluGrad Round Select SelectV2 Sign Softmax
    SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits Square
    SquaredDifference Sub
""")
_PRODUCTS = _names("BatchMatMulV2 BatchMatMulV3 BiasAdd BiasAddGrad MatMul")
_REDUCTIONS = _names("All Any Max Mean Min Prod Sum")
_SEVERAL_AXES = " over several axes"
_SLOW = frozenset(reduction + _SEVERAL_AXES for reduction in _REDUCTIONS) | _names("""
    ArgMax ArgMin Elu EluGrad Erf Erfc Exp Expm1 L2Loss Log Log1p LogSoftmax Rsqrt
    RsqrtGrad Selu SeluGrad Sigmoid SigmoidGrad Softplus SoftplusGrad Sqrt SqrtGrad Tanh
    TanhGrad
""")
_RESHAPE_OPS = _names("""
    BroadcastArgs BroadcastGradientArgs BroadcastTo ConcatV2 Const DynamicStitch
    EnsureShape ExpandDims Fill GatherV2 Identity IdentityN InvertPermutation NoOp
    OnesLike Pack Pad PadV2 Placeholder PlaceholderWithDefault PreventGradient Range
    Rank Reshape Shape ShapeN Size Slice Snapshot Squeeze StopGradient StridedSlice
    Tile Transpose Unpack ZerosLike
""")
_CALLS = _names("""
    Case If PartitionedCall StatefulPartitionedCall StatelessCase StatelessIf
    StatelessWhile While
""")
_KNOWN = _ARITHMETIC | _PRODUCTS | _REDUCTIONS | _SLOW | _RESHAPE_OPS | _CALLS

_BY_INDEX = frozenset(["GatherV2", "Slice", "StridedSlice"])
"""All of their arguments but the first say what they take."""

_SHAPE_OPS = _names("Rank Shape ShapeN Size")

_DATASET_SUFFIXES = ("Dataset", "DatasetV2", "DatasetV3")

_IN_WORDS = {
    "variables, such as those of an optimizer": _names("""
        AssignAddVariableOp AssignSubVariableOp AssignVariableOp ReadVariableOp
        VarHandleOp VarIsInitializedOp
    """),
    "checks of values, such as that updates are finite: XLA skips them": _names(
        "Assert"
    ),
}
"""Reasons by ops that Keras and ray_fed put into each training: nobody wrote these."""

_MEASURED = ("CPU", "GPU")
"""Kinds of devices. On a GPU XLA gains or is even on all that was measured, so that
sizes decide nothing there."""


def op_kinds(graph_def: GraphDef) -> Iterator[str]:
    """Yield the ops of a graph and its functions, as they were written.

    Without those of datasets, which no kernel has. An op that takes what a computed
    index says is told apart: with XLA an index out of range is no error.
    """
    functions = (function.node_def for function in graph_def.library.function)
    for listed in (graph_def.node, *functions):
        nodes = {node.name: node for node in listed}
        for node in listed:
            if node.op in _BY_INDEX and _depends_on_data(node.input[1:], nodes):
                yield f"{node.op} by a computed index"
            elif node.op in _REDUCTIONS and _num_axes(node, nodes) != 1:
                yield node.op + _SEVERAL_AXES
            elif not node.op.endswith(_DATASET_SUFFIXES) and "Iterator" not in node.op:
                yield node.op


def _depends_on_data(sources: Iterable[str], nodes: Mapping[str, NodeDef]) -> bool:
    """Return whether any of these tensors depends on more than shapes and constants."""
    roots = map(graph_message.node_of, sources)
    read = graph_message.reached(nodes, roots, stops=_SHAPE_OPS)
    # Arguments of a graph are placeholders, those of a function no nodes.
    return any(name not in nodes or nodes[name].op == "Placeholder" for name in read)


def _num_axes(node: NodeDef, nodes: Mapping[str, NodeDef]) -> int | None:
    """Return over how many axes an op reduces; None where no constant says so."""
    axes = nodes.get(graph_message.node_of(node.input[1]))
    if axes is None or axes.op != "Const":
        return None
    shape = axes.attr["value"].tensor.tensor_shape
    return math.prod(dim.size for dim in shape.dim)


def refuse_ops(ops: Iterable[str], kind: str) -> str | None:
    """Return why work of such ops is never compiled; None where it may be.

    Args:
        ops: what `op_kinds` told.
        kind: of the device to run on, see `kind_of`.
    """
    if kind not in _MEASURED:
        return f"not measured on a {kind}"
    unknown = sorted(set(ops) - _KNOWN)
    for reason, named in _IN_WORDS.items():
        if named.intersection(unknown):
            return reason
    return None if not unknown else f"{unknown[0]}, not known to gain"


def refuse_window(window: int) -> str | None:
    """Return why leaves of cohorts are not compiled, whatever their data is, if so.

    Args:
        window: clients of a leaf that XLA compiles for.
    """
    return "few clients in a leaf" if window < _LEAST_WINDOW else None


def refuse_sizes(
    ops: Iterable[str],
    window: int,
    shapes: Iterable[Sequence[int | None] | None],
    kind: str,
) -> str | None:
    """Return why work is not compiled for clients of a shape; None where it is.

    Args:
        ops: that `refuse_ops` lets be.
        window: clients of a leaf that XLA compiles for.
        shapes: of all tensors that a client has, takes or adds to; None: of any.
        kind: of the device, one that `refuse_ops` lets be.
    """
    few = refuse_window(window)
    if few is not None or kind == "GPU":
        return few
    sizes = [(shape is None or len(shape) == 1, _count(shape)) for shape in shapes]
    slow = sorted(_SLOW.intersection(ops))
    if slow and any(number > _MOST_OF_SLOW for _, number in sizes):
        return f"{slow[0]}, where tensors are large"
    sums = sorted(_REDUCTIONS.intersection(ops))
    if sums and any(flat and number > _MOST_OF_VECTORS for flat, number in sizes):
        return f"{sums[0]}, where vectors are long"
    return None


def _count(shape: Sequence[int | None] | None) -> float:
    if shape is None:
        return math.inf
    return math.prod(math.inf if size is None else size for size in shape)


def kind_of(device: str | None) -> str:
    """Return "CPU", "GPU" or another kind of device.

    Args:
        device: its name; None is what TensorFlow chooses.
    """
    if device is None:
        return "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return str(tf.DeviceSpec.from_string(device).device_type)

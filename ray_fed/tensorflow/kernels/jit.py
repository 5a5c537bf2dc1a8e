"""Decides for `kernels.jit="auto"` whether XLA compiles a kernel.

The decision depends on the ops of the clients' work, the sizes of a client's tensors,
the size of leaves and the kind of device. It does not depend on measured times, so all
workers and later runs decide alike. docs/performance.md has the measurements behind it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

import ray_fed.tensorflow.graphs.graph_message as graph_message
from ray_fed.tensorflow.graphs.graph_message import GraphDef, NodeDef

GAIN = "ops that XLA gains on"

_LEAST_WINDOW = 16
"""Minimum clients in a leaf. XLA compiles for about a second in each worker. With
smaller leaves, tens of rounds do not save that time."""

_MOST_OF_SLOW = 256
"""Maximum elements of a tensor for the ops of `_SLOW`. XLA's versions of these
functions are slower than TensorFlow's, and XLA sums a whole tensor sequentially."""

_MOST_OF_VECTORS = 1_000
"""Maximum elements of a vector if there are reductions over any axes."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ARITHMETIC = _names("""
    Abs Add AddN AddV2 Bitcast BitwiseAnd Cast Ceil ClipByValue Div DivNoNan Equal
    Floor FloorDiv FloorMod Greater GreaterEqual IsFinite IsNan LeakyRelu
    LeakyReluGrad Less LessEqual LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul
    MulNoNan Neg NotEqual OneHot Pow RealDiv Reciprocal Relu Relu6 Relu6Grad
    ReluGrad Round Select SelectV2 Sign Softmax SoftmaxCrossEntropyWithLogits
    SparseSoftmaxCrossEntropyWithLogits Sqrt Square SquaredDifference Sub
""")
_PRODUCTS = _names("BatchMatMulV2 BatchMatMulV3 BiasAdd BiasAddGrad MatMul")
_REDUCTIONS = _names("All Any Max Mean Min Prod Sum")
_SEVERAL_AXES = " over several axes"
_SLOW = frozenset(reduction + _SEVERAL_AXES for reduction in _REDUCTIONS) | _names("""
    Elu EluGrad Erf Erfc Exp Expm1 L2Loss Log Log1p LogSoftmax Rsqrt RsqrtGrad Selu
    SeluGrad Sigmoid SigmoidGrad Softplus SoftplusGrad SqrtGrad Tanh TanhGrad
""")
_RESHAPE_OPS = _names("""
    BroadcastArgs BroadcastGradientArgs BroadcastTo ConcatV2 Const DynamicStitch
    EnsureShape ExpandDims Fill GatherV2 Identity IdentityN ImmutableConst
    InvertPermutation NoOp OnesLike Pack Pad PadV2 Placeholder
    PlaceholderWithDefault PreventGradient Range Rank Reshape Shape ShapeN Size
    Slice Snapshot Squeeze StopGradient StridedSlice Tile Transpose Unpack ZerosLike
""")
_CALLS = _names("""
    Case If PartitionedCall StatefulPartitionedCall StatelessCase StatelessIf
    StatelessWhile While
""")
_SEARCHES = _names("ArgMax ArgMin")
_KNOWN = (
    _SEARCHES | _ARITHMETIC | _PRODUCTS | _REDUCTIONS | _SLOW | _RESHAPE_OPS | _CALLS
)

_BY_INDEX = frozenset(["GatherV2", "Slice", "StridedSlice"])
"""Ops whose arguments after the first select elements."""

_SHAPE_OPS = _names("Rank Shape ShapeN Size")

_DATASET_SUFFIXES = ("Dataset", "DatasetV2", "DatasetV3")

VALUES = _names("""
    Assert AssignAddVariableOp AssignSubVariableOp AssignVariableOp ReadVariableOp
    VarHandleOp VarIsInitializedOp VariableShape
""")
"""Ops that become values or simple arithmetic in a graph for XLA (`lowering`)."""

KEPT_VARIABLES = "variables that stay variables: "

_MEASURED = ("CPU", "GPU")
"""Kinds of devices that were measured. On a GPU, XLA was never slower, so sizes do not
matter there."""


def op_kinds(graph_def: GraphDef) -> Iterator[str]:
    """Yield the kinds of ops in a graph and its functions, without ops of datasets.

    Two kinds get a suffix: selections by an index that depends on data, because XLA
    does not check its range, and reductions over several axes.
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
    """Return whether an input depends on anything but shapes and constants."""
    roots = map(graph_message.node_of, sources)
    read = graph_message.reached(nodes, roots, stops=_SHAPE_OPS)
    # Arguments are placeholders in a graph. In a function they are not nodes.
    return any(name not in nodes or nodes[name].op == "Placeholder" for name in read)


def _num_axes(node: NodeDef, nodes: Mapping[str, NodeDef]) -> int | None:
    axes = nodes.get(graph_message.node_of(node.input[1]))
    if axes is None or axes.op != "Const":
        return None
    shape = axes.attr["value"].tensor.tensor_shape
    return math.prod(dim.size for dim in shape.dim)


def refuse_ops(ops: Iterable[str], kind: str) -> str | None:
    """Return the reason why XLA must not compile ops on a kind of device, or None."""
    if kind not in _MEASURED:
        return f"not measured on a {kind}"
    unknown = sorted(set(ops) - _KNOWN)
    for op in unknown:
        if op.startswith(KEPT_VARIABLES):
            return op
    return None if not unknown else f"{unknown[0]}, not known to gain"


def refuse_window(window: int) -> str | None:
    """Return the reason why XLA must not compile for this size of leaves, or None."""
    return "few clients in a leaf" if window < _LEAST_WINDOW else None


def refuse_sizes(
    ops: Iterable[str],
    window: int,
    shapes: Iterable[Sequence[int | None] | None],
    kind: str,
) -> str | None:
    """Return the reason why XLA must not compile for clients of one shape, or None.

    `refuse_ops` has accepted the ops and the kind of device. `shapes` has the shapes of
    all tensors of a client: data, constants and accumulators. None is unknown.
    """
    few = refuse_window(window)
    if few is not None or kind == "GPU":
        return few
    sizes = [(shape is None or len(shape) == 1, _count(shape)) for shape in shapes]
    slow = sorted(_SLOW.intersection(ops))
    if slow and any(number > _MOST_OF_SLOW for _, number in sizes):
        return f"{slow[0]}, where tensors are large"
    searches = sorted(_SEARCHES.intersection(ops))
    if searches and any(flat and number > _MOST_OF_SLOW for flat, number in sizes):
        return f"{searches[0]}, where vectors are long"
    sums = sorted(_REDUCTIONS.intersection(ops))
    if sums and any(flat and number > _MOST_OF_VECTORS for flat, number in sizes):
        return f"{sums[0]}, where vectors are long"
    return None


def _count(shape: Sequence[int | None] | None) -> float:
    if shape is None:
        return math.inf
    return math.prod(math.inf if size is None else size for size in shape)


def kind_of(device: str | None) -> str:
    """Return "CPU", "GPU" or another kind. None is the device TensorFlow chooses."""
    if device is None:
        return "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return str(tf.DeviceSpec.from_string(device).device_type)

"""Rewrites client work so that it runs without tf.data.

tf.data sets up its functions anew for each dataset that it iterates, which takes
longer than most of what clients do. Here the parameter's sequences come as tensors, in
the layouts of `ray_fed.values.columnar_sequence`, and loops over datasets become loops
over tensors:

    Reduce(Batch(parameter))    ->    while i < ceil(n / k): rows[i*k : (i+1)*k]

Results are the same bit for bit: the same functions run, on the same elements, in the
same order. Only what is drawn differs: the lowered graph has random ops of its own.
What matches no rule is left as it was written, and the reason said.
"""

import dataclasses
from collections.abc import Sequence

import federated_language as fl

import ray_fed.tensorflow.graphs.graph_message as graph_message
from ray_fed.tensorflow.graphs.graph_message import GraphDef, TensorFlowMessage
from ray_fed.tensorflow.lowering.inlining import CannotLower
from ray_fed.tensorflow.lowering.rewriting import fill_token, leaf_types, rewrite
from ray_fed.values.columnar_sequence import Sizes


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A graph without tf.data.

    Attributes:
        graph_def: with its library; as yet neither keyed nor isolated.
        feeds: names of tensors, in the order of the parameter type's leaves. For a
            tensor: one. For a sequence: for each column of its element type the rows
            and, where the layout has them, the splits i64[n + 1]; then, last, the
            number of elements, i64[].
        fetches: names of tensors, in the order of the result type's leaves.
        initialize_op: to run first on every call.
    """

    graph_def: GraphDef
    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    initialize_op: str | None


@dataclasses.dataclass(frozen=True)
class Unlowered:
    """A computation that runs as it was written.

    Attributes:
        reason: in a few words: "FlatMapDataset", "sequence result".
    """

    reason: str


def lower(
    message: TensorFlowMessage,
    type_spec: fl.FunctionType,
    sizes: Sequence[Sizes | None] | None = None,
    *,
    unrolled: bool = False,
) -> Lowered | Unlowered:
    """Return the lowered graph of a computation, or why there is none.

    A computation without sequences lowers to itself.

    Args:
        message: a `pb.TensorFlow`.
        type_spec: of the computation.
        sizes: of each of the parameter's leaves that is a sequence, where known; such
            a sequence has neither splits nor a number of elements among the feeds, and
            its rows have the elements' dimension first, then the elements' own.
        unrolled: whether what is done with each element of such a sequence stands
            there once for each, without a loop.
    """
    leaves = [*leaf_types(type_spec.parameter), *leaf_types(type_spec.result)]
    if not any(isinstance(leaf, fl.SequenceType) for leaf in leaves):
        return _itself(message, type_spec)
    try:
        rewritten = rewrite(message, type_spec, sizes, unrolled=unrolled)
    except CannotLower as refusal:
        return Unlowered(refusal.reason)
    except Exception as error:  # noqa: BLE001 (no graph is refused for its lowering)
        return Unlowered(f"{type(error).__name__}: {error}")
    return Lowered(
        rewritten.graph_def,
        tuple(rewritten.feeds),
        tuple(rewritten.fetches),
        rewritten.initialize_op,
    )


def _itself(message: TensorFlowMessage, type_spec: fl.FunctionType) -> Lowered:
    graph_def = graph_message.graph_of(message)
    feeds: list[str] = []
    if type_spec.parameter is not None:
        feeds = graph_message.bound_names(message.parameter)
    if message.session_token_tensor_name:
        fill_token(graph_def, message.session_token_tensor_name)
    fetches = graph_message.bound_names(message.result)
    initialize_op = message.initialize_op or None
    return Lowered(graph_def, tuple(feeds), tuple(fetches), initialize_op)

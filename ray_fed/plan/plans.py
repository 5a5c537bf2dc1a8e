"""The work of a subround as plain data, which driver, task and worker share.

The cohort is cut into leaves of contiguous clients. Partials of leaves are merged along
one binary tree, whose halves differ by at most one leaf. The tree depends only on the
number of leaves, so the bits of a result depend neither on workers nor on subrounds:

    clients   0 1 | 2 3 | 4 5 | 6       clients_per_leaf = 2
    leaves     0     1     2     3
    tree       +-----+     +-----+      merges (0, 1) and (2, 3), then the two
               +-----------+

A subround is a contiguous range of leaves. It merges inside its largest whole subtrees
and returns one partial for each. The remaining merges follow once, by index. Half of
the leaves are one subtree, and so are a quarter, an eighth and a sixteenth of them.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Literal, cast

import federated_language as fl
import numpy as np

from ray_fed.language import blocks, type_checks
from ray_fed.plan.merge_tree import Subtree
from ray_fed.plan.random_keys import DrawKey
from ray_fed.values import tensor_structures

flf = fl.framework


def as_argument(values: Sequence[Any]) -> Any:
    """Return the argument of a function of a `MergeableCompForm` or a chain.

    `values` has the argument of the call, if there is one, and then the merged values.
    The result is their tuple, the only value, or None without values.
    """
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


Path = tuple[int, ...]
"""The position of a part of an argument: indices to select, outermost first."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The elements that a server function has for clients' keys (`federated_select`).

    Attributes:
        function: The serialized function <constants, key> -> element; see `Kernel`.
        keys: The path of the keys in the argument, or their index among the values that
            `Kernel.first` keeps.
        max_key: The index of the largest key among the constants.
    """

    function: bytes
    keys: Path | int
    max_key: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The work of a leaf's clients and its accumulation, as functions of one client.

        server       <parts>@SERVER -> <zeros, constants>@SERVER        once a subround
        work         <constants, data> -> values                        for each client
        accumulate   <accumulators, values, constants> -> accumulators  right after

    Attributes:
        server: Serialized. It takes no argument if `parts` is empty.
        work: Serialized. Constants, data and values are structs.
        accumulate: Serialized. The accumulators start as the zeros and end as the
            leaf's partial.
        parts: Paths in the argument of the values that `server` takes.
        data: Paths in the argument of the clients' values.
        selections: The `federated_select` results that each client receives. Each one
            is an extra sequence argument, after the client's data and its inputs from
            `first`.
        num_aggregations: Number of zeros, of accumulators, and of accumulated values.
        num_kept: Number of values returned for each client, after those that are
            accumulated.
        first: Work that all clients do before `work`, or None. Nothing of it is
            accumulated. All values that it keeps are inputs of `work`, after the data.
        jit: Whether XLA compiles leaves whose clients all have data of one shape. With
            "auto", `ray_fed.tensorflow.kernels.jit` decides.
        vectorized_clients: Number of clients of such a leaf that run at once.
    """

    server: bytes
    work: bytes
    accumulate: bytes
    parts: tuple[Path, ...]
    data: tuple[Path, ...]
    num_aggregations: int
    num_kept: int = 0
    selections: tuple[Selection, ...] = ()
    first: "Kernel | None" = None
    jit: Literal["auto", "on", "off"] = "off"
    vectorized_clients: int = 1

    @functools.cached_property
    def content(self) -> bytes:
        """A hash of the client's functions and of the options that they run with."""
        options = f"{self.jit} {self.vectorized_clients} ".encode()
        return hashlib.sha256(options + self.work + self.accumulate).digest()


@dataclasses.dataclass(unsafe_hash=True)
class Fallback(Exception):  # noqa: N818 (no error: the work goes the other way)
    """The reason for a slow path.

    Work is interpreted step by step instead of as one graph, or a computation reads its
    sequences through tf.data. A `Fallback` is raised where the reason is found. Code
    that takes the slow path returns a new one, because a raised exception holds all
    frames that it went through, and their arguments.

    Attributes:
        reason: A few words, for an event.
        leaf: Position in its subround of the leaf whose work raised, or None if there
            is no graph.
    """

    reason: str
    leaf: int | None = None


@dataclasses.dataclass(frozen=True)
class Finish:
    """The evaluation that ends a round: the remaining merges, then `after_merge`.

    Attributes:
        merge: The serialized merge of two partials, or None if there is no partial.
        subtrees: The subtree of each partial, in order. They cover all leaves.
        partial_type: The serialized type of a partial.
        computation: Serialized `after_merge`. With None, the merged partial is the
            result.
        num_clients: The size of the cohort, for computations that ask for it.
        clients_per_leaf: Number of clients of the cohort's largest leaf.
        draw: The key of the random numbers of this call.
        components_type: The serialized type of a result that is stored as its
            components. With None, the result is returned whole.
        in_graphs: Whether graphs compute the parts that they can, with the same bits.
        arrays: Names of the frozen arrays that the computation refers to, each with a
            reference to its bytes. Empty if the evaluating process has the arrays.
    """

    merge: bytes | None
    subtrees: tuple[Subtree, ...]
    partial_type: bytes
    computation: bytes | None
    num_clients: int
    clients_per_leaf: int
    draw: DrawKey
    components_type: bytes | None = None
    in_graphs: bool = False
    arrays: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Subround:
    """A contiguous range of leaves to evaluate with one computation.

    Attributes:
        computation: A serialized `pb.Computation`, which is evaluated once per leaf.
        merge: The serialized merge of two partials, or None to merge nothing.
        clients_per_leaf: Number of clients of the cohort's largest leaf.
        first_leaf: Index of the first leaf, among all leaves of the cohort.
        leaves: The clients of each leaf, by index in the cohort. Clients in
            `draw.dropped` are not counted.
        draw: The key of the random numbers of this call.
        subtrees: The subtrees to return, by index among all leaves. Without `merge`
            this is empty, and the result of every leaf is returned.
        components_type: See `Finish`. It applies to the result of every leaf.
        kernel: The kernel that runs `computation` for many clients, the reason for
            having none, or None if kernels are turned off.
        call_s: Approximate limit of the seconds of client work in one kernel call.
        num_kept: Number of values at clients that `computation` returns after the
            merged value. Each is returned after the partials, as a list with one
            element for each client.
        names_failures: Whether an error names all failing clients of its leaf.
        chunks: Contiguous ranges of the leaves, by index among all leaves, which
            different workers can run. Each of `subtrees` lies in one chunk. If empty,
            one worker runs all leaves.
        num_workers: Number of workers that can run the subround together, >= 1. With
            one leaf, each runs some of its clients. Otherwise each runs some chunks.
        finish: The finish of the round if this subround has all leaves and one worker
            runs them. Its result replaces the partials. The argument is then a pair:
            the argument of the leaves, and the arguments of the finish that precede
            the merged values.
        arrays: See `Finish`. It includes the arrays of `finish`.
    """

    computation: bytes
    merge: bytes | None
    clients_per_leaf: int
    first_leaf: int
    leaves: tuple[range, ...]
    draw: DrawKey
    subtrees: tuple[Subtree, ...]
    components_type: bytes | None = None
    kernel: Kernel | Fallback | None = None
    call_s: float = 5.0
    num_kept: int = 0
    names_failures: bool = False
    chunks: tuple[range, ...] = ()
    num_workers: int = 1
    finish: Finish | None = None
    arrays: tuple[tuple[str, Any], ...] = ()

    def of_leaves(self, run: range) -> "Subround":
        """Return the plan for a range of whole chunks on one worker.

        Args:
            run: Indices of leaves, among all leaves.
        """
        return dataclasses.replace(
            self,
            first_leaf=run.start,
            leaves=self.leaves[
                run.start - self.first_leaf : run.stop - self.first_leaf
            ],
            subtrees=tuple(t for t in self.subtrees if t[0] in run),
            chunks=(),
            num_workers=1,
        )

    @property
    def places(self) -> list[range]:
        """The clients of each leaf, by index among the clients of this subround."""
        first = self.leaves[0].start
        return [range(leaf.start - first, leaf.stop - first) for leaf in self.leaves]


def close_selection(
    function: flf.ComputationBuildingBlock,
    state: flf.Reference,
    constants: Sequence[flf.Reference],
) -> flf.Lambda:
    """Return a function of state and key as one of constants and a key.

    Args:
        function: The function, which captures constants only.
        state: The constant that is the state.
        constants: All constants.
    """
    of_constants = fl.StructType([constant.type_signature for constant in constants])
    parameter = flf.Reference(
        "selected", fl.StructType([of_constants, fl.TensorType(np.int32)])
    )
    passed, key = (flf.Selection(parameter, index=index) for index in range(2))
    locals_ = [
        (constant.name, flf.Selection(passed, index=index))
        for index, constant in enumerate(constants)
    ]
    pair_type = type_checks.function_type(function.type_signature).parameter
    names = [
        name for name, _ in type_checks.struct_type(cast("Any", pair_type)).items()
    ]
    pair = flf.Struct(list(zip(names, [state, key], strict=True)))
    body = flf.Block(locals_, flf.Call(function, pair))
    return flf.Lambda(parameter.name, parameter.type_signature, body)


@dataclasses.dataclass(frozen=True)
class KeySelection:
    """A batched `Selection.function`, which an executor embeds as one function.

    It takes the constants and i32[keys]. It returns the tensors of an element, each
    with an extra first dimension for the keys.
    """

    function: bytes

    @functools.cached_property
    def type_signature(self) -> fl.FunctionType:
        """<constants, i32[keys]> -> the tensors of the elements, by key."""
        one = type_checks.function_type(
            blocks.parse_block(self.function).type_signature
        )
        constants, key = type_checks.struct_type(cast("fl.Type", one.parameter))
        elements = fl.StructType(tensor_structures.flatten_type(one.result))
        return fl.FunctionType(
            fl.StructType([constants, tensor_structures.batch_type(key)]),
            tensor_structures.batch_type(elements),
        )

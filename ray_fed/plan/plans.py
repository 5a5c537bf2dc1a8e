"""Plans: the work of a worker as plain data, which driver, Ray task and worker share.

A cohort, which is the clients of one round, is cut into leaves of neighboring clients.
The result of a leaf is a partial. Partials are merged along one binary tree, whose
halves differ by at most one leaf. The tree depends only on the number of leaves, so the
bits of a result do not depend on the number of workers:

    clients   0 1 | 2 3 | 4 5 | 6       clients_per_leaf = 2
    leaves     0     1     2     3
    tree       +-----+     +-----+      merges (0, 1) and (2, 3), then the two
               +-----------+

A subround is a range of neighboring leaves, which is sent to a worker. The worker
merges inside the largest subtrees of the range and returns one partial for each. The
finish of the round does the remaining merges, and then the server's work.

A kernel is one graph that does the work of many clients. Without a kernel, executors
interpret the computation step by step.
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
    """Return the argument of a stage of a computation, or of its `after_merge`.

    `values` has the argument of the user's call, if there is one, and then the merged
    value of each earlier stage. The result is their tuple, the only value, or None.
    """
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


Path = tuple[int, ...]
"""The position of a part in an argument: the index in each struct, outermost first."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """A `federated_select`: clients send keys, and receive an element for each key.

    Attributes:
        function: Serialized function <constants, key> -> element. `Kernel` explains the
            constants.
        keys: Path of the clients' keys in the argument. If clients compute the keys, it
            is their index among the values that `Kernel.first` keeps.
        max_key: Index among the constants of the largest allowed key.
    """

    function: bytes
    keys: Path | int
    max_key: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The work of clients and the accumulation of their results, for one graph.

        server       <parts>@SERVER -> <zeros, constants>@SERVER        once a subround
        work         <constants, data> -> values                        for each client
        accumulate   <accumulators, values, constants> -> accumulators  right after

    Constants are values that are the same for all clients, such as model weights.

    Attributes:
        server: Serialized function. It takes no argument if `parts` is empty.
        work: Serialized function. Constants, data and values are structs.
        accumulate: Serialized function. The accumulators of a leaf start as the zeros
            and end as the leaf's partial.
        parts: Paths in the argument of the values that `server` takes.
        data: Paths in the argument of the clients' values that `work` takes.
        selections: The `federated_select` results that each client receives. Each one
            is an extra sequence argument, after the client's data and its inputs from
            `first`.
        num_aggregations: Number of values of a client that are accumulated. It is also
            the number of zeros, and of accumulators.
        num_kept: Number of values that are returned for each client. In the result of
            `work`, they follow the values that are accumulated.
        first: Work that all clients do before `work`, or None. None of its values is
            accumulated. The values that it keeps are inputs of `work`, after the data.
        jit: Whether XLA compiles leaves whose clients all have data of one shape. With
            "auto", `ray_fed.tensorflow.kernels.jit` decides.
        vectorized_clients: Number of clients that run at once in a leaf whose clients
            all have data of one shape.
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
        """A hash of `work`, `accumulate`, `jit` and `vectorized_clients`."""
        options = f"{self.jit} {self.vectorized_clients} ".encode()
        return hashlib.sha256(options + self.work + self.accumulate).digest()


@dataclasses.dataclass(unsafe_hash=True)
class Fallback(Exception):  # noqa: N818 (no error: the work goes the other way)
    """The reason why work takes the slow path.

    On the slow path, executors interpret work step by step instead of as one graph, or
    a computation reads its sequences through tf.data. Code that cannot build a fast
    graph raises a `Fallback`. Code that chooses the slow path returns a new `Fallback`,
    because a raised one keeps all frames alive that it went through.

    Attributes:
        reason: The reason in a few words, for an event.
        leaf: Index in its subround of the leaf whose work raised an error, or None if
            there is no graph.
    """

    reason: str
    leaf: int | None = None


@dataclasses.dataclass(frozen=True)
class Finish:
    """The work that ends a round: the remaining merges, and then `after_merge`.

    Attributes:
        merge: Serialized merge of two partials, or None if there is no partial.
        subtrees: The subtree of each partial, in order. They cover all leaves.
        partial_type: Serialized type of a partial.
        computation: Serialized `after_merge`, the part of the user's computation that
            follows the merge. With None, the merged partial is the result.
        num_clients: Size of the cohort.
        clients_per_leaf: Number of clients of the cohort's largest leaf.
        draw: Key of the random numbers of this call.
        components_type: Serialized type of a result that is stored in parts, one for
            each tensor or sequence. With None, the result is returned whole.
        in_graphs: Whether to run this work as graphs if possible, with the same bits.
        arrays: Names of the frozen arrays, such as large constants, that the
            computation refers to, each with a reference to its bytes. It is empty if
            the evaluating process has the arrays.
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
    """The work for a range of neighboring leaves.

    Attributes:
        computation: Serialized `pb.Computation`, which is evaluated once per leaf.
        merge: Serialized merge of two partials, or None to merge nothing.
        clients_per_leaf: Number of clients of the cohort's largest leaf.
        first_leaf: Index of the first leaf, among all leaves of the cohort.
        leaves: The clients of each leaf, by index in the cohort. Clients in
            `draw.dropped` are not counted.
        draw: Key of the random numbers of this call.
        subtrees: The subtrees to return a partial for, by index among all leaves.
            Without `merge`, it is empty, and the result of each leaf is returned.
        components_type: See `Finish`. It applies to the result of each leaf.
        kernel: The kernel that runs `computation` for many clients, the reason why
            there is none, or None if kernels are turned off.
        call_s: Approximate limit of the seconds of client work in one kernel call.
        num_kept: Number of values at clients that `computation` returns after the
            merged value. Each one is returned after the partials, as a list with one
            element for each client.
        names_failures: Whether an error names all failing clients of its leaf.
        chunks: Ranges of neighboring leaves, by index among all leaves, which different
            workers can run. Each of `subtrees` lies in one chunk. If it is empty, one
            worker runs all leaves.
        num_workers: Number of workers that can run the subround together, >= 1. If
            there is one leaf, each runs some of its clients. Otherwise each runs some
            chunks.
        finish: The finish of the round if one worker runs all leaves of the cohort, or
            None. The result of the finish replaces the partials. The argument is then a
            pair: the argument of the leaves, and the values that `after_merge` takes
            before the merged values.
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
        """Return one worker's plan for whole chunks: the leaves `run`, by index."""
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
        """The clients of each leaf, by position among the clients of this subround."""
        first = self.leaves[0].start
        return [range(leaf.start - first, leaf.stop - first) for leaf in self.leaves]


def close_selection(
    function: flf.ComputationBuildingBlock,
    state: flf.Reference,
    constants: Sequence[flf.Reference],
) -> flf.Lambda:
    """Return the `Selection.function` of a `federated_select`.

    `function` is <state, key> -> element, and may refer to constants. `state` is the
    constant that is the state, and `constants` are all constants of the kernel.
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
    """A function that an executor can embed: `Selection.function` for many keys.

    It takes <constants, keys>, with keys i32[keys]. It returns the tensors of an
    element, each with an extra first dimension for the keys.
    """

    function: bytes

    @functools.cached_property
    def type_signature(self) -> fl.FunctionType:
        """The type of the function: <constants, keys> -> tensors of the elements."""
        one = type_checks.function_type(
            blocks.parse_block(self.function).type_signature
        )
        constants, key = type_checks.struct_type(cast("fl.Type", one.parameter))
        elements = fl.StructType(tensor_structures.flatten_type(one.result))
        return fl.FunctionType(
            fl.StructType([constants, tensor_structures.batch_type(key)]),
            tensor_structures.batch_type(elements),
        )

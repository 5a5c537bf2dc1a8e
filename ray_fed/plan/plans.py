"""What a subround is to run, as plain data that driver, task and worker know.

The cohort is cut into leaves of contiguous clients; partials of leaves are merged
along one binary tree, whose halves differ by one leaf at most. The number of leaves
alone decides the tree, so the bits of a result depend on neither workers nor subrounds:

    clients   0 1 | 2 3 | 4 5 | 6       clients_per_leaf = 2
    leaves     0     1     2     3
    tree       +-----+     +-----+      merges (0, 1) and (2, 3), then the two
               +-----------+

A subround is a contiguous run of leaves. It merges inside its largest whole
subtrees and returns one partial for each; the rest is merged once, by index. Half of
the leaves are one subtree, and so are a quarter, an eighth and a sixteenth of them.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Literal, cast

import federated_language as fl

from ray_fed.language import blocks, type_checks
from ray_fed.plan.merge_tree import Subtree
from ray_fed.plan.random_keys import DrawKey
from ray_fed.values import tensor_structures


def as_argument(values: Sequence[Any]) -> Any:
    """Return the argument of a function of a `MergeableCompForm` or a chain.

    Args:
        values: the argument of the call, if it has one, then what was merged.

    Returns:
        A tuple of several values; one value itself; None for no value.
    """
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


Path = tuple[int, ...]
"""Where a part of an argument lies: the indices to select, outermost first."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """What a function at the server has for the keys of each client.

    Attributes:
        function: serialised, <constants, key> -> element; see `Kernel`.
        keys: where in the argument the keys of clients lie; or their index among what
            the clients' first work keeps.
        max_key: the index of the largest key among the constants.
    """

    function: bytes
    keys: Path | int
    max_key: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A leaf's client work and its accumulation, as functions of one client.

        server       <parts>@SERVER -> <zeros, constants>@SERVER        once a subround
        work         <constants, data> -> values                        for each client
        accumulate   <accumulators, values, constants> -> accumulators  right after

    Attributes:
        server: serialised; takes nothing where `parts` is empty.
        work: serialised; constants, data and values are structs.
        accumulate: serialised; starts at the zeros, ends as the leaf's partial.
        parts: in the argument, what `server` takes.
        data: in the argument, the values of clients.
        selections: for each client a sequence more, behind its data and what it was
            handed.
        num_aggregations: the number of zeros, of accumulators, and of values that are
            accumulated.
        num_kept: the number of further values, last, which are returned for each
            client instead.
        first: what clients do before, of which nothing is accumulated: all that it
            keeps is handed to `work`, behind its data.
        jit: whether XLA compiles leaves whose clients are all of one shape; "auto":
            where `ray_fed.tensorflow.kernels.jit` says so.
        vectorised_clients: how many of such a leaf's clients work at once.
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
    vectorised_clients: int = 1

    @functools.cached_property
    def content(self) -> bytes:
        """A hash of the client's functions and of the options that they run with."""
        options = f"{self.jit} {self.vectorised_clients} ".encode()
        return hashlib.sha256(options + self.work + self.accumulate).digest()


@dataclasses.dataclass(unsafe_hash=True)
class Fallback(Exception):  # noqa: N818 (no error: the work goes the other way)
    """Why work is interpreted, step by step, instead of run as one graph.

    Or why a computation reads its sequences through tf.data. Raised where that shows,
    and returned by whoever takes the other way: as a new one, since what was raised
    keeps each frame that it was raised through, and their arguments.

    Attributes:
        reason: a few words, for an event.
        leaf: position in its subround of the leaf whose work raised; None where there
            is no graph at all.
    """

    reason: str
    leaf: int | None = None


@dataclasses.dataclass(frozen=True)
class Finish:
    """The one evaluation that ends a round: merges, then after-merge work.

    Attributes:
        merge: serialised merge of two partials; None where there is no partial.
        subtrees: the subtree of each partial, in order; they cover all leaves.
        partial_type: serialised type of a partial.
        computation: serialised; None returns the merged partial.
        num_clients: the cohort's size, for a computation that asks for it.
        clients_per_leaf: of the cohort.
        draw: key of the random numbers of this call.
        components_type: serialised type of a result that is returned as its components,
            each kept where results are stored; None returns it whole.
        in_graphs: whether graphs compute what they can, with the same bits.
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


@dataclasses.dataclass(frozen=True)
class Subround:
    """A run of leaves to evaluate with one computation.

    Attributes:
        computation: serialised `pb.Computation`, evaluated once a leaf.
        merge: serialised merge of two partials; None: results are not merged.
        clients_per_leaf: of the largest leaf of the whole cohort.
        first_leaf: index among all leaves of the first of this run.
        leaves: the clients of each leaf of this run, by index in the cohort; clients
            in `draw.dropped` are not counted.
        draw: key of the random numbers of this call.
        subtrees: the subtrees to return, by index among all leaves; empty without
            `merge`, where every leaf's result is returned as it is.
        components_type: see `Finish`; of every leaf's result.
        kernel: runs the work of `computation` for many clients; or why there is
            none; None where kernels are turned off.
        call_s: seconds of clients that one call of the kernel may cover, about.
        num_kept: how many values at clients `computation` returns behind the
            value that is merged: each is returned after the partials, as a list with
            one element for each client.
        names_failures: whether an error names all failing clients of its leaf.
        chunks: contiguous runs of its leaves, by index among all leaves, of which each
            may run on a worker of its own; every one of `subtrees` lies in one chunk.
            Empty: the leaves stay together.
        num_workers: how many workers may run the subround together, >= 1. With one
            leaf, each runs some of its clients; else each runs some of the chunks.
        finish: of the round, where these are all of its leaves and one worker runs
            them: its result is returned in place of the partials. The argument is a
            pair then: that of the leaves, and what the finish takes before what was
            merged.
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

    def of_leaves(self, run: range) -> "Subround":
        """Return the plan for some of the leaves, by index among all, on one worker.

        Args:
            run: whole chunks, side by side.
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
        """The clients of each leaf of this run, by index among those of the run."""
        first = self.leaves[0].start
        return [range(leaf.start - first, leaf.stop - first) for leaf in self.leaves]


@dataclasses.dataclass(frozen=True)
class KeySelection:
    """A function of a key for many keys: an executor embeds it as one function.

    It takes the constants and i32[keys], and returns a list of the tensors of an
    element, each with a first dimension more, by key.

    Attributes:
        function: serialised, see `Selection`.
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

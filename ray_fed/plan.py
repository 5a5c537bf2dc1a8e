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
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ray_fed.draws import DrawKey
from ray_fed.fingerprint import Fingerprint
from ray_fed.notes import Note

_LEAVES = 16
"""A cohort has as many, or a multiple: each of so many workers, or of half as many and
so on, has one subtree then."""

MAX_CLIENTS_PER_LEAF = 64
"""A leaf is the unit of work that is repeated after a failure: keep it short."""

Node = tuple[int, int]
"""A subtree of the merge tree: first leaf, one past the last."""


class Merge(NamedTuple):
    """One merge of two partials, in a list of partials of adjacent subtrees.

    Attributes:
        left: position of the left partial; the merged partial takes its place.
        right: position of the right partial, which is used no more.
        node: the subtree that the merged partial is of.
    """

    left: int
    right: int
    node: Node


def cut_leaves(num_clients: int, clients_per_leaf: int | None) -> list[range]:
    """Cut a cohort into leaves of contiguous clients; an empty cohort is one leaf.

    By default each holds a sixteenth of the cohort, as near as can be, or of a part of
    it, where that is large; of small cohorts each client is one.

    Args:
        num_clients: size of the cohort, >= 0.
        clients_per_leaf: of each leaf but the last, >= 1; None: the default.
    """
    if clients_per_leaf is None:
        count = num_clients
        if num_clients >= 2 * _LEAVES:
            count = _LEAVES * -(-num_clients // (_LEAVES * MAX_CLIENTS_PER_LEAF))
        bounds = [num_clients * index // max(1, count) for index in range(count + 1)]
    else:
        bounds = [*range(0, num_clients, clients_per_leaf), num_clients]
    return [range(*pair) for pair in itertools.pairwise(bounds)] or [range(0)]


def cut_runs(num_items: int, num_runs: int) -> list[range]:
    """Cut items into at most `num_runs` contiguous runs, none of them empty.

    Each takes ceil(remaining items / remaining runs), as the documentation of
    MergeableCompExecutionContext has it.
    """
    runs: list[range] = []
    start = 0
    for remaining in range(num_runs, 0, -1):
        if start == num_items:
            break
        size = -(-(num_items - start) // remaining)
        runs.append(range(start, start + size))
        start += size
    return runs


def _halves(tree: Node) -> tuple[Node, Node]:
    first, end = tree
    middle = first + (end - first + 1) // 2
    return (first, middle), (middle, end)


def subtrees(first: int, stop: int, tree: Node) -> list[Node]:
    """Return the largest whole subtrees that cover some leaves of a tree, in order.

    Args:
        first: of the leaves to cover.
        stop: one past the last of them.
        tree: the whole one, or a subtree; what lies outside of it is left out.
    """
    start, end = tree
    if stop <= start or end <= first:
        return []
    if first <= start and end <= stop:
        return [tree]
    return [node for half in _halves(tree) for node in subtrees(first, stop, half)]


def merge_order(nodes: Sequence[Node]) -> list[Merge]:
    """Return the merges that turn adjacent subtrees into one, bottom up.

    Args:
        nodes: whole subtrees of one, adjacent and in order, that cover all its leaves.
    """
    order: list[Merge] = []
    if nodes:
        positions = {node: position for position, node in enumerate(nodes)}
        _merge((nodes[0][0], nodes[-1][1]), positions, order)
    return order


def _merge(tree: Node, positions: Mapping[Node, int], order: list[Merge]) -> int:
    """Append the merges of a tree, and return where its partial is then."""
    if tree in positions:
        return positions[tree]
    left, right = (_merge(half, positions, order) for half in _halves(tree))
    order.append(Merge(left, right, tree))
    return left


def pack(parts: Sequence[Any]) -> Any:
    """Return what a computation takes of these parts: a tuple where there are several.

    As the parts of a `MergeableCompForm` and its longer kin take them: the argument, if
    there is one, then what was merged. Nothing at all is None.
    """
    if len(parts) > 1:
        return tuple(parts)
    return parts[0] if parts else None


Path = tuple[int, ...]
"""Where a part of an argument lies: the indices to select, outermost first."""


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
        num_aggregations: length of zeros and accumulators, and of values but for:
        num_kept: the last of the values, which are returned for each client instead.
        jit: whether XLA compiles leaves whose clients are all of one shape.
        vectorised_clients: how many of such a leaf's clients work at once.
    """

    server: bytes
    work: bytes
    accumulate: bytes
    parts: tuple[Path, ...]
    data: tuple[Path, ...]
    num_aggregations: int
    num_kept: int = 0
    jit: bool = False
    vectorised_clients: int = 1

    @functools.cached_property
    def content(self) -> bytes:
        """What identifies the functions of a client, and how they run."""
        options = b"%d %d " % (self.jit, self.vectorised_clients)
        return hashlib.sha256(options + self.work + self.accumulate).digest()


@dataclasses.dataclass(frozen=True)
class JitDecision:
    """Whether XLA is to compile the work of a kernel's clients.

    Attributes:
        jit: for `Kernel.jit`.
        reason: in a few words.
        plain_s: seconds a client without XLA, beside as many others as executors share
            a process; None where it was not measured.
        jit_s: the same with it.
        compile_s: seconds of the first call with it, for one client.
    """

    jit: bool
    reason: str
    plain_s: float | None = None
    jit_s: float | None = None
    compile_s: float | None = None


@dataclasses.dataclass(frozen=True)
class NoKernel:
    """Why leaves are interpreted instead.

    Attributes:
        reason: a few words, for an event.
        leaf: position in its subround of the leaf whose work raised; None where there
            is no kernel at all.
    """

    reason: str
    leaf: int | None = None


@dataclasses.dataclass(frozen=True)
class Subround:
    """A run of leaves to evaluate with one computation.

    Attributes:
        computation: serialised `pb.Computation`, evaluated once a leaf.
        merge: serialised merge of two partials; None: results are not merged.
        clients_per_leaf: of the largest leaf of the whole cohort.
        first_leaf: index among all leaves of the first of this run.
        leaves: the clients of each leaf of this run, by index in the cohort; those that
            `draw.dropped` names are not counted.
        draw: key of the random numbers of this call.
        nodes: the subtrees to return, by index among all leaves; empty without
            `merge`, where every leaf's result is returned as it is.
        parts_type: see `Finish`; of every leaf's result.
        kernel: does the work of `computation` on all leaves at once; or why there is
            none; None where nobody asked for one.
        call_s: seconds of clients that one call of the kernel may cover, about.
        num_kept: how many values at clients `computation` returns behind what is
            merged: each is returned, a list over all clients, after the partials.
        names_failures: whether an error is to name all clients of its leaf that fail.
    """

    computation: bytes
    merge: bytes | None
    clients_per_leaf: int
    first_leaf: int
    leaves: tuple[range, ...]
    draw: DrawKey
    nodes: tuple[Node, ...]
    parts_type: bytes | None = None
    kernel: Kernel | NoKernel | None = None
    call_s: float = 5.0
    num_kept: int = 0
    names_failures: bool = False

    @property
    def places(self) -> list[range]:
        """The clients of each leaf of this run, by index among those of the run."""
        first = self.leaves[0].start
        return [range(leaf.start - first, leaf.stop - first) for leaf in self.leaves]


@dataclasses.dataclass(frozen=True)
class Trial:
    """Clients of a subround run with XLA and without, to decide which it is to be.

    Attributes:
        subround: of one leaf, with a kernel; its result is the `JitDecision`.
    """

    subround: Subround

    @property
    def draw(self) -> DrawKey:
        """Key of the random numbers of its call."""
        return self.subround.draw

    @property
    def clients_per_leaf(self) -> int:
        """Of the cohort."""
        return self.subround.clients_per_leaf

    @property
    def parts_type(self) -> None:
        """Nothing of it is kept."""


@dataclasses.dataclass(frozen=True)
class Finish:
    """The one evaluation that ends a round: merges, then after-merge work.

    Attributes:
        merge: serialised merge of two partials; None where there is no partial.
        nodes: the subtree of each partial, in order; they cover all leaves.
        partial_type: serialised type of a partial.
        computation: serialised; None returns the merged partial.
        num_clients: the cohort's size, for a computation that asks for it.
        clients_per_leaf: of the cohort.
        draw: key of the random numbers of this call.
        parts_type: serialised type of a result that is returned in parts, each kept
            where results are stored; None returns it whole.
        in_graphs: whether graphs compute what they can, with the same bits.
    """

    merge: bytes | None
    nodes: tuple[Node, ...]
    partial_type: bytes
    computation: bytes | None
    num_clients: int
    clients_per_leaf: int
    draw: DrawKey
    parts_type: bytes | None = None
    in_graphs: bool = False


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One worker's turn at a subround.

    Attributes:
        attempt: 1 for the first try; a copy of a straggler has its number.
        worker: its name.
        worker_pid: its process.
        node: address of the machine.
        started_s: when the worker was leased, in seconds since the subround first asked
            for one.
        seconds: that it was leased.
        ended: "crash", "preemption", "memory" or "hang", by which it was lost;
            "slower", where a copy of the same work was there first.
        detail: what happened, in words.
        fingerprint: of the worker's process.
    """

    attempt: int
    worker: str
    worker_pid: int
    node: str
    started_s: float = 0.0
    seconds: float = 0.0
    ended: str = ""
    detail: str = ""
    fingerprint: Fingerprint | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a runner gives back for a subround or a finish.

    Attributes:
        values: plain or stored, in the order that the plan asks for.
        attempts: 1 where nothing failed.
        worker: name of what ran the clients.
        worker_pid: its process.
        coordinator_pid: the process that drove it.
        node: address of the machine.
        notes: what the work told, in order.
        kernel_leaves: how many leaves a kernel ran.
        no_kernel: why others were interpreted, if a kernel was asked for.
        lost: the attempts that came to nothing, in order.
        value_bytes: of the arrays in each value that left a worker's node; empty where
            values stay in this process.
        fingerprint: of the process that ran the clients, where it is known.
    """

    values: tuple[object, ...]
    attempts: int
    worker: str
    worker_pid: int
    coordinator_pid: int
    node: str
    notes: tuple[Note, ...] = ()
    kernel_leaves: int = 0
    no_kernel: str | None = None
    lost: tuple[Attempt, ...] = ()
    value_bytes: tuple[int, ...] = ()
    fingerprint: Fingerprint | None = None

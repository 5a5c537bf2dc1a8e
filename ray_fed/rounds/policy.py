"""How rounds are cut and carried: what a context decides once for all its calls."""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

from ray_fed.language import blocks, type_checks
from ray_fed.language.structs import Plain
from ray_fed.observability import events
from ray_fed.plan import merge_tree
from ray_fed.rounds import client_cuts
from ray_fed.values import components
from ray_fed.values.stored import ClientValues, Stored, StoredClients


@dataclasses.dataclass(frozen=True)
class RoundPolicy:
    """How calls are cut and carried.

    Attributes:
        cut_leaves: from the size of the cohort to its leaves; never empty.
        num_subrounds: at most so many runs of leaves; None: as many as workers.
        num_workers: that the subrounds of a round have between them.
        count_workers: asked for that number as each round begins; None: it stays.
        spreads_subrounds: whether one subround may run on several workers, where there
            are more workers than subrounds.
        default_num_clients: the cohort of a call without client arguments.
        replicas: leaves of such a call, each with the whole argument; None: as many
            as its cohort is cut into.
        seed: of the random numbers of all calls.
        store: makes a value that many subrounds share cheap to pass along; returns what
            stands for it, and how many bytes of arrays leave this process.
        fetch: reads what `store` or a runner put in a store; returns any other value as
            it is. None: values are never stored.
        sinks: receive events.
        call_s: seconds of clients that one call of a kernel may cover, about; None:
            all work is interpreted.
        jit: see `plans.Kernel`.
        vectorised_clients: see `plans.Kernel`.
        leaves_out_clients: whether runners take stand-ins for values of clients that a
            finish does not read.
        kept_bytes: of clients' values that a call may keep for later stages.
        max_dropped_clients: whose work raised, that a call may go on without.
    """

    cut_leaves: Callable[[int], Sequence[range]]
    num_subrounds: int | None = None
    num_workers: int = 1
    count_workers: Callable[[], Awaitable[int]] | None = None
    spreads_subrounds: bool = False
    default_num_clients: int = 0
    replicas: int | None = None
    seed: int = 0
    store: Callable[[Any], tuple[Any, int]] = lambda value: (value, 0)
    fetch: Callable[[Any], Awaitable[Any]] | None = None
    sinks: tuple[events.EventSink, ...] = ()
    call_s: float | None = None
    jit: Literal["auto", "on", "off"] = "off"
    vectorised_clients: int = 1
    leaves_out_clients: bool = False
    kept_bytes: int = 0
    max_dropped_clients: int = 0

    async def at_round(self) -> "RoundPolicy":
        """Return what holds for a round that begins now."""
        if self.count_workers is None:
            return self
        return dataclasses.replace(self, num_workers=await self.count_workers())

    async def read_clients(self, part: ClientValues) -> ClientValues:
        """Return the values of clients that a runner kept in a store, or returned."""
        if self.fetch is None or not isinstance(part, StoredClients):
            return part
        held = await self.fetch(Stored(part.reference))
        return held[part.start : part.stop]

    def workers_of(self, num_subrounds: int, num_leaves: int) -> int:
        """Return how many workers one of some subrounds may use, by its leaves."""
        if not self.spreads_subrounds:
            return 1
        return max(1, min(self.num_workers // num_subrounds, num_leaves))


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """What is decided of a call before it begins.

    Attributes:
        round_index: calls before this one; keys its random numbers.
        started: by the monotonic clock.
        by_component: whether the result is returned as its components, each kept where
            runners store values, instead of whole.
    """

    round_index: int
    started: float
    by_component: bool = False

    def components_type(self, result: fl.Type) -> bytes | None:
        """Return what a plan says of the components of a result."""
        if not self.by_component or not components.component_types(result):
            return None
        return blocks.serialise_type(result)

    def as_asked(self, value: Plain, result: fl.Type) -> Plain:
        """Return a whole result as it is asked for."""
        if self.components_type(result) is None:
            return value
        return components.split(value, result)

    def as_whole(self, returned: Any, result: fl.Type) -> Plain:
        """Return as a whole what a plan returned as it is asked for."""
        if self.components_type(result) is None:
            return returned
        return components.join(returned, result)


@dataclasses.dataclass(frozen=True)
class CohortCut:
    """How a cohort is cut.

    Attributes:
        leaves: the clients of each leaf.
        runs: the leaves of each subround.
        size: clients of the largest leaf.
        heaviest_first: indices of the runs, in the order to begin them.
        chunks: of each run, the leaves of each worker that it may have; none where it
            stays whole.
    """

    leaves: tuple[range, ...]
    runs: tuple[range, ...]
    size: int
    heaviest_first: tuple[int, ...]
    chunks: tuple[tuple[range, ...], ...]

    @classmethod
    def of(
        cls,
        num_clients: int,
        policy: RoundPolicy,
        parameter: fl.Type | None,
        weights: NDArray[np.float64] | None = None,
    ) -> "CohortCut":
        """Cut a cohort as the policy says; where the runs end is all weights decide.

        Args:
            num_clients: of the cohort.
            policy: how to cut.
            parameter: type of the argument; None without one.
            weights: of each client, > 0; None where they are not known.
        """
        leaves = tuple(policy.cut_leaves(num_clients))
        if policy.replicas is not None and not _has_clients(parameter):
            leaves = (range(num_clients),) * policy.replicas
        of_leaf = None
        if weights is not None:
            starts = [leaf.start for leaf in leaves]
            of_leaf = np.add.reduceat(weights, starts).tolist()
        whole = range(len(leaves))
        runs = _cut(whole, of_leaf, policy.num_subrounds or policy.num_workers)
        sums = [_weigh(run, of_leaf) for run in runs]
        order = sorted(range(len(runs)), key=lambda run: -sums[run])
        size = max(1, *(len(leaf) for leaf in leaves), 1)
        chunks = tuple(
            tuple(_cut(run, of_leaf, policy.workers_of(len(runs), len(run))))
            for run in runs
        )
        return cls(leaves, tuple(runs), size, tuple(order), chunks)

    def first_runs(self, num_bytes: int, member_bytes: int) -> list[bool]:
        """Return which runs, from the first on, fit into so many bytes together.

        Args:
            num_bytes: in all.
            member_bytes: of each client.
        """
        ends = [self.leaves[run[-1]].stop for run in self.runs]
        return [end * member_bytes <= num_bytes for end in ends]

    def subtrees_of(self, run: int) -> list[merge_tree.Subtree]:
        """Return the subtrees of the chunks of a run, in order."""
        tree = (0, len(self.leaves))
        return [
            subtree
            for chunk in self.chunks[run]
            for subtree in merge_tree.subtrees(chunk.start, chunk.stop, tree)
        ]

    @property
    def subtrees(self) -> list[merge_tree.Subtree]:
        """The subtrees of all runs, in order."""
        return [tree for run in range(len(self.runs)) for tree in self.subtrees_of(run)]


def _cut(leaves: range, weights: Sequence[float] | None, count: int) -> list[range]:
    """Cut contiguous leaves into at most so many runs, even by weight or by number."""
    if weights is None:
        found = merge_tree.cut_runs(len(leaves), count)
    else:
        found = client_cuts.cut_by_weight(weights[leaves.start : leaves.stop], count)
    first = leaves.start
    return [range(first + run.start, first + run.stop) for run in found]


def _weigh(run: range, weights: Sequence[float] | None) -> float:
    return float(len(run)) if weights is None else sum(weights[run.start : run.stop])


def _has_clients(parameter: fl.Type | None) -> bool:
    return parameter is not None and type_checks.holds_clients(parameter)

"""How rounds are cut and carried: what a context decides once for all its calls."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ray_fed.plan as plan
from ray_fed.observability import events


@dataclasses.dataclass(frozen=True)
class RoundPolicy:
    """How calls are cut and carried.

    Attributes:
        cut_leaves: from the size of the cohort to its leaves; never empty.
        num_subrounds: at most so many runs of leaves.
        default_num_clients: the cohort of a call without client arguments.
        seed: of the random numbers of all calls.
        store: makes a value that many subrounds share cheap to pass along.
        sinks: receive events.
    """

    cut_leaves: Callable[[int], Sequence[range]]
    num_subrounds: int
    default_num_clients: int = 0
    seed: int = 0
    store: Callable[[Any], Any] = lambda value: value
    sinks: tuple[events.EventSink, ...] = ()


@dataclasses.dataclass(frozen=True)
class CohortCut:
    """How a cohort is cut.

    Attributes:
        leaves: the clients of each leaf.
        runs: the leaves of each subround.
        size: clients a leaf.
    """

    leaves: tuple[range, ...]
    runs: tuple[range, ...]
    size: int

    @classmethod
    def of(cls, num_clients: int, policy: RoundPolicy) -> "CohortCut":
        """Cut a cohort of the size as the policy says."""
        leaves = tuple(policy.cut_leaves(num_clients))
        runs = tuple(plan.cut_runs(len(leaves), policy.num_subrounds))
        return cls(leaves, runs, max(1, *(len(leaf) for leaf in leaves), 1))

    @property
    def nodes(self) -> list[plan.Node]:
        """The subtrees of all runs, in order."""
        return [
            node
            for run in self.runs
            for node in plan.subtrees(run.start, run.stop, len(self.leaves))
        ]

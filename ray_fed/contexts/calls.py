"""What one call has so far: its argument in slices, what was merged, what is kept."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import ray_fed.plan as plan
import ray_fed.values as values
from ray_fed.compiler.form import Keeping
from ray_fed.contexts.policy import CallSpec, CohortCut
from ray_fed.notes import Note


@dataclasses.dataclass
class Call:
    """What one call has so far.

    Attributes:
        spec: what was decided of it.
        cut: of its cohort.
        argument: the argument, if the computation takes one; at most one element.
        at_finish: the same, as after-merge work takes it.
        slices: the same for each leaf, run by run.
        merged: by each stage that is done.
        keeps: for each run, whether stages keep values of its clients.
        kept: for each run, those values by name.
        bytes_broadcast: of what all its subrounds are given, each value once.
        bytes_sliced: of clients' values, for each run.
        next_index: of the next subround.
        notes: what its work told.
        started: by the monotonic clock.
    """

    spec: CallSpec
    cut: CohortCut
    argument: list[Any] = dataclasses.field(default_factory=list[Any])
    at_finish: list[Any] = dataclasses.field(default_factory=list[Any])
    slices: Sequence[Sequence[list[Any]]] = ()
    merged: list[Any] = dataclasses.field(default_factory=list[Any])
    keeps: Sequence[bool] = ()
    kept: dict[int, dict[str, Any]] = dataclasses.field(
        default_factory=dict[int, dict[str, Any]]
    )
    bytes_broadcast: int = 0
    bytes_sliced: list[int] = dataclasses.field(default_factory=list[int])
    next_index: int = 0
    notes: set[Note] = dataclasses.field(default_factory=set[Note])
    started: float = dataclasses.field(default_factory=time.monotonic)

    def take_indices(self, count: int) -> int:
        """Return the first of so many new subround indices."""
        first = self.next_index
        self.next_index += count
        return first

    def leaf_args(self, run: int, takes: Sequence[str] = ()) -> list[Any]:
        """Return what the work of this stage takes on each leaf of a run.

        `takes` names values that were kept.
        """
        if not takes:
            return [plan.pack([*part, *self.merged]) for part in self.slices[run]]
        leaves = [self.cut.leaves[leaf] for leaf in self.cut.runs[run]]
        first = leaves[0].start
        kept = [self.kept[run][name] for name in takes]
        return [
            plan.pack(
                [
                    *part,
                    *self.merged,
                    tuple(k[leaf.start - first : leaf.stop - first] for k in kept),
                ]
            )
            for part, leaf in zip(self.slices[run], leaves, strict=True)
        ]

    def keep(
        self, run: int, keeping: Keeping, outcome: plan.Outcome
    ) -> tuple[object, ...]:
        """Keep what a subround emitted; return the rest of what it returned."""
        num_others = len(outcome.values) - len(keeping.emits)
        num_clients = sum(len(self.cut.leaves[leaf]) for leaf in self.cut.runs[run])
        emitted = [
            values.StoredClients(value.reference, 0, num_clients)
            if isinstance(value, values.Stored)
            else value
            for value in outcome.values[num_others:]
        ]
        held = self.kept.setdefault(run, {})
        held.update(zip(keeping.emits, emitted, strict=True))
        return outcome.values[:num_others]

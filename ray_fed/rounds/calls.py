"""What one call has so far: its argument by runs, what was merged, what is kept."""

import dataclasses
from collections.abc import Callable, Sequence

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.compiler.form import KeepingStage
from ray_fed.language import type_checks
from ray_fed.language.structs import Plain
from ray_fed.plan import outcomes, plans
from ray_fed.plan.diagnostics import Note
from ray_fed.rounds import client_cuts
from ray_fed.rounds.policy import CallSpec, CohortCut
from ray_fed.values import components
from ray_fed.values import stored as stored_
from ray_fed.values.stored import ArgumentPart


@dataclasses.dataclass
class Call:
    """The state of one call while it runs.

    Attributes:
        spec: when the call began, and what is asked of it.
        cut: the leaves and subrounds of its cohort.
        store: see `RoundPolicy`.
        parameter: type of the argument; None where the computation takes none.
        argument: the argument, if the computation takes one; at most one element.
        at_finish: the same, as after-merge work takes it.
        of_runs: the argument of each subround: with the values of its clients alone.
        merged: the merged value of each stage that is done.
        dropped: why clients take no part, by index in the cohort.
        max_dropped: how many clients may be dropped.
        keeps: for each run, whether stages keep values of its clients.
        kept: for each run, the kept values by name.
        bytes_broadcast: of what all its subrounds are given, each value once.
        bytes_sliced: of clients' values, for each run.
        next_index: of the next subround.
        notes: the notes that its work left, see `diagnostics`.
        decisions: about XLA, by the content of kernels that it runs.
    """

    spec: CallSpec
    cut: CohortCut
    store: Callable[[ArgumentPart], tuple[ArgumentPart, int]]
    parameter: fl.Type | None = None
    argument: list[ArgumentPart] = dataclasses.field(default_factory=list[ArgumentPart])
    at_finish: list[ArgumentPart] = dataclasses.field(
        default_factory=list[ArgumentPart]
    )
    of_runs: dict[int, list[ArgumentPart]] = dataclasses.field(
        default_factory=dict[int, list[ArgumentPart]]
    )
    merged: list[ArgumentPart] = dataclasses.field(default_factory=list[ArgumentPart])
    max_dropped: int = 0
    dropped: dict[int, str] = dataclasses.field(default_factory=dict[int, str])
    keeps: Sequence[bool] = ()
    kept: dict[int, dict[str, ArgumentPart]] = dataclasses.field(
        default_factory=dict[int, dict[str, ArgumentPart]]
    )
    bytes_broadcast: int = 0
    bytes_sliced: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    next_index: int = 0
    notes: set[Note] = dataclasses.field(default_factory=set[Note])

    def take_indices(self, count: int) -> int:
        """Return the first of so many new subround indices."""
        first = self.next_index
        self.next_index += count
        return first

    def take_argument(
        self,
        argument: Plain,
        parameter: fl.Type | None,
        *,
        leaves_out_clients: bool = False,
    ) -> None:
        """Store what all subrounds see, and what each is given.

        Args:
            argument: plain; parts of it may be stored.
            parameter: its type; None where the computation takes none.
            leaves_out_clients: whether after-merge work does without clients' values.
        """
        self.parameter = parameter
        if parameter is not None:
            shared = self.share(argument, parameter)
            self.argument = self.at_finish = [shared]
            if leaves_out_clients:
                self.at_finish = [client_cuts.without_clients(shared, parameter)]
        for run in range(len(self.cut.runs)):
            self.slice_run(run)

    def share(self, value: Plain, type_spec: fl.Type) -> Plain:
        """Store what all subrounds see; leave what is cut by clients."""

        def store(part: Plain) -> ArgumentPart:
            stored, num_bytes = self.store(part)
            self.bytes_broadcast += num_bytes
            return stored

        def share(part_type: fl.Type, part: ArgumentPart) -> ArgumentPart:
            if type_checks.differs_by_client(part_type):
                return part
            if stored_.holds_stored(part):
                held = components.split(part, part_type)
                return stored_.StoredComponents(tuple(map(store, held)))
            return store(part)

        return stored_.map_placed(share, value, type_spec)

    def slice_run(self, run: int) -> None:
        """Store the values of a run's clients, once."""
        self.bytes_sliced[run] = 0
        clients = self.clients(run)
        if self.parameter is None:
            self.of_runs[run] = []
            return
        dropped = [client - clients.start for client in self.dropped_of(run)]

        def cut(part_type: fl.Type, part: ArgumentPart) -> ArgumentPart:
            if not type_checks.differs_by_client(part_type):
                return part
            inside = part[clients.start : clients.stop]
            stored, num_bytes = self.store(client_cuts.drop_clients(inside, dropped))
            self.bytes_sliced[run] += num_bytes
            return stored

        (argument,) = self.argument
        self.of_runs[run] = [stored_.map_placed(cut, argument, self.parameter)]

    def clients(self, run: int) -> range:
        """Return the clients of a run, by index in the cohort."""
        leaves = self.cut.runs[run]
        return range(
            self.cut.leaves[leaves.start].start, self.cut.leaves[leaves.stop - 1].stop
        )

    def dropped_of(self, run: int) -> tuple[int, ...]:
        """Return those of a run's clients that take no part, in order."""
        clients = self.clients(run)
        return tuple(sorted(client for client in self.dropped if client in clients))

    def drop_clients(self, error: errors.ComputationError) -> dict[int, str]:
        """Leave out the clients that an error names.

        Returns:
            Why, by index in the cohort, for those that took part until now.

        Raises:
            ComputationError: the error, where there are none or too many.
        """
        found = sorted(error.failures.keys() - self.dropped.keys())
        if not found:
            raise error
        if len(self.dropped) + len(found) > self.max_dropped:
            error.add_note(
                f"Expected at most {self.max_dropped} clients to fail"
                f" (`max_dropped_clients`), found {len(self.dropped) + len(found)}."
            )
            raise error
        causes = {client: error.failures[client] for client in found}
        self.dropped.update(causes)
        return causes

    def leaves(self, run: int) -> tuple[range, ...]:
        """Return the clients of each leaf of a run, counted without those dropped."""
        leaves = tuple(self.cut.leaves[index] for index in self.cut.runs[run])
        dropped, start = self.dropped_of(run), leaves[0].start
        if not dropped:
            return leaves
        found: list[range] = []
        for leaf in leaves:
            size = len(leaf) - sum(client in leaf for client in dropped)
            found.append(range(start, start + size))
            start += size
        return tuple(found)

    def run_arg(self, run: int, takes: Sequence[str] = ()) -> Plain:
        """Return what the work of this stage takes, with the values of a run's clients.

        `takes` names values that were kept.
        """
        kept = tuple(self.kept[run][name] for name in takes)
        return plans.as_argument(
            [*self.of_runs[run], *self.merged, *([kept] if takes else [])]
        )

    def keep(
        self, run: int, keeping: KeepingStage, outcome: outcomes.Outcome
    ) -> tuple[object, ...]:
        """Keep what a subround emitted; return the rest of what it returned."""
        num_others = len(outcome.values) - len(keeping.emits)
        num_clients = sum(len(leaf) for leaf in self.leaves(run))
        emitted = [
            stored_.StoredClients(value.reference, 0, num_clients)
            if isinstance(value, stored_.Stored)
            else value
            for value in outcome.values[num_others:]
        ]
        held = self.kept.setdefault(run, {})
        held.update(zip(keeping.emits, emitted, strict=True))
        return outcome.values[:num_others]

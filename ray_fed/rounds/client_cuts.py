"""Cuts a round's argument by clients: pure, by index, nothing copied.

How rounds are cut and carried: what a context decides once for all its calls.

What one call has so far: its argument by runs, what was merged, what is kept.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Literal

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
from ray_fed.compiler.form import KeepingStage
from ray_fed.language import blocks, structs, type_checks
from ray_fed.language.structs import Plain
from ray_fed.observability import events
from ray_fed.plan import merge_tree, outcomes
from ray_fed.plan.diagnostics import Note
from ray_fed.values import components, stored
from ray_fed.values import stored as stored_
from ray_fed.values.client_references import ClientRun
from ray_fed.values.columnar_sequence import ColumnarSequence
from ray_fed.values.stored import ArgumentPart, ClientValues, Stored, StoredClients

_BASE_WEIGHT = 10
"""What a client costs beside its rows: about so many rows of a small model."""


def count_clients(arg: Plain, type_spec: fl.Type | None, default: int) -> int:
    """Return the size of the cohort that an argument brings.

    Args:
        arg: of `type_spec`.
        type_spec: None for a computation without an argument.
        default: for an argument without client values.

    Raises:
        CardinalityError: client values in the argument differ in number.
        ValueMismatchError: a value for clients is no sequence.
    """
    if type_spec is None:
        return default
    counts: list[tuple[fl.Type, int]] = []

    def note(part_type: fl.Type, part: ArgumentPart) -> None:
        if type_checks.differs_by_client(part_type):
            counts.append((part_type, len(stored.client_sequence(part, part_type))))

    stored.map_placed(note, arg, type_spec)
    if len({count for _, count in counts}) > 1:
        found = ", ".join(f"{count} for `{t}`" for t, count in counts)
        raise errors.CardinalityError(
            "Expected as many values in every argument placed at clients, found"
            f" {found}: pass one value a client."
        )
    return counts[0][1] if counts else default


def weigh_clients(arg: Plain, type_spec: fl.Type | None) -> NDArray[np.float64] | None:
    """Return what each client's work will cost, as far as its data tell.

    Args:
        arg: of `type_spec`.
        type_spec: None for a computation without an argument.

    Returns:
        In client order: rows of the client's sequences, and a base cost. None where no
        sequence is placed at clients, or its size is not known here.
    """
    rows: list[NDArray[np.float64]] = []  # NaN where it is not known
    if type_spec is None:
        return None

    def note(part_type: fl.Type, part: ArgumentPart) -> None:
        if isinstance(part, ClientRun):
            rows.append(np.empty(0) if part.weights is None else part.weights)
        elif type_checks.differs_by_client(part_type) and isinstance(
            part, list | tuple
        ):
            member = type_checks.member_type(part_type)
            rows.append(np.array([_count_rows(v, member) for v in part], np.float64))

    stored.map_placed(note, arg, type_spec)
    told = [counts for counts in rows if not np.isnan(counts).all()]
    if not told or any(np.isnan(counts).any() for counts in told):
        return None  # some clients' data are in files, say
    return _BASE_WEIGHT + np.sum(told, axis=0)


def _count_rows(value: Plain, type_spec: fl.Type) -> int | None:
    if isinstance(value, ColumnarSequence):
        return max([value.length, *(len(column.rows) for column in value.columns)])
    if not isinstance(type_spec, fl.StructType) or not isinstance(value, list | tuple):
        return None
    counts = [
        _count_rows(member, element)
        for member, (_, element) in zip(value, type_spec.items(), strict=True)
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def cut_by_weight(weights: Sequence[float], num_runs: int) -> list[range]:
    """Cut items into at most `num_runs` contiguous runs of about equal weight.

    Args:
        weights: of each item, > 0.
        num_runs: >= 1.

    Returns:
        Runs in order, none of them empty; as many as there are items, if those are
        fewer. A run ends at the item whose end is nearest to its share of the sum.
    """
    num_runs = min(num_runs, len(weights))
    ends = np.cumsum(weights)
    runs: list[range] = []
    start = 0
    for index in range(num_runs):
        share = ends[-1] * (index + 1) / num_runs
        last = len(weights) - (num_runs - index - 1)  # one item for each later run
        candidates = ends[start:last]
        stop = start + int(np.argmin(np.abs(candidates - share))) + 1
        runs.append(range(start, stop))
        start = stop
    return runs


def drop_clients(clients: ClientValues, dropped: Sequence[int]) -> ClientValues:
    """Return the values of some clients without the values of dropped clients.

    Args:
        clients: their values, in order.
        dropped: positions of the dropped clients, in order.
    """
    if not dropped:
        return clients
    if isinstance(clients, ClientRun):
        return clients.without(dropped)
    return [member for i, member in enumerate(clients) if i not in dropped]


def without_clients(arg: Plain, type_spec: fl.Type) -> Plain:
    """Return an argument with stand-ins of the same length for values of clients."""

    def leave_out(part_type: fl.Type, part: ArgumentPart) -> ArgumentPart:
        if type_checks.differs_by_client(part_type):
            return stored.StoredClients(None, 0, len(part))
        return part

    return stored.map_placed(leave_out, arg, type_spec)


def join_parts(
    at_server: Iterator[Plain], at_clients: Iterator[Plain], type_spec: fl.Type
) -> Plain:
    """Return a result of its parts; see `compiler.form.ResultParts`.

    Args:
        at_server: the parts that do not differ by client, in order.
        at_clients: the parts that do.
        type_spec: of the result.
    """
    if type_checks.is_placed_struct(type_spec):
        elements = type_checks.struct_type(type_spec).items()
        return tuple(join_parts(at_server, at_clients, e) for _, e in elements)
    if type_checks.differs_by_client(type_spec):
        return next(at_clients)
    return next(at_server)


def join_results(results: list[Plain], type_spec: fl.Type) -> Plain:
    """Return the results of leaves as the result of their cohort.

    Args:
        results: of each leaf, in order, structures as tuples; at least one.
        type_spec: of one result; values at clients are joined, of any other part the
            first is taken, as all are equal.
    """
    if type_checks.is_placed_struct(type_spec):
        struct = type_checks.struct_type(type_spec)
        columns = [
            [structs.struct_elements(result, struct)[index][2] for result in results]
            for index in range(len(struct))
        ]
        return tuple(
            join_results(column, element)
            for column, (_, element) in zip(columns, struct.items(), strict=True)
        )
    if type_checks.differs_by_client(type_spec):
        return [member for result in results for member in result]
    return results[0]


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
        found = cut_by_weight(weights[leaves.start : leaves.stop], count)
    first = leaves.start
    return [range(first + run.start, first + run.stop) for run in found]


def _weigh(run: range, weights: Sequence[float] | None) -> float:
    return float(len(run)) if weights is None else sum(weights[run.start : run.stop])


def _has_clients(parameter: fl.Type | None) -> bool:
    return parameter is not None and type_checks.holds_clients(parameter)


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
                self.at_finish = [without_clients(shared, parameter)]
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
            stored, num_bytes = self.store(drop_clients(inside, dropped))
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

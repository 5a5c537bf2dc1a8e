"""How a round is cut by clients, and what one call has so far.

    CohortCut     the leaves of a cohort, and the runs of leaves that are subrounds
    RoundPolicy   how calls are cut and carried: what a context decides once
    RoundState    one call: its argument by runs, what was merged, what is kept

All cuts are by index, and nothing is copied.
"""

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Literal

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
from ray_fed.compiler.form import KeepingStage
from ray_fed.language import blocks, type_checks
from ray_fed.language.structs import Plain
from ray_fed.observability import events
from ray_fed.plan import merge_tree, outcomes
from ray_fed.plan.diagnostics import Note
from ray_fed.values import components, stored
from ray_fed.values.client_references import ClientRun
from ray_fed.values.stored import ArgumentPart, ClientValues, Stored, StoredClients

_BASE_WEIGHT = 10
"""What a client costs beside its rows: about so many rows of a small model."""


_SUBROUND_S = 0.01
"""Seconds of work that a subround is to have at least, where nobody says how many."""


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
    counts = [
        (part_type, len(stored.client_sequence(part, part_type)))
        for part_type, part in stored.placed_parts(arg, type_spec)
        if type_checks.differs_by_client(part_type)
    ]
    if len({count for _, count in counts}) > 1:
        described = ", ".join(f"{count} for `{t}`" for t, count in counts)
        raise errors.CardinalityError(
            "Expected as many values in every argument placed at clients, found"
            f" {described}: pass one value a client."
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
    for part_type, part in stored.placed_parts(arg, type_spec):
        if isinstance(part, ClientRun):
            rows.append(np.empty(0) if part.weights is None else part.weights)
        elif type_checks.differs_by_client(part_type) and isinstance(
            part, list | tuple
        ):
            rows.append(np.array(list(map(stored.count_rows, part)), np.float64))
    known = [counts for counts in rows if not np.isnan(counts).all()]
    if not known or any(np.isnan(counts).any() for counts in known):
        return None  # some clients' data are in files, say
    return _BASE_WEIGHT + np.sum(known, axis=0)


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
    parts = (
        stored.StoredClients(None, 0, len(part))
        if type_checks.differs_by_client(part_type)
        else part
        for part_type, part in stored.placed_parts(arg, type_spec)
    )
    return stored.join_placed(parts, type_spec)


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
    columns = zip(*(stored.placed_parts(r, type_spec) for r in results), strict=True)
    parts = (
        [member for _, members in column for member in members]
        if type_checks.differs_by_client(column[0][0])
        else column[0][1]
        for column in columns
    )
    return stored.join_placed(parts, type_spec)


async def _return_as_is(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class RoundPolicy:
    """How calls are cut and carried.

    Attributes:
        cut_leaves: from the size of the cohort to its leaves; never empty.
        num_subrounds: at most so many runs of leaves; None: as many as workers.
        num_workers: that the subrounds of a round have between them; a function is
            asked for that number as each round begins, which may resize the pool.
        spreads_subrounds: whether one subround may run on several workers, where there
            are more workers than subrounds.
        default_num_clients: the cohort of a call without client arguments.
        replicas: leaves of such a call, each with the whole argument; None: as many
            as its cohort is cut into.
        seed: of the random numbers of all calls.
        store: makes a value that many subrounds share cheap to pass along; returns what
            stands for it, and how many bytes of arrays leave this process.
        fetch: reads what `store` or a runner put in a store; returns any other value as
            it is.
        emit: receives events.
        call_s: seconds of clients that one call of a kernel may cover, about; None:
            all work is interpreted.
        jit: see `plans.Kernel`.
        vectorised_clients: see `plans.Kernel`.
        has_own_runners: whether runners are ray_fed's own, which take stand-ins for
            values of clients that a finish does not read, and a subround that finishes
            its round.
        kept_bytes: of clients' values that a call may keep for later stages.
        max_dropped_clients: whose work raised, that a call may go on without.
    """

    cut_leaves: Callable[[int], Sequence[range]]
    num_subrounds: int | None = None
    num_workers: int | Callable[[], Awaitable[int]] = 1
    spreads_subrounds: bool = False
    default_num_clients: int = 0
    replicas: int | None = None
    seed: int = 0
    store: Callable[[Any], tuple[Any, int]] = lambda value: (value, 0)
    fetch: Callable[[Any], Coroutine[Any, Any, Any]] = _return_as_is
    emit: Callable[[events.Event], None] = events.Sinks().on_event
    call_s: float | None = None
    jit: Literal["auto", "on", "off"] = "off"
    vectorised_clients: int = 1
    has_own_runners: bool = False
    kept_bytes: int = 0
    max_dropped_clients: int = 0

    async def workers_now(self, work_s: float | None = None) -> int:
        """Return how many workers a round has that begins now.

        Args:
            work_s: seconds that workers will take in all, as far as is known.
        """
        num_workers = self.num_workers
        if not isinstance(num_workers, int):
            num_workers = await num_workers()
        if work_s is not None and self.num_subrounds is None:
            # A subround of less costs more on its way than it spares beside another.
            num_workers = max(1, min(num_workers, int(work_s / _SUBROUND_S)))
        return num_workers

    async def read_clients(self, part: ClientValues) -> ClientValues:
        """Return the values of clients that a runner kept in a store, or returned."""
        if not isinstance(part, StoredClients):
            return part
        values = await self.fetch(Stored(part.reference))
        return values[part.start : part.stop]

    def workers_per_subround(
        self, num_workers: int, num_subrounds: int, num_leaves: int
    ) -> int:
        """Return how many workers one of some subrounds may use, by its leaves."""
        if not self.spreads_subrounds:
            return 1
        return max(1, min(num_workers // num_subrounds, num_leaves))


@dataclasses.dataclass(frozen=True)
class RoundRequest:
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
        num_workers: int,
        policy: RoundPolicy,
        parameter: fl.Type | None,
        weights: NDArray[np.float64] | None = None,
    ) -> "CohortCut":
        """Cut a cohort as the policy says; where the runs end is all weights decide.

        Args:
            num_clients: of the cohort.
            num_workers: of the round.
            policy: how to cut.
            parameter: type of the argument; None without one.
            weights: of each client, > 0; None where they are not known.
        """
        leaves = tuple(policy.cut_leaves(num_clients))
        has_clients = parameter is not None and type_checks.holds_clients(parameter)
        if policy.replicas is not None and not has_clients:
            leaves = (range(num_clients),) * policy.replicas
        of_leaf = None
        if weights is not None:
            starts = [leaf.start for leaf in leaves]
            of_leaf = np.add.reduceat(weights, starts).tolist()
        whole = range(len(leaves))
        runs = _cut(whole, of_leaf, policy.num_subrounds or num_workers)
        sums = [_weigh(run, of_leaf) for run in runs]
        order = sorted(range(len(runs)), key=lambda run: -sums[run])
        size = max(1, *(len(leaf) for leaf in leaves), 1)
        chunks: list[tuple[range, ...]] = []
        for run in runs:
            count = policy.workers_per_subround(num_workers, len(runs), len(run))
            chunks.append(tuple(_cut(run, of_leaf, count)))
        return cls(leaves, tuple(runs), size, tuple(order), tuple(chunks))

    def first_runs(self, num_bytes: int, member_bytes: int) -> list[bool]:
        """Return which runs, from the first on, fit into so many bytes together.

        Args:
            num_bytes: in all.
            member_bytes: of each client.
        """
        ends = [self.leaves[run[-1]].stop for run in self.runs]
        return [end * member_bytes <= num_bytes for end in ends]

    @functools.cached_property
    def clients(self) -> tuple[range, ...]:
        """The clients of each run, by index in the cohort."""
        return tuple(
            range(self.leaves[run.start].start, self.leaves[run.stop - 1].stop)
            for run in self.runs
        )

    @functools.cached_property
    def subtrees(self) -> tuple[tuple[merge_tree.Subtree, ...], ...]:
        """Of each run, the subtrees of its chunks, in order."""
        tree = (0, len(self.leaves))
        return tuple(
            tuple(
                subtree
                for chunk in chunks
                for subtree in merge_tree.subtrees(chunk.start, chunk.stop, tree)
            )
            for chunks in self.chunks
        )


def _cut(leaves: range, weights: Sequence[float] | None, count: int) -> list[range]:
    """Cut contiguous leaves into at most so many runs, even by weight or by number."""
    if weights is None:
        runs = merge_tree.cut_runs(len(leaves), count)
    else:
        runs = cut_by_weight(weights[leaves.start : leaves.stop], count)
    first = leaves.start
    return [range(first + run.start, first + run.stop) for run in runs]


def _weigh(run: range, weights: Sequence[float] | None) -> float:
    return float(len(run)) if weights is None else sum(weights[run.start : run.stop])


@dataclasses.dataclass
class RoundState:
    """The state of one call while it runs.

    Attributes:
        spec: when the call began, and what is asked of it.
        cut: the leaves and subrounds of its cohort.
        store: see `RoundPolicy`.
        parameter: type of the argument; None where the computation takes none.
        argument: the argument, if the computation takes one; at most one element.
        finish_argument: the same, as after-merge work takes it.
        subround_arguments: of each subround: with the values of its clients alone.
        merged: the merged value of each stage that is done.
        dropped: why clients take no part, by index in the cohort.
        max_dropped: how many clients may be dropped.
        keeps: for each run, whether stages keep values of its clients.
        kept: for each run, the kept values by name.
        bytes_broadcast: of what all its subrounds are given, each value once.
        bytes_sliced: of clients' values, for each run.
        next_index: of the next subround.
        work_s: seconds that workers took.
        notes: the notes that its work left, see `diagnostics`.
    """

    spec: RoundRequest
    cut: CohortCut
    store: Callable[[ArgumentPart], tuple[ArgumentPart, int]]
    parameter: fl.Type | None = None
    argument: list[ArgumentPart] = dataclasses.field(default_factory=list[ArgumentPart])
    finish_argument: list[ArgumentPart] = dataclasses.field(
        default_factory=list[ArgumentPart]
    )
    subround_arguments: dict[int, list[ArgumentPart]] = dataclasses.field(
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
    work_s: float = 0.0
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
            self.argument = self.finish_argument = [shared]
            if leaves_out_clients:
                self.finish_argument = [without_clients(shared, parameter)]
        for run in range(len(self.cut.runs)):
            self.slice_run(run)

    def share(self, value: Plain, type_spec: fl.Type) -> Plain:
        """Store what all subrounds see; leave what is cut by clients."""
        parts: list[ArgumentPart] = []
        for part_type, part in stored.placed_parts(value, type_spec):
            if type_checks.differs_by_client(part_type):
                parts.append(part)
                continue
            apart = stored.holds_stored(part)
            members = components.split(part, part_type) if apart else [part]
            shared = [self.store(member) for member in members]
            self.bytes_broadcast += sum(num_bytes for _, num_bytes in shared)
            values = tuple(value for value, _ in shared)
            parts.append(stored.StoredComponents(values) if apart else values[0])
        return stored.join_placed(iter(parts), type_spec)

    def slice_run(self, run: int) -> None:
        """Store the values of a run's clients, once."""
        self.bytes_sliced[run] = 0
        if self.parameter is None:
            self.subround_arguments[run] = []
            return
        clients = self.cut.clients[run]
        dropped = [client - clients.start for client in self.dropped_in(run)]
        parts: list[ArgumentPart] = []
        for part_type, part in stored.placed_parts(self.argument[0], self.parameter):
            if type_checks.differs_by_client(part_type):
                inside = drop_clients(part[clients.start : clients.stop], dropped)
                part, num_bytes = self.store(inside)  # noqa: PLW2901 (in its place)
                self.bytes_sliced[run] += num_bytes
            parts.append(part)
        argument = stored.join_placed(iter(parts), self.parameter)
        self.subround_arguments[run] = [argument]

    def dropped_in(self, run: int) -> tuple[int, ...]:
        """Return those of a run's clients that take no part, in order."""
        clients = self.cut.clients[run]
        return tuple(sorted(client for client in self.dropped if client in clients))

    def drop_clients(self, error: errors.ComputationError) -> dict[int, str]:
        """Leave out the clients that an error names.

        Returns:
            Why, by index in the cohort, for those that took part until now.

        Raises:
            ComputationError: the error, where there are none or too many.
        """
        failed = sorted(error.failures.keys() - self.dropped.keys())
        if not failed:
            raise error
        if len(self.dropped) + len(failed) > self.max_dropped:
            error.add_note(
                f"Expected at most {self.max_dropped} clients to fail"
                f" (`max_dropped_clients`), found {len(self.dropped) + len(failed)}."
            )
            raise error
        causes = {client: error.failures[client] for client in failed}
        self.dropped.update(causes)
        return causes

    def leaves(self, run: int) -> tuple[range, ...]:
        """Return the clients of each leaf of a run, counted without those dropped."""
        indices = self.cut.runs[run]
        leaves = self.cut.leaves[indices.start : indices.stop]
        dropped, start = self.dropped_in(run), leaves[0].start
        if not dropped:
            return leaves
        remaining: list[range] = []
        for leaf in leaves:
            size = len(leaf) - sum(client in leaf for client in dropped)
            remaining.append(range(start, start + size))
            start += size
        return tuple(remaining)

    def run_arg(self, run: int, loads: Sequence[str] = ()) -> Plain:
        """Return what the work of this stage takes, with the values of a run's clients.

        `loads` names values that were kept.
        """
        kept = [tuple([self.kept[run][name] for name in loads])] if loads else []
        return plans.as_argument([*self.subround_arguments[run], *self.merged, *kept])

    def keep(
        self, run: int, keeping: KeepingStage, outcome: outcomes.Outcome
    ) -> tuple[object, ...]:
        """Keep what a subround saved; return the rest of what it returned."""
        num_others = len(outcome.values) - len(keeping.saves)
        num_clients = sum(len(leaf) for leaf in self.leaves(run))
        saved = [
            stored.StoredClients(value.reference, 0, num_clients)
            if isinstance(value, stored.Stored)
            else value
            for value in outcome.values[num_others:]
        ]
        by_name = self.kept.setdefault(run, {})
        by_name.update(zip(keeping.saves, saved, strict=True))
        return outcome.values[:num_others]

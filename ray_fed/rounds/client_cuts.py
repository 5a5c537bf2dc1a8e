"""The division of clients into leaves and subrounds, and the state of one call.

    CohortCut     the clients of each leaf, and the leaves of each subround
    RoundPolicy   the settings by which a context divides and runs its calls
    RoundState    one call: the argument of each subround, merged and kept values

The cohort is all clients of a call, in order. A leaf has neighboring clients, whose
values are accumulated one after another. A subround has neighboring leaves. Clients'
values are not copied.
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
from ray_fed.language import blocks, trees, type_checks
from ray_fed.language.structs import Plain
from ray_fed.observability import events
from ray_fed.plan import merge_tree, outcomes
from ray_fed.plan.diagnostics import Note
from ray_fed.values import components, stored
from ray_fed.values.client_references import ClientRun, check_pairs
from ray_fed.values.stored import ArgumentPart, ClientValues, Stored, StoredClients

_BASE_WEIGHT = 10
"""Fixed cost of a client's work, in rows of a small model."""

_SUBROUND_S = 0.01
"""Minimum seconds of work in a subround if the number of subrounds is not set."""


def count_clients(arg: Plain, type_spec: fl.Type | None, default: int) -> int:
    """Return the number of clients in an argument of a type.

    If the argument has no values placed at clients, the result is `default`. Raises
    CardinalityError if two values have different numbers of clients, and
    ValueMismatchError if a value is no list, or if two values have different clients at
    one index.
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
            "Expected the same number of values in every argument placed at clients,"
            f" found {described}: pass one value for each client."
        )
    check_pairs(arg, type_spec)
    return counts[0][1] if counts else default


def weigh_clients(arg: Plain, type_spec: fl.Type | None) -> NDArray[np.float64] | None:
    """Estimate the cost of each client's work from the client's number of rows.

    `arg` is a plain value of `type_spec`. Both are None in a call without an argument.
    The result has the costs in client order, f64[clients]: a fixed cost plus the number
    of rows. It is None if clients have no sequences, or if a number is unknown.
    """
    rows: list[NDArray[np.float64]] = []  # NaN if a number is unknown
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
        return None  # for example, the data of some clients are in files
    return _BASE_WEIGHT + np.sum(known, axis=0)


def cut_by_weight(weights: Sequence[float], num_runs: int) -> list[range]:
    """Divide items into at most `num_runs` ranges of neighbors, of similar weight.

    `weights` has the weight of each item, > 0. The ranges are not empty, and in order.
    If there are fewer items than `num_runs` >= 1, each item is a range. A range ends at
    the item whose cumulative weight is nearest to an equal share of the sum.
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
    """Return clients' values without the values at the positions `dropped`."""
    if not dropped:
        return clients
    if isinstance(clients, ClientRun):
        return clients.without(dropped)
    return [member for i, member in enumerate(clients) if i not in dropped]


def without_clients(arg: Plain, type_spec: fl.Type) -> Plain:
    """Replace clients' values in an argument by stand-ins, which have only a length.

    The server's work needs the number of clients, but not their values.
    """
    parts = (
        stored.StoredClients(None, 0, len(part))
        if type_checks.differs_by_client(part_type)
        else part
        for part_type, part in stored.placed_parts(arg, type_spec)
    )
    return trees.nest(parts, type_spec, trees.is_unstructured)


def join_parts(
    at_server: Iterator[Plain], at_clients: Iterator[Plain], type_spec: fl.Type
) -> Plain:
    """Build a result of a type from its parts, see `compiler.form.ResultParts`.

    `at_clients` has the parts that differ by client, in order. `at_server` has all
    other parts, in order.
    """
    parts = (
        next(at_clients if type_checks.differs_by_client(part) else at_server)
        for part in trees.leaf_types(type_spec, trees.is_unstructured)
    )
    return trees.nest(parts, type_spec, trees.is_unstructured)


def join_results(results: list[Plain], type_spec: fl.Type) -> Plain:
    """Join the results of leaves, in order, into one result for all clients.

    Values at clients are concatenated. Other parts are equal in all results.
    """
    columns = zip(*(stored.placed_parts(r, type_spec) for r in results), strict=True)
    parts = (
        [member for _, members in column for member in members]
        if type_checks.differs_by_client(column[0][0])
        else column[0][1]
        for column in columns
    )
    return trees.nest(parts, type_spec, trees.is_unstructured)


async def _return_as_is(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class RoundPolicy:
    """The settings by which a context divides and runs its calls.

    Attributes:
        cut_leaves: Function from the number of clients to the client indices of each
            leaf. It returns at least one leaf.
        num_subrounds: Maximum number of subrounds, or None for the number of workers.
        num_workers: Number of workers for a round, or an async function that each round
            calls for it. The function may start or end workers.
        spreads_subrounds: Whether a subround may run on several workers if there are
            more workers than subrounds.
        default_num_clients: Number of clients of a call without clients' values.
        replicas: Number of leaves of a call without clients' values. Each leaf then has
            all clients. With None, clients are divided as in other calls.
        seed: Seed of all random numbers.
        store: Function that stores a value that several subrounds read. It returns a
            reference (or the value itself) and the number of stored bytes.
        fetch: Async function that reads a stored value, and returns others as they are.
        emit: Function that receives events.
        call_s: Approximate maximum seconds of clients' work in one call of a kernel (a
            graph for many clients). With None, kernels are not used.
        jit: Whether XLA compiles kernels, see `plans.Kernel`.
        vectorized_clients: Number of clients that a kernel runs at once.
        has_own_runners: Whether the runners are ray_fed's own. They accept a finish
            with stand-ins for clients' values, and a subround that has the finish.
        kept_bytes: Maximum bytes of clients' values that a call keeps between stages.
        max_dropped_clients: Maximum number of failed clients that a call leaves out.
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
    vectorized_clients: int = 1
    has_own_runners: bool = False
    kept_bytes: int = 0
    max_dropped_clients: int = 0

    async def workers_now(self, work_s: float | None = None) -> int:
        """Return the number of workers for a round that begins now.

        `work_s` is the expected sum of seconds of clients' work, or None if unknown.
        """
        num_workers = self.num_workers
        if not isinstance(num_workers, int):
            num_workers = await num_workers()
        if work_s is not None and self.num_subrounds is None:
            # To send a smaller subround takes longer than to run it after another.
            num_workers = max(1, min(num_workers, int(work_s / _SUBROUND_S)))
        return num_workers

    async def read_clients(self, part: ClientValues) -> ClientValues:
        """Return values of clients. Stored values are read."""
        if not isinstance(part, StoredClients):
            return part
        values = await self.fetch(Stored(part.reference))
        return values[part.start : part.stop]

    def workers_per_subround(
        self, num_workers: int, num_subrounds: int, num_leaves: int
    ) -> int:
        """Return how many workers one subround may use, at most one for each leaf."""
        if not self.spreads_subrounds:
            return 1
        return max(1, min(num_workers // num_subrounds, num_leaves))


@dataclasses.dataclass(frozen=True)
class RoundRequest:
    """The properties of a call that are known before it begins.

    Attributes:
        round_index: Number of the call in its context, which decides random numbers.
        started: Start of the call, in seconds of the monotonic clock.
        by_component: Whether the result is a tuple of its tensors and sequences, which
            runners store separately.
    """

    round_index: int
    started: float
    by_component: bool = False

    def components_type(self, result: fl.Type) -> bytes | None:
        """Return the `components_type` of a plan whose result has the type `result`.

        This is the serialized type, or None if the plan returns a whole value.
        """
        if not self.by_component or not components.component_types(result):
            return None
        return blocks.serialize_type(result)

    def as_asked(self, value: Plain, result: fl.Type) -> Plain:
        """Return a whole value in the form that the call wants: whole or components."""
        if self.components_type(result) is None:
            return value
        return components.split(value, result)

    def as_whole(self, returned: Any, result: fl.Type) -> Plain:
        """Return the whole value from the form that `as_asked` returns."""
        if self.components_type(result) is None:
            return returned
        return components.join(returned, result)


@dataclasses.dataclass(frozen=True)
class CohortCut:
    """The division of a cohort into leaves, subrounds and chunks.

    Attributes:
        leaves: Client indices of each leaf.
        runs: Leaf indices of each subround.
        size: Number of clients of the largest leaf, at least 1.
        heaviest_first: Indices of the subrounds. The most work comes first.
        chunks: For each subround, leaf indices for each worker that it can use.
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
        """Divide a cohort for a round on `num_workers` workers.

        `parameter` is the type of the argument, or None. `weights` has the cost of each
        client's work, f64[clients], > 0, or is None. They decide only which leaves are
        in which subround. The leaves, and so the result's bits, do not depend on them.
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
        """Return for each subround whether its clients can keep values between stages.

        The first subrounds can, up to a sum of `num_bytes`. A client needs
        `member_bytes`.
        """
        ends = [self.leaves[run[-1]].stop for run in self.runs]
        return [end * member_bytes <= num_bytes for end in ends]

    @functools.cached_property
    def clients(self) -> tuple[range, ...]:
        """Client indices of each subround."""
        return tuple(
            range(self.leaves[run.start].start, self.leaves[run.stop - 1].stop)
            for run in self.runs
        )

    @functools.cached_property
    def subtrees(self) -> tuple[tuple[merge_tree.Subtree, ...], ...]:
        """For each subround, the parts of the merge tree that its chunks can merge.

        Each part has all leaves of one node of the tree, and no others.
        """
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
    """The state of one call while it runs. `run` is the index of a subround.

    Attributes:
        spec: Request of the call.
        cut: Leaves and subrounds of the cohort.
        store: Function that stores a value, see `RoundPolicy`.
        parameter: Type of the argument, or None without an argument.
        argument: List with the argument as the only element, or an empty list.
        finish_argument: List with the argument for the finish of the round. It may have
            stand-ins for clients' values.
        subround_arguments: For each subround, a list with its argument, which has only
            the values of its own clients.
        merged: Merged value of each completed stage.
        max_dropped: Maximum number of clients that the call may leave out.
        dropped: Error message of each client that is left out, by client index.
        keeps: For each subround, whether its clients keep values between stages.
        kept: For each subround, the kept values by name.
        bytes_broadcast: Bytes of the values that all subrounds read, each counted once.
        bytes_sliced: For each subround, the bytes of its clients' values.
        next_index: Index of the call's next plan, for events and errors.
        work_s: Seconds of work, in sum over all workers.
        notes: Notes of workers for the user, see `diagnostics`.
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
        """Reserve `count` consecutive plan indices, and return the first."""
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
        """Store the argument: shared values once, and clients' values by subround.

        `argument` is a plain value of the type `parameter`, or both are None. With
        `leaves_out_clients`, the finish gets stand-ins for clients' values.
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
        """Store the parts of a value that are equal for all clients.

        The result is the value with references in place of these parts.
        """
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
        return trees.nest(iter(parts), type_spec, trees.is_unstructured)

    def slice_run(self, run: int) -> None:
        """Store a subround's clients' values, without clients that were dropped."""
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
        argument = trees.nest(iter(parts), self.parameter, trees.is_unstructured)
        self.subround_arguments[run] = [argument]

    def dropped_in(self, run: int) -> tuple[int, ...]:
        """Return the indices of a subround's dropped clients, in order."""
        clients = self.cut.clients[run]
        return tuple(sorted(client for client in self.dropped if client in clients))

    def drop_clients(self, error: errors.ComputationError) -> dict[int, str]:
        """Drop the clients that an error names, and return their failures by index.

        Raises the error itself if it names no further client, or if more than
        `max_dropped` clients have failed.
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
        """Return a range with one entry for each remaining client, for each leaf.

        Without dropped clients, these are client indices. Otherwise the entries after a
        dropped client move forward, so that leaves stay neighbors.
        """
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
        """Return a subround's argument for the present stage.

        It has the argument of the call, the merged values of earlier stages, and the
        kept values with the names `loads`.
        """
        kept = [tuple([self.kept[run][name] for name in loads])] if loads else []
        return plans.as_argument([*self.subround_arguments[run], *self.merged, *kept])

    def keep(
        self, run: int, keeping: KeepingStage, outcome: outcomes.Outcome
    ) -> tuple[object, ...]:
        """Store the values that a subround's clients keep. Return its other values."""
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

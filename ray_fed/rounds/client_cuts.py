"""The division of a cohort into leaves and subrounds, and the state of one call.

    CohortCut     the leaves of a cohort, and the leaves of each subround
    RoundPolicy   the settings by which a context cuts and runs its calls
    RoundState    one call: the argument of each subround, merged and kept values

Clients and leaves are cut by index. Client values are not copied.
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
"""Fixed cost of a client, in rows of a small model. The rows are added to it."""


_SUBROUND_S = 0.01
"""Minimum seconds of work in a subround if the number of subrounds is not set."""


def count_clients(arg: Plain, type_spec: fl.Type | None, default: int) -> int:
    """Return the number of clients in an argument.

    The result is `default` if no value in the argument is placed at clients. Raises
    CardinalityError if values at clients have different numbers of clients, and
    ValueMismatchError for a value that is no sequence, or different clients at one
    index.
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
    """Estimate the cost of each client's work from the number of its rows.

    Args:
        arg: The argument, a plain value of `type_spec`.
        type_spec: Type of the argument, or None for a computation without an argument.

    Returns:
        Costs in client order, f64[clients]: a base cost plus the rows of the client's
        sequences. None without sequences, or if the rows of any client are unknown.
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
        return None  # for example, the data of some clients are in files
    return _BASE_WEIGHT + np.sum(known, axis=0)


def cut_by_weight(weights: Sequence[float], num_runs: int) -> list[range]:
    """Cut items into at most `num_runs` contiguous ranges of similar weight.

    Args:
        weights: Weight of each item, > 0.
        num_runs: Maximum number of ranges, >= 1.

    Returns:
        Non-empty ranges, in order. There are `num_runs` of them, or one for each item
        if there are fewer items. A range ends at the item whose cumulative weight is
        nearest to an equal share of the sum.
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
    """Return values of neighboring clients without those at the dropped positions."""
    if not dropped:
        return clients
    if isinstance(clients, ClientRun):
        return clients.without(dropped)
    return [member for i, member in enumerate(clients) if i not in dropped]


def without_clients(arg: Plain, type_spec: fl.Type) -> Plain:
    """Replace the client values of an argument by stand-ins of the same length."""
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
    """Build a result from its separate parts, see `compiler.form.ResultParts`.

    Args:
        at_server: The parts that do not differ by client, in order.
        at_clients: The parts that differ by client, in order.
        type_spec: Type of the result.
    """
    parts = (
        next(at_clients if type_checks.differs_by_client(part) else at_server)
        for part in trees.leaf_types(type_spec, trees.is_unstructured)
    )
    return trees.nest(parts, type_spec, trees.is_unstructured)


def join_results(results: list[Plain], type_spec: fl.Type) -> Plain:
    """Join the results of leaves, in order, into the result of their cohort.

    Values at clients are concatenated. Other parts are equal in all results, so the
    first result provides them.
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
    """The settings by which a context cuts and runs its calls.

    Attributes:
        cut_leaves: Function from the number of clients to their leaves. It returns at
            least one leaf.
        num_subrounds: Maximum number of subrounds, or None for the number of workers.
        num_workers: Number of workers that a round can use, or a function that returns
            it when a round begins. The function may resize the pool.
        spreads_subrounds: Whether a subround may run on several workers if there are
            more workers than subrounds.
        default_num_clients: Number of clients of a call without client values.
        replicas: Number of leaves of a call without client values. Each leaf has all
            clients. None cuts such a call like any other.
        seed: Seed of all random numbers.
        store: Stores a value that several subrounds read. It returns a reference, or
            the value itself, and the number of bytes of arrays that leave this process.
        fetch: Reads a value from its reference. It returns any other value as it is.
        emit: Receives events.
        call_s: Approximate limit of the seconds of client work in one kernel call. With
            None, all work is interpreted.
        jit: See `plans.Kernel`.
        vectorized_clients: See `plans.Kernel`.
        has_own_runners: Whether the runners are ray_fed's own. They accept a finish
            whose client values are stand-ins, and a subround that includes the finish.
        kept_bytes: Maximum bytes of client values that a call keeps for later stages.
        max_dropped_clients: Maximum number of failed clients that a call drops.
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
        """Return the number of workers of a round that begins now.

        Args:
            work_s: Expected seconds of work over all workers, or None if unknown.
        """
        num_workers = self.num_workers
        if not isinstance(num_workers, int):
            num_workers = await num_workers()
        if work_s is not None and self.num_subrounds is None:
            # Sending a smaller subround takes longer than running it after another.
            num_workers = max(1, min(num_workers, int(work_s / _SUBROUND_S)))
        return num_workers

    async def read_clients(self, part: ClientValues) -> ClientValues:
        """Return values of clients, and read them first if they are stored."""
        if not isinstance(part, StoredClients):
            return part
        values = await self.fetch(Stored(part.reference))
        return values[part.start : part.stop]

    def workers_per_subround(
        self, num_workers: int, num_subrounds: int, num_leaves: int
    ) -> int:
        """Return how many workers one subround may use. It needs a leaf for each."""
        if not self.spreads_subrounds:
            return 1
        return max(1, min(num_workers // num_subrounds, num_leaves))


@dataclasses.dataclass(frozen=True)
class RoundRequest:
    """The properties of a call that are known before it begins.

    Attributes:
        round_index: Number of calls of the context before this one. Random numbers
            depend on it.
        started: Start of the call, in seconds of the monotonic clock.
        by_component: Whether the result is returned as a tuple of its components.
            Runners store each component separately.
    """

    round_index: int
    started: float
    by_component: bool = False

    def components_type(self, result: fl.Type) -> bytes | None:
        """Return `components_type` of a plan with this result, see `plans.Finish`."""
        if not self.by_component or not components.component_types(result):
            return None
        return blocks.serialize_type(result)

    def as_asked(self, value: Plain, result: fl.Type) -> Plain:
        """Return a whole result, split into components if the call requests them."""
        if self.components_type(result) is None:
            return value
        return components.split(value, result)

    def as_whole(self, returned: Any, result: fl.Type) -> Plain:
        """Return the whole value of a plan's result, the inverse of `as_asked`."""
        if self.components_type(result) is None:
            return returned
        return components.join(returned, result)


@dataclasses.dataclass(frozen=True)
class CohortCut:
    """The division of a cohort into leaves, subrounds and chunks.

    Attributes:
        leaves: The clients of each leaf, by index in the cohort.
        runs: The leaves of each subround, by index.
        size: Number of clients of the largest leaf, at least 1.
        heaviest_first: Indices of the subrounds in the order in which they begin.
        chunks: For each subround, the leaves of each worker that it can use.
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
        """Cut a cohort. Weights decide only which leaves are in which subround.

        Args:
            num_clients: Number of clients of the cohort.
            num_workers: Number of workers of the round.
            policy: The settings of the context.
            parameter: Type of the argument, or None without an argument.
            weights: Cost of each client, f64[clients], > 0, or None if unknown.
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
        """Return which subrounds can keep their clients' values: the first that fit.

        Args:
            num_bytes: Maximum number of bytes that these subrounds keep together.
            member_bytes: Bytes of the values that one client keeps.
        """
        ends = [self.leaves[run[-1]].stop for run in self.runs]
        return [end * member_bytes <= num_bytes for end in ends]

    @functools.cached_property
    def clients(self) -> tuple[range, ...]:
        """The clients of each subround, by index in the cohort."""
        return tuple(
            range(self.leaves[run.start].start, self.leaves[run.stop - 1].stop)
            for run in self.runs
        )

    @functools.cached_property
    def subtrees(self) -> tuple[tuple[merge_tree.Subtree, ...], ...]:
        """For each subround, the whole subtrees inside its chunks, in order."""
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
        spec: The request of the call.
        cut: The leaves and subrounds of its cohort.
        store: See `RoundPolicy`.
        parameter: Type of the argument, or None without an argument.
        argument: The argument as the only element, or empty without an argument.
        finish_argument: The argument in the same form, as the finish takes it.
        subround_arguments: The argument for each subround, with the values of its own
            clients.
        merged: The merged value of each completed stage.
        dropped: The failure of each dropped client, by index in the cohort.
        max_dropped: Maximum number of dropped clients.
        keeps: For each subround, whether its clients' values are kept between stages.
        kept: For each subround, the kept values by name.
        bytes_broadcast: Bytes of the values that all subrounds read, each counted once.
        bytes_sliced: Bytes of client values, for each subround.
        next_index: Index of the next plan of this call, in events and errors.
        work_s: Seconds of work, in sum over all workers.
        notes: Notes that workers returned, see `diagnostics`.
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
        """Reserve `count` consecutive indices of subrounds and return the first."""
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
        """Store the shared values of an argument, and the client values by subround.

        Args:
            argument: The argument, a plain value. Parts of it can already be stored.
            parameter: Type of the argument, or None without an argument.
            leaves_out_clients: Whether the finish gets stand-ins for client values.
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
        """Store the parts of a value that do not differ by client."""
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
        """Store the client values of a subround, without dropped clients."""
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
        """Return the dropped clients of a subround, by cohort index, in order."""
        clients = self.cut.clients[run]
        return tuple(sorted(client for client in self.dropped if client in clients))

    def drop_clients(self, error: errors.ComputationError) -> dict[int, str]:
        """Drop the clients that an error names.

        Returns:
            The failure of each newly dropped client, by index in the cohort.

        Raises:
            ComputationError: The error itself, if it names no further client, or if
                more than `max_dropped` clients have failed.
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
        """Return the clients of each leaf of a subround, not counting dropped ones."""
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
        """Return the argument of this stage's work in a subround.

        Args:
            run: Index of the subround.
            loads: Names of the kept values that the work takes, after merged values.
        """
        kept = [tuple([self.kept[run][name] for name in loads])] if loads else []
        return plans.as_argument([*self.subround_arguments[run], *self.merged, *kept])

    def keep(
        self, run: int, keeping: KeepingStage, outcome: outcomes.Outcome
    ) -> tuple[object, ...]:
        """Keep the values that a subround saved, and return its other values."""
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

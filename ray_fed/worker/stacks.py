"""Where executors meet: the stacks that ray_fed builds, and strategies in a process.

    device_stack                    local_stack

    DeviceStack (resolves names)    ReferenceResolvingExecutor
    SequenceExecutor                FederatingExecutor --- LocalStrategy
    EagerTFExecutor                 device_stack           device_stack, one per thread

Partials are merged along the tree of leaves, whichever executor has them. Work on a
contiguous chunk of clients is one set of functions, which an actor calls, too: so a
client's arithmetic, its order and its errors do not depend on where it runs.

TensorFlow is imported inside of functions: a coordinator imports this module, but
never loads TensorFlow.
"""

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import federated_language as fl
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
import ray_fed.plan.plans as plans
import ray_fed.values.plain_values as plain_values
from ray_fed.executors.closure import ResolvedValue
from ray_fed.executors.federating import FederatingExecutor
from ray_fed.executors.loops import gather_by_index
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.executors.sequences import SequenceExecutor
from ray_fed.executors.strategy import FederatingStrategy, Placed, PlacedArg
from ray_fed.executors.threads import ThreadDelegatingExecutor
from ray_fed.language import blocks, structs, type_checks
from ray_fed.language.blocks import Function
from ray_fed.language.structs import Plain, Struct
from ray_fed.plan import merge_tree, random_keys
from ray_fed.values import components, read_limits, stored
from ray_fed.values.client_references import ClientMember
from ray_fed.values.lru_cache import LruCache
from ray_fed.worker.client_store import ClientStore

if TYPE_CHECKING:
    from ray_fed.executors.eager_tf import EagerTFExecutor

flf = fl.framework
ExecutorValue = flf.ExecutorValue
_T = TypeVar("_T")
_CACHED_BLOCKS = 128
"""Computations that one stack keeps parsed: parsing takes as long as small rounds."""

_PACES = 64
"""Graphs whose pace one stack remembers: as many as its executor keeps."""

ChunkArg: TypeAlias = list[ExecutorValue] | Struct[Any]
"""One value a client of the chunk, or a struct of such lists."""

_MESSAGE_LINES = 3
_BOILERPLATE = (
    "Graph execution error",
    "Detected at node",
    "<stack traces",
    "[[{{node",
)
"""Starts of lines in TensorFlow's messages that tell a user nothing."""
_MARKERS = frozenset("~^ ")
"""Of a line under one of source, in a traceback."""

_NO_MEMORY = "ResourceExhaustedError"
"""TensorFlow's name for it; this module does not load TensorFlow."""

_OWN_ASSERTION = re.compile(r"assertion failed: \[(Expected .+, found .+)\]")
"""What a graph of ray_fed says in full."""

_LABEL = re.compile(r"a label value of (-?\d+) which is outside .* of \[0, (\d+)\)")
"""What TensorFlow says of a label that is no class."""

_TAGS = re.compile(r"\{\{function_node [^}]*\}\}\s*|\s*\[Op:[^\]]*\]")


async def embed_members(
    executor: fl.framework.Executor,
    members: Sequence[Plain],
    member: fl.Type,
    first: int = 0,
) -> list[ExecutorValue]:
    """Embed one value a client, in order.

    Args:
        executor: embeds them.
        members: of each client.
        member: type of each.
        first: index of the first of these clients.

    Raises:
        ComputationError: reading a client's value raised, with the client's index.
    """
    embedded: list[ExecutorValue] = []
    for client_index, value in enumerate(members, first):
        await _let_end()
        try:
            embedded.append(await executor.create_value(value, member))
        except errors.ComputationError as error:
            raise error.located(client_index=client_index) from error
    return embedded


async def map_embedded(
    executor: fl.framework.Executor,
    function: ExecutorValue | None,
    arg: ChunkArg | None,
    clients: range,
) -> list[ExecutorValue]:
    """Call a function on each client of a chunk, in client order.

    Args:
        executor: embeds `arg` and `function`.
        function: None returns the arguments, zipped to structs.
        arg: None for a function of no argument.
        clients: the chunk's place in the cohort.

    Raises:
        ComputationError: the function raised, with the client's index.
    """
    results: list[ExecutorValue] = []
    for position, client_index in enumerate(clients):
        await _let_end()
        try:
            member = None if arg is None else await _member(executor, arg, position)
            if function is not None:
                with random_keys.at_client(client_index):
                    member = await executor.create_call(function, member)
        except errors.RayFedError:
            raise
        except Exception as error:
            raise describe_failure(error, client_index) from error
        if member is None:
            raise errors.UnsupportedError("Expected a function or a value to map.")
        results.append(member)
    return results


async def _member(
    executor: fl.framework.Executor, arg: ChunkArg, position: int
) -> ExecutorValue:
    if isinstance(arg, list):
        return arg[position]
    elements = [
        (name, await _member(executor, element, position))
        for name, element in structs.iter_elements(arg)
    ]
    return await executor.create_struct(structs.Struct(elements))


async def accumulate_members(
    executor: fl.framework.Executor,
    zero: ExecutorValue,
    members: Sequence[ExecutorValue],
    accumulate: ExecutorValue,
    clients: range,
) -> ExecutorValue:
    """Fold the members into zero, in order: the accumulation of one leaf.

    Each call of `accumulate` draws from the key of its client.

    Args:
        executor: embeds the rest.
        zero: U.
        members: T of each client of the leaf.
        accumulate: <U, T> -> U.
        clients: the leaf's place in the cohort.

    Raises:
        ComputationError: `accumulate` raised, with the client's index.
    """
    accumulator = zero
    for client_index, member in zip(clients, members, strict=True):
        await _let_end()
        pair = await executor.create_struct([accumulator, member])
        try:
            with random_keys.at_client(client_index), random_keys.at_step("accumulate"):
                accumulator = await executor.create_call(accumulate, pair)
        except errors.RayFedError:
            raise
        except Exception as error:
            raise describe_failure(error, client_index) from error
    return accumulator


async def _let_end() -> None:
    """End here where nobody waits, or the call was cancelled.

    An executor may answer without waiting, and so without letting its loop cancel.

    Raises:
        ClusterError: nobody waits for this work; see `read_limits.limited`.
    """
    read_limits.check()
    await asyncio.sleep(0)


def describe_failure(
    error: Exception, client_index: int | None
) -> errors.ComputationError:
    """Return what a computation raised as an error that says where, in few lines."""
    lines = [line.strip() for line in error_texts.message_of(error).splitlines()]
    frames = [i for i, line in enumerate(lines) if line.startswith('File "')]
    if frames:
        lines = lines[frames[-1] + 2 :]  # a frame has a second line, which may be empty
    meaningful = [line for line in lines if set(line) - _MARKERS]
    meaningful = [line for line in meaningful if not line.startswith(_BOILERPLATE)]
    summary = _TAGS.sub("", " ".join(meaningful[:_MESSAGE_LINES])) or "no message"
    origin = error_texts.origin_of(error) or "a computation"
    said, label = _OWN_ASSERTION.fullmatch(summary), _LABEL.search(summary)
    kind = errors.ComputationError
    if isinstance(error, MemoryError) or type(error).__name__ == _NO_MEMORY:
        kind = errors.WorkerMemoryError
    what = f"{origin[0].upper()}{origin[1:]} raised {type(error).__name__}: {summary}"
    if label:
        what = (
            f"Expected labels from 0 to {int(label[2]) - 1}, one for each output of the"
            f" model, found {label[1]}: number the classes from 0, or have a model with"
            " more outputs"
        )
    failure = kind(
        said[1] if said else what,
        errors.Location(client_index=client_index),
        cause_text=error_texts.traceback_of(error),
    )
    place = None if label else error_texts.place_of(error)
    if place and not hasattr(failure, "__notes__"):
        failure.add_note(place)
    return failure


async def call_on(
    stack: ReferenceResolvingExecutor,
    function: flf.ComputationBuildingBlock,
    args: Sequence[Any],
) -> ResolvedValue:
    """Call a computation with its argument, the one of `args`, if it takes one."""
    embedded = await stack.create_value(function)
    parameter = cast("fl.FunctionType", embedded.type_signature).parameter
    argument = None
    if parameter is not None:
        (arg,) = args
        argument = await stack.create_value(arg, parameter)
    return await stack.create_call(embedded, argument)


async def fetch(value: ExecutorValue) -> Plain:
    """Return an embedded value in plain form."""
    type_spec = value.type_signature
    return plain_values.to_plain(await value.compute(), type_spec, "a result")


async def merge_subtrees(
    subround: plans.Subround,
    partials: Sequence[ExecutorValue],
    executor: flf.Executor,
) -> list[ExecutorValue]:
    """Return the partial of each of `subround.subtrees`.

    Args:
        subround: with a merge.
        partials: of its leaves, embedded in the executor.
        executor: runs the merges.
    """
    merge = await executor.create_value(Function(cast("bytes", subround.merge)))
    merged: list[ExecutorValue] = []
    for start, stop in subround.subtrees:
        inside = range(start - subround.first_leaf, stop - subround.first_leaf)
        subtrees = [(index, index + 1) for index in range(start, stop)]
        subtree = [partials[index] for index in inside]
        merged.append(await merge_values(executor, merge, subtree, subtrees))
    return merged


async def merge_values(
    executor: flf.Executor,
    merge: ExecutorValue,
    partials: Sequence[ExecutorValue],
    subtrees: Sequence[merge_tree.Subtree],
) -> ExecutorValue:
    """Merge adjacent subtrees, all embedded in one executor, along the tree.

    Each merge draws from the key of its subtree, on any worker.
    """
    partials = list(partials)
    for left, right, subtree in merge_tree.merge_order(subtrees):
        pair = await executor.create_struct([partials[left], partials[right]])
        with random_keys.at_step("merge", *subtree):
            partials[left] = await executor.create_call(merge, pair)
    return partials[0]


async def merge_plain(
    executor: flf.Executor, partials: Sequence[Plain], merge: Function
) -> ExecutorValue:
    """Merge partials of all leaves, in order, along the tree; embed the result.

    Args:
        executor: runs `merge`.
        partials: U of each leaf, plain, at least one.
        merge: <U, U> -> U.
    """
    function = await executor.create_value(merge)
    type_spec = function.type_signature
    if not isinstance(type_spec, fl.FunctionType) or not isinstance(
        type_spec.parameter, fl.StructType
    ):
        raise errors.ValueMismatchError(
            f"Expected a merge of two partials, found a value of type `{type_spec}`."
        )
    member = type_spec.parameter[0]
    embedded = [await executor.create_value(partial, member) for partial in partials]
    subtrees = [(index, index + 1) for index in range(len(embedded))]
    return await merge_values(executor, function, embedded, subtrees)


class LocalPlaced:
    """Values of clients, a list for each group, embedded when first needed."""

    def __init__(
        self,
        member: fl.Type,
        embed: Callable[[], Coroutine[Any, Any, list[list[ExecutorValue]]]],
    ) -> None:
        self.member = member
        self._embed = embed
        self._groups: asyncio.Future[list[list[ExecutorValue]]] | None = None

    async def groups(self) -> list[list[ExecutorValue]]:
        """Return the embedded values, one list a group, in client order."""
        if self._groups is None:
            self._groups = asyncio.ensure_future(self._embed())
        return await self._groups

    async def compute(self) -> list[Plain]:
        """Return the clients' values in client order, plain."""
        return [
            plain_values.to_plain(await value.compute(), self.member)
            for group in await self.groups()
            for value in group
        ]


class LocalStrategy(FederatingStrategy):
    """Runs each group of contiguous clients on an executor of its own.

    Args:
        unplaced: where partials are merged; not owned.
        targets: one a group; owned.
        groups: the clients of each target; together the whole cohort, in order.
        clients_per_leaf: see `merge_tree.cut_leaves`.
    """

    def __init__(
        self,
        unplaced: fl.framework.Executor,
        targets: Sequence[fl.framework.Executor],
        groups: Sequence[range],
        clients_per_leaf: int | None = None,
    ) -> None:
        self._unplaced = unplaced
        self._targets = targets
        self._groups = groups
        self.num_clients = sum(len(group) for group in groups)
        self._leaves = merge_tree.cut_leaves(self.num_clients, clients_per_leaf)

    @override
    async def place(self, value: Any, type_spec: fl.FederatedType) -> Any:
        if type_spec.placement == fl.SERVER:
            return value
        member = type_spec.member
        if type_spec.all_equal:
            if not isinstance(value, ExecutorValue):
                value = plain_values.to_plain(
                    value, member, "a value equal at all clients"
                )
            return LocalPlaced(member, lambda: self._embed_all_equal(value, member))
        stored.check_cardinality(value, type_spec, self.num_clients)
        members: Any = value  # of datasets: read as far as the work goes
        if not (isinstance(value, list) and all(map(plain_values.is_dataset, value))):
            members = plain_values.to_plain(
                value, type_spec, "a value placed at clients"
            )

        async def embed() -> list[list[ExecutorValue]]:
            return await gather_by_index(
                embed_members(
                    target, members[group.start : group.stop], member, group.start
                )
                for target, group in zip(self._targets, self._groups, strict=True)
            )

        return LocalPlaced(member, embed)

    async def _embed_all_equal(
        self, value: Any, member: fl.Type
    ) -> list[list[ExecutorValue]]:
        if isinstance(value, ExecutorValue):
            value = plain_values.to_plain(await value.compute(), member)
        embedded = await gather_by_index(
            target.create_value(value, member) for target in self._targets
        )
        return [
            [value] * len(group)
            for value, group in zip(embedded, self._groups, strict=True)
        ]

    @override
    async def map(
        self, function: Function | None, arg: PlacedArg | None, member: fl.Type
    ) -> Placed:
        indices = range(len(self._targets))
        chunks = [None if arg is None else await _chunk(arg, g) for g in indices]

        async def map_group(index: int) -> list[ExecutorValue]:
            target, group = self._targets[index], self._groups[index]
            embedded = None if function is None else await target.create_value(function)
            return await map_embedded(target, embedded, chunks[index], group)

        results = await gather_by_index(map(map_group, indices))

        async def embedded() -> list[list[ExecutorValue]]:
            return results

        return LocalPlaced(member, embedded)

    @override
    async def reduce(
        self,
        arg: Placed,
        zero: ExecutorValue,
        accumulate: Function,
        merge: Function,
    ) -> ExecutorValue:
        placed = type_checks.narrow(arg, LocalPlaced, "LocalStrategy")
        groups = await placed.groups()
        zero_type = zero.type_signature
        # Plain, as each leaf begins at zero on a target of its own.
        zero_plain = plain_values.to_plain(await zero.compute(), zero_type, "zero")

        async def reduce_group(index: int) -> list[Plain]:
            target, group = self._targets[index], self._groups[index]
            leaves = [leaf for leaf in self._leaves if leaf.start in group]
            function = await target.create_value(accumulate)
            partials: list[Plain] = []
            for leaf in leaves:
                members = await self._leaf_members(leaf, index, groups, placed.member)
                start = await target.create_value(zero_plain, zero_type)
                partial = await accumulate_members(
                    target, start, members, function, leaf
                )
                partials.append(
                    plain_values.to_plain(
                        await partial.compute(), partial.type_signature
                    )
                )
            return partials

        reduced = await gather_by_index(
            reduce_group(index) for index in range(len(self._groups))
        )
        # Without clients there is no leaf, and the result is zero.
        partials = [partial for group in reduced for partial in group] or [zero_plain]
        return await merge_plain(self._unplaced, partials, merge)

    async def _leaf_members(
        self,
        leaf: range,
        index: int,
        groups: list[list[ExecutorValue]],
        member: fl.Type,
    ) -> list[ExecutorValue]:
        """Return the leaf's values on a target, fetching those of other groups."""
        members: list[ExecutorValue] = []
        for group, embedded in zip(self._groups, groups, strict=True):
            for client_index in range(
                max(leaf.start, group.start), min(leaf.stop, group.stop)
            ):
                value = embedded[client_index - group.start]
                if group is not self._groups[index]:
                    fetched = plain_values.to_plain(await value.compute(), member)
                    value = await self._targets[index].create_value(fetched, member)
                members.append(value)
        return members

    @override
    def close(self) -> None:
        for target in self._targets:
            target.close()


async def _chunk(arg: PlacedArg, group: int) -> Any:
    if isinstance(arg, Struct):
        return structs.Struct(
            [
                (name, await _chunk(element, group))
                for name, element in structs.iter_elements(arg)
            ]
        )
    return (await type_checks.narrow(arg, LocalPlaced, "LocalStrategy").groups())[group]


class Pace:
    """Decides how many clients one call of a graph covers, from what others took.

    The bits do not depend on it.

    The first call, which also sets the graph up, is of one client.
    """

    def __init__(self) -> None:
        self._seconds_a_client: float | None = None

    def count(self, remaining: int, call_s: float) -> int:
        """Return how many of the remaining clients to run in the next call."""
        if self._seconds_a_client is None:
            return min(1, remaining)
        wanted = call_s / max(self._seconds_a_client, 1e-9)
        return max(1, min(remaining, int(min(wanted, remaining))))

    def note(self, count: int, seconds: float) -> None:
        """Take note of what a call took."""
        self._seconds_a_client = seconds / count


class DeviceStack(ReferenceResolvingExecutor):
    """Runs all unplaced work on a device, and holds what its clients have.

    Args:
        eager: runs every graph; owned.
        client_bytes: of clients' data that is kept between rounds.

    Attributes:
        eager: runs every graph.
        clients: their data.
    """

    def __init__(self, eager: "EagerTFExecutor", client_bytes: int) -> None:
        super().__init__(SequenceExecutor(eager))
        self.eager = eager
        self.clients = ClientStore(client_bytes)
        self._paces: LruCache[bytes, Pace] = LruCache(_PACES)
        self._blocks: LruCache[bytes, fl.framework.ComputationBuildingBlock]
        self._blocks = LruCache(_CACHED_BLOCKS)

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> ResolvedValue:
        if isinstance(value, ClientMember):
            value = self.clients.read(value)
        if isinstance(value, stored.StoredComponents):
            value = components.join(value.components, fl.to_type(type_spec))
        return await super().create_value(value, type_spec)

    def parse(self, serialised: bytes) -> fl.framework.ComputationBuildingBlock:
        """Return the block of a serialised computation, parsed when first asked for."""
        return self._blocks.get(serialised, lambda: blocks.parse_block(serialised))

    def on_device(self) -> contextlib.AbstractContextManager[object]:
        """Return what puts operations of the thread that enters it on the device."""
        return self.eager.on_device()

    def pace_of(self, content: bytes) -> Pace:
        """Return how fast the kernel of a content has been here."""
        return self._paces.get(content, Pace)

    @override
    def close(self) -> None:
        self.clients.close()
        self._paces.clear()
        self._blocks.clear()
        super().close()


class ThreadedStack(ThreadDelegatingExecutor):
    """A device's stack on a thread of its own, and what is to run there beside it.

    Args:
        stack: owned.
        name: of the thread.
    """

    def __init__(self, stack: DeviceStack, name: str) -> None:
        super().__init__(stack, name, stack.on_device())
        self.stack = stack

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the thread of the stack, which it may call freely."""
        return await self._thread.run(work)


CLIENT_BYTES = 2**30
"""Of clients' data that a stack keeps between rounds, where nobody says another."""


def device_stack(device: Any = None, client_bytes: int = CLIENT_BYTES) -> DeviceStack:
    """Return a stack that runs all unplaced work.

    Args:
        device: a `tf.config.LogicalDevice`, or None.
        client_bytes: of clients' data that is kept between rounds.
    """
    from ray_fed.executors.eager_tf import EagerTFExecutor

    return DeviceStack(EagerTFExecutor(device), client_bytes)


def threaded_stacks(
    num_threads: int,
    client_bytes: int = CLIENT_BYTES,
    devices: Sequence[Any] = (None,),
) -> list[ThreadedStack]:
    """Return stacks, each on a thread of its own, which take turns with devices.

    See `device_stack`.
    """
    stacks: list[ThreadedStack] = []
    with contextlib.ExitStack() as failed:
        for index, device in zip(range(num_threads), itertools.cycle(devices)):
            stack = device_stack(device, client_bytes)
            stacks.append(ThreadedStack(stack, f"ray_fed executor {index}"))
            failed.callback(stacks[-1].close)
        failed.pop_all()  # who asked for them closes them
    return stacks


def federated_stack(
    strategy_factory: Callable[[FederatingExecutor], FederatingStrategy],
    unplaced: flf.Executor,
) -> ReferenceResolvingExecutor:
    """Return a stack that runs any computation over a strategy.

    Args:
        strategy_factory: see `FederatingExecutor`.
        unplaced: runs what is not placed; owned.
    """
    return ReferenceResolvingExecutor(FederatingExecutor(strategy_factory, unplaced))


def local_stack(
    num_clients: int,
    targets: Sequence[flf.Executor],
    unplaced: flf.Executor,
    clients_per_leaf: int | None = None,
) -> ReferenceResolvingExecutor:
    """Return a stack over executors of this process.

    Args:
        num_clients: size of the cohort.
        targets: run the clients; adjacent leaves of clients each.
        unplaced: runs everything else; may be one of `targets`.
        clients_per_leaf: see `merge_tree.cut_leaves`.
    """
    cut = merge_tree.cut_leaves(num_clients, clients_per_leaf)
    runs = merge_tree.cut_runs(len(cut), len(targets))
    groups = [range(cut[run.start].start, cut[run.stop - 1].stop) for run in runs]
    return federated_stack(
        lambda executor: LocalStrategy(
            executor.unplaced, targets[: len(groups)], groups, clients_per_leaf
        ),
        unplaced,
    )


class _DebuggingFactory(flf.ExecutorFactory):
    """Builds one debugging stack for each set of cardinalities.

    All of them share its threads: those of the largest cohort, and one for the server.
    """

    def __init__(self, num_clients: int | None, clients_per_thread: int) -> None:
        self._num_clients = num_clients
        self._clients_per_thread = clients_per_thread
        self._executors: dict[tuple[tuple[str, int], ...], flf.Executor] = {}
        self._leaves: list[flf.Executor] = []  # the server's first

    @override
    def create_executor(self, cardinalities: Any) -> flf.Executor:
        """Return the stack for the cardinalities, a new one if there is none."""
        key = _key(cardinalities)
        if key not in self._executors:
            self._executors[key] = self._build(dict(key).get(fl.CLIENTS.uri))
        return self._executors[key]

    def _build(self, inferred: int | None) -> flf.Executor:
        num_clients = self._num_clients if inferred is None else inferred
        if self._num_clients is not None and num_clients != self._num_clients:
            raise errors.CardinalityError(
                f"Expected {self._num_clients} clients, as the executor factory was"
                f" configured, found an argument with {num_clients}."
            )
        groups = [
            range(start, min(start + self._clients_per_thread, num_clients or 0))
            for start in range(0, num_clients or 0, self._clients_per_thread)
        ]
        names = ["server", *map(str, range(len(groups)))]
        for name in names[len(self._leaves) :]:
            self._leaves.append(_debugging_leaf(name))
        unplaced, *targets = self._leaves[: len(names)]
        federating = FederatingExecutor(
            lambda executor: LocalStrategy(executor.unplaced, targets, groups), unplaced
        )
        return ReferenceResolvingExecutor(federating)

    @override
    def clean_up_executor(self, cardinalities: Any) -> None:
        """Drop the stack for the cardinalities; with the last one, the threads end."""
        self._executors.pop(_key(cardinalities), None)
        if not self._executors:
            while self._leaves:
                self._leaves.pop().close()


def _key(cardinalities: Any) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((placement.uri, n) for placement, n in cardinalities.items()))


def _debugging_leaf(name: str) -> flf.Executor:
    from ray_fed.executors.eager_tf import EagerTFExecutor

    leaf = EagerTFExecutor.of_written_graphs()
    return ThreadDelegatingExecutor(leaf, f"ray_fed debugging {name}")


def thread_debugging_executor_factory(
    num_clients: int | None = None, clients_per_thread: int = 1
) -> flf.ExecutorFactory:
    """Return a factory of simple stacks that run local computations for debugging.

    A ReferenceResolvingExecutor over a FederatingExecutor over one
    ThreadDelegatingExecutor for each group of clients, each over an EagerTFExecutor:
    no caches of results, and exactly the computation that was passed, every graph as it
    was written. References are resolved at the top of the stack only, so what clients
    run must be TensorFlow.

    Args:
        num_clients: size of the cohort, >= 1; None: inferred from each argument.
        clients_per_thread: clients that one thread runs in sequence, >= 1.

    Raises:
        ValueError: `num_clients` or `clients_per_thread` is below one.
        TypeError: one of them is no whole number.
    """
    if num_clients is not None:
        num_clients = type_checks.check_count(num_clients, "num_clients")
    clients_per_thread = type_checks.check_count(
        clients_per_thread, "clients_per_thread"
    )
    return _DebuggingFactory(num_clients, clients_per_thread)

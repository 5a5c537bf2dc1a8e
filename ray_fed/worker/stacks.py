"""The executor stacks that ray_fed builds, and the strategy that runs in one process.

A stack is a series of executors. Each one passes work on to the executor below:

    device_stack                    local_stack

    DeviceStack (resolves names)    ReferenceResolvingExecutor
    SequenceExecutor                FederatingExecutor --- LocalStrategy
    EagerTFExecutor                 device_stack           device_stack, one per thread

`LocalStrategy` and worker actors run the work of clients by the same functions. So
numbers, their order and errors do not depend on where a client runs.

TensorFlow is imported inside functions, because processes of `cluster.subround` import
this module and must not load TensorFlow.
"""

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import federated_language as fl
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
import ray_fed.plan.plans as plans
import ray_fed.values.plain_values as plain_values
from ray_fed.executors.closure import ResolvedValue
from ray_fed.executors.fan_out import Once, gather_by_index
from ray_fed.executors.federating import FederatingExecutor
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
"""Maximum number of parsed computations in a stack's cache. To parse a computation
takes as long as a small round."""

_BLOCK_BYTES, _LEAST_BLOCKS = 2**22, 4
"""Maximum serialized bytes of this cache, and number of entries that always stay."""

_PACES = 64
"""Number of graphs whose pace a stack remembers. The graph cache has the same size."""

ChunkArg: TypeAlias = list[ExecutorValue] | Struct[Any]
"""The arguments of a chunk's clients: a list with one value for each client, or a
struct with lists as elements."""

_MESSAGE_LINES = 3
_BOILERPLATE = (
    "Graph execution error",
    "Detected at node",
    "<stack traces",
    "[[{{node",
)
"""Beginnings of lines in TensorFlow's messages that tell users nothing."""
_MARKERS = frozenset("~^ ")
"""Characters of the line that marks a place in the source line above it."""

_NO_MEMORY = "ResourceExhaustedError"
"""Name of TensorFlow's error for lack of memory. TensorFlow is not imported here."""

_OWN_ASSERTION = re.compile(r"assertion failed: \[(Expected .+, found .+)\]")
"""The complete message of an assertion that ray_fed puts in a graph."""

_LABEL = re.compile(r"a label value of (-?\d+) which is outside .* of \[0, (\d+)\)")
"""TensorFlow's message about a label that is out of range."""

_TAGS = re.compile(r"\{\{function_node [^}]*\}\}\s*|\s*\[Op:[^\]]*\]")


async def embed_members(
    executor: fl.framework.Executor,
    members: Sequence[Plain],
    member: fl.Type,
    first: int = 0,
) -> list[ExecutorValue]:
    """Embed the plain value of each client in an executor, in order.

    `member` is the type of a value, and `first` is the index of the first client.
    Raises ComputationError with the index of a client whose value could not be read.
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
    """Call a function for each client of a chunk, and return the results in order.

    All values are embedded in `executor`. With None as the function, the result is the
    argument of each client. `clients` are client indices, which key random numbers.
    Raises ComputationError with the index of a client for which the function failed.
    """
    results: list[ExecutorValue] = []
    for position, client_index in enumerate(clients):
        await _let_end()
        with _describing_failures(client_index):
            member = None if arg is None else await _member(executor, arg, position)
            if function is not None:
                with random_keys.at_client(client_index):
                    member = await executor.create_call(function, member)
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
    """Accumulate the values of a leaf's clients, in client order.

    All values are embedded in `executor`. `zero` has a type U, each of `members` has a
    type T, and `accumulate` is <U, T> -> U. `clients` are client indices, which key
    random numbers. Raises ComputationError with the index of a client for which
    `accumulate` failed.
    """
    accumulator = zero
    for client_index, member in zip(clients, members, strict=True):
        await _let_end()
        pair = await executor.create_struct([accumulator, member])
        with (
            _describing_failures(client_index),
            random_keys.at_client(client_index),
            random_keys.at_step("accumulate"),
        ):
            accumulator = await executor.create_call(accumulate, pair)
    return accumulator


async def _let_end() -> None:
    # Executors may return without a suspension, so a cancelled task would not end.
    read_limits.check()
    await asyncio.sleep(0)


@contextlib.contextmanager
def _describing_failures(client_index: int) -> Generator[None]:
    try:
        yield
    except errors.RayFedError:
        raise
    except Exception as error:
        raise describe_failure(error, client_index) from error


def describe_failure(
    error: Exception, client_index: int | None
) -> errors.ComputationError:
    """Convert an error of a computation's code to a ComputationError.

    The new message is short and names the user's line. `client_index` is the failed
    client, or None. Lack of memory becomes a WorkerMemoryError.
    """
    lines = [line.strip() for line in error_texts.message_of(error).splitlines()]
    frames = [i for i, line in enumerate(lines) if line.startswith('File "')]
    if frames:
        lines = lines[frames[-1] + 2 :]  # each frame has two lines
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
    """Call a computation on a stack, and return the result, which stays embedded.

    `args` has one element, the plain argument, if the computation has a parameter.
    """
    embedded = await stack.create_value(function)
    parameter = cast("fl.FunctionType", embedded.type_signature).parameter
    argument = None
    if parameter is not None:
        (arg,) = args
        argument = await stack.create_value(arg, parameter)
    return await stack.create_call(embedded, argument)


async def fetch(value: ExecutorValue) -> Plain:
    """Return an embedded value as a plain value (NumPy arrays in tuples and lists)."""
    type_spec = value.type_signature
    return plain_values.to_plain(await value.compute(), type_spec, "a result")


async def merge_subtrees(
    subround: plans.Subround,
    partials: Sequence[ExecutorValue],
    executor: flf.Executor,
) -> list[ExecutorValue]:
    """Merge the partial results of leaves into one for each of `subround.subtrees`.

    `partials` has one value for each leaf of the subround. All values are embedded in
    `executor`, and in order.
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
    """Merge partial results along the merge tree, and return one value.

    `subtrees` has the part of the merge tree (neighboring leaves) of each partial. It
    decides the order of merges, and keys their random numbers. All values are embedded
    in `executor`.
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
    """Merge the plain partial results of all leaves along the merge tree.

    `merge` is <U, U> -> U, and `partials` has at least one value. The result is
    embedded in `executor`.
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
    """The values of all clients, in a list for each group of clients.

    `embed` makes the lists when they are first needed. `member` is a value's type.
    """

    def __init__(
        self,
        member: fl.Type,
        embed: Callable[[], Coroutine[Any, Any, list[list[ExecutorValue]]]],
    ) -> None:
        self.member = member
        self._groups = Once(embed)

    async def groups(self) -> list[list[ExecutorValue]]:
        """Return the embedded values in a list for each group, in client order."""
        return await self._groups.get()

    async def compute(self) -> list[Plain]:
        """Return the plain values of all clients, in client order."""
        return [
            plain_values.to_plain(await value.compute(), self.member)
            for group in await self.groups()
            for value in group
        ]


class LocalStrategy(FederatingStrategy):
    """Runs each group of neighboring clients on one of several executors, `targets`.

    `unplaced` merges partial results, and is not owned. `close` closes `targets`.
    `groups` has the client indices of each group. Together they are all clients.
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
                value = plain_values.to_plain_around_datasets(
                    value, member, "a value equal at all clients"
                )
            return LocalPlaced(member, lambda: self._embed_all_equal(value, member))
        stored.check_cardinality(value, type_spec, self.num_clients)
        members: Any = plain_values.to_plain_around_datasets(
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
            value = await _carry(value, member)
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
        # Every leaf starts from zero on its own target, so zero must be plain.
        zero_plain = plain_values.to_plain(await zero.compute(), zero_type, "zero")

        async def reduce_group(index: int) -> list[Plain]:
            target, group = self._targets[index], self._groups[index]
            # A leaf may reach into the next group, and runs where it starts.
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
        # Values of the leaf that other targets have are moved to the target of `index`.
        members: list[ExecutorValue] = []
        for group, embedded in zip(self._groups, groups, strict=True):
            for client_index in range(
                max(leaf.start, group.start), min(leaf.stop, group.stop)
            ):
                value = embedded[client_index - group.start]
                if group is not self._groups[index]:
                    fetched = await _carry(value, member)
                    value = await self._targets[index].create_value(fetched, member)
                members.append(value)
        return members

    @override
    def close(self) -> None:
        for target in self._targets:
            target.close()


async def _carry(value: ExecutorValue, type_spec: fl.Type) -> Any:
    # Every executor of this process can embed the result. Sequences are not read here:
    # each client reads the elements when it needs them.
    if not flf.type_contains(type_spec, lambda t: isinstance(t, fl.SequenceType)):
        return plain_values.to_plain(await value.compute(), type_spec)
    return _normal_form(value)


def _normal_form(value: Any) -> Any:
    match value:
        case ExecutorValue():
            return _normal_form(value.reference)
        case Struct():
            return structs.Struct(
                (name, _normal_form(member))
                for name, member in structs.iter_elements(value)
            )
        case _:
            return value


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
    """Chooses the number of clients of a graph's call, from the time of the last call.

    The first call has one client, because it also initializes the graph. The bits of
    results do not depend on the number.
    """

    def __init__(self) -> None:
        self._seconds_a_client: float | None = None

    def count(self, remaining: int, call_s: float) -> int:
        """Return how many of `remaining` clients a call of `call_s` seconds can run."""
        if self._seconds_a_client is None:
            return min(1, remaining)
        wanted = call_s / max(self._seconds_a_client, 1e-9)
        return max(1, min(remaining, int(min(wanted, remaining))))

    def note(self, count: int, seconds: float) -> None:
        """Record that a call for `count` clients took `seconds`."""
        self._seconds_a_client = seconds / count


class DeviceStack(ReferenceResolvingExecutor):
    """The executor stack of one device, with a cache of clients' data.

    `eager` runs every graph, and belongs to the stack. The cache has up to
    `client_bytes`.
    """

    def __init__(self, eager: "EagerTFExecutor", client_bytes: int) -> None:
        super().__init__(SequenceExecutor(eager))
        self.eager = eager
        self.clients = ClientStore(client_bytes)
        self._paces: LruCache[bytes, Pace] = LruCache(_PACES)
        self._blocks: LruCache[bytes, fl.framework.ComputationBuildingBlock]
        self._blocks = LruCache(
            _CACHED_BLOCKS, max_weight=_BLOCK_BYTES, least=_LEAST_BLOCKS
        )

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> ResolvedValue:
        if isinstance(value, ClientMember):
            value = self.clients.read(value)
        if isinstance(value, stored.StoredComponents):
            value = components.join(value.components, fl.to_type(type_spec))
        return await super().create_value(value, type_spec)

    def parse(self, serialized: bytes) -> fl.framework.ComputationBuildingBlock:
        """Return the building block of a serialized computation, from a cache."""
        return self._blocks.get(
            serialized, lambda: blocks.parse_block(serialized), len(serialized)
        )

    def on_device(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager in which TensorFlow ops run on this device."""
        return self.eager.on_device()

    def pace_of(self, content: bytes) -> Pace:
        """Return the `Pace` of the kernel that the bytes `content` identify."""
        return self._paces.get(content, Pace)

    @override
    def close(self) -> None:
        self.clients.close()
        self._paces.clear()
        self._blocks.clear()
        super().close()


class ThreadedStack(ThreadDelegatingExecutor):
    """A device's stack that runs on its own thread. `close` ends both."""

    def __init__(self, stack: DeviceStack, name: str) -> None:
        super().__init__(stack, name, stack.on_device())
        self.stack = stack

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the thread of `stack`, which it can call directly."""
        return await self._thread.run(work)


CLIENT_BYTES = 2**30
"""Default maximum of bytes of clients' data that a stack caches between rounds."""


def device_stack(device: Any = None, client_bytes: int = CLIENT_BYTES) -> DeviceStack:
    """Return the stack of a `tf.config.LogicalDevice`, or of the default with None."""
    from ray_fed.executors.eager_tf import EagerTFExecutor

    return DeviceStack(EagerTFExecutor(device), client_bytes)


def threaded_stacks(
    num_threads: int,
    client_bytes: int = CLIENT_BYTES,
    devices: Sequence[Any] = (None,),
) -> list[ThreadedStack]:
    """Return `num_threads` stacks, each on a thread. Stacks use the devices in turn."""
    stacks: list[ThreadedStack] = []
    with contextlib.ExitStack() as failed:
        for index, device in zip(range(num_threads), itertools.cycle(devices)):
            stack = device_stack(device, client_bytes)
            stacks.append(ThreadedStack(stack, f"ray_fed executor {index}"))
            failed.callback(stacks[-1].close)
        failed.pop_all()  # the caller closes them
    return stacks


def federated_stack(
    strategy_factory: Callable[[FederatingExecutor], FederatingStrategy],
    unplaced: flf.Executor,
) -> ReferenceResolvingExecutor:
    """Return a stack that runs clients by a strategy, and owns `unplaced`."""
    return ReferenceResolvingExecutor(FederatingExecutor(strategy_factory, unplaced))


def local_stack(
    num_clients: int,
    targets: Sequence[flf.Executor],
    unplaced: flf.Executor,
    clients_per_leaf: int | None = None,
) -> ReferenceResolvingExecutor:
    """Return a stack that runs federated computations of `num_clients` in this process.

    Each of `targets` runs neighboring leaves. `unplaced` runs all other work, and may
    be one of `targets`. For `clients_per_leaf` see `merge_tree.cut_leaves`.
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

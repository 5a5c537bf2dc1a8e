"""The four verbs over a worker: values stay on it, only names come back.

Each value knows how it was made, so that it can be made again on another worker: from
a plain value that this process holds, or by a call on other values of the connection.
A function, or a value that lives in the object store, is embedded once however often
it is asked for: leaves of one subround share them.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeAlias

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
from ray_fed.cluster.store import object_store
from ray_fed.cluster.task.connection import Worker, WorkerConnection, has_failed
from ray_fed.cluster.task.work import Work
from ray_fed.language import blocks, structs, type_checks
from ray_fed.language.blocks import Function
from ray_fed.plan import diagnostics, random_keys
from ray_fed.plan.outcomes import Evaluated
from ray_fed.plan.plans import Arguments, KeySelection
from ray_fed.values.lru_cache import LruCache
from ray_fed.values.stored import Stored, StoredComponents

flf = fl.framework
_NAME = "RemoteExecutor"

_SHARED_VALUES = 256
"""Functions and stored values that one executor keeps embedded."""

Make: TypeAlias = Callable[[Worker, int], Coroutine[Any, Any, Any]]
"""Makes a value on a worker, under a key; needs what it is made of there first."""


class RemoteValue(flf.ExecutorValue):
    """A value on the worker of a connection, made when it is first needed there.

    Args:
        connection: whose worker it is on.
        key: of the value there.
        type_signature: of the value.
        make: how to make it; the same each time.
    """

    def __init__(
        self,
        connection: WorkerConnection,
        key: int,
        type_signature: fl.Type,
        make: Make,
    ) -> None:
        self.connection = connection
        self.key = key
        self._type_signature = type_signature
        self._make = make
        self._made: tuple[Worker, asyncio.Task[Any]] | None = None

    def __del__(self) -> None:
        self.connection.drop(self.key)

    @property
    @override
    def reference(self) -> int:
        return self.key

    @property
    @override
    def type_signature(self) -> fl.Type:
        return self._type_signature

    async def on(self, worker: Worker) -> int:
        """Return the key, once the value is on a worker of the connection."""
        if (
            self._made is None
            or self._made[0] is not worker
            or has_failed(self._made[1])
        ):
            self._made = (worker, asyncio.ensure_future(self._make_on(worker)))
        await asyncio.shield(self._made[1])
        return self.key

    async def _make_on(self, worker: Worker) -> None:
        await self._make(worker, self.key)

    async def ready(self) -> Self:
        """Return the value, once it is on the worker of now."""
        await self.connection.run(self.on)
        return self

    async def fetch(self, method: str) -> Any:
        """Return what a method of the worker says of the value."""

        async def call(worker: Worker) -> Any:
            return await worker.call(method, await self.on(worker))

        return await self.connection.run(call)

    @override
    async def compute(self) -> Any:
        """Return the value as any executor does: structures with their names."""
        return plain_values.to_structs(
            await self.fetch("compute"), self._type_signature
        )


class RemoteGraph(RemoteValue):
    """The graph of fused work on the worker."""


class RemoteFusedValue(RemoteValue):
    """What the graph of fused work returned on the worker."""

    @override
    async def compute(self) -> Any:
        """Return what the graph says."""
        return await self.fetch("compute_fused")


def _encoded(value: Any) -> Any:
    return value.reference if isinstance(value, Stored) else object_store.encode(value)


class RemoteExecutor(flf.Executor):
    """Delegates every verb to the leaf stack of one worker.

    Args:
        connection: to the worker; not owned.
    """

    def __init__(self, connection: WorkerConnection) -> None:
        self._connection = connection
        self._shared: LruCache[Any, RemoteValue] = LruCache(_SHARED_VALUES)

    @override
    def close(self) -> None:
        self._shared.clear()

    def holds(self, value: flf.ExecutorValue) -> bool:
        """Return whether a value lives where this executor's do."""
        return isinstance(value, RemoteValue) and value.connection is self._connection

    def derive(
        self, type_spec: fl.Type, make: Make, kind: type[RemoteValue] = RemoteValue
    ) -> RemoteValue:
        """Return a value that is made when it is first needed."""
        key = self._connection.new_key()
        return kind(self._connection, key, type_spec, make)

    def embed(self, value: Any, type_spec: fl.Type) -> RemoteValue:
        """Return a plain value, embedded when needed."""
        serialised = blocks.serialise_type(type_spec)

        async def make(worker: Worker, key: int) -> None:
            await worker.call("embed", key, value, serialised)

        return self.derive(type_spec, make)

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> RemoteValue:
        type_spec = None if type_spec is None else fl.to_type(type_spec)
        if isinstance(value, RemoteValue):
            return self._own(value)
        block = blocks.to_block(value)
        if block is not None:
            value = Function(blocks.serialise(block))
        if isinstance(value, Function | KeySelection):
            return await self._embed_function(value)
        if type_spec is None:
            raise errors.UnsupportedError(
                f"Expected a type for {structs.show(value)}, found none."
            )
        if isinstance(value, Stored | StoredComponents):
            return await self._share(
                (value, type_spec), lambda: self._embed_stored(value, type_spec)
            )
        if not isinstance(value, Arguments):
            value = plain_values.to_plain(value, type_spec)
        return await self.embed(value, type_spec).ready()

    def _embed_stored(
        self, value: Stored | StoredComponents, type_spec: fl.Type
    ) -> RemoteValue:
        # References at the top level of a call: Ray brings them to the worker itself.
        serialised = blocks.serialise_type(type_spec)
        method, parts = "embed_stored", (value,)
        if isinstance(value, StoredComponents):
            method, parts = "embed_parts", value.components
        held = list(map(_encoded, parts))

        async def make(worker: Worker, key: int) -> None:
            await worker.call(method, key, serialised, *held)

        return self.derive(type_spec, make)

    async def _embed_function(self, function: Function | KeySelection) -> RemoteValue:
        if isinstance(function, KeySelection):
            name = function.content
        elif function.captured:
            return await self._derive_function(function).ready()
        else:
            name = function.computation
        return await self._share(name, lambda: self._derive_function(function))

    def _derive_function(self, function: Function | KeySelection) -> RemoteValue:
        async def make(worker: Worker, key: int) -> None:
            await worker.call("embed", key, function, None)

        if isinstance(function, Function):
            return self.derive(function.building_block().type_signature, make)
        block = blocks.parse_block(function.function)
        return self.derive(block.type_signature, make, RemoteGraph)

    async def _share(self, name: Any, build: Callable[[], RemoteValue]) -> RemoteValue:
        """Return the value that is shared under a name; build it if there is none."""
        return await self._shared.get(name, build).ready()

    async def evaluate(self, work: Work) -> Evaluated:
        """Have the worker evaluate all of a plan in one call; values are encoded.

        The call ends between clients where nobody waits for it.
        """
        arguments = work.for_worker()

        async def call(worker: Worker) -> Any:
            return await worker.call("evaluate", *arguments)

        answer = await self._connection.run(call)
        evaluated, noted = object_store.unpack_result(answer)
        diagnostics.note(noted)
        return evaluated

    def _own(self, value: object) -> RemoteValue:
        found = type_checks.narrow(value, RemoteValue, _NAME)
        if not self.holds(found):
            raise errors.ValueMismatchError(
                "Expected a value on this executor's worker, found one on another:"
                " compute it and embed what it is."
            )
        return found

    @override
    async def create_call(
        self, comp: flf.ExecutorValue, arg: flf.ExecutorValue | None = None
    ) -> RemoteValue:
        function = self._own(comp)
        argument = None if arg is None else self._own(arg)
        type_spec = function.type_signature
        if not isinstance(type_spec, fl.FunctionType):
            raise errors.ValueMismatchError(
                f"Expected a function to call, found a value of type `{type_spec}`."
            )
        type_checks.check_argument(type_spec, argument)
        draw = random_keys.pinned()

        async def make(worker: Worker, key: int) -> None:
            argument_key = None if argument is None else await argument.on(worker)
            keys = (key, await function.on(worker), argument_key)
            diagnostics.note(await worker.call("invoke", *keys, draw))

        kind = RemoteFusedValue if isinstance(function, RemoteGraph) else RemoteValue
        return await self.derive(type_spec.result, make, kind).ready()

    @override
    async def create_struct(self, elements: Any) -> RemoteValue:
        members = [
            (name, self._own(member))
            for name, member in structs.iter_elements(structs.to_struct(elements))
        ]

        async def make(worker: Worker, key: int) -> None:
            keys = [(name, await member.on(worker)) for name, member in members]
            await worker.call("combine", key, keys)

        type_spec = fl.StructType((name, m.type_signature) for name, m in members)
        return await self.derive(type_spec, make).ready()

    @override
    async def create_selection(
        self, source: Any, index: int | None = None, name: str | None = None
    ) -> RemoteValue:
        struct = self._own(source)
        position = type_checks.select_index(struct.type_signature, index, name)

        async def make(worker: Worker, key: int) -> None:
            await worker.call("select", key, await struct.on(worker), position)

        type_spec = type_checks.struct_type(struct.type_signature)[position]
        return await self.derive(type_spec, make).ready()

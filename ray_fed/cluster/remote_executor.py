"""The four verbs over a handle: values stay on the actor, only names come back.

A function, or a value that lives in the object store, is embedded once a scope
however often it is asked for: leaves of one subround share them.
"""

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import federated_language as fl
import ray
import ray.exceptions
from typing_extensions import override

import ray_fed.blocks as blocks
import ray_fed.draws as draws
import ray_fed.errors as errors
import ray_fed.plain as plain
import ray_fed.values as values
from ray_fed.blocks import Function
from ray_fed.cluster import failures
from ray_fed.values import Stored, StoredParts

flf = fl.framework
_NAME = "RemoteExecutor"


class WorkerConnection:
    """A worker, for the length of one scope: its values are freed at the end.

    Args:
        handle: of the actor.
        scope: names the values of this use; unique.
        name: of the worker, for errors.
    """

    def __init__(self, handle: Any, scope: str, name: str) -> None:
        self.handle = handle
        self.scope = scope
        self.name = name
        self._keys = itertools.count()

    def new_key(self) -> int:
        """Return a name for a value that the scope does not have yet."""
        return next(self._keys)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker, in this scope, and return its result.

        Raises:
            LostWorkerError: the worker is gone.
            Exception: what the method raised.
        """
        try:
            return await getattr(self.handle, method).remote(self.scope, *args)
        except ray.exceptions.RayTaskError as error:
            raise failures.unwrap(error) from None
        except failures.LOST_ERRORS as error:
            raise LostWorkerError(self.name, error) from error


class LostWorkerError(errors.ClusterError):
    """A worker is gone; whoever leased it reports it to the pool.

    Attributes:
        worker: its name.
        error: what Ray said.
    """

    def __init__(self, worker: str, error: BaseException) -> None:
        super().__init__(f"Expected `{worker}` to answer, found it gone.")
        self.worker = worker
        self.error = error


class RemoteValue(flf.ExecutorValue):
    """A value on a worker, by its key in a scope."""

    def __init__(
        self, connection: WorkerConnection, key: int, type_signature: fl.Type
    ) -> None:
        self.connection = connection
        self.key = key
        self._type_signature = type_signature

    @property
    @override
    def reference(self) -> int:
        return self.key

    @property
    @override
    def type_signature(self) -> fl.Type:
        return self._type_signature

    @override
    async def compute(self) -> Any:
        """Return the value in plain form."""
        return await self.connection.call("compute", self.key)


def _unwrap(value: Any) -> Any:
    return value.reference if isinstance(value, Stored) else value


class RemoteExecutor(flf.Executor):
    """Delegates every verb to the leaf stack of one worker.

    Args:
        connection: to the worker; not owned.
    """

    def __init__(self, connection: WorkerConnection) -> None:
        self.connection = connection
        self._shared: dict[Any, asyncio.Task[RemoteValue]] = {}

    @override
    def close(self) -> None:
        self._shared.clear()

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> RemoteValue:
        type_spec = None if type_spec is None else fl.to_type(type_spec)
        if isinstance(value, RemoteValue):
            return value
        if isinstance(value, Stored | StoredParts):
            return await self._once((value, type_spec), self._embed(value, type_spec))
        block = blocks.to_block(value)
        if block is not None:
            value = Function(blocks.serialise(block))
        if isinstance(value, Function):
            if value.captured:
                return await self._embed(value, None)
            return await self._once(value.computation, self._embed(value, None))
        if type_spec is None:
            raise errors.UnsupportedError(
                f"Expected a type for {values.show(value)}, found none."
            )
        return await self._embed(plain.to_plain(value, type_spec), type_spec)

    async def _once(
        self, key: Any, embed: Coroutine[Any, Any, RemoteValue]
    ) -> RemoteValue:
        if key in self._shared:
            embed.close()
        else:
            self._shared[key] = asyncio.ensure_future(embed)
        return await asyncio.shield(self._shared[key])

    async def _embed(self, value: Any, type_spec: fl.Type | None) -> RemoteValue:
        key = self.connection.new_key()
        if isinstance(value, Function):
            block = value.building_block()
            await self.connection.call("embed", key, value, None)
            return RemoteValue(self.connection, key, block.type_signature)
        if type_spec is None:
            raise errors.UnsupportedError("Expected a type for a stored value.")
        serialised = blocks.serialise_type(type_spec)
        # References at the top level of a call: Ray brings them to the worker itself.
        if isinstance(value, StoredParts):
            held = [_unwrap(part) for part in value.parts]
            await self.connection.call("embed_parts", key, serialised, *held)
        else:
            await self.connection.call("embed", key, _unwrap(value), serialised)
        return RemoteValue(self.connection, key, type_spec)

    @override
    async def create_call(
        self, comp: flf.ExecutorValue, arg: flf.ExecutorValue | None = None
    ) -> RemoteValue:
        function = values.narrow(comp, RemoteValue, _NAME)
        argument = None if arg is None else values.narrow(arg, RemoteValue, _NAME)
        type_spec = function.type_signature
        if not isinstance(type_spec, fl.FunctionType):
            raise errors.ValueMismatchError(
                f"Expected a function to call, found a value of type `{type_spec}`."
            )
        values.check_argument(type_spec, argument)
        key = self.connection.new_key()
        argument_key = None if argument is None else argument.key
        keys = (key, function.key, argument_key)
        draws.note_unkeyed(await self.connection.call("invoke", *keys, draws.current()))
        return RemoteValue(self.connection, key, type_spec.result)

    @override
    async def create_struct(self, elements: Any) -> RemoteValue:
        members = [
            (name, values.narrow(member, RemoteValue, _NAME))
            for name, member in values.iter_elements(values.to_struct(elements))
        ]
        key = self.connection.new_key()
        keys = [(name, member.key) for name, member in members]
        await self.connection.call("combine", key, keys)
        type_spec = fl.StructType((name, m.type_signature) for name, m in members)
        return RemoteValue(self.connection, key, type_spec)

    @override
    async def create_selection(
        self, source: Any, index: int | None = None, name: str | None = None
    ) -> RemoteValue:
        struct = values.narrow(source, RemoteValue, _NAME)
        position = values.select_index(struct.type_signature, index, name)
        key = self.connection.new_key()
        await self.connection.call("select", key, struct.key, position)
        type_spec = values.struct_type(struct.type_signature)[position]
        return RemoteValue(self.connection, key, type_spec)

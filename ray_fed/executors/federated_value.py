"""Values of a `FederatingExecutor`, and work of theirs that needs no clients."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.executors.closure import Closure, to_function
from ray_fed.executors.embedded_value import EmbeddedValue
from ray_fed.executors.strategy import FederatingStrategy
from ray_fed.language import structs, type_checks
from ray_fed.values import plain_values

flf = fl.framework


class Deferred:
    """A value without placement that is embedded when it is first needed.

    Args:
        embed: embeds it in the unplaced executor.
    """

    def __init__(self, embed: Callable[[], Coroutine[Any, Any, flf.ExecutorValue]]):
        self._embed = embed
        self._embedded: asyncio.Future[flf.ExecutorValue] | None = None

    @classmethod
    def of(cls, value: flf.ExecutorValue) -> "Deferred":
        """Return one of a value that is embedded already."""

        async def embedded() -> flf.ExecutorValue:
            return value

        return cls(embedded)

    async def get(self) -> flf.ExecutorValue:
        """Return the value embedded in the unplaced executor."""
        if self._embedded is None:
            self._embedded = asyncio.ensure_future(self._embed())
        return await self._embedded


class FederatedValue(EmbeddedValue):
    """A value embedded in a `FederatingExecutor`.

    Its reference is, by type: a `Placed` at clients; a value of the unplaced executor
    at the server and without placement, perhaps `Deferred`; a Struct of such values; a
    building block or closure for a function.

    Args:
        reference: see above.
        type_signature: type of the value.
        equal: what each client would hold, in the unplaced executor; for a value that
            is equal at all clients, to be read in a cohort without any.
    """

    def __init__(
        self, reference: Any, type_signature: fl.Type, equal: Deferred | None = None
    ) -> None:
        super().__init__(reference, type_signature)
        self.equal = equal

    @override
    async def compute(self) -> Any:
        """Return a list for clients, what the unplaced executor computes otherwise.

        Raises:
            ValueMismatchError: the value is a function.
        """
        reference = self._reference
        if isinstance(reference, structs.Struct):
            pairs = list(structs.iter_elements(reference))
            computed = await asyncio.gather(*(member.compute() for _, member in pairs))
            names = [name for name, _ in pairs]
            return structs.Struct(zip(names, computed, strict=True))
        if isinstance(self._type_signature, fl.FederatedType):
            if type_checks.is_at_clients(self._type_signature):
                return await self._compute_clients(self._type_signature)
            return await reference.compute()
        if isinstance(reference, Deferred):
            reference = await reference.get()
        if isinstance(reference, flf.ExecutorValue):
            return await reference.compute()
        raise errors.ValueMismatchError(
            f"Expected a value to compute, found a function `{self._type_signature}`:"
            " call it."
        )

    async def _compute_clients(self, type_spec: fl.FederatedType) -> Any:
        computed = await self._reference.compute()
        if not type_spec.all_equal:
            return plain_values.to_structs(computed, type_spec)
        if computed:
            return plain_values.to_structs(computed[0], type_spec.member)
        if self.equal is None:
            raise errors.CardinalityError(
                f"Expected at least one client to read `{type_spec}` from, found none."
            )
        return await (await self.equal.get()).compute()


class Interpreter(Protocol):
    """What a handler needs of the executor."""

    strategy: FederatingStrategy
    unplaced: flf.Executor


async def unplaced_value(
    interpreter: Interpreter, value: FederatedValue
) -> flf.ExecutorValue:
    """Return a value without clients as one embedded in the unplaced executor."""
    match value.reference:
        case flf.ExecutorValue():
            return value.reference
        case Deferred():
            return await value.reference.get()
        case structs.Struct():
            elements = [
                (name, await unplaced_value(interpreter, member))
                for name, member in structs.iter_elements(value.reference)
            ]
            return await interpreter.unplaced.create_struct(structs.Struct(elements))
        case _ if isinstance(value.type_signature, fl.FunctionType):
            function = await to_function(value)
            return await interpreter.unplaced.create_value(function)
        case _:
            raise errors.ValueMismatchError(
                f"Expected a value without clients, found `{value.type_signature}`."
            )


async def call_at_server(
    interpreter: Interpreter, function: FederatedValue, arg: FederatedValue | None
) -> flf.ExecutorValue:
    """Call a function without clients; a lambda where its names are resolved.

    So what a lambda captures stays where it is, and the unplaced executor need not
    know lambdas.
    """
    if isinstance(function.reference, Closure):
        result = await function.reference(arg)
        called = type_checks.narrow(result, FederatedValue, "FederatingExecutor")
        return await unplaced_value(interpreter, called)
    embedded = await unplaced_value(interpreter, function)
    argument = None if arg is None else await unplaced_value(interpreter, arg)
    return await interpreter.unplaced.create_call(embedded, argument)

"""Names in sight while building blocks are interpreted, and what they stand for."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.executors.embedded_value import EmbeddedValue
from ray_fed.language import structs

flf = fl.framework


class Scope:
    """Names in sight, innermost first; each is a task that yields its value."""

    def __init__(self, parent: "Scope | None" = None) -> None:
        self.parent = parent
        self._names: dict[str, Callable[[], Coroutine[Any, Any, ResolvedValue]]] = {}
        self._tasks: dict[str, asyncio.Task[ResolvedValue]] = {}

    def bind(
        self, name: str, evaluate: "Callable[[], Coroutine[Any, Any, ResolvedValue]]"
    ) -> None:
        """Bind a name to what will be evaluated when it is first needed."""
        self._names[name] = evaluate

    async def resolve(self, name: str) -> "ResolvedValue":
        """Return what a name stands for, in this scope or the nearest around it.

        Raises:
            UnsupportedError: no scope binds the name.
        """
        holder = self._holder(name)
        if holder is None:
            raise errors.UnsupportedError(
                f"Expected a name that is bound, found the free reference `{name}`."
            )
        return await holder.task(name)

    def _holder(self, name: str) -> "Scope | None":
        scope: Scope | None = self
        while scope is not None and not scope.binds(name):
            scope = scope.parent
        return scope

    def binds(self, name: str) -> bool:
        """Return whether this scope itself binds the name."""
        return name in self._names

    def task(self, name: str) -> "asyncio.Task[ResolvedValue]":
        """Return the task that evaluates a name of this scope, started once."""
        if name not in self._tasks:
            self._tasks[name] = asyncio.create_task(self._names[name]())
        return self._tasks[name]


class ResolvedValue(EmbeddedValue):
    """A value of the target, a struct of such values, or a function with its scope."""

    @override
    async def compute(self) -> Any:
        """Return what the target computes; a Struct of it for structs.

        Raises:
            ValueMismatchError: the value is a function.
        """
        match self._reference:
            case flf.ExecutorValue():
                return await self._reference.compute()
            case structs.Struct():
                pairs = list(structs.iter_elements(self._reference))
                computed = await asyncio.gather(*(v.compute() for _, v in pairs))
                names = [name for name, _ in pairs]
                return structs.Struct(zip(names, computed, strict=True))
            case _:
                raise errors.ValueMismatchError(
                    "Expected a value to compute, found a function"
                    f" `{self._type_signature}`: call it."
                )


class ScopedLambda:
    """A lambda and the scope that it was written in."""

    def __init__(self, block: flf.Lambda, scope: Scope) -> None:
        self.block = block
        self.scope = scope


def constant(
    value: ResolvedValue,
) -> Callable[[], Coroutine[Any, Any, ResolvedValue]]:
    """Return what `Scope.bind` takes for a value that is there already."""

    async def resolve() -> ResolvedValue:
        return value

    return resolve

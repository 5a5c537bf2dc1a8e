"""A lambda on its way down a stack: what it captures is embedded, its body is not.

Names in sight while building blocks are interpreted, and what they stand for.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
from ray_fed.executors.embedded_value import EmbeddedValue
from ray_fed.language import blocks, structs, type_checks
from ray_fed.plan import random_keys

flf = fl.framework
_Value = TypeVar("_Value", bound=flf.ExecutorValue)


class Scope:
    """Names in sight, innermost first; each is a task that yields its value."""

    def __init__(self, parent: "Scope | None" = None) -> None:
        self.parent = parent
        self.names: dict[str, Callable[[], asyncio.Task[ResolvedValue]]] = {}

    def bind(
        self, name: str, evaluate: "Callable[[], Coroutine[Any, Any, ResolvedValue]]"
    ) -> None:
        """Bind a name to what will be evaluated when it is first needed."""
        self.names[name] = functools.cache(lambda: asyncio.create_task(evaluate()))

    async def resolve(self, name: str) -> "ResolvedValue":
        """Return what a name stands for, in this scope or the nearest around it.

        Raises:
            UnsupportedError: no scope binds the name.
        """
        scope: Scope | None = self
        while scope is not None and name not in scope.names:
            scope = scope.parent
        if scope is None:
            raise errors.UnsupportedError(
                f"Expected a name that is bound, found the free reference `{name}`."
            )
        return await scope.names[name]()


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


def constant(value: _Value) -> Callable[[], Coroutine[Any, Any, _Value]]:
    """Return what `Scope.bind` and `Deferred` take for a value that is there."""

    async def resolve() -> _Value:
        return value

    return resolve


_Capture: TypeAlias = tuple[str, bytes, structs.Plain]
"""A name, the serialised type of its value, the value."""


class Closure:
    """A lambda with what it captures, embedded in the target that it was given to.

    Calling it with an embedded argument evaluates its body there. An executor that
    runs it elsewhere asks for its `portable` form.
    """

    def __init__(
        self,
        block: flf.Lambda,
        captured: dict[str, flf.ExecutorValue],
        call: Callable[[flf.ExecutorValue | None], Awaitable[flf.ExecutorValue]],
    ) -> None:
        self.block = block
        self.captured = captured
        self._call = call

    async def __call__(self, arg: flf.ExecutorValue | None) -> flf.ExecutorValue:
        """Return the lambda's result on an argument embedded in the same target."""
        return await self._call(arg)

    async def portable(self) -> blocks.Function:
        """Return the lambda as a function that can travel: its captures computed.

        One that only calls a TensorFlow computation, as federated_language writes it
        to drop the names of parameters, is that computation.
        """
        match self.block:
            case flf.Lambda(
                parameter_name=str(parameter),
                result=flf.Call(
                    function=flf.CompiledComputation() as called,
                    argument=flf.Reference(name=argument_name),
                ),
            ) if argument_name == parameter:
                return blocks.Function(blocks.serialise(called))
            case _:
                return await self._portable_lambda()

    async def _portable_lambda(self) -> blocks.Function:
        captured: list[_Capture] = []
        functions: list[tuple[str, flf.ComputationBuildingBlock]] = []
        for name, value in self.captured.items():
            if isinstance(value.type_signature, fl.FunctionType):
                function = await to_function(value)
                captured.extend(
                    (f"{name}/{inner}", type_bytes, plain_value)
                    for inner, type_bytes, plain_value in function.captured
                )
                functions.append((name, _renamed(function, name)))
            else:
                computed = await value.compute()
                type_spec = value.type_signature
                captured.append(
                    (
                        name,
                        blocks.serialise_type(type_spec),
                        plain_values.to_plain(
                            computed, type_spec, f"the captured `{name}`"
                        ),
                    )
                )
        block = flf.Block(functions, self.block) if functions else self.block
        return blocks.Function(blocks.serialise(block), tuple(captured))


def _renamed(function: blocks.Function, prefix: str) -> flf.ComputationBuildingBlock:
    """Return a captured function whose own captures have a prefix to their names.

    Another one may have captured something else under the same name.
    """
    names = [
        (inner, flf.Reference(f"{prefix}/{inner}", blocks.parse_type(type_bytes)))
        for inner, type_bytes, _ in function.captured
    ]
    block = function.building_block()
    return flf.Block(names, block) if names else block


def split_captures(
    block: flf.Lambda,
) -> tuple[flf.Lambda, dict[str, tuple[str, list[int]]]]:
    """Return a lambda that captures no more of a struct than it uses.

    The parameters of a federated_computation are one struct, so that a lambda inside
    of it that uses an unplaced one would capture the placed ones too.

    Returns:
        The lambda, and for each name that it captures the name in sight and the
        indices to select, one after another.
    """
    free = set(flf.get_map_of_unbound_references(block)[block])
    split = free - blocks.bound_names(block)  # a name of two meanings is captured whole
    paths: dict[str, tuple[str, list[int]]] = {name: (name, []) for name in free}

    def replace(
        part: flf.ComputationBuildingBlock,
    ) -> tuple[flf.ComputationBuildingBlock, bool]:
        match part:
            case flf.Selection(source=flf.Reference(name=name)) if name in split:
                root, path = paths[name]
                selected = f"{name}.{part.as_index()}"
                paths[selected] = (root, [*path, part.as_index()])
                split.add(selected)
                return flf.Reference(selected, part.type_signature), True
            case _:
                return part, False

    replaced, _ = flf.transform_postorder(block, replace)
    names = flf.get_map_of_unbound_references(replaced)[replaced]
    narrowed = type_checks.narrow(replaced, flf.Lambda, "a closure")
    return narrowed, {name: paths[name] for name in sorted(names)}


async def to_function(value: flf.ExecutorValue) -> blocks.Function:
    """Return an embedded function as one that can travel.

    Raises:
        ValueMismatchError: the value is no function that is held as a computation.
    """
    match value.reference:
        case Closure() as closure:
            return await closure.portable()
        case flf.ComputationBuildingBlock() as block:
            return blocks.Function(blocks.serialise(block))
        case _:
            return type_checks.narrow(
                value.reference, blocks.Function, "FederatingExecutor"
            )


def may_draw(function: flf.ExecutorValue) -> bool:
    """Return whether an embedded function, or one that it captures, may draw."""
    match function.reference:
        case Closure(block=block, captured=captured):
            functions = [
                value
                for value in captured.values()
                if isinstance(value.type_signature, fl.FunctionType)
            ]
            draws_itself = random_keys.may_draw(blocks.serialise(block))
            return draws_itself or any(map(may_draw, functions))
        case flf.ComputationBuildingBlock() as block:
            return random_keys.may_draw(blocks.serialise(block))
        case blocks.Function(computation=computation):
            return random_keys.may_draw(computation)
        case _:
            return True

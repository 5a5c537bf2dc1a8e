"""Lambdas of federated_language inside executors, and the scopes of their names.

A lambda captures a value if its body uses a name from outside of the lambda. A
`Closure` is a lambda with its captured values, which are embedded in an executor. The
body stays a building block, which each call evaluates.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

import federated_language as fl

import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
from ray_fed.executors.embedded_value import EmbeddedValue
from ray_fed.executors.fan_out import Once
from ray_fed.language import blocks, structs, type_checks
from ray_fed.plan import random_keys

flf = fl.framework
_Value = TypeVar("_Value", bound=flf.ExecutorValue)


class Scope:
    """The values of the names in one block or lambda, computed when first needed.

    `parent` is the scope around this one, or None.
    """

    def __init__(self, parent: "Scope | None" = None) -> None:
        self.parent = parent
        self.names: dict[str, Once[ResolvedValue]] = {}

    def bind(
        self, name: str, evaluate: "Callable[[], Coroutine[Any, Any, ResolvedValue]]"
    ) -> None:
        """Define a name as the result of `evaluate`, which runs at most once."""
        self.names[name] = Once(evaluate)

    async def resolve(self, name: str) -> "ResolvedValue":
        """Return the value of a name in this scope, or in the nearest outer scope."""
        scope: Scope | None = self
        while scope is not None and name not in scope.names:
            scope = scope.parent
        if scope is None:
            raise errors.UnsupportedError(
                f"Expected a name that is bound, found the free reference `{name}`."
            )
        return await scope.names[name].get()


class ResolvedValue(EmbeddedValue):
    """A value in a `ReferenceResolvingExecutor`.

    The reference is a value of the target executor, a Struct of ResolvedValues, or a
    `ScopedLambda`.
    """


class ScopedLambda:
    """A lambda, and the scope in which its free names have values."""

    def __init__(self, block: flf.Lambda, scope: Scope) -> None:
        self.block = block
        self.scope = scope


def constant(value: _Value) -> Callable[[], Coroutine[Any, Any, _Value]]:
    """Return an async function that returns `value`, for `Scope.bind` and `Once`."""

    async def resolve() -> _Value:
        return value

    return resolve


_Capture: TypeAlias = tuple[str, bytes, structs.Plain]
"""A captured value: its name, its serialized type, and the plain value."""


class Closure:
    """A lambda with its captured values, which are embedded in an executor.

    A call evaluates the lambda in this executor. For another process, `portable`
    returns the lambda with plain captured values.

    Args:
        block: The lambda.
        captured: Embedded values of the free names in the lambda.
        call: Async function from an embedded argument (or None) to the result.
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
        """Call the lambda with an argument that is embedded in the same executor."""
        return await self._call(arg)

    async def portable(self) -> blocks.Function:
        """Return the lambda and its captured values in a form for other processes.

        A lambda that only calls a TensorFlow computation becomes this computation.
        federated_language makes these lambdas to drop the names of parameters.
        """
        match self.block:
            case flf.Lambda(
                parameter_name=str(parameter),
                result=flf.Call(
                    function=flf.CompiledComputation() as called,
                    argument=flf.Reference(name=argument_name),
                ),
            ) if argument_name == parameter:
                return blocks.Function(blocks.serialize(called))
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
                        blocks.serialize_type(type_spec),
                        plain_values.to_plain(
                            computed, type_spec, f"the captured `{name}`"
                        ),
                    )
                )
        block = flf.Block(functions, self.block) if functions else self.block
        return blocks.Function(blocks.serialize(block), tuple(captured))


def _renamed(function: blocks.Function, prefix: str) -> flf.ComputationBuildingBlock:
    # Two captured functions may use one name for two values, so names get a prefix.
    names = [
        (inner, flf.Reference(f"{prefix}/{inner}", blocks.parse_type(type_bytes)))
        for inner, type_bytes, _ in function.captured
    ]
    block = function.building_block()
    return flf.Block(names, block) if names else block


def split_captures(
    block: flf.Lambda,
) -> tuple[flf.Lambda, dict[str, tuple[str, list[int]]]]:
    """Rewrite a lambda so that it captures only the parts of structs that it uses.

    The parameters of a federated_computation are one struct. A lambda that uses one
    parameter would otherwise capture all of them. The dict has each captured name of
    the new lambda, with the name of a struct in the scope and the indices of the
    selections that lead from the struct to the part.
    """
    free = set(flf.get_map_of_unbound_references(block)[block])
    split = free - blocks.bound_names(block)  # names bound twice stay whole
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
    """Return an embedded function in a form that other processes can run.

    Raises ValueMismatchError for a function that is no lambda and no computation.
    """
    match value.reference:
        case Closure() as closure:
            return await closure.portable()
        case flf.ComputationBuildingBlock() as block:
            return blocks.Function(blocks.serialize(block))
        case _:
            return type_checks.narrow(
                value.reference, blocks.Function, "FederatingExecutor"
            )


def may_draw(function: flf.ExecutorValue) -> bool:
    """Return whether an embedded function may draw random numbers when it is called."""
    match function.reference:
        case Closure(block=block, captured=captured):
            functions = [
                value
                for value in captured.values()
                if isinstance(value.type_signature, fl.FunctionType)
            ]
            draws_itself = random_keys.may_draw(blocks.serialize(block))
            return draws_itself or any(map(may_draw, functions))
        case flf.ComputationBuildingBlock() as block:
            return random_keys.may_draw(blocks.serialize(block))
        case blocks.Function(computation=computation):
            return random_keys.may_draw(computation)
        case _:
            return True

"""What each federated intrinsic means, once, in terms of a strategy and a server.

Handlers take the embedded argument apart, hand functions on as travelling ones, and
leave the rest to the strategy (clients) and to the unplaced executor (server).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, cast

import federated_language as fl
from typing_extensions import override

import ray_fed.blocks as blocks
import ray_fed.errors as errors
import ray_fed.intrinsics as intrinsics
import ray_fed.values as values
from ray_fed.executors.closure import Closure, to_function
from ray_fed.executors.strategy import FederatingStrategy, Placed, PlacedArg

flf = fl.framework


class FederatedValue(flf.ExecutorValue):
    """A value embedded in a `FederatingExecutor`.

    Its reference is, by type: a `Placed` at clients; a value of the unplaced executor
    at the server and without placement; a Struct of such values; a building block or
    closure for a function.
    """

    def __init__(self, reference: Any, type_signature: fl.Type) -> None:
        self._reference = reference
        self._type_signature = type_signature

    @property
    @override
    def reference(self) -> Any:
        return self._reference

    @property
    @override
    def type_signature(self) -> fl.Type:
        return self._type_signature

    @override
    async def compute(self) -> Any:
        """Return a list for clients, what the unplaced executor computes otherwise.

        Raises:
            ValueMismatchError: the value is a function.
        """
        reference = self._reference
        if isinstance(reference, values.Struct):
            pairs = list(values.iter_elements(reference))
            computed = await asyncio.gather(*(member.compute() for _, member in pairs))
            names = [name for name, _ in pairs]
            return values.Struct(zip(names, computed, strict=True))
        if isinstance(self._type_signature, fl.FederatedType):
            computed = await reference.compute()
            if values.is_at_clients(self._type_signature):
                return _computed_at_clients(computed, self._type_signature)
            return computed
        if isinstance(reference, flf.ExecutorValue):
            return await reference.compute()
        raise errors.ValueMismatchError(
            f"Expected a value to compute, found a function `{self._type_signature}`:"
            " call it."
        )


def _computed_at_clients(computed: list[Any], type_spec: fl.FederatedType) -> Any:
    if not type_spec.all_equal:
        return computed
    if not computed:
        raise errors.CardinalityError(
            f"Expected at least one client to read `{type_spec}` from, found none."
        )
    return computed[0]


class Interpreter(Protocol):
    """What a handler needs of the executor."""

    strategy: FederatingStrategy
    unplaced: flf.Executor


Handler = Callable[
    [Interpreter, FederatedValue | None, fl.FunctionType], Awaitable[FederatedValue]
]


def _part(arg: FederatedValue | None, index: int) -> FederatedValue:
    struct = values.narrow(arg, FederatedValue, "FederatingExecutor").reference
    return values.narrow(struct[index], FederatedValue, "FederatingExecutor")


def _whole(arg: FederatedValue | None) -> FederatedValue:
    return values.narrow(arg, FederatedValue, "FederatingExecutor")


def _member(type_spec: fl.Type) -> fl.Type:
    return cast("fl.FederatedType", type_spec).member


async def unplaced_value(
    interpreter: Interpreter, value: FederatedValue
) -> flf.ExecutorValue:
    """Return a value without clients as one embedded in the unplaced executor."""
    match value.reference:
        case flf.ExecutorValue():
            return value.reference
        case values.Struct():
            elements = [
                (name, await unplaced_value(interpreter, member))
                for name, member in values.iter_elements(value.reference)
            ]
            return await interpreter.unplaced.create_struct(values.Struct(elements))
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
        called = values.narrow(result, FederatedValue, "FederatingExecutor")
        return await unplaced_value(interpreter, called)
    embedded = await unplaced_value(interpreter, function)
    argument = None if arg is None else await unplaced_value(interpreter, arg)
    return await interpreter.unplaced.create_call(embedded, argument)


async def _value_at_server(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    return FederatedValue(
        await unplaced_value(interpreter, _whole(arg)), type_spec.result
    )


async def _all_equal_at_clients(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    value = await unplaced_value(interpreter, _whole(arg))
    result = cast("fl.FederatedType", type_spec.result)
    placed_type = fl.FederatedType(result.member, fl.CLIENTS, all_equal=True)
    return FederatedValue(await interpreter.strategy.place(value, placed_type), result)


async def _eval_at_server(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    called = await call_at_server(interpreter, _whole(arg), None)
    return FederatedValue(called, type_spec.result)


async def _eval_at_clients(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    function = await to_function(_whole(arg))
    placed = await interpreter.strategy.map(function, None, _member(type_spec.result))
    return FederatedValue(placed, type_spec.result)


async def _map(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    function = await to_function(_part(arg, 0))
    placed = await interpreter.strategy.map(
        function, _part(arg, 1).reference, _member(type_spec.result)
    )
    return FederatedValue(placed, type_spec.result)


async def _map_all_equal(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    found = _part(arg, 1).type_signature
    if not cast("fl.FederatedType", found).all_equal:
        raise errors.UnsupportedError(
            f"Expected an all-equal value for federated_map_all_equal, found `{found}`:"
            " use federated_map."
        )
    return await _map(interpreter, arg, type_spec)


async def _apply(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    value = await unplaced_value(interpreter, _part(arg, 1))
    member = FederatedValue(value, value.type_signature)
    called = await call_at_server(interpreter, _part(arg, 0), member)
    return FederatedValue(called, type_spec.result)


async def _zip_at_clients(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    placed = await interpreter.strategy.map(
        None, _placed_arg(_whole(arg)), _member(type_spec.result)
    )
    return FederatedValue(placed, type_spec.result)


def _placed_arg(value: FederatedValue) -> PlacedArg:
    if isinstance(value.reference, values.Struct):
        return values.Struct(
            (name, _placed_arg(member))
            for name, member in values.iter_elements(value.reference)
        )
    return cast("Placed", value.reference)


async def _aggregate(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    merged = await interpreter.strategy.reduce(
        cast("Placed", _part(arg, 0).reference),
        await unplaced_value(interpreter, _part(arg, 1)),
        await to_function(_part(arg, 2)),
        await to_function(_part(arg, 3)),
    )
    partial = FederatedValue(merged, merged.type_signature)
    reported = await call_at_server(interpreter, _part(arg, 4), partial)
    return FederatedValue(reported, type_spec.result)


def _derived(uri: str) -> Handler:
    async def handle(
        interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
    ) -> FederatedValue:
        placed = await _zipped(interpreter, _whole(arg))
        derived = intrinsics.DERIVED_AGGREGATIONS[uri](placed.member)
        unplaced = interpreter.unplaced
        zero = await unplaced.create_call(await unplaced.create_value(derived.zero))
        result = await interpreter.strategy.reduce(
            placed,
            zero,
            blocks.Function(blocks.serialise(derived.accumulate)),
            blocks.Function(blocks.serialise(derived.merge)),
        )
        if derived.report is not None:
            report = await unplaced.create_value(derived.report)
            result = await unplaced.create_call(report, result)
        return FederatedValue(result, type_spec.result)

    return handle


async def _zipped(interpreter: Interpreter, value: FederatedValue) -> Placed:
    """Return a placed value, or a struct of them (a mean's <value, weight>) zipped."""
    if not isinstance(value.reference, values.Struct):
        return cast("Placed", value.reference)
    elements = values.iter_elements(value.reference)
    member = fl.StructType([_member(part.type_signature) for _, part in elements])
    return await interpreter.strategy.map(None, _placed_arg(value), member)


HANDLERS: Mapping[str, Handler] = {
    flf.FEDERATED_AGGREGATE.uri: _aggregate,
    flf.FEDERATED_APPLY.uri: _apply,
    flf.FEDERATED_BROADCAST.uri: _all_equal_at_clients,
    flf.FEDERATED_EVAL_AT_CLIENTS.uri: _eval_at_clients,
    flf.FEDERATED_EVAL_AT_SERVER.uri: _eval_at_server,
    flf.FEDERATED_MAP.uri: _map,
    flf.FEDERATED_MAP_ALL_EQUAL.uri: _map_all_equal,
    flf.FEDERATED_VALUE_AT_CLIENTS.uri: _all_equal_at_clients,
    flf.FEDERATED_VALUE_AT_SERVER.uri: _value_at_server,
    flf.FEDERATED_ZIP_AT_CLIENTS.uri: _zip_at_clients,
    flf.FEDERATED_ZIP_AT_SERVER.uri: _value_at_server,
    **{uri: _derived(uri) for uri in intrinsics.DERIVED_AGGREGATIONS},
}
"""By uri; what stands here is what a strategy is asked to do."""

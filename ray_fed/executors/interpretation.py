"""What each federated intrinsic means, once, in terms of a strategy and a server.

Handlers take the embedded argument apart, hand functions on as travelling ones, and
leave the rest to the strategy (clients) and to the unplaced executor (server).
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import federated_language as fl
import numpy as np

from ray_fed.executors.closure import may_draw, to_function
from ray_fed.executors.federated_value import (
    Deferred,
    FederatedValue,
    Interpreter,
    call_at_server,
    unplaced_value,
)
from ray_fed.executors.selection import check_keys, select_all
from ray_fed.executors.strategy import Placed, PlacedArg
from ray_fed.language import intrinsics, structs, type_checks
from ray_fed.language.blocks import Function, serialise
from ray_fed.plan import random_keys

flf = fl.framework


Handler = Callable[
    [Interpreter, FederatedValue | None, fl.FunctionType], Awaitable[FederatedValue]
]


def _part(arg: FederatedValue | None, index: int) -> FederatedValue:
    struct = type_checks.narrow(arg, FederatedValue, "FederatingExecutor").reference
    return type_checks.narrow(struct[index], FederatedValue, "FederatingExecutor")


def _whole(arg: FederatedValue | None) -> FederatedValue:
    return type_checks.narrow(arg, FederatedValue, "FederatingExecutor")


def _member(type_spec: fl.Type) -> fl.Type:
    return cast("fl.FederatedType", type_spec).member


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
    placed = await interpreter.strategy.place(value, placed_type)
    return FederatedValue(placed, result, Deferred.of(value))


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
    """Map; without clients, what each would hold is computed at the server."""
    mapped = await _map(interpreter, arg, type_spec)
    function, equal = _part(arg, 0), _part(arg, 1).equal
    if equal is None:
        return mapped

    key = random_keys.current()

    async def call() -> flf.ExecutorValue:
        member = await equal.get()
        value = FederatedValue(member, member.type_signature)
        with random_keys.using(key):
            return await call_at_server(interpreter, function, value)

    return FederatedValue(mapped.reference, type_spec.result, Deferred(call))


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
    if isinstance(value.reference, structs.Struct):
        return structs.Struct(
            (name, _placed_arg(member))
            for name, member in structs.iter_elements(value.reference)
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
        result = await _reduce(interpreter, placed, derived)
        return FederatedValue(result, type_spec.result)

    return handle


async def _reduce(
    interpreter: Interpreter,
    placed: Placed,
    derived: intrinsics.Aggregation,
    bound: flf.ExecutorValue | None = None,
) -> flf.ExecutorValue:
    """Return what a derived aggregation comes to; `bound` is what its zero takes."""
    unplaced = interpreter.unplaced
    argument = None if bound is None else await unplaced.create_struct([bound])
    zero = await unplaced.create_call(
        await unplaced.create_value(derived.zero), argument
    )
    reduced = await interpreter.strategy.reduce(
        placed,
        zero,
        Function(serialise(derived.accumulate)),
        Function(serialise(derived.merge)),
    )
    if derived.report is None:
        return reduced
    report = await unplaced.create_value(derived.report)
    return await unplaced.create_call(report, reduced)


async def _modular_sum(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    placed = cast("Placed", _part(arg, 0).reference)
    modulus = await unplaced_value(interpreter, _part(arg, 1))
    derived = intrinsics.modular_sum(placed.member, modulus.type_signature)
    result = await _reduce(interpreter, placed, derived, modulus)
    return FederatedValue(result, type_spec.result)


async def _zipped(interpreter: Interpreter, value: FederatedValue) -> Placed:
    """Return a placed value, or a struct of them (a mean's <value, weight>) zipped."""
    if not isinstance(value.reference, structs.Struct):
        return cast("Placed", value.reference)
    elements = structs.iter_elements(value.reference)
    member = fl.StructType([_member(part.type_signature) for _, part in elements])
    return await interpreter.strategy.map(None, _placed_arg(value), member)


def _secure_sum(uri: str) -> Handler:
    async def handle(
        interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
    ) -> FederatedValue:
        value, bound = _part(arg, 0), await unplaced_value(interpreter, _part(arg, 1))
        member = _member(value.type_signature)
        bound_type = bound.type_signature
        everywhere = fl.FederatedType(bound_type, fl.CLIENTS, all_equal=True)
        placed = await interpreter.strategy.map(
            Function(serialise(intrinsics.check_of(uri, member, bound_type))),
            structs.Struct(
                [
                    (None, value.reference),
                    (None, await interpreter.strategy.place(bound, everywhere)),
                ]
            ),
            member,
        )
        checked = FederatedValue(placed, value.type_signature)
        return await _derived(flf.FEDERATED_SUM.uri)(interpreter, checked, type_spec)

    return handle


async def _select(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    """Evaluate the selection function at the server; send each client its own.

    By one graph for all keys, or once a key; where the function may draw, once a
    client and key.
    """
    all_keys = await cast("Placed", _part(arg, 0).reference).compute()
    check_keys(all_keys, int(await _part(arg, 1).compute()))
    state, function = await unplaced_value(interpreter, _part(arg, 2)), _part(arg, 3)

    async def select(key: int) -> Any:
        embedded = await interpreter.unplaced.create_value(np.int32(key), np.int32)
        pair = await interpreter.unplaced.create_struct([state, embedded])
        argument = FederatedValue(pair, pair.type_signature)
        return await (await call_at_server(interpreter, function, argument)).compute()

    is_random = may_draw(function)
    result = cast("fl.FederatedType", type_spec.result)
    if not is_random:
        travelling = await to_function(function)
        found = await select_all(interpreter.unplaced, travelling, state, all_keys)
        if found is not None:
            return FederatedValue(
                await interpreter.strategy.place(found, result), result
            )
    selected: dict[int, Any] = {}
    sequences: list[list[Any]] = []
    for client_index, keys in enumerate(all_keys):
        if is_random:
            selected = {}
        for key in map(int, keys):
            if key not in selected:
                with (
                    random_keys.at_client(client_index),
                    random_keys.at_step("select", key),
                ):
                    selected[key] = await select(key)
        sequences.append([selected[int(key)] for key in keys])
    return FederatedValue(await interpreter.strategy.place(sequences, result), result)


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
    flf.FEDERATED_SELECT.uri: _select,
    flf.FEDERATED_SECURE_SELECT.uri: _select,
    intrinsics.FEDERATED_SECURE_MODULAR_SUM.uri: _modular_sum,
    **{uri: _secure_sum(uri) for uri in intrinsics.SECURE_SUM_CHECKS},
    **{uri: _derived(uri) for uri in intrinsics.DERIVED_AGGREGATIONS},
}
"""By uri; what stands here is what a strategy is asked to do."""

"""Defines each federated intrinsic by calls of a strategy and of an unplaced executor.

A handler takes the embedded argument of an intrinsic apart. The strategy does the work
of clients, and the unplaced executor does the work of the server. A `federated_select`
evaluates one graph for all keys, if the unplaced executor has such graphs.
"""

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
import ray_fed.values.plain_values as plain_values
from ray_fed.executors.closure import Closure, constant, may_draw, to_function
from ray_fed.executors.embedded_value import EmbeddedValue
from ray_fed.executors.fan_out import Once, gather_by_index
from ray_fed.executors.strategy import FederatingStrategy, Placed, PlacedArg
from ray_fed.language import blocks, intrinsics, structs, type_checks
from ray_fed.language.blocks import Function, serialize
from ray_fed.plan import random_keys
from ray_fed.values.client_references import ClientIds
from ray_fed.values.columnar_sequence import Column, ColumnarSequence

flf = fl.framework


Deferred = Once[flf.ExecutorValue]
"""A value without placement that the unplaced executor embeds when first needed."""


class FederatedValue(EmbeddedValue):
    """A value embedded in a `FederatingExecutor`.

        type                   reference     at clients             `Placed`     at the
    server          the result of the strategy's `place`     without placement      a
    value of the unplaced executor, perhaps `Deferred`     a struct of these      a
    Struct     a function             a building block or a closure

    If all clients have an equal value, `equal` is one client's value in the unplaced
    executor. It is read if the cohort has no clients. `ids` has the ids in each
    client's value. It is empty without ids, and for values that are not placed at
    clients.
    """

    def __init__(
        self, reference: Any, type_signature: fl.Type, equal: Deferred | None = None
    ) -> None:
        super().__init__(reference, type_signature)
        self.equal = equal
        self.ids: Sequence[ClientIds] = ()
        self.owner: object = None
        """The executor that returned the value, or None inside of the executor."""

    @override
    async def compute(self) -> Any:
        """Return a list for values of clients, and one value for all others."""
        reference = self._reference
        if isinstance(reference, structs.Struct):
            pairs = list(structs.iter_elements(reference))
            computed = await gather_by_index(member.compute() for _, member in pairs)
            names = [name for name, _ in pairs]
            return structs.Struct(zip(names, computed, strict=True))
        if isinstance(self._type_signature, fl.FederatedType):
            if type_checks.is_at_clients(self._type_signature):
                return await self._compute_clients(self._type_signature)
            return await reference.compute()
        if isinstance(reference, Once):
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
    """The parts of an executor that a handler uses."""

    strategy: FederatingStrategy
    unplaced: flf.Executor


async def unplaced_value(
    interpreter: Interpreter, value: FederatedValue
) -> flf.ExecutorValue:
    """Return a value without clients as one embedded in the unplaced executor."""
    match value.reference:
        case flf.ExecutorValue():
            return value.reference
        case Once():
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
        case reference if type_checks.is_at_server(value.type_signature):
            # The strategy represents values at the server by another class.
            member = type_checks.member_type(value.type_signature)
            return await interpreter.unplaced.create_value(
                await reference.compute(), member
            )
        case _:
            raise errors.ValueMismatchError(
                f"Expected a value without clients, found `{value.type_signature}`."
            )


async def call_at_server(
    interpreter: Interpreter, function: FederatedValue, arg: FederatedValue | None
) -> flf.ExecutorValue:
    """Call a function at the server.

    The executor that resolves names calls a lambda. So captured values stay where they
    are, and the unplaced executor does not have to know lambdas.
    """
    if isinstance(function.reference, Closure):
        result = await function.reference(arg)
        called = type_checks.narrow(result, FederatedValue, "FederatingExecutor")
        return await unplaced_value(interpreter, called)
    embedded = await unplaced_value(interpreter, function)
    argument = None if arg is None else await unplaced_value(interpreter, arg)
    return await interpreter.unplaced.create_call(embedded, argument)


async def select_all(
    unplaced: flf.Executor,
    function: Function,
    state: flf.ExecutorValue,
    all_keys: Sequence[Any],
) -> list[ColumnarSequence] | None:
    """Return the elements that each client's keys select, or None without a graph.

    `function` takes state and key, and draws no random numbers.
    """
    if not any(map(len, all_keys)):
        return None
    different, places = np.unique(
        np.concatenate([np.asarray(keys, np.int32) for keys in all_keys]),
        return_inverse=True,
    )
    try:
        type_spec = state.type_signature
        plain = plain_values.to_plain(await state.compute(), type_spec, "the state")
        constants = (plain, *(value for _, _, value in function.captured))
        work = plans.KeySelection(blocks.serialize(_close(function, type_spec)))
        graph = await unplaced.create_value(work)
        parameter = type_checks.function_type(graph.type_signature).parameter
        argument = await unplaced.create_value((constants, different), parameter)
        called = await unplaced.create_call(graph, argument)
        tensors = plain_values.to_plain(await called.compute(), called.type_signature)
    except errors.ClusterError:
        raise
    except Exception:  # noqa: BLE001 (a call for each key instead)
        return None
    return split_rows([tensor[places] for tensor in tensors], all_keys)


def split_rows(
    rows: Sequence[NDArray[Any]], all_keys: Sequence[Any]
) -> list[ColumnarSequence]:
    """Return each client's elements as a sequence, one element for each of its keys.

    `rows` has one array of all clients' elements for each tensor of an element.
    """
    ends = itertools.accumulate(map(len, all_keys), initial=0)
    return [
        ColumnarSequence(tuple(Column(row[start:stop]) for row in rows), stop - start)
        for start, stop in itertools.pairwise(ends)
    ]


def check_keys(all_keys: Sequence[Any], max_key: int) -> None:
    """Raise ComputationError for a key out of range, with the client's index."""
    for client_index, keys in enumerate(all_keys):
        if any(not 0 <= key <= max_key for key in keys):
            raise errors.ComputationError(
                f"Expected keys from 0 to max_key={max_key}, found"
                f" {np.asarray(keys).tolist()}",
                errors.Location(client_index=client_index),
            )


def _close(function: Function, state: fl.Type) -> flf.Lambda:
    """Return the function of state and key as a function of constants and key.

    The constants are the state and the captured values.
    """
    captured = [
        (name, blocks.parse_type(type_bytes))
        for name, type_bytes, _ in function.captured
    ]
    constants = fl.StructType([state, *(type_spec for _, type_spec in captured)])
    parameter = flf.Reference(
        "selected", fl.StructType([constants, fl.TensorType(np.int32)])
    )
    constant = flf.Selection(parameter, index=0)
    locals_ = [
        (name, flf.Selection(constant, index=index))
        for index, (name, _) in enumerate(captured, 1)
    ]
    block = function.building_block()
    pair_type = type_checks.function_type(block.type_signature).parameter
    names = [
        name for name, _ in type_checks.struct_type(cast("Any", pair_type)).items()
    ]
    pair = [flf.Selection(constant, index=0), flf.Selection(parameter, index=1)]
    call = flf.Call(block, flf.Struct(list(zip(names, pair, strict=True))))
    body = flf.Block(locals_, call) if locals_ else call
    return flf.Lambda(parameter.name, parameter.type_signature, body)


Handler = Callable[
    [Interpreter, FederatedValue | None, fl.FunctionType], Awaitable[FederatedValue]
]
"""A handler. The strategy has not placed a result at the server yet."""


def _part(arg: FederatedValue | None, index: int) -> FederatedValue:
    struct = type_checks.narrow(arg, FederatedValue, "FederatingExecutor").reference
    return type_checks.narrow(struct[index], FederatedValue, "FederatingExecutor")


def _whole(arg: FederatedValue | None) -> FederatedValue:
    return type_checks.narrow(arg, FederatedValue, "FederatingExecutor")


async def _value_at_server(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    value = await unplaced_value(interpreter, _whole(arg))
    return FederatedValue(value, type_spec.result)


async def _all_equal_at_clients(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    value = await unplaced_value(interpreter, _whole(arg))
    result = cast("fl.FederatedType", type_spec.result)
    placed_type = fl.FederatedType(result.member, fl.CLIENTS, all_equal=True)
    placed = await interpreter.strategy.place(value, placed_type)
    return FederatedValue(placed, result, Deferred(constant(value)))


async def _eval_at_server(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    called = await call_at_server(interpreter, _whole(arg), None)
    return FederatedValue(called, type_spec.result)


async def _eval_at_clients(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    function = await to_function(_whole(arg))
    placed = await interpreter.strategy.map(
        function, None, type_checks.member_type(type_spec.result)
    )
    return FederatedValue(placed, type_spec.result)


async def _map(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    function = await to_function(_part(arg, 0))
    placed = await interpreter.strategy.map(
        function, _part(arg, 1).reference, type_checks.member_type(type_spec.result)
    )
    return FederatedValue(placed, type_spec.result)


async def _map_all_equal(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    """Map an all-equal value. Without clients, the server computes the result."""
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
        None, _placed_arg(_whole(arg)), type_checks.member_type(type_spec.result)
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
        unplaced, strategy = interpreter.unplaced, interpreter.strategy
        value, bounds = _whole(arg), list[flf.ExecutorValue]()
        if uri in intrinsics.BOUNDED:
            value, bound = _part(arg, 0), _part(arg, 1)
            bounds = [await unplaced_value(interpreter, bound)]
        placed = await _zipped(interpreter, value)
        types = [bound.type_signature for bound in bounds]
        derived = intrinsics.DERIVED_AGGREGATIONS[uri](placed.member, *types)
        if derived.check is not None:
            everywhere = fl.FederatedType(types[0], fl.CLIENTS, all_equal=True)
            # Each client checks its own value: sums hide values out of bounds.
            pair = [placed, await strategy.place(bounds.pop(), everywhere)]
            placed = await strategy.map(
                Function(serialize(derived.check)),
                structs.Struct((None, part) for part in pair),
                placed.member,
            )
        # A modular sum has its modulus in the partials, so zero depends on the bounds.
        zero = await unplaced.create_call(
            await unplaced.create_value(derived.zero),
            await unplaced.create_struct(bounds) if bounds else None,
        )
        result = await strategy.reduce(
            placed,
            zero,
            Function(serialize(derived.accumulate)),
            Function(serialize(derived.merge)),
        )
        if derived.report is not None:
            report = await unplaced.create_value(derived.report)
            result = await unplaced.create_call(report, result)
        return FederatedValue(result, type_spec.result)

    return handle


async def _zipped(interpreter: Interpreter, value: FederatedValue) -> Placed:
    """Zip a struct of placed values, such as <value, weight>. Return others as is."""
    if not isinstance(value.reference, structs.Struct):
        return cast("Placed", value.reference)
    elements = structs.iter_elements(value.reference)
    member = fl.StructType(
        [type_checks.member_type(part.type_signature) for _, part in elements]
    )
    return await interpreter.strategy.map(None, _placed_arg(value), member)


async def _select(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    """Evaluate the selection function at the server and send each client its elements.

    One graph evaluates all keys if there is one. Otherwise the function is called once
    for each key, or once for each client and key if it may draw random numbers.
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
    # One call per key takes far longer than one graph for all keys.
    if not is_random:
        travelling = await to_function(function)
        by_client = await select_all(interpreter.unplaced, travelling, state, all_keys)
        if by_client is not None:
            return FederatedValue(
                await interpreter.strategy.place(by_client, result), result
            )
    selected: dict[int, Any] = {}
    sequences: list[list[Any]] = []
    for client_index, keys in enumerate(all_keys):
        if is_random:
            # Clients draw different elements for one key, so nothing is shared.
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
    **{uri: _derived(uri) for uri in intrinsics.DERIVED_AGGREGATIONS},
}
"""Handlers by URI. A strategy does not have to implement these intrinsics itself."""

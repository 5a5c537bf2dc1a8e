"""What each federated intrinsic means, once, in terms of a strategy and a server.

Handlers take the embedded argument apart, hand functions on as travelling ones, and
leave the rest to the strategy (clients) and to the unplaced executor (server). What
keys select is evaluated by one graph for all of them, where the unplaced executor has
such graphs.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
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
from ray_fed.executors.strategy import FederatingStrategy, Placed, PlacedArg
from ray_fed.language import blocks, intrinsics, structs, type_checks
from ray_fed.language.blocks import Function, serialise
from ray_fed.plan import random_keys
from ray_fed.values.columnar_sequence import Column, ColumnarSequence

flf = fl.framework


class Deferred:
    """A value without placement that is embedded when it is first needed.

    Args:
        embed: embeds it in the unplaced executor.
    """

    def __init__(self, embed: Callable[[], Coroutine[Any, Any, flf.ExecutorValue]]):
        self._embed = embed
        self._embedded: asyncio.Future[flf.ExecutorValue] | None = None

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


async def select_all(
    unplaced: flf.Executor,
    function: Function,
    state: flf.ExecutorValue,
    all_keys: Sequence[Any],
) -> list[ColumnarSequence] | None:
    """Return what the keys of each client select; None where no graph does it.

    Args:
        unplaced: runs the graph, or knows none.
        function: of state and key; draws nothing.
        state: embedded in `unplaced`.
        all_keys: of each client.
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
        work = plans.KeySelection(blocks.serialise(_close(function, type_spec)))
        graph = await unplaced.create_value(work)
        parameter = type_checks.function_type(graph.type_signature).parameter
        argument = await unplaced.create_value((constants, different), parameter)
        called = await unplaced.create_call(graph, argument)
        tensors = plain_values.to_plain(await called.compute(), called.type_signature)
    except errors.ClusterError:
        raise
    except Exception:  # noqa: BLE001 (one call a key says what it is)
        return None
    return split_rows([tensor[places] for tensor in tensors], all_keys)


def split_rows(
    rows: Sequence[NDArray[Any]], all_keys: Sequence[Any]
) -> list[ColumnarSequence]:
    """Return each client's elements as a sequence.

    Args:
        rows: each tensor of the elements of all clients, one after another.
        all_keys: of each client, as many as its elements.
    """
    ends = itertools.accumulate(map(len, all_keys), initial=0)
    return [
        ColumnarSequence(tuple(Column(row[start:stop]) for row in rows), stop - start)
        for start, stop in itertools.pairwise(ends)
    ]


def check_keys(all_keys: Sequence[Any], max_key: int) -> None:
    """Check each client's keys.

    Raises:
        ComputationError: a key is out of range; with the client's index.
    """
    for client_index, keys in enumerate(all_keys):
        if any(not 0 <= key <= max_key for key in keys):
            raise errors.ComputationError(
                f"Expected keys from 0 to max_key={max_key}, found"
                f" {np.asarray(keys).tolist()}",
                errors.Location(client_index=client_index),
            )


def _close(function: Function, state: fl.Type) -> flf.Lambda:
    """Return the function as one of constants, state and captures, and a key."""
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


def _part(arg: FederatedValue | None, index: int) -> FederatedValue:
    struct = type_checks.narrow(arg, FederatedValue, "FederatingExecutor").reference
    return type_checks.narrow(struct[index], FederatedValue, "FederatingExecutor")


def _whole(arg: FederatedValue | None) -> FederatedValue:
    return type_checks.narrow(arg, FederatedValue, "FederatingExecutor")


async def _value_at_server(
    interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
) -> FederatedValue:
    value = await unplaced_value(interpreter, _whole(arg))
    result = cast("fl.FederatedType", type_spec.result)
    return FederatedValue(await interpreter.strategy.place(value, result), result)


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
    member = fl.StructType(
        [type_checks.member_type(part.type_signature) for _, part in elements]
    )
    return await interpreter.strategy.map(None, _placed_arg(value), member)


def _secure_sum(uri: str) -> Handler:
    async def handle(
        interpreter: Interpreter, arg: FederatedValue | None, type_spec: fl.FunctionType
    ) -> FederatedValue:
        value, bound = _part(arg, 0), await unplaced_value(interpreter, _part(arg, 1))
        member = type_checks.member_type(value.type_signature)
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
    # One graph for all keys, where there is one: one call per key takes far longer.
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

"""Defines each federated intrinsic by calls of a strategy and of an unplaced executor.

An intrinsic is an operator of federated_language, such as `federated_map`. A handler is
an async function that carries out one intrinsic. The strategy does the clients' work,
and the unplaced executor does the server's work.
"""

import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
import ray_fed.values.plain_values as plain_values
from ray_fed.executors.closure import Closure, constant, may_draw, to_function
from ray_fed.executors.embedded_value import EmbeddedValue
from ray_fed.executors.fan_out import Once
from ray_fed.executors.strategy import FederatingStrategy, Placed, PlacedArg
from ray_fed.language import blocks, intrinsics, structs, type_checks
from ray_fed.language.blocks import Function, serialize
from ray_fed.plan import random_keys
from ray_fed.values.client_references import ClientIds
from ray_fed.values.columnar_sequence import Column, ColumnarSequence

flf = fl.framework


Deferred = Once[flf.ExecutorValue]
"""A value without placement, which the unplaced executor embeds when first needed."""


class FederatedValue(EmbeddedValue):
    """A value in a `FederatingExecutor`. The type decides the class of the reference.

        at clients          `Placed`
        at the server       the result of the strategy's `place`
        without placement   a value of the unplaced executor, perhaps `Deferred`
        a struct of these   a Struct of FederatedValues
        a function          a building block or a closure

    If all clients have an equal value, `equal` is this value in the unplaced executor,
    for the case that there are no clients. `ids` has the client ids of values at
    clients, or is empty if the values have no ids.
    """

    def __init__(
        self, reference: Any, type_signature: fl.Type, equal: Deferred | None = None
    ) -> None:
        super().__init__(reference, type_signature)
        self.equal = equal
        self.ids: Sequence[ClientIds] = ()
        self.owner: object = None
        """Executor that returned the value, or None before an executor returns it."""

    @override
    async def compute(self) -> Any:
        """Return the value. Values that differ by client are a list, in order."""
        if isinstance(self._type_signature, fl.FederatedType):
            if type_checks.is_at_clients(self._type_signature):
                return await self._compute_clients(self._type_signature)
            return await self._reference.compute()
        if isinstance(self._reference, Once):
            return await (await self._reference.get()).compute()
        return await super().compute()

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


async def unplaced_value(
    unplaced: flf.Executor, value: FederatedValue
) -> flf.ExecutorValue:
    """Embed a value in the unplaced executor.

    Raises ValueMismatchError for a value that is placed at clients.
    """
    match value.reference:
        case flf.ExecutorValue():
            return value.reference
        case Once():
            return await value.reference.get()
        case structs.Struct():
            elements = [
                (name, await unplaced_value(unplaced, member))
                for name, member in structs.iter_elements(value.reference)
            ]
            return await unplaced.create_struct(structs.Struct(elements))
        case _ if isinstance(value.type_signature, fl.FunctionType):
            return await unplaced.create_value(await to_function(value))
        case reference if type_checks.is_at_server(value.type_signature):
            # The strategy represents values at the server by another class.
            member = type_checks.member_type(value.type_signature)
            return await unplaced.create_value(await reference.compute(), member)
        case _:
            raise errors.ValueMismatchError(
                f"Expected a value without clients, found `{value.type_signature}`."
            )


async def call_at_server(
    unplaced: flf.Executor, function: FederatedValue, arg: FederatedValue | None
) -> flf.ExecutorValue:
    """Call a function at the server, and return the result in the unplaced executor.

    A `Closure` is called by the executor that has made it. So its captured values stay
    where they are, and the unplaced executor does not have to know lambdas.
    """
    if isinstance(function.reference, Closure):
        result = await function.reference(arg)
        called = type_checks.narrow(result, FederatedValue, "FederatingExecutor")
        return await unplaced_value(unplaced, called)
    embedded = await unplaced_value(unplaced, function)
    argument = None if arg is None else await unplaced_value(unplaced, arg)
    return await unplaced.create_call(embedded, argument)


async def select_all(
    unplaced: flf.Executor,
    function: Function,
    state: flf.ExecutorValue,
    all_keys: Sequence[Any],
) -> list[ColumnarSequence] | None:
    """Run a `federated_select` by one graph for all keys, which is faster than calls.

    Returns for each client the sequence of its selected elements, or None if no graph
    can do this. `function` takes <state, key>, and draws no random numbers. `all_keys`
    has the keys of each client.
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
        captured = [
            flf.Reference(name, blocks.parse_type(type_bytes))
            for name, type_bytes, _ in function.captured
        ]
        root = flf.Reference("selected_state", type_spec)
        block = plans.close_selection(
            function.building_block(), root, [root, *captured]
        )
        work = plans.KeySelection(blocks.serialize(block))
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
    """Divide the elements of a `federated_select` into one sequence for each client.

    `all_keys` has the keys of each client. `rows` has an array for each tensor of an
    element. An array has one row for each key: first for the keys of the first client,
    then for the keys of the second client, and so on.
    """
    ends = itertools.accumulate(map(len, all_keys), initial=0)
    return [
        ColumnarSequence(tuple(Column(row[start:stop]) for row in rows), stop - start)
        for start, stop in itertools.pairwise(ends)
    ]


def check_keys(all_keys: Sequence[Any], max_key: int) -> None:
    """Raise ComputationError with the index of a client that has a wrong key.

    Keys must be from 0 to `max_key`. `all_keys` has the keys of each client.
    """
    for client_index, keys in enumerate(all_keys):
        if any(not 0 <= key <= max_key for key in keys):
            raise errors.ComputationError(
                f"Expected keys from 0 to max_key={max_key}, found"
                f" {np.asarray(keys).tolist()}",
                errors.Location(client_index=client_index),
            )


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a federated intrinsic.

    Attributes:
        strategy: Strategy that does the clients' work.
        unplaced: Executor that does the server's work.
        arg: Embedded argument, or None.
        type_spec: Type of the intrinsic in this call.
    """

    strategy: FederatingStrategy
    unplaced: flf.Executor
    arg: FederatedValue | None
    type_spec: fl.FunctionType

    @property
    def whole(self) -> FederatedValue:
        """The argument of an intrinsic that has one."""
        return type_checks.narrow(self.arg, FederatedValue, "FederatingExecutor")

    def part(self, index: int) -> FederatedValue:
        """Return an element of the argument, which is a struct."""
        part = self.whole.reference[index]
        return type_checks.narrow(part, FederatedValue, "FederatingExecutor")

    @property
    def result(self) -> fl.FederatedType:
        """The type of the result."""
        return cast("fl.FederatedType", self.type_spec.result)

    async def run(self, uri: str) -> FederatedValue:
        """Call the handler of the intrinsic `uri`, and return the embedded result."""
        returned = await HANDLERS[uri](self)
        if isinstance(returned, FederatedValue):
            return returned
        if type_checks.is_at_server(self.result):
            returned = await self.strategy.place(returned, self.result)
        return FederatedValue(returned, self.result)


Handler = Callable[[Call], Awaitable[Any]]
"""Async function that carries out an intrinsic. It returns a FederatedValue, a `Placed`
for a result at clients, or a value of the unplaced executor for a result at the
server."""


async def _value_at_server(call: Call) -> Any:
    return await unplaced_value(call.unplaced, call.whole)


async def _all_equal_at_clients(call: Call) -> Any:
    value = await unplaced_value(call.unplaced, call.whole)
    everywhere = fl.FederatedType(call.result.member, fl.CLIENTS, all_equal=True)
    placed = await call.strategy.place(value, everywhere)
    return FederatedValue(placed, call.result, Deferred(constant(value)))


async def _eval_at_server(call: Call) -> Any:
    return await call_at_server(call.unplaced, call.whole, None)


async def _eval_at_clients(call: Call) -> Any:
    function = await to_function(call.whole)
    return await call.strategy.map(function, None, call.result.member)


async def _map(call: Call) -> Any:
    function, argument = await to_function(call.part(0)), call.part(1).reference
    return await call.strategy.map(function, argument, call.result.member)


async def _map_all_equal(call: Call) -> Any:
    # If there are no clients, the server must compute the one result.
    mapped = await _map(call)
    function, equal = call.part(0), call.part(1).equal
    if equal is None:
        return mapped

    key = random_keys.current()

    async def call_once() -> flf.ExecutorValue:
        member = await equal.get()
        value = FederatedValue(member, member.type_signature)
        with random_keys.using(key):
            return await call_at_server(call.unplaced, function, value)

    return FederatedValue(mapped, call.result, Deferred(call_once))


async def _apply(call: Call) -> Any:
    value = await unplaced_value(call.unplaced, call.part(1))
    member = FederatedValue(value, value.type_signature)
    return await call_at_server(call.unplaced, call.part(0), member)


async def _zip_at_clients(call: Call) -> Any:
    return await call.strategy.map(None, _placed_arg(call.whole), call.result.member)


def _placed_arg(value: FederatedValue) -> PlacedArg:
    if isinstance(value.reference, structs.Struct):
        return structs.Struct(
            (name, _placed_arg(member))
            for name, member in structs.iter_elements(value.reference)
        )
    return cast("Placed", value.reference)


async def _aggregate(call: Call) -> Any:
    merged = await call.strategy.reduce(
        cast("Placed", call.part(0).reference),
        await unplaced_value(call.unplaced, call.part(1)),
        await to_function(call.part(2)),
        await to_function(call.part(3)),
    )
    partial = FederatedValue(merged, merged.type_signature)
    return await call_at_server(call.unplaced, call.part(4), partial)


def _derived(uri: str) -> Handler:
    async def handle(call: Call) -> Any:
        unplaced, strategy = call.unplaced, call.strategy
        value, bounds = call.whole, list[flf.ExecutorValue]()
        if uri in intrinsics.BOUNDED:
            value, bound = call.part(0), call.part(1)
            bounds = [await unplaced_value(unplaced, bound)]
        placed = await _zipped(strategy, value)
        types = [bound.type_signature for bound in bounds]
        derived = intrinsics.DERIVED_AGGREGATIONS[uri](placed.member, *types)
        if derived.check is not None:
            everywhere = fl.FederatedType(types[0], fl.CLIENTS, all_equal=True)
            # Each client checks its own value, because a sum hides values out of
            # bounds.
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
        if derived.report is None:
            return result
        report = await unplaced.create_value(derived.report)
        return await unplaced.create_call(report, result)

    return handle


async def _zipped(strategy: FederatingStrategy, value: FederatedValue) -> Placed:
    # A struct of placed values, such as <value, weight>, becomes a struct per client.
    if not isinstance(value.reference, structs.Struct):
        return cast("Placed", value.reference)
    elements = structs.iter_elements(value.reference)
    member = fl.StructType(
        [type_checks.member_type(part.type_signature) for _, part in elements]
    )
    return await strategy.map(None, _placed_arg(value), member)


async def _select(call: Call) -> Any:
    # The server evaluates the selection function: by one graph for all keys if
    # possible, otherwise by a call for each key. If the function may draw random
    # numbers, there is a call for each key of each client.
    all_keys = await cast("Placed", call.part(0).reference).compute()
    check_keys(all_keys, int(await call.part(1).compute()))
    unplaced, function = call.unplaced, call.part(3)
    state = await unplaced_value(unplaced, call.part(2))

    async def select(key: int) -> Any:
        embedded = await unplaced.create_value(np.int32(key), np.int32)
        pair = await unplaced.create_struct([state, embedded])
        argument = FederatedValue(pair, pair.type_signature)
        return await (await call_at_server(unplaced, function, argument)).compute()

    is_random = may_draw(function)
    # One call per key takes far longer than one graph for all keys.
    if not is_random:
        travelling = await to_function(function)
        by_client = await select_all(unplaced, travelling, state, all_keys)
        if by_client is not None:
            return await call.strategy.place(by_client, call.result)
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
    return await call.strategy.place(sequences, call.result)


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
"""The handler of each intrinsic, by URI."""

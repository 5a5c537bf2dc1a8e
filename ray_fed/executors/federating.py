r"""`FederatingExecutor`: carries out federated intrinsics on values with placements.

                 FederatingExecutor
                /                  \
    FederatingStrategy       unplaced executor
    values and work          unplaced values, and work
    at clients               at the server

The strategy has the clients' values. The unplaced executor has the server's values and
values without placement. A struct of placed values is embedded element by element. A
function is kept as it is until a call uses it.

`interpretation` defines the intrinsics by methods of the strategy. A strategy may also
implement intrinsics and placements of its own.
"""

from collections.abc import Callable
from typing import Any, cast

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.executors.interpretation as interpretation
import ray_fed.values.plain_values as plain_values
from ray_fed.executors.closure import Closure
from ray_fed.executors.fan_out import Once, gather_by_index
from ray_fed.executors.interpretation import Deferred, FederatedValue, unplaced_value
from ray_fed.executors.strategy import FederatingStrategy
from ray_fed.language import blocks, structs, type_checks
from ray_fed.values import stored
from ray_fed.values.client_references import check_same_clients, ids_by_client

flf = fl.framework

_UNPLACED_INTRINSICS = ("generic_", "sequence_", "ray_fed_")
"""Prefixes of the URIs of intrinsics that the unplaced executor implements."""


def _function_type(function: Closure | blocks.Function) -> fl.Type:
    if isinstance(function, Closure):
        return function.block.type_signature
    return function.building_block().type_signature


def _as_declared(
    reference: Any, own_type: fl.Type, type_spec: fl.Type | None
) -> FederatedValue:
    declared = own_type if type_spec is None else type_spec
    type_checks.check_assignable(declared, own_type, "a value")
    return FederatedValue(reference, declared)


def _embedded_already(
    value: FederatedValue, type_spec: fl.Type | None
) -> FederatedValue:
    own_type = value.type_signature
    if type_spec is not None and not type_spec.is_equivalent_to(own_type):
        raise errors.ValueMismatchError(
            f"Expected a value of type `{type_spec}`, found a value that is embedded as"
            f" `{own_type}`: compute the value, and embed the result."
        )
    return value


def _embed_intrinsic(
    definition: flf.IntrinsicDef, type_spec: fl.Type | None
) -> FederatedValue:
    if type_spec is None or flf.type_contains(
        type_spec, lambda t: isinstance(t, fl.AbstractType)
    ):
        raise errors.ValueMismatchError(
            f"Expected a concrete type for the intrinsic `{definition.uri}`, found"
            f" `{type_spec}`."
        )
    flf.check_concrete_instance_of(type_spec, definition.type_signature)
    return FederatedValue(flf.Intrinsic(definition.uri, type_spec), type_spec)


_NAME = "FederatingExecutor"


class FederatingExecutor(flf.Executor):
    """Carries out federated intrinsics by a strategy and an unplaced executor.

    Args:
        strategy_factory: Function from this executor to the strategy, which `close`
            closes.
        unplaced_executor: Executor of the server's work and of work without placement.
            `close` closes it.

    Attributes:
        strategy: Strategy that the factory returned.
        unplaced: The unplaced executor.

    Raises:
        ValueMismatchError: An argument is not a factory, or not an executor.
    """

    def __init__(
        self,
        strategy_factory: Callable[["FederatingExecutor"], FederatingStrategy],
        unplaced_executor: flf.Executor,
    ) -> None:
        type_checks.check_kind(unplaced_executor, flf.Executor, "unplaced_executor")
        if not callable(cast("Any", strategy_factory)):
            raise errors.ValueMismatchError(
                "Expected `strategy_factory` to make a strategy of an executor, found"
                f" {structs.show(strategy_factory)}."
            )
        self.unplaced = unplaced_executor
        self.strategy = strategy_factory(self)

    @override
    def close(self) -> None:
        self.strategy.close()
        self.unplaced.close()

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> FederatedValue:
        """Embed an intrinsic, placement, computation, or a value of any type.

        A value that is embedded here is returned unchanged, with its own type. A value
        of the unplaced executor can be embedded at the server, at all clients, or
        without placement.

        Args:
            value: The value. If the type differs by client, a list or a tuple with one
                value for each client.
            type_spec: Type of the value. It may be None if the value has a type.

        Raises:
            TypeError: Value and type do not match, or an intrinsic has no type.
            ValueError: This executor does not support values of this kind.
            KindMismatchError: A Python value has no type, or the type of a function.
                This error is a TypeError and a ValueError.
        """
        return self._own(await self._embed(value, type_spec))

    def _own(self, value: FederatedValue) -> FederatedValue:
        value.owner = self
        return value

    def _narrow(self, value: object) -> FederatedValue:
        narrowed = type_checks.narrow(value, FederatedValue, _NAME)
        if narrowed.owner not in (None, self):
            raise errors.ValueMismatchError(
                "Expected a value embedded in this FederatingExecutor, found a value of"
                f" type `{narrowed.type_signature}` in another executor: compute the"
                " value, and embed the result."
            )
        return narrowed

    async def _embed(self, value: Any, type_spec: Any) -> FederatedValue:
        type_spec = None if type_spec is None else fl.to_type(type_spec)
        match value:
            case flf.IntrinsicDef():
                return _embed_intrinsic(value, type_spec)
            case flf.PlacementLiteral():
                return _as_declared(value, fl.PlacementType(), type_spec)
            case Closure() | blocks.Function():
                return _as_declared(value, _function_type(value), type_spec)
            case FederatedValue():
                return _embedded_already(self._narrow(value), type_spec)
            case _:
                return await self._embed_python(value, type_spec)

    async def _embed_python(
        self, value: Any, type_spec: fl.Type | None
    ) -> FederatedValue:
        block = blocks.to_block(value)
        if isinstance(block, flf.Data):
            declared = type_spec or block.type_signature
            return await self._embed_value(
                plain_values.to_plain(block, declared), declared
            )
        if block is not None:
            return await self._embed_block(block, type_spec)
        if type_spec is None:
            raise errors.KindMismatchError(
                f"Expected a type for {structs.show(value)}, found none: pass"
                " `type_spec`."
            )
        if isinstance(type_spec, fl.FunctionType):
            raise errors.KindMismatchError(
                f"Expected a computation of type `{type_spec}`, found"
                f" {structs.show(value)}."
            )
        return await self._embed_value(value, type_spec)

    async def _embed_block(
        self, block: flf.ComputationBuildingBlock, type_spec: fl.Type | None
    ) -> FederatedValue:
        if type_spec is not None:
            type_checks.check_assignable(
                type_spec, block.type_signature, "a computation"
            )
        declared = type_spec or block.type_signature
        match block:
            case flf.Intrinsic():
                self._check_known(block.uri)
                return FederatedValue(block, declared)
            case flf.Lambda():
                return FederatedValue(block, declared)
            case flf.CompiledComputation() if blocks.is_tensorflow(block):
                return FederatedValue(block, declared)
            case flf.Placement():
                literal = flf.uri_to_placement_literal(block.uri)
                return FederatedValue(literal, declared)
            case flf.Literal():
                embedded = await self.unplaced.create_value(block, declared)
                return FederatedValue(embedded, declared)
            case _:
                raise errors.UnsupportedError(
                    "Expected an intrinsic, lambda, TensorFlow computation, placement,"
                    " literal or data, found"
                    f" `{blocks.show_block(block)}`: put a ReferenceResolvingExecutor"
                    " above this executor."
                )

    async def _embed_value(self, value: Any, type_spec: fl.Type) -> FederatedValue:
        if isinstance(value, flf.ExecutorValue):  # embedded in the unplaced executor
            declared = type_spec
            if isinstance(type_spec, fl.FederatedType):
                declared = type_spec.member
            type_checks.check_assignable(declared, value.type_signature, "a value")
        if isinstance(type_spec, fl.FederatedType):
            self._check_placement(type_spec)
            if type_spec.placement == fl.CLIENTS:
                return await self._embed_at_clients(value, type_spec)
            if type_spec.placement == fl.SERVER:
                value = await self._embed_unplaced(value, type_spec.member)
            placed = await self.strategy.place(value, type_spec)
            return FederatedValue(placed, type_spec)
        if type_checks.is_placed_struct(type_spec):
            struct = type_checks.struct_type(type_spec)
            elements = structs.struct_elements(value, struct)
            members = await gather_by_index(
                self._embed(member, t) for t, _, member in elements
            )
            check_same_clients(member.ids for member in members)
            names = [name for name, _ in struct.items()]
            return FederatedValue(
                structs.Struct(zip(names, members, strict=True)), type_spec
            )
        if isinstance(value, stored.External):  # it can be large and may not be needed
            read = self.unplaced.create_value
            return FederatedValue(Deferred(lambda: read(value, type_spec)), type_spec)
        embedded = await self._embed_unplaced(value, type_spec)
        return FederatedValue(embedded, type_spec)

    async def _embed_at_clients(
        self, value: Any, type_spec: fl.FederatedType
    ) -> FederatedValue:
        placed = await self.strategy.place(value, type_spec)
        if not type_spec.all_equal:
            embedded = FederatedValue(placed, type_spec)
            embedded.ids = ids_by_client(value)
            return embedded
        equal = Deferred(lambda: self._embed_unplaced(value, type_spec.member))
        return FederatedValue(placed, type_spec, equal)

    async def _embed_unplaced(self, value: Any, type_spec: fl.Type) -> Any:
        if isinstance(value, flf.ExecutorValue):
            return value
        return await self.unplaced.create_value(value, type_spec)

    def _check_placement(self, type_spec: fl.Type) -> None:
        placements = self.strategy.placements
        if isinstance(type_spec, fl.FederatedType) and (
            type_spec.placement not in placements
        ):
            names = sorted(placement.name for placement in placements)
            raise errors.UnsupportedError(
                f"Expected a value placed at one of {names}, found `{type_spec}`: the"
                " strategy implements no other placements."
            )

    def _check_known(self, uri: str) -> None:
        is_unplaced = uri.startswith(_UNPLACED_INTRINSICS)
        if uri not in self._implemented and not is_unplaced:
            raise errors.UnsupportedError(
                f"Expected one of {self._implemented}, or an intrinsic of sequences or"
                f" arithmetic, found the intrinsic `{uri}`."
            )

    @property
    def _implemented(self) -> list[str]:
        own = self.strategy.intrinsics
        uris = {*interpretation.HANDLERS, *own}
        return sorted(uri for uri in uris if own.get(uri, uri) is not None)

    @override
    async def create_call(
        self, comp: flf.ExecutorValue, arg: flf.ExecutorValue | None = None
    ) -> FederatedValue:
        """Call an intrinsic here, or a TensorFlow function in the unplaced executor.

        Raises:
            TypeError: `comp` or `arg` is not embedded here, `comp` is not a function,
                or the types do not match.
            ValueError: `comp` is a lambda or another function that cannot be called
                here.
            KindMismatchError: `comp` is federated_map_all_equal, and the clients'
                values may differ. This error is a TypeError and a ValueError.
            NotImplementedError: The intrinsic is not implemented.
        """
        function = self._narrow(comp)
        argument = None if arg is None else self._narrow(arg)
        _check_all_equal(function, argument)
        type_spec = type_checks.check_call(function, argument)
        match function.reference:
            case flf.Intrinsic() if self._is_federated(function.reference.uri):
                uri = function.reference.uri
                return self._own(await self._call_intrinsic(uri, argument, type_spec))
            case flf.Intrinsic() | flf.CompiledComputation() | flf.ExecutorValue():
                result = type_spec.result
                return self._own(await self._call_unplaced(function, argument, result))
            case _:
                raise errors.UnsupportedError(
                    "Expected an intrinsic or a TensorFlow computation to call, found"
                    f" the lambda `{type_spec}`: put a ReferenceResolvingExecutor above"
                    " this executor."
                )

    def _is_federated(self, uri: str) -> bool:
        return uri.startswith("federated_") or uri in self.strategy.intrinsics

    async def _call_intrinsic(
        self, uri: str, arg: FederatedValue | None, type_spec: fl.FunctionType
    ) -> FederatedValue:
        if uri not in self._implemented:
            raise errors.MissingIntrinsicError(
                f"Expected one of {self._implemented}, found the intrinsic `{uri}`."
            )
        self._check_placement(type_spec.result)
        own = self.strategy.intrinsics.get(uri)
        if own is None:
            call = interpretation.Call(self.strategy, self.unplaced, arg, type_spec)
            return await call.run(uri)
        result = await own(None if arg is None else await _resolve(arg), type_spec)
        return FederatedValue(result, type_spec.result)

    async def _call_unplaced(
        self, function: FederatedValue, arg: FederatedValue | None, result: fl.Type
    ) -> FederatedValue:
        embedded = function.reference
        if not isinstance(embedded, flf.ExecutorValue):
            embedded = await self.unplaced.create_value(
                embedded, function.type_signature
            )
        argument = None
        if arg is not None:
            argument = await self._embed_argument(arg)
        called = await self.unplaced.create_call(embedded, argument)
        return FederatedValue(called, result)

    async def _embed_argument(self, arg: FederatedValue) -> flf.ExecutorValue:
        if isinstance(arg.reference, Closure):
            function = await arg.reference.portable()
            return await self.unplaced.create_value(function)
        return await unplaced_value(self.unplaced, arg)

    @override
    async def create_struct(self, elements: Any) -> FederatedValue:
        """Combine embedded values to a struct with their names.

        Raises TypeError if an element is not embedded here, or if two elements have
        values of different clients at one index.
        """
        members = [
            (name, self._narrow(member))
            for name, member in structs.iter_elements(structs.to_struct(elements))
        ]
        check_same_clients(member.ids for _, member in members)
        type_spec = fl.StructType((name, m.type_signature) for name, m in members)
        return self._own(FederatedValue(structs.Struct(members), type_spec))

    @override
    async def create_selection(
        self, source: Any, index: int | None = None, name: str | None = None
    ) -> FederatedValue:
        struct = self._narrow(source)
        position = type_checks.select_index(struct.type_signature, index, name)
        type_spec = cast("fl.StructType", struct.type_signature)
        if isinstance(struct.reference, structs.Struct):
            return self._own(cast("FederatedValue", struct.reference[position]))
        inner = struct.reference
        if isinstance(inner, Once):
            inner = await inner.get()
        if not isinstance(inner, flf.ExecutorValue):
            raise errors.UnsupportedError(
                "Expected a struct of embedded values, found a"
                f" `{type(inner).__name__}`."
            )
        selected = await self.unplaced.create_selection(inner, position)
        return self._own(FederatedValue(selected, type_spec[position]))


async def _resolve(value: FederatedValue) -> Any:
    # An intrinsic of the strategy gets the references that `place` returned, values of
    # the unplaced executor, and Structs of these.
    match value.reference:
        case structs.Struct():
            pairs = list(structs.iter_elements(value.reference))
            members = [await _resolve(member) for _, member in pairs]
            names = [name for name, _ in pairs]
            return structs.Struct(zip(names, members, strict=True))
        case Once():
            return await value.reference.get()
        case _:
            return value.reference


def _check_all_equal(function: FederatedValue, argument: FederatedValue | None) -> None:
    uri = getattr(function.reference, "uri", None)
    if uri != flf.FEDERATED_MAP_ALL_EQUAL.uri or argument is None:
        return
    match argument.type_signature:
        case fl.StructType() as pair if any(
            type_checks.differs_by_client(element) for _, element in pair.items()
        ):
            raise errors.KindMismatchError(
                "Expected an all-equal value for federated_map_all_equal, found"
                f" `{pair}`: use federated_map."
            )
        case _:
            pass

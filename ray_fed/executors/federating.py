r"""Handles federated types and intrinsics; delegates clients and server to others.

                 FederatingExecutor
                /                  \
    FederatingStrategy       unplaced executor
    placed values            everything unplaced, and what runs at the server

The strategy says which placements and intrinsics it implements, and how. What an
intrinsic means by the strategy's verbs stands in one place (`interpretation`).

Each kind of value is embedded in its way: one at clients is placed by the strategy, a
struct of placed values element by element, a function is kept as it is, and the
unplaced executor has the rest.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.executors.interpretation as interpretation
import ray_fed.values.plain_values as plain_values
from ray_fed.executors.closure import Closure
from ray_fed.executors.interpretation import Deferred, FederatedValue, unplaced_value
from ray_fed.executors.strategy import FederatingStrategy
from ray_fed.language import blocks, structs, type_checks
from ray_fed.values import stored

flf = fl.framework

_UNPLACED_INTRINSICS = ("generic_", "sequence_", "ray_fed_")
"""Starts of the uris that the unplaced executor is asked to know."""


def _function_type(function: Closure | blocks.Function) -> fl.Type:
    if isinstance(function, Closure):
        return function.block.type_signature
    return function.building_block().type_signature


def _as_declared(
    reference: Any, own_type: fl.Type, type_spec: fl.Type | None
) -> FederatedValue:
    """Return what knows its type as a value of the type that was declared for it."""
    declared = own_type if type_spec is None else type_spec
    type_checks.check_assignable(declared, own_type, "a value")
    return FederatedValue(reference, declared)


def _embedded_already(
    value: FederatedValue, type_spec: fl.Type | None
) -> FederatedValue:
    own_type = value.type_signature
    if type_spec is not None and not type_spec.is_equivalent_to(own_type):
        raise errors.ValueMismatchError(
            f"Expected a value of type `{type_spec}`, found one that is embedded as"
            f" `{own_type}`: compute it, and embed what that returns."
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
    """Interprets federated types and intrinsics over a strategy.

    Args:
        strategy_factory: takes this executor and returns the strategy; owned.
        unplaced_executor: handles unplaced values and work; owned.

    Attributes:
        strategy: what the factory returned.
        unplaced: the unplaced executor.

    Raises:
        ValueMismatchError: an argument is no factory, or no executor.
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

        Computations (lambda, tensorflow) and data are held as they are until they are
        used.

        A value that is embedded here already is returned as it is, at its own type; one
        of the unplaced executor is taken at the server, at all clients or unplaced.

        Args:
            value: of one of these kinds; a list or a tuple for a type that differs by
                client.
            type_spec: of the value; may be None for what knows its type.

        Raises:
            TypeError: value and type do not match, or an intrinsic has no type.
            ValueError: the value is of a kind that this executor does not support.
            KindMismatchError: both of these: a Python value without a type, or at the
                type of a function.
        """
        return await self._embed(value, type_spec)

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
                return _embedded_already(value, type_spec)
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
        if isinstance(value, flf.ExecutorValue):  # of the unplaced executor
            declared = type_spec
            if isinstance(type_spec, fl.FederatedType):
                declared = type_spec.member
            type_checks.check_assignable(declared, value.type_signature, "a value")
        if isinstance(type_spec, fl.FederatedType):
            if type_spec.placement not in self.strategy.placements:
                names = sorted(p.name for p in self.strategy.placements)
                raise errors.UnsupportedError(
                    f"Expected a value placed at one of {names}, found `{type_spec}`."
                )
            if type_spec.placement == fl.CLIENTS:
                return await self._embed_at_clients(value, type_spec)
            if type_spec.placement == fl.SERVER:
                value = await self._embed_unplaced(value, type_spec.member)
            placed = await self.strategy.place(value, type_spec)
            return FederatedValue(placed, type_spec)
        if type_checks.is_placed_struct(type_spec):
            struct = type_checks.struct_type(type_spec)
            elements = structs.struct_elements(value, struct)
            members = await asyncio.gather(
                *(self._embed(member, t) for t, _, member in elements)
            )
            names = [name for name, _ in struct.items()]
            return FederatedValue(
                structs.Struct(zip(names, members, strict=True)), type_spec
            )
        if isinstance(value, stored.External):  # may be large, and never needed
            read = self.unplaced.create_value
            return FederatedValue(Deferred(lambda: read(value, type_spec)), type_spec)
        embedded = await self._embed_unplaced(value, type_spec)
        return FederatedValue(embedded, type_spec)

    async def _embed_at_clients(
        self, value: Any, type_spec: fl.FederatedType
    ) -> FederatedValue:
        placed = await self.strategy.place(value, type_spec)
        if not type_spec.all_equal:
            return FederatedValue(placed, type_spec)
        equal = Deferred(lambda: self._embed_unplaced(value, type_spec.member))
        return FederatedValue(placed, type_spec, equal)

    async def _embed_unplaced(self, value: Any, type_spec: fl.Type) -> Any:
        if isinstance(value, flf.ExecutorValue):
            return value
        return await self.unplaced.create_value(value, type_spec)

    def _check_known(self, uri: str) -> None:
        is_unplaced = uri.startswith(_UNPLACED_INTRINSICS)
        if uri not in self._implemented and not is_unplaced:
            raise errors.UnsupportedError(
                f"Expected one of {self._implemented}, or an intrinsic of sequences or"
                f" arithmetic, found the intrinsic `{uri}`."
            )

    @property
    def _implemented(self) -> list[str]:
        """The uris of the federated intrinsics that can be called, sorted."""
        own = self.strategy.intrinsics
        uris = {*interpretation.HANDLERS, *own}
        return sorted(uri for uri in uris if own.get(uri, uri) is not None)

    @override
    async def create_call(
        self, comp: flf.ExecutorValue, arg: flf.ExecutorValue | None = None
    ) -> FederatedValue:
        """Call an intrinsic here, a TensorFlow function in the unplaced executor.

        Raises:
            TypeError: `comp` or `arg` is not embedded here, `comp` is no function, or
                the types do not fit.
            ValueError: `comp` is of a kind that cannot be called here (a lambda).
            KindMismatchError: both of these: `comp` is federated_map_all_equal, and
                the value that it maps is not all-equal.
            NotImplementedError: the intrinsic is none that is implemented.
        """
        function = type_checks.narrow(comp, FederatedValue, _NAME)
        argument = (
            None if arg is None else type_checks.narrow(arg, FederatedValue, _NAME)
        )
        type_spec = function.type_signature
        if not isinstance(type_spec, fl.FunctionType):
            raise errors.ValueMismatchError(
                f"Expected a function to call, found a value of type `{type_spec}`."
            )
        _check_all_equal(function, argument)
        type_checks.check_argument(type_spec, argument)
        match function.reference:
            case flf.Intrinsic() if self._is_federated(function.reference.uri):
                uri = function.reference.uri
                return await self._call_intrinsic(uri, argument, type_spec)
            case flf.Intrinsic() | flf.CompiledComputation() | flf.ExecutorValue():
                return await self._call_unplaced(function, argument, type_spec.result)
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
        own = self.strategy.intrinsics.get(uri)
        if own is None:
            return await interpretation.HANDLERS[uri](self, arg, type_spec)
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
        return await unplaced_value(self, arg)

    @override
    async def create_struct(self, elements: Any) -> FederatedValue:
        """Combine embedded values to a struct, keeping names.

        Raises:
            TypeError: an element is not embedded here.
        """
        members = [
            (name, type_checks.narrow(member, FederatedValue, _NAME))
            for name, member in structs.iter_elements(structs.to_struct(elements))
        ]
        type_spec = fl.StructType((name, m.type_signature) for name, m in members)
        return FederatedValue(structs.Struct(members), type_spec)

    @override
    async def create_selection(
        self, source: Any, index: int | None = None, name: str | None = None
    ) -> FederatedValue:
        """Select an element of an embedded struct, by index or by name.

        Raises:
            TypeError: `source` is no struct embedded here, or has no such element.
            ValueError: both or neither of `index` and `name` are given, or `source` is
                a struct of a kind that this executor does not know.
        """
        struct = type_checks.narrow(source, FederatedValue, _NAME)
        position = type_checks.select_index(struct.type_signature, index, name)
        type_spec = cast("fl.StructType", struct.type_signature)
        if isinstance(struct.reference, structs.Struct):
            return cast("FederatedValue", struct.reference[position])
        inner = struct.reference
        if isinstance(inner, Deferred):
            inner = await inner.get()
        if not isinstance(inner, flf.ExecutorValue):
            raise errors.UnsupportedError(
                "Expected a struct of embedded values, found one that is a"
                f" `{type(inner).__name__}`."
            )
        selected = await self.unplaced.create_selection(inner, position)
        return FederatedValue(selected, type_spec[position])


async def _resolve(value: FederatedValue) -> Any:
    """Return what the strategy and the unplaced executor hold of a value."""
    match value.reference:
        case structs.Struct():
            pairs = list(structs.iter_elements(value.reference))
            members = [await _resolve(member) for _, member in pairs]
            names = [name for name, _ in pairs]
            return structs.Struct(zip(names, members, strict=True))
        case Deferred():
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

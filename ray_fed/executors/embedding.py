"""Embeds values of all kinds in a `FederatingExecutor`, by value and by type.

A value at clients is placed by the strategy, a struct of placed values is embedded
element by element, a function is held as it is, and the unplaced executor has the rest.
"""

import asyncio
from typing import Any

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.executors import interpretation
from ray_fed.executors.closure import Closure
from ray_fed.executors.federated_value import Deferred, FederatedValue
from ray_fed.executors.strategy import FederatingStrategy
from ray_fed.language import blocks, structs, type_checks
from ray_fed.values import plain_values, stored

flf = fl.framework

_UNPLACED_INTRINSICS = ("generic_", "sequence_", "ray_fed_")
"""Starts of the uris that the unplaced executor is asked to know."""


class Embedder:
    """Embeds values for one executor.

    Args:
        strategy: has the values at clients.
        unplaced: has all other values.
    """

    def __init__(self, strategy: FederatingStrategy, unplaced: flf.Executor) -> None:
        self._strategy, self._unplaced = strategy, unplaced

    @property
    def implemented(self) -> list[str]:
        """The uris of the federated intrinsics that can be called, sorted."""
        own = self._strategy.intrinsics
        found = {*interpretation.HANDLERS, *own}
        return sorted(uri for uri in found if own.get(uri, uri) is not None)

    async def embed(self, value: Any, type_spec: Any) -> FederatedValue:
        """Embed a value: see `FederatingExecutor.create_value`."""
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
                embedded = await self._unplaced.create_value(block, declared)
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
            if type_spec.placement not in self._strategy.placements:
                names = sorted(p.name for p in self._strategy.placements)
                raise errors.UnsupportedError(
                    f"Expected a value placed at one of {names}, found `{type_spec}`."
                )
            if type_spec.placement == fl.CLIENTS:
                return await self._embed_at_clients(value, type_spec)
            embedded = await self._embed_unplaced(value, type_spec.member)
            return FederatedValue(embedded, type_spec)
        if type_checks.is_placed_struct(type_spec):
            struct = type_checks.struct_type(type_spec)
            elements = structs.struct_elements(value, struct)
            members = await asyncio.gather(
                *(self.embed(member, t) for t, _, member in elements)
            )
            names = [name for name, _ in struct.items()]
            return FederatedValue(
                structs.Struct(zip(names, members, strict=True)), type_spec
            )
        if isinstance(value, stored.External):  # may be large, and never needed
            read = self._unplaced.create_value
            return FederatedValue(Deferred(lambda: read(value, type_spec)), type_spec)
        embedded = await self._embed_unplaced(value, type_spec)
        return FederatedValue(embedded, type_spec)

    async def _embed_at_clients(
        self, value: Any, type_spec: fl.FederatedType
    ) -> FederatedValue:
        placed = await self._strategy.place(value, type_spec)
        if not type_spec.all_equal:
            return FederatedValue(placed, type_spec)
        equal = Deferred(lambda: self._embed_unplaced(value, type_spec.member))
        return FederatedValue(placed, type_spec, equal)

    async def _embed_unplaced(self, value: Any, type_spec: fl.Type) -> Any:
        if isinstance(value, flf.ExecutorValue):
            return value
        return await self._unplaced.create_value(value, type_spec)

    def _check_known(self, uri: str) -> None:
        is_unplaced = uri.startswith(_UNPLACED_INTRINSICS)
        if uri not in self.implemented and not is_unplaced:
            raise errors.UnsupportedError(
                f"Expected one of {self.implemented}, or an intrinsic of sequences or"
                f" arithmetic, found the intrinsic `{uri}`."
            )


def _function_type(function: Closure | blocks.Function) -> fl.Type:
    if isinstance(function, Closure):
        return function.block.type_signature
    return function.building_block().type_signature


def _as_declared(
    reference: Any, found: fl.Type, type_spec: fl.Type | None
) -> FederatedValue:
    """Return what knows its type as a value of the type that was declared for it."""
    declared = found if type_spec is None else type_spec
    type_checks.check_assignable(declared, found, "a value")
    return FederatedValue(reference, declared)


def _embedded_already(
    value: FederatedValue, type_spec: fl.Type | None
) -> FederatedValue:
    found = value.type_signature
    if type_spec is not None and not type_spec.is_equivalent_to(found):
        raise errors.ValueMismatchError(
            f"Expected a value of type `{type_spec}`, found one that is embedded as"
            f" `{found}`: compute it, and embed what that returns."
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

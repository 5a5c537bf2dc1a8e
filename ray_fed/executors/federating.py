r"""Handles federated types and intrinsics; delegates clients and server to others.

                 FederatingExecutor
                /                  \
    FederatingStrategy       unplaced executor
    values at clients        values at the server, and everything unplaced

The strategy says which placements and intrinsics it implements, and how. What an
intrinsic means by the strategy's verbs stands in one place (`interpretation`).
"""

from collections.abc import Callable
from typing import Any, cast

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.executors import interpretation
from ray_fed.executors.closure import Closure
from ray_fed.executors.embedding import Embedder
from ray_fed.executors.federated_value import Deferred, FederatedValue, unplaced_value
from ray_fed.executors.strategy import FederatingStrategy
from ray_fed.language import structs, type_checks
from ray_fed.language.structs import Plain
from ray_fed.plan import plans
from ray_fed.plan.outcomes import Evaluated

flf = fl.framework
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
        self._embedder = Embedder(self.strategy, self.unplaced)

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
        return await self._embedder.embed(value, type_spec)

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
        if uri not in self._embedder.implemented:
            raise errors.MissingIntrinsicError(
                f"Expected one of {self._embedder.implemented}, found the intrinsic"
                f" `{uri}`."
            )
        own = self.strategy.intrinsics.get(uri)
        if own is None:
            return await interpretation.HANDLERS[uri](self, arg, type_spec)
        found = await own(None if arg is None else await _held(arg), type_spec)
        return FederatedValue(found, type_spec.result)

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

    async def fold(
        self, subround: Any, arg: Plain = None
    ) -> Evaluated | plans.NoKernel:
        """Have the strategy fold the clients of a subround: see its `fold`."""
        return await self.strategy.fold(subround, arg)

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


async def _held(value: FederatedValue) -> Any:
    """Return what the strategy and the unplaced executor hold of a value."""
    match value.reference:
        case structs.Struct():
            pairs = list(structs.iter_elements(value.reference))
            held = [await _held(member) for _, member in pairs]
            names = [name for name, _ in pairs]
            return structs.Struct(zip(names, held, strict=True))
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
            type_checks.differs_by_client(found) for _, found in pair.items()
        ):
            raise errors.KindMismatchError(
                "Expected an all-equal value for federated_map_all_equal, found"
                f" `{pair}`: use federated_map."
            )
        case _:
            pass

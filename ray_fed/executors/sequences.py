"""Maps, reduces and sums sequences, with functions of any kind.

A tf.data dataset can call a TensorFlow function, but no federated_language lambda. So
this executor reads the elements, and calls the function for each element, in order. The
random numbers of a call depend on the index of its element.
"""

from typing import Any, cast

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.executors.closure import Closure
from ray_fed.executors.embedded_value import EmbeddedValue
from ray_fed.language import intrinsics, structs, type_checks
from ray_fed.plan import random_keys

flf = fl.framework
_MAP = "sequence_map"
_REDUCE = "sequence_reduce"
_SUM = "sequence_sum"


class SequenceValue(EmbeddedValue):
    """A sequence intrinsic, a lambda, or a struct that contains one of these.

    The target executor does not know these values. It has all other values.
    """


class SequenceExecutor(flf.Executor):
    """Adds the intrinsics for sequences to a target executor, which `close` closes."""

    def __init__(self, target_executor: flf.Executor) -> None:
        self._target = target_executor

    @override
    def close(self) -> None:
        self._target.close()

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> Any:
        if isinstance(value, flf.Intrinsic) and value.uri in (_MAP, _REDUCE, _SUM):
            return SequenceValue(value, value.type_signature)
        if isinstance(value, Closure):
            return SequenceValue(value, value.block.type_signature)
        return await self._target.create_value(value, type_spec)

    @override
    async def create_call(
        self, comp: flf.ExecutorValue, arg: flf.ExecutorValue | None = None
    ) -> Any:
        if not isinstance(comp, SequenceValue):
            return await self._target.create_call(comp, arg)
        if isinstance(comp.reference, Closure):
            return await comp.reference(arg)
        if arg is None:
            raise errors.ValueMismatchError(
                f"Expected an argument for `{comp.type_signature}`, found none."
            )
        match type_checks.narrow(comp.reference, flf.Intrinsic, "SequenceExecutor").uri:
            case "sequence_map":
                return await self._map(arg)
            case "sequence_reduce":
                sequence, zero, operator = [await self._at(arg, i) for i in range(3)]
                return await self._reduce(sequence, zero, operator)
            case _:
                return await self._sum(arg)

    @override
    async def create_struct(self, elements: Any) -> Any:
        struct = structs.to_struct(elements)
        if not any(isinstance(member, SequenceValue) for member in struct):
            return await self._target.create_struct(struct)
        type_spec = fl.StructType(
            (name, member.type_signature)
            for name, member in structs.iter_elements(struct)
        )
        return SequenceValue(struct, type_spec)

    @override
    async def create_selection(self, source: Any, index: int) -> Any:
        if isinstance(source, SequenceValue):
            type_checks.select_index(source.type_signature, index, None)
            return source.reference[index]
        return await self._target.create_selection(source, index)

    async def _at(self, arg: Any, index: int) -> Any:
        return await self.create_selection(arg, index)

    async def _elements(self, sequence: flf.ExecutorValue) -> list[Any]:
        element = cast("fl.SequenceType", sequence.type_signature).element
        return [
            await self._target.create_value(member, element)
            for member in await sequence.compute()
        ]

    async def _map(self, arg: Any) -> Any:
        function = await self._at(arg, 0)
        members: list[Any] = []
        elements = await self._elements(await self._at(arg, 1))
        for index, element in enumerate(elements):
            with random_keys.at_step(_MAP, index):
                called = await self.create_call(function, element)
            members.append(await called.compute())
        result = cast("fl.FunctionType", function.type_signature).result
        return await self._target.create_value(members, fl.SequenceType(result))

    async def _reduce(self, sequence: Any, zero: Any, operator: Any) -> Any:
        accumulator = zero
        for index, element in enumerate(await self._elements(sequence)):
            pair = await self._target.create_struct([accumulator, element])
            with random_keys.at_step(_REDUCE, index):
                accumulator = await self.create_call(operator, pair)
        return accumulator

    async def _sum(self, sequence: flf.ExecutorValue) -> Any:
        element = cast("fl.SequenceType", sequence.type_signature).element
        derived = intrinsics.DERIVED_AGGREGATIONS[flf.FEDERATED_SUM.uri](element)
        zeros = await self._target.create_value(derived.zero)
        zero = await self._target.create_call(zeros)
        plus = await self._target.create_value(derived.accumulate)
        return await self._reduce(sequence, zero, plus)

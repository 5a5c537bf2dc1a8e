"""Evaluates the building blocks with names: lambdas, blocks, calls and structs.

The executor below, the target, gets only building blocks without free names. If a
lambda is an argument, for example of an intrinsic, the target gets a `Closure`: the
lambda with its captured values. A local name of a block is evaluated once, when it is
first needed, in a task of its own. So independent names are evaluated at the same time,
and a long chain of names needs no deep recursion.
"""

from collections.abc import Callable, Coroutine
from typing import Any, cast

import federated_language as fl
from typing_extensions import override

import ray_fed.values.plain_values as plain_values
from ray_fed.executors.closure import (
    Closure,
    ResolvedValue,
    Scope,
    ScopedLambda,
    constant,
    split_captures,
)
from ray_fed.executors.fan_out import gather_by_index
from ray_fed.language import blocks, intrinsics, structs, type_checks
from ray_fed.plan import random_keys

flf = fl.framework
_NAME = "ReferenceResolvingExecutor"


class ReferenceResolvingExecutor(flf.Executor):
    """Resolves names, so that its target needs to know neither lambdas nor blocks.

    `target_executor` runs building blocks without names. `close` closes it.
    """

    def __init__(self, target_executor: flf.Executor) -> None:
        type_checks.check_kind(target_executor, flf.Executor, "target_executor")
        self._target = target_executor

    @override
    def close(self) -> None:
        self._target.close()

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> ResolvedValue:
        """Embed a computation, a `blocks.Function`, or any value of the target.

        Raises TypeError if the value is not of the type, and ValueError if the target
        does not know values of this kind.
        """
        type_spec = None if type_spec is None else fl.to_type(type_spec)
        if isinstance(value, blocks.Function) and value.captured:
            return await self._embed_function(value)
        if isinstance(value, blocks.Function):
            value = value.building_block()
        block = blocks.to_block(value)
        if isinstance(block, flf.Data) and isinstance(type_spec, fl.FederatedType):
            value, block = plain_values.to_plain(block, type_spec), None
        if block is None:
            embedded = await self._target.create_value(value, type_spec)
            return ResolvedValue(embedded, embedded.type_signature)
        if type_spec is not None:
            type_checks.check_assignable(
                type_spec, block.type_signature, "a computation"
            )
        resolved = await self._evaluate(block, Scope())
        return ResolvedValue(resolved.reference, type_spec or resolved.type_signature)

    async def _embed_function(self, function: blocks.Function) -> ResolvedValue:
        scope = Scope()
        for name, type_bytes, value in function.captured:
            embedded = await self.create_value(value, blocks.parse_type(type_bytes))
            scope.bind(name, constant(embedded))
        return await self._evaluate(function.building_block(), scope)

    @override
    async def create_call(
        self, comp: flf.ExecutorValue, arg: flf.ExecutorValue | None = None
    ) -> ResolvedValue:
        """Evaluate a lambda here. The target calls all other functions.

        Raises TypeError if `comp` is not a function, or does not accept `arg`.
        """
        function = type_checks.narrow(comp, ResolvedValue, _NAME)
        argument = (
            None if arg is None else type_checks.narrow(arg, ResolvedValue, _NAME)
        )
        type_checks.check_call(function, argument)
        if isinstance(function.reference, ScopedLambda):
            return await self._call_lambda(function.reference, argument)
        embedded = None if argument is None else await self._embed(argument)
        result = await self._target.create_call(function.reference, embedded)
        return ResolvedValue(result, result.type_signature)

    async def _call_lambda(
        self, scoped: ScopedLambda, argument: ResolvedValue | None
    ) -> ResolvedValue:
        scope = Scope(scoped.scope)
        if argument is not None and scoped.block.parameter_name is not None:
            scope.bind(scoped.block.parameter_name, constant(argument))
        return await self._evaluate(scoped.block.result, scope)

    @override
    async def create_struct(self, elements: Any) -> ResolvedValue:
        members = [
            (name, type_checks.narrow(member, ResolvedValue, _NAME))
            for name, member in structs.iter_elements(structs.to_struct(elements))
        ]
        type_spec = fl.StructType((name, m.type_signature) for name, m in members)
        return ResolvedValue(structs.Struct(members), type_spec)

    @override
    async def create_selection(
        self, source: Any, index: int | None = None, name: str | None = None
    ) -> ResolvedValue:
        struct = type_checks.narrow(source, ResolvedValue, _NAME)
        position = type_checks.select_index(struct.type_signature, index, name)
        if isinstance(struct.reference, structs.Struct):
            return cast("ResolvedValue", struct.reference[position])
        selected = await self._target.create_selection(struct.reference, position)
        return ResolvedValue(selected, selected.type_signature)

    async def _evaluate(
        self, block: flf.ComputationBuildingBlock, scope: Scope
    ) -> ResolvedValue:
        match block:
            case flf.Reference():
                return await scope.resolve(block.name)
            case flf.Lambda():
                return ResolvedValue(ScopedLambda(block, scope), block.type_signature)
            case flf.Call():
                return await self._evaluate_call(block, scope)
            case flf.Selection():
                source = await self._evaluate(block.source, scope)
                position = block.as_index()
                return await self.create_selection(source, position)
            case flf.Struct():
                return await self._evaluate_struct(block, scope)
            case flf.Block():
                return await self._evaluate_block(block, scope)
            case flf.Intrinsic(uri=intrinsics.GENERIC_ZERO_URI):
                zeros = intrinsics.zeros_of(block.type_signature)
                return await self._evaluate_call(flf.Call(zeros), scope)
            case _:
                value = _unwrap(block)
                embedded = await self._target.create_value(value, block.type_signature)
                return ResolvedValue(embedded, block.type_signature)

    async def _evaluate_call(self, block: flf.Call, scope: Scope) -> ResolvedValue:
        if block.argument is None:
            return await self.create_call(await self._evaluate(block.function, scope))
        function, argument = await gather_by_index(
            [
                self._evaluate(block.function, scope),
                self._evaluate_part(block.argument, "argument", scope),
            ]
        )
        return await self.create_call(function, argument)

    async def _evaluate_struct(self, block: flf.Struct, scope: Scope) -> ResolvedValue:
        pairs = list(block.items())
        members = await gather_by_index(
            self._evaluate_part(b, i, scope) for i, (_, b) in enumerate(pairs)
        )
        elements = [(name, m) for (name, _), m in zip(pairs, members, strict=True)]
        return ResolvedValue(structs.Struct(elements), block.type_signature)

    async def _evaluate_block(self, block: flf.Block, scope: Scope) -> ResolvedValue:
        for name, local in block.locals:
            outer, scope = scope, Scope(scope)
            scope.bind(name, self._local(name, local, outer))
        return await self._evaluate_part(block.result, "result", scope)

    async def _evaluate_part(
        self, part: flf.ComputationBuildingBlock, where: str | int, scope: Scope
    ) -> ResolvedValue:
        # The position of the part in its building block keys its random numbers.
        name = blocks.operand_name(part, where)
        if name is None:
            return await self._evaluate(part, scope)
        with random_keys.at_local(name):
            return await self._evaluate(part, scope)

    def _local(
        self, name: str, block: flf.ComputationBuildingBlock, scope: Scope
    ) -> Callable[[], Coroutine[Any, Any, ResolvedValue]]:
        # Any part may need the local first. Its random numbers must not depend on that,
        # so they are keyed by the block.
        key = random_keys.current()

        async def evaluate() -> ResolvedValue:
            with random_keys.using(key), random_keys.at_local(name):
                return await self._evaluate(block, scope)

        return evaluate

    async def _embed(self, value: ResolvedValue) -> flf.ExecutorValue:
        match value.reference:
            case flf.ExecutorValue():
                return value.reference
            case structs.Struct():
                pairs = list(structs.iter_elements(value.reference))
                members = await gather_by_index(self._embed(m) for _, m in pairs)
                names = [name for name, _ in pairs]
                return await self._target.create_struct(
                    structs.Struct(zip(names, members, strict=True))
                )
            case _:
                closure = await self._close_over(value.reference)
                return await self._target.create_value(closure, value.type_signature)

    async def _close_over(self, scoped: ScopedLambda) -> Any:
        block, paths = split_captures(scoped.block)
        captured: dict[str, flf.ExecutorValue] = {}
        for name, (root, path) in paths.items():
            value = await scoped.scope.resolve(root)
            for index in path:
                value = await self.create_selection(value, index)
            captured[name] = await self._embed(value)

        async def call(arg: flf.ExecutorValue | None) -> flf.ExecutorValue:
            argument = None if arg is None else ResolvedValue(arg, arg.type_signature)
            return await self._embed(await self._call_lambda(scoped, argument))

        return Closure(block, captured, call)


def _unwrap(block: flf.ComputationBuildingBlock) -> Any:
    match block:
        case flf.Literal():
            return block.value
        case _:
            return block

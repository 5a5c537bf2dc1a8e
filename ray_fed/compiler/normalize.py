"""Flattens a computation to a list of named calls, in an order in which they can run.

Lambdas are applied, local names and selections are resolved, and structs are taken
apart. Only calls of intrinsics and of TensorFlow remain:

    (x -> (let y = f(x) in <y, g(y)>))      becomes      v0 = f(x); v1 = g(v0)
                                                         result <v0, v1>

A lambda that is an argument of an intrinsic keeps its body, which is normalized in the
same way. It may capture names of the outer list.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, cast

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.compiler.expressions import select
from ray_fed.language import intrinsics

flf = fl.framework
Block = flf.ComputationBuildingBlock


@dataclasses.dataclass(frozen=True)
class CallGraph:
    """A computation as named calls.

    Attributes:
        parameter: The parameter of the computation, or None if there is none.
        calls: Pairs of a name and a call. Each call refers to earlier names only.
        result: A block of references, selections, structs, literals and functions.
    """

    parameter: flf.Reference | None
    calls: tuple[tuple[str, Block], ...]
    result: Block


@dataclasses.dataclass(frozen=True)
class _BoundLambda:
    """A lambda, and the evaluated values of the names that it can refer to."""

    block: flf.Lambda
    names: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class _Elements:
    """A struct with evaluated elements, which can be `_BoundLambda`s."""

    elements: tuple[tuple[str | None, Any], ...]
    container: type[Any] | None


def normalize(block: Block) -> CallGraph:
    """Return a function as named calls. Raise CompileError for any other block."""
    type_spec = block.type_signature
    if not isinstance(type_spec, fl.FunctionType):
        raise errors.CompileError(f"Expected a function, found `{type_spec}`.")
    fresh = (f"v{index}" for index in itertools.count())
    parameter = None
    if type_spec.parameter is not None:
        parameter = flf.Reference("argument", type_spec.parameter)
    trace = _Trace(fresh)
    result = trace.reify(trace.apply(trace.evaluate(block, {}), parameter))
    result = trace.retype(result, type_spec.result)
    return CallGraph(parameter, tuple(trace.calls), result)


class _Trace:
    """Evaluates building blocks and collects the calls of one body, in order."""

    def __init__(self, fresh: Iterator[str]) -> None:
        self._fresh = fresh
        self.calls: list[tuple[str, Block]] = []

    def evaluate(self, block: Block, names: Mapping[str, Any]) -> Any:
        # The value is a resolved block, a `_BoundLambda` or `_Elements`.
        match block:
            case flf.Reference():
                return _look_up(block.name, names)
            case flf.Lambda():
                return _BoundLambda(block, names)
            case flf.Block():
                for name, local in block.locals:  # closures keep the earlier mapping
                    names = {**names, name: self.evaluate(local, names)}
                return self.evaluate(block.result, names)
            case flf.Struct():
                elements = tuple(
                    (name, self.evaluate(element, names))
                    for name, element in block.items()
                )
                container = cast("Any", block.type_signature).python_container
                return _Elements(elements, container)
            case flf.Selection():
                return _select(self.evaluate(block.source, names), block.as_index())
            case flf.Call():
                return self._call(block, names)
            case flf.Intrinsic(uri=intrinsics.GENERIC_ZERO_URI):
                return self.apply(intrinsics.zeros_of(block.type_signature), None)
            case _:
                return block

    def _call(self, block: flf.Call, names: Mapping[str, Any]) -> Any:
        function = self.evaluate(block.function, names)
        if block.argument is None:
            return self.apply(function, None)
        return self.apply(function, self.evaluate(block.argument, names))

    def apply(self, function: Any, argument: Any) -> Any:
        # A lambda is evaluated here. Any other call is added by a new name.
        if isinstance(function, _BoundLambda):
            names = dict(function.names)
            if function.block.parameter_name is not None:
                names[function.block.parameter_name] = argument
            return self.evaluate(function.block.result, names)
        reified = None if argument is None else self.reify(argument)
        call = flf.Call(self.reify(function), reified)
        name = next(self._fresh)
        self.calls.append((name, call))
        return flf.Reference(name, call.type_signature)

    def reify(self, value: Any) -> Block:
        match value:
            case _Elements():
                elements = [(name, self.reify(e)) for name, e in value.elements]
                return flf.Struct(elements, value.container)
            case _BoundLambda():
                return self._reify_closure(value)
            case _:
                return value

    def retype(self, value: Block, declared: fl.Type) -> Block:
        # After a lambda is applied, a value has the type of the lambda's argument. It
        # can have other names of elements, or be all equal.
        own_type = value.type_signature
        if own_type == declared:
            return value
        match declared:
            case fl.StructType():
                elements = [
                    (name, self.retype(_select(value, index), element))
                    for index, (name, element) in enumerate(declared.items())
                ]
                return flf.Struct(elements, declared.python_container)
            case fl.FederatedType() if str(own_type) != str(declared):
                return self._retype_members(value, declared)
            case _:
                return value

    def _retype_members(self, value: Block, declared: fl.FederatedType) -> Block:
        own_type = cast("fl.FederatedType", value.type_signature)
        member = flf.Reference(next(self._fresh), own_type.member)
        inner = _Trace(self._fresh)
        result = inner.retype(member, declared.member)
        fn = flf.Lambda(member.name, member.type_signature, result)
        if declared.all_equal:
            call = flf.create_federated_map_or_apply(fn, value)
        else:
            call = flf.create_federated_map(fn, value)
        name = next(self._fresh)
        self.calls.append((name, call))
        return flf.Reference(name, call.type_signature)

    def _reify_closure(self, closure: _BoundLambda) -> Block:
        inner = _Trace(self._fresh)
        parameter = None
        parameter_type = closure.block.parameter_type
        if parameter_type is not None:
            parameter = flf.Reference(next(self._fresh), parameter_type)
        result = inner.reify(inner.apply(closure, parameter))
        body = _body(inner.calls, result)
        name = None if parameter is None else parameter.name
        return flf.Lambda(name, parameter_type, body)


def _body(calls: list[tuple[str, Block]], result: Block) -> Block:
    # A single call of a TensorFlow computation is returned as it is, so that executors
    # without lambdas recognize the lambda as this computation.
    match calls, result:
        case [(name, flf.Call(function=flf.CompiledComputation()) as call)], (
            flf.Reference(name=returned)
        ) if returned == name and isinstance(call.argument, flf.Reference):
            return call
        case [], _:
            return result
        case _:
            return flf.Block(calls, result)


def _look_up(name: str, names: Mapping[str, Any]) -> Any:
    if name not in names:
        raise errors.CompileError(f"Expected a bound name, found `{name}`.")
    return names[name]


def _select(source: Any, index: int) -> Any:
    if isinstance(source, _Elements):
        return source.elements[index][1]
    return select(source, index)

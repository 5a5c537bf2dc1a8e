"""Evaluates a computation symbolically to a list of calls, each with a name.

Lambdas are applied, blocks and selections resolved, structs taken apart; what is left
are calls of intrinsics and of TensorFlow, in an order in which they can run:

    (x -> (let y = f(x) in <y, g(y)>))      becomes      v0 = f(x); v1 = g(v0)
                                                         result <v0, v1>

A lambda that is an argument of an intrinsic keeps its body, normalised the same way,
and may capture names of the outer list.

Replaces what a building block captures, and lists the names that it uses itself.
"""

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.language import blocks, intrinsics

flf = fl.framework
Block = flf.ComputationBuildingBlock
_Replace: TypeAlias = Callable[[Block], Block | None]


def replace_free(
    block: Block, replace: _Replace, bound: frozenset[str] = frozenset()
) -> Block:
    """Replace what refers to, or selects from, names that a block does not bind.

    Args:
        block: to return a changed copy of.
        replace: takes a free reference, or the longest selection from one; returns
            None for what is to stay.
        bound: names that are bound around the block.
    """
    root = root_name(block)
    if root is not None:
        return block if root in bound else replace(block) or block
    match block:
        case flf.Lambda():
            inner = bound | {block.parameter_name or ""}
            body = replace_free(block.result, replace, inner)
            return flf.Lambda(block.parameter_name, block.parameter_type, body)
        case flf.Block():
            locals_: list[tuple[str, Block]] = []
            for name, local in block.locals:
                locals_.append((name, replace_free(local, replace, bound)))
                bound |= {name}
            return flf.Block(locals_, replace_free(block.result, replace, bound))
        case flf.Struct():
            elements = [(n, replace_free(e, replace, bound)) for n, e in block.items()]
            container = cast("Any", block.type_signature).python_container
            return flf.Struct(elements, container)
        case flf.Call():
            function = replace_free(block.function, replace, bound)
            if block.argument is None:
                return flf.Call(function)
            return flf.Call(function, replace_free(block.argument, replace, bound))
        case flf.Selection():
            source = replace_free(block.source, replace, bound)
            return flf.Selection(source, index=block.as_index())
        case _:
            return block


def root_name(block: Block) -> str | None:
    """Return the name that a block refers to or selects from."""
    while isinstance(block, flf.Selection):
        block = block.source
    return block.name if isinstance(block, flf.Reference) else None


def called_uris(block: Block) -> set[str]:
    """Return the uris of all intrinsics in a building block."""
    parts = blocks.find_blocks(block, lambda _: True)
    return {part.uri for part in parts if isinstance(part, flf.Intrinsic)}


def zip_at_server(values: Sequence[Block]) -> Block:
    """Return server-placed values as one, of a struct; there may be none."""
    if not values:
        return flf.create_federated_value(flf.Struct([]), fl.SERVER)
    return flf.create_federated_zip(flf.Struct(list(values)))


def select(source: Block, index: int) -> Block:
    """Return an element of a struct, without a selection where it is written out."""
    if isinstance(source, flf.Struct):
        return cast("Any", source)[index]
    return flf.Selection(source, index=index)


def close_over(
    parameter: flf.Reference | None, locals_: Sequence[tuple[str, Block]], result: Block
) -> flf.Lambda:
    """Return a function of a parameter, or of none, with locals."""
    body = flf.Block(locals_, result) if locals_ else result
    if parameter is None:
        return flf.Lambda(None, None, body)
    return flf.Lambda(parameter.name, parameter.type_signature, body)


@dataclasses.dataclass(frozen=True)
class CallGraph:
    """A computation as named calls.

    Attributes:
        parameter: the reference that stands for the argument, or None.
        calls: (name, call), each of which refers to earlier names only.
        result: of references, selections, structs, literals and functions.
    """

    parameter: flf.Reference | None
    calls: tuple[tuple[str, Block], ...]
    result: Block


@dataclasses.dataclass(frozen=True)
class _Closure:
    """A lambda and what its names stand for."""

    block: flf.Lambda
    names: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class _Elements:
    """A struct whose elements may be closures."""

    elements: tuple[tuple[str | None, Any], ...]
    container: type[Any] | None


def normalize(block: Block) -> CallGraph:
    """Return the calls that a functional building block makes.

    Raises:
        CompileError: the block is no function, or has free references.
    """
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
    """Evaluates building blocks; collects the calls of one body in order."""

    def __init__(self, fresh: Iterator[str]) -> None:
        self._fresh = fresh
        self.calls: list[tuple[str, Block]] = []

    def evaluate(self, block: Block, names: Mapping[str, Any]) -> Any:
        """Return a building block without names to resolve, a closure, or elements."""
        match block:
            case flf.Reference():
                return _look_up(block.name, names)
            case flf.Lambda():
                return _Closure(block, names)
            case flf.Block():
                for name, local in block.locals:  # lambdas keep the names they saw
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
        """Return the result of a call: evaluated for a lambda, else a new name."""
        if isinstance(function, _Closure):
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
        """Return what was evaluated as one building block."""
        match value:
            case _Elements():
                elements = [(name, self.reify(e)) for name, e in value.elements]
                return flf.Struct(elements, value.container)
            case _Closure():
                return self._reify_closure(value)
            case _:
                return value

    def retype(self, value: Block, declared: fl.Type) -> Block:
        """Return a value as one of a type that its own is assignable to.

        Applying a lambda may have left it the narrower type of an argument: with other
        names, or all equal where the lambda's parameter need not be.
        """
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

    def _reify_closure(self, closure: _Closure) -> Block:
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
    """Return the body of a lambda that makes some calls.

    A single one of a TensorFlow computation stays as federated_language writes it: so
    executors that know no lambdas see that the lambda is this computation.
    """
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
        raise errors.CompileError(f"Expected a name that is bound, found `{name}`.")
    return names[name]


def _select(source: Any, index: int) -> Any:
    if isinstance(source, _Elements):
        return source.elements[index][1]
    return select(source, index)


def free_references(block: Block) -> frozenset[str]:
    """Return the names that a building block refers to and does not bind."""
    match block:
        case flf.Reference():
            return frozenset([block.name])
        case flf.Lambda():
            return free_references(block.result) - {block.parameter_name or ""}
        case flf.Block():
            free: set[str] = set()
            bound: set[str] = set()
            for name, local in block.locals:
                free |= free_references(local) - bound
                bound.add(name)
            return frozenset(free | (free_references(block.result) - bound))
        case _:
            by_child = [free_references(child) for child in block.children()]
            return frozenset[str]().union(*by_child)


def needed_names(
    roots: Iterable[str], calls: Mapping[str, Block], known: Container[str] = ()
) -> frozenset[str]:
    """Return the names of calls that `roots` need, themselves included.

    Args:
        roots: names; those of no call count for nothing.
        calls: by name.
        known: names of values that are there, behind which nothing is needed.
    """
    needed: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name in calls and name not in needed:
            needed.add(name)
            if name not in known:
                pending.extend(free_references(calls[name]))
    return frozenset(needed)

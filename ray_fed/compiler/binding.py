"""Moves the functions in an argument into the computation that is called.

    comp: (<f=(a -> b), x=c> -> d),  <f=g, x=1>   ->   (x -> comp(<f=g, x=x>)),  <x=1>

The rest of the argument has only values, which can be checked, stored and sent.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import federated_language as fl

import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
from ray_fed.compiler.form import function_type_of
from ray_fed.language import blocks, structs, type_checks
from ray_fed.language.structs import Plain
from ray_fed.values import read_limits
from ray_fed.values.client_references import ListCache

flf = fl.framework
Block = flf.ComputationBuildingBlock


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A part of an argument without its functions.

    `type_spec` is None if nothing remains. `build` maps a block of the remaining value
    to the block of the whole part, with its functions.
    """

    type_spec: fl.Type | None
    value: Any
    build: Callable[[Any], Block]


def read_invocation(
    comp: Any, arg: Any, limits: read_limits.Limits, lists: ListCache | None = None
) -> tuple[Any, Plain]:
    """Return a computation without functions in its parameter, and its plain argument.

    `comp` is a computation or a `MergeableCompForm`. `arg` has a computation where the
    parameter's type has a function. `limits` apply while the argument is read, and
    `lists` recognizes lists of clients that are passed again. Raises TypeError if `arg`
    does not have the parameter's type, or `comp` is not a computation.
    """
    type_checks.check_no_argument(function_type_of(comp), arg)
    with read_limits.limited(limits):
        comp, arg = bind_functions(comp, arg)
        parameter = comp.type_signature.parameter
        if parameter is None:
            return comp, None
        return comp, plain_values.to_plain(arg, parameter, "the argument", lists)


def bind_functions(comp: Any, arg: Any) -> tuple[Any, Any]:
    """Return `comp` with the functions of `arg` inside, and the rest of `arg`.

    If `comp` is not a `ConcreteComputation`, both are returned unchanged. Raises
    ValueMismatchError if `arg` has anything but a computation of the right type where
    the parameter has a function.
    """
    if not isinstance(comp, flf.ConcreteComputation):
        return comp, arg
    parameter = comp.type_signature.parameter
    if parameter is None or not type_checks.holds_functions(parameter):
        return comp, arg
    bound = _bind(arg, parameter, "the argument")
    block = type_checks.narrow(blocks.to_block(comp), Block, "a computation")
    if bound.type_spec is None:
        wrapped = flf.Lambda(None, None, flf.Call(block, bound.build(None)))
    else:
        rest = flf.Reference("rest", bound.type_spec)
        call = flf.Call(block, bound.build(rest))
        wrapped = flf.Lambda(rest.name, rest.type_signature, call)
    return flf.ConcreteComputation.from_building_block(wrapped), bound.value


def _bind(value: Any, type_spec: fl.Type, label: str) -> _Bound:
    if isinstance(type_spec, fl.FunctionType):
        function = _to_function(value, type_spec, label)
        return _Bound(None, None, lambda _: function)
    if not isinstance(type_spec, fl.StructType) or not type_checks.holds_functions(
        type_spec
    ):
        return _Bound(type_spec, value, lambda source: source)
    names = [name for name, _ in type_spec.items()]
    elements = structs.struct_elements(value, type_spec, label)
    bound = [_bind(element, part, inside) for part, inside, element in elements]
    kept = [
        (name, part)
        for name, part in zip(names, bound, strict=True)
        if part.type_spec is not None
    ]

    def build(source: Any) -> Block:
        # `source` has only the elements that are no functions, at other indices.
        left = (flf.Selection(source, index=index) for index in range(len(kept)))
        return flf.Struct(
            (name, part.build(None if part.type_spec is None else next(left)))
            for name, part in zip(names, bound, strict=True)
        )

    if not kept:
        return _Bound(None, None, build)
    left_type = fl.StructType((name, part.type_spec) for name, part in kept)
    left_value = structs.Struct((name, part.value) for name, part in kept)
    return _Bound(left_type, left_value, build)


def _to_function(value: Any, type_spec: fl.FunctionType, label: str) -> Block:
    block = blocks.to_block(value)
    if block is None:
        raise errors.ValueMismatchError(
            f"Expected {label} to be a computation of type `{type_spec}`, found"
            f" {structs.show(value)}."
        )
    type_checks.check_assignable(type_spec, block.type_signature, label)
    return block

"""Takes apart an `up_to_merge`, the function of client work that `split` writes."""

import dataclasses
from collections.abc import Mapping, Sequence

import federated_language as fl

import ray_fed.plan.plans as plans
from ray_fed.compiler.expressions import replace_free, root_name, select
from ray_fed.language import type_checks

flf = fl.framework
Block = flf.ComputationBuildingBlock
OTHER_FORM = "not of the form that the compiler writes"


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """The arguments of a federated_aggregate without a report."""

    value: Block
    zero: Block
    accumulate: Block
    merge: Block


@dataclasses.dataclass(frozen=True)
class Aggregates:
    """The parts of an `up_to_merge`.

    Attributes:
        parameter: The parameter of the function, or None if there is none.
        locals: All locals by name, in order, including aggregations.
        aggregates: Aggregations by the name of their local, in the order of the result.
        kept: Values at clients that follow the aggregations in the result.
    """

    parameter: flf.Reference | None
    locals: Mapping[str, Block]
    aggregates: Mapping[str, Aggregate]
    kept: Sequence[Block] = ()


def read_aggregates(block: Block) -> Aggregates:
    """Return the parts of an `up_to_merge`, or raise Fallback for another form."""
    match block:
        case flf.Lambda(result=flf.Block() as body):
            parameter = None
            if block.parameter_name is not None and block.parameter_type is not None:
                parameter = flf.Reference(block.parameter_name, block.parameter_type)
        case _:
            raise plans.Fallback(OTHER_FORM)
    names = [name for name, _ in body.locals]
    locals_ = _without_aliases(body.locals, parameter)
    result, kept = body.result, list[Block]()
    if isinstance(result, flf.Struct) and len(result):
        result, *kept = (element for _, element in result.items())
    zipped = _zipped(result)
    aggregates = dict(_aggregate(part, locals_) for part in zipped)
    if len(set(names)) != len(names) or len(aggregates) != len(zipped):
        raise plans.Fallback(OTHER_FORM)
    return Aggregates(parameter, locals_, aggregates, kept)


def _without_aliases(
    locals_: Sequence[tuple[str, Block]], parameter: flf.Reference | None
) -> dict[str, Block]:
    # A local that only names a part of the argument is replaced by that part.
    kept: dict[str, Block] = {}
    aliases: dict[str, Block] = {}
    for name, local in locals_:
        block = replace_free(local, lambda free: _written_out(free, aliases))
        if parameter is not None and root_name(block) == parameter.name:
            aliases[name] = block
        else:
            kept[name] = block
    return kept


def _written_out(block: Block, aliases: Mapping[str, Block]) -> Block | None:
    match block:
        case flf.Reference():
            return aliases.get(block.name)
        case flf.Selection():
            source = _written_out(block.source, aliases)
            return None if source is None else select(source, block.as_index())
        case _:
            return None


def _zipped(result: Block) -> Sequence[Block]:
    uri, argument = intrinsic_call(result)
    if uri == flf.FEDERATED_VALUE_AT_SERVER.uri and type_checks.is_empty_struct(
        argument.type_signature
    ):
        return []  # no aggregation, only kept values of clients
    if uri != flf.FEDERATED_ZIP_AT_SERVER.uri or not isinstance(argument, flf.Struct):
        raise plans.Fallback(OTHER_FORM)
    return [element for _, element in argument.items()]


def _aggregate(block: Block, locals_: Mapping[str, Block]) -> tuple[str, Aggregate]:
    if not isinstance(block, flf.Reference):
        raise plans.Fallback(OTHER_FORM)
    uri, argument = intrinsic_call(locals_.get(block.name, block))
    if uri != flf.FEDERATED_AGGREGATE.uri:
        raise plans.Fallback(OTHER_FORM)
    *parts, report = (select(argument, index) for index in range(5))
    match report:
        case flf.Lambda(result=flf.Reference(name=name)) if (
            name == report.parameter_name
        ):
            return block.name, Aggregate(*parts)
        case _:
            raise plans.Fallback("a report before the merge")


def intrinsic_call(block: Block) -> tuple[str, Block]:
    """Return the URI and the argument of a call of an intrinsic, or raise Fallback."""
    match block:
        case flf.Call(
            function=flf.Intrinsic(uri=uri),
            argument=flf.ComputationBuildingBlock() as argument,
        ):
            return uri, argument
        case _:
            raise plans.Fallback(OTHER_FORM)

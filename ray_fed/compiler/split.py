"""Cuts a computation at its aggregations into up_to_merge, merge and after_merge.

    calls before the aggregations  ->  aggregate, report left out   up_to_merge
    partials of any two slices     ->  the aggregations' merges      merge
    argument, merged partials      ->  reports, calls after them     after_merge

Aggregations that do not depend on one another count as one: their partials travel as
a struct. One that depends on another's result belongs to a later stage, which has an
up_to_merge of the argument and all that was merged before, and a merge of its own.
Where it needs what clients did in an earlier stage, it has a second form, which takes
that as an argument: see `keeping`.

The placed parts of a result: those that differ by client, and the others.

<state@SERVER, <kept@CLIENTS, metrics@SERVER>>   ->   at_server   state, metrics
                                                      at_clients  kept

Aggregations as partials: each intrinsic becomes zero, accumulate, merge, report.

What each stage of a computation starts from: the argument, and what was merged.

Decides which clients' values a stage keeps for later stages: names alone.

    stage 0   update = map(train, ...), norm = map(length, update), aggregate norm
    stage 1   clipped = map(clip, <update, bound>), aggregate clipped

Stage 1 loads `update`, which stage 0 saves; without that it would train once more. A
name that is loaded stands for the same value as in the stage that evaluated it first,
random numbers included: these follow from the names of locals, which stay.

What clients have in the result is kept, too, by the first stage that can evaluate it:
there it is a part of the work that a kernel does.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import federated_language as fl
import numpy as np

import ray_fed.errors as errors
from ray_fed.compiler.form import (
    KeepingStage,
    MergeableCompChain,
    MergeableCompForm,
    ResultParts,
    Stage,
)
from ray_fed.compiler.normalize import (
    CallGraph,
    close_over,
    free_references,
    needed_names,
    normalize,
    select,
    zip_at_server,
)
from ray_fed.language import blocks, intrinsics, type_checks

flf = fl.framework
Block = flf.ComputationBuildingBlock


def at_server(result: Block) -> list[Block]:
    """Return the parts that do not differ by client, in order."""
    return [
        part
        for part in _parts(result)
        if not type_checks.differs_by_client(part.type_signature)
    ]


def at_clients(result: Block) -> list[Block]:
    """Return the parts that differ by client, in order."""
    return [
        part
        for part in _parts(result)
        if type_checks.differs_by_client(part.type_signature)
    ]


def _parts(block: Block) -> Iterator[Block]:
    type_spec = block.type_signature
    if not type_checks.is_placed_struct(type_spec):
        yield block
        return
    for index in range(len(type_checks.struct_type(type_spec))):
        yield from _parts(select(block, index))


@dataclasses.dataclass(frozen=True)
class PartialAggregation:
    """One aggregation of a call graph, as a federated_aggregate that stops at partials.

    Attributes:
        name: of the aggregation in the call graph.
        before: calls to add before it, by name.
        call: federated_aggregate that returns the partial unreported.
        merge: <U, U> -> U.
        report: U -> result; None returns the partial.
    """

    name: str
    before: tuple[tuple[str, Block], ...]
    call: flf.Call
    merge: Block
    report: Block | None


def _uri_of(call: Block) -> str | None:
    if isinstance(call, flf.Call) and isinstance(call.function, flf.Intrinsic):
        return call.function.uri
    return None


def is_aggregation(call: Block) -> bool:
    """Return whether a block is the call of an aggregating intrinsic."""
    return isinstance(call, flf.Call) and intrinsics.is_aggregation(call.function)


def to_partial_aggregation(name: str, call: flf.Call) -> PartialAggregation:
    """Return an aggregation as federated_aggregate, its report set apart.

    Args:
        name: of the aggregation in the call graph.
        call: of an aggregating intrinsic.

    Raises:
        CompileError: the intrinsic has no partials.
    """
    uri = _uri_of(call) or ""
    argument = cast("Block", call.argument)
    if uri == flf.FEDERATED_AGGREGATE.uri:
        value, zero, accumulate, merge, report = (select(argument, i) for i in range(5))
        return PartialAggregation(
            name, (), _aggregate(value, zero, accumulate, merge), merge, report
        )
    if uri in intrinsics.SECURE_SUM_CHECKS:
        return _to_secure_sum(name, uri, argument)
    if uri == intrinsics.FEDERATED_SECURE_MODULAR_SUM.uri:
        return _to_modular_sum(name, argument)
    derive = intrinsics.DERIVED_AGGREGATIONS.get(uri)
    if derive is None:
        raise errors.CompileError(
            f"Expected an aggregation with partials, found `{uri}`."
        )
    before: tuple[tuple[str, Block], ...] = ()
    value = argument
    if isinstance(value.type_signature, fl.StructType):  # a weighted mean's pair
        zipped = flf.create_federated_zip(
            flf.Struct([select(value, 0), select(value, 1)])
        )
        before = ((f"{name}_zipped", zipped),)
        value = flf.Reference(f"{name}_zipped", zipped.type_signature)
    return _derived_aggregation(name, before, value, derive)


def _derived_aggregation(
    name: str,
    before: tuple[tuple[str, Block], ...],
    value: Block,
    derive: Callable[[fl.Type], intrinsics.Aggregation],
) -> PartialAggregation:
    derived = derive(type_checks.member_type(value.type_signature))
    return _aggregation_of(name, before, value, derived, flf.Call(derived.zero))


def _aggregation_of(
    name: str,
    before: tuple[tuple[str, Block], ...],
    value: Block,
    derived: intrinsics.Aggregation,
    call: flf.Call,
) -> PartialAggregation:
    """Return a derived aggregation of a value, whose zero a call makes."""
    zero = flf.Reference(f"{name}_zero", call.type_signature)
    aggregate = _aggregate(value, zero, derived.accumulate, derived.merge)
    before += ((zero.name, call),)
    return PartialAggregation(name, before, aggregate, derived.merge, derived.report)


def _to_modular_sum(name: str, argument: Block) -> PartialAggregation:
    value, modulus = select(argument, 0), select(argument, 1)
    member = type_checks.member_type(value.type_signature)
    derived = intrinsics.modular_sum(member, modulus.type_signature)
    call = flf.Call(derived.zero, flf.Struct([modulus]))
    return _aggregation_of(name, (), value, derived, call)


def _to_secure_sum(name: str, uri: str, argument: Block) -> PartialAggregation:
    """Check each client's value against its bound, then sum."""
    value, bound = select(argument, 0), select(argument, 1)
    member = type_checks.member_type(value.type_signature)
    placed = flf.create_federated_value(bound, fl.CLIENTS)
    bounds = flf.Reference(f"{name}_bound", placed.type_signature)
    zipped = flf.create_federated_zip(flf.Struct([value, bounds]))
    pairs = flf.Reference(f"{name}_zipped", zipped.type_signature)
    check = intrinsics.check_of(uri, member, bound.type_signature)
    mapped = flf.create_federated_map(check, pairs)
    checked = flf.Reference(f"{name}_checked", mapped.type_signature)
    before = ((bounds.name, placed), (pairs.name, zipped), (checked.name, mapped))
    derive = intrinsics.DERIVED_AGGREGATIONS[flf.FEDERATED_SUM.uri]
    return _derived_aggregation(name, before, checked, derive)


def _aggregate(value: Block, zero: Block, accumulate: Block, merge: Block) -> flf.Call:
    partial = cast("fl.FunctionType", merge.type_signature).result
    identity = flf.create_identity(partial)
    return flf.create_federated_aggregate(value, zero, accumulate, merge, identity)


PAIR = "pair"
"""Names a parameter that is a struct: argument and merged values, or two partials."""

_KEPT = "kept"


@dataclasses.dataclass(frozen=True)
class StageInput:
    """What a stage, or `after_merge`, starts from once some stages are merged.

    Attributes:
        parameter: the argument and what was merged: one reference, or None.
        bound: locals that take the parameter apart.
        calls: of the graph, by name, merged aggregations replaced by their reports.
    """

    parameter: flf.Reference | None
    bound: tuple[tuple[str, Block], ...]
    calls: Mapping[str, Block]

    def locals_for(self, roots: frozenset[str]) -> list[tuple[str, Block]]:
        """Return the locals that lead to `roots`, in order."""
        needed = needed_names(roots, self.calls)
        return [
            *self.bound,
            *((name, call) for name, call in self.calls.items() if name in needed),
        ]


def stage_input(
    graph: CallGraph,
    stages: Sequence[Sequence[PartialAggregation]],
    loaded: Sequence[str] = (),
) -> StageInput:
    """Return the input of the stage that comes after some merged stages.

    Args:
        graph: of the whole computation.
        stages: the merged ones, in order.
        loaded: names of clients' values that those stages kept.
    """
    merged = [
        flf.Reference(
            f"merged_{index}" if index else "merged",
            fl.FederatedType(partial_type(stage), fl.SERVER),
        )
        for index, stage in enumerate(stages)
    ]
    reports = {
        aggregation.name: _report(aggregation, position, reference)
        for stage, reference in zip(stages, merged, strict=True)
        for position, aggregation in enumerate(stage)
    }
    calls = dict(graph.calls) | reports
    parts = [] if graph.parameter is None else [graph.parameter]
    parts += merged
    if loaded:
        types = [calls[name].type_signature for name in loaded]
        parts.append(flf.Reference(_KEPT, fl.StructType(types)))
        calls |= {
            name: flf.Selection(parts[-1], index=index)
            for index, name in enumerate(loaded)
        }
    if len(parts) < 2:  # noqa: PLR2004 (nothing to take apart)
        return StageInput(parts[0] if parts else None, (), calls)
    types = fl.StructType([part.type_signature for part in parts])
    parameter = flf.Reference(PAIR, types)
    bound = tuple(
        (part.name, flf.Selection(parameter, index=index))
        for index, part in enumerate(parts)
    )
    return StageInput(parameter, bound, calls)


def partial_type(aggregations: Sequence[PartialAggregation]) -> fl.Type:
    """Return the type of a stage's partial: a struct of its aggregations'."""
    return fl.StructType(
        [type_checks.member_type(a.call.type_signature) for a in aggregations]
    )


def _report(
    aggregation: PartialAggregation, index: int, merged: flf.Reference
) -> Block:
    """Return the call that makes an aggregation's result of the merged partials."""
    partials = flf.Reference(
        f"{aggregation.name}_partials",
        type_checks.member_type(merged.type_signature),
    )
    partial: Block = flf.Selection(partials, index=index)
    if aggregation.report is not None:
        partial = flf.Call(aggregation.report, partial)
    return flf.create_federated_apply(
        flf.Lambda(partials.name, partials.type_signature, partial), merged
    )


_WORK = (
    flf.FEDERATED_MAP.uri,
    flf.FEDERATED_EVAL_AT_CLIENTS.uri,
)


@dataclasses.dataclass(frozen=True)
class KeptNames:
    """The names of kept values that a stage, or the end of a computation, uses.

    Attributes:
        loads: names of values that earlier stages saved.
        saves: names of values that it evaluates for later stages.
    """

    loads: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()


def divide(
    stages: Sequence[tuple[frozenset[str], Mapping[str, Block]]],
) -> list[KeptNames]:
    """Return the names that each stage loads and saves, in the order of the stages.

    Args:
        stages: the names of the values that each needs, and its calls, by name; the
            last one is what follows the last merge.
    """
    first: dict[str, int] = {}  # name to the stage that evaluates it first
    loads: list[list[str]] = []
    for index, (roots, calls) in enumerate(stages):
        working = _working(calls)
        needed = needed_names(roots, calls, first)
        loads.append([name for name in calls if name in needed & first.keys()])
        for name in needed & working - first.keys():
            first[name] = index
    wanted = {name for names in loads for name in names}
    return [
        KeptNames(
            tuple(names),
            tuple(
                name
                for name in stages[index][1]
                if name in wanted and first[name] == index
            ),
        )
        for index, names in enumerate(loads)
    ]


def find_early(
    roots: frozenset[str], calls: Mapping[str, Block], stage_of: Mapping[str, int]
) -> dict[str, int]:
    """Return which values of the result a stage may keep, and the first such stage.

    Args:
        roots: names of clients' values that the result needs.
        calls: of the whole computation, by name.
        stage_of: the stage of each aggregation, by name.
    """
    working, last = _working(calls), max(stage_of.values(), default=0)
    early: dict[str, int] = {}
    pending, seen = list(roots), set[str]()
    while pending:
        name = pending.pop()
        if name in seen or name not in calls or name in stage_of:
            continue
        seen.add(name)
        behind = needed_names(frozenset([name]), calls) & stage_of.keys()
        first = max((stage_of[other] + 1 for other in behind), default=0)
        if name in working and first <= last:
            early[name] = first
        else:
            pending.extend(free_references(calls[name]))
    return early


def count_member_bytes(call: Block) -> int:
    """Return the bytes of one client's member of a value that may be kept."""
    return _count_bytes(type_checks.member_type(call.type_signature)) or 0


def _working(calls: Mapping[str, Block]) -> set[str]:
    """Return the names of clients' values that work made and that may be kept."""
    worked: set[str] = set()  # made with the help of a function of the user's
    keepable: set[str] = set()
    for name, call in calls.items():  # each refers to earlier ones only
        if not type_checks.is_at_clients(call.type_signature):
            continue
        if worked & free_references(call) or _is_work(call):
            worked.add(name)
            if _uri_of(call) in _WORK and _may_be_kept(call.type_signature):
                keepable.add(name)
    return keepable


def _is_work(call: Block) -> bool:
    """Return whether a call runs more than selections."""
    return bool(
        blocks.find_blocks(call, lambda b: isinstance(b, flf.CompiledComputation))
    )


def _may_be_kept(type_spec: fl.Type) -> bool:
    """Return whether values differ by client, and take bytes, of a number known."""
    return type_checks.differs_by_client(type_spec) and bool(
        _count_bytes(type_checks.member_type(type_spec))
    )


def _count_bytes(type_spec: fl.Type) -> int | None:
    """Return the bytes of a value; None where its type does not say."""
    match type_spec:
        case fl.TensorType():
            dtype, shape = np.dtype(type_spec.dtype), type_spec.shape
            if dtype.type is np.str_ or shape is None or None in shape:
                return None
            return dtype.itemsize * math.prod(size or 0 for size in shape)
        case fl.StructType():
            sizes = [_count_bytes(element) for _, element in type_spec.items()]
            known = [size for size in sizes if size is not None]
            return sum(known) if len(known) == len(sizes) else None
        case _:
            return None


_NOTHING = KeptNames()


def compile_to_mergeable_comp_form(
    comp: flf.ConcreteComputation,
) -> MergeableCompForm:
    """Return the mergeable form of a federated computation.

    Args:
        comp: any computation whose aggregations do not depend on one another; it may
            have none, and need not take an argument.

    Raises:
        ValueMismatchError: it is no computation.
        CompileError: an aggregation depends on the result of another one, is of a kind
            that has no partials, or merges with values that depend on the argument.
    """
    type_checks.check_kind(comp, flf.ConcreteComputation, "comp")
    chain = compile_to_chain(comp)
    if len(chain.stages) > 1:
        raise errors.CompileError(
            "Expected aggregations that do not depend on one another, found"
            f" {len(chain.stages)} stages, each of values that were computed from the"
            " result of the one before: run it in a context that ray_fed.init makes."
        )
    stage = chain.stages[0]
    return MergeableCompForm(stage.up_to_merge, stage.merge, chain.after_merge)


def compile_to_chain(comp: flf.ConcreteComputation) -> MergeableCompChain:
    """Return the stages of a federated computation, one for each depth of aggregation.

    Args:
        comp: any computation; it may have no aggregation, which makes one stage of no
            partials, and need not take an argument.

    Raises:
        CompileError: an aggregation is of a kind that has no partials, or merges with
            values that depend on the argument or on another aggregation.
    """
    block = Block.from_proto(comp.to_proto())
    graph = normalize(block)
    stages = _group(graph)
    *kept, kept_after = _keep(graph, stages)
    return MergeableCompChain(
        stages=[
            Stage(
                _compute(_up_to_merge(graph, stages[:index], stage)),
                _compute(_merge(graph, stage)),
                _keeping(
                    graph,
                    kept[index],
                    _up_to_merge(graph, stages[:index], stage, kept[index]),
                ),
            )
            for index, stage in enumerate(stages)
        ],
        after_merge=_compute(_after_merge(graph, stages, graph.result)),
        parts=_divide_result(graph, stages, kept_after),
    )


def _keep(
    graph: CallGraph, stages: Sequence[Sequence["PartialAggregation"]]
) -> list[KeptNames]:
    """Return what each stage, and then the end, loads and saves."""
    calls_of_stages: list[tuple[frozenset[str], Mapping[str, Block]]] = []
    wanted = free_references(flf.Struct(at_clients(graph.result)))
    stage_of = {a.name: i for i, stage in enumerate(stages) for a in stage}
    early = find_early(wanted, dict(graph.calls), stage_of)
    for index, stage in enumerate(stages):
        calls = stage_input(graph, stages[:index]).calls
        roots = _roots(calls, stage) | {
            n for n, first in early.items() if first == index
        }
        calls_of_stages.append((roots, calls))
    end = stage_input(graph, stages).calls
    calls_of_stages.append((wanted, end))
    return divide(calls_of_stages)


def _divide_result(
    graph: CallGraph,
    stages: Sequence[Sequence["PartialAggregation"]],
    kept: KeptNames,
) -> ResultParts | None:
    """Return what makes the parts of a result; None where none differs by client."""
    of_clients = at_clients(graph.result)
    if not of_clients:
        return None
    of_server = at_server(graph.result)
    server_part = _after_merge(graph, stages, flf.Struct(of_server))
    clients_part = flf.Struct(of_clients)
    names = [p.name for p in of_clients if isinstance(p, flf.Reference)]
    is_kept = len(names) == len(of_clients) and set(names) <= set(kept.loads)
    return ResultParts(
        _compute(server_part) if of_server else None,
        _compute(_after_merge(graph, stages, clients_part)),
        _keeping(graph, kept, _after_merge(graph, stages, clients_part, kept)),
        tuple(names) if is_kept else None,
    )


def _keeping(graph: CallGraph, kept: KeptNames, block: Block) -> KeepingStage | None:
    if not kept.loads and not kept.saves:
        return None
    calls = dict(graph.calls)
    num_bytes = sum(count_member_bytes(calls[name]) for name in kept.saves)
    return KeepingStage(_compute(block), kept.loads, kept.saves, num_bytes)


def _group(graph: CallGraph) -> list[list[PartialAggregation]]:
    """Return the aggregations by how many others each has to wait for."""
    calls = dict(graph.calls)
    needed = needed_names(free_references(graph.result), calls)
    depths: dict[str, int] = {}
    stages: list[list[PartialAggregation]] = []
    for name, call in graph.calls:  # each refers to earlier ones only
        if name not in needed or not is_aggregation(call):
            continue
        behind = needed_names(free_references(call), calls)
        depth = max(
            (depths[other] + 1 for other in depths if other in behind), default=0
        )
        depths[name] = depth
        if depth == len(stages):
            stages.append([])
        stages[depth].append(to_partial_aggregation(name, cast("flf.Call", call)))
    return stages or [[]]


def _compute(block: Block) -> flf.ConcreteComputation:
    return flf.ConcreteComputation.from_building_block(block)


def _up_to_merge(
    graph: CallGraph,
    before: Sequence[Sequence[PartialAggregation]],
    aggregations: Sequence[PartialAggregation],
    kept: KeptNames = _NOTHING,
) -> Block:
    if not aggregations and not kept.saves:
        return close_over(graph.parameter, (), zip_at_server([]))
    inputs = stage_input(graph, before, kept.loads)
    locals_ = inputs.locals_for(_roots(inputs.calls, aggregations) | {*kept.saves})
    for aggregation in aggregations:
        locals_ += [*aggregation.before, (aggregation.name, aggregation.call)]
    result = zip_at_server([_reference(a.name, a.call) for a in aggregations])
    if kept.saves:
        saved = [_reference(name, inputs.calls[name]) for name in kept.saves]
        result = flf.Struct([result, *saved])
    return close_over(inputs.parameter, locals_, result)


def _reference(name: str, block: Block) -> flf.Reference:
    return flf.Reference(name, block.type_signature)


def _roots(
    calls: Mapping[str, Block], aggregations: Sequence[PartialAggregation]
) -> frozenset[str]:
    """Return the names that aggregations need."""
    needed = (free_references(calls[aggregation.name]) for aggregation in aggregations)
    return frozenset[str]().union(*needed)


def _merge(graph: CallGraph, aggregations: Sequence[PartialAggregation]) -> Block:
    """Return the merge of a stage's partials: each aggregation's under its name.

    The names are part of what the random numbers of a merge depend on, so that two
    aggregations draw different ones, also where one function merges both.
    """
    partial = partial_type(aggregations)
    pair = flf.Reference(PAIR, fl.StructType([partial, partial]))
    merges: list[tuple[str, Block]] = []
    for index, aggregation in enumerate(aggregations):
        sides = flf.Struct(
            [select(select(pair, 0), index), select(select(pair, 1), index)]
        )
        merges.append((aggregation.name, flf.Call(aggregation.merge, sides)))
    # Partials merge in any process, so what a merge captures depends on none.
    free = frozenset[str]().union(*(free_references(call) for _, call in merges))
    free -= {PAIR}
    calls = dict(graph.calls)
    needed = needed_names(free, calls)
    captured = [(name, call) for name, call in graph.calls if name in needed]
    used = frozenset[str]().union(free, *(free_references(c) for _, c in captured))
    if graph.parameter is not None and graph.parameter.name in used:
        raise errors.CompileError(
            "Expected a merge that depends on partials alone, found one that captures"
            " the computation's argument: carry it in the accumulator."
        )
    if any(is_aggregation(call) for _, call in captured):
        raise errors.CompileError(
            "Expected a merge that depends on partials alone, found one that captures"
            " the result of an aggregation: carry it in the accumulator."
        )
    merged = flf.Struct([_reference(name, call) for name, call in merges])
    return close_over(pair, [*captured, *merges], merged)


def _after_merge(
    graph: CallGraph,
    stages: Sequence[Sequence[PartialAggregation]],
    result: Block,
    kept: KeptNames = _NOTHING,
) -> Block:
    """Return what evaluates a result, or a part of it, of what the stages merged."""
    inputs = stage_input(graph, stages, kept.loads)
    locals_ = inputs.locals_for(free_references(result))
    return close_over(inputs.parameter, locals_, result)

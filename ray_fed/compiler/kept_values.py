"""Decides which values of clients a stage keeps for later stages, by name.

A stage is client work and its aggregation. Here the second stage needs the aggregated
norm of the first, to clip the updates:

    stage 0   update = map(train, ...), norm = map(length, update), aggregate norm
    stage 1   clipped = map(clip, <update, bound>), aggregate clipped

Stage 0 saves `update`, and stage 1 loads it. Otherwise stage 1 would train again, with
the same result: random numbers depend on the names of locals, which do not change.

If the result of the computation needs values at clients, the first stage that can
compute them keeps them. They are then part of its kernel, the graph for many clients.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import federated_language as fl

from ray_fed.compiler.expressions import free_references, needed_names
from ray_fed.language import blocks, trees, type_checks

flf = fl.framework
Block = flf.ComputationBuildingBlock

_WORK = (
    flf.FEDERATED_MAP.uri,
    flf.FEDERATED_EVAL_AT_CLIENTS.uri,
)


@dataclasses.dataclass(frozen=True)
class KeptNames:
    """Names of the kept values of one stage, or of the work after the last merge.

    Attributes:
        loads: Values that earlier stages saved and this one uses.
        saves: Values that this stage evaluates and keeps for later stages.
    """

    loads: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()


def divide(
    stages: Sequence[tuple[frozenset[str], Mapping[str, Block]]],
) -> list[KeptNames]:
    """Return the names that each stage loads and saves, in the order of the stages.

    Each entry of `stages` has the names of the values that the stage needs, and all its
    calls by name. The last entry is the work after the last merge.
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
    """Return the values of the result that stages can keep, with the first such stage.

    `roots` are the names of the clients' values that the result needs. `calls` has all
    calls by name. `stage_of` maps an aggregation's name to the index of its stage.
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
    """Return the bytes of one client's value of a call, or 0 if they are unknown."""
    return trees.count_bytes(type_checks.member_type(call.type_signature)) or 0


def _working(calls: Mapping[str, Block]) -> set[str]:
    """Return the names of values at clients that users' functions compute, to keep."""
    worked: set[str] = set()  # names that depend on a computation of the user
    keepable: set[str] = set()
    for name, call in calls.items():  # each call refers only to earlier calls
        if not type_checks.is_at_clients(call.type_signature):
            continue
        if worked & free_references(call) or _has_computation(call):
            worked.add(name)
            if _calls_work(call) and _may_be_kept(call.type_signature):
                keepable.add(name)
    return keepable


def _calls_work(call: Block) -> bool:
    match call:
        case flf.Call(function=flf.Intrinsic(uri=uri)):
            return uri in _WORK
        case _:
            return False


def _has_computation(call: Block) -> bool:
    return bool(
        blocks.find_blocks(call, lambda b: isinstance(b, flf.CompiledComputation))
    )


def _may_be_kept(type_spec: fl.Type) -> bool:
    return type_checks.differs_by_client(type_spec) and bool(
        trees.count_bytes(type_checks.member_type(type_spec))
    )

"""Decides which clients' values a stage keeps for later stages: names alone.

    stage 0   update = map(train, ...), norm = map(length, update), aggregate norm
    stage 1   clipped = map(clip, <update, bound>), aggregate clipped

Stage 1 takes `update`, which stage 0 emits; without that it would train once more. A
name that is taken stands for the same value as in the stage that evaluated it first,
random numbers included: these follow from the names of locals, which stay.

What clients have in the result is kept, too, by the first stage that can evaluate it:
there it is a part of the work that a kernel does.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import federated_language as fl
import numpy as np

from ray_fed.compiler.normalize import free_references, needed_names
from ray_fed.language import type_checks

flf = fl.framework
Block = flf.ComputationBuildingBlock
_WORK = (
    flf.FEDERATED_MAP.uri,
    flf.FEDERATED_EVAL_AT_CLIENTS.uri,
)


@dataclasses.dataclass(frozen=True)
class KeptNames:
    """The names of kept values that a stage, or the end of a computation, uses.

    Attributes:
        takes: names of values that earlier stages emitted.
        emits: names of values that it evaluates for later stages.
    """

    takes: tuple[str, ...] = ()
    emits: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class StageCalls:
    """The calls of a stage, or of what follows the last merge.

    Attributes:
        roots: names of the values that it needs.
        calls: by name; values of other names are given.
    """

    roots: frozenset[str]
    calls: Mapping[str, Block]


def divide(stages: Sequence[StageCalls]) -> list[KeptNames]:
    """Return the names that each stage takes and emits, in the order of the stages."""
    first: dict[str, int] = {}  # name to the stage that evaluates it first
    taken: list[list[str]] = []
    for index, stage in enumerate(stages):
        working = _working(stage.calls)
        found = needed_names(stage.roots, stage.calls, first)
        taken.append([name for name in stage.calls if name in found & first.keys()])
        for name in found & working - first.keys():
            first[name] = index
    wanted = {name for names in taken for name in names}
    return [
        KeptNames(
            tuple(names),
            tuple(
                name
                for name in stages[index].calls
                if name in wanted and first[name] == index
            ),
        )
        for index, names in enumerate(taken)
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
    found: set[str] = set()
    for name, call in calls.items():  # each refers to earlier ones only
        if not type_checks.is_at_clients(call.type_signature):
            continue
        if worked & free_references(call) or _is_work(call):
            worked.add(name)
            if _uri(call) in _WORK and _may_be_kept(call.type_signature):
                found.add(name)
    return found


def _uri(call: Block) -> str | None:
    if isinstance(call, flf.Call) and isinstance(call.function, flf.Intrinsic):
        return call.function.uri
    return None


def _is_work(call: Block) -> bool:
    """Return whether a call runs more than selections."""
    found: list[Block] = []

    def note(part: Block) -> tuple[Block, bool]:
        if isinstance(part, flf.CompiledComputation):
            found.append(part)
        return part, False

    flf.transform_postorder(call, note)
    return bool(found)


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

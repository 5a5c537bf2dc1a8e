"""What each stage of a computation starts from: the argument, and what was merged."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import cast

import federated_language as fl

from ray_fed.compiler.normalize import CallGraph, needed_names
from ray_fed.compiler.partial_aggregations import PartialAggregation

flf = fl.framework
Block = flf.ComputationBuildingBlock
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
    taken: Sequence[str] = (),
) -> StageInput:
    """Return the input of the stage that comes after some merged stages.

    Args:
        graph: of the whole computation.
        stages: the merged ones, in order.
        taken: names of clients' values that those stages kept.
    """
    merged = [
        flf.Reference(f"merged_{index}" if index else "merged", _merged_type(stage))
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
    if taken:
        types = [calls[name].type_signature for name in taken]
        parts.append(flf.Reference(_KEPT, fl.StructType(types)))
        calls |= {
            name: flf.Selection(parts[-1], index=index)
            for index, name in enumerate(taken)
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


def _merged_type(aggregations: Sequence[PartialAggregation]) -> fl.FederatedType:
    return fl.FederatedType(partial_type(aggregations), fl.SERVER)


def partial_type(aggregations: Sequence[PartialAggregation]) -> fl.Type:
    """Return the type of a stage's partial: a struct of its aggregations'."""
    return fl.StructType(
        [cast("fl.FederatedType", a.call.type_signature).member for a in aggregations]
    )


def _report(
    aggregation: PartialAggregation, index: int, merged: flf.Reference
) -> Block:
    """Return the call that makes an aggregation's result of the merged partials."""
    partials = flf.Reference(
        f"{aggregation.name}_partials",
        cast("fl.FederatedType", merged.type_signature).member,
    )
    partial: Block = flf.Selection(partials, index=index)
    if aggregation.report is not None:
        partial = flf.Call(aggregation.report, partial)
    return flf.create_federated_apply(
        flf.Lambda(partials.name, partials.type_signature, partial), merged
    )

"""The mergeable form of a computation: what can be cut by clients, and the rest.

What each function of a mergeable form may contain, so that slices can be run apart.

    up_to_merge   anything but an aggregation of what another aggregation returned:
                  a slice knows its own clients' sum, not the cohort's
    merge         nothing placed: it takes two partials, wherever they come from
    after_merge   anything but aggregations: it runs slice by slice where its result
                  has a value for each client

The types of the functions are checked by `form`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.compiler.normalize import free_references, needed_names, normalize
from ray_fed.language import blocks, intrinsics, structs, type_checks

flf = fl.framework
Block = flf.ComputationBuildingBlock


def _check_contents_of_up_to_merge(up_to_merge: flf.ConcreteComputation) -> None:
    """Refuse an aggregation that depends on another one's result.

    Raises:
        CompileError: there is one.
    """
    block = _to_block(up_to_merge)
    if len(blocks.find_blocks(block, intrinsics.is_aggregation)) < 2:  # noqa: PLR2004
        return
    calls = dict(normalize(block).calls)
    aggregations = {
        name: call.function.uri
        for name, call in calls.items()
        if isinstance(call, flf.Call)
        and isinstance(call.function, flf.Intrinsic)
        and intrinsics.is_aggregation(call.function)
    }
    for name, uri in aggregations.items():
        before = needed_names(free_references(calls[name]), calls)
        for other in sorted(before & aggregations.keys()):
            raise errors.CompileError(
                "Expected aggregations in `up_to_merge` that do not depend on one"
                f" another, found `{uri}` of what `{aggregations[other]}` returned: a"
                " slice of the clients does not know the result of the whole cohort;"
                " invoke the computation itself instead of a form."
            )


def _refuse(
    comp: flf.ConcreteComputation,
    is_refused: Callable[[Block], bool],
    expected: str,
    advice: str,
) -> None:
    refused = blocks.find_blocks(_to_block(comp), is_refused)
    if not refused:
        return
    named = [part for part in refused if isinstance(part, flf.Intrinsic)]
    shown = (
        f"the intrinsic `{named[0].uri}`" if named else blocks.show_block(refused[0])
    )
    raise errors.CompileError(f"Expected {expected}, found {shown}: {advice}")


def _to_block(comp: flf.ConcreteComputation) -> Block:
    with blocks.depth_in_words():
        return Block.from_proto(comp.to_proto())


class MergeableCompForm:
    """Three computations that together are equivalent to one federated computation.

    For any cut of the clients of `arg` into slices, the original is equivalent to

        partials = [up_to_merge(slice) for slice in slices]
        merged = fold of merge over partials
        result = after_merge(arg, merged)   # without an argument: after_merge(merged)

    Args:
        up_to_merge: takes the original's argument on a subset of the clients; returns
            a server-placed value.
        merge: takes two members of `up_to_merge`'s result, returns one; unplaced.
        after_merge: takes <argument, merged value at server>, or the merged value
            alone where `up_to_merge` takes no argument.

    Raises:
        ValueMismatchError: one of these is no computation.
        UpToMergeTypeError: `up_to_merge` returns no server-placed value.
        MergeTypeNotAssignableError: `merge` does not take two results of
            `up_to_merge`, or its own.
        AfterMergeStructureError: `after_merge` does not take what it will be given.
        CompileError: a function contains what slices of the clients cannot compute
            apart: `after_merge` aggregates, `merge` has something placed, or
            `up_to_merge` aggregates what depends on another aggregation.
    """

    def __init__(
        self,
        up_to_merge: flf.ConcreteComputation,
        merge: flf.ConcreteComputation,
        after_merge: flf.ConcreteComputation,
    ) -> None:
        type_checks.check_kind(up_to_merge, flf.ConcreteComputation, "up_to_merge")
        type_checks.check_kind(merge, flf.ConcreteComputation, "merge")
        type_checks.check_kind(after_merge, flf.ConcreteComputation, "after_merge")
        partial = _partial_type(up_to_merge)
        _check_merge(merge, partial)
        merged = fl.FederatedType(merge.type_signature.result, fl.SERVER)
        _check_after_merge(after_merge, up_to_merge.type_signature.parameter, merged)
        _check_contents_of_up_to_merge(up_to_merge)
        _refuse(
            merge,
            intrinsics.is_aggregation,
            "no aggregation in `merge`, which takes two partials and no clients",
            "aggregate in `up_to_merge`.",
        )
        _refuse(
            merge,
            lambda part: flf.contains_federated_types(part.type_signature),
            "`merge` to take two partials and nothing that is placed",
            "move it to `up_to_merge` or to `after_merge`.",
        )
        _refuse(
            after_merge,
            intrinsics.is_aggregation,
            "no aggregation in `after_merge`, which each slice of the clients runs"
            " apart",
            "aggregate in `up_to_merge`.",
        )
        self.up_to_merge = up_to_merge
        self.merge = merge
        self.after_merge = after_merge

    @property
    def type_signature(self) -> fl.FunctionType:
        """The type of the computation that the form is equivalent to."""
        return fl.FunctionType(
            self.up_to_merge.type_signature.parameter,
            self.after_merge.type_signature.result,
        )


@dataclasses.dataclass(frozen=True)
class Stage:
    """Client work and its aggregation, once all earlier stages are merged.

    Attributes:
        up_to_merge: from the argument (of a subset of the clients) and what each
            earlier stage merged, to a server-placed value.
        merge: takes two members of `up_to_merge`'s result, returns one; unplaced.
        keeping: `up_to_merge` on values of clients that earlier stages kept, which
            keeps others; None where it has nothing to do with such values.
    """

    up_to_merge: flf.ConcreteComputation
    merge: flf.ConcreteComputation
    keeping: "KeepingStage | None" = None

    @functools.cached_property
    def partial_type(self) -> fl.Type:
        """The type of what `up_to_merge` returns, and of what is merged."""
        return type_checks.member_type(self.up_to_merge.type_signature.result)


@dataclasses.dataclass(frozen=True)
class KeepingStage:
    """A stage, or what makes a result, that takes values which earlier stages kept.

    Attributes:
        computation: takes what the stage takes; where `loads` is not empty also, last,
            a struct of those values, placed at clients. Where `saves` is not empty it
            returns a struct: the stage's result, then those values, placed at clients.
        loads: names of values that earlier stages saved.
        saves: names of values that it evaluates for later stages.
        member_bytes: bytes that it saves for each client.
    """

    computation: flf.ConcreteComputation
    loads: tuple[str, ...]
    saves: tuple[str, ...]
    member_bytes: int


@dataclasses.dataclass(frozen=True)
class ResultParts:
    """The parts of a result that differ by client, apart from the others.

    Both computations take what `after_merge` takes. `client_cuts.join_parts` undoes the
    division.

    Attributes:
        at_server: returns a struct of the parts that do not differ by client, in order;
            None where there are none.
        at_clients: returns a struct of the parts that do, in order.
        keeping: the same on values of clients that stages kept; None where it needs
            none.
        names: the names of kept values that these parts are, in order; None where
            something is left to evaluate.
    """

    at_server: flf.ConcreteComputation | None
    at_clients: flf.ConcreteComputation
    keeping: KeepingStage | None = None
    names: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class MergeableCompChain:
    """Stages that together are equivalent to one federated computation.

    A stage takes a struct: the argument, where the computation has one, then the merged
    value of each earlier stage, placed at the server. A struct of
    one element is that element. So the only stage of a chain of one, with
    `after_merge`, is a `MergeableCompForm`.

    Attributes:
        stages: at least one, in order.
        after_merge: takes what all stages merged; returns the result.
        parts: `after_merge` in two; None where no part of the result differs by client,
            and where somebody else wrote the form.
    """

    stages: Sequence[Stage]
    after_merge: flf.ConcreteComputation
    parts: ResultParts | None = None

    @classmethod
    def of(cls, form: MergeableCompForm) -> "MergeableCompChain":
        """Return a form as a chain of one stage."""
        return cls([Stage(form.up_to_merge, form.merge)], form.after_merge)

    @functools.cached_property
    def parameter(self) -> fl.Type | None:
        """The type of the argument; None where the computation takes none."""
        return self.stages[0].up_to_merge.type_signature.parameter

    @functools.cached_property
    def kept_member_bytes(self) -> int:
        """Bytes for each client of all that stages keep."""
        return sum(stage.keeping.member_bytes for stage in self.stages if stage.keeping)


def _partial_type(up_to_merge: flf.ConcreteComputation) -> fl.Type:
    result = up_to_merge.type_signature.result
    if isinstance(result, fl.FederatedType) and result.placement == fl.SERVER:
        return result.member
    raise errors.UpToMergeTypeError(
        f"Expected `up_to_merge` to return a server-placed value, found `{result}`:"
        " zip what it returns with fl.federated_zip."
    )


def _check_merge(merge: flf.ConcreteComputation, partial: fl.Type) -> None:
    parameter, result = merge.type_signature.parameter, merge.type_signature.result
    for source in (partial, result):
        pair = fl.StructType([source, source])
        if parameter is None or not parameter.is_assignable_from(pair):
            raise errors.MergeTypeNotAssignableError(
                f"Expected `merge` to take `{pair}`, two results of `up_to_merge` or of"
                f" itself, found `{merge.type_signature}`."
            )


def _check_after_merge(
    after_merge: flf.ConcreteComputation, argument: fl.Type | None, merged: fl.Type
) -> None:
    expected = merged if argument is None else fl.StructType([argument, merged])
    parameter = after_merge.type_signature.parameter
    if parameter is None or not parameter.is_assignable_from(expected):
        raise errors.AfterMergeStructureError(
            f"Expected `after_merge` to take `{expected}`, the original argument (where"
            f" there is one) and what was merged, found `{parameter}`."
        )


def function_type_of(comp: object) -> fl.FunctionType:
    """Return the type of what a context is asked to run.

    Raises:
        ValueMismatchError: it is neither a computation nor a MergeableCompForm.
    """
    if isinstance(comp, MergeableCompForm | fl.framework.ConcreteComputation):
        return type_checks.function_type(comp.type_signature)
    raise errors.ValueMismatchError(
        f"Expected a MergeableCompForm or a computation, found {structs.show(comp)}:"
        " make one with fl.federated_computation or ray_fed.tensorflow.computation."
    )

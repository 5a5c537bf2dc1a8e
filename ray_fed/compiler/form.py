"""The mergeable form of a computation, and the chain of stages of a general one.

A slice is a subset of the clients of a call. Different workers run different slices,
and then their results are merged. This limits what the three functions may contain:

    up_to_merge   may contain everything except an aggregation of another aggregation's
                  result, because a slice knows its own sum but not the cohort's
    merge         contains nothing placed, because it takes two partials of any slices
    after_merge   contains no aggregation, because it runs slice by slice if its result
                  has a value for each client

A computation that aggregates the result of another aggregation has a `Stage` for each
of them, and the stages are a `MergeableCompChain`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.compiler.expressions import free_references, needed_names
from ray_fed.compiler.normalize import normalize
from ray_fed.language import blocks, intrinsics, structs, type_checks

flf = fl.framework
Block = flf.ComputationBuildingBlock


def _check_contents_of_up_to_merge(up_to_merge: flf.ConcreteComputation) -> None:
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
                f" another, found `{uri}` of the result of `{aggregations[other]}`: a"
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
        merged = functools.reduce(merge, partials)
        result = after_merge(arg, merged)   # without an argument: after_merge(merged)

    Args:
        up_to_merge: Computation that takes the argument of the original for a subset of
            the clients. It returns a value placed at the server.
        merge: Computation that merges two results of `up_to_merge` to one. It takes and
            returns them without a placement.
        after_merge: Computation that takes <argument, merged value at the server>, or
            only the merged value if `up_to_merge` takes no argument.

    Raises:
        ValueMismatchError: An argument is not a computation.
        UpToMergeTypeError: `up_to_merge` does not return a server-placed value.
        MergeTypeNotAssignableError: `merge` does not accept two results of
            `up_to_merge`, or two results of itself.
        AfterMergeStructureError: `after_merge` does not accept the argument and the
            merged value.
        CompileError: `after_merge` aggregates, `merge` contains a placed value, or
            `up_to_merge` aggregates the result of another aggregation.
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
            "`merge` to take two partials and no placed value",
            "move it to `up_to_merge` or to `after_merge`.",
        )
        _refuse(
            after_merge,
            intrinsics.is_aggregation,
            "no aggregation in `after_merge`, which runs for each slice of the clients"
            " separately",
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
    """Client work and its aggregation, which runs when all earlier stages are merged.

    Attributes:
        up_to_merge: Computation that takes the argument for a subset of the clients,
            and the merged value of each earlier stage. It returns a value placed at the
            server.
        merge: Computation that merges two results of `up_to_merge` to one. It takes and
            returns them without a placement.
        keeping: The variant of `up_to_merge` that also reads and writes the values that
            clients keep between stages, or None if the stage uses no such values.
    """

    up_to_merge: flf.ConcreteComputation
    merge: flf.ConcreteComputation
    keeping: "KeepingStage | None" = None

    @functools.cached_property
    def partial_type(self) -> fl.Type:
        """The type of a partial, the result of `up_to_merge` without its placement."""
        return type_checks.member_type(self.up_to_merge.type_signature.result)


@dataclasses.dataclass(frozen=True)
class KeepingStage:
    """A variant of a stage, or of `after_merge`, that uses values which clients keep.

    Attributes:
        computation: Computation that takes the arguments of the stage. If `loads` is
            not empty, the last argument is a struct of the loaded values, placed at
            clients. If `saves` is not empty, the result is a struct of the stage's
            result and the saved values, placed at clients.
        loads: Names of the values that earlier stages saved.
        saves: Names of the values that this stage saves for later stages.
        member_bytes: Number of bytes that the saved values take for each client.
    """

    computation: flf.ConcreteComputation
    loads: tuple[str, ...]
    saves: tuple[str, ...]
    member_bytes: int


@dataclasses.dataclass(frozen=True)
class ResultParts:
    """Computations for the two kinds of parts of a result.

    Some parts have a value for each client, and the others have one value. Both
    computations take the arguments of `after_merge`, and return a struct of their parts
    in order. `rounds.client_cuts.join_parts` joins the parts again.

    Attributes:
        at_server: Computation of the parts with one value, or None if there are none.
        at_clients: Computation of the parts with a value for each client.
        keeping: The variant of `at_clients` that reads values which clients kept, or
            None if it needs no such values.
        names: Names of the kept values that are the parts at clients, in order. None if
            a part is not a kept value, so that `at_clients` must be evaluated.
    """

    at_server: flf.ConcreteComputation | None
    at_clients: flf.ConcreteComputation
    keeping: KeepingStage | None = None
    names: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class MergeableCompChain:
    """Stages that together are equivalent to one federated computation.

    A stage takes a struct of the argument, if the computation has one, and the merged
    values of all earlier stages, placed at the server. A struct with one element is
    replaced by that element. So the first stage and `after_merge` of a chain with one
    stage are a `MergeableCompForm`.

    Attributes:
        stages: The stages, in order. There is at least one.
        after_merge: Computation of the result, from the argument and the merged values.
        parts: The parts of the result, or None if no part has a value for each client,
            or if a user wrote the form.
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
        """The type of the argument, or None if the computation takes none."""
        return self.stages[0].up_to_merge.type_signature.parameter

    @functools.cached_property
    def kept_member_bytes(self) -> int:
        """Number of bytes that all kept values take for each client."""
        return sum(stage.keeping.member_bytes for stage in self.stages if stage.keeping)


def _partial_type(up_to_merge: flf.ConcreteComputation) -> fl.Type:
    result = up_to_merge.type_signature.result
    if isinstance(result, fl.FederatedType) and result.placement == fl.SERVER:
        return result.member
    raise errors.UpToMergeTypeError(
        f"Expected `up_to_merge` to return a server-placed value, found `{result}`:"
        " use fl.federated_zip to combine its results."
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
            f"Expected `after_merge` to take `{expected}`, the original argument (if"
            f" there is one) and the merged value, found `{parameter}`."
        )


def function_type_of(comp: object) -> fl.FunctionType:
    """Return the type of a computation or a mergeable form."""
    if isinstance(comp, MergeableCompForm | fl.framework.ConcreteComputation):
        return type_checks.function_type(comp.type_signature)
    raise errors.ValueMismatchError(
        f"Expected a MergeableCompForm or a computation, found {structs.show(comp)}:"
        " make one with fl.federated_computation or ray_fed.tensorflow.computation."
    )

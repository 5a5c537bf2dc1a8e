"""The mergeable form of a computation: what can be cut by clients, and the rest."""

import federated_language as fl

import ray_fed.errors as errors

flf = fl.framework


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
        UpToMergeTypeError: `up_to_merge` returns no server-placed value.
        MergeTypeNotAssignableError: `merge` does not take two results of
            `up_to_merge`, or its own.
        AfterMergeStructureError: `after_merge` does not take what it will be given.
    """

    def __init__(
        self,
        up_to_merge: flf.ConcreteComputation,
        merge: flf.ConcreteComputation,
        after_merge: flf.ConcreteComputation,
    ) -> None:
        partial = _partial_type(up_to_merge)
        _check_merge(merge, partial)
        merged = fl.FederatedType(merge.type_signature.result, fl.SERVER)
        _check_after_merge(after_merge, up_to_merge.type_signature.parameter, merged)
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

"""`MergeableCompExecutionContext`, with the constructor of its documentation."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
import ray_fed.values.plain_values as plain_values
from ray_fed.compiler.form import (
    MergeableCompChain,
    MergeableCompForm,
    function_type_of,
)
from ray_fed.contexts.runners import SequentialRunner
from ray_fed.executors.loops import LoopThread
from ray_fed.language import structs, type_checks
from ray_fed.plan import merge_tree
from ray_fed.rounds.execution import ComputationCache, RoundPolicy, Rounds

flf = fl.framework


class MergeableCompExecutionContext(flf.SyncContext):
    """Runs computations in mergeable form on other contexts, each for some clients.

    A `MergeableCompForm` is a computation as three functions: `up_to_merge` for some of
    the clients, `merge` for two of its results, and `after_merge` for the rest.

    Clients are divided into slices of neighbors and nearly equal size, none empty.
    `up_to_merge` runs on each slice, on any free context. If the context retries after
    a failure, it repeats only its slice. If the argument has no values of clients,
    `up_to_merge` runs `num_subrounds` times on the whole argument.

    Results are merged along a binary tree, and clients' results are in client order.
    Neither depends on the order in which slices finish. Several threads may call the
    context at a time, also from a running event loop.

    Args:
        async_contexts: Contexts that run the three functions. Their `invoke` is a
            coroutine function. They are not owned.
        compiler_fn: Function that compiles any computation to a form. It is called once
            for each computation. With None, the context runs only forms.
        transform_args: Function that is applied to the argument of a call first. If the
            call has no argument, it receives None.
        transform_result: Function that is applied to the result of a call last.
        num_subrounds: Maximum number of slices of a round, >= 1. With None, this is the
            number of contexts.

    Raises:
        UnsupportedError: `async_contexts` is empty.
        CardinalityError: `num_subrounds` is below one.
        ValueMismatchError: `async_contexts` is no sequence of `AsyncContext`s, another
            argument is not callable, or `num_subrounds` is not an integer.
    """

    def __init__(
        self,
        async_contexts: Sequence[flf.AsyncContext],
        compiler_fn: Callable[[Any], MergeableCompForm] | None = None,
        transform_args: Callable[[object], object] | None = None,
        transform_result: Callable[[object], object] | None = None,
        num_subrounds: int | None = None,
    ) -> None:
        _check_contexts(async_contexts)
        _check_callable("compiler_fn", compiler_fn)
        _check_callable("transform_args", transform_args)
        _check_callable("transform_result", transform_result)
        count = len(async_contexts)
        if num_subrounds is not None:
            count = type_checks.check_count(num_subrounds, "num_subrounds")
        self._rounds = Rounds(
            [
                SequentialRunner(context, f"context {index}")
                for index, context in enumerate(async_contexts)
            ],
            RoundPolicy(
                cut_leaves=lambda clients: (
                    merge_tree.cut_runs(clients, count) or [range(0)]
                ),
                num_subrounds=count,
                replicas=count,
            ),
        )
        self._forms = None
        if compiler_fn is not None:
            self._forms = ComputationCache(functools.partial(_compile, compiler_fn))
        self._transform_args = transform_args
        self._transform_result = transform_result
        self._thread = LoopThread("ray_fed rounds")

    @override
    @tracebacks.shorten
    def invoke(self, comp: Any, arg: Any = None) -> Any:
        """Execute a form, or a computation that `compiler_fn` compiles to a form.

        Args:
            comp: A `MergeableCompForm`, or a computation.
            arg: The argument, or None if `comp` has no parameter. `transform_args` and
                the contexts receive containers as Structs of federated_language.

        Returns:
            The result in the Python containers of its type, with NumPy values as
            elements.

        Raises:
            ValueMismatchError: `comp` is neither a form nor a computation, `comp` takes
                no argument but one was passed, `compiler_fn` returned no form, or a
                context's `invoke` returned no awaitable.
            UnsupportedError: `comp` is a computation, and `compiler_fn` is None.
            CardinalityError: Parts of the argument have values of different numbers of
                clients.
        """
        is_any = self._forms is not None and isinstance(comp, flf.Computation)
        function = comp.type_signature if is_any else function_type_of(comp)
        type_spec = type_checks.function_type(function)
        if self._transform_args is not None:
            arg = self._transform_args(
                plain_values.as_structs(arg, type_spec.parameter)
            )
        type_checks.check_no_argument(type_spec, arg)
        result = self._thread.wait_for(self._invoke(comp, arg))
        if self._transform_result is not None:
            result = self._transform_result(result)
        return result

    async def _invoke(self, comp: Any, arg: Any) -> Any:
        form, result_type = self._to_form(comp)
        chain = MergeableCompChain.of(form)
        result = await self._rounds.run_chain(chain, arg, self._rounds.new_call())
        return _to_containers(result, result_type)

    def _to_form(self, comp: Any) -> tuple[MergeableCompForm, fl.Type]:
        if isinstance(comp, MergeableCompForm):
            return comp, comp.type_signature.result
        if self._forms is None:
            raise errors.UnsupportedError(
                "Expected a MergeableCompForm, as this context has no compiler, found"
                f" `{type(comp).__name__}`: pass `compiler_fn`."
            )
        return self._forms.get(comp), comp.type_signature.result

    def close(self) -> None:
        """Stop the thread that runs rounds. The context cannot be used afterwards."""
        self._thread.close()


def _check_contexts(contexts: object) -> None:
    if not isinstance(contexts, Sequence):
        raise errors.ValueMismatchError(
            f"Expected a sequence of AsyncContexts, found {structs.show(contexts)}."
        )
    if not contexts:
        raise errors.UnsupportedError("Expected at least one context, found none.")
    for index, context in enumerate(cast("Sequence[object]", contexts)):
        if not isinstance(context, flf.AsyncContext):
            raise errors.ValueMismatchError(
                f"Expected `async_contexts[{index}]` to be an AsyncContext, found"
                f" {structs.show(context)}."
            )


def _check_callable(name: str, function: object) -> None:
    if function is not None and not callable(function):
        raise errors.ValueMismatchError(
            f"Expected `{name}` to be callable or None, found {structs.show(function)}."
        )


def _compile(
    compiler_fn: Callable[[Any], object], comp: flf.Computation
) -> MergeableCompForm:
    form = compiler_fn(comp)
    if not isinstance(form, MergeableCompForm):
        raise errors.ValueMismatchError(
            f"Expected `compiler_fn` to return a MergeableCompForm, found"
            f" {structs.show(form)}."
        )
    return form


def _to_containers(result: Any, type_spec: fl.Type) -> Any:
    return plain_values.from_plain(
        plain_values.to_plain(result, type_spec, "a result"), type_spec
    )

"""Runners: contexts that are called with a plan, and return its `Outcome`.

    SequentialRunner    calls any AsyncContext of federated_language
    LocalRunner         runs a plan in this process, on the executors of one device
    RayRunner           runs a plan on workers of Ray (in `cluster.session`)

A plan is the work of a subround (some of the clients) or of the finish of a round.
`invoke(Subround, argument)` takes the argument with the values of the subround's
clients. `invoke(Finish, (partials, before))` takes the results of the subrounds, and
the merged values of earlier stages. Both return an `Outcome`.
"""

import asyncio
import contextlib
import inspect
import threading
import time
from typing import Any

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
import ray_fed.values.plain_values as plain_values
import ray_fed.worker.stacks as stacks
from ray_fed.executors.fan_out import gather_by_index, run_in_order
from ray_fed.language import blocks, structs
from ray_fed.language.structs import Plain
from ray_fed.plan import diagnostics, merge_tree, outcomes
from ray_fed.plan.fingerprint import Fingerprint
from ray_fed.values import read_limits, stored
from ray_fed.worker import evaluation
from ray_fed.worker.evaluation import Executors
from ray_fed.worker.stacks import DeviceStack, ThreadedStack

flf = fl.framework


class SequentialRunner(flf.AsyncContext):
    """Runs plans by calls to another context, with one computation at a time.

    `name` is the runner's name in reports. The runner does not own the context.
    """

    def __init__(self, context: flf.AsyncContext, name: str) -> None:
        self._context = context
        self._name = name

    @override
    async def invoke(self, comp: Any, arg: Plain) -> outcomes.Outcome:
        begun = time.monotonic()
        match comp:
            case plans.Subround():
                results = await self._run(comp, arg)
            case _:
                results = [await self._finish(comp, *arg)]
        busy_s = time.monotonic() - begun
        return outcomes.Outcome.here(self._name, results, busy_s=busy_s)

    async def _run(self, subround: plans.Subround, arg: Plain) -> list[Plain]:
        comp = _parse(subround.computation)
        results = [
            await self._call(
                comp, stored.slice_clients(arg, comp.type_signature.parameter, inside)
            )
            for inside in subround.places
        ]
        if subround.merge is None:
            return results
        return [
            await self._merge(
                subround.merge,
                results[start - subround.first_leaf : stop - subround.first_leaf],
                [(index, index + 1) for index in range(start, stop)],
            )
            for start, stop in subround.subtrees
        ]

    async def _merge(
        self, merge: bytes, partials: list[Plain], subtrees: list[merge_tree.Subtree]
    ) -> Any:
        comp = _parse(merge)
        for left, right, _ in merge_tree.merge_order(subtrees):
            pair = (partials[left], partials[right])
            partials[left] = await self._call(comp, pair)
        return partials[0]

    async def _finish(
        self, finish: plans.Finish, partials: list[Plain], before: list[Plain]
    ) -> Any:
        merged: Any = ()
        if finish.merge is not None:
            merged = await self._merge(
                finish.merge, list(partials), list(finish.subtrees)
            )
        if finish.computation is None:
            return merged
        comp = _parse(finish.computation)
        return await self._call(comp, plans.as_argument([*before, merged]))

    async def _call(self, comp: flf.ConcreteComputation, arg: Plain) -> Any:
        if comp.type_signature.parameter is None:
            arg = None
        arg = plain_values.as_structs(arg, comp.type_signature.parameter)
        result = self._context.invoke(comp, arg)
        if not inspect.isawaitable(result):
            raise errors.ValueMismatchError(
                f"Expected `invoke` of {self._name} to return an awaitable, found"
                f" {structs.show(result)}: write it as a coroutine function."
            )
        return await result


def _parse(computation: bytes) -> flf.ConcreteComputation:
    block = blocks.parse_block(computation)
    return flf.ConcreteComputation.from_building_block(block)


def _on_calling_thread() -> contextlib.AbstractContextManager[None]:
    from ray_fed.tensorflow.graphs import callbacks

    return callbacks.on_calling_thread()


class LocalRunner(flf.AsyncContext):
    """Runs plans in this process, on the executors of one device.

    Args:
        stack: Executors of the device, which the runner owns.
        name: Name of the runner in reports.
        fingerprint: Properties of this process that decide the bits of results.
        limits: Limits on the data that clients' work may read.
        stepwise: Whether to run clients one after another, and Python functions in
            graphs on the thread that calls `invoke`. This is for debugging, with a
            `stack` that has no thread.
    """

    def __init__(
        self,
        stack: DeviceStack | ThreadedStack,
        name: str,
        fingerprint: Fingerprint,
        limits: read_limits.Limits | None = None,
        *,
        stepwise: bool = False,
    ) -> None:
        self._limits = limits or read_limits.Limits()
        self._stack = stack
        self._fingerprint = fingerprint
        self._name = name
        self._gather = run_in_order if stepwise else gather_by_index
        self._callbacks = _on_calling_thread if stepwise else contextlib.nullcontext

    def close(self) -> None:
        """Close the stack of executors."""
        self._stack.close()

    @override
    async def invoke(self, comp: Any, arg: Plain) -> outcomes.Outcome:
        stack = self._stack
        inner = stack.stack if isinstance(stack, ThreadedStack) else stack
        size = comp.clients_per_leaf
        executors = Executors.of_device(inner, size, self._gather)
        is_over = threading.Event()  # work on the stack's thread checks this

        def check() -> None:
            if is_over.is_set():
                raise read_limits.AbandonedError(
                    "Expected a caller that waits for the result, found none."
                )

        try:
            with (
                self._callbacks(),
                diagnostics.noting() as noted,
                read_limits.limited(self._limits, check),
            ):
                work = evaluation.evaluate_plan(comp, arg, executors)
                # The whole plan runs on the stack's thread. With one call for each
                # operation, threads would wait for each other.
                ran = stack.run(work) if isinstance(stack, ThreadedStack) else work
                evaluated = await ran
        except errors.RayFedError:
            raise
        except asyncio.CancelledError:
            is_over.set()
            raise
        except Exception as error:
            raise stacks.describe_failure(error, None) from error
        return outcomes.Outcome.here(
            self._name,
            evaluated.values,
            notes=diagnostics.in_order(noted),
            kernel_leaves=evaluated.kernel_leaves,
            no_kernel=evaluated.no_kernel,
            fingerprint=self._fingerprint,
            busy_s=evaluated.busy_s,
        )

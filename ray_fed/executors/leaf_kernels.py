"""Runs the kernel of a subround over a leaf stack, leaf by leaf, in short calls.

Where this runs is where TensorFlow is: on a thread of this process, or in an actor.
"""

import asyncio
import collections
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.plain as plain
import ray_fed.plan as plan
from ray_fed.executors.evaluation import merge_subtrees
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.executors.threads import ThreadDelegatingExecutor

flf = fl.framework
_CACHED_KERNELS = 32
"""Graphs that one worker keeps; one of a small model holds a few MB."""


class Pace:
    """Decides how many clients a call covers; the bits do not depend on it.

    The first call, which also sets the graph up, is of one client.
    """

    def __init__(self) -> None:
        self._seconds_a_client: float | None = None

    def count(self, remaining: int, call_s: float) -> int:
        """Return how many of the remaining clients to run in the next call."""
        if self._seconds_a_client is None:
            return min(1, remaining)
        wanted = call_s / max(self._seconds_a_client, 1e-9)
        return max(1, min(remaining, int(min(wanted, remaining))))

    def note(self, count: int, seconds: float) -> None:
        """Take note of what a call took."""
        self._seconds_a_client = seconds / count


class KernelCache:
    """Kernels by content, the least recently used dropped and closed.

    Args:
        device: name of the device to run on; None leaves it to TensorFlow.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._kernels: collections.OrderedDict[bytes, Any] = collections.OrderedDict()

    def load(self, kernel: plan.Kernel) -> "tuple[Any, Pace] | plan.NoKernel":
        """Return a kernel's graph and its pace, built when first asked for."""
        key = kernel.content
        if key not in self._kernels:
            self._kernels[key] = self._build(kernel)
            if len(self._kernels) > _CACHED_KERNELS:
                _, dropped = self._kernels.popitem(last=False)
                _close(dropped)
        self._kernels.move_to_end(key)
        return self._kernels[key]

    def _build(self, kernel: plan.Kernel) -> "tuple[Any, Pace] | plan.NoKernel":
        from ray_fed.tensorflow.client_data import UnfitError
        from ray_fed.tensorflow.kernels import ClientKernel

        try:
            return ClientKernel(kernel, self._device), Pace()
        except UnfitError as error:
            return plan.NoKernel(str(error))
        except Exception as error:  # noqa: BLE001 (what TensorFlow refuses to trace)
            first_line = str(error).partition("\n")[0]
            return plan.NoKernel(f"{type(error).__name__}: {first_line}")

    def close(self) -> None:
        """Drop all kernels."""
        for loaded in self._kernels.values():
            _close(loaded)
        self._kernels.clear()


def _close(loaded: Any) -> None:
    if not isinstance(loaded, plan.NoKernel):
        loaded[0].close()


class KernelRun:
    """Runs leaves of a subround, one after another, with one kernel.

    Args:
        loaded: the graph and its pace.
        inputs: zeros and constants, plain.
        num_aggregations: how many of these are zeros.
        call_s: see `plan.Subround`.
        check: called before each call; what it raises ends the run.
    """

    def __init__(
        self,
        loaded: tuple[Any, Pace],
        inputs: Sequence[Any],
        num_aggregations: int,
        call_s: float,
        check: Callable[[], None],
    ) -> None:
        self._graph, self._pace = loaded
        self._zeros = self._graph.tensors(inputs[:num_aggregations], is_partial=True)
        self._constants = self._graph.tensors(
            inputs[num_aggregations:], is_partial=False
        )
        self._call_s = call_s
        self._check = check

    async def leaf(
        self, leaf: range, data: Sequence[Sequence[Any]]
    ) -> tuple[Any, fl.Type]:
        """Return the partial of a leaf and its type.

        Args:
            leaf: its clients, by index in the cohort.
            data: for each part their plain values, in order.

        Raises:
            Exception: what the clients' work raised.
        """
        laid = self._graph.lay(data, leaf)
        accumulators, done = self._zeros, 0
        while done < len(leaf):
            self._check()
            await asyncio.sleep(0)  # lets a cancelled call end here
            count = self._pace.count(len(leaf) - done, self._call_s)
            clients = range(done, done + count)
            started = time.monotonic()
            accumulators = self._graph.run(clients, accumulators, self._constants, laid)
            self._pace.note(count, time.monotonic() - started)
            done += count
        return self._graph.partial(accumulators)


async def run_kernel(
    executor: flf.Executor,
    kernels: KernelCache,
    subround: plan.Subround,
    inputs: flf.ExecutorValue,
    data: Sequence[Sequence[Any]],
    check: Callable[[], None] = lambda: None,
) -> list[flf.ExecutorValue] | plan.NoKernel:
    """Return the partial of each of `subround.nodes`, embedded in the leaf stack.

    Args:
        executor: embeds partials and merges them.
        kernels: of the executor.
        subround: with a kernel, and a merge.
        inputs: what `server` of the kernel returned, embedded.
        data: for each of `data` of the kernel the plain values of all clients of the
            subround, in order.
        check: called before each call; what it raises ends the run.
    """
    kernel = cast("plan.Kernel", subround.kernel)
    loaded = kernels.load(kernel)
    if isinstance(loaded, plan.NoKernel):
        return loaded
    given = plain.to_plain(await inputs.compute(), inputs.type_signature)
    run = KernelRun(loaded, given, kernel.num_aggregations, subround.call_s, check)
    first = subround.leaves[0].start
    partials: list[flf.ExecutorValue] = []
    for position, leaf in enumerate(subround.leaves):
        part = [members[leaf.start - first : leaf.stop - first] for members in data]
        try:
            partial, type_spec = await run.leaf(leaf, part)
        except errors.ClusterError:
            raise
        except Exception as error:  # noqa: BLE001 (the interpreter will say what it is)
            return plan.NoKernel(f"{type(error).__name__} in a kernel", position)
        partials.append(await executor.create_value(partial, type_spec))
    return await merge_subtrees(subround, partials, executor)


class LeafStack(ReferenceResolvingExecutor):
    """A leaf stack that runs kernels beside the four verbs.

    Args:
        target_executor: of the stack; owned.
        device: name of its device; None leaves it to TensorFlow.
    """

    def __init__(self, target_executor: flf.Executor, device: str | None) -> None:
        super().__init__(target_executor)
        self._kernels = KernelCache(device)

    async def run_kernel(
        self,
        subround: plan.Subround,
        inputs: flf.ExecutorValue,
        data: Sequence[Sequence[Any]],
        check: Callable[[], None] = lambda: None,
    ) -> list[flf.ExecutorValue] | plan.NoKernel:
        """See `run_kernel` of the module."""
        return await run_kernel(self, self._kernels, subround, inputs, data, check)

    @override
    def close(self) -> None:
        self._kernels.close()
        super().close()


class ThreadedLeaf(ThreadDelegatingExecutor):
    """A leaf stack on a thread of its own, kernels too.

    Args:
        leaf: owned.
        name: of the thread.
    """

    def __init__(self, leaf: LeafStack, name: str) -> None:
        super().__init__(leaf, name)
        self._leaf = leaf

    async def run_kernel(
        self,
        subround: plan.Subround,
        inputs: flf.ExecutorValue,
        data: Sequence[Sequence[Any]],
    ) -> list[flf.ExecutorValue] | plan.NoKernel:
        """See `run_kernel` of the module."""
        return await self._delegate(self._leaf.run_kernel(subround, inputs, data))

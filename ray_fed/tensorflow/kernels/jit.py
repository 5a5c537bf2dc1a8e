"""Measures once whether XLA pays for the work of a kernel.

The decision is part of what decides bits: whoever asks keeps it, tells it to all
workers, and records it.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from ray_fed.plan import plans
from ray_fed.tensorflow.kernels.client_kernel import ClientKernel

_LEAST_GAIN = 1.1
"""XLA is to be so many times quicker: each worker compiles, which takes seconds."""

_MOST_COMPILE_S = 10.0
_MOST_SHAPES = 4
"""Each shape is compiled by itself."""

_HOPELESS = 2.0
"""XLA that takes so many times longer on one client is not measured on more, if that
would take long: on a CPU, convolutions take 25 times as long."""

_MOST_TRIAL_S = 5.0
"""What takes longer is long. One client alone says little: its run pays for what all
share."""

_LEAST_RUNS, _MOST_RUNS = 3, 30
"""Of each way."""

_ENOUGH_S = 0.5
"""After so much of both ways there is no further run than the least."""


def measure_jit(
    kernel: plans.Kernel,
    inputs: Sequence[Any],
    data: Sequence[Sequence[Any]],
    device: str | None,
    num_beside: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> plans.JitDecision:
    """Return whether XLA pays, from clients run with and without it.

    It measures time, so ask once. And it depends on how many executors share a process:
    on Ray one, locally as many as there are workers.

    What XLA compiles for a CPU runs on TensorFlow's threads for one op. Those are one
    executor's, so that bits are equal on every backend; executors that share a process
    wait for each other there. So the work is measured beside as much as it may run
    beside.

    Args:
        kernel: what the compiler planned.
        inputs: zeros and constants, plain: what its `server` returned.
        data: for each of `data` of the kernel the plain values of some clients.
        device: name of the device to run on; None leaves it to TensorFlow.
        num_beside: executors that do such work in this process at once.
        clock: in seconds.

    Raises:
        UnfitError: the work has no kernel.
        Exception: what the clients' work raises.
    """
    plain, compiled = (
        _Timed(dataclasses.replace(kernel, jit=jit), inputs, data, device, clock)
        for jit in (False, True)
    )
    try:
        return _decide(plain, compiled, num_beside)
    finally:
        plain.graph.close()
        compiled.graph.close()


def _decide(plain: "_Timed", compiled: "_Timed", num_beside: int) -> plans.JitDecision:
    num_shapes = len(compiled.values.shapes)
    if num_shapes > _MOST_SHAPES:
        return plans.JitDecision(jit=False, reason=f"data of {num_shapes} shapes")
    compiled.count = plain.count = compiled.count_alike()
    first_s = compiled.run(1)
    refusals = compiled.graph.refusals
    if refusals or compiled.shape(1) is None:
        reason = ", ".join(sorted(refusals)) or "clients without one shape"
        return plans.JitDecision(jit=False, reason=reason)
    if first_s > _MOST_COMPILE_S:
        reason = f"{first_s:.1f} s to compile"
        return plans.JitDecision(jit=False, reason=reason, compile_s=first_s)
    plain.run(1)
    seconds = plain.run(1), compiled.run(1)
    num_clients = compiled.count * num_beside * _LEAST_RUNS
    is_long = seconds[1] * num_clients > _MOST_TRIAL_S
    if not is_long or seconds[1] <= _HOPELESS * seconds[0]:
        seconds = _best_of(plain, compiled, num_beside)
    gain = seconds[0] / max(seconds[1], 1e-9)
    return plans.JitDecision(
        gain >= _LEAST_GAIN, f"{gain:.2f} times as quick", *seconds, compile_s=first_s
    )


def _best_of(
    plain: "_Timed", compiled: "_Timed", num_beside: int
) -> tuple[float, float]:
    """Return the least seconds that a client takes of each, all beside each other."""
    runs: list[tuple[float, float]] = []
    with concurrent.futures.ThreadPoolExecutor(num_beside) as threads:
        while len(runs) < _LEAST_RUNS or (
            len(runs) < _MOST_RUNS and sum(map(sum, runs)) < _ENOUGH_S
        ):
            of_plain = plain.run_beside(threads, num_beside)
            of_jit = compiled.run_beside(threads, num_beside)
            runs.append((of_plain, of_jit))
    plain_s, jit_s = map(min, zip(*runs, strict=True))
    return plain_s / plain.count, jit_s / compiled.count


class _Timed:
    """A kernel with clients to run."""

    def __init__(
        self,
        kernel: plans.Kernel,
        inputs: Sequence[Any],
        data: Sequence[Sequence[Any]],
        device: str | None,
        clock: Callable[[], float],
    ) -> None:
        self.graph = ClientKernel(kernel, None, device)
        self._zeros, self._constants = self.graph.inputs(inputs)
        self.values = self.graph.lay_values(data)
        self.count = self._leaf_size = len(data[0]) if data else 1
        self._laid = self.graph.lay(self.values, range(self.count))
        self._clock = clock

    def count_alike(self) -> int:
        """Return how many clients from the first on have its shape."""
        kinds = self.values.kinds
        others = (kinds != kinds[:1]).nonzero()[0]
        return int(others[0]) if len(others) else max(1, len(kinds))

    def shape(self, count: int) -> Any:
        return self.graph.shape_of(range(count), self._laid, self._leaf_size)

    def run(self, count: int) -> float:
        """Return the seconds that the first clients take."""
        run = self._prepare(count)
        started = self._clock()
        run()
        return self._clock() - started

    def run_beside(self, threads: concurrent.futures.Executor, number: int) -> float:
        """Return the seconds that all clients take, so many times at once."""
        run = self._prepare(self.count)
        started = self._clock()
        for ran in [threads.submit(run) for _ in range(number)]:
            ran.result()
        return self._clock() - started

    def _prepare(self, count: int) -> Callable[[], object]:
        laid = self._laid.of_shape(self.shape(count))
        arguments = [range(count)], [(0, 1)], self._zeros, self._constants, laid
        return functools.partial(self.graph.run, *arguments)

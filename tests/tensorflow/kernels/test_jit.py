"""Whether XLA pays: what is measured, and what is decided from it."""

import dataclasses
import itertools
import threading
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

from ray_fed import tensorflow as rtf
from ray_fed.plan import plans
from ray_fed.tensorflow.kernels import jit
from ray_fed.tensorflow.kernels.client_kernel import ClientKernel
from tests.stages import kernel_of, summed

ROWS = fl.TensorType(np.float32, [None, 3])
ZEROS = [np.zeros(3, np.float32)]


@rtf.computation(ROWS)
def total(rows: Any) -> Any:
    return tf.reduce_sum(rows, 0)


@rtf.computation(ROWS)
def noisy_total(rows: Any) -> Any:
    return tf.reduce_sum(rows, 0) + tf.random.normal([3])


def clients(*sizes: int) -> list[Any]:
    return [np.ones((size, 3), np.float32) for size in sizes]


class Clock:
    """Makes each run take what is said: two readings a run."""

    def __init__(self, *seconds: float) -> None:
        ends = itertools.chain.from_iterable((0.0, took) for took in seconds)
        self._readings = iter(list(ends))

    def __call__(self) -> float:
        return next(self._readings)


COMPILE, PLAIN_FIRST = 1.0, 1.0


@pytest.mark.parametrize(
    ("plain_s", "jit_s", "expected"),
    [(1.2, 1.0, True), (1.05, 1.0, False), (1.0, 1.5, False)],
    ids=["much quicker", "hardly quicker", "slower"],
)
def test_decides_by_the_gain(plain_s: float, jit_s: float, *, expected: bool) -> None:
    one = (COMPILE, PLAIN_FIRST, plain_s, jit_s)
    clock = Clock(*one, *[plain_s, jit_s] * 3)

    found = jit.measure_jit(
        kernel_of(summed(total)), ZEROS, [clients(2, 2)], None, clock=clock
    )

    gain = f"{plain_s / jit_s:.2f} times as quick"
    assert found == plans.JitDecision(
        expected, gain, plain_s / 2, jit_s / 2, compile_s=COMPILE
    )


def test_hopeless_work_runs_for_one_client_only() -> None:
    clock = Clock(COMPILE, PLAIN_FIRST, 1.0, 25.0)

    found = jit.measure_jit(
        kernel_of(summed(total)), ZEROS, [clients(2, 2)], None, clock=clock
    )

    assert (found.jit, found.plain_s, found.jit_s) == (False, 1.0, 25.0)


def test_slow_work_is_measured_where_that_is_quick() -> None:
    clock = Clock(COMPILE, PLAIN_FIRST, 0.2, 0.7, *[0.4, 0.2] * 3)

    found = jit.measure_jit(
        kernel_of(summed(total)), ZEROS, [clients(2, 2)], None, clock=clock
    )

    assert (found.jit, found.reason) == (True, "2.00 times as quick")


def test_slow_work_that_many_would_do_at_once_is_not_measured() -> None:
    clock = Clock(COMPILE, PLAIN_FIRST, 0.2, 0.7)

    found = jit.measure_jit(
        kernel_of(summed(total)), ZEROS, [clients(2, 2)], None, 2, clock
    )

    assert (found.jit, found.plain_s, found.jit_s) == (False, 0.2, 0.7)


def test_work_is_measured_beside_as_much_as_it_will_run_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_work = threading.Barrier(3)
    run = ClientKernel.run

    def meet(self: Any, leaves: Any, *rest: Any) -> Any:
        if len(leaves[0]) == 2:  # what is measured, and no client alone
            at_work.wait(timeout=10)
        return run(self, leaves, *rest)

    monkeypatch.setattr(ClientKernel, "run", meet)
    found = jit.measure_jit(
        kernel_of(summed(total)), ZEROS, [clients(2, 2)], None, num_beside=3
    )

    assert found.plain_s is not None
    assert not at_work.broken


def test_what_takes_long_to_compile_is_off() -> None:
    found = jit.measure_jit(
        kernel_of(summed(total)), ZEROS, [clients(2)], None, clock=Clock(11.0)
    )

    assert found == plans.JitDecision(
        jit=False, reason="11.0 s to compile", compile_s=11.0
    )


@pytest.mark.parametrize(
    ("work", "sizes", "reason"),
    [
        (total, [1, 2, 3, 4, 5], "data of 5 shapes"),
        (noisy_total, [2, 2], "RandomStandardNormal, an op with state or effects"),
    ],
    ids=["many shapes", "draws"],
)
def test_what_cannot_be_compiled_is_off_with_the_reason(
    work: Any, sizes: list[int], reason: str
) -> None:
    found = jit.measure_jit(kernel_of(summed(work)), ZEROS, [clients(*sizes)], None)

    assert found == plans.JitDecision(jit=False, reason=reason)


def test_real_clock_measures_both() -> None:
    found = jit.measure_jit(kernel_of(summed(total)), ZEROS, [clients(2, 2)], None)

    assert found.plain_s is not None
    assert found.jit_s is not None
    assert dataclasses.replace(found, jit=False).reason.endswith("times as quick")

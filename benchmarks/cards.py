"""Rounds on a card in several ways, with the share of its peak: at most eight minutes.

    python -m benchmarks.cards                    on a card
    python -m benchmarks.cards --on cpus          the same steps in small, without one

Prints its plan, then a line as each way is done, then a table. Each way has a context
of its own, which runs rounds of all workloads one after another: two to warm up, then
those that count. Workers keep the clients' data; a round of `cifar10` and `femnist` has
other clients than the round before. Ways are begun in order while there is time; the
others are named as left out.

The peak is that of products of large matrices, run as a client's work: the card's with
TF32, and without. A client's work is counted by the products and convolutions of its
graph. Weights are compared with those of the CPUs within what TF32 leaves: with `cnn`
0.064 of what the round changed a tensor by was seen, 0.024 without. The command fails
where they differ by more than a tenth of a tensor's norm.

What op determinism costs, which ray_fed always has on a card, is measured in plain
TensorFlow: one process with it, and one without, loop over clients of `cnn`.
"""

import argparse
import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

import ray_fed
from benchmarks.hosting import Hosted
from benchmarks.rounds import agree, tell
from benchmarks.workloads import WORKLOADS, Workload, build_round, make_datasets
from ray_fed import tensorflow as rtf

_WARM_UP = 2
_RELATIVE = 0.1
"""Of the norm of a tensor."""

_AT_ONCE = 16

COHORTS: dict[str, tuple[int, int]] = {
    "tiny": (1000, 1000),
    "mlp": (500, 500),
    "cnn": (100, 100),
    "cifar10": (50, 1000),
    "femnist": (10, 100),
}
"""Clients of a round, and of all rounds together."""


@dataclasses.dataclass(frozen=True)
class Way:
    """Settings of a context.

    Attributes:
        num_gpus: of a worker.
        count: of workers; None: one for each CPU.
        kernels: see `ray_fed.Config.kernels`.
        tf32: whether a card multiplies in TF32.
    """

    num_gpus: float = 1.0
    count: int | None = 1
    kernels: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    tf32: bool = True

    def config(self, *, has_card: bool) -> ray_fed.Config:
        """Return the settings; without a card the workers have CPUs."""
        workers = ray_fed.Workers(
            count=self.count if has_card else 2,
            num_gpus=self.num_gpus if has_card else 0.0,
        )
        environment = {} if self.tf32 else {"NVIDIA_TF32_OVERRIDE": "0"}
        return ray_fed.Config(
            workers=workers,
            kernels=self.kernels,
            runtime_env={"env_vars": environment} if environment else None,
        )


WAYS = {
    "cpus": Way(num_gpus=0.0, count=None),
    "card": Way(),
    "16 at once": Way(kernels={"vectorized_clients": _AT_ONCE}),
    "without TF32": Way(tf32=False),
    "quarters": Way(0.25, 4, {"vectorized_clients": _AT_ONCE}),
    "without XLA": Way(kernels={"jit": "off"}),
}
"""The first is what others are compared with; the most wanted come first."""


_COUNTED = ("MatMul", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")


def count_operations(workload: Workload, batch_size: int) -> int:
    """Return the floating point operations of a step's products and convolutions."""
    graph = tf.Graph()
    with graph.as_default():
        weights = [tf.zeros(shape) for shape in workload.shapes]
        x = tf.zeros([batch_size, workload.num_pixels])
        workload.step(weights, x, tf.zeros([batch_size], tf.int32))
    total = 0
    for op in graph.get_operations():
        if op.type not in _COUNTED:
            continue
        shapes: list[Any] = [tensor.shape.as_list() for tensor in op.inputs]
        result: Any = op.outputs[0].shape.as_list()
        match op.type:
            case "MatMul":
                contracted = shapes[0][0 if op.get_attr("transpose_a") else 1]
                total += 2 * math.prod(result) * contracted
            case "Conv2D":
                total += 2 * math.prod(shapes[1]) * math.prod(result[:3])
            case "Conv2DBackpropInput":
                total += 2 * math.prod(shapes[1]) * math.prod(shapes[2][:3])
            case _:
                total += 2 * math.prod(result) * math.prod(shapes[2][:3])
    return total


@rtf.computation(fl.TensorType(np.int32))
def _multiply(settings: Any) -> Any:
    """Multiply matrices of 8,192 rows a hundred times, or 1,024 and eight times."""
    size: Any = tf.where(settings > 0, 8192, 1024)
    shape = tf.stack([size, size])
    factor = tf.random.stateless_normal(shape, (1, 2))
    factor /= tf.sqrt(tf.cast(size, tf.float32))

    def step(index: Any, product: Any) -> Any:
        return index + 1, tf.matmul(product, factor)

    def goes_on(index: Any, _: Any) -> Any:
        return index < tf.where(settings > 0, 100, 8)

    return tf.reduce_sum(tf.while_loop(goes_on, step, (0, factor))[1])


@fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
def _multiply_all(settings: Any) -> Any:
    return fl.federated_sum(fl.federated_map(_multiply, settings))


@dataclasses.dataclass(frozen=True)
class Timed:
    """Rounds of a workload.

    Attributes:
        seconds: median of the rounds that count.
        weights: that the last one came to.
    """

    seconds: float
    weights: list[Any]


def _time_rounds(context: Any, name: str, num_rounds: int, share: float) -> Timed:
    workload = WORKLOADS[name]
    cohort, pool = (max(4, round(number * share)) for number in COHORTS[name])
    clients: Any = make_datasets(workload, pool, pool, "placed")
    computation = build_round(workload)
    seconds: list[float] = []
    weights: Any = ()
    for index in range(_WARM_UP + num_rounds):
        chosen = [(index * cohort + i) % pool for i in range(cohort)]
        started = time.perf_counter()
        weights = context.invoke(
            computation, (workload.initial(), clients.select(chosen))
        )
        seconds.append(time.perf_counter() - started)
    return Timed(statistics.median(seconds[_WARM_UP:]), list(weights))


def _time_peak(context: Any, num_workers: int, *, has_card: bool) -> float:
    """Return the floating point operations a second of products of matrices."""
    size, repeats = (8192, 100) if has_card else (1024, 8)
    seconds: list[float] = []
    for _ in range(3):
        started = time.perf_counter()
        context.invoke(_multiply_all, [int(has_card)] * num_workers)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 * repeats * num_workers / min(seconds)


def _is_close(found: Any, expected: Any) -> bool:
    difference = np.linalg.norm(np.subtract(found, expected))
    return bool(difference <= _RELATIVE * np.linalg.norm(expected))


class PlainLoop:
    """A loop of plain TensorFlow over clients of `cnn`, in a process of its own.

    Args:
        deterministic: whether with op determinism.
        num_clients: of a call.
    """

    def __init__(self, deterministic: bool, num_clients: int) -> None:  # noqa: FBT001
        from benchmarks.plain_tf import PlainShare

        if deterministic:
            tf.config.experimental.enable_op_determinism()
        self._share = PlainShare(WORKLOADS["cnn"], range(num_clients), num_clients)

    def time(self) -> float:
        """Return the least seconds of three calls, after one that does not count."""
        seconds: list[float] = []
        for _ in range(4):
            started = time.perf_counter()
            self._share.run(jit_compile=False)
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:])


def _price_determinism(num_clients: int) -> float:
    """Return how many times as long the loop takes with op determinism."""
    taken: list[float] = []
    for deterministic in (True, False):
        host = Hosted(PlainLoop, deterministic, num_clients)
        try:
            host.receive()
            taken.append(host.call("time"))
        finally:
            host.close()
    return taken[0] / taken[1]


def _describe(num_rounds: int, share: float, ways: Sequence[str]) -> str:
    lines = [
        f"{len(ways)} ways, {_WARM_UP} rounds to warm up and {num_rounds} each of:"
    ]
    for name, sizes in COHORTS.items():
        cohort, pool = (max(4, round(number * share)) for number in sizes)
        workload = WORKLOADS[name]
        flops = count_operations(workload, workload.batch_size)
        each = flops * workload.num_examples / workload.batch_size
        lines.append(
            f"  {name}: {cohort} of {pool} clients, {workload.num_examples} examples"
            f" in steps of {workload.batch_size}, {each / 1e9:.3f} GFLOP a client"
        )
    return "\n".join([*lines, f"ways, in order: {', '.join(ways)}", "then determinism"])


def _print_table(
    found: dict[str, dict[str, Timed]], peaks: dict[str, float], share: float
) -> None:
    print(f"| clients a second (share of peak) | {' | '.join(found)} |")
    print(f"| --- |{' ---: |' * len(found)}")
    for name, (number, _) in COHORTS.items():
        workload, cohort = WORKLOADS[name], max(4, round(number * share))
        flops = count_operations(workload, workload.batch_size)
        each = flops * workload.num_examples / workload.batch_size
        cells: list[str] = []
        for way, timed in found.items():
            rate = cohort / timed[name].seconds
            cells.append(f"{rate:,.1f} ({rate * each / peaks[way]:.2%})")
        print(f"| {name} | {' | '.join(cells)} |")
    cells = [f"{peak / 1e12:.2f}" for peak in peaks.values()]
    print(f"| peak, TFLOP/s | {' | '.join(cells)} |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cards")
    parser.add_argument("--on", choices=("card", "cpus"), default="card")
    parser.add_argument("--rounds", type=int, default=5, help="that count")
    parser.add_argument("--share", type=float, help="of the clients; on CPUs 0.05")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--limit-s", type=float, default=420.0, help="to begin a way")
    options = parser.parse_args(arguments)
    has_card = options.on == "card"
    share = options.share or (1.0 if has_card else 0.05)
    print(_describe(options.rounds, share, options.ways), flush=True)
    begun = time.monotonic()
    longest = 0.0
    found: dict[str, dict[str, Timed]] = {}
    peaks: dict[str, float] = {}
    for way in options.ways:
        started = time.monotonic()
        if started - begun + longest > options.limit_s:
            tell(f"{way}: left out, there is no time for it")
            continue
        config = WAYS[way].config(has_card=has_card)
        num_workers = config.workers.count or os.cpu_count() or 1
        on_card = has_card and WAYS[way].num_gpus > 0
        with ray_fed.create_context(config, address="local") as context:
            peaks[way] = _time_peak(context, int(str(num_workers)), has_card=on_card)
            found[way] = {
                name: _time_rounds(context, name, options.rounds, share)
                for name in COHORTS
            }
        taken = time.monotonic() - started
        longest = max(longest, taken)
        rates = {name: round(timed.seconds, 4) for name, timed in found[way].items()}
        tell(f"{way}: {taken:.0f} s; seconds of a round: {rates}")
    price = _price_determinism(max(4, round(COHORTS["cnn"][0] * share)))
    _print_table(found, peaks, share)
    print(f"op determinism: {price:.2f} times as long (plain loop over cnn)")
    print(f"{time.monotonic() - begun:.0f} s in all")
    expected, *others = found.values()
    differing = {
        name
        for timed in others
        for name in COHORTS
        if not agree(timed[name].weights, expected[name].weights, _is_close)
    }
    for name in sorted(differing):
        tell(f"Expected the weights of the first way for {name}, they differ.")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())

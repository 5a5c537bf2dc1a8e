"""What XLA gains on kinds of client work: the measurements behind `kernels.jit`.

Each case runs by two contexts of the same settings but for `kernels.jit`, "off" and
"on", which take turns of a round; one line of JSON has the medians.

    python -m benchmarks.xla [CASE...] [--backend local|ray] [--workers N]
    python -m benchmarks.xla [CASE...] --backend ray --num-gpus 0.5 --share 0.1
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

import ray_fed
from benchmarks import workloads
from ray_fed import tensorflow as rtf
from ray_fed.program import ClientData

_CLIENTS_PER_LEAF = 16
_DISTINCT = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """Client work to time.

    Attributes:
        num_clients: of a round; so many that they, not the fixed cost, take the time.
        make: returns a computation, and its arguments for so many clients.
    """

    num_clients: int
    make: Callable[[int], tuple[Any, Any]]


def _training(name: str, num_examples: int) -> Callable[[int], tuple[Any, Any]]:
    def make(num_clients: int) -> tuple[Any, Any]:
        workload = dataclasses.replace(
            workloads.WORKLOADS[name], num_examples=num_examples
        )
        data = workloads.make_datasets(workload, num_clients, _DISTINCT, "placed")
        return workloads.build_round(workload), (workload.initial(), data)

    return make


def _of_array(
    shape: Sequence[int], work: Callable[[Any], Any]
) -> Callable[[int], tuple[Any, Any]]:
    """Return what makes a sum of the work of clients that have an array each."""
    member = fl.TensorType(np.float32, shape)

    def make(num_clients: int) -> tuple[Any, Any]:
        computation = rtf.computation(member)(work)

        @fl.federated_computation(fl.FederatedType(member, fl.CLIENTS))
        def total(values: Any) -> Any:
            return fl.federated_sum(fl.federated_map(computation, values))

        drawn = np.random.default_rng(0)
        distinct = [
            drawn.random(tuple(shape), np.float32)
            for _ in range(min(num_clients, _DISTINCT))
        ]
        data = ClientData.from_values(distinct, member)
        return total, data.select([i % len(distinct) for i in range(num_clients)])

    return make


def _chained(x: Any) -> Any:
    for _ in range(10):
        x = tf.tanh(x * 0.9) + x * x * 0.1
    return x


def _added(x: Any) -> Any:
    for _ in range(10):
        x = tf.nn.relu(x * 0.9 - 0.1) + x * x
    return x


def _multiplied(x: Any) -> Any:
    product = x
    for _ in range(4):
        product = tf.nn.relu(tf.matmul(product, x)) * 0.01
    return product


def _summed(x: Any) -> Any:
    for _ in range(10):
        x = x - 0.1 * tf.reduce_sum(x)
    return x


CASES: Mapping[str, Case] = {
    "1 op on 10 numbers": Case(20_000, _of_array([10], lambda x: x * x)),
    "50 ops on 10 numbers": Case(10_000, _of_array([10], _added)),
    "50 ops on 10,000 numbers": Case(500, _of_array([10_000], _added)),
    "50 ops on 1,000,000 numbers": Case(32, _of_array([1_000_000], _added)),
    "50 ops with tanh on 10 numbers": Case(10_000, _of_array([10], _chained)),
    "50 ops with tanh on 250 numbers": Case(5_000, _of_array([250], _chained)),
    "50 ops with tanh on 10,000 numbers": Case(500, _of_array([10_000], _chained)),
    "30 ops with sums of 1,000 numbers": Case(5_000, _of_array([1000], _summed)),
    "30 ops with sums of 10,000 numbers": Case(500, _of_array([10_000], _summed)),
    "4 products of 16x16": Case(5_000, _of_array([16, 16], _multiplied)),
    "4 products of 64x64": Case(2_000, _of_array([64, 64], _multiplied)),
    "4 products of 256x256": Case(128, _of_array([256, 256], _multiplied)),
    "4 products of 1,024x1,024": Case(4, _of_array([1024, 1024], _multiplied)),
    "tiny": Case(2_000, _training("tiny", 20)),
    "tiny, 50 steps": Case(64, _training("tiny", 1_000)),
    "mlp": Case(128, _training("mlp", 100)),
    "cnn, 1 step": Case(2, _training("cnn", 20)),
}


def _time(case: Case, contexts: Sequence[Any], share: float, num_rounds: int) -> Any:
    """Return what a client takes both ways, and what XLA adds to a first round."""
    num_clients = max(1, round(case.num_clients * share))
    computation, arguments = case.make(num_clients)

    def run(context: Any) -> float:
        started = time.perf_counter()
        context.invoke(computation, arguments)
        return time.perf_counter() - started

    first = [run(context) for context in contexts]
    for context in contexts:
        run(context)
    turns = [[run(context) for context in contexts] for _ in range(num_rounds)]
    off, on = (statistics.median(taken) for taken in zip(*turns, strict=True))
    return {
        "off_us_a_client": round(1e6 * off / num_clients, 1),
        "on_us_a_client": round(1e6 * on / num_clients, 1),
        "times_as_quick": round(off / on, 2),
        "more_in_first_round_s": round(first[1] - first[0], 2),
    }


def _open(options: argparse.Namespace, jit: str) -> Any:
    config = ray_fed.Config(
        backend=options.backend,
        workers=ray_fed.Workers(count=options.workers, num_gpus=options.num_gpus),
        clients_per_leaf=_CLIENTS_PER_LEAF,
        kernels={"jit": jit},
    )
    return ray_fed.create_context(config)


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the cases that are named, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.xla")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--backend", choices=("local", "ray"), default="local")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--num-gpus", type=float, default=0, help="of each worker")
    parser.add_argument("--share", type=float, default=1, help="of a case's clients")
    parser.add_argument("--rounds", type=int, default=7, help="that count")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        contexts = [stack.enter_context(_open(options, jit)) for jit in ("off", "on")]
        for name in options.cases or CASES:
            found[name] = _time(CASES[name], contexts, options.share, options.rounds)
            print(name, found[name], file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

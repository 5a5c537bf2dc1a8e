"""Prints one line of JSON a workload: rounds on a GPU in several ways, beside the CPUs.

    python -m benchmarks.cards tiny:1000 mlp:500 cnn:100

A workload has the number of its clients behind it. Each way has a context of its own,
which runs the rounds of all workloads one after another: two to warm up, then those
that count. Workers keep the clients' data. Weights are compared with those of the CPUs
within what TF32, TensorFlow's format for products on a GPU, leaves: with `cnn` 0.064 of
what the round changed a tensor by was seen, 0.024 without TF32. The command fails where
they differ by more than a tenth of a tensor's norm.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import ray_fed
from benchmarks.rounds import agree, tell
from benchmarks.workloads import WORKLOADS, build_round, make_datasets

_WARM_UP = 2
_RELATIVE = 0.1
"""Of the norm of a tensor."""

_AT_ONCE = 16


def _settings(
    num_gpus: float, count: int | None, jit: str = "off", at_once: int = 1
) -> dict[str, Any]:
    workers = ray_fed.Workers(count=count, num_gpus=num_gpus)
    return {"workers": workers, "kernels": {"jit": jit, "vectorised_clients": at_once}}


_WAYS: dict[str, dict[str, Any]] = {
    "cpus": _settings(0, None, "auto"),
    "card": _settings(1, 1),
    "card, xla": _settings(1, 1, "on"),
    "card, 16 at once": _settings(1, 1, "off", _AT_ONCE),
    "card, 16 at once, xla": _settings(1, 1, "on", _AT_ONCE),
    "quarters": _settings(0.25, 4),
    "quarters, 16 at once, xla": _settings(0.25, 4, "on", _AT_ONCE),
}


def _run(
    settings: dict[str, Any], cohorts: Sequence[tuple[str, int]], num_rounds: int
) -> list[tuple[float, list[Any]]]:
    """Return, for each cohort, the median seconds of a round, and its weights."""
    found: list[tuple[float, list[Any]]] = []
    with ray_fed.create_context(ray_fed.Config(**settings), address="local") as context:
        for name, num_clients in cohorts:
            workload = WORKLOADS[name]
            clients = make_datasets(workload, num_clients, num_clients, "placed")
            computation = build_round(workload)
            taken: list[float] = []
            weights: Any = ()
            for _ in range(_WARM_UP + num_rounds):
                started = time.perf_counter()
                weights = context.invoke(computation, (workload.initial(), clients))
                taken.append(time.perf_counter() - started)
            found.append((statistics.median(taken[_WARM_UP:]), list(weights)))
    return found


def _is_close(found: Any, expected: Any) -> bool:
    difference = np.linalg.norm(np.subtract(found, expected))
    return bool(difference <= _RELATIVE * np.linalg.norm(expected))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cards")
    parser.add_argument("cohorts", nargs="+", metavar="WORKLOAD:CLIENTS")
    parser.add_argument("--rounds", type=int, default=5, help="that count")
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS))
    options = parser.parse_args(arguments)
    named = [cohort.split(":") for cohort in options.cohorts]
    cohorts = [(name, int(num_clients)) for name, num_clients in named]
    runs: dict[str, list[tuple[float, list[Any]]]] = {}
    for way in options.ways:
        tell(f"{way} ...")
        runs[way] = _run(_WAYS[way], cohorts, options.rounds)
    status = 0
    for index, (name, num_clients) in enumerate(cohorts):
        found = {way: run[index] for way, run in runs.items()}
        rates = {way: round(num_clients / s, 1) for way, (s, _) in found.items()}
        print(json.dumps({"workload": name, "clients_per_s": rates}))
        (_, expected), *others = found.values()
        if not all(agree(weights, expected, _is_close) for _, weights in others):
            tell(f"Expected the weights of the first way for {name}, they differ.")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

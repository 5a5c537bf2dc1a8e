"""Clients a second of each learning algorithm, beside those of federated averaging.

    python -m benchmarks.algorithms --backend ray --clients 500

The algorithms take turns of three rounds, all in one context. Prints one line of JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ray_fed
from ray_fed import learning
from ray_fed.learning import aggregators
from ray_fed.program import ClientData

_WIDTH, _HIDDEN, _LABELS = 64, 64, 10
_STEPS, _BATCH = 5, 20
_ROUNDS_A_TURN = 3
_WARM_UP = 2


def build_model() -> learning.Model:
    """Return a dense network of 64-64-10."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((_WIDTH,)),
        keras.layers.Dense(_HIDDEN, activation="relu"),
        keras.layers.Dense(_LABELS),
    ]
    return learning.Model.from_keras(
        keras.Sequential(layers),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def build_algorithms(
    model: learning.Model, num_clients: int
) -> dict[str, learning.LearningProcess]:
    """Return the algorithms by name, federated averaging first."""
    import keras

    def sgd() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.05)

    bound = aggregators.AdaptiveNorm()
    private = aggregators.dp_mean(
        clip_norm=1.0,
        noise_multiplier=0.5,
        clients_per_round=num_clients,
        num_clients=10 * num_clients,
        delta=1e-5,
    )
    clipped = aggregators.clipped(bound, aggregators.mean())
    return {
        "fed_avg": learning.build_fed_avg(model, sgd()),
        "fed_prox": learning.build_fed_prox(model, sgd(), proximal=0.1),
        "fed_sgd": learning.build_fed_sgd(model, sgd()),
        "mime_lite": learning.build_mime_lite(model, sgd()),
        "scaffold": learning.build_scaffold(model, 0.05, num_clients=num_clients),
        "clipped": learning.build_fed_avg(model, sgd(), aggregator=clipped),
        "dp_mean": learning.build_fed_avg(model, sgd(), aggregator=private),
    }


def build_clients(model: learning.Model, num_clients: int) -> ClientData:
    """Return clients of five batches of twenty examples."""
    rng = np.random.default_rng(0)

    def batch() -> dict[str, Any]:
        x = rng.random((_BATCH, _WIDTH), np.float32)
        return {"x": x, "y": rng.integers(0, _LABELS, _BATCH, np.int32)}

    values = [[batch() for _ in range(_STEPS)] for _ in range(num_clients)]
    return ClientData.from_values(values, model.data_type.member)


def build_rounds(
    process: learning.LearningProcess, data: ClientData
) -> Callable[[], None]:
    """Return what runs the next round of a process, and keeps its results."""
    state = process.initialize()
    initial = process.initial_client_state
    cohort = range(len(data))
    states = None if initial is None else learning.ClientStates(initial)

    def run_round() -> None:
        nonlocal state
        if states is None:
            state, _ = process.next(state, data)
        else:
            state, kept, _ = process.next(state, states.take(cohort), data)
            states.put(cohort, kept)

    return run_round


def measure(num_clients: int, num_turns: int) -> dict[str, Any]:
    """Return clients a second by algorithm, and their ratios to the first one's."""
    model = build_model()
    data = build_clients(model, num_clients)
    rounds = {
        name: build_rounds(process, data)
        for name, process in build_algorithms(model, num_clients).items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for turn in range(num_turns + 1):
        for name, run_round in rounds.items():
            for _ in range(_ROUNDS_A_TURN if turn else _WARM_UP):
                started = time.perf_counter()
                run_round()
                if turn:
                    seconds[name].append(time.perf_counter() - started)
    rates = {
        name: num_clients / statistics.median(found) for name, found in seconds.items()
    }
    first = next(iter(rates.values()))
    return {
        "clients_per_s": {name: round(rate) for name, rate in rates.items()},
        "of_fed_avg": {name: round(rate / first, 2) for name, rate in rates.items()},
    }


def main() -> None:
    """Measure on one backend, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["local", "ray"], default="ray")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    config = ray_fed.Config.load(backend=given.backend, workers=given.workers)
    with ray_fed.init("local" if given.backend == "ray" else None, config=config):
        found = measure(given.clients, given.turns)
    print(json.dumps({"backend": given.backend, "clients": given.clients} | found))


if __name__ == "__main__":
    main()

"""Rounds of clients whose sizes are skewed, beside rounds of equal ones.

    python -m benchmarks.skew --clients 1000 --workers 2

One line of JSON: the seconds of a round (median of five) on one worker and on several,
of the largest client alone, and of the round over what it takes at least, which is the
work of all clients shared among the workers, or the largest client.
"""

import argparse
import json
import statistics
import time
from typing import Any

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

_SIGMA = 1.5
_MEAN_ROWS = 300
_WIDTH, _HIDDEN = 128, 128
_BATCH_ROWS = 16
_WARM_UP, _ROUNDS = 2, 5


def draw_sizes(count: int, sigma: float) -> NDArray[np.int64]:
    """Return log-normal numbers of rows with one mean, whatever sigma is."""
    sizes = np.exp(np.random.default_rng(0).normal(0.0, sigma, count))
    return np.maximum(1, np.round(sizes * _MEAN_ROWS / sizes.mean())).astype(np.int64)


def build_clients(sizes: NDArray[np.int64]) -> Any:
    """Return clients with so many rows each, placed."""
    from ray_fed.program import ClientData

    total = int(sizes.sum())
    rng = np.random.default_rng(1)
    return ClientData.from_table(
        {
            "who": np.repeat(np.arange(len(sizes)), sizes),
            "y": rng.normal(size=total).astype(np.float32),
            **{f"x{i}": rng.random(total, np.float32) for i in range(_WIDTH)},
        },
        client="who",
        x=[f"x{i}" for i in range(_WIDTH)],
        y="y",
        batch_size=_BATCH_ROWS,
    )


def build_work(type_spec: fl.Type) -> Any:
    """Return an epoch of a network of one hidden layer at each client, averaged."""
    import tensorflow as tf

    from ray_fed import tensorflow as rtf

    @rtf.computation(type_spec)
    def train(batches: Any) -> Any:
        def step(weights: Any, batch: Any) -> Any:
            hidden = tf.tanh(tf.linalg.matmul(batch["x"], weights))
            error = hidden - batch["y"][:, tf.newaxis]
            back = error * (1.0 - hidden * hidden)
            gradient = tf.linalg.matmul(batch["x"], back, transpose_a=True)
            return weights - 0.001 * gradient

        return batches.reduce(tf.fill([_WIDTH, _HIDDEN], 0.01), step)

    @fl.federated_computation(fl.FederatedType(type_spec, fl.CLIENTS))
    def work(clients: Any) -> Any:
        return fl.federated_mean(fl.federated_map(train, clients))

    return work


def time_rounds(context: Any, work: Any, clients: Any) -> float:
    """Return the seconds of a round, the median of those after the first ones."""
    found: list[float] = []
    for _ in range(_WARM_UP + _ROUNDS):
        started = time.perf_counter()
        context.invoke(work, clients)
        found.append(time.perf_counter() - started)
    return statistics.median(found[_WARM_UP:])


def measure(sizes: dict[str, NDArray[np.int64]], num_workers: int) -> dict[str, Any]:
    """Return seconds by kind of sizes: on some workers, and of the largest client."""
    import ray_fed

    config = ray_fed.Config(backend="ray", workers=num_workers)
    found: dict[str, Any] = {}
    with ray_fed.init("local", config=config) as context:
        for kind, of_clients in sizes.items():
            clients = build_clients(of_clients)
            work = build_work(clients.type_signature)
            largest = clients.pick([int(of_clients.argmax())])
            found[kind] = {
                "round_s": time_rounds(context, work, clients),
                "largest_s": time_rounds(context, work, largest),
            }
    return found


def main() -> None:
    """Measure on one worker and on several, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    kinds = {"balanced": 0.0, "skewed": _SIGMA}
    sizes = {kind: draw_sizes(given.clients, sigma) for kind, sigma in kinds.items()}
    several, alone = measure(sizes, given.workers), measure(sizes, 1)
    for kind, found in several.items():
        least = max(alone[kind]["round_s"] / given.workers, found["largest_s"])
        found["one_worker_s"] = alone[kind]["round_s"]
        found["over_least"] = found["round_s"] / least
        found["clients_per_s"] = given.clients / found["round_s"]
        found["largest_rows"] = int(sizes[kind].max())
        several[kind] = {name: round(value, 3) for name, value in found.items()}
    print(json.dumps({"clients": given.clients, "workers": given.workers} | several))


if __name__ == "__main__":
    main()

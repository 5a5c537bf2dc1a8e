"""Federated k-means: clients sum up their points by cluster, the server moves centers.

    client k    s_kj = sum of its points whose nearest center is c_j
                n_kj = number of these points
    server      c_j <- sum_k s_kj / sum_k n_kj, or c_j unchanged if it has no points

This is Lloyd's algorithm over the points of all clients (Stuart P. Lloyd: Least Squares
Quantization in PCM. IEEE Transactions on Information Theory 28(2), 1982).

python examples/k_means.py          joins your Ray, or starts one
python examples/k_means.py local    starts a Ray of its own
"""

import sys
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

import ray_fed
from ray_fed import tensorflow as rtf
from ray_fed.data import ClientData

NUM_CLUSTERS, NUM_DIMENSIONS, SEED = 3, 2, 0
CENTERS = fl.TensorType(np.float32, [NUM_CLUSTERS, NUM_DIMENSIONS])
POINTS = fl.SequenceType((np.float32, [None, NUM_DIMENSIONS]))


@rtf.computation(CENTERS, POINTS)
def add_up(centers: Any, batches: Any) -> Any:
    """Return the sum and number of a client's points in each cluster, and the cost.

    The cost is the sum of squared distances to the nearest centers.
    """

    def add(totals: Any, points: Any) -> Any:
        sums, counts, cost = totals
        distances = tf.reduce_sum((points[:, tf.newaxis] - centers) ** 2, axis=-1)
        is_in = tf.one_hot(tf.argmin(distances, axis=1), NUM_CLUSTERS)
        return (
            sums + tf.matmul(is_in, points, transpose_a=True),
            counts + tf.reduce_sum(is_in, axis=0),
            cost + tf.reduce_sum(tf.reduce_min(distances, axis=1)),
        )

    zeros = tf.zeros_like(centers), tf.zeros([NUM_CLUSTERS]), tf.constant(0.0)
    return batches.reduce(zeros, add)


@rtf.computation(CENTERS, add_up.type_signature.result)
def move(centers: Any, totals: Any) -> Any:
    """Return the new centers."""
    sums, counts, _ = totals
    means = tf.math.divide_no_nan(sums, counts[:, tf.newaxis])
    return tf.where(counts[:, tf.newaxis] > 0, means, centers)


@rtf.computation(add_up.type_signature.result)
def cost_of(totals: Any) -> Any:
    """Return the cost."""
    return totals[2]


@fl.federated_computation(
    fl.FederatedType(CENTERS, fl.SERVER), fl.FederatedType(POINTS, fl.CLIENTS)
)
def run_round(centers: Any, clients: Any) -> Any:
    """Return the new centers, and the cost of the centers before the round."""
    pair = (fl.federated_broadcast(centers), clients)
    totals = fl.federated_sum(fl.federated_map(add_up, pair))
    moved = fl.federated_map(move, (centers, totals))
    return moved, fl.federated_map(cost_of, totals)


def draw_clients(num_clients: int = 20) -> list[Any]:
    """Return the points of clients: each has points of two of the three clusters."""
    rng = np.random.default_rng(SEED)
    means = np.array([[0.0, 0.0], [6.0, 0.0], [0.0, 6.0]], np.float32)
    clusters = [rng.permutation(NUM_CLUSTERS)[:2] for _ in range(num_clients)]
    labels = [rng.choice(pair, 30) for pair in clusters]
    noise = [rng.normal(size=(30, NUM_DIMENSIONS)) for _ in labels]
    return [
        (means[label] + each).astype(np.float32)
        for label, each in zip(labels, noise, strict=True)
    ]


def train(clients: list[Any], num_rounds: int = 8) -> tuple[Any, list[float]]:
    """Return the centers after some rounds, and the cost before each of them."""
    data = ClientData.from_values([[points] for points in clients], POINTS)
    centers = clients[0][:NUM_CLUSTERS]  # the first points of a client
    costs: list[float] = []
    for _ in range(num_rounds):
        centers, cost = run_round(centers, data)
        costs.append(float(cost))
    return np.asarray(centers), costs


def main(address: str | None = None) -> None:
    """Find three clusters, although each client has points of only two clusters."""
    with ray_fed.init(address):
        centers, costs = train(draw_clients())
    print("cost by round:", " ".join(f"{cost:.0f}" for cost in costs))
    print("centers:", sorted(centers.round(1).tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])

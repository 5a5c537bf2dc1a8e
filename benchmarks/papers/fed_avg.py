"""Federated averaging: rounds until the 2NN has an accuracy of 97 % on MNIST.

As in the paper, the learning rate of each cell of the table is the best of a grid. Our
grid has fewer rates.

Source:
    Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas:
    Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS
    2017, https://arxiv.org/abs/1602.05629, Section 3 and Table 1, the 2NN with E = 1
    and B = 10.
"""

import math

import keras
import numpy as np

from benchmarks.papers import mnist, trials
from ray_fed import learning

PAPER = {
    "iid": {0.0: 316, 0.1: 87, 0.2: 77, 0.5: 75, 1.0: 70},
    "shards": {0.0: 3275, 0.1: 664, 0.2: 619, 0.5: 443, 1.0: 380},
}
"""Rounds until 97 %, by how images are divided, and by C, the share of clients."""

NUM_CLIENTS, BATCH_SIZE, TARGET = 100, 10, 0.97
RATES = (0.05, 0.1, 0.2, 0.4)
LONGEST = {"iid": 1.5, "shards": 2.0}
"""The length of our longest run, divided by the paper's number of rounds."""


def build_model() -> learning.Model:
    """Return the paper's 2NN: two hidden layers of 200 units, 199,210 parameters."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((784,)),
        keras.layers.Dense(200, activation="relu"),
        keras.layers.Dense(200, activation="relu"),
        keras.layers.Dense(10),
    ]
    return learning.Model.from_keras(
        keras.Sequential(layers),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def divide(labels: np.ndarray, division: str) -> list[np.ndarray]:
    """Return the images of each client: a random part, or two shards of the sorted."""
    if division == "shards":
        return learning.partition.shards(labels, NUM_CLIENTS, 2)
    order = np.random.default_rng(0).permutation(len(labels))
    return np.array_split(order, NUM_CLIENTS)


def has_reached(history: learning.History) -> bool:
    """Return whether the last round has the target accuracy."""
    return trials.read_accuracies(history)[-1] >= TARGET


def reproduce(options: trials.Options) -> list[trials.Row]:
    """Return the paper's rounds and our rounds, at the best rate, for each cell."""
    train, test = mnist.load_mnist(options.data)
    rows: list[trials.Row] = []
    for division, cells in PAPER.items():
        parts = divide(train.y, division)
        clients = trials.build_clients(trials.find_owners(parts), train.x, train.y)
        for share, published in cells.items():
            best, best_rate, best_history = math.inf, 0.0, None
            for rate in RATES[:1] if options.is_quick else RATES:
                if not options.wants(name := f"fed_avg/{division}/{share}/{rate}"):
                    continue
                # A run that is longer than the best so far cannot be better.
                longest = min(best, LONGEST[division] * published)
                history = options.run(
                    name,
                    learning.build_fed_avg(build_model(), keras.optimizers.SGD(rate)),
                    clients.shuffle().batch(BATCH_SIZE),
                    num_rounds=2 if options.is_quick else math.ceil(longest),
                    cohort_size=max(1, round(share * NUM_CLIENTS)),
                    validation_data=test.batch(1000),
                    stop=has_reached,
                ).history
                accuracies = trials.read_accuracies(history)
                rounds = trials.count_rounds(accuracies, TARGET)
                if best_history is None or rounds < best:
                    best, best_rate, best_history = rounds, rate, history
            if best_history is None:
                continue
            row = {"division": division, "C": f"{share:g}", "paper": f"{published:,}"}
            row["ray_fed"] = f"{best:.0f}" if best < math.inf else "not reached"
            row["rate"] = f"{best_rate:g}"
            rows.append(row | trials.describe_speed(best_history))
    return rows

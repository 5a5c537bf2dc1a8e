"""FLUTE's benchmark of simulators: softmax regression on MNIST with 1,000 clients.

Source:
    Mirian Hipolito Garcia, Andre Manoel, Daniel Madrigal Diaz, Fatemehsadat
    Mireshghallah, Robert Sim, Dimitrios Dimitriadis: FLUTE: A Scalable, Extensible
    Framework for High-Performance Federated Learning Simulations. 2022,
    https://arxiv.org/abs/2203.13789. The figures are those of the README of
    https://github.com/microsoft/msrflute, section Benchmarking, row `CPU`.
"""

import keras

from benchmarks.papers import mnist, trials
from ray_fed import learning

PAPER = {"FLUTE, CPU": ("~80 %", "200"), "Flower 1.0.0, CPU": ("~80 %", "1,814")}
"""Accuracy and seconds (0:03:20 and 0:30:14), on the authors' machine."""

NUM_CLIENTS, COHORT_SIZE, BATCH_SIZE, RATE, NUM_ROUNDS = 1000, 10, 10, 0.03, 100
TEST_EVERY = 20
SEEDS = (0, 1, 2)


def build_model(seed: int) -> learning.Model:
    """Return softmax regression on the pixels."""
    keras.utils.set_random_seed(seed)
    return learning.Model.from_keras(
        keras.Sequential([keras.Input((784,)), keras.layers.Dense(10)]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def reproduce(options: trials.Options) -> list[trials.Row]:
    """Return the accuracy and speed of each seed, below the figures of the source."""
    train, test = mnist.load_mnist(options.data)
    rows: list[trials.Row] = [
        {"": name, "accuracy": accuracy, "seconds": seconds}
        for name, (accuracy, seconds) in PAPER.items()
    ]
    for seed in SEEDS[:1] if options.is_quick else SEEDS:
        if not options.wants(name := f"flute/{seed}"):
            continue
        parts = learning.partition.shards(train.y, NUM_CLIENTS, 2, seed=seed)
        clients = trials.build_clients(trials.find_owners(parts), train.x, train.y)
        result = options.run(
            name,
            learning.build_fed_avg(build_model(seed), keras.optimizers.SGD(RATE)),
            clients.shuffle().batch(BATCH_SIZE),
            num_rounds=2 if options.is_quick else NUM_ROUNDS,
            cohort_size=COHORT_SIZE,
            seed=seed,
            validation_data=test.batch(1000),
            evaluate_every=1 if options.is_quick else TEST_EVERY,
        )
        accuracy = trials.read_accuracies(result.history)[-1]
        row = {"": f"ray_fed, seed {seed}", "accuracy": f"{100 * accuracy:.1f} %"}
        rows.append(row | trials.describe_speed(result.history))
    return rows

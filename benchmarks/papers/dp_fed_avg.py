"""DP-FedAvg: the accuracy on MNIST that is left for an epsilon.

Source of the algorithm:
    Brendan McMahan, Daniel Ramage, Kunal Talwar, Li Zhang: Learning Differentially
    Private Recurrent Language Models. ICLR 2018, https://arxiv.org/abs/1710.06963,
    Algorithm 1. Its data sets are texts; MNIST, the model and the settings are ours.
"""

import keras
import numpy as np

from benchmarks.papers import flute, mnist, trials
from ray_fed import learning

NUM_CLIENTS, COHORT_SIZE, BATCH_SIZE, RATE, NUM_ROUNDS = 1000, 100, 10, 0.1, 100
CLIP_NORM, DELTA = 0.5, 1e-4
NOISE_MULTIPLIERS = (0.0, 0.5, 1.0, 2.0, 4.0)


def reproduce(options: trials.Options) -> list[trials.Row]:
    """Return the accuracy and the epsilon of each noise multiplier."""
    train, test = mnist.load_mnist(options.data)
    order = np.random.default_rng(0).permutation(len(train.y))
    owners = trials.find_owners(np.array_split(order, NUM_CLIENTS))
    clients = trials.build_clients(owners, train.x, train.y)
    rows: list[trials.Row] = []
    for multiplier in NOISE_MULTIPLIERS:
        if not options.wants(name := f"dp_fed_avg/{multiplier}"):
            continue
        aggregators, cohort_size = learning.aggregators, None
        if multiplier:  # the noise decides the cohorts, too
            aggregator = aggregators.dp_mean(
                CLIP_NORM, multiplier, COHORT_SIZE, NUM_CLIENTS, DELTA
            )
        else:
            aggregator, cohort_size = aggregators.clipped(CLIP_NORM), COHORT_SIZE
        result = options.run(
            name,
            learning.build_fed_avg(
                flute.build_model(seed=0),
                keras.optimizers.SGD(RATE),
                aggregator=aggregator,
            ),
            clients.shuffle().batch(BATCH_SIZE),
            num_rounds=2 if options.is_quick else NUM_ROUNDS,
            cohort_size=cohort_size,
            validation_data=test.batch(1000),
        )
        history = result.history
        accuracy = trials.read_accuracies(history)[-1]
        epsilon = history.values("training.epsilon")[-1] if multiplier else np.inf
        row = {"noise multiplier": f"{multiplier:g}", "epsilon": f"{epsilon:.2f}"}
        row["accuracy"] = f"{100 * accuracy:.1f} %"
        rows.append(row | trials.describe_speed(history))
    return rows

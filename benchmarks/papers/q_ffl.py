"""q-FFL: a higher q brings the accuracies of devices closer to one another.

Source:
    Tian Li, Maziar Sanjabi, Ahmad Beirami, Virginia Smith: Fair Resource Allocation in
    Federated Learning. ICLR 2020, https://arxiv.org/abs/1905.10497, Section 4 and
    Appendix B: the synthetic data set, with 100 devices.
"""

import keras
import numpy as np

from benchmarks.papers import trials
from ray_fed import learning
from ray_fed.data import ClientData
from ray_fed.program import WeightedSampler

NUM_DEVICES, NUM_FEATURES, NUM_LABELS = 100, 60, 10
LEAST_ROWS, MOST_ROWS = 50, 1000
COHORT_SIZE, BATCH_SIZE, RATE, NUM_ROUNDS = 10, 10, 0.1, 300
POWERS = (0.0, 0.1, 1.0, 2.0, 5.0)


def draw_devices(num_devices: int, seed: int) -> ClientData:
    """Draw devices that differ in their inputs and in the labels of equal inputs.

    Device k has u_k ~ N(0, 1) and B_k ~ N(0, 1). Labels are argmax(W_k x + b_k) with
    elements of W_k and b_k from N(u_k, 1). Inputs are from N(v_k, S) with elements of
    v_k from N(B_k, 1) and the diagonal S_jj = j^-1.2. Sizes are log-normal, from
    `LEAST_ROWS` to `MOST_ROWS`.
    """
    generator = np.random.default_rng(seed)
    deviations = np.arange(1, NUM_FEATURES + 1) ** -0.6
    owners, inputs, labels = list[int](), list[np.ndarray](), list[np.ndarray]()
    for device in range(num_devices):
        of_model, of_inputs = generator.normal(size=2)
        weights = generator.normal(of_model, 1, (NUM_FEATURES, NUM_LABELS))
        bias = generator.normal(of_model, 1, NUM_LABELS)
        center = generator.normal(of_inputs, 1, NUM_FEATURES)
        size = min(LEAST_ROWS + int(generator.lognormal(4, 2)), MOST_ROWS)
        x = generator.normal(center, deviations, (size, NUM_FEATURES))
        owners += [device] * size
        inputs.append(x.astype(np.float32))
        labels.append(np.argmax(x @ weights + bias, axis=1).astype(np.int32))
    return trials.build_clients(
        np.array(owners), np.concatenate(inputs), np.concatenate(labels)
    )


def build_model() -> learning.Model:
    """Return softmax regression."""
    keras.utils.set_random_seed(0)
    return learning.Model.from_keras(
        keras.Sequential(
            [keras.Input((NUM_FEATURES,)), keras.layers.Dense(NUM_LABELS)]
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def reproduce(options: trials.Options) -> list[trials.Row]:
    """Return the spread of the devices' test accuracies for each q."""
    train, test = draw_devices(NUM_DEVICES, seed=0).hold_out_rows(0.2, seed=0)
    assert train.weights is not None  # the numbers of rows
    model = build_model()
    rows: list[trials.Row] = []
    for power in POWERS:
        if not options.wants(name := f"q_ffl/{power}"):
            continue
        training = learning.build_q_fed_avg(model, RATE, q=power)
        result = options.run(
            name,
            training,
            train.shuffle().batch(BATCH_SIZE),
            num_rounds=3 if options.is_quick else NUM_ROUNDS,
            cohort_size=COHORT_SIZE,
            sampler=WeightedSampler(train.weights),
        )
        evaluation = learning.build_client_eval(model, training)
        by_device = evaluation.next(result.state, test.batch(100))
        accuracy = learning.spread(by_device)["accuracy"]
        row = {"q": f"{power:g}", "mean": f"{100 * accuracy['mean']:.1f} %"}
        row["worst tenth"] = f"{100 * accuracy['lowest']:.1f} %"
        row["best tenth"] = f"{100 * accuracy['highest']:.1f} %"
        row["variance"] = f"{(100 * accuracy['deviation']) ** 2:.0f}"
        rows.append(row | trials.describe_speed(result.history))
    return rows

"""The demo's job: handwritten digits split among clients, and a model for them.

The 1,797 images of 8 x 8 pixels come with scikit-learn; a fifth is the test set.

Source of the data:
    E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits. UCI Machine
    Learning Repository, 1998, https://doi.org/10.24432/C50P49.
"""

from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from ray_fed.learning.cohorts import split_by_label
from ray_fed.learning.fed_avg import build_fed_avg
from ray_fed.learning.models import Model
from ray_fed.learning.processes import LearningProcess

_TEST_SHARE = 0.2


def load_clients(
    num_clients: int, seed: int, *, alpha: float = 1.0, batch_size: int = 8
) -> tuple[list[list[Any]], list[Any]]:
    """Return the training images of each client, and the test images, in batches.

    Args:
        num_clients: 1 to 1,437, the number of training images.
        seed: of both splits.
        alpha: of `split_by_label`; at 1 a client has mainly one to three digits.
        batch_size: of the clients; the test set is one batch.

    Returns:
        The batches of each client, and those of the test set: x f32[n, 8, 8] from 0
        to 1, y i32[n] from 0 to 9.

    Raises:
        ConfigError: an argument is out of its range.
        ImportError: scikit-learn is not installed.
    """
    import sklearn.datasets
    import sklearn.model_selection

    digits: Any = sklearn.datasets.load_digits()
    images = (digits.images / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    split: Any = sklearn.model_selection.train_test_split
    train, test = split(
        np.arange(len(labels)),
        test_size=_TEST_SHARE,
        random_state=seed,
        stratify=labels,
    )
    parts = split_by_label(labels[train], num_clients, alpha, seed)
    clients = [_batch(images, labels, train[part], batch_size) for part in parts]
    return clients, _batch(images, labels, test, len(test))


def _batch(
    images: NDArray[Any], labels: NDArray[Any], chosen: NDArray[Any], batch_size: int
) -> list[Any]:
    starts = range(0, len(chosen), batch_size)
    batches = [chosen[start : start + batch_size] for start in starts]
    return [{"x": images[batch], "y": labels[batch]} for batch in batches]


def build_model(seed: int) -> Model:
    """Return a perceptron with one hidden layer, its weights drawn by the seed."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return Model.from_keras(
        keras.Sequential(
            [
                keras.Input((8, 8)),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(10),
            ]
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
    )


def build_process(model: Model) -> LearningProcess:
    """Return federated averaging with a rate and a momentum that suit the digits.

    Over the seeds 0 to 7, 20 of 30 clients a round came to a test accuracy of at least
    0.95 after 30 rounds (simulated in 2026-11).
    """
    return build_fed_avg(
        model, keras.optimizers.SGD(0.4), keras.optimizers.SGD(1.0, momentum=0.8)
    )

"""Federated reconstruction: each user's vector stays with the user.

A rating is the product of an item's vector, which all users share, and a user's vector,
which is never sent or stored. In each round, a user takes two steps:

    1. It reconstructs its vector u on half of its ratings, from u = 0, items fixed.
    2. It trains the items' vectors on the other half, u fixed, and sends their change.

A user that never took part also reconstructs its vector first, and then predicts.

Source:
    Karan Singhal, Hakim Sidahmed, Zachary Garrett, Shanshan Wu, Keith Rush, Sushant
    Prakash: Federated Reconstruction: Partially Local Federated Learning. NeurIPS 2021,
    https://arxiv.org/abs/2102.03448, Algorithm 1.

python examples/reconstruction.py          joins your Ray, or starts one
python examples/reconstruction.py local    starts a Ray of its own
"""

# ray_fed comes first: it keeps TensorFlow's start-up lines off the screen.
# ruff: noqa: I001
import sys
from typing import Any

import ray_fed
from ray_fed import learning

import keras
import numpy as np
import tensorflow as tf

NUM_ITEMS, RANK, NUM_USERS, COHORT_SIZE, SEED = 40, 3, 60, 20, 0
LOCAL_RATE, GLOBAL_RATE, LOCAL_EPOCHS = 0.3, 0.3, 20


def build_model() -> learning.Model:
    """Return a model of an item's rating; its last weight is the user's vector."""
    keras.utils.set_random_seed(SEED)
    vectors: Any = keras.initializers.RandomNormal(0, 1)
    layers = [
        keras.Input((), dtype="int32"),
        keras.layers.Embedding(NUM_ITEMS, RANK, vectors),
        keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="user"),
    ]
    return learning.Model.from_keras(keras.Sequential(layers), loss="mse")


def only_user(gradients: Any, weights: Any) -> list[Any]:
    """Return gradients that change only the user's vector."""
    return [tf.zeros_like(weights[0]), gradients[1]]


def only_items(gradients: Any, weights: Any) -> list[Any]:
    """Return gradients that change only the items' vectors."""
    return [gradients[0], tf.zeros_like(weights[1])]


def build_process(model: learning.Model) -> learning.LearningProcess:
    """Return the process that trains the items' vectors."""
    find_user = learning.LocalTraining(
        model, keras.optimizers.SGD(LOCAL_RATE), LOCAL_EPOCHS
    )
    train_items = learning.LocalTraining(model, keras.optimizers.SGD(GLOBAL_RATE))

    def client(server: Any, batches: Any) -> Any:
        items, user = server.weights.trainable
        start = server.weights._replace(trainable=(items, tf.zeros_like(user)))
        found = find_user(start, batches.shard(2, 0), correct=only_user)
        trained = train_items(found.weights, batches.shard(2, 1), correct=only_items)
        delta = model.delta(found.weights, trained.weights)  # 0 for the user's vector
        return delta, trained.num_examples, trained.totals

    return learning.build_process(
        model,
        client=client,
        server=keras.optimizers.SGD(1.0),
        send=learning.send_weights,
        name="federated reconstruction",
    )


def draw_users() -> list[Any]:
    """Return the ratings of users in two batches each: to reconstruct, and to train."""
    rng = np.random.default_rng(SEED)
    items = rng.normal(size=(NUM_ITEMS, RANK))
    clients: list[Any] = []
    for user in rng.normal(size=(NUM_USERS, RANK)):
        halves = rng.permutation(NUM_ITEMS)[:24].astype(np.int32).reshape(2, 12)
        clients.append([{"x": x, "y": (items[x] @ user).astype("f")} for x in halves])
    return clients


def main(address: str | None = None, num_rounds: str = "100") -> None:
    """Train on users, and print the loss on the half that they did not see before."""
    with ray_fed.init(address):
        process = build_process(build_model())
        result = learning.run(
            process,
            draw_users(),
            num_rounds=int(num_rounds),
            cohort_size=COHORT_SIZE,
            seed=SEED,
        )
    losses = result.history.values("loss")
    print(f"mean squared error: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")


if __name__ == "__main__":
    main(*sys.argv[1:])

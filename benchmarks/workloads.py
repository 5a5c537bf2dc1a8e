"""Client work of some sizes, its synthetic data, and two programs that run it.

`build_learning` writes a round as README does: a Keras model, SGD and accuracy, through
`ray_fed.learning`. `build_round` writes the same arithmetic by hand, as a federated
computation.

tiny      softmax 784-10                         20 examples,   1 step
mlp       784-200-200-10                        100 examples,   5 steps of 20
cnn       conv32-conv64-pool-dense128-10        100 examples,   5 steps of 20
cifar10   the same on 32x32x3                    50 examples,   5 steps of 10
femnist   the same on 28x28, 62 classes         227 examples in the mean, steps of 20

`cifar10` has the shape of pfl's published benchmark: 1,000 clients, 50 a round;
`femnist` that of FLUTE's: ten a round, of sizes that differ. Clients of `mlp_mixed` and
`cnn_mixed` are of log-normal sizes (sigma 1.5), with the same mean.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from benchmarks.networks import LOGITS
from ray_fed import tensorflow as rtf
from ray_fed.program import ClientData

LEARNING_RATE = 0.1

Array = NDArray[Any]
Tensors = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, and how much of local training a client does.

    Attributes:
        shapes: of the weights.
        logits: from weights and f32[n, pixels] to f32[n, classes].
        num_examples: of each client, in the mean.
        batch_size: of a step.
        num_pixels: of an example.
        sigma: of the logarithms of clients' sizes; 0: all are of one, a multiple of
            `batch_size`.
    """

    shapes: tuple[tuple[int, ...], ...]
    logits: Callable[[Tensors, Any], Any]
    num_examples: int
    batch_size: int = 20
    num_pixels: int = 784
    sigma: float = 0.0

    @property
    def num_steps(self) -> int:
        """Batches of a client, where all are of one size."""
        return self.num_examples // self.batch_size

    @property
    def image(self) -> tuple[int, int]:
        """The side of a square example, in pixels, and its channels."""
        channels = 3 if self.num_pixels % 3 == 0 else 1
        return math.isqrt(self.num_pixels // channels), channels

    @property
    def dataset(self) -> fl.SequenceType:
        """What a client has: batches."""
        x = fl.TensorType(np.float32, [None, self.num_pixels])
        return fl.SequenceType([("x", x), ("y", fl.TensorType(np.int32, [None]))])

    def initial(self) -> tuple[Array, ...]:
        """Return the weights that every round starts with."""
        generator = np.random.default_rng(0)
        scaled = [
            generator.normal(size=shape) / np.sqrt(max(1, np.prod(shape[:-1])))
            for shape in self.shapes
        ]
        return tuple(weights.astype(np.float32) for weights in scaled)

    def client(self, index: int) -> tuple[Array, Array]:
        """Return a client's f32[steps, batch, pixels] and i32[steps, batch].

        All clients are of one size.
        """
        generator = np.random.default_rng([1, index])
        shape = (self.num_steps, self.batch_size)
        pixels = generator.random((*shape, self.num_pixels), np.float32)
        labels = generator.integers(0, self.shapes[-1][0], shape).astype(np.int32)
        return pixels, labels

    def count_examples(self, index: int) -> int:
        """Return how many examples a client has."""
        if not self.sigma:
            return self.num_examples
        normal = np.random.default_rng([2, index]).normal()
        share = np.exp(self.sigma * normal - self.sigma**2 / 2)
        return max(1, round(self.num_examples * share))

    def batches(self, index: int) -> list[dict[str, Array]]:
        """Return a client's batches, the last of which may be smaller."""
        count = self.count_examples(index)
        size = self.batch_size
        whole = dataclasses.replace(self, num_examples=-(-count // size) * size)
        x, y = (
            rows.reshape(-1, *rows.shape[2:])[:count] for rows in whole.client(index)
        )
        starts = range(0, count, size)
        return [{"x": x[i : i + size], "y": y[i : i + size]} for i in starts]

    def step(self, weights: Tensors, x: Any, y: Any) -> tuple[Any, ...]:
        """Return the weights after one step of gradient descent, in a graph."""
        with tf.GradientTape() as tape:
            for variable in weights:
                tape.watch(variable)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=y, logits=self.logits(weights, x)
            )
            loss = tf.reduce_mean(losses)
        gradients: Any = tape.gradient(loss, list(weights))
        pairs = zip(weights, gradients, strict=True)
        return tuple(w - LEARNING_RATE * gradient for w, gradient in pairs)


def _dense(*sizes: int) -> tuple[tuple[int, ...], ...]:
    layers = itertools.pairwise(sizes)
    return tuple(shape for a, b in layers for shape in ((a, b), (b,)))


def _cnn(side: int, channels: int, classes: int) -> tuple[tuple[int, ...], ...]:
    dense = _dense(((side - 4) // 2) ** 2 * 64, 128, classes)
    return ((3, 3, channels, 32), (32,), (3, 3, 32, 64), (64,), *dense)


WORKLOADS = {
    "tiny": Workload(_dense(784, 10), LOGITS["tiny"], 20),
    "mlp": Workload(_dense(784, 200, 200, 10), LOGITS["mlp"], 100),
    "cnn": Workload(_cnn(28, 1, 10), LOGITS["cnn"], 100),
    "cifar10": Workload(_cnn(32, 3, 10), LOGITS["cifar10"], 50, 10, 32 * 32 * 3),
    "femnist": Workload(_cnn(28, 1, 62), LOGITS["cnn"], 227, sigma=0.38),
}
for _name in ("mlp", "cnn"):
    WORKLOADS[f"{_name}_mixed"] = dataclasses.replace(WORKLOADS[_name], sigma=1.5)


def build_keras(workload: Workload) -> Any:
    """Return the workload's Keras model, with the weights that every round starts with.

    It has the layers of `networks.LOGITS`.
    """
    import keras

    side, channels = workload.image
    layers: list[Any] = [keras.Input((workload.num_pixels,))]
    dense = workload.shapes
    has_convolutions = len(dense[0]) == 4  # noqa: PLR2004 (side, side, in, out)
    if has_convolutions:  # two, each with a bias
        layers.append(keras.layers.Reshape((side, side, channels)))
        layers += [
            keras.layers.Conv2D(kernel[-1], 3, activation="relu")
            for kernel in dense[:4:2]
        ]
        layers += [keras.layers.MaxPool2D(), keras.layers.Flatten()]
        dense = dense[4:]
    sizes = [kernel[1] for kernel in dense[::2]]
    layers += [keras.layers.Dense(size, "relu") for size in sizes[:-1]]
    model = keras.Sequential([*layers, keras.layers.Dense(sizes[-1])])
    model.set_weights(workload.initial())
    return model


def build_loss() -> Any:
    """Return the loss of every workload."""
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build_learning(workload: Workload) -> Any:
    """Return federated averaging as README writes it, by `ray_fed.learning`."""
    import keras

    from ray_fed import learning

    model = learning.Model.from_keras(
        build_keras(workload), loss=build_loss(), metrics=["accuracy"]
    )
    return learning.build_fed_avg(model, keras.optimizers.SGD(LEARNING_RATE))


def build_round(workload: Workload) -> Any:
    """Return a round of federated averaging: <weights, datasets> to weights."""
    weights_type = fl.StructType(
        [fl.TensorType(np.float32, shape) for shape in workload.shapes]
    )

    @rtf.computation(weights_type, workload.dataset)
    def train(weights: Any, batches: Any) -> Any:
        def step(state: Any, batch: Any) -> Any:
            trained, count = state
            examples = tf.cast(tf.shape(batch["y"])[0], tf.float32)
            return workload.step(trained, batch["x"], batch["y"]), count + examples

        return batches.reduce((tuple(weights), 0.0), step)

    @fl.federated_computation(
        fl.FederatedType(weights_type, fl.SERVER),
        fl.FederatedType(workload.dataset, fl.CLIENTS),
    )
    def average(weights: Any, data: Any) -> Any:
        trained = fl.federated_map(train, (fl.federated_broadcast(weights), data))
        return fl.federated_mean(trained[0], trained[1])

    return average


def make_datasets(
    workload: Workload, num_clients: int, num_distinct: int, data: str
) -> Sequence[Any]:
    """Return what each client has; client i has the data of i mod `num_distinct`.

    Args:
        workload: whose data these are.
        num_clients: of the cohort.
        num_distinct: those whose data are made.
        data: "placed", on workers that keep them; "lists", the same in each round.
    """
    distinct = [workload.batches(i) for i in range(min(num_clients, num_distinct))]
    clients = [index % len(distinct) for index in range(num_clients)]
    if data == "placed":
        return ClientData.from_values(distinct, workload.dataset).select(clients)
    return [distinct[client] for client in clients]

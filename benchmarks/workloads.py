"""Client work of three sizes, its synthetic data, and a round of it as users write it.

tiny   softmax 784-10                         20 examples,   1 step
mlp    784-200-200-10                        100 examples,   5 steps of 20
cnn    conv32-conv64-pool-dense128-10        100 examples,   5 steps of 20
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from benchmarks.networks import LOGITS
from ray_fed import tensorflow as rtf
from ray_fed.program import ClientData

NUM_PIXELS, NUM_CLASSES = 784, 10
BATCH_SIZE = 20
LEARNING_RATE = 0.1

Array = NDArray[Any]
Tensors = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, and how much of local training a client does.

    Attributes:
        shapes: of the weights.
        logits: from weights and f32[n, 784] to f32[n, 10].
        num_examples: of each client, a multiple of `BATCH_SIZE`.
    """

    shapes: tuple[tuple[int, ...], ...]
    logits: Callable[[Tensors, Any], Any]
    num_examples: int

    @property
    def num_steps(self) -> int:
        """Batches of a client."""
        return self.num_examples // BATCH_SIZE

    def initial(self) -> tuple[Array, ...]:
        """Return the weights that every round starts with."""
        generator = np.random.default_rng(0)
        scaled = [
            generator.normal(size=shape) / np.sqrt(max(1, np.prod(shape[:-1])))
            for shape in self.shapes
        ]
        return tuple(weights.astype(np.float32) for weights in scaled)

    def client(self, index: int) -> tuple[Array, Array]:
        """Return a client's f32[num_steps, 20, 784] and i32[num_steps, 20]."""
        generator = np.random.default_rng([1, index])
        shape = (self.num_steps, BATCH_SIZE)
        pixels = generator.random((*shape, NUM_PIXELS), np.float32)
        return pixels, generator.integers(0, NUM_CLASSES, shape).astype(np.int32)

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


WORKLOADS = {
    "tiny": Workload(_dense(784, 10), LOGITS["tiny"], 20),
    "mlp": Workload(_dense(784, 200, 200, 10), LOGITS["mlp"], 100),
    "cnn": Workload(
        ((3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), *_dense(12 * 12 * 64, 128, 10)),
        LOGITS["cnn"],
        100,
    ),
}


DATASET = fl.SequenceType(
    [
        ("x", fl.TensorType(np.float32, [None, NUM_PIXELS])),
        ("y", fl.TensorType(np.int32, [None])),
    ]
)
"""What a client has: batches."""


def build_round(workload: Workload) -> Any:
    """Return a round of federated averaging: <weights, datasets> to weights."""
    weights_type = fl.StructType(
        [fl.TensorType(np.float32, shape) for shape in workload.shapes]
    )

    @rtf.computation(weights_type, DATASET)
    def train(weights: Any, batches: Any) -> Any:
        def step(state: Any, batch: Any) -> Any:
            trained, count = state
            examples = tf.cast(tf.shape(batch["y"])[0], tf.float32)
            return workload.step(trained, batch["x"], batch["y"]), count + examples

        return batches.reduce((tuple(weights), 0.0), step)

    @fl.federated_computation(
        fl.FederatedType(weights_type, fl.SERVER),
        fl.FederatedType(DATASET, fl.CLIENTS),
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
        data: "placed", on workers that keep them; "lists", sent in each round.
    """
    distinct = [
        [{"x": x, "y": y} for x, y in zip(*workload.client(index), strict=True)]
        for index in range(min(num_clients, num_distinct))
    ]
    clients = [index % len(distinct) for index in range(num_clients)]
    if data == "placed":
        return ClientData.from_values(distinct, DATASET).select(clients)
    return [distinct[client] for client in clients]

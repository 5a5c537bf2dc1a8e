"""What one client does in a round of federated averaging: train, and say how far.

weights from the server --> variables --> a step for each batch --> delta
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import federated_language as fl
import numpy as np
import tensorflow as tf

from ray_fed import tensorflow as rtf
from ray_fed.learning.models import Model, ModelWeights
from ray_fed.learning.optimizers import OptimizerSpec, StampedOptimizer
from ray_fed.learning.totals import Totals


class Broadcast(NamedTuple):
    """What the server sends to every client of a round.

    Attributes:
        weights: to start from.
        round_index: i32[], so that random layers draw anew in each round.
    """

    weights: ModelWeights
    round_index: Any


class Delta(NamedTuple):
    """How far weights moved: the client's minus the server's.

    Attributes:
        trainable: as in `ModelWeights`.
        statistics: the non-trainable weights at `Model.statistics_indices`.
    """

    trainable: tuple[Any, ...]
    statistics: tuple[Any, ...]


class ClientUpdate(NamedTuple):
    """What a client sends back.

    Attributes:
        delta: of its weights, unscaled.
        weight: f32[], its number of examples.
        totals: of all its passes, measured before each step.
    """

    delta: Delta
    weight: Any
    totals: Totals


def build_client_update(model: Model, optimizer: OptimizerSpec, epochs: int) -> Any:
    """Return the computation (Broadcast, batches* -> ClientUpdate).

    Args:
        model: to train.
        optimizer: of the client; starts afresh in each round.
        epochs: passes over the client's data, >= 1.
    """
    weight_types = trainable_types(model)
    members: Any = (model.weights_type, fl.TensorType(np.int32))
    broadcast_type = fl.to_type(Broadcast(*members))

    @rtf.computation(broadcast_type, model.data_type.member)
    def update_client(broadcast: Broadcast, dataset: Any) -> ClientUpdate:
        trainer = _Trainer(model, optimizer.stamp(weight_types), broadcast.round_index)

        @tf.function(autograph=False)
        def train() -> tuple[ModelWeights, Totals]:
            return trainer.train(broadcast.weights, dataset, epochs)

        weights, totals = train()
        num_examples = totals.num_examples // epochs
        return ClientUpdate(
            _measure(model, broadcast.weights, weights),
            tf.cast(num_examples, tf.float32),
            totals,
        )

    return update_client


def trainable_types(model: Model) -> list[fl.TensorType]:
    """Return the types of a model's trainable weights."""
    weights_type: Any = model.weights_type
    return list(weights_type.trainable)


class _Trainer:
    """Trains in the graph being traced: weights in variables, the rest carried."""

    def __init__(
        self, model: Model, optimizer: StampedOptimizer, round_index: tf.Tensor
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._round_index = round_index

    def train(
        self, weights: ModelWeights, dataset: Any, epochs: int
    ) -> tuple[ModelWeights, Totals]:
        self._optimizer.assign_weights(weights.trainable)
        carried = (tuple(weights.non_trainable), self._model.totals.zero())
        for _ in range(epochs):
            carried = dataset.reduce(carried, self._step)
        non_trainable, totals = carried
        return ModelWeights(self._optimizer.read_weights(), non_trainable), totals

    def _step(self, carried: Any, batch: Any) -> Any:
        non_trainable, totals = carried
        weights = ModelWeights(
            self._optimizer.read_weights(), self._reseed(non_trainable, batch["x"])
        )
        with tf.GradientTape() as tape:
            tape.watch(weights.trainable)
            passed = self._model.forward(weights, batch, totals, training=True)
        self._optimizer.apply(tape.gradient(passed.loss, list(weights.trainable)))
        return passed.non_trainable, passed.totals

    def _reseed(self, non_trainable: Sequence[Any], x: Any) -> tuple[Any, ...]:
        """Make random layers draw by round and data: clients know not who they are."""
        seeds = self._model.seed_indices
        if not seeds:
            return tuple(non_trainable)
        mixed = list(non_trainable)
        fingerprint = tf.add_n(
            [
                tf.reduce_sum(tf.bitcast(tf.cast(part, tf.float32), tf.int32))
                for part in tf.nest.flatten(x)
            ]
        )
        fold_in: Any = tf.random.fold_in
        for index in seeds:
            seed = fold_in(mixed[index], self._round_index)
            mixed[index] = fold_in(seed, fingerprint)
        return tuple(mixed)


def _measure(model: Model, before: ModelWeights, after: ModelWeights) -> Delta:
    statistics = model.statistics_indices
    return Delta(
        tuple(b - a for a, b in zip(before.trainable, after.trainable, strict=True)),
        tuple(after.non_trainable[i] - before.non_trainable[i] for i in statistics),
    )

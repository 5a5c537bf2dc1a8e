"""What one client does in a round of federated averaging: train, and say how far.

weights from the server --> variables --> a step for each batch --> delta

The gradient of a client's mean loss over all of its examples, at fixed weights.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import federated_language as fl
import keras
import numpy as np
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.learning.aggregators.aggregator import no_state
from ray_fed.learning.checks import expect_object
from ray_fed.learning.composition import ClientResult, Measured, ServerView, view_type
from ray_fed.learning.models import Model, ModelWeights, reseed
from ray_fed.learning.optimizers import OptimizerSpec, StampedOptimizer
from ray_fed.learning.processes import ClientPart, Part
from ray_fed.learning.totals import Totals, widened


class FullGradient(NamedTuple):
    """What a pass over a client's data comes to.

    Attributes:
        trainable: the gradient of the mean loss, of the weights' types; zeros over no
            example.
        non_trainable: weights after the pass, as layers leave them in training.
        totals: of all examples.
    """

    trainable: tuple[Any, ...]
    non_trainable: tuple[Any, ...]
    totals: Totals


def full_gradient(model: Model, weights: ModelWeights, dataset: Any) -> FullGradient:
    """Return the gradient at some weights, traced into the current graph.

    Args:
        model: to differentiate, as in training.
        weights: where; tensors.
        dataset: of a client.
    """
    zeros = tuple(widened(tf.zeros_like(weight)) for weight in weights.trainable)

    def add(carried: Any, batch: Any) -> Any:
        sums, non_trainable, totals = carried
        at = ModelWeights(weights.trainable, non_trainable)
        gradients, passed = model.differentiate(at, batch, totals)
        if passed.writes:
            raise errors.ValueMismatchError(
                "Expected layers that leave trained weights as they are, found one"
                " that writes to them in `call`, as SpectralNormalization does, which a"
                " gradient at fixed weights loses: use an algorithm such as fed_avg."
            )
        size = passed.totals.num_examples - totals.num_examples
        added = tuple(
            s if g is None else s + widened(g) * tf.cast(size, s.dtype)
            for s, g in zip(sums, gradients, strict=True)
        )
        return added, passed.weights.non_trainable, passed.totals

    start = (
        zeros,
        reseed(model.seed_indices, weights.non_trainable),
        model.totals.zero(),
    )
    sums, non_trainable, totals = dataset.reduce(start, add)
    means = tuple(
        tf.cast(
            tf.math.divide_no_nan(s, tf.cast(totals.num_examples, s.dtype)), w.dtype
        )
        for s, w in zip(sums, weights.trainable, strict=True)
    )
    return FullGradient(means, non_trainable, totals)


Correction = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
"""From gradients and weights to the gradients to step against."""


class Broadcast(NamedTuple):
    """What the server sends to every client of a round.

    Attributes:
        weights: to start from.
        round_index: i32[], for a learning rate that follows a schedule.
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


@dataclasses.dataclass(frozen=True)
class LocalTraining:
    """How a client trains.

    Attributes:
        optimizer: of the client; starts afresh in each round.
        epochs: passes over the client's data, >= 1.
        learning_rate: of the optimiser by round; None: its own.
        proximal: mu of FedProx, which pulls towards the server's weights; 0: none.

    Raises:
        ValueMismatchError: the learning rate is no schedule.
    """

    optimizer: OptimizerSpec
    epochs: int = 1
    learning_rate: keras.optimizers.schedules.LearningRateSchedule | None = None
    proximal: float = 0.0

    def __post_init__(self) -> None:
        if self.learning_rate is not None:
            expect_object(
                self.learning_rate,
                keras.optimizers.schedules.LearningRateSchedule,
                "keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9); a rate that"
                " stays is the client optimizer's",
            )
            if not self.optimizer.takes_rate:
                raise errors.ValueMismatchError(
                    "Expected a client optimizer whose learning rate is a number, as"
                    " `client_learning_rate` says it by round, found one with a"
                    " schedule or with several optimizers: leave one of the two out."
                )


def build_training(model: Model, training: LocalTraining) -> ClientPart:
    """Return the part that trains: from Broadcast and batches to the weights' delta.

    Args:
        model: to train.
        training: how.
    """
    corrects = training.proximal > 0

    @rtf.computation(broadcast_type(model), model.data_type.member)
    def update_client(broadcast: Broadcast, dataset: Any) -> ClientResult:
        start = broadcast.weights.trainable
        optimizer = training.optimizer.stamp(model)
        trainer = LocalTrainer(model, optimizer)
        if corrects:
            trainer.correct = lambda gradients, weights: [
                g + training.proximal * (w - w0)
                for g, w, w0 in zip(gradients, weights, start, strict=True)
            ]

        @tf.function(autograph=False)
        def train() -> tuple[ModelWeights, Totals]:
            if training.learning_rate is not None:
                rate = _rate_of(training.learning_rate, broadcast.round_index)
                optimizer.assign_rate(rate)
            return trainer.train(broadcast.weights, dataset, training.epochs)

        weights, totals = train()
        num_examples = totals.num_examples // training.epochs
        return ClientResult(
            measure(model, broadcast.weights, weights),
            tf.cast(num_examples, tf.float32),
            Measured(totals, ()),
        )

    return stateless_client_part(update_client)


def stateless_client_part(work: Any) -> ClientPart:
    """Return the part without state of a computation <B, batches> -> ClientResult."""
    initialize = no_state()
    sent_type, data_type = work.type_signature.parameter

    @fl.federated_computation(
        initialize.type_signature.result,
        fl.FederatedType(sent_type, fl.CLIENTS, all_equal=True),
        fl.FederatedType(data_type, fl.CLIENTS),
    )
    def next_work(state: Any, sent: Any, data: Any) -> Any:
        return state, fl.federated_map(work, (sent, data))

    return ClientPart(initialize, next_work)


def build_distribution(prepare: Any) -> Part:
    """Return the part that sends all clients what a computation makes of ServerView."""
    initialize = no_state()
    view_type = fl.FederatedType(prepare.type_signature.parameter, fl.SERVER)

    @fl.federated_computation(initialize.type_signature.result, view_type)
    def distribute(state: Any, view: Any) -> Any:
        return state, fl.federated_broadcast(fl.federated_map(prepare, view))

    return Part(initialize, distribute)


def send_weights(model: Model, finalize: Part) -> Part:
    """Return the part that sends Broadcast: weights and the number of the round."""

    @rtf.computation(view_type(model, finalize))
    def prepare(view: ServerView) -> Broadcast:
        return Broadcast(view.weights, view.round_index)

    return build_distribution(prepare)


def broadcast_type(model: Model) -> Any:
    """Return the type of Broadcast for a model."""
    members: Any = (model.weights_type, fl.TensorType(np.int32))
    return fl.to_type(Broadcast(*members))


def trainable_types(model: Model) -> list[fl.TensorType]:
    """Return the types of a model's trainable weights."""
    weights_type: Any = model.weights_type
    return list(weights_type.trainable)


def _rate_of(schedule: Any, round_index: tf.Tensor) -> tf.Tensor:
    """Return the learning rate of a round, inside of a graph.

    Raises:
        CompileError: the schedule gives no number there.
    """
    try:
        return tf.reshape(tf.cast(schedule(round_index), tf.float32), [])
    except Exception as error:
        raise errors.CompileError(
            "Expected `client_learning_rate` to make one number of the round, a tensor,"
            f" found `{type(schedule).__name__}`, which raised {type(error).__name__}:"
            " compute it with `keras.ops`, such as `keras.ops.where(step < 9, 0.1, 0)`."
        ) from error


class LocalTrainer:
    """Trains in the graph being traced: weights in variables, the rest carried.

    Attributes:
        correct: of gradients before each step; None: they are left as they are.
    """

    def __init__(self, model: Model, optimizer: StampedOptimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self.correct: Correction | None = None

    def train(
        self, weights: ModelWeights, dataset: Any, epochs: int
    ) -> tuple[ModelWeights, Totals]:
        """Return weights after passes over a dataset, and the totals on the way."""
        self._optimizer.start(weights.trainable)
        carried = (
            reseed(self._model.seed_indices, weights.non_trainable),
            self._model.totals.zero(),
        )
        for _ in range(epochs):
            carried = dataset.reduce(carried, self._step)
        non_trainable, totals = carried
        return ModelWeights(self._optimizer.finish(), non_trainable), totals

    def _step(self, carried: Any, batch: Any) -> Any:
        non_trainable, totals = carried
        weights = ModelWeights(self._optimizer.read_weights(), non_trainable)
        gradients, passed = self._model.differentiate(
            weights, batch, totals, self._optimizer.scale_loss
        )
        if passed.writes:
            self._optimizer.assign_weights(passed.weights.trainable)
        self._optimizer.apply(self._corrected(gradients, weights.trainable))
        return passed.weights.non_trainable, passed.totals

    def _corrected(
        self, gradients: Sequence[Any], weights: Sequence[Any]
    ) -> Sequence[Any]:
        """Return gradients to step against; None stays where the loss has none."""
        if self.correct is None:
            return gradients
        pairs = list(zip(gradients, weights, strict=True))
        filled = [tf.zeros_like(w) if g is None else g for g, w in pairs]
        corrected = self.correct(filled, weights)
        return [
            None if before is None else after
            for before, after in zip(gradients, corrected, strict=True)
        ]


def measure(model: Model, before: ModelWeights, after: ModelWeights) -> Delta:
    """Return how far weights moved."""
    return Delta(
        tuple(b - a for a, b in zip(before.trainable, after.trainable, strict=True)),
        measure_statistics(model, before, after),
    )


def measure_statistics(model: Model, before: Any, after: Any) -> tuple[Any, ...]:
    """Return how far running statistics moved, of what has `non_trainable` weights."""
    return tuple(
        as_float(after.non_trainable[i]) - as_float(before.non_trainable[i])
        for i in model.statistics_indices
    )


def as_float(statistic: Any) -> Any:
    """Return a statistic as it is averaged: whole numbers as float32."""
    is_float = statistic.dtype.is_floating
    return statistic if is_float else tf.cast(statistic, tf.float32)

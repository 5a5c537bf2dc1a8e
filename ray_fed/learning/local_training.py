"""What one client does in a round of federated averaging: train, and say how far.

weights from the server --> variables --> a step for each batch --> weights
"""

# pyright: reportUnknownLambdaType=false

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.learning.checks import expect_object, read_whole
from ray_fed.learning.models import Model, ModelWeights, reseed
from ray_fed.learning.objectives import Totals
from ray_fed.learning.optimizers import (
    OptimizerLike,
    OptimizerSpec,
    StampedOptimizer,
)

Correction = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
"""From gradients and weights to the gradients to step against."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """What local training came to; tensors of the graph that is being traced.

    Attributes:
        weights: after it.
        totals: of all its batches, each measured before its step.
        batches: that it went through.
        epochs: how often.
    """

    weights: ModelWeights
    totals: Totals
    batches: Any
    epochs: int

    @property
    def num_examples(self) -> Any:
        """The examples of one pass, i64[]."""
        return self.totals.num_examples // self.epochs

    @property
    def num_steps(self) -> Any:
        """The batches of all passes, f32[]."""
        one = np.float32(1)
        return self.batches.reduce(np.float32(0), lambda n, _: n + one) * self.epochs


class LocalTraining:
    """Trains at a client, in the graph being traced: weights in variables.

        train = LocalTraining(model, "sgd", epochs=2)
        trained = train(server.weights, batches)  # in the function of a client

    Args:
        model: to train.
        optimizer: of Keras, an object or a name, copied now; each call starts with a
            fresh one.
        epochs: passes over the data, >= 1.
        learning_rate: of the optimizer by round; None: its own.

    Raises:
        ValueMismatchError: the optimizer, or the schedule, is not one of Keras.
        ConfigError: `epochs` is below 1.
    """

    def __init__(
        self,
        model: Model,
        optimizer: OptimizerLike | OptimizerSpec,
        epochs: int = 1,
        learning_rate: keras.optimizers.schedules.LearningRateSchedule | None = None,
    ) -> None:
        self._model = model
        self.optimizer = OptimizerSpec.of(optimizer)
        self.epochs = read_whole("epochs", epochs, 1)
        self._learning_rate = learning_rate
        if learning_rate is None:
            return
        expect_object(
            learning_rate,
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

    @override
    def __repr__(self) -> str:
        return f"<local training by {self.optimizer}, {self.epochs} epochs>"

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self,
        weights: ModelWeights,
        batches: Any,
        *,
        correct: Correction | None = None,
        optimizer_state: Any = None,
        round_index: Any = None,
    ) -> Trained:
        """Train on a client's batches, in order.

        Args:
            weights: to start from; tensors.
            batches: of the client, a dataset.
            correct: called with gradients and weights before each step, returns the
                gradients to step against; None: as they are.
            optimizer_state: the variables of the optimizer at each step, which it
                leaves alone; None: they begin afresh and follow the steps.
            round_index: i32[], for a learning rate by round.
        """
        optimizer = self.optimizer.stamp(self._model)

        def fix_state(gradients: Any, _: Any) -> Any:
            optimizer.assign_state(optimizer_state)
            return gradients

        if optimizer_state is not None:
            correct = fix_state

        @tf.function(autograph=False)
        def train() -> tuple[ModelWeights, Totals]:
            if self._learning_rate is not None:
                optimizer.assign_rate(_rate_of(self._learning_rate, round_index))
            return self.run(optimizer, weights, batches, correct)

        after, totals = train()
        return Trained(after, totals, batches, self.epochs)

    def run(
        self,
        optimizer: StampedOptimizer,
        weights: ModelWeights,
        batches: Any,
        correct: Correction | None = None,
    ) -> tuple[ModelWeights, Totals]:
        """Return weights and totals after all passes, inside of a `tf.function`."""
        model = self._model

        def step(carried: Any, batch: Any) -> Any:
            non_trainable, totals = carried
            now = ModelWeights(optimizer.read_weights(), non_trainable)
            gradients, passed = model.differentiate(
                now, batch, totals, optimizer.scale_loss
            )
            if passed.writes:
                optimizer.assign_weights(passed.weights.trainable)
            optimizer.apply(_corrected(correct, gradients, now.trainable))
            return passed.weights.non_trainable, passed.totals

        optimizer.start(weights.trainable)
        carried = reseed(model.seed_indices, weights.non_trainable), model.totals.zero()

        def one_pass(epoch: Any, carried: Any) -> Any:
            return epoch + 1, batches.reduce(carried, step)

        if self.epochs == 1:
            carried = batches.reduce(carried, step)
        else:  # one graph of a pass, however many there are
            begun = tf.constant(0), carried
            _, carried = tf.while_loop(
                lambda epoch, _: epoch < self.epochs, one_pass, begun
            )
        non_trainable, totals = carried
        return ModelWeights(optimizer.finish(), non_trainable), totals


def _corrected(
    correct: Correction | None, gradients: Sequence[Any], weights: Sequence[Any]
) -> Sequence[Any]:
    """Return gradients to step against; None stays where the loss has none."""
    if correct is None:
        return gradients
    pairs = list(zip(gradients, weights, strict=True))
    filled = [tf.zeros_like(w) if g is None else g for g, w in pairs]
    corrected = correct(filled, weights)
    return [
        None if before is None else after
        for before, after in zip(gradients, corrected, strict=True)
    ]


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

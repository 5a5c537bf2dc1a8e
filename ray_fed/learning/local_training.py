"""Local training: a client trains the server's weights on its batches.

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
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.checks import expect_object
from ray_fed.learning.models import Model, ModelWeights
from ray_fed.learning.objectives import Totals
from ray_fed.learning.optimizers import OptimizerLike, OptimizerSpec

Correction = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
"""Function from gradients and weights to the gradients that a step uses instead."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of local training, as tensors of the graph that is being traced.

    Attributes:
        weights: Weights after training.
        totals: Totals of all batches. Each batch is measured before its step.
        batches: The client's batches.
        epochs: Number of passes over the batches, an int or a tensor, i32[].
        optimizer_state: Variables of the optimizer after the last step. Empty if the
            call had no `optimizer_state`.
    """

    weights: ModelWeights
    totals: Totals
    batches: Any
    epochs: Any
    optimizer_state: tuple[Any, ...] = ()

    @property
    def num_examples(self) -> Any:
        """Number of examples in one pass, i64[]."""
        passed, epochs = self.totals.num_examples, self.epochs
        is_fixed = isinstance(epochs, int)
        return passed // (epochs if is_fixed else tf.cast(epochs, passed.dtype))

    @property
    def num_steps(self) -> Any:
        """Number of batches in all passes, f32[]."""
        one = np.float32(1)
        num_batches = self.batches.reduce(np.float32(0), lambda n, _: n + one)
        is_fixed = isinstance(self.epochs, int)
        return num_batches * (self.epochs if is_fixed else tf.cast(self.epochs, "f"))


class LocalTraining:
    """Trains the weights of a model on a client's batches.

        train = LocalTraining(model, "sgd", epochs=2)
        trained = train(server.weights, batches)  # in the function of a client

    Args:
        model: Model to train.
        optimizer: Optimizer of Keras, or its name. It is copied now, and each call
            starts with a fresh copy. None: the optimizer that the Keras model was
            compiled with.
        epochs: Number of passes over the data, >= 1.
        learning_rate: Learning rate by round. None: the optimizer's own.

    Raises:
        ValueMismatchError: The optimizer or the schedule is not one of Keras.
        ConfigError: `epochs` is below 1.
    """

    def __init__(
        self,
        model: Model,
        optimizer: OptimizerLike | OptimizerSpec | None = None,
        epochs: int = 1,
        learning_rate: keras.optimizers.schedules.LearningRateSchedule | None = None,
    ) -> None:
        self._model = model
        chosen = model.compiled_optimizer if optimizer is None else optimizer
        self.optimizer = OptimizerSpec.of(chosen)
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
        if self.optimizer.rate is None:
            raise errors.ValueMismatchError(
                "Expected a client optimizer whose learning rate is a number beside"
                " `client_learning_rate`, found an optimizer with a schedule or with"
                " several optimizers: leave one of the two out."
            )

    @override
    def __repr__(self) -> str:
        return f"<local training by {self.optimizer}, {self.epochs} epochs>"

    def initial_optimizer_state(self) -> tuple[Any, ...]:
        """Return the variables of the optimizer before its first step, as arrays.

        The first is the number of steps. The learning rate follows, if it is a number,
        and then the moments, weight by weight, in Keras' order.
        """
        return self.optimizer.initial_state(self._model)

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self,
        weights: ModelWeights,
        batches: Any,
        *,
        correct: Correction | None = None,
        optimizer_state: Any = None,
        updates_state: bool = True,
        round_index: Any = None,
        epochs: Any = None,
    ) -> Trained:
        """Train on a client's batches, in order, in the traced function of a client.

        Args:
            weights: Weights to start from, as tensors.
            batches: The client's batches, a dataset.
            correct: Function from gradients and weights to the gradients that a step
                uses. It is called before each step. None: the gradients are used as
                they are.
            optimizer_state: Variables of the optimizer to start from, in the order of
                `initial_optimizer_state`. None: the optimizer starts anew.
            updates_state: Whether steps change the optimizer's variables. False: each
                step uses `optimizer_state` as it is.
            round_index: Number of rounds so far, i32[], for a learning rate by round.
            epochs: Number of passes of this client, i32[], >= 1. None: `epochs` of the
                object.

        Raises:
            ConfigError: `updates_state` is False without an `optimizer_state`.
        """
        if not updates_state and optimizer_state is None:
            raise errors.ConfigError(
                "Expected an `optimizer_state` for `updates_state=False`, found none:"
                " pass the variables that each step uses."
            )
        model, optimizer = self._model, self.optimizer.stamp(self._model)
        passes = self.epochs if epochs is None else epochs

        def step(carried: Any, batch: Any) -> Any:
            non_trainable, totals = carried
            now = ModelWeights(optimizer.read_weights(), non_trainable)
            gradients, passed = model.find_gradients(
                now, batch, totals, optimizer.scale_loss
            )
            # A layer may write to weights. The step starts from these values.
            if passed.writes:
                optimizer.assign_weights(passed.weights.trainable)
            # This undoes the previous step's change, as each step uses one state.
            if not updates_state:
                optimizer.assign_state(optimizer_state)
            optimizer.apply(_corrected(correct, gradients, now.trainable))
            return passed.weights.non_trainable, passed.totals

        def one_pass(epoch: Any, carried: Any) -> Any:
            return epoch + 1, batches.reduce(carried, step)

        @tf.function(autograph=False)
        def train() -> tuple[ModelWeights, Totals, tuple[Any, ...]]:
            if optimizer_state is not None:
                optimizer.assign_state(optimizer_state)
            if self._learning_rate is not None:
                optimizer.assign_rate(_rate_of(self._learning_rate, round_index))
            elif self.optimizer.rate is not None and optimizer_state is None:
                optimizer.assign_rate(self.optimizer.rate.read(tf.float64))
            optimizer.start(weights.trainable, begins_anew=optimizer_state is None)
            carried = model.reseed(weights).non_trainable, model.totals.zero()
            if isinstance(passes, int) and passes == 1:
                carried = batches.reduce(carried, step)
            else:  # one graph of a pass, for any number of passes
                begun = tf.constant(0), carried
                _, carried = tf.while_loop(
                    lambda epoch, _: epoch < passes, one_pass, begun
                )
            non_trainable, totals = carried
            after = ModelWeights(optimizer.finish(), non_trainable)
            state = () if optimizer_state is None else optimizer.read_state()
            return after, totals, state

        after, totals, state = train()
        return Trained(after, totals, batches, passes, state)


def _corrected(
    correct: Correction | None, gradients: Sequence[Any], weights: Sequence[Any]
) -> Sequence[Any]:
    """Return corrected gradients. A gradient of None stays None."""
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
    try:
        return tf.reshape(tf.cast(schedule(round_index), tf.float32), [])
    except Exception as error:
        raise errors.CompileError(
            "Expected `client_learning_rate` to make one number of the round, a tensor,"
            f" found `{type(schedule).__name__}`, which raised {type(error).__name__}:"
            " compute it with `keras.ops`, such as `keras.ops.where(step < 9, 0.1, 0)`."
        ) from error

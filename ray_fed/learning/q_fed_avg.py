"""q-FedAvg: clients whose loss is high move the weights more, so that losses even out.

    client k    D_k = L (w_t - w_k), after local training with rate 1 / L
                sends F_k(w_t)^q D_k
                and   h_k = q F_k(w_t)^(q-1) |D_k|^2 + L F_k(w_t)^q
    server      w_{t+1} = w_t - sum_k F_k(w_t)^q D_k / sum_k h_k

Source:
    Tian Li, Maziar Sanjabi, Ahmad Beirami, Virginia Smith: Fair Resource Allocation in
    Federated Learning. ICLR 2020, https://arxiv.org/abs/1905.10497, Algorithm 2.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import mean
from ray_fed.learning.checks import check_number, check_positive
from ray_fed.learning.composition import Broadcast, Guards, build_process
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Delta, Model, ModelWeights, expect_model
from ray_fed.learning.processes import LearningProcess, with_facts

_LEAST_LOSS = 1e-10
"""A loss of zero has no power below zero."""


class QFedAvgUpdate(NamedTuple):
    """What a client of q-FedAvg sends.

    Attributes:
        delta: of its weights, times L and the power of its loss.
        divisor: h_k of the paper.
    """

    delta: Delta
    divisor: Any


@tracebacks.shorten
def build_q_fed_avg(
    model: Model,
    client_learning_rate: float,
    *,
    q: float,
    epochs: int = 1,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build q-FedAvg: federated averaging that is fair to clients with a high loss.

    Clients count the same, however many examples they have. A client goes through its
    data once more than its `epochs`, for its loss at the server's weights.

    Args:
        model: to train.
        client_learning_rate: 1 / L of the paper, of SGD at the clients, > 0.
        q: of the paper, >= 0; 0 is the unweighted mean, more is more fair.
        epochs: passes of each client over its data in a round, >= 1.
        guards: what broken updates and empty rounds do, by default `Guards()`.

    Raises:
        ConfigError: a number is out of its range.
    """
    expect_model(model)
    check_positive("client_learning_rate", client_learning_rate)
    check_number("q", q, lambda power: power >= 0, "of at least 0")
    rate = float(client_learning_rate)
    train = LocalTraining(model, keras.optimizers.SGD(rate), epochs)

    def client(server: Broadcast, batches: Any) -> Any:
        before = model.evaluate(server.weights, batches)
        count = tf.cast(before.num_examples, tf.float32)
        loss = tf.maximum(tf.math.divide_no_nan(before.loss, count), _LEAST_LOSS)
        trained = train(server.weights, batches)
        delta = model.delta(server.weights, trained.weights)
        squares = [
            tf.reduce_sum(tf.square(tf.cast(d, tf.float32) / rate))
            for d in delta.trainable
        ]
        power = loss**q
        divisor = q * loss ** (q - 1) * tf.add_n(squares) + power / rate
        weighed = tuple(tf.cast(power / rate, d.dtype) * d for d in delta.trainable)
        update = QFedAvgUpdate(delta._replace(trainable=weighed), divisor)
        return update, trained.num_examples > 0, trained.totals

    def server(weights: ModelWeights, state: Any, update: QFedAvgUpdate) -> Any:
        delta, divisor = update  # means: their quotient is that of the sums
        moved = tuple(
            tf.math.divide_no_nan(d, tf.cast(divisor, d.dtype)) for d in delta.trainable
        )
        return model.move(weights, delta._replace(trainable=moved)), state

    process = build_process(
        model,
        client=client,
        server=server,
        aggregator=mean(weighted=False),
        guards=guards,
    )
    return with_facts(
        process,
        algorithm=f"q-FedAvg({q:g})",
        client_learning_rate=client_learning_rate,
        epochs=epochs,
    )

"""q-FedAvg: clients whose loss is high move the weights more, which evens out losses.

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
from ray_fed.learning.aggregators.aggregator import Aggregator, mean, with_sum
from ray_fed.learning.checks import check_number
from ray_fed.learning.composition import Broadcast, Guards, build_process, send_weights
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Delta, Model, ModelWeights, expect_model
from ray_fed.learning.optimizers import (
    OptimizerLike,
    OptimizerSpec,
    read_plain_rate,
    server_step,
)
from ray_fed.learning.processes import LearningProcess

_LEAST_LOSS = 1e-10
"""Smallest loss in the formulas, because 0 has no negative powers."""


class QFedAvgUpdate(NamedTuple):
    """The update of a client of q-FedAvg.

    Attributes:
        delta: Change of the client's weights, times L and the power of its loss.
        divisor: h_k of the paper, and 1 if the client has examples, else 0, f32[] each.
            The server receives their sums.
    """

    delta: Delta
    divisor: tuple[Any, Any]


@tracebacks.shorten
def build_q_fed_avg(
    model: Model,
    client_optimizer: float | keras.optimizers.Optimizer | None = None,
    server_optimizer: OptimizerLike | None = None,
    *,
    q: float,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build q-FedAvg: federated averaging that is fair to clients with a high loss.

    Each client has the same weight, whatever its number of examples. A client goes
    through its data once more than its `epochs`, to measure its loss at the server's
    weights.

    For other arguments see `build_fed_avg`.

    Args:
        client_optimizer: SGD with a learning rate alone, which is 1 / L of the paper.
            The rate itself, > 0, is also accepted. None: the optimizer that the Keras
            model was compiled with.
        q: q of the paper, >= 0. With 0 the updates have equal weights. A higher value
            is fairer.
        aggregator: Aggregation of the scaled deltas, by default their unweighted mean.

    Raises:
        ConfigError: A number is out of its range, the client optimizer has other
            settings than its rate, or the aggregator adds noise.
    """
    expect_model(model)
    check_number("q", q, lambda power: power >= 0, "of at least 0")
    rate = read_plain_rate(model, client_optimizer)
    train = LocalTraining(model, keras.optimizers.SGD(rate), epochs)
    optimizer = OptimizerSpec.of(server_optimizer or keras.optimizers.SGD(1.0))
    move, server_state = server_step(model, optimizer)

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
        takes_part = tf.cast(trained.num_examples > 0, tf.float32)
        sums = divisor * takes_part, takes_part
        update = QFedAvgUpdate(delta._replace(trainable=weighed), sums)
        return update, takes_part, trained.totals

    def server(weights: ModelWeights, state: Any, update: QFedAvgUpdate) -> Any:
        delta, (divisors, count) = update
        # The quotient of two means is the quotient of their sums.
        divisor = tf.math.divide_no_nan(divisors, count)
        moved = tuple(
            tf.math.divide_no_nan(d, tf.cast(divisor, d.dtype)) for d in delta.trainable
        )
        return move(weights, state, delta._replace(trainable=moved))

    return build_process(
        model,
        client=client,
        server=server,
        server_state=server_state,
        aggregator=with_sum(aggregator or mean(weighted=False)),
        send=send_weights,
        guards=guards,
        name=f"q-FedAvg({q:g})",
        settings={
            "client optimizer": train.optimizer,
            "server optimizer": optimizer,
            "epochs": epochs,
        },
    )

"""FedNova: the mean change by step, so that clients with many steps do not dominate.

    client k    d_k = (w_k - w) / tau_k, after tau_k steps of local training
    server      w <- w + tau_eff sum_k p_k d_k,  tau_eff = sum_k p_k tau_k

p_k is the client's share of the examples. Federated averaging moves by sum_k p_k tau_k
d_k. If the tau_k differ, its optimum belongs to another objective.

Source:
    Jianyu Wang, Qinghua Liu, Hao Liang, Gauri Joshi, H. Vincent Poor: Tackling the
    Objective Inconsistency Problem in Heterogeneous Federated Optimization. NeurIPS
    2020, https://arxiv.org/abs/2007.07481, Section 4 with a_k = (1, ..., 1), which is
    local SGD.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import Aggregator, with_sum
from ray_fed.learning.composition import Broadcast, Guards, build_process, send_weights
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Delta, Model, ModelWeights, expect_model
from ray_fed.learning.optimizers import OptimizerLike, OptimizerSpec, server_step
from ray_fed.learning.processes import LearningProcess


class FedNovaUpdate(NamedTuple):
    """The update of a client of FedNova.

    Attributes:
        delta: Change of the client's weights, divided by its number of steps.
        steps: Number of steps times number of examples, and number of examples, f32[]
            each. The server receives their sums.
    """

    delta: Delta
    steps: tuple[Any, Any]


@tracebacks.shorten
def build_fed_nova(
    model: Model,
    client_optimizer: OptimizerLike | None = None,
    server_optimizer: OptimizerLike | None = None,
    *,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    client_learning_rate: keras.optimizers.schedules.LearningRateSchedule | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build FedNova, weighted by the clients' numbers of examples.

    For other arguments see `build_fed_avg`.

    Args:
        client_optimizer: Optimizer of each client, as for `build_fed_avg`. The formulas
            of the paper that are used here assume SGD without momentum.
        aggregator: Aggregation of deltas per step, by default their weighted mean.

    Raises:
        ValueMismatchError: An optimizer or a schedule is not one of Keras.
        ConfigError: `epochs` is below 1, or the aggregator adds noise.
    """
    expect_model(model)
    train = LocalTraining(model, client_optimizer, epochs, client_learning_rate)
    optimizer = OptimizerSpec.of(server_optimizer or keras.optimizers.SGD(1.0))
    move, server_state = server_step(model, optimizer)

    def client(server: Broadcast, batches: Any) -> Any:
        trained = train(server.weights, batches, round_index=server.round_index)
        steps, size = trained.num_steps, tf.cast(trained.num_examples, tf.float32)
        delta = model.delta(server.weights, trained.weights)
        by_step = tuple(
            tf.math.divide_no_nan(d, tf.cast(steps, d.dtype)) for d in delta.trainable
        )
        update = FedNovaUpdate(delta._replace(trainable=by_step), (steps * size, size))
        return update, size, trained.totals

    def server(weights: ModelWeights, state: Any, update: Any) -> Any:
        delta, (steps, size) = update
        effective = tf.math.divide_no_nan(steps, size)
        moved = tuple(tf.cast(effective, d.dtype) * d for d in delta.trainable)
        return move(weights, state, delta._replace(trainable=moved))

    return build_process(
        model,
        client=client,
        server=server,
        server_state=server_state,
        aggregator=with_sum(aggregator),
        send=send_weights,
        guards=guards,
        name="FedNova",
        settings={
            "client optimizer": train.optimizer,
            "server optimizer": optimizer,
            "epochs": epochs,
        },
    )

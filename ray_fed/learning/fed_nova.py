"""FedNova: averages of steps, so that clients with more of them do not weigh more.

    client k    d_k = (w_k - w) / tau_k, after tau_k steps of local training
    server      w <- w + tau_eff sum_k p_k d_k,  tau_eff = sum_k p_k tau_k

p_k is the share of the client's examples. Federated averaging moves by
sum_k p_k tau_k d_k, which is the optimum of another objective where tau_k differ.

Source:
    Jianyu Wang, Qinghua Liu, Hao Liang, Gauri Joshi, H. Vincent Poor: Tackling the
    Objective Inconsistency Problem in Heterogeneous Federated Optimization. NeurIPS
    2020, https://arxiv.org/abs/2007.07481, Section 4 with a_k = (1, ..., 1), which is
    local SGD.
"""

from typing import Any, NamedTuple

import tensorflow as tf

import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import Aggregator, with_sum
from ray_fed.learning.composition import Broadcast, Guards, build_process
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Delta, Model, ModelWeights, expect_model
from ray_fed.learning.optimizers import OptimizerLike
from ray_fed.learning.processes import LearningProcess, with_facts


class FedNovaUpdate(NamedTuple):
    """What a client of FedNova sends.

    Attributes:
        delta: of its weights, by step.
        steps: their number times that of its examples, and that of its examples.
    """

    delta: Delta
    steps: tuple[Any, Any]


@tracebacks.shorten
def build_fed_nova(
    model: Model,
    client_optimizer: OptimizerLike,
    *,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build FedNova, weighted by the clients' numbers of examples.

    Args:
        model: to train.
        client_optimizer: as of `build_fed_avg`; the paper's weights are those of SGD
            without momentum.
        epochs: passes of each client over its data in a round, >= 1.
        aggregator: how deltas by step become one, by default their weighted mean.
        guards: what broken updates and empty rounds do, by default `Guards()`.

    Raises:
        ValueMismatchError: the optimizer is not one of Keras.
        ConfigError: `epochs` is below 1.
    """
    expect_model(model)
    train = LocalTraining(model, client_optimizer, epochs)

    def client(server: Broadcast, batches: Any) -> Any:
        trained = train(server.weights, batches)
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
        return model.move(weights, delta._replace(trainable=moved)), state

    process = build_process(
        model,
        client=client,
        server=server,
        aggregator=with_sum(aggregator),
        guards=guards,
    )
    return with_facts(
        process,
        algorithm="FedNova",
        client_optimizer=train.optimizer,
        epochs=epochs,
    )

"""Ditto: each client also trains weights of its own, pulled to the global weights.

    client k    delta_k = local training from w, less w: federated averaging
                v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w)), which it keeps
    server      w <- w + sum_k n_k delta_k / sum_k n_k

Source:
    Tian Li, Shengyuan Hu, Ahmad Beirami, Virginia Smith: Ditto: Fair and Robust
    Federated Learning Through Personalization. ICML 2021, PMLR 139:6357-6368,
    https://arxiv.org/abs/2012.04221, Algorithm 1.
"""

from collections.abc import Sequence
from typing import Any

import keras

import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import Aggregator
from ray_fed.learning.checks import check_number
from ray_fed.learning.composition import Broadcast, Guards, build_process, send_weights
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Model, expect_model
from ray_fed.learning.optimizers import OptimizerLike, OptimizerSpec
from ray_fed.learning.processes import LearningProcess
from ray_fed.tensorflow.traced_graph import Number


@tracebacks.shorten
def build_ditto(
    model: Model,
    client_optimizer: OptimizerLike | None = None,
    server_optimizer: OptimizerLike | None = None,
    *,
    proximal: float,
    personal_optimizer: OptimizerLike | None = None,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    client_learning_rate: keras.optimizers.schedules.LearningRateSchedule | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build Ditto, whose clients train weights of their own beside the global model.

    A client's own weights begin with the model's current weights, and use the server's
    running statistics. All metrics, also of evaluations, are for the global model. A
    client goes through its data twice, once for each model.

    For other arguments see `build_fed_avg`.

    Args:
        client_optimizer: Optimizer of the global model, as for `build_fed_avg`.
        proximal: lambda of the paper, >= 0: how strongly own weights are pulled to the
            global weights. With 0, each client trains alone.
        personal_optimizer: Optimizer of a client's own weights, by default
            `client_optimizer`.
        epochs: Passes of each client over its data in a round, for each model, >= 1.
        aggregator: Aggregation of deltas, by default their weighted mean.
        client_learning_rate: Learning rate of the global model's training by round.
            None: the rate of `client_optimizer`.

    Raises:
        ValueMismatchError: An optimizer or a schedule is not one of Keras.
        ConfigError: `epochs` is below 1, or `proximal` below 0.
    """
    expect_model(model)
    check_number("proximal", proximal, lambda pull: pull >= 0, "to be at least 0")
    strength = Number(proximal)
    train = LocalTraining(model, client_optimizer, epochs, client_learning_rate)
    server = OptimizerSpec.of(server_optimizer or keras.optimizers.SGD(1.0))
    personalize = LocalTraining(model, personal_optimizer or train.optimizer, epochs)

    def client(sent: Broadcast, batches: Any, own: Any) -> Any:
        def pull(gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
            triples = zip(gradients, weights, sent.weights.trainable, strict=True)
            return [g + strength.read(v.dtype) * (v - w) for g, v, w in triples]

        trained = train(sent.weights, batches, round_index=sent.round_index)
        personal = sent.weights._replace(trainable=own)
        new = personalize(personal, batches, correct=pull).weights.trainable
        delta = model.delta(sent.weights, trained.weights)
        return delta, trained.num_examples, trained.totals, new

    return build_process(
        model,
        client=client,
        server=server,
        client_state=model.initial_weights().trainable,
        personal=lambda weights, own: weights._replace(trainable=own),
        aggregator=aggregator,
        send=send_weights,
        guards=guards,
        name=f"Ditto({proximal:g})",
        settings={
            "personal weights": "all",
            "client optimizer": train.optimizer,
            "server optimizer": server,
            "personal optimizer": personalize.optimizer,
            "epochs": epochs,
        },
    )

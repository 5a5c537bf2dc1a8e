"""Ditto: beside the global model each client trains one of its own, drawn to it.

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

import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import Aggregator
from ray_fed.learning.checks import check_number
from ray_fed.learning.composition import Broadcast, Guards, build_process
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Delta, Model, ModelWeights, expect_model
from ray_fed.learning.optimizers import OptimizerLike
from ray_fed.learning.processes import LearningProcess, with_facts


@tracebacks.shorten
def build_ditto(
    model: Model,
    client_optimizer: OptimizerLike,
    *,
    proximal: float,
    personal_optimizer: OptimizerLike | None = None,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build Ditto, whose clients keep trained weights of their own over rounds.

    These begin as the model's weights of now; running statistics are the server's.
    Metrics, of evaluations too, are those of the global model. A client goes through
    its data twice.

    Args:
        model: to train.
        client_optimizer: of the global model, as of `build_fed_avg`.
        proximal: lambda of the paper, >= 0: how strongly own weights are drawn to the
            global ones; 0: each client trains alone.
        personal_optimizer: of a client's own weights, by default as `client_optimizer`.
        epochs: passes of each client over its data in a round, for each model, >= 1.
        aggregator: how deltas become one, by default their weighted mean.
        guards: what broken updates and empty rounds do, by default `Guards()`.

    Raises:
        ValueMismatchError: an optimizer is not one of Keras.
        ConfigError: `epochs` is below 1, or `proximal` below 0.
    """
    expect_model(model)
    check_number("proximal", proximal, lambda pull: pull >= 0, "to be at least 0")
    train = LocalTraining(model, client_optimizer, epochs)
    personalise = LocalTraining(model, personal_optimizer or train.optimizer, epochs)

    def client(server: Broadcast, batches: Any, own: Any) -> Any:
        def pull(gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
            triples = zip(gradients, weights, server.weights.trainable, strict=True)
            return [g + proximal * (v - w) for g, v, w in triples]

        trained = train(server.weights, batches)
        personal = server.weights._replace(trainable=own)
        new = personalise(personal, batches, correct=pull).weights.trainable
        delta = model.delta(server.weights, trained.weights)
        return delta, trained.num_examples, trained.totals, new

    def server(weights: ModelWeights, state: Any, delta: Delta) -> Any:
        return model.move(weights, delta), state

    process = build_process(
        model,
        client=client,
        server=server,
        client_state=model.initial_weights().trainable,
        aggregator=aggregator,
        guards=guards,
    )
    return with_facts(
        process,
        algorithm=f"Ditto({proximal:g})",
        personal_weights="all",
        client_optimizer=train.optimizer,
        personal_optimizer=personalise.optimizer,
        epochs=epochs,
    )

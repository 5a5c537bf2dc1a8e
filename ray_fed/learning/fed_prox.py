"""FedProx: federated averaging whose clients are pulled to the server's weights.

    client k    minimizes F_k(w) + mu / 2 |w - w_t|^2, so that its steps are against
                grad F_k(w) + mu (w - w_t)

Source:
    Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia
    Smith: Federated Optimization in Heterogeneous Networks. MLSys 2020,
    https://arxiv.org/abs/1812.06127, Equation 2 and Algorithm 2.
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
def build_fed_prox(
    model: Model,
    client_optimizer: OptimizerLike | None = None,
    server_optimizer: OptimizerLike | None = None,
    *,
    proximal: float,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    client_learning_rate: keras.optimizers.schedules.LearningRateSchedule | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build FedProx: `build_fed_avg` with a proximal term in the clients' loss.

    The metric `loss` does not include the proximal term.

    For other arguments see `build_fed_avg`.

    Args:
        proximal: mu of the paper, >= 0, the strength of the pull to the server's
            weights. With 0, this is federated averaging.
        aggregator: Aggregation of updates, by default their weighted mean.

    Raises:
        ValueMismatchError: An optimizer or a schedule is not one of Keras.
        ConfigError: `epochs` is below 1, or `proximal` below 0.
    """
    check_number("proximal", proximal, lambda mu: mu >= 0, "to be at least 0")
    expect_model(model)
    mu = Number(proximal)
    train = LocalTraining(model, client_optimizer, epochs, client_learning_rate)
    server = OptimizerSpec.of(server_optimizer or keras.optimizers.SGD(1.0))
    pulls = proximal > 0

    def client(broadcast: Broadcast, dataset: Any, *, epochs: Any = None) -> Any:
        start = broadcast.weights

        def pull(gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
            triples = zip(gradients, weights, start.trainable, strict=True)
            return [g + mu.read(w.dtype) * (w - w0) for g, w, w0 in triples]

        trained = train(
            start,
            dataset,
            correct=pull if pulls else None,
            round_index=broadcast.round_index,
            epochs=epochs,
        )
        num_examples = trained.num_examples
        return model.delta(start, trained.weights), num_examples, trained.totals

    return build_process(
        model,
        client=client,
        server=server,
        send=send_weights,
        aggregator=aggregator,
        guards=guards,
        name=f"FedProx({proximal:g})",
        settings={
            "client optimizer": train.optimizer,
            "server optimizer": server,
            "epochs": epochs,
        },
    )

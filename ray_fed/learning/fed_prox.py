"""Federated averaging whose clients are pulled back to the server's weights.

Each client minimises h_k(w; w_t) = F_k(w) + mu / 2 |w - w_t|^2 (Equation 2), so that a
step of a client is against grad F_k(w) + mu (w - w_t).

Sources:
    Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia
    Smith: Federated Optimization in Heterogeneous Networks. MLSys 2020,
    https://arxiv.org/abs/1812.06127, Equation 2 and Algorithm 2.
"""

import keras

from ray_fed.learning.aggregators.aggregator import Aggregator
from ray_fed.learning.aggregators.sums import inner_or_mean
from ray_fed.learning.checks import check_epochs, check_number
from ray_fed.learning.composition import build_process
from ray_fed.learning.guards import Guards
from ray_fed.learning.local_training import (
    LocalTraining,
    build_training,
    send_weights,
)
from ray_fed.learning.models import Model, expect_model
from ray_fed.learning.optimizers import OptimizerSpec
from ray_fed.learning.processes import LearningProcess
from ray_fed.learning.server_update import build_server_update


def build_fed_prox(  # noqa: PLR0913 (keywords of one algorithm)
    model: Model,
    client_optimizer: keras.optimizers.Optimizer | str,
    server_optimizer: keras.optimizers.Optimizer | str | None = None,
    *,
    proximal: float,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    client_learning_rate: keras.optimizers.schedules.LearningRateSchedule | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build FedProx: `build_fed_avg` with a proximal term in the clients' loss.

    The metric `loss` is without that term.

    Args:
        model: to train.
        client_optimizer: read now; each client starts with a fresh one.
        server_optimizer: as of `build_fed_avg`; by default SGD with rate 1.
        proximal: mu of the paper, >= 0; 0 is federated averaging.
        epochs: passes of each client over its data in a round, >= 1.
        aggregator: how updates become one, by default their weighted mean.
        client_learning_rate: of the clients by round; None: as `client_optimizer` says.
        guards: what broken updates and empty rounds do, by default `Guards()`.

    Raises:
        ValueMismatchError: an optimiser, or a schedule, is not one of Keras.
        ConfigError: `epochs` is below 1, or `proximal` below 0.
    """
    expect_model(model)
    check_number("proximal", proximal, lambda mu: mu >= 0, "to be at least 0")
    training = LocalTraining(
        OptimizerSpec(client_optimizer),
        check_epochs(epochs),
        client_learning_rate,
        float(proximal),
    )
    at_server = OptimizerSpec(server_optimizer or keras.optimizers.SGD(1.0))
    finalize = build_server_update(model, at_server)
    return build_process(
        model,
        distribute=send_weights(model, finalize),
        client_work=build_training(model, training),
        aggregate=inner_or_mean(aggregator),
        finalize=finalize,
        guards=guards,
    )

"""FedPer: layers that clients share, and layers that each keeps for itself.

    client k    (base_k, own_k) <- local training from (base, own_k); keeps own_k
    server      base <- sum_k n_k base_k / sum_k n_k

Source:
    Manoj Ghuhan Arivazhagan, Vinay Aggarwal, Aaditya Kumar Singh, Sunav Choudhary:
    Federated Learning with Personalization Layers. 2019,
    https://arxiv.org/abs/1912.00818, Algorithms 1 and 2.
"""

from collections.abc import Sequence
from typing import Any

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import Aggregator
from ray_fed.learning.composition import Broadcast, Guards, build_process
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Delta, Model, ModelWeights, expect_model
from ray_fed.learning.optimizers import OptimizerLike
from ray_fed.learning.processes import LearningProcess, with_facts


@tracebacks.shorten
def build_fed_per(
    model: Model,
    client_optimizer: OptimizerLike,
    *,
    personal: Sequence[str],
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build FedPer, whose clients keep the weights of some layers over rounds.

    These begin as the model's weights of now, and so they stay in the server's state:
    an evaluation of that is of them. What a client keeps has its own.

    Args:
        model: to train.
        client_optimizer: as of `build_fed_avg`.
        personal: names of the layers that clients keep, such as the last one's, or of
            weights, such as "bias".
        epochs: passes of each client over its data in a round, >= 1.
        aggregator: how deltas of the others become one, by default their weighted mean.
        guards: what broken updates and empty rounds do, by default `Guards()`.

    Raises:
        ValueMismatchError: the optimizer is not one of Keras.
        ConfigError: `epochs` is below 1, or a name is of no layer that is trained.
    """
    expect_model(model)
    train = LocalTraining(model, client_optimizer, epochs)
    paths = [set(v.path.split("/")) for v in model.trainable_variables]
    known = sorted(set[str]().union(*paths))
    if isinstance(personal, str) or not personal or not set(personal) <= set(known):
        raise errors.ConfigError(
            f"Expected names of layers, or of their weights, as `personal`, of {known},"
            f" found {errors.describe(personal)}."
        )
    is_own = [not names.isdisjoint(personal) for names in paths]

    def select(tensors: Sequence[Any], *, own: bool) -> tuple[Any, ...]:
        return tuple(
            t for t, is_it in zip(tensors, is_own, strict=True) if is_it == own
        )

    def join(base: Sequence[Any], own: Sequence[Any]) -> tuple[Any, ...]:
        shared, kept = iter(base), iter(own)
        return tuple(next(kept) if is_it else next(shared) for is_it in is_own)

    def client(server: Broadcast, batches: Any, own: Any) -> Any:
        base = select(server.weights.trainable, own=False)
        trained = train(server.weights._replace(trainable=join(base, own)), batches)
        delta = model.delta(server.weights, trained.weights)
        shared = delta._replace(trainable=select(delta.trainable, own=False))
        new = select(trained.weights.trainable, own=True)
        return shared, trained.num_examples, trained.totals, new

    def server(weights: ModelWeights, state: Any, delta: Delta) -> Any:
        base = select(weights.trainable, own=False)
        moved = model.move(weights._replace(trainable=base), delta)
        own = select(weights.trainable, own=True)
        return moved._replace(trainable=join(moved.trainable, own)), state

    process = build_process(
        model,
        client=client,
        server=server,
        client_state=select(model.initial_weights().trainable, own=True),
        aggregator=aggregator,
        guards=guards,
    )
    return with_facts(
        process,
        algorithm="FedPer",
        personal_weights=", ".join(personal),
        client_optimizer=train.optimizer,
        epochs=epochs,
    )

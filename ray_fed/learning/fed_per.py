"""FedPer: clients share some layers, and each client keeps other layers for itself.

    client k    (base_k, own_k) <- local training from (base, own_k); keeps own_k
    server      base <- sum_k n_k base_k / sum_k n_k

In FedBN, each client keeps the layers of batch normalization for itself.

Sources:
    Manoj Ghuhan Arivazhagan, Vinay Aggarwal, Aaditya Kumar Singh, Sunav Choudhary:
    Federated Learning with Personalization Layers. 2019,
    https://arxiv.org/abs/1912.00818, Algorithms 1 and 2.

    Xiaoxiao Li, Meirui Jiang, Xiaofei Zhang, Michael Kamp, Qi Dou: FedBN: Federated
    Learning on Non-IID Features via Local Batch Normalization. ICLR 2021,
    https://arxiv.org/abs/2102.07623, Algorithm 1.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import Aggregator
from ray_fed.learning.composition import Broadcast, Guards, build_process, send_weights
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Delta, Model, ModelWeights, expect_model
from ray_fed.learning.optimizers import OptimizerLike, OptimizerSpec, server_step
from ray_fed.learning.processes import LearningProcess


@tracebacks.shorten
def build_fed_per(
    model: Model,
    client_optimizer: OptimizerLike | None = None,
    server_optimizer: OptimizerLike | None = None,
    *,
    personal: Sequence[str] = (),
    personal_batch_norm: bool = False,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    client_learning_rate: keras.optimizers.schedules.LearningRateSchedule | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build FedPer, whose clients keep the weights of some layers between rounds.

    Each client's own weights begin with the model's current weights. The client states
    have the own weights, and `evaluate_personal` evaluates them. The server's state has
    the initial weights in their place, so other evaluations use the initial weights.

    With `personal_batch_norm=True`, this is FedBN (Li et al., 2021): clients keep the
    layers of batch normalization, with their running statistics.

    For other arguments see `build_fed_avg`.

    Args:
        personal: Names of the layers that each client keeps, such as the last layer, or
            of weights, such as "bias". Clients also keep the running statistics of
            these layers.
        personal_batch_norm: Whether each client also keeps all layers of the class
            `keras.layers.BatchNormalization`.
        aggregator: Aggregation of the shared layers' deltas, by default their weighted
            mean.

    Raises:
        ValueMismatchError: An optimizer or a schedule is not one of Keras.
        ConfigError: `epochs` is below 1, no trained layer has one of the names, or
            `personal_batch_norm` is true for a model without batch normalization.
    """
    expect_model(model)
    train = LocalTraining(model, client_optimizer, epochs, client_learning_rate)
    optimizer = OptimizerSpec.of(server_optimizer or keras.optimizers.SGD(1.0))
    move, server_state = server_step(model, optimizer)
    is_own = _find_own(model, personal, has_batch_norm=personal_batch_norm)
    num_trainable = len(model.trainable_variables)
    num_shared = num_trainable - sum(is_own[:num_trainable])
    statistics = model.statistics_indices

    def select(tensors: Sequence[Any], *, own: bool) -> tuple[Any, ...]:
        return tuple(
            t for t, is_it in zip(tensors, is_own, strict=True) if is_it == own
        )

    def join(base: Sequence[Any], own: Sequence[Any]) -> tuple[Any, ...]:
        shared, kept = iter(base), iter(own)
        return tuple(next(kept) if is_it else next(shared) for is_it in is_own)

    def flatten(weights: ModelWeights) -> list[Any]:
        return [*weights.trainable, *(weights.non_trainable[i] for i in statistics)]

    def personalize(weights: ModelWeights, own: Any) -> ModelWeights:
        tensors = join(select(flatten(weights), own=False), own)
        others = list(weights.non_trainable)
        for index, tensor in zip(statistics, tensors[num_trainable:], strict=True):
            others[index] = tensor
        return ModelWeights(tensors[:num_trainable], tuple(others))

    def client(server: Broadcast, batches: Any, own: Any) -> Any:
        start = personalize(server.weights, own)
        trained = train(start, batches, round_index=server.round_index)
        delta = model.delta(server.weights, trained.weights)
        base = select([*delta.trainable, *delta.statistics], own=False)
        shared = Delta(base[:num_shared], base[num_shared:])
        new = select(flatten(trained.weights), own=True)
        return shared, trained.num_examples, trained.totals, new

    def server(weights: ModelWeights, state: Any, delta: Delta) -> Any:
        own = select(flatten(weights), own=True)
        still = [
            tf.zeros_like(w, w.dtype if w.dtype.is_floating else tf.float32)
            for w in own
        ]
        whole = join([*delta.trainable, *delta.statistics], still)
        whole_delta = Delta(whole[:num_trainable], whole[num_trainable:])
        moved, state = move(weights, state, whole_delta)
        # Weight decay also moved the clients' weights, so this restores them.
        return personalize(moved, own), state

    return build_process(
        model,
        client=client,
        server=server,
        server_state=server_state,
        client_state=select(flatten(model.initial_weights()), own=True),
        personal=personalize,
        aggregator=aggregator,
        send=send_weights,
        guards=guards,
        name="FedPer",
        settings={
            "personal weights": ", ".join(
                [*personal, *["batch normalization"] * personal_batch_norm]
            ),
            "client optimizer": train.optimizer,
            "server optimizer": optimizer,
            "epochs": epochs,
        },
    )


def _find_own(
    model: Model, personal: Sequence[str], *, has_batch_norm: Any
) -> list[bool]:
    """Return whether clients keep each trainable weight, then each statistic."""
    if not isinstance(has_batch_norm, bool):
        raise errors.ConfigError(
            "Expected True or False as `personal_batch_norm`, found"
            f" {errors.describe(has_batch_norm)}."
        )
    variables = [*model.trainable_variables, *model.statistics_variables]
    paths = [set(v.path.split("/")) for v in variables]
    known = sorted(set[str]().union(*paths[: len(model.trainable_variables)]))
    is_named = not isinstance(personal, str) and set(personal) <= set(known)
    if not is_named or not (personal or has_batch_norm):
        raise errors.ConfigError(
            f"Expected names of layers, or of their weights, as `personal`, of {known},"
            f" found {errors.describe(personal)}."
        )
    normalizing = model.variables_of(keras.layers.BatchNormalization)
    kept = {id(variable) for variable in normalizing} if has_batch_norm else set[int]()
    if has_batch_norm and not kept & set(map(id, variables)):
        raise errors.ConfigError(
            "Expected a model with layers of batch normalization for"
            f" `personal_batch_norm`, found layers with the names {known}: name layers"
            " in `personal`."
        )
    return [
        id(variable) in kept or not names.isdisjoint(personal)
        for variable, names in zip(variables, paths, strict=True)
    ]

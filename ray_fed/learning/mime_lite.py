"""Mime Lite: clients step with the server's optimizer, whose state they do not change.

    client k    y <- y - eta U(grad f_k(y; batch), s)   for each batch, s is fixed
                sends y - x and grad f_k(x), over all of its data
    server      x <- x + mean (y - x);   s <- V(mean grad f_k(x), s)

U is the step of an optimizer of Keras, and V is the change of its variables s.

Sources:
    Sai Praneeth Karimireddy, Martin Jaggi, Satyen Kale, Mehryar Mohri, Sashank J.
    Reddi, Sebastian U. Stich, Ananda Theertha Suresh: Breaking the Centralized Barrier
    for Cross-Device Federated Learning. NeurIPS 2021, https://arxiv.org/abs/2008.03606,
    Algorithm 1 (MimeLite).
"""

from typing import Any, NamedTuple

import tensorflow as tf

import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import Aggregator
from ray_fed.learning.composition import Guards, ServerView, build_process
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Delta, Model, ModelWeights, expect_model
from ray_fed.learning.optimizers import OptimizerLike, OptimizerSpec
from ray_fed.learning.processes import LearningProcess


class MimeUpdate(NamedTuple):
    """The update of a client of Mime Lite.

    Attributes:
        delta: Change of the client's weights.
        gradient: Gradient over all of the client's data, at the server's weights.
    """

    delta: Delta
    gradient: tuple[Any, ...]


@tracebacks.shorten
def build_mime_lite(
    model: Model,
    optimizer: OptimizerLike,
    *,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build Mime Lite: clients step with the server's optimizer variables.

    A client's steps do not change these variables. It goes through its data once more
    than its `epochs`, to compute the gradient at the server's weights. The clients'
    learning rate is the optimizer's.

    For other arguments see `build_fed_avg`.

    Args:
        optimizer: Optimizer of Keras, or its name. It is copied now. Its variables are
            part of the state and are sent to clients.
        aggregator: Aggregation of updates, by default their mean, weighted by the
            clients' numbers of examples.

    Raises:
        ValueMismatchError: The optimizer is not one of Keras, or has a setting that
            cannot work here as it does in `fit`. The error names the setting.
        ConfigError: `epochs` is below 1.
    """
    expect_model(model)
    spec = OptimizerSpec.of(optimizer)
    state_is_fixed = "clients step with the variables of the server, which they keep"
    spec.refuse(
        "of Mime Lite",
        use_ema=state_is_fixed,
        gradient_accumulation_steps=state_is_fixed,
    )
    train = LocalTraining(model, spec, epochs)

    def client(sent: ServerView, dataset: Any) -> Any:
        trained = train(
            sent.weights, dataset, optimizer_state=sent.state, updates_state=False
        )
        gradient = model.full_gradient(sent.weights, dataset).trainable
        delta = model.delta(sent.weights, trained.weights)
        return MimeUpdate(delta, gradient), trained.num_examples, trained.totals

    def server(weights: ModelWeights, variables: Any, merged: MimeUpdate) -> Any:
        stamped = spec.stamp(model)

        @tf.function(autograph=False)
        def step() -> Any:
            stamped.assign_weights(weights.trainable)
            stamped.assign_state(variables)
            stamped.apply([stamped.scale_loss(g) for g in merged.gradient])
            return stamped.read_state()

        new_variables = step()
        return model.move(weights, merged.delta), new_variables

    return build_process(
        model,
        client=client,
        server=server,
        server_state=spec.initial_state(model),
        aggregator=aggregator,
        guards=guards,
        name="Mime Lite",
        settings={"optimizer": spec, "epochs": epochs},
    )

"""Mime Lite: clients step with the server's optimizer, whose state they leave alone.

    client k    y <- y - eta U(grad f_k(y; batch), s)   for each batch, s is fixed
                sends y - x and grad f_k(x), over all of its data
    server      x <- x + mean (y - x);   s <- V(mean grad f_k(x), s)

U is the step of an optimizer and V what it does to its variables; both are those of a
Keras optimizer, whichever it is.

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
from ray_fed.learning.processes import LearningProcess, with_facts


class MimeUpdate(NamedTuple):
    """What a client of Mime Lite sends.

    Attributes:
        delta: of its weights.
        gradient: over all of its data, at the server's weights.
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
    """Build Mime Lite around one optimizer, whose variables are the server's.

    A client goes through its data once more than its `epochs`, for the gradient at the
    server's weights.

    Args:
        model: to train.
        optimizer: of Keras, an object or a name, copied now; its variables are part of
            the state, and sent to clients.
        epochs: passes of each client over its data in a round, >= 1.
        aggregator: how updates become one, by default their mean, weighted by the
            clients' numbers of examples.
        guards: what broken updates and empty rounds do, by default `Guards()`.

    Raises:
        ValueMismatchError: the optimizer is not one of Keras, or has a setting that
            cannot mean here what it does in `fit`; it is named.
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
        trained = train(sent.weights, dataset, optimizer_state=sent.state)
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

    process = build_process(
        model,
        client=client,
        server=server,
        server_state=spec.initial_state(model),
        aggregator=aggregator,
        guards=guards,
    )
    return with_facts(process, algorithm="Mime Lite", optimizer=spec, epochs=epochs)

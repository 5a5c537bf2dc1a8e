"""Mime Lite: clients step with the server's optimiser, whose state they leave alone.

    client k    y <- y - eta U(grad f_k(y; batch), s)   for each batch, s is fixed
                sends y - x and grad f_k(x), over all of its data
    server      x <- x + mean (y - x);   s <- V(mean grad f_k(x), s)

U is the step of an optimiser and V what it does to its variables; both are those of a
Keras optimiser, whichever it is.

Sources:
    Sai Praneeth Karimireddy, Martin Jaggi, Satyen Kale, Mehryar Mohri, Sashank J.
    Reddi, Sebastian U. Stich, Ananda Theertha Suresh: Breaking the Centralized Barrier
    for Cross-Device Federated Learning. NeurIPS 2021, https://arxiv.org/abs/2008.03606,
    Algorithm 1 (MimeLite).
"""

from typing import Any, NamedTuple

import federated_language as fl
import keras
import tensorflow as tf

import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf
from ray_fed.learning.aggregators.aggregator import Aggregator
from ray_fed.learning.aggregators.sums import inner_or_mean
from ray_fed.learning.checks import check_epochs
from ray_fed.learning.composition import (
    ClientResult,
    Measured,
    ServerView,
    build_process,
    view_type,
)
from ray_fed.learning.guards import Guards
from ray_fed.learning.local_training import (
    Delta,
    LocalTrainer,
    build_distribution,
    full_gradient,
    measure,
    stateless_client_part,
    trainable_types,
)
from ray_fed.learning.models import Model, ModelWeights, expect_model
from ray_fed.learning.optimizers import OptimizerSpec
from ray_fed.learning.processes import ClientPart, LearningProcess, Part, with_facts
from ray_fed.learning.server_update import (
    add_statistics,
    build_initial_variables,
    build_server_part,
    delta_type,
)


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
    optimizer: keras.optimizers.Optimizer | str,
    *,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build Mime Lite around one optimiser, whose variables are the server's.

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
        ValueMismatchError: the optimiser is not one of Keras, or has a setting that
            cannot mean here what it does in `fit`; it is named.
        ConfigError: `epochs` is below 1.
    """
    expect_model(model)
    spec = OptimizerSpec(optimizer)
    state_is_fixed = "clients step with the variables of the server, which they keep"
    spec.refuse(
        "of Mime Lite",
        use_ema=state_is_fixed,
        gradient_accumulation_steps=state_is_fixed,
    )
    finalize = _build_finalization(model, spec)
    sent_type = view_type(model, finalize)

    @rtf.computation(sent_type)
    def send_all(view: ServerView) -> ServerView:
        return view

    process = build_process(
        model,
        distribute=build_distribution(send_all),
        client_work=_build_client_work(model, spec, check_epochs(epochs), sent_type),
        aggregate=inner_or_mean(aggregator),
        finalize=finalize,
        guards=guards,
    )
    return with_facts(process, algorithm="Mime Lite", optimizer=spec, epochs=epochs)


def _build_client_work(
    model: Model, spec: OptimizerSpec, epochs: int, sent_type: Any
) -> ClientPart:
    @rtf.computation(sent_type, model.data_type.member)
    def train_client(sent: ServerView, dataset: Any) -> ClientResult:
        optimizer = spec.stamp(model)
        trainer = LocalTrainer(model, optimizer)

        def fix_state(gradients: Any, _: Any) -> Any:
            optimizer.assign_state(sent.optimizer)
            return gradients

        trainer.correct = fix_state

        @tf.function(autograph=False)
        def train() -> Any:
            return trainer.train(sent.weights, dataset, epochs)

        after, totals = train()
        gradient = full_gradient(model, sent.weights, dataset).trainable
        update = MimeUpdate(measure(model, sent.weights, after), gradient)
        weight = tf.cast(totals.num_examples // epochs, tf.float32)
        return ClientResult(update, weight, Measured(totals, ()))

    return stateless_client_part(train_client)


def _build_finalization(model: Model, spec: OptimizerSpec) -> Part:
    weight_types = trainable_types(model)

    initial_variables = build_initial_variables(model, spec)
    variables_type = initial_variables.type_signature.result
    members: Any = (delta_type(model), tuple(weight_types))
    update_type = fl.to_type(MimeUpdate(*members))

    @rtf.computation(variables_type, model.weights_type, update_type)
    def update(variables: Any, weights: ModelWeights, merged: MimeUpdate) -> Any:
        optimizer = spec.stamp(model)

        @tf.function(autograph=False)
        def step() -> Any:
            optimizer.assign_weights(weights.trainable)
            optimizer.assign_state(variables)
            optimizer.apply([optimizer.scale_loss(g) for g in merged.gradient])
            return optimizer.read_state()

        moved = zip(weights.trainable, merged.delta.trainable, strict=True)
        statistics = add_statistics(model, weights, merged.delta)
        return step(), ModelWeights(tuple(w + d for w, d in moved), statistics)

    return build_server_part(initial_variables, update)

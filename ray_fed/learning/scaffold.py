"""SCAFFOLD: clients correct their steps by how their gradients differ from the mean.

    client i   y <- y - eta_l (grad f_i(y; batch) - c_i + c)      for each of K batches
               c_i+ = c_i - c + (x - y) / (K eta_l)               (Option II)
               sends y - x and c_i+ - c_i; keeps c_i+
    server     x <- x + eta_g / |S| sum (y - x);   c <- c + 1 / N sum (c_i+ - c_i)

Sources:
    Sai Praneeth Karimireddy, Satyen Kale, Mehryar Mohri, Sashank J. Reddi, Sebastian U.
    Stich, Ananda Theertha Suresh: SCAFFOLD: Stochastic Controlled Averaging for
    Federated Learning. ICML 2020, https://arxiv.org/abs/1910.06378, Algorithm 1,
    Equations 3 to 5.
"""

# pyright: reportUnknownLambdaType=false

import dataclasses
from typing import Any, NamedTuple

import federated_language as fl
import keras
import numpy as np
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf
from ray_fed.learning.aggregators.aggregator import Aggregator, no_state
from ray_fed.learning.aggregators.sums import mean, sum_of_updates
from ray_fed.learning.checks import check_epochs, check_positive, read_whole
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
    measure,
    trainable_types,
)
from ray_fed.learning.models import Model, ModelWeights, expect_model
from ray_fed.learning.optimizers import OptimizerSpec
from ray_fed.learning.processes import (
    AggregationPart,
    ClientPart,
    LearningProcess,
    Part,
    with_facts,
)
from ray_fed.learning.server_update import add_statistics, build_server_part, delta_type
from ray_fed.learning.totals import widened


class ScaffoldUpdate(NamedTuple):
    """What a client of SCAFFOLD sends.

    Attributes:
        delta: of its weights.
        control: of its control variate.
    """

    delta: Delta
    control: tuple[Any, ...]


@tracebacks.shorten
def build_scaffold(
    model: Model,
    client_learning_rate: float,
    *,
    num_clients: int,
    server_learning_rate: float = 1.0,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build SCAFFOLD: stochastic gradient descent with control variates of the clients.

    Each client keeps a control variate over rounds, which `next` takes and returns as
    a value at clients:

        next  (<ServerState@SERVER, K@CLIENTS, model.data_type> ->
               <ServerState@SERVER, K@CLIENTS, metrics@SERVER>)

    `ClientStates` holds these by client. `state.optimizer` is the server's control.
    Clients count the same, however many examples they have; one without any changes
    nothing.

    Args:
        model: to train.
        client_learning_rate: eta_l of the paper, > 0.
        num_clients: N of the paper: all that ever take part, >= 1.
        server_learning_rate: eta_g of the paper, > 0.
        epochs: passes of each client over its data in a round, >= 1.
        aggregator: how deltas of weights become one, by default their unweighted mean.
        guards: what broken updates and empty rounds do, by default `Guards()`.

    Raises:
        ConfigError: a number is out of its range, or weights have constraints.
    """
    expect_model(model)
    check_positive("client_learning_rate", client_learning_rate)
    check_positive("server_learning_rate", server_learning_rate)
    read_whole("num_clients", num_clients, 1)
    constraints = [v.constraint for v in model.trainable_variables]
    if any(constraints):
        raise errors.ConfigError(
            "Expected a model without constraints for SCAFFOLD, whose control variates"
            " take a client's steps for sums of gradients, found"
            f" {errors.describe([c for c in constraints if c])}: remove them, or"
            " use another algorithm."
        )
    finalize = _build_finalization(model, float(server_learning_rate), num_clients)
    sent_type = view_type(model, finalize)

    @rtf.computation(sent_type)
    def send_all(view: ServerView) -> ServerView:
        return view

    client_work = _build_client_work(
        model, float(client_learning_rate), check_epochs(epochs), sent_type
    )
    inner = aggregator or mean(weighted=False)
    process = build_process(
        model,
        distribute=build_distribution(send_all),
        client_work=client_work,
        aggregate=_build_aggregation(model, inner),
        finalize=finalize,
        guards=guards,
    )
    return with_facts(
        dataclasses.replace(process, num_clients=num_clients),
        algorithm="SCAFFOLD",
        client_learning_rate=client_learning_rate,
        server_learning_rate=server_learning_rate,
        epochs=epochs,
        clients=num_clients,
    )


def _build_client_work(
    model: Model, rate: float, epochs: int, sent_type: Any
) -> ClientPart:
    weight_types = trainable_types(model)
    spec = OptimizerSpec(keras.optimizers.SGD(rate))
    kept_type = fl.to_type(tuple(weight_types))

    @rtf.computation(sent_type, kept_type, model.data_type.member)
    def train_client(sent: ServerView, own: Any, dataset: Any) -> Any:
        trainer = LocalTrainer(model, spec.stamp(model))
        trainer.correct = lambda gradients, _: [
            g - own_part + part
            for g, own_part, part in zip(gradients, own, sent.optimizer, strict=True)
        ]

        @tf.function(autograph=False)
        def train() -> Any:
            return trainer.train(sent.weights, dataset, epochs)

        after, totals = train()
        steps = dataset.reduce(np.float32(0), lambda n, _: n + np.float32(1)) * epochs
        delta = measure(model, sent.weights, after)
        shift = tuple(
            tf.where(steps > 0, -part - _divided(d, steps * rate), tf.zeros_like(d))
            for part, d in zip(sent.optimizer, delta.trainable, strict=True)
        )
        new = tuple(own_part + s for own_part, s in zip(own, shift, strict=True))
        weight = tf.cast(totals.num_examples > 0, tf.float32)
        update = ScaffoldUpdate(delta, shift)
        return ClientResult(update, weight, Measured(totals, ())), new

    initialize = no_state()

    @fl.federated_computation(
        initialize.type_signature.result,
        fl.FederatedType(sent_type, fl.CLIENTS, all_equal=True),
        fl.FederatedType(kept_type, fl.CLIENTS),
        model.data_type,
    )
    def next_work(state: Any, sent: Any, kept: Any, data: Any) -> Any:
        worked = fl.federated_map(train_client, (sent, kept, data))
        return state, worked[0], worked[1]

    initial = tuple(np.zeros_like(w) for w in model.initial_weights().trainable)
    return ClientPart(initialize, next_work, initial)


def _build_aggregation(model: Model, aggregator: Aggregator) -> AggregationPart:
    """Return the part that aggregates deltas as asked for, and sums controls."""
    members: Any = (delta_type(model), tuple(trainable_types(model)))
    update_type: Any = fl.to_type(ScaffoldUpdate(*members))
    weight_type = fl.TensorType(np.float32)
    deltas = aggregator.build(update_type.delta, weight_type)
    if deltas.privacy is not None:
        raise errors.ConfigError(
            "Expected an aggregator without noise for SCAFFOLD, found one that promises"
            " privacy: the control variates would be summed without noise."
        )
    controls = sum_of_updates().build(update_type.control, weight_type)

    @fl.federated_computation(
        deltas.initialize.type_signature.result,
        fl.FederatedType(update_type, fl.CLIENTS),
        fl.FederatedType(weight_type, fl.CLIENTS),
    )
    def merge(state: Any, update: Any, weight: Any) -> Any:
        merged = deltas.next(state, update.delta, weight)
        nothing = controls.initialize()
        summed = controls.next(nothing, update.control, weight)
        both = fl.federated_zip((merged[1], summed[1]))
        return merged[0], both, merged[2]

    return AggregationPart(deltas.initialize, merge)


def _build_finalization(model: Model, rate: float, num_clients: int) -> Part:
    weight_types = trainable_types(model)
    control_type = fl.to_type(tuple(weight_types))

    @rtf.computation
    def initial_control() -> tuple[Any, ...]:
        return tuple(tf.zeros(list(t.shape or ()), t.dtype) for t in weight_types)

    merged_type = fl.StructType([delta_type(model), control_type])

    @rtf.computation(control_type, model.weights_type, merged_type)
    def update(control: Any, weights: ModelWeights, merged: Any) -> Any:
        delta, shift = merged
        moved = zip(weights.trainable, delta.trainable, strict=True)
        statistics = add_statistics(model, weights, delta)
        new = tuple(
            c + _divided(s, num_clients) for c, s in zip(control, shift, strict=True)
        )
        return new, ModelWeights(tuple(w + rate * d for w, d in moved), statistics)

    return build_server_part(initial_control, update)


def _divided(tensor: Any, by: Any) -> tf.Tensor:
    """Return a tensor by a number, which may be above what float16 holds; 0 by 0."""
    wide = widened(tensor)
    quotient = tf.math.divide_no_nan(wide, tf.cast(by, wide.dtype))
    return tf.cast(quotient, tensor.dtype)

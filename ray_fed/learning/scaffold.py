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

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import Aggregator, mean, with_sum
from ray_fed.learning.checks import check_positive, read_whole
from ray_fed.learning.composition import Guards, ServerView, build_process
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Delta, Model, ModelWeights, expect_model
from ray_fed.learning.optimizers import OptimizerSpec
from ray_fed.learning.processes import LearningProcess, with_facts
from ray_fed.learning.tensors import widened


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
    client_learning_rate: float | keras.optimizers.Optimizer,
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
        client_learning_rate: eta_l of the paper, > 0; or SGD with that rate.
        num_clients: N of the paper: all that ever take part, >= 1.
        server_learning_rate: eta_g of the paper, > 0.
        epochs: passes of each client over its data in a round, >= 1.
        aggregator: how deltas of weights become one, by default their unweighted mean.
        guards: what broken updates and empty rounds do, by default `Guards()`.

    Raises:
        ConfigError: a number is out of its range, or weights have constraints.
    """
    expect_model(model)
    if isinstance(client_learning_rate, keras.optimizers.Optimizer):
        client_learning_rate = _rate_of(client_learning_rate)
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
    rate, server_rate = float(client_learning_rate), float(server_learning_rate)
    train = LocalTraining(model, keras.optimizers.SGD(rate), epochs)

    def client(sent: ServerView, dataset: Any, own: Any) -> Any:
        def correct(gradients: Sequence[Any], _: Any) -> list[Any]:
            triples = zip(gradients, own, sent.state, strict=True)
            return [g - c_i + c for g, c_i, c in triples]

        trained = train(sent.weights, dataset, correct=correct)
        steps = trained.num_steps
        delta = model.delta(sent.weights, trained.weights)
        shift = tuple(
            tf.where(steps > 0, -c - _divided(d, steps * rate), tf.zeros_like(d))
            for c, d in zip(sent.state, delta.trainable, strict=True)
        )
        new = tuple(c_i + s for c_i, s in zip(own, shift, strict=True))
        weight = tf.cast(trained.totals.num_examples > 0, tf.float32)
        return ScaffoldUpdate(delta, shift), weight, trained.totals, new

    def server(weights: ModelWeights, control: Any, merged: Any) -> Any:
        delta, shift = merged
        new = tuple(
            c + _divided(s, num_clients) for c, s in zip(control, shift, strict=True)
        )
        moved = zip(weights.trainable, delta.trainable, strict=True)
        trainable = tuple(w + server_rate * d for w, d in moved)
        return ModelWeights(trainable, model.move_statistics(weights, delta)), new

    def no_control() -> tuple[Any, ...]:
        return tuple(tf.zeros(v.shape, v.dtype) for v in model.trainable_variables)

    process = build_process(
        model,
        client=client,
        server=server,
        server_state=no_control,
        client_state=tuple(map(np.zeros_like, model.initial_weights().trainable)),
        aggregator=with_sum(aggregator or mean(weighted=False)),
        num_clients=num_clients,
        guards=guards,
    )
    if process.privacy is not None:
        raise errors.ConfigError(
            "Expected an aggregator without noise for SCAFFOLD, found one that promises"
            " privacy: the control variates would be summed without noise."
        )
    return with_facts(
        process,
        algorithm="SCAFFOLD",
        client_learning_rate=client_learning_rate,
        server_learning_rate=server_learning_rate,
        epochs=epochs,
        clients=num_clients,
    )


def _rate_of(optimizer: keras.optimizers.Optimizer) -> float:
    rate = OptimizerSpec(optimizer).plain_rate
    if rate is None:
        raise errors.ConfigError(
            "Expected SGD with a learning rate alone, whose steps are sums of"
            f" gradients, found {errors.describe(optimizer)}: pass"
            " keras.optimizers.SGD(0.1), or 0.1."
        )
    return rate


def _divided(tensor: Any, by: Any) -> tf.Tensor:
    """Return a tensor by a number, which may be above what float16 holds; 0 by 0."""
    wide = widened(tensor)
    quotient = tf.math.divide_no_nan(wide, tf.cast(by, wide.dtype))
    return tf.cast(quotient, tensor.dtype)

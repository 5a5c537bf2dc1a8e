"""SCAFFOLD: clients correct their steps by how their gradients differ from the mean.

    client i   y <- y - eta_l (grad f_i(y; batch) - c_i + c)      for each of K batches
               c_i+ = c_i - c + (x - y) / (K eta_l)               (Option II)
               sends y - x and c_i+ - c_i; keeps c_i+
    server     x <- x + eta_g / |S| sum (y - x);   c <- c + 1 / N sum (c_i+ - c_i)

c_i is the control variate of client i, an estimate of its gradient, and c is their
mean.

Sources:
    Sai Praneeth Karimireddy, Satyen Kale, Mehryar Mohri, Sashank J. Reddi, Sebastian U.
    Stich, Ananda Theertha Suresh: SCAFFOLD: Stochastic Controlled Averaging for
    Federated Learning. ICML 2020, https://arxiv.org/abs/1910.06378, Algorithm 1,
    Equations 3 to 5.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import keras
import numpy as np
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.aggregators.aggregator import Aggregator, mean, with_sum
from ray_fed.learning.composition import Guards, ServerView, build_process
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Delta, Model, ModelWeights, expect_model
from ray_fed.learning.optimizers import (
    OptimizerLike,
    OptimizerSpec,
    read_plain_rate,
    server_step,
)
from ray_fed.learning.processes import LearningProcess
from ray_fed.learning.tensors import widened
from ray_fed.tensorflow.traced_graph import Number


class ScaffoldUpdate(NamedTuple):
    """The update of a client of SCAFFOLD.

    Attributes:
        delta: Change of the client's weights.
        control: Change of the client's control variate.
    """

    delta: Delta
    control: tuple[Any, ...]


@tracebacks.shorten
def build_scaffold(
    model: Model,
    client_optimizer: float | keras.optimizers.Optimizer | None = None,
    server_optimizer: OptimizerLike | None = None,
    *,
    num_clients: int,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build SCAFFOLD: stochastic gradient descent with control variates of the clients.

    Each client keeps its control variate between rounds. `next` takes and returns the
    control variates, K, as a value at clients:

        next  (<ServerState@SERVER, K@CLIENTS, model.data_type> ->
               <ServerState@SERVER, K@CLIENTS, metrics@SERVER>)

    `ClientStates` stores a value for each client between rounds. `state.server` has the
    server's control variate and the variables of its optimizer. Each client has the
    same weight, whatever its number of examples. Without examples, it changes nothing.

    For other arguments see `build_fed_avg`.

    Args:
        client_optimizer: SGD with a learning rate alone, which is eta_l of the paper.
            The rate itself, > 0, is also accepted. None: the optimizer that the Keras
            model was compiled with.
        server_optimizer: Optimizer as for `build_fed_avg`. SGD with the rate eta_g
            makes the step of the paper.
        num_clients: N of the paper: the number of all clients that ever take part,
            >= 1.
        aggregator: Aggregation of deltas, by default their unweighted mean.

    Raises:
        ConfigError: A number is out of its range, weights have constraints, the client
            optimizer has other settings than its rate, or the aggregator adds noise.
    """
    expect_model(model)
    rate = read_plain_rate(model, client_optimizer)
    read_whole("num_clients", num_clients, 1)
    constraints = [v.constraint for v in model.trainable_variables]
    if any(constraints):
        raise errors.ConfigError(
            "Expected a model without constraints for SCAFFOLD, whose control variates"
            " take a client's steps for sums of gradients, found"
            f" {errors.describe([c for c in constraints if c])}: remove them, or"
            " use another algorithm."
        )
    train = LocalTraining(model, keras.optimizers.SGD(rate), epochs)
    optimizer = OptimizerSpec.of(server_optimizer or keras.optimizers.SGD(1.0))
    move, optimizer_state = server_step(model, optimizer)
    own_rate = cast("Number", train.optimizer.rate)

    def client(sent: ServerView, dataset: Any, own: Any) -> Any:
        def correct(gradients: Sequence[Any], _: Any) -> list[Any]:
            triples = zip(gradients, own, sent.state, strict=True)
            return [g - c_i + c for g, c_i, c in triples]

        trained = train(sent.weights, dataset, correct=correct)
        steps = trained.num_steps
        delta = model.delta(sent.weights, trained.weights)
        shift = tuple(
            tf.where(
                steps > 0,
                -c - _divided(d, steps * own_rate.read(steps.dtype)),
                tf.zeros_like(d),
            )
            for c, d in zip(sent.state, delta.trainable, strict=True)
        )
        new = tuple(c_i + s for c_i, s in zip(own, shift, strict=True))
        weight = tf.cast(trained.totals.num_examples > 0, tf.float32)
        return ScaffoldUpdate(delta, shift), weight, trained.totals, new

    def server(weights: ModelWeights, state: Any, merged: Any) -> Any:
        (control, variables), (delta, shift) = state, merged
        new = tuple(
            c + _divided(s, num_clients) for c, s in zip(control, shift, strict=True)
        )
        moved, variables = move(weights, variables, delta)
        return moved, (new, variables)

    def send(view: ServerView) -> ServerView:
        control, _ = view.state
        return view._replace(state=control)

    no_control = tuple(map(np.zeros_like, model.initial_weights().trainable))
    return build_process(
        model,
        client=client,
        server=server,
        server_state=(no_control, optimizer_state),
        client_state=no_control,
        aggregator=with_sum(aggregator or mean(weighted=False)),
        num_clients=num_clients,
        send=send,
        guards=guards,
        name="SCAFFOLD",
        settings={
            "client optimizer": train.optimizer,
            "server optimizer": optimizer,
            "epochs": epochs,
            "clients": num_clients,
        },
    )


def _divided(tensor: Any, by: Any) -> tf.Tensor:
    """Divide by a number that may be too large for float16. 0 / 0 is 0."""
    wide = widened(tensor)
    quotient = tf.math.divide_no_nan(wide, tf.cast(by, wide.dtype))
    return tf.cast(quotient, tensor.dtype)

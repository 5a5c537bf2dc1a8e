"""Federated evaluation: loss and metrics over all clients' examples."""

from typing import Any

import federated_language as fl
import tensorflow as tf

from ray_fed import tensorflow as rtf
from ray_fed.learning.models import Model, ModelWeights
from ray_fed.learning.processes import LearningProcess
from ray_fed.learning.totals import Totals


def build_fed_eval(
    model: Model, training: LearningProcess | None = None
) -> LearningProcess:
    """Build the evaluation of a model on clients' data.

    The process holds

        initialize   ( -> S@SERVER), what there is to evaluate before any training
        next         (<S@SERVER, model.data_type> -> metrics@SERVER)

    where S is the `ModelWeights` of the model, such as `state.weights`; or, with
    `training`, the whole state of that process. A test set that the server holds is
    evaluated as the data of one client: `evaluation.next(state, [test_batches])`.

    Metrics are loss (NaN over no examples), num_examples, and the model's own.

    Args:
        model: to evaluate.
        training: the process whose state `next` takes; None: it takes weights.
    """
    initialize = training.initialize if training else _build_initialize(model)
    state_type: Any = initialize.type_signature.result
    evaluate_client = _build_client_work(model)

    @rtf.computation(state_type.member)
    def select(state: Any) -> ModelWeights:
        return state.weights if training else state

    @rtf.computation(evaluate_client.type_signature.result)
    def report(totals: Totals) -> Any:
        return model.totals.finish(totals)

    @fl.federated_computation(state_type, model.data_type)
    def evaluate(state: Any, data: Any) -> Any:
        weights = fl.federated_broadcast(fl.federated_map(select, state))
        totals = fl.federated_sum(fl.federated_map(evaluate_client, (weights, data)))
        return fl.federated_map(report, totals)

    return LearningProcess(initialize, evaluate)


def _build_initialize(model: Model) -> Any:
    initial = model.initial_weights()

    @rtf.computation
    def initial_weights() -> ModelWeights:
        return tf.nest.map_structure(tf.constant, initial)

    @fl.federated_computation
    def initialize() -> Any:
        return fl.federated_eval(initial_weights, fl.SERVER)

    return initialize


def _build_client_work(model: Model) -> Any:
    @rtf.computation(model.weights_type, model.data_type.member)
    def evaluate_client(weights: ModelWeights, dataset: Any) -> Totals:
        def add(totals: Totals, batch: Any) -> Totals:
            return model.forward(weights, batch, totals, training=False).totals

        return dataset.reduce(model.totals.zero(), add)

    return evaluate_client

"""Federated evaluation: loss and metrics over all clients' examples.

Evaluation by client: what each client's own metrics are, after fine-tuning or not.

Source of fine-tuning before evaluation, there called personalization:
    Kangkang Wang, Rajiv Mathews, Chloé Kiddon, Hubert Eichner, Françoise Beaufays,
    Daniel Ramage: Federated Evaluation of On-device Personalization. 2019,
    https://arxiv.org/abs/1910.10252.
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf
from ray_fed.learning.batches import check_batches, check_clients
from ray_fed.learning.checks import check_number, expect_kind
from ray_fed.learning.history import flatten_numbers
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Model, ModelWeights, expect_model
from ray_fed.learning.objectives import Totals
from ray_fed.learning.optimizers import OptimizerLike
from ray_fed.learning.processes import LearningProcess, build_initialize
from ray_fed.program import ClientData

_logger = logging.getLogger("ray_fed.learning.run_loop")


@tracebacks.shorten
def build_fed_eval(
    model: Model | Mapping[str, Model], training: LearningProcess | None = None
) -> LearningProcess:
    """Build the evaluation of a model, or of several at once, on clients' data.

    The process holds

        initialize   ( -> S@SERVER), what there is to evaluate before any training
        next         (<S@SERVER, model.data_type> -> metrics@SERVER)

    where S is the `ModelWeights` of the model, such as `state.weights`; or, with
    `training`, the whole state of that process. Of several models, S and the metrics
    are by name, and each client goes through its data once for each model. A test set
    that the server holds is evaluated as the data of one client:
    `evaluation.next(state, [test_batches])`.

    Metrics are loss (NaN over no examples), num_examples, and the model's own.

    Args:
        model: to evaluate; several by name, all of one `data_type`.
        training: the process whose state `next` takes; None: it takes weights.

    Raises:
        ConfigError: there are no models, their data differ in type, there are several
            with `training`, or `training` is of other weights.
    """
    if isinstance(model, Mapping):
        return _build_for_several(dict(model), training)
    initialize, select = evaluated_state(model, training)
    state_type: Any = initialize.type_signature.result
    count, report = build_measures(model)

    @fl.federated_computation(state_type, model.data_type)
    def evaluate(state: Any, data: Any) -> Any:
        weights = fl.federated_broadcast(fl.federated_map(select, state))
        totals = fl.federated_sum(fl.federated_map(count, (weights, data)))
        return fl.federated_map(report, totals)

    facts = {"algorithm": "evaluation", "model": model.describe()}
    return LearningProcess(initialize, evaluate, facts=facts)


def _build_for_several(
    models: dict[str, Model], training: LearningProcess | None
) -> LearningProcess:
    data_type = _check_alike(models, training)
    initialize = build_initialize(
        {name: model.initial_weights() for name, model in models.items()}
    )
    state_type: Any = initialize.type_signature.result

    @rtf.computation(state_type.member, data_type.member)
    def count(weights: Any, dataset: Any) -> Any:
        return {
            name: model.evaluate(weights[name], dataset)
            for name, model in models.items()
        }

    @rtf.computation(count.type_signature.result)
    def report(totals: Any) -> Any:
        return {
            name: model.totals.finish(totals[name]) for name, model in models.items()
        }

    @fl.federated_computation(state_type, data_type)
    def evaluate(state: Any, data: Any) -> Any:
        weights = fl.federated_broadcast(state)
        totals = fl.federated_sum(fl.federated_map(count, (weights, data)))
        return fl.federated_map(report, totals)

    described = ", ".join(f"{k}: {model.describe()}" for k, model in models.items())
    facts = {"algorithm": "evaluation", "models": described}
    return LearningProcess(initialize, evaluate, facts=facts)


def _check_alike(models: dict[str, Model], training: LearningProcess | None) -> Any:
    """Return the type of the data that all models take."""
    if training is not None or not models:
        raise errors.ConfigError(
            f"Expected one model with `training`, or some without, found {len(models)}"
            " by name: pass the weights of each, such as `state.weights`."
        )
    for model in models.values():
        expect_model(model)
    first, *others = (model.data_type for model in models.values())
    for other in others:
        if not other.is_equivalent_to(first):
            raise errors.ConfigError(
                f"Expected models of one `data_type`, found `{first}` and `{other}`."
            )
    return first


def evaluated_state(model: Model, training: LearningProcess | None) -> tuple[Any, Any]:
    """Return what makes the first state to evaluate, and what selects its weights."""
    expect_model(model)
    if training is None:
        initialize = build_initialize(model.initial_weights())
    else:
        expect_kind("training", training, LearningProcess)
        initialize = training.initialize
    state_type: Any = initialize.type_signature.result

    @rtf.computation(state_type.member)
    def select(state: Any) -> ModelWeights:
        return state.weights if training else state

    trained: Any = select.type_signature.result
    if not model.weights_type.is_assignable_from(trained):
        raise errors.ConfigError(
            f"Expected `training` to train the weights of the model {model.describe()},"
            f" `{model.weights_type}`, found `{trained}`: pass the process that trains"
            " this model, or evaluate the model of that one, `training.model`."
        )
    return initialize, select


def build_measures(model: Model) -> tuple[Any, Any]:
    """Return two computations: what a client counts, and the metrics of such totals.

    The first takes weights and the batches of a client.
    """

    @rtf.computation(model.weights_type, model.data_type.member)
    def count(weights: ModelWeights, dataset: Any) -> Totals:
        return model.evaluate(weights, dataset)

    @rtf.computation(count.type_signature.result)
    def report(totals: Totals) -> Any:
        return model.totals.finish(totals)

    return count, report


@tracebacks.shorten
def build_client_eval(
    model: Model,
    training: LearningProcess | None = None,
    *,
    fine_tuning: OptimizerLike | None = None,
    epochs: int = 1,
) -> LearningProcess:
    """Build the evaluation of a model by client.

    The process holds

        initialize   ( -> S@SERVER), as that of `build_fed_eval`
        next         (<S@SERVER, model.data_type> -> metrics@CLIENTS)

    or, with `fine_tuning`, where each client first trains on data of its own:

        next         (<S@SERVER, model.data_type, model.data_type> -> metrics@CLIENTS)

    whose first data are trained on, and the second evaluated. What a client trained is
    forgotten. Metrics are as those of `build_fed_eval`, over the examples of one
    client. `spread` makes numbers of them.

    Args:
        model: to evaluate.
        training: the process whose state `next` takes; None: it takes weights.
        fine_tuning: the optimizer of each client, read now; None: none trains.
        epochs: passes over the data to train on, >= 1.

    Raises:
        ValueMismatchError: `fine_tuning` is no optimizer of Keras.
        ConfigError: `epochs` is below 1, or `training` is of other weights.
    """
    initialize, select = evaluated_state(model, training)
    state_type: Any = initialize.type_signature.result
    count, report = build_measures(model)
    facts = {"algorithm": "evaluation by client", "model": model.describe()}

    if fine_tuning is None:

        @fl.federated_computation(state_type, model.data_type)
        def evaluate(state: Any, data: Any) -> Any:
            weights = fl.federated_broadcast(fl.federated_map(select, state))
            return fl.federated_map(report, fl.federated_map(count, (weights, data)))

        return LearningProcess(initialize, evaluate, facts=facts)

    training_of_each = LocalTraining(model, fine_tuning, epochs)
    facts["fine tuning"] = f"{training_of_each.optimizer}, {epochs} epochs"

    @rtf.computation(model.weights_type, model.data_type.member)
    def tune(weights: ModelWeights, dataset: Any) -> ModelWeights:
        optimizer = training_of_each.optimizer.stamp(model)

        @tf.function(autograph=False)
        def train() -> ModelWeights:
            return training_of_each.run(optimizer, weights, dataset)[0]

        return train()

    @fl.federated_computation(state_type, model.data_type, model.data_type)
    def evaluate_tuned(state: Any, tuning_data: Any, data: Any) -> Any:
        weights = fl.federated_broadcast(fl.federated_map(select, state))
        tuned = fl.federated_map(tune, (weights, tuning_data))
        return fl.federated_map(report, fl.federated_map(count, (tuned, data)))

    return LearningProcess(initialize, evaluate_tuned, facts=facts)


def choose_evaluation(
    process: LearningProcess,
    evaluate: Callable[[Any], Any] | LearningProcess | None,
    validation_data: Any,
    caster: Callable[[Any], Any],
) -> tuple[Any, Callable[[Any], Any] | None]:
    """Return what evaluates in a run, and as a function of the state; None: none does.

    Raises:
        ConfigError: one of the two is missing, or says nothing beside the other; or
            `validation_data` are of another kind, such as a table.
        ValueMismatchError: `validation_data` are not what the evaluation takes.
    """
    model = getattr(process, "model", None)
    given = validation_data
    if given is not None and evaluate is None and model is not None:
        evaluate = build_fed_eval(model, process)
    if isinstance(evaluate, LearningProcess) != (given is not None):
        found = "no data" if given is None else errors.describe(evaluate)
        raise errors.ConfigError(
            "Expected `validation_data` and an evaluation of it, such as"
            f" `evaluate=build_fed_eval(model)`, found one without the other: {found}."
            " A function as `evaluate` has its own data: leave `validation_data` out,"
            " or call `build_fed_eval(model).next` in it."
        )
    if not isinstance(evaluate, LearningProcess):
        return evaluate, evaluate
    step = evaluate.next
    if isinstance(given, tuple) and len(given) == 2:  # noqa: PLR2004
        given = [dict(zip("xy", given, strict=True))]
    member = step.type_signature.parameter[1].member
    is_batch = isinstance(given, Mapping) and any(map(_is_array, given.values()))
    if (
        (is_batch and isinstance(member, fl.SequenceType))
        or isinstance(given, tuple)
        or _is_array(given)
    ):
        raise errors.ConfigError(
            "Expected a pair `(x, y)`, a list of batches or clients as"
            f" `validation_data`, found {_describe_batch(given)}."
        )
    if isinstance(given, Mapping):
        given = list(given.values())
    elif isinstance(given, list) and given and not isinstance(given[0], list):
        given = [given]
    clients = list(map(caster, given)) if isinstance(given, list) else given
    with _naming_validation_data():
        check_clients(clients, member)
        if isinstance(clients, list):
            check_batches(dict(enumerate(clients)))
            ClientData.from_values(clients, member)  # which checks them
    own = getattr(process, "facts", {}).get("personal weights")
    if own is not None:
        _logger.warning(
            "Clients keep weights of their own (%s), and `validation_data` are"
            " evaluated with the server's alone: `client_states` of the result has"
            " the others.",
            own,
        )
    signature = getattr(process.initialize, "type_signature", None)
    takes_all = signature is not None and (
        step.type_signature.parameter[0].is_assignable_from(signature.result)
    )

    def evaluate_clients(state: Any) -> Any:
        with _naming_validation_data():
            return step(state if takes_all else state.weights, clients)

    return evaluate, evaluate_clients


def _is_array(value: object) -> bool:
    is_table = hasattr(value, "iloc")  # which is told apart later
    return hasattr(value, "__array__") and not is_table


def _describe_batch(given: Any) -> str:
    if isinstance(given, Mapping):
        return f"one batch, of {list(given)}: put it in a list"
    if isinstance(given, tuple):
        return f"a tuple of {len(given)}"
    return f"an array of the shape {np.shape(given)}"


@contextlib.contextmanager
def _naming_validation_data() -> Generator[None]:
    try:
        yield
    except Exception as error:
        error.add_note("The data that it is of are `validation_data`.")
        raise


@tracebacks.shorten
def spread(
    clients: Sequence[Mapping[str, Any]], *, share: float = 0.1
) -> dict[str, dict[str, float]]:
    """Return how metrics are spread over clients.

    Each client counts the same. Clients without examples are left out.

    Args:
        clients: metrics of each, as `build_client_eval` returns them.
        share: of the clients, above 0 and at most 1, that the two ends are, at least
            one: 0.1 has the worst decile.

    Returns:
        For each number, named as in `History.names`: `mean`, `deviation` (of the
        population), `median`, and the means over the clients with the `lowest` and the
        `highest` values.

    Raises:
        ConfigError: `share` is out of its range, or no client has examples.
    """
    check_number("share", share, lambda part: 0 < part <= 1, "above 0, at most 1")
    for client in clients:
        if "num_examples" not in client:
            raise errors.ConfigError(
                "Expected the metrics of each client, with `num_examples`, found"
                f" {errors.describe(client)}: pass what `build_client_eval` measured."
            )
    measured = [
        dict(flatten_numbers(client))
        for client in clients
        if client["num_examples"] > 0
    ]
    if not measured:
        raise errors.ConfigError(
            f"Expected metrics of clients with examples, found {len(clients)} clients"
            " and no example."
        )
    num_ends = max(1, round(share * len(measured)))
    found: dict[str, dict[str, float]] = {}
    for name in measured[0]:
        values = np.sort([client[name] for client in measured])
        found[name] = {
            "mean": float(values.mean()),
            "deviation": float(values.std()),
            "median": float(np.median(values)),
            "lowest": float(values[:num_ends].mean()),
            "highest": float(values[-num_ends:].mean()),
        }
    return found

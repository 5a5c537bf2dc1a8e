"""Federated evaluation: loss and metrics over all clients, or of each client.

A client can be fine-tuned before its own evaluation.

Source of fine-tuning before evaluation, which it calls personalization:
    Kangkang Wang, Rajiv Mathews, Chloé Kiddon, Hubert Eichner, Françoise Beaufays,
    Daniel Ramage: Federated Evaluation of On-device Personalization. 2019,
    https://arxiv.org/abs/1910.10252.

Source of the index of fairness in `spread`:
    Raj Jain, Dah-Ming Chiu, William R. Hawe: A Quantitative Measure of Fairness and
    Discrimination for Resource Allocation in Shared Computer Systems. DEC Research
    Report TR-301, 1984, https://arxiv.org/abs/cs/9809099.
"""

import array
import contextlib
import logging
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, cast

import federated_language as fl
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf
from ray_fed.data import NamedClients
from ray_fed.learning.batches import (
    BatchCaster,
    check_batches,
    check_clients,
    count_rows,
    detach,
)
from ray_fed.learning.checks import check_number, expect_kind
from ray_fed.learning.client_states import ClientStates
from ray_fed.learning.history import flatten_numbers
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Model, ModelWeights, expect_model
from ray_fed.learning.objectives import Totals
from ray_fed.learning.optimizers import OptimizerLike
from ray_fed.learning.processes import LearningProcess, build_initialize
from ray_fed.learning.run_fingerprint import with_ids
from ray_fed.program import ClientData, ClientReference

_logger = logging.getLogger("ray_fed.learning.run_loop")


@tracebacks.shorten
def build_fed_eval(
    model: Model | Mapping[str, Model], training: LearningProcess | None = None
) -> LearningProcess:
    """Build the evaluation of a model, or of several models, on clients' data.

    The process has two computations:

        initialize   ( -> S@SERVER), the state before any training
        next         (<S@SERVER, model.data_type> -> metrics@SERVER)

    S is the `ModelWeights` of the model, such as `state.weights`. With `training`, it
    is the whole state of that process. With several models, S and the metrics have one
    member for each name, and each client goes through its data once for each model.

    To evaluate a test set of the server, pass it as the data of one client:
    `evaluation.next(state, [test_batches])`.

    The metrics are `loss` (NaN without examples), `num_examples` and the model's own.

    Args:
        model: Model to evaluate, or a dictionary of models by name, which must have the
            same `data_type`.
        training: Process whose state `next` takes. None: `next` takes weights.

    Raises:
        ConfigError: There are no models, their types of data differ, there are several
            with `training`, or `training` trains other weights.
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
    """Return the data type of all models, or raise ConfigError if they differ."""
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
    """Return computations of the first state, and of the weights in a state.

    A state is the state of `training`, or for None the weights alone. Raises
    ConfigError if `training` trains the weights of another model.
    """
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
    """Return the computations (<weights, data> -> totals) and (totals -> metrics)."""

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
    """Build the evaluation of a model on each client.

    The process has two computations:

        initialize   ( -> S@SERVER), as for `build_fed_eval`
        next         (<S@SERVER, model.data_type> -> metrics@CLIENTS)

    With `fine_tuning`, `next` takes two data sets of each client. The client trains on
    the first, and is evaluated on the second. Then its trained weights are discarded:

        next         (<S@SERVER, model.data_type, model.data_type> -> metrics@CLIENTS)

    The metrics are as in `build_fed_eval`, over the examples of one client. `spread`
    summarizes them.

    Args:
        model: Model to evaluate.
        training: Process whose state `next` takes. None: `next` takes weights.
        fine_tuning: Optimizer of each client, which is copied now. None: clients do not
            train.
        epochs: Number of passes over the data to train on, >= 1.

    Raises:
        ValueMismatchError: `fine_tuning` is not an optimizer of Keras.
        ConfigError: `epochs` is below 1, or `training` trains other weights.
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
        return training_of_each(weights, dataset).weights

    @fl.federated_computation(state_type, model.data_type, model.data_type)
    def evaluate_tuned(state: Any, tuning_data: Any, data: Any) -> Any:
        weights = fl.federated_broadcast(fl.federated_map(select, state))
        tuned = fl.federated_map(tune, (weights, tuning_data))
        return fl.federated_map(report, fl.federated_map(count, (tuned, data)))

    return LearningProcess(initialize, evaluate_tuned, facts=facts)


@tracebacks.shorten
def evaluate_personal(
    training: LearningProcess,
    state: Any,
    client_states: ClientStates | None,
    data: Sequence[Any] | Mapping[Any, Any],
    *,
    cast: bool | None = None,
) -> list[Mapping[str, Any]]:
    """Evaluate each client with its own weights, in the default context.

        result = learning.run(training, clients, num_rounds=10)
        learning.evaluate_personal(
            training, result.state, result.client_states, held_out
        )

    The clients of `training` must have weights of their own, as in `build_ditto`,
    `build_fed_per`, and `build_process` with `personal`. A client that took part in no
    round has the initial values of its own weights.

    Args:
        training: Learning process whose clients have weights of their own.
        state: State of the server, such as `result.state`.
        client_states: Values that clients keep, such as `result.client_states`.
        data: Data to evaluate on, for each client: in any form that `run` takes, with
            the same ids, or with indices if the clients of the run have no ids. A
            mapping may have some of the clients.
        cast: Whether arrays are cast to the model's dtypes, as in `run`.

    Returns:
        The metrics of each client, as `build_client_eval` measures them, in the order
        of `data`. `spread` summarizes them.

    Raises:
        ConfigError: Clients of `training` have no weights of their own, `client_states`
            are missing, or the run had no client of an id.
        ValueMismatchError: Data or `client_states` are of another type.
    """
    expect_kind("training", training, LearningProcess)
    if training.personal_weights is None:
        raise errors.ConfigError(
            "Expected a process whose clients have weights of their own, such as one"
            f" of `build_ditto` or `build_fed_per`, found {training!r}: evaluate the"
            " server's weights by `build_client_eval`."
        )
    if not isinstance(client_states, ClientStates):
        raise errors.ConfigError(
            "Expected the `client_states` of a result, found"
            f" {errors.describe(client_states)}."
        )
    evaluate = _build_personal_eval(training)
    clients, caster = with_ids(data), BatchCaster(training, cast=cast)
    check_clients(clients, caster.member)
    ids: Sequence[Any] = getattr(clients, "ids", range(len(clients)))

    def evaluate_part(part: Sequence[int]) -> Any:
        own = [ids[index] for index in part]
        read = [caster(detach(clients[index])) for index in part]
        check_batches(dict(enumerate(read)), own)
        batches = NamedClients(read, own) if hasattr(clients, "ids") else read
        return evaluate(state, client_states.take(own), batches)

    return list(_evaluate_parts(evaluate_part, len(clients)))


def _build_personal_eval(training: LearningProcess) -> Any:
    """Return the evaluation <state@SERVER, kept@CLIENTS, data@CLIENTS> -> metrics."""
    model, personalize = training.model, training.personal_weights
    _, select = evaluated_state(model, training)
    count, report = build_measures(model)
    state_type, kept_type, data_type = (
        each for _, each in training.next.type_signature.parameter.items()
    )

    @fl.federated_computation(state_type, kept_type, data_type)
    def evaluate(state: Any, kept: Any, data: Any) -> Any:
        weights = fl.federated_broadcast(fl.federated_map(select, state))
        own = fl.federated_map(personalize, (weights, kept))
        return fl.federated_map(report, fl.federated_map(count, (own, data)))

    return evaluate


def choose_evaluation(
    process: LearningProcess,
    evaluate: Callable[[Any], Any] | LearningProcess | None,
    validation_data: Any,
    caster: Callable[[Any], Any],
) -> tuple[Any, Callable[[Any], Any] | None]:
    """Return the evaluation of a run, and a function of the state that evaluates.

    Both are None if the run does not evaluate. `caster` casts the batches of
    `validation_data`. Raises ConfigError if `evaluate` and `validation_data` do not fit
    together, and ValueMismatchError if the data does not fit the evaluation.
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
    signature = step.type_signature
    is_by_client = getattr(signature.result, "placement", None) is fl.CLIENTS
    if len(signature.parameter) != 2:  # noqa: PLR2004 (state and data)
        raise errors.ConfigError(
            "Expected an evaluation that takes a state and one data set of each client"
            f" with `validation_data`, found one that takes `{signature.parameter}`:"
            " call its `next` in a function that is passed as `evaluate`."
        )
    with _naming_validation_data():
        clients = _read_clients(given, signature.parameter[1].member, caster)
    own = getattr(process, "facts", {}).get("personal weights")
    if own is not None:
        _logger.warning(
            "Clients keep weights of their own (%s), but `validation_data` is"
            " evaluated with the server's weights: pass the `client_states` of the"
            " result to `learning.evaluate_personal` to evaluate the clients' weights.",
            own,
        )
    initial = getattr(process.initialize, "type_signature", None)
    takes_all = initial is not None and (
        signature.parameter[0].is_assignable_from(initial.result)
    )

    def evaluate_clients(state: Any) -> Any:
        with _naming_validation_data():
            taken = state if takes_all else state.weights
            if not is_by_client:
                return step(taken, clients)

            def evaluate_part(part: Sequence[int]) -> Any:
                return step(taken, [clients[index] for index in part])

            return spread(_evaluate_parts(evaluate_part, len(clients)))

    return evaluate, evaluate_clients


_CLIENTS_AT_ONCE = 1000


def _evaluate_parts(
    evaluate: Callable[[Sequence[int]], Sequence[Mapping[str, Any]]], num_clients: int
) -> Iterator[Mapping[str, Any]]:
    """Yield the metrics of each client, evaluating some clients at a time."""
    for start in range(0, num_clients, _CLIENTS_AT_ONCE):
        yield from evaluate(range(start, min(start + _CLIENTS_AT_ONCE, num_clients)))


_ROWS_AT_ONCE = 32
"""Number of rows in each batch of a pair `(x, y)`, as in Keras' `evaluate`."""


_OF_ONE_CLIENT: Any = (ClientReference, tf.data.Dataset, Iterator)
"""Types of one client's data, apart from a list of batches."""


def _read_clients(given: Any, member: fl.Type, caster: Callable[[Any], Any]) -> Any:
    """Return `validation_data` as the data of clients, whose values are copies.

    `caster` casts a client's batches to the types of the model. Raises ConfigError if
    the value is neither a pair, nor batches, nor clients.
    """
    if isinstance(given, tuple) and given and all(map(_is_client, cast("Any", given))):
        given = list(cast("tuple[Any, ...]", given))
    is_batch = isinstance(given, Mapping) and any(map(_is_array, given.values()))
    is_pair = isinstance(given, tuple) and len(given) == 2  # noqa: PLR2004
    if (
        (is_batch and isinstance(member, fl.SequenceType))
        or (isinstance(given, tuple) and not is_pair)
        or (is_pair and any(part is None for part in given))
        or isinstance(given, str | int | float)
        or _is_array(given)
    ):
        raise errors.ConfigError(
            "Expected a pair `(x, y)`, a list of batches or clients as"
            f" `validation_data`, found {_describe_batch(given)}."
        )
    if is_pair:
        given = [_cut_batch(dict(zip("xy", given, strict=True)))]
    elif isinstance(given, _OF_ONE_CLIENT) or (
        isinstance(given, list)
        and given
        and not isinstance(given[0], (list, *_OF_ONE_CLIENT))
    ):
        given = [given]
    check_clients(given, member)
    if isinstance(given, ClientData):
        return given
    is_named = isinstance(given, Mapping)
    is_at_hand = is_named or isinstance(given, list)
    read = [
        caster(client if is_at_hand else detach(client))
        for client in (given.values() if is_named else given)
    ]
    ids = list(given) if is_named else list(range(len(read)))
    check_batches(dict(enumerate(read)), ids if is_named else ())
    if any(isinstance(client, ClientReference) for client in read):
        check_clients(read, member)
        return read
    return ClientData.from_values(dict(zip(ids, read, strict=True)), member)


def _is_client(value: Any) -> bool:
    """Return whether a value is the data of one client, and not a list of rows."""
    is_list = isinstance(value, list) and (not value or isinstance(value[0], Mapping))
    return is_list or isinstance(value, _OF_ONE_CLIENT)


def _cut_batch(batch: Mapping[str, Any]) -> list[Any]:
    check_batches({0: [batch]})
    (num_rows,) = count_rows([batch])

    def cut(value: Any, start: int) -> Any:
        if isinstance(value, Mapping):
            parts = cast("Mapping[Any, Any]", value)
            return {name: cut(part, start) for name, part in parts.items()}
        return value[start : start + _ROWS_AT_ONCE]

    if num_rows is None:
        return [batch]
    return [cut(batch, start) for start in range(0, num_rows, _ROWS_AT_ONCE)]


def _is_array(value: object) -> bool:
    is_table = hasattr(value, "iloc")  # tables have an error of their own
    return hasattr(value, "__array__") and not is_table


def _describe_batch(given: Any) -> str:
    if isinstance(given, Mapping):
        return f"one batch, of {list(given)}: put it in a list"
    if isinstance(given, tuple):
        has_none = any(part is None for part in given)
        return f"a tuple of {len(given)}" + ", with None" * has_none
    if isinstance(given, str | int | float):
        return errors.describe(given)
    return f"an array of the shape {np.shape(given)}"


@contextlib.contextmanager
def _naming_validation_data() -> Generator[None]:
    try:
        yield
    except Exception as error:
        error.add_note("The error concerns `validation_data`.")
        raise


@tracebacks.shorten
def spread(
    clients: Iterable[Mapping[str, Any]],
    *,
    share: float = 0.1,
    percentiles: Sequence[float] = (10, 25, 75, 90),
) -> dict[str, dict[str, float]]:
    """Summarize metrics over clients, to show how fair a model is to them.

    Each client has the same weight. Clients without examples are left out. The function
    stores 8 bytes for each number, so a generator may yield the metrics of many
    clients.

    Args:
        clients: Metrics of each client, as `build_client_eval` or `evaluate_personal`
            return them.
        share: Share of clients in `lowest` and in `highest`, above 0 and at most 1.
            Each has at least one client. With 0.1 they are the extreme tenths.
        percentiles: Percentiles to report, from 0 to 100, interpolated linearly.

    Returns:
        For each number, named as in `History.names`: `mean`; `deviation` and `variance`
        (of the population); `median`; each percentile, such as `p10`; and the means
        over the clients with the `lowest` and the `highest` values. `jain` is the index
        of fairness of Jain, Chiu and Hawe (1984): the squared sum, divided by the
        number of clients times the sum of squares. It is 1 if all clients have the same
        positive value, 1 / n if only one of n clients has a value above 0, and NaN if
        all have 0.

    Raises:
        ConfigError: `share` or a percentile is out of its range, or no client has
            examples.
    """
    check_number("share", share, lambda part: 0 < part <= 1, "above 0, at most 1")
    for each in percentiles:
        check_number("percentiles", each, lambda p: 0 <= p <= 100, "from 0 to 100")  # noqa: PLR2004
    columns: dict[str, array.array[float]] = {}
    num_clients = 0
    for num_clients, client in enumerate(clients, 1):  # noqa: B007 (used below)
        if "num_examples" not in client:
            raise errors.ConfigError(
                "Expected the metrics of each client, with `num_examples`, found"
                f" {errors.describe(client)}: pass what `build_client_eval` measured."
            )
        if client["num_examples"] > 0:
            for name, value in flatten_numbers(client):
                columns.setdefault(name, array.array("d")).append(value)
    if not columns:
        raise errors.ConfigError(
            f"Expected metrics of clients with examples, found {num_clients} clients"
            " and no example."
        )
    return {
        name: _summarize(np.array(column), share, percentiles)
        for name, column in columns.items()
    }


def _summarize(
    values: NDArray[np.float64], share: float, percentiles: Sequence[float]
) -> dict[str, float]:
    ordered = np.sort(values)
    num_ends = max(1, round(share * len(ordered)))
    squares = float(np.sum(ordered**2))
    at = np.percentile(ordered, list(percentiles)).tolist() if percentiles else []
    return {
        "mean": float(ordered.mean()),
        "deviation": float(ordered.std()),
        "variance": float(ordered.var()),
        "median": float(np.median(ordered)),
        **{f"p{p:g}": value for p, value in zip(percentiles, at, strict=True)},
        "lowest": float(ordered[:num_ends].mean()),
        "highest": float(ordered[-num_ends:].mean()),
        "jain": float(ordered.sum()) ** 2 / (len(ordered) * squares)
        if squares
        else float("nan"),
    }

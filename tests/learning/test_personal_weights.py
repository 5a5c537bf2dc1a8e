"""Weights of clients' own: their evaluation, FedBN, and metrics of each client."""

# pyright: reportUnknownLambdaType=false

import json
from collections.abc import Callable
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed import learning
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.learning import LearningProcess, LocalTraining, Model
from ray_fed.learning.history import from_json, to_json

BatchMaker = Callable[..., list[Any]]

SGD = keras.optimizers.SGD(0.05)
IDS = ["anna", "bert", "carl"]


def own_of_bias(weights: Any, own: Any) -> Any:
    return weights[0], own[0]


BUILDERS: dict[str, tuple[Callable[[Model], Any], Callable[[Any, Any], Any]]] = {
    "Ditto": (
        lambda m: learning.build_ditto(m, SGD, proximal=0.5),
        lambda _, own: own,
    ),
    "Ditto with error feedback": (
        lambda m: learning.build_ditto(
            m,
            SGD,
            proximal=0.5,
            aggregator=learning.aggregators.sparsified(0.5, error_feedback=True),
        ),
        lambda _, kept: kept[0],
    ),
    "FedPer": (
        lambda m: learning.build_fed_per(m, SGD, personal=["bias"]),
        own_of_bias,
    ),
    "a user's": (
        lambda m: learning.build_process(
            m,
            client=_add_one(m),
            server=keras.optimizers.SGD(1.0),
            client_state=0.0,
            personal=lambda weights, own: weights._replace(
                trainable=(weights.trainable[0], weights.trainable[1] + own)
            ),
        ),
        lambda weights, own: (weights[0], weights[1] + own),
    ),
}


def _add_one(model: Model) -> Callable[..., Any]:
    train = LocalTraining(model, SGD)

    def client(server: Any, batches: Any, own: Any) -> Any:
        trained = train(server.weights, batches)
        delta = model.delta(server.weights, trained.weights)
        return delta, trained.num_examples, trained.totals, own + 1.0

    return client


@pytest.mark.parametrize("name", BUILDERS)
def test_own_weights_have_the_metrics_of_numpy(
    name: str, linear_model: Model, make_batches: BatchMaker
) -> None:
    build, own_weights = BUILDERS[name]
    process = build(linear_model)
    clients = {who: make_batches([4, 2], n) for n, who in enumerate(IDS)}
    result = learning.run(process, clients, num_rounds=3, cohort_size=2)
    assert result.client_states is not None
    held_out = {who: make_batches([3, 5], 10 + n) for n, who in enumerate(IDS)}
    wide = {  # numbers are cast as those that are trained on
        who: [{k: v.astype(np.float64) for k, v in b.items()} for b in batches]
        for who, batches in held_out.items()
    }
    shown = {who: wide[who] for who in reversed(IDS)}

    found = learning.evaluate_personal(
        process, result.state, result.client_states, shown, cast=True
    )

    losses: list[float] = []
    for who, metrics in zip(shown, found, strict=True):
        (own,) = result.client_states.take([who])
        kernel, bias = own_weights(result.state.weights.trainable, own)
        x, y = (np.concatenate([b[k] for b in held_out[who]]) for k in "xy")
        losses.append(float(np.mean((x @ kernel + bias - y) ** 2)))
        np.testing.assert_allclose(metrics["loss"], losses[-1], rtol=1e-5)
        assert metrics["num_examples"] == 8
    spread = learning.spread(found)["loss"]
    np.testing.assert_allclose(spread["variance"], np.var(losses), rtol=1e-4)


def test_lists_are_evaluated_by_index(
    linear_model: Model, make_batches: BatchMaker
) -> None:
    process = learning.build_fed_per(linear_model, SGD, personal=["bias"])
    clients = [make_batches([3], seed) for seed in range(3)]
    result = learning.run(process, clients, num_rounds=2)
    states = result.client_states

    whole = learning.evaluate_personal(process, result.state, states, clients)
    first = learning.evaluate_personal(process, result.state, states, clients[:1])

    assert [metrics["loss"] for metrics in whole][:1] == [first[0]["loss"]]
    assert len({float(metrics["loss"]) for metrics in whole}) == 3


def test_what_has_no_personal_evaluation_is_refused(
    linear_model: Model, averaging: LearningProcess, make_batches: BatchMaker
) -> None:
    process = learning.build_fed_per(linear_model, SGD, personal=["bias"])
    clients = {"anna": make_batches([2], 0)}
    result = learning.run(process, clients, num_rounds=1)
    state, states = result.state, result.client_states
    scaffold = learning.build_scaffold(linear_model, 0.1, num_clients=1)
    evaluate = learning.evaluate_personal
    other = {"bert": clients["anna"]}
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: evaluate(averaging, state, states, clients), "have weights of their"),
        (lambda: evaluate(scaffold, state, states, clients), "have weights of their"),
        (lambda: evaluate(process, state, None, clients), "`client_states` of a resu"),
        (lambda: evaluate(process, state, states, other), "found `'bert'`|bert"),
    ]

    for call, match in calls:
        with pytest.raises(errors.ConfigError, match=match):
            call()

    with pytest.raises(errors.ValueMismatchError, match="`personal`, a function"):
        learning.build_process(
            linear_model,
            client=lambda server, batches: _weigh(linear_model, server, batches),
            server="sgd",
            personal=lambda weights, _: weights,
        )


def _weigh(model: Model, server: Any, batches: Any) -> Any:
    totals = model.evaluate(server.weights, batches)
    return model.delta(server.weights, server.weights), 1.0, totals


def build_normalized() -> tuple[Any, Model]:
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((3,)),
        keras.layers.Dense(4, activation="tanh"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(1),
    ]
    keras_model = keras.Sequential(layers)
    model = Model.from_keras(
        keras_model,
        loss=keras.losses.MeanSquaredError(),
        label_type=fl.TensorType(np.float32, [None, 1]),
    )
    return keras_model, model


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [{"personal_batch_norm": True}, {"personal": ["norm"]}], ids=str
)
def test_fed_bn_is_a_loop_over_keras_models(
    setting: dict[str, Any], make_batches: BatchMaker
) -> None:
    keras_model, model = build_normalized()
    clients = [make_batches([4, 4], 0), make_batches([6], 1), make_batches([3, 2], 2)]
    process = learning.build_fed_per(model, SGD, **setting)

    result = learning.run(process, clients, num_rounds=3)

    assert result.client_states is not None
    is_own = ["norm" in variable.path for variable in keras_model.variables]
    assert sum(is_own) == 4
    start = [variable.numpy() for variable in keras_model.variables]
    own: list[list[Any]] = [start] * 3
    shared = start
    for _ in range(3):
        ended: list[list[Any]] = []
        for index, batches in enumerate(clients):
            parts = zip(is_own, own[index], shared, strict=True)
            for variable, (keeps, mine, its) in zip(
                keras_model.variables, parts, strict=True
            ):
                variable.assign(mine if keeps else its)
            keras_model.compile(keras.optimizers.SGD(0.05), "mse")
            for batch in batches:
                keras_model.train_on_batch(batch["x"], batch["y"])
            own[index] = [variable.numpy() for variable in keras_model.variables]
            ended.append(own[index])
        sizes = [sum(len(batch["y"]) for batch in batches) for batches in clients]
        shared = [
            np.average(each, axis=0, weights=sizes) for each in zip(*ended, strict=True)
        ]
    weights = result.state.weights
    paths = [variable.path for variable in keras_model.variables]
    order = [v.path for v in (*model.trainable_variables, *model.statistics_variables)]
    by_path = dict(
        zip(
            [v.path for v in model.trainable_variables],
            weights.trainable,
            strict=True,
        )
    )
    for variable, value, first, keeps in zip(
        keras_model.variables, shared, start, is_own, strict=True
    ):
        if variable.path in by_path:
            wanted = first if keeps else value
            found = by_path[variable.path]
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    for moved, variable in zip(
        weights.non_trainable, model.statistics_variables, strict=True
    ):
        first = start[paths.index(variable.path)]
        np.testing.assert_array_equal(moved, first)
    for index, kept in enumerate(result.client_states.take(range(3))):
        mine = dict(zip(paths, own[index], strict=True))
        wanted = [mine[path] for path in order if "norm" in path]
        assert len(kept) == 4
        for value, expected in zip(kept, wanted, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


def test_fed_bn_needs_batch_normalization(linear_model: Model) -> None:
    calls: list[tuple[dict[str, Any], str]] = [
        ({"personal_batch_norm": True}, "layers of batch normalization for"),
        ({"personal_batch_norm": 1}, "True or False"),
        ({}, "as `personal`, of"),
    ]
    for setting, match in calls:
        with pytest.raises(errors.ConfigError, match=match):
            learning.build_fed_per(linear_model, SGD, **setting)


@pytest.mark.parametrize("keeps", [False, True], ids=["averaging", "Ditto"])
def test_client_metrics_are_those_of_a_round_of_each_client(
    keeps: bool, linear_model: Model, make_batches: BatchMaker, tmp_path: Any
) -> None:
    process: LearningProcess = (
        learning.build_ditto(linear_model, SGD, proximal=0.5)
        if keeps
        else learning.build_fed_avg(linear_model, SGD)
    )
    clients = [make_batches([seed + 1, 2], seed) for seed in range(4)]
    arguments: dict[str, Any] = {"num_rounds": 2, "cohort_size": 3}
    plain = learning.run(process, clients, **arguments)

    measured = process.with_client_metrics()
    result = learning.run(measured, clients, storage_path=tmp_path / "run", **arguments)

    assert plain.history[0].client_metrics is None
    assert measured.with_client_metrics() is measured
    for mine, other in zip(
        result.state.weights.trainable, plain.state.weights.trainable, strict=True
    ):
        np.testing.assert_array_equal(mine, other)
    first = result.history[0]
    assert first.client_metrics is not None
    assert first.training == plain.history[0].training
    state: Any = process.initialize()
    kept = [[process.initial_client_state]] if keeps else []
    for place, client in enumerate(first.clients):
        *_, alone = process.next(state, *kept, [clients[client]])
        for name in ("loss", "mae", "num_examples"):
            np.testing.assert_array_equal(
                first.client_metrics[name][place], alone[name]
            )
    loaded = learning.History.load(tmp_path / "run")
    assert loaded == result.history
    line = to_json(first)
    assert from_json([line]) == [first]
    assert json.loads(line)
    assert list(learning.History([first]).names()) == list(
        learning.History([plain.history[0]]).names()
    )


def test_client_metrics_of_other_processes_are_refused(
    thread_context: ExecutionContext,
) -> None:
    process = LearningProcess(lambda: 0, lambda state, _: (state, {}))

    with pytest.raises(errors.ConfigError, match="a process of `build_process`"):
        process.with_client_metrics()

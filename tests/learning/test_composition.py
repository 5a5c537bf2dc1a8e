"""Processes of functions of TensorFlow; aggregators of two functions."""

# pyright: reportUnknownLambdaType=false, reportImplicitOverride=false

from collections.abc import Callable
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import learning
from ray_fed.contexts.factory import ExecutionContext
from ray_fed.learning import Model, aggregators, build_fed_avg

RATE = 0.05
build_process: Any = learning.build_process


def as_functions(model: Model) -> dict[str, Any]:
    """Return federated averaging as functions."""
    train = learning.LocalTraining(model, keras.optimizers.SGD(RATE))

    def client(server: learning.ServerView, batches: Any) -> Any:
        trained = train(server.weights, batches)
        delta = model.delta(server.weights, trained.weights)
        return delta, trained.num_examples, trained.totals

    def server(weights: Any, state: Any, delta: Any) -> Any:
        return model.move(weights, delta), state

    return {"client": client, "server": server}


class Two(aggregators.Summed):
    """Its server returns no metrics."""

    def __init__(self, *more: Any, state: Any = ()) -> None:
        self._more, self._state = more, state

    @override
    def initial_state(self) -> Any:
        return self._state

    @override
    def client(self, update: Any, weight: Any, state: Any) -> Any:
        return update

    @override
    def server(self, sums: Any, state: Any) -> Any:
        after = state if isinstance(self._state, tuple) else (state, state)
        return sums, after, *self._more


class Own(aggregators.Aggregator):
    """Builds the mean, perhaps of updates that clients do not send."""

    def __init__(self, update_type: fl.Type | None = None) -> None:
        self._update_type = update_type

    def build(
        self, update_type: fl.Type, weight_type: fl.Type
    ) -> aggregators.Aggregation:
        own_type = self._update_type or update_type
        built = aggregators.mean().build(own_type, weight_type)
        return aggregators.Aggregation(built.initialize, built.next)


@pytest.mark.parametrize("server", ["sgd", "moves"])
def test_weights_in_place_of_a_delta_are_told(linear_model: Model, server: str) -> None:
    def client(server: learning.ServerView, batches: Any) -> Any:
        totals = linear_model.evaluate(server.weights, batches)
        return server.weights, 1.0, totals

    moves = as_functions(linear_model)["server"]
    with pytest.raises(errors.ValueMismatchError, match=r"return `model\.delta\("):
        build_process(
            linear_model, client=client, server="sgd" if server == "sgd" else moves
        )


def test_control_flow_of_users_functions_is_of_tensors(
    linear_model: Model, make_batches: Any, thread_context: ExecutionContext
) -> None:
    functions = as_functions(linear_model)
    inner: Callable[..., Any] = functions["client"]

    def client(server: learning.ServerView, batches: Any, own: Any) -> Any:
        delta, size, totals = inner(server, batches)
        weight = tf.cast(size, tf.float32)
        if own > 0:  # in the second round
            weight = weight * 0.0
        return delta, weight, totals, own + 1

    process = build_process(
        linear_model, **functions | {"client": client}, client_state=np.int32(0)
    )
    clients = [make_batches([4], 0)]
    state, kept = process.initialize(), [process.initial_client_state]

    first, kept, _ = process.next(state, kept, clients)
    second, kept, _ = process.next(first, kept, clients)

    assert kept == [2]
    assert not np.array_equal(first.weights.trainable[0], state.weights.trainable[0])
    np.testing.assert_array_equal(
        second.weights.trainable[0], first.weights.trainable[0]
    )
    assert thread_context.last_report is not None
    assert thread_context.last_report.no_kernel == ()


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        pytest.param(
            {"client_state": np.int32(0)}, r"as `client\(server, batches, own\)`",
            id="nothing is taken",
        ),
        pytest.param(
            {"client_state": np.int32(0), "client": lambda a, b, c: (a, b, c)},
            "update, weight, totals, and what it keeps, found 3 values",
            id="nothing is kept",
        ),
        pytest.param(
            {"client": lambda a, b: (a, b, {"loss": 1.0})},
            r"totals, found \{'loss': 1.0\} as totals: .*`trained.totals`",
            id="no totals",
        ),
        pytest.param(
            {"server": lambda weights, _, __: weights}, "weights and its state",
            id="no state",
        ),
        pytest.param(
            {"server": lambda weights, state, _: (weights.trainable, state)},
            "Expected `server` to return weights of type",
            id="no weights",
        ),
        pytest.param(
            {"client": lambda a, b, own: (a, b, own)}, "clients as `client_state`",
            id="nothing to begin with",
        ),
        pytest.param(
            {"server": lambda weights, state, _: (weights, (state, 1))},
            r"as `server_state` begins it, `<>`, found `<<>,int32>`",
            id="another state",
        ),
        pytest.param({"aggregator": "median"}, r"such as .*median\(max_c", id="name"),
        pytest.param({"aggregator": Two}, "pass an object, such", id="class"),
        pytest.param(
            {"aggregator": Own(fl.TensorType(np.float32))}, "aggregator to take `<<>@S",
            id="an aggregator of other updates",
        ),
        pytest.param({"aggregator": Two()}, "`Two.server` to return the", id="two"),
        pytest.param(
            {"aggregator": Two(3)}, "metrics by name, .* none, found", id="no metrics"
        ),
        pytest.param(
            {"aggregator": Two({}, state=np.int32(0))},
            "`initial_state` begins it, `int32`, found `<int32,int32>`",
            id="another state of an aggregator",
        ),
        pytest.param({"client": 3}, "function of TensorFlow as `client`", id="number"),
    ],
)  # fmt: skip
def test_functions_that_return_something_else_are_refused(
    linear_model: Model, changed: dict[str, Any], match: str
) -> None:
    with pytest.raises(errors.ValueMismatchError, match=match):
        build_process(linear_model, **as_functions(linear_model) | changed)


class Majority(aggregators.Summed):
    """Signs of sums of signs, and in how many rounds."""

    def initial_state(self) -> Any:
        return {"rounds": np.int32(0)}

    def client(self, update: Any, weight: Any, state: Any) -> Any:
        signs = tf.nest.map_structure(tf.sign, update)
        if weight <= 0 and state["rounds"] >= 0:  # autograph makes ops of it
            signs = tf.nest.map_structure(tf.zeros_like, update)
        return signs

    def server(self, sums: Any, state: Any) -> Any:
        rounds = state["rounds"] + 1
        signs = tf.nest.map_structure(lambda t: tf.sign(t) / 8, sums)
        return signs, {"rounds": rounds}, {"rounds": rounds}


def test_aggregator_of_two_functions_composes_with_others(
    linear_model: Model, make_batches: Any, thread_context: ExecutionContext
) -> None:
    aggregator = aggregators.quantized(16, aggregators.clipped(1.0, Majority()))
    process = build_fed_avg(linear_model, "sgd", "sgd", aggregator=aggregator)
    plain = build_fed_avg(
        linear_model, "sgd", keras.optimizers.SGD(1.0), aggregator=Majority()
    )
    clients = [make_batches([4], seed) for seed in range(3)]
    state = start = plain.initialize()

    for expected in (1, 2):
        state, metrics = plain.next(state, clients)
        assert metrics["rounds"] == expected
    _, composed = process.next(process.initialize(), clients)

    moved = np.abs(state.weights.trainable[0] - start.weights.trainable[0]) * 8
    np.testing.assert_allclose(moved, np.round(moved), atol=1e-5)
    assert state.aggregator["rounds"] == 2
    assert list(composed)[3:] == [
        "bytes_sent", "bytes_uncompressed", "clip_norm", "share_clipped", "mean_norm",
        "rounds",
    ]  # fmt: skip
    assert thread_context.last_report is not None
    assert thread_context.last_report.no_kernel == ()


@pytest.mark.slow
def test_own_aggregator_composes_with_others(
    linear_model: Model, make_batches: Any
) -> None:
    def compose(inner: Any) -> Any:
        return aggregators.clipped(1e9, aggregators.sparsified(1.0, inner))

    clients = [make_batches([4], 0), make_batches([2], 1)]
    own, plain = (
        build_fed_avg(linear_model, "sgd", aggregator=compose(inner))
        for inner in (Own(), aggregators.mean())
    )

    found, expected = (
        process.next(process.initialize(), clients)[0].weights
        for process in (own, plain)
    )

    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


def test_learning_rate_of_clients_follows_the_round(
    linear_model: Model, make_batches: Any
) -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.1, 0.0])
    process = build_fed_avg(
        linear_model, keras.optimizers.SGD(0.5), client_learning_rate=schedule
    )
    clients = [make_batches([4], 0)]
    start = process.initialize()

    first, _ = process.next(start, clients)
    second, _ = process.next(first, clients)

    assert not np.array_equal(first.weights.trainable[0], start.weights.trainable[0])
    np.testing.assert_array_equal(
        second.weights.trainable[0], first.weights.trainable[0]
    )


def test_an_update_in_the_place_of_the_weight_is_told(linear_model: Model) -> None:
    functions = as_functions(linear_model)

    def swapped(server: Any, batches: Any) -> Any:
        update, weight, totals = functions["client"](server, batches)
        return weight, update, totals

    with pytest.raises(errors.ValueMismatchError, match="with a number as the weight"):
        build_process(linear_model, **functions | {"client": swapped})


def test_a_client_that_keeps_another_type_is_told(linear_model: Model) -> None:
    functions = as_functions(linear_model)

    def client(server: Any, batches: Any, own: Any) -> Any:
        return *functions["client"](server, batches), (own, own)

    with pytest.raises(errors.ValueMismatchError, match="what it keeps last, as"):
        build_process(linear_model, **functions | {"client": client}, client_state=0)


def test_what_clients_keep_has_the_types_of_tensorflow(linear_model: Model) -> None:
    functions = as_functions(linear_model)

    def client(server: Any, batches: Any, own: Any) -> Any:
        count, rate, exact = own
        kept = count + 1, rate * tf.constant(0.5), exact
        return *functions["client"](server, batches), kept

    array = np.ones(2)
    process = build_process(
        linear_model, **functions | {"client": client}, client_state=(0, 1.0, array)
    )
    array[:] = 7

    kept: Any = process.initial_client_state
    assert [np.asarray(value).dtype for value in kept] == ["i4", "f4", "f8"]
    assert kept[2].tolist() == [1, 1]


def test_server_reports_metrics_and_a_process_has_a_name(
    linear_model: Model, make_batches: Any
) -> None:
    functions = as_functions(linear_model)

    def server(weights: Any, state: Any, delta: Any) -> Any:
        length = tf.linalg.global_norm(delta.trainable)
        return linear_model.move(weights, delta), state, {"length": length}

    process = build_process(
        linear_model,
        **functions | {"server": server},
        name="mine",
        settings={"rate": RATE, "decay": None},
    )
    start = process.initialize()
    state, metrics = process.next(start, [make_batches([4], 0)])

    moved = [
        b - a
        for a, b in zip(start.weights.trainable, state.weights.trainable, strict=True)
    ]
    assert metrics["length"] == pytest.approx(float(tf.linalg.global_norm(moved)))
    assert repr(process).startswith(f"<learning process: algorithm mine, rate {RATE},")


def test_local_training_starts_from_an_optimizer_state(
    linear_model: Model, make_batches: Any
) -> None:
    train = learning.LocalTraining(
        linear_model, keras.optimizers.SGD(1.0, momentum=0.5)
    )
    fixed = train.initial_optimizer_state()
    handed_on: list[Any] = []

    def moved_by(**more: Any) -> Any:
        def client(server: Any, batches: Any) -> Any:
            trained = train(server.weights, batches, **more)
            delta = linear_model.delta(server.weights, trained.weights)
            return (delta, trained.optimizer_state), 1.0, trained.totals

        def server(weights: Any, state: Any, update: Any) -> Any:
            delta, means = update
            pairs = zip(means, state, strict=True)
            after = tuple(tf.cast(mean, old.dtype) for mean, old in pairs)
            return linear_model.move(weights, delta), after

        process = build_process(
            linear_model, client=client, server=server, server_state=state_of(more)
        )
        start = process.initialize()
        state, _ = process.next(start, [make_batches([4, 4], 0)])
        handed_on.append(state.server)
        return np.asarray(state.weights.trainable[0]) - start.weights.trainable[0]

    def state_of(more: Any) -> Any:
        variables = map(np.asarray, more.get("optimizer_state", ()))
        return tuple(np.asarray(v, v.dtype.newbyteorder("=")) for v in variables)

    def ones(gradients: Any, _: Any) -> Any:
        return [tf.ones_like(gradient) for gradient in gradients]

    assert np.allclose(moved_by(correct=ones), -2.5)  # 1, then 1 and half of it
    same = {"correct": ones, "optimizer_state": fixed}
    assert np.allclose(moved_by(**same), -2.5)
    assert np.allclose(handed_on[-1][2], -1.5)  # the momentum of the kernel
    momentum = tuple(v - 1 if v.shape else v for v in map(np.asarray, fixed))
    assert np.allclose(moved_by(correct=ones, optimizer_state=momentum), -3.25)
    assert np.allclose(moved_by(**same, updates_state=False), -2)
    with pytest.raises(errors.ConfigError, match="Expected an `optimizer_state` for"):
        moved_by(updates_state=False)


class Named(aggregators.Summed):
    """Reports a metric of some name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def client(self, update: Any, weight: Any, state: Any) -> Any:
        del weight, state
        return update

    def server(self, sums: Any, state: Any) -> Any:
        return sums, state, {self._name: tf.constant(1.0)}


def doubled_metric(name: str) -> Any:
    return keras.metrics.MeanSquaredError(name=name)


@pytest.mark.parametrize(
    ("metric", "aggregator"),
    [
        ("clip_norm", aggregators.clipped(1.0)),
        ("share_zeroed", aggregators.zeroed(1.0)),
        ("bytes_sent", aggregators.quantized(8)),
        ("own", Named("own")),
        ("mse", Named("loss")),
        ("clip_norm_1", aggregators.clipped(1.0, aggregators.clipped(2.0))),
        ("epsilon", aggregators.dp_mean(1.0, 1.0, 2, 4, 1e-5)),
    ],
)
def test_metrics_of_one_name_are_refused(metric: str, aggregator: Any) -> None:
    keras_model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model = Model.from_keras(keras_model, loss="mse", metrics=[doubled_metric(metric)])

    with pytest.raises(errors.ValueMismatchError, match="metrics of different names"):
        build_fed_avg(model, "sgd", aggregator=aggregator)


def test_nested_aggregators_with_metrics_of_one_name_report_both() -> None:
    keras_model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model = Model.from_keras(keras_model, loss="mse")
    nested = aggregators.clipped(1.0, aggregators.clipped(2.0))

    process = build_fed_avg(model, "sgd", aggregator=nested)

    metrics = process.next.type_signature.result[1].member
    assert {"clip_norm", "clip_norm_1", "mean_norm", "mean_norm_1"} <= set(dir(metrics))

"""Processes of functions and of typed parts; aggregators of two functions."""

# pyright: reportUnknownLambdaType=false, reportImplicitOverride=false

from collections import OrderedDict
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
from ray_fed import tensorflow as rtf
from ray_fed.contexts.factory import ExecutionContext
from ray_fed.learning import LearningProcess, Model, aggregators, build_fed_avg

RATE = 0.05
build_process: Any = learning.build_process


def view_type_of(model: Model) -> fl.Type:
    """Return the type of what clients can be sent of a server without a state."""
    members: Any = (model.weights_type, fl.to_type(()), np.int32)
    return fl.to_type(learning.ServerView(*members))


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


@rtf.computation
def nothing() -> tuple[()]:
    return ()


@fl.federated_computation
def initialize() -> Any:
    return fl.federated_eval(nothing, fl.SERVER)


def advance(state: Any, number: Any) -> Any:
    return state, number


OF_A_NUMBER = learning.Part(
    initialize,
    fl.federated_computation(
        advance, fl.FederatedType((), fl.SERVER), fl.FederatedType(np.int32, fl.SERVER)
    ),
)


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


@pytest.mark.parametrize("name", ["send", "client", "aggregator", "server"])
def test_parts_whose_types_do_not_go_together_are_refused(
    linear_model: Model, name: str
) -> None:
    parts = as_functions(linear_model) | {name: OF_A_NUMBER}

    with pytest.raises(errors.ValueMismatchError, match=f"Expected `{name}.next` to"):
        build_process(linear_model, **parts)


def test_typed_part_does_what_a_function_does(
    averaging: LearningProcess, linear_model: Model, make_batches: Any
) -> None:
    functions = as_functions(linear_model)
    view_type = view_type_of(linear_model)
    select = rtf.computation(learning.send_weights, view_type)

    @fl.federated_computation(
        fl.FederatedType((), fl.SERVER), fl.FederatedType(view_type, fl.SERVER)
    )
    def send(state: Any, view: Any) -> Any:
        return state, fl.federated_broadcast(fl.federated_map(select, view))

    typed = build_process(
        linear_model, **functions, send=learning.Part(initialize, send)
    )
    clients = [make_batches([4, 2], 0), make_batches([3], 1)]

    found, expected = (
        process.next(process.initialize(), clients)[0].weights
        for process in (typed, averaging)
    )

    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


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
            {"client": lambda a, b, own: (a, b, own)}, "begin with as `client_state`",
            id="nothing to begin with",
        ),
        pytest.param(
            {"server": lambda weights, state, _: (weights, (state, 1))},
            r"as `server_state` begins it, `<>`, found `<<>,int32>`",
            id="another state",
        ),
        pytest.param({"aggregator": "median"}, r"such as .*median\(max_c", id="name"),
        pytest.param({"aggregator": Two}, "pass an object, such", id="class"),
        pytest.param({"aggregator": Two()}, "`Two.server` to return the", id="two"),
        pytest.param(
            {"aggregator": Two(3)}, "metrics by name, .* none, found", id="no metrics"
        ),
        pytest.param(
            {"aggregator": Two({}, state=np.int32(0))},
            "`initial_state` begins it, `int32`, found `<int32,int32>`",
            id="another state of an aggregator",
        ),
        pytest.param({"client": 3}, "function of TensorFlow or a Part", id="a number"),
    ],
)  # fmt: skip
def test_functions_that_return_something_else_are_refused(
    linear_model: Model, changed: dict[str, Any], match: str
) -> None:
    with pytest.raises(errors.ValueMismatchError, match=match):
        build_process(linear_model, **as_functions(linear_model) | changed)


def test_part_that_keeps_something_says_its_beginning(linear_model: Model) -> None:
    view_type = view_type_of(linear_model)
    client: Any = as_functions(linear_model)["client"]

    @rtf.computation(view_type, np.int32, linear_model.data_type.member)
    def work(server: Any, own: Any, batches: Any) -> Any:
        update, size, totals = client(server, batches)
        measured = OrderedDict(totals=totals, counts=())
        weight = tf.cast(size, tf.float32)
        return OrderedDict(update=update, weight=weight, measured=measured), own + 1

    @fl.federated_computation(
        fl.FederatedType((), fl.SERVER),
        fl.FederatedType(view_type, fl.CLIENTS, all_equal=True),
        fl.FederatedType(np.int32, fl.CLIENTS),
        linear_model.data_type,
    )
    def next_work(state: Any, sent: Any, kept: Any, data: Any) -> Any:
        worked = fl.federated_map(work, (sent, kept, data))
        return state, worked[0], worked[1]

    functions = as_functions(linear_model)
    zero = np.zeros([], np.int32)
    whole = learning.Part(initialize, next_work, initial_client_state=zero)

    part = learning.Part(initialize, next_work)
    with pytest.raises(errors.ValueMismatchError, match="what they begin with"):
        build_process(linear_model, **functions | {"client": part})
    process = build_process(linear_model, **functions | {"client": whole})
    assert process.initial_client_state is zero


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


class Own(aggregators.Aggregator):
    """Builds what the mean is, as a part without more."""

    def build(self, update_type: fl.Type, weight_type: fl.Type) -> learning.Part:
        part = aggregators.mean().build(update_type, weight_type)
        return learning.Part(part.initialize, part.next)


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
    assert state.parts.aggregate["rounds"] == 2
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


def test_what_clients_keep_has_the_types_of_tensorflow(linear_model: Model) -> None:
    functions = as_functions(linear_model)

    def client(server: Any, batches: Any, own: Any) -> Any:
        count, rate, exact = own
        kept = count + 1, rate * tf.constant(0.5), exact
        return *functions["client"](server, batches), kept

    process = build_process(
        linear_model,
        **functions | {"client": client},
        client_state=(0, 1.0, np.float64(1.0)),
    )

    kept: Any = process.initial_client_state
    assert [np.asarray(value).dtype for value in kept] == ["i4", "f4", "f8"]

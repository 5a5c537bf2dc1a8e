"""A learning process put together from four parts, checked by their types.

    state --distribute--> what clients are sent         (server to clients)
            client_work: that, and their data --> ClientResult
            aggregate: updates and weights --> one update       (clients to server)
            finalize: weights and update --> new weights        (server)

Each part has a state of its own at the server. Algorithms differ in their parts; the
order above, the metrics, and what broken updates and empty rounds do are written here.

What parts of a learning process hand on: named tuples of tensors.

The check of what a client sends, as part of a round: see `Guards`.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import federated_language as fl
import numpy as np
import tensorflow as tf
from typing_extensions import override

import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf
from ray_fed.learning.aggregators.aggregator import Aggregator
from ray_fed.learning.checks import expect_kind
from ray_fed.learning.guards import (
    Guards,
    is_finite,
    require,
    require_finite,
    skip_empty,
)
from ray_fed.learning.models import Model, ModelWeights, expect_model
from ray_fed.learning.part_types import (
    PartTypes,
    at_clients,
    count_bytes,
    read_types,
)
from ray_fed.learning.processes import LearningProcess, Part
from ray_fed.learning.totals import Totals
from ray_fed.observability import reprs


class PartStates(NamedTuple):
    """States of the parts that hold neither weights nor optimiser.

    Attributes:
        distribute: of what clients are sent.
        client_work: of the clients' work, as the server keeps it.
        aggregate: of the aggregation, such as a bound that adapts.
    """

    distribute: Any
    client_work: Any
    aggregate: Any


class ServerState(NamedTuple):
    """What the server keeps between rounds: numpy arrays where `next` returns it.

    Attributes:
        weights: of the model.
        optimizer: state of `finalize`; of federated averaging the variables of the
            server's optimiser, in its own order.
        round_index: i32[], rounds done so far.
        parts: states of the other parts; empty structs where they have none.
    """

    weights: ModelWeights
    optimizer: Any
    round_index: Any
    parts: Any = PartStates((), (), ())

    @override
    def __repr__(self) -> str:
        after = f"<server state after {self.round_index} rounds"
        return f"{after}: {self.weights!r}, {len(self.optimizer)} of the optimizer>"


class ServerView(NamedTuple):
    """What `distribute` sees of the state.

    Attributes:
        weights: of the model.
        optimizer: state of `finalize`.
        round_index: i32[], rounds done so far.
    """

    weights: ModelWeights
    optimizer: Any
    round_index: Any


class Measured(NamedTuple):
    """What is summed over clients for the metrics.

    Attributes:
        totals: of loss and metrics.
        counts: i32[] each, by name; may be empty.
    """

    totals: Totals
    counts: Any


class ClientResult(NamedTuple):
    """What a client sends back.

    Attributes:
        update: any struct of tensors, unscaled.
        weight: f32[], >= 0; 0 leaves the client out.
        measured: summed over clients.
    """

    update: Any
    weight: Any
    measured: Measured


# pyright: reportUnknownLambdaType=false


def build_guard(guards: Guards, types: PartTypes) -> Any:
    """Return the check of a client's result: <result, <kept, new>> -> <result, kept>.

    Where clients keep nothing, it takes and returns the result alone.
    """

    def check(result: ClientResult, new: Any) -> tf.Tensor:
        return is_finite(tf.nest.flatten((result.update, result.weight, new)))

    def guard(result: ClientResult, old: Any, new: Any) -> tuple[ClientResult, Any]:
        finite = check(result, new)
        if guards.non_finite == "error":
            flat = require(
                finite,
                "Expected a finite update of the client, found one with infinities or"
                " NaN: look at its data, or lower the learning rate",
                *tf.nest.flatten(result),
            )
            return tf.nest.pack_sequence_as(result, flat), new
        return _leave_out(result, finite), tf.nest.map_structure(
            lambda n, o: tf.where(finite, n, o), new, old
        )

    if types.kept is None:

        @rtf.computation(types.result)
        def guard_result(result: ClientResult) -> ClientResult:
            return guard(result, (), ())[0]

        return guard_result

    @rtf.computation(types.result, types.kept, types.kept)
    def guard_with_kept(result: ClientResult, old: Any, new: Any) -> Any:
        return guard(result, old, new)

    return guard_with_kept


def _leave_out(result: ClientResult, finite: tf.Tensor) -> ClientResult:
    zeroed: Any = tf.nest.map_structure(
        lambda t: tf.where(finite, t, tf.zeros_like(t)), result
    )
    counts = OrderedDict(zeroed.measured.counts or {})
    counts["left_out"] = tf.cast(tf.logical_not(finite), tf.int32)
    return zeroed._replace(measured=zeroed.measured._replace(counts=counts))


def apply_guard(guard: Any, result: Any, kept: Any) -> tuple[Any, Any]:
    """Return what clients sent and keep, checked, inside of a federated computation.

    Args:
        guard: what `build_guard` returned.
        result: of the clients.
        kept: what they kept before and keep now; None where they keep nothing.
    """
    if kept is None:
        return fl.federated_map(guard, result), None
    both = fl.federated_map(guard, (result, *kept))
    return both[0], both[1]


# pyright: reportUnknownLambdaType=false


@tracebacks.shorten
def build_process(
    model: Model,
    *,
    distribute: Part,
    client_work: Part,
    aggregate: Part | Aggregator,
    finalize: Part,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build a learning process from parts.

    The computation `next` of a part takes and returns its own state first, and

        distribute   takes ServerView@SERVER, returns B@CLIENTS, the same for all
        client_work  takes B@CLIENTS and model.data_type, returns ClientResult@CLIENTS;
                     between these it may take what clients kept, K@CLIENTS, which it
                     then returns last
        aggregate    takes update@CLIENTS and weight@CLIENTS, returns U@SERVER and
                     measurements@SERVER, a struct by name, which may be empty
        finalize     takes weights@SERVER and U@SERVER, returns weights@SERVER

    The process holds

        initialize   ( -> ServerState@SERVER), with the Keras model's weights of now
        next         (<ServerState@SERVER, model.data_type> ->
                      <ServerState@SERVER, metrics@SERVER>); with what clients kept
                     (<ServerState@SERVER, K@CLIENTS, model.data_type> ->
                      <ServerState@SERVER, K@CLIENTS, metrics@SERVER>)

    Metrics are those of `model`, what `client_work` counts, and the measurements of
    `aggregate`.

    Args:
        model: to train.
        distribute: what clients are sent.
        client_work: what they do.
        aggregate: how their updates become one; an aggregator is built for the type of
            the updates.
        finalize: how that changes the weights.
        guards: by default `Guards()`.

    Raises:
        ValueMismatchError: the types of parts do not go together.
    """
    expect_model(model)
    guards = Guards() if guards is None else guards
    _expect_kinds(
        guards,
        aggregate,
        {"distribute": distribute, "client_work": client_work, "finalize": finalize},
    )
    types = read_types(model, view_type(model, finalize), distribute, client_work)
    if isinstance(aggregate, Aggregator):
        aggregate = aggregate.build(types.update, types.weight)
    types.check_aggregation(aggregate)
    types.check_finalization(aggregate, finalize)
    initialize = _build_initialize(
        model, PartStates(distribute, client_work, aggregate), finalize
    )
    state_type: Any = initialize.type_signature.result
    guard = build_guard(guards, types)
    checked: Any = guard.type_signature.result
    result_type = checked if types.kept is None else checked[0]
    server = _ServerWork(
        model, guards, aggregate, result_type.measured, state_type.member
    )

    def run(state: Any, kept: Any, data: Any) -> tuple[Any, Any, Any]:
        parts = state.parts
        view = fl.federated_map(server.view, state)
        sent = distribute.next(parts.distribute, view)
        given = (sent[1], data) if kept is None else (sent[1], kept, data)
        worked = client_work.next(parts.client_work, *given)
        after = None if kept is None else (kept, worked[2])
        result, still_kept = apply_guard(guard, worked[1], after)
        merged = aggregate.next(parts.aggregate, result.update, result.weight)
        ended = finalize.next(state.optimizer, state.weights, merged[1])
        measured = fl.federated_sum(result.measured)
        states = fl.federated_zip((sent[0], worked[0], merged[0]))
        new_state = fl.federated_map(
            server.finish, (state, states, ended[0], ended[1], measured)
        )
        return (
            new_state,
            still_kept,
            fl.federated_map(server.report, (measured, merged[2])),
        )

    next_round = _with_or_without_kept(run, state_type, types, model)
    return LearningProcess(
        initialize,
        next_round,
        privacy=getattr(aggregate, "privacy", None),
        initial_client_state=getattr(client_work, "initial_client_state", None),
        num_clients=getattr(aggregate, "num_clients", None),
        facts={
            "model": model.describe(),
            "state": reprs.show_bytes(count_bytes(state_type.member)),
        },
    )


def _with_or_without_kept(
    run: Any, state_type: Any, types: PartTypes, model: Model
) -> Any:
    if types.kept is None:

        @fl.federated_computation(state_type, model.data_type)
        def run_round(state: Any, data: Any) -> Any:
            new_state, _, metrics = run(state, None, data)
            return new_state, metrics

        return run_round

    @fl.federated_computation(state_type, at_clients(types.kept), model.data_type)
    def run_round_with_kept(state: Any, kept: Any, data: Any) -> Any:
        return run(state, kept, data)

    return run_round_with_kept


def view_type(model: Model, finalize: Part) -> fl.Type:
    """Return the type of what `distribute` sees, with a part as `finalize`."""
    optimizer: Any = finalize.initialize.type_signature.result
    members: Any = (model.weights_type, optimizer.member, fl.TensorType(np.int32))
    return fl.to_type(ServerView(*members))


def _expect_kinds(guards: object, aggregate: object, parts: dict[str, Part]) -> None:
    expect_kind("guards", guards, Guards)
    expect_kind("aggregate", aggregate, Part, Aggregator)
    for name, part in parts.items():
        expect_kind(name, part, Part)


def _build_initialize(model: Model, parts: PartStates, finalize: Part) -> Any:
    initial = model.initial_weights()

    @rtf.computation
    def initial_weights() -> ModelWeights:
        return ModelWeights(
            tuple(tf.constant(value) for value in initial.trainable),
            tuple(tf.constant(value) for value in initial.non_trainable),
        )

    weights_type: Any = initial_weights.type_signature.result
    members = [
        part.initialize.type_signature.result.member for part in (finalize, *parts)
    ]

    @rtf.computation(weights_type, *members)
    def join(
        weights: Any, optimizer: Any, distribute: Any, client_work: Any, aggregate: Any
    ) -> ServerState:
        states = PartStates(distribute, client_work, aggregate)
        return ServerState(weights, optimizer, tf.constant(0), states)

    @fl.federated_computation
    def initialize() -> Any:
        weights = fl.federated_eval(initial_weights, fl.SERVER)
        states = [part.initialize() for part in (finalize, *parts)]
        return fl.federated_map(join, (weights, *states))

    return initialize


class _ServerWork:
    """What the server does around the parts, as computations.

    Attributes:
        view: state -> ServerView.
        finish: <state, parts' states, optimizer, weights, measured> -> state.
        report: <measured, measurements> -> metrics.
    """

    def __init__(
        self,
        model: Model,
        guards: Guards,
        aggregate: Part,
        measured_type: Any,
        state_type: Any,
    ) -> None:
        states = fl.StructType([t for _, t in state_type.parts.items()])
        measurements = aggregate.next.type_signature.result[2].member

        @rtf.computation(state_type)
        def view(state: ServerState) -> ServerView:
            return ServerView(state.weights, state.optimizer, state.round_index)

        @rtf.computation(
            state_type, states, state_type.optimizer, state_type.weights, measured_type
        )
        def finish(
            state: ServerState, parts: Any, optimizer: Any, weights: Any, measured: Any
        ) -> ServerState:
            new = (weights, optimizer)
            if not getattr(aggregate, "counts_empty_rounds", False):
                old = (state.weights, state.optimizer)
                new = skip_empty(guards, measured.totals.num_examples > 0, new, old)
            new_index = state.round_index + np.int32(1)
            kept = require_finite(new[0])
            return ServerState(kept, new[1], new_index, PartStates(*parts))

        @rtf.computation(measured_type, measurements)
        def report(measured: Measured, found: Any) -> Any:
            metrics: OrderedDict[str, Any] = model.totals.finish(measured.totals)
            for more in (measured.counts, found):
                metrics.update(more or {})
            return metrics

        self.view, self.finish, self.report = view, finish, report

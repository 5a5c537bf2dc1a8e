"""Builds learning processes from four functions, which are the steps of a round.

    send         server state --> values for the clients
    client       these values and a client's batches --> update, weight, totals
    aggregator   updates and weights --> one update
    server       weights, state and update --> new weights and new state

Algorithms differ in these functions. This module calls them in order, computes metrics,
and handles broken updates and empty rounds. Types follow from tracing the functions.
"""

# pyright: reportUnknownLambdaType=false

import dataclasses
import functools
import inspect
import typing
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import federated_language as fl
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf
from ray_fed.language.trees import count_bytes, leaf_types
from ray_fed.language.type_checks import is_whole
from ray_fed.learning.aggregators.aggregator import (
    Aggregation,
    Aggregator,
    Kept,
    inner_or_mean,
    type_of_arrays,
)
from ray_fed.learning.checks import expect_kind, expect_one_of, join_metrics
from ray_fed.learning.models import Delta, Model, ModelWeights, expect_model
from ray_fed.learning.objectives import Totals
from ray_fed.learning.optimizers import OptimizerLike, OptimizerSpec, server_step
from ray_fed.learning.processes import (
    ClientBytes,
    LearningProcess,
    Paces,
    build_constants,
    build_initialize,
    check_chosen,
)
from ray_fed.learning.tensors import is_finite, require
from ray_fed.observability import reprs
from ray_fed.tensorflow.graphs.identity import find_used_parameters
from ray_fed.tensorflow.lowering.variables import shown_by_sums
from ray_fed.tensorflow.tracing import convert


@dataclasses.dataclass(frozen=True)
class Guards:
    """How a process handles updates that are not finite, and rounds without examples.

    New weights that are not finite always end a round with an error.

    Attributes:
        non_finite: What happens if a client's update has infinities or NaN. With
            "error", the client's work fails. This ends the round with an error that
            names the client, or drops the client within
            `Config(max_dropped_clients=...)`. With "leave_out", the update has no
            weight, and the metric `left_out` counts it.
        empty_round: What happens in a round without examples. With "skip", weights and
            server state stay as they are. With "error", the round ends with an error. A
            round with noise is never treated as empty, because that would reveal that
            nobody took part.

    Raises:
        ConfigError: A field has another value.
    """

    non_finite: Literal["error", "leave_out"] = "error"
    empty_round: Literal["skip", "error"] = "skip"

    def __post_init__(self) -> None:
        for name, kind in typing.get_type_hints(Guards).items():
            expect_one_of(name, getattr(self, name), typing.get_args(kind))


def require_finite(weights: ModelWeights) -> ModelWeights:
    """Return `weights`, and fail in the graph if a trainable one is not finite."""
    trainable = require(
        is_finite(weights.trainable),
        "Expected finite weights after the step of the server, found infinities or"
        " NaN: lower its learning rate, or clip updates with aggregators.clipped",
        *weights.trainable,
    )
    return weights._replace(trainable=tuple(trainable))


def skip_empty(guards: Guards, counts: tf.Tensor, new: Any, old: Any) -> Any:
    """Return `new`, or `old` if the round had no examples (`counts` is false)."""
    if guards.empty_round == "error":
        flat = require(
            counts,
            "Expected a round with examples, found none at any client: choose other"
            ' clients, or pass Guards(empty_round="skip")',
            *tf.nest.flatten(new),
        )
        return tf.nest.pack_sequence_as(new, flat)
    return tf.nest.map_structure(lambda n, o: tf.where(counts, n, o), new, old)


class ServerState(NamedTuple):
    """The state of the server between rounds. `next` returns it with NumPy arrays.

    Attributes:
        weights: Weights of the model.
        server: State of the server's function. In federated averaging, these are the
            variables of the server's optimizer, in the optimizer's own order.
        round_index: Number of rounds so far, i32[].
        aggregator: State of the aggregator, such as an adaptive bound on updates.
    """

    weights: ModelWeights
    server: Any
    round_index: Any
    aggregator: Any = ()

    @override
    def __repr__(self) -> str:
        count = len(tf.nest.flatten(self.server))
        after = f"<server state after {self.round_index} rounds"
        return f"{after}: {self.weights!r}, {count} values of the server>"


class ServerView(NamedTuple):
    """The values of the server that `send` turns into the values for clients.

    Attributes:
        weights: Weights of the model.
        state: State of the server's function.
        round_index: Number of rounds so far, i32[].
    """

    weights: ModelWeights
    state: Any
    round_index: Any


class Broadcast(NamedTuple):
    """The values that `send_weights` sends to each client of a round.

    Attributes:
        weights: Weights to start from.
        round_index: Number of rounds so far, i32[]. A learning rate may depend on it.
    """

    weights: ModelWeights
    round_index: Any


@tracebacks.shorten
def send_weights(server: ServerView) -> Broadcast:
    """Return the weights and the round, for clients that need no other server state."""
    return Broadcast(server.weights, server.round_index)


class Measured(NamedTuple):
    """The values that are summed over clients for the metrics.

    Attributes:
        totals: Totals of loss and metrics.
        counts: Counts by name, i32[] each, such as `left_out`, or ().
    """

    totals: Totals
    counts: Any


class ClientResult(NamedTuple):
    """The result of a client's work in a round.

    Attributes:
        update: Any structure of tensors, not multiplied by the weight.
        weight: Weight of the client, f32[], >= 0. 0 leaves the client out.
        measured: Values that are summed over clients for the metrics.
    """

    update: Any
    weight: Any
    measured: Measured


@tracebacks.shorten
def build_process(
    model: Model,
    *,
    client: Callable[..., Any],
    server: Callable[..., Any] | OptimizerLike | OptimizerSpec,
    server_state: Any = (),
    client_state: Any = None,
    personal: Callable[[ModelWeights, Any], ModelWeights] | None = None,
    send: Callable[[ServerView], Any] | None = None,
    aggregator: Aggregator | None = None,
    num_clients: int | None = None,
    guards: Guards | None = None,
    name: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> LearningProcess:
    """Build a learning process from functions of TensorFlow.

        client(server, batches)       -> update, weight, totals
        client(server, batches, own)  -> update, weight, totals, own
        client(server, batches, *, epochs) -> update, weight, totals
        server(weights, state, update) -> weights, state
        server(weights, state, update) -> weights, state, metrics

    In the function of a client, `server` is the result of `send`, and `batches` is a
    `tf.data.Dataset` of the model's `batch_type`. The update is any structure of
    tensors, such as `model.delta`. The weight is a number, and 0 leaves the client out.
    Totals come from `LocalTraining`, from `model.evaluate`, or from `model.forward`
    over the batches. With `client_state`, clients keep values between rounds. The
    function receives a client's values as `own` and returns the new values last. With a
    parameter `epochs`, i32[] or None, clients can make fewer passes than the process
    has, see `Synchronous`.

    The process has two computations:

        initialize   ( -> ServerState@SERVER), with the Keras model's current weights
        next         (<ServerState@SERVER, model.data_type> ->
                      <ServerState@SERVER, metrics@SERVER>)

    With `client_state`, `next` also takes and returns the clients' values, K:

        next         (<ServerState@SERVER, K@CLIENTS, model.data_type> ->
                      <ServerState@SERVER, K@CLIENTS, metrics@SERVER>)

    Clients may also keep values for the aggregator, such as the residuals of error
    feedback. K is then a pair, whose second member is for the aggregator. If only the
    aggregator needs values, K is these values.

    Metrics come from the model, the aggregator and `server`.

    Args:
        model: Model to train.
        client: Function that does the work of a client.
        server: Function that applies the aggregate to the weights. An optimizer of
            Keras, or its name, is also accepted. It takes a `model.delta` as the
            negative gradient.
        server_state: State of the server's function before the first round: a structure
            of arrays, or a function that returns a structure of tensors.
        client_state: Values of a client before its first round: a structure of arrays
            and numbers. Python's numbers become f32 and i32. None: clients keep
            nothing.
        personal: Function from the server's weights and a client's kept values to the
            client's own weights, for `evaluate_personal`. None: clients have no weights
            of their own.
        send: Function from `ServerView` to the values that clients receive, such as
            `send_weights`. None: clients receive the whole view.
        aggregator: Aggregation of updates, by default their weighted mean.
        num_clients: Number of all clients that ever take part, if the algorithm depends
            on it. `run` then refuses other data.
        guards: Handling of broken updates and empty rounds, by default `Guards()`.
        name: Name of the algorithm, which the process shows.
        settings: Settings of the algorithm by name, which the process shows, except
            settings that are None. `epochs`, an int and by default 1, is the number of
            passes that a clock of `devices` counts.

    Raises:
        ValueMismatchError: A function takes or returns other values, or `personal` is
            passed without a `client_state`.
        ConfigError: `num_clients` is not the number of the aggregator.
    """
    expect_model(model)
    guards = Guards() if guards is None else guards
    expect_kind("guards", guards, Guards)
    aggregator = inner_or_mean(aggregator)
    if isinstance(server, str | keras.optimizers.Optimizer | OptimizerSpec):
        server, server_state = server_step(model, OptimizerSpec.of(server))
    send = (lambda view: view) if send is None else send
    for role, function in {"client": client, "server": server, "send": send}.items():
        if not callable(function):
            raise errors.ValueMismatchError(
                f"Expected a function of TensorFlow as `{role}`, found"
                f" {errors.describe(function)}."
            )
    initial = build_initialize(server_state)
    members: Any = (
        model.weights_type,
        initial.type_signature.result.member,
        fl.TensorType(np.int32),
    )
    view_type = fl.to_type(ServerView(*members))
    run_send = convert(send)
    prepare: Any = rtf.computation(lambda view: run_send(view), view_type)  # noqa: PLW0108
    sent_type = prepare.type_signature.result
    kept, kept_type = None, None
    if client_state is not None:
        # These are copies, because the caller may change its arrays later.
        kept = tf.nest.map_structure(_as_array, client_state)
        kept_type = type_of_arrays(kept)
    work = _build_client(model, client, sent_type, kept_type)
    result_type: Any = work.type_signature.result
    if kept_type is not None:
        result_type = result_type[0]
    # Types follow from tracing, in the order of a round: client, aggregator, server.
    aggregation = aggregator.build(result_type.update, result_type.weight)
    _check_aggregation(aggregation, result_type)
    merged_type = aggregation.next.type_signature.result[1].member
    update_type = _contained(merged_type, result_type.update)
    update = _build_server(model, server, initial, update_type)
    if num_clients is None:
        num_clients = aggregation.num_clients
    elif aggregation.num_clients not in (None, num_clients):
        raise errors.ConfigError(
            f"Expected one number of clients, found `num_clients={num_clients}` and an"
            f" aggregator of {aggregation.num_clients}: pass the aggregator's number,"
            " which its guarantee assumes."
        )
    initialize = _build_initialize(model, initial, aggregation)
    state_type = initialize.type_signature.result
    sent_bytes = _count_used_bytes(work, sent_type)
    update_bytes = aggregator.count_bytes(result_type.update)
    other_bytes = count_bytes(fl.StructType([result_type.weight, result_type.measured]))
    client_bytes = None
    if sent_bytes is not None and update_bytes is not None and other_bytes is not None:
        client_bytes = ClientBytes(sent_bytes, update_bytes + other_bytes)
    both = Kept(kept, aggregation.client_state)
    # Values that clients keep are never summed, so sums cannot show if they are broken.
    in_sums = aggregator.sums_show_broken and both.state is None
    guard = _build_guard(guards, result_type, kept_type, in_sums=in_sums)
    steps = _Steps(prepare, work, guard, aggregation, update)
    build_next = functools.partial(_build_next, model, guards, steps, state_type, both)
    epochs = (settings or {}).get("epochs", 1)
    process = LearningProcess(
        initialize,
        build_next(),
        privacy=aggregation.privacy,
        initial_client_state=both.state,
        num_clients=num_clients,
        facts={
            **({} if name is None else {"algorithm": name}),
            **{k: str(v) for k, v in (settings or {}).items() if v is not None},
            "model": model.describe(),
            "state": reprs.show_bytes(count_bytes(state_type.member) or 0),
        },
        model=model,
        client_bytes=client_bytes,
        personal_weights=_build_personal(model, personal, both),
        trace_client_metrics=functools.partial(build_next, by_client=True),
        epochs=int(epochs) if is_whole(epochs) else 1,
    )

    @functools.cache  # it takes seconds; contexts recognize its result
    def pace(paces: Paces) -> LearningProcess:
        _check_pace(process, client, result_type, paces)
        paced = _Paced(model, send, client, state_type.member, paces)
        told = steps._replace(send=paced.send, client=paced.client)
        nothing = Kept(None, None)
        following = _build_next(model, guards, told, state_type, nothing, paced=paced)
        return dataclasses.replace(process, next=following)

    return dataclasses.replace(process, pace=pace)


# The steps of a round.


class _Steps(NamedTuple):
    send: Any
    client: Any
    guard: Any
    aggregation: Aggregation
    server: Any


def _at_clients(member: fl.Type) -> fl.FederatedType:
    return fl.FederatedType(member, fl.CLIENTS)


def _build_client(
    model: Model, client: Callable[..., Any], sent_type: Any, kept_type: Any
) -> Any:
    run, keeps = convert(client), kept_type is not None
    types = {0: sent_type, 2: kept_type, 1: model.data_type.member}
    if not keeps:
        del types[2]
    work: Any = _trace(
        client,
        f"client(server, batches{', own' * keeps})",
        types,
        lambda *given: _read_result(run(*given), keeps=keeps),
    )
    returned = work.type_signature.result
    if keeps and not kept_type.is_assignable_from(returned[1]):
        raise errors.ValueMismatchError(
            "Expected the function of a client to return what it keeps last, as"
            f" `client_state` begins it, `{kept_type}`, found `{returned[1]}`."
        )
    return work


def _build_personal(
    model: Model, personal: Callable[..., Any] | None, kept: Kept
) -> Any:
    if personal is None:
        return None
    if kept.first is None or not callable(personal):
        raise errors.ValueMismatchError(
            "Expected `personal`, a function of the server's weights and of what a"
            f" client keeps, with a `client_state`, found {errors.describe(personal)}"
            f"{' without one' * (kept.first is None)}."
        )
    function: Any = convert(personal)

    def of_pair(weights: Any, values: Any) -> Any:
        return function(weights, values[0])

    types = {0: model.weights_type, 1: type_of_arrays(kept.state)}
    chosen = function if kept.second is None else of_pair
    made: Any = _trace(personal, "personal(weights, own)", types, chosen)
    if not model.weights_type.is_assignable_from(made.type_signature.result):
        raise errors.ValueMismatchError(
            f"Expected `personal` to return weights of type `{model.weights_type}`, as"
            f" it takes, found `{made.type_signature.result}`."
        )
    return made


def _count_used_bytes(work: Any, sent: fl.Type) -> int | None:
    """Return the bytes of the sent tensors that a client's work depends on."""
    leaves = leaf_types(sent)
    used = find_used_parameters(work)[: len(leaves)]
    return count_bytes(
        fl.StructType(
            [leaf for leaf, is_used in zip(leaves, used, strict=True) if is_used]
        )
    )


def _as_array(value: Any) -> NDArray[Any]:
    """Return a read-only copy. Python's numbers get TensorFlow's default dtypes."""
    dtypes: dict[type, Any] = {float: np.float32, int: np.int32}
    array = np.array(value, dtypes.get(type(value)))
    array.flags.writeable = False
    return array


def _read_result(returned: Any, *, keeps: bool) -> Any:
    """Return a ClientResult, or if `keeps` a pair with the values to keep."""
    found: Any = returned if isinstance(returned, tuple | list) else ()
    if len(found) != 3 + keeps or not isinstance(found[2], Totals):
        wanted = "update, weight, totals" + ", and what it keeps" * keeps
        count = f"{len(found)} values, " * bool(found)
        shown = f"{count}{errors.describe(returned)}"
        if len(found) == 3 + keeps:
            shown = f"{errors.describe(found[2])} as totals"
        then = "" if keeps else "; a client that keeps something has a `client_state`"
        raise errors.ValueMismatchError(
            f"Expected the function of a client to return {wanted}, found {shown}:"
            " totals come from LocalTraining (`trained.totals`), `model.evaluate` or"
            f" `model.forward`{then}."
        )
    update, weight, totals, *kept = found
    if tf.nest.is_nested(weight) or getattr(weight, "ndim", 0):
        raise errors.ValueMismatchError(
            "Expected the function of a client to return update, weight, totals, with a"
            f" number as the weight, found {errors.describe(weight)} there: it is the"
            " second, after the update."
        )
    result = ClientResult(update, tf.cast(weight, tf.float32), Measured(totals, ()))
    return (result, kept[0]) if keeps else result


def _build_server(
    model: Model, server: Callable[..., Any], initialize: Any, update_type: fl.Type
) -> Any:
    run, state_type = convert(server), initialize.type_signature.result.member
    types = {1: state_type, 0: model.weights_type, 2: update_type}

    def step(*given: Any) -> tuple[Any, ...]:
        returned: Any = run(*given)
        is_tuple = isinstance(returned, tuple | list)
        has_state = is_tuple and not isinstance(returned, ModelWeights)
        has_state = has_state and len(returned) in (2, 3) and returned[1] is not None
        if not has_state or not isinstance([*returned, {}][2], Mapping):
            raise errors.ValueMismatchError(
                "Expected the function of the server to return weights and its state,"
                " `()` where it has none, and metrics by name if it reports any, found"
                f" {errors.describe(returned)}."
            )
        weights, state, *metrics = returned
        return state, weights, *map(OrderedDict, metrics)

    update = _trace(server, "server(weights, state, update)", types, step)
    results = [t for _, t in update.type_signature.result.items()]
    state_after, weights_after = results[:2]
    if not state_type.is_assignable_from(state_after):
        raise errors.ValueMismatchError(
            "Expected the function of the server to return its state second, as"
            f" `server_state` begins it, `{state_type}`, found `{state_after}`: make"
            " the types of both equal."
        )

    if not model.weights_type.is_assignable_from(weights_after):
        raise errors.ValueMismatchError(
            f"Expected `server` to return weights of type `{model.weights_type}`, as it"
            f" takes, found `{weights_after}`."
        )
    return update


def _trace(
    function: Callable[..., Any],
    wanted: str,
    types: Mapping[int, fl.Type],
    run: Callable[..., Any],
) -> Any:
    """Trace `run` as a computation with the parameter names of a user's `function`.

    `wanted` is the expected call, for the error. `types` maps positions in `function`
    to types, in the order of the computation's parameters. `run` receives the arguments
    in the order of `function`.
    """
    signature = inspect.signature(function)
    try:
        names = list(signature.bind(*types).arguments)
    except TypeError:
        names = []
    if len(names) != len(types):
        keeps = len(types) == 2 and len(signature.parameters) == 3  # noqa: PLR2004
        then = ": pass the first values of clients as `client_state`" if keeps else ""
        raise errors.ValueMismatchError(
            f"Expected a function that is called as `{wanted}`, found one of"
            f" `{signature}`{then}."
        )
    places = list(types)

    def call(given: Any) -> Any:
        by_place = dict(zip(places, given.values(), strict=True))
        return run(*(by_place[place] for place in sorted(places)))

    call.__name__ = getattr(function, "__name__", call.__name__)  # for errors
    named = [(names[place], each) for place, each in types.items()]
    return rtf.computation(call, fl.StructWithPythonType(named, OrderedDict))


def _check_aggregation(aggregation: Aggregation, result_type: Any) -> None:
    state = aggregation.initialize.type_signature.result
    signature = aggregation.next.type_signature
    updates, weights = map(_at_clients, (result_type.update, result_type.weight))
    kept = aggregation.client_state
    kept_types = [] if kept is None else [_at_clients(type_of_arrays(kept))]
    given = fl.StructType([state, updates, weights, *kept_types])
    if signature.parameter is None or not signature.parameter.is_assignable_from(given):
        raise errors.ValueMismatchError(
            f"Expected `next` of the aggregator to take `{given}`, found"
            f" `{signature.parameter}`."
        )
    results = [t for _, t in getattr(signature.result, "items", list)()]
    at_server = [t for t in results[:3] if getattr(t, "placement", None) is fl.SERVER]
    is_whole = len(at_server) == 3 and len(results) == 3 + len(kept_types)  # noqa: PLR2004
    pairs = zip(kept_types, results[3:], strict=False)
    is_whole = is_whole and all(old.is_assignable_from(new) for old, new in pairs)
    if not is_whole or not state.is_assignable_from(results[0]):
        raise errors.ValueMismatchError(
            f"Expected `next` of the aggregator to return its state, `{state}`, an"
            " aggregate and metrics, all at the server, and what clients keep if there"
            f" is a `client_state`, found `{signature.result}`."
        )


def _contained(found: Any, like: Any) -> Any:
    """Return the type `found` with the Python containers of `like`.

    Types of nested aggregators have lost their containers. If the names differ, `found`
    keeps its own containers.
    """
    if not isinstance(found, fl.StructType):
        return found
    pairs = list(found.items())
    others = list(like.items()) if isinstance(like, fl.StructType) else []
    is_alike = [name for name, _ in pairs] == [name for name, _ in others]
    if len(others) != len(pairs):
        others = pairs
    members = [
        (name, _contained(member, other))
        for (name, member), (_, other) in zip(pairs, others, strict=True)
    ]
    is_named = any(name is not None for name, _ in pairs)
    container = getattr(like if is_alike else found, "python_container", None)
    return fl.StructWithPythonType(members, container or (dict if is_named else tuple))


# The process.


def _build_initialize(model: Model, server: Any, aggregation: Aggregation) -> Any:
    initial_weights = build_constants(model.initial_weights())
    weights_type: Any = initial_weights.type_signature.result
    starts = [server, aggregation.initialize]
    members = [each.type_signature.result.member for each in starts]

    @rtf.computation(weights_type, *members)
    def join(weights: Any, server: Any, aggregator: Any) -> ServerState:
        return ServerState(weights, server, tf.constant(0), aggregator)

    @fl.federated_computation
    def initialize() -> Any:
        weights = fl.federated_eval(initial_weights, fl.SERVER)
        states = [each() for each in starts]
        return fl.federated_map(join, (weights, *states))

    return initialize


def _check_pace(
    process: LearningProcess, client: Callable[..., Any], result_type: Any, paces: Paces
) -> None:
    """Raise ConfigError unless a process can give clients the orders of `paces`."""
    name = process.facts.get("algorithm", "the process")
    if process.initial_client_state is not None:
        raise errors.ConfigError(
            "Expected a process whose clients keep nothing between rounds, found"
            f" {name}: what a client keeps belongs to one version of the server's"
            " state, and late or partial work would mix it with another one, such as"
            " the control variates of SCAFFOLD. Use another algorithm, such as"
            " `build_fed_avg`, or another `schedule`."
        )
    check_chosen(process)
    update = result_type.update
    is_delta = getattr(update, "python_container", None) is Delta
    if paces.num_starts and not is_delta:
        raise errors.ConfigError(
            "Expected clients that send a change of weights alone, a `Delta`, whose"
            f" size staleness can scale, found {name}, whose clients send"
            f" `{reprs.shorten(str(update))}`: use `build_fed_avg` or `build_fed_prox`."
        )
    takes_epochs = "epochs" in inspect.signature(client).parameters
    if paces.limits_epochs and not takes_epochs:
        raise errors.ConfigError(
            f"Expected clients that can do fewer epochs, found {name}, whose function"
            " of a client has no parameter `epochs`: use `build_fed_avg` or"
            ' `build_fed_prox`, or late="leave_out".'
        )


class _Paced:
    """The first steps of a round whose clients get orders, see `processes.Paces`.

    Attributes:
        send: Computation from the newest and the earlier states to the values for
            clients.
        client: Computation from these, a client's order and its batches to its result.
        told_type: Type of a client's order.
        starts_type: Type of the earlier states, at the server.
    """

    def __init__(
        self,
        model: Model,
        send: Callable[..., Any],
        client: Callable[..., Any],
        state_type: Any,
        paces: Paces,
    ) -> None:
        run_send, run = convert(send), convert(client)

        def view(state: ServerState) -> Any:
            return run_send(ServerView(state.weights, state.server, state.round_index))

        def prepare(states: Any) -> Any:
            if not paces.num_starts:
                return {"sent": view(states[0])}
            sent = tf.nest.map_structure(
                lambda *each: tf.stack(each), *map(view, states[1:])
            )
            now = {"now": states[0].weights} if paces.moves_to else {}
            return {"sent": sent, **now}

        def work(sent: Any, batches: Any, told: Any) -> Any:
            start, limits = sent["sent"], dict[str, Any]()
            if paces.num_starts:
                # The starts are stacked, and each client takes the one it began from.
                start = tf.nest.map_structure(
                    lambda each: tf.gather(each, told["start"]), start
                )
            if paces.limits_epochs:
                limits["epochs"] = told["epochs"]
            update, *others = run(start, batches, **limits)
            if paces.moves_to:
                if not hasattr(start, "weights"):
                    raise errors.ConfigError(
                        'Expected a `send` that sends `weights` for averages="weights",'
                        f" found one that sends {errors.describe(start)}."
                    )
                # The change begins at an old start. This adds the way there from the
                # newest weights.
                way = model.delta(sent["now"], start.weights)
                update = tf.nest.map_structure(lambda d, w: d + w, update, way)
            if paces.num_starts:
                update = tf.nest.map_structure(
                    lambda d: d * tf.cast(told["scale"], d.dtype), update
                )
            return update, *others

        members: list[tuple[str, Any]] = []
        if paces.num_starts:
            members += [("start", np.int32), ("scale", np.float32)]
        if paces.limits_epochs:
            members.append(("epochs", np.int32))
        self.told_type = fl.StructWithPythonType(members, OrderedDict)
        at_server = fl.FederatedType(state_type, fl.SERVER)
        self.starts_type = fl.StructType([at_server] * paces.num_starts)
        states_type = [state_type] * (1 + paces.num_starts)
        self.send: Any = rtf.computation(
            prepare, fl.StructWithPythonType(states_type, tuple)
        )
        types = {
            0: self.send.type_signature.result,
            2: self.told_type,
            1: model.data_type.member,
        }
        self.client: Any = _trace(
            work,
            "client(server, batches)",
            types,
            lambda *given: _read_result(work(*given), keeps=False),
        )


def _build_next(
    model: Model,
    guards: Guards,
    steps: _Steps,
    state_type: Any,
    kept: Kept,
    *,
    by_client: bool = False,
    paced: _Paced | None = None,
) -> Any:
    send, client, guard, aggregate, server = steps
    checked: Any = guard.type_signature.result
    measured_type = (checked if kept.first is None else checked[0]).measured
    metrics_type = aggregate.next.type_signature.result[2].member
    reported_types = [t for _, t in server.type_signature.result.items()][2:]
    state_member = state_type.member

    @rtf.computation(state_member)
    def view(state: ServerState) -> ServerView:
        return ServerView(state.weights, state.server, state.round_index)

    @rtf.computation(
        state_member,
        state_member.server,
        state_member.weights,
        state_member.aggregator,
        measured_type,
    )
    def finish(
        state: ServerState, server: Any, weights: Any, aggregator: Any, measured: Any
    ) -> ServerState:
        new = (weights, server)
        # An empty round changes nothing, unless noise hides that it was empty.
        if not aggregate.counts_empty_rounds:
            old = (state.weights, state.server)
            new = skip_empty(guards, measured.totals.num_examples > 0, new, old)
        new_index = state.round_index + np.int32(1)
        kept = require_finite(new[0])
        return ServerState(kept, new[1], new_index, aggregator)

    found_type = _contained(fl.StructType([metrics_type, *reported_types]), None)

    @rtf.computation(measured_type, found_type)
    def report(measured: Measured, found: Any) -> Any:
        parts = (
            ("the model", model.totals.finish(measured.totals)),
            ("the clients", measured.counts),
            *zip(("the aggregator", "the server"), found, strict=False),
        )
        if aggregate.privacy is not None:  # `run` adds it; see `add_epsilon`.
            join_metrics(*parts, ("the run", {"epsilon": None}))
        return join_metrics(*parts)

    def report_own(measured: Measured) -> Any:
        metrics = model.totals.finish(measured.totals)
        return join_metrics(("the model", metrics), ("the clients", measured.counts))

    report_each = rtf.computation(report_own, measured_type) if by_client else None

    def run(
        state: Any, values: Any, data: Any, starts: Any = None, told: Any = None
    ) -> tuple[Any, ...]:
        if paced is None:
            prepared = fl.federated_map(send, fl.federated_map(view, state))
        else:
            states = (state, *(starts if len(paced.starts_type) else ()))
            prepared = fl.federated_map(send, fl.federated_zip(states))
        sent = fl.federated_broadcast(prepared)
        own, for_aggregator = kept.split(values)
        if own:
            worked = fl.federated_map(client, (sent, *own, data))
            guarded = fl.federated_map(guard, (worked[0], *own, worked[1]))
            result = guarded[0]
        else:
            given = (sent, data) if paced is None else (sent, told, data)
            worked = fl.federated_map(client, given)
            guarded = result = fl.federated_map(guard, worked)
        merged = aggregate.next(
            state.aggregator, result.update, result.weight, *for_aggregator
        )
        ended = fl.federated_map(server, (state.server, state.weights, merged[1]))
        measured = fl.federated_sum(result.measured)
        new_state = fl.federated_map(
            finish, (state, ended[0], ended[1], merged[0], measured)
        )
        reported = [ended[2]] if reported_types else []
        found = fl.federated_zip((merged[2], *reported))
        at_clients: list[Any] = []
        if kept.state is not None:
            at_clients.append(kept.join(lambda: guarded[1], lambda: merged[3]))
        metrics = fl.federated_map(report, (measured, found))
        if report_each is not None:
            at_clients.append(fl.federated_map(report_each, result.measured))
        return new_state, *at_clients, metrics

    # A federated computation has no optional arguments, so each form has a signature.
    if paced is not None and len(paced.starts_type):

        @fl.federated_computation(
            state_type,
            paced.starts_type,
            _at_clients(paced.told_type),
            model.data_type,
        )
        def run_step(state: Any, starts: Any, told: Any, data: Any) -> Any:
            return run(state, None, data, starts, told)

        return run_step

    if paced is not None:

        @fl.federated_computation(
            state_type, _at_clients(paced.told_type), model.data_type
        )
        def run_told(state: Any, told: Any, data: Any) -> Any:
            return run(state, None, data, told=told)

        return run_told

    if kept.state is None:

        @fl.federated_computation(state_type, model.data_type)
        def run_round(state: Any, data: Any) -> Any:
            return run(state, None, data)

        return run_round

    kept_type = _at_clients(type_of_arrays(kept.state))

    @fl.federated_computation(state_type, kept_type, model.data_type)
    def run_round_with_kept(state: Any, kept: Any, data: Any) -> Any:
        return run(state, kept, data)

    return run_round_with_kept


def _build_guard(
    guards: Guards, result_type: Any, kept_type: Any, *, in_sums: bool
) -> Any:
    """Return the check of a client's result: <result, old, new> -> <result, kept>.

    `old` and `new` are the values that the client keeps. If clients keep nothing, the
    check takes and returns the result alone. `in_sums` says whether a broken result of
    a client always shows in the sums over clients.
    """

    def guard(result: ClientResult, old: Any, new: Any) -> tuple[ClientResult, Any]:
        checked = tf.nest.flatten((result.update, result.weight, new))
        finite = is_finite(checked)
        if in_sums:
            finite = shown_by_sums(finite)
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

    if kept_type is None:
        return rtf.computation(lambda result: guard(result, (), ())[0], result_type)
    return rtf.computation(guard, result_type, kept_type, kept_type)


def _leave_out(result: ClientResult, finite: tf.Tensor) -> ClientResult:
    zeroed: Any = tf.nest.map_structure(
        lambda t: tf.where(finite, t, tf.zeros_like(t)), result
    )
    left_out = tf.cast(tf.logical_not(finite), tf.int32)
    counts = join_metrics(
        ("the clients", zeroed.measured.counts), ("Guards", {"left_out": left_out})
    )
    return zeroed._replace(measured=zeroed.measured._replace(counts=counts))

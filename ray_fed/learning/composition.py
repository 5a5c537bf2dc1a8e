"""A learning process put together from functions of TensorFlow, or from typed parts.

    state --send--> what clients get of it              (server to clients)
            client: that, and their batches --> update, weight, totals
            aggregator: updates and weights --> one update      (clients to server)
            server: weights, state and update --> both anew     (server)

Types come from tracing. Algorithms differ in these four; the order above, the metrics,
and what broken updates and empty rounds do are written here.
"""

# pyright: reportUnknownLambdaType=false

import dataclasses
import inspect
import math
import typing
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
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
from ray_fed.learning.aggregators.aggregator import (
    Aggregator,
    expect_aggregator,
    inner_or_mean,
)
from ray_fed.learning.checks import expect_kind
from ray_fed.learning.models import Model, ModelWeights, expect_model
from ray_fed.learning.objectives import Totals
from ray_fed.learning.optimizers import OptimizerLike, OptimizerSpec, server_step
from ray_fed.learning.processes import (
    LearningProcess,
    Part,
    build_constants,
    build_initialize,
)
from ray_fed.learning.tensors import is_finite, require
from ray_fed.observability import reprs
from ray_fed.tensorflow.tracing import convert


@dataclasses.dataclass(frozen=True)
class Guards:
    """What a round does with updates that are not finite, and without any example.

    Attributes:
        non_finite: of a client's update that is infinite or not a number. "error": its
            work fails, which ends the round with an error that names the client; or,
            with `Config(max_dropped_clients=...)`, leaves the client out, named in the
            report. "leave_out": it counts nothing, and is counted in the metric
            `left_out`. New weights that are not finite always end the round.
        empty_round: of a round without any example, or any client. "skip": weights and
            optimizer stay as they are. "error": it ends with an error. A round with
            noise is a round like others: that nobody was there stays hidden.

    Raises:
        ConfigError: a field is none of these.
    """

    non_finite: Literal["error", "leave_out"] = "error"
    empty_round: Literal["skip", "error"] = "skip"

    def __post_init__(self) -> None:
        for name, kind in typing.get_type_hints(Guards).items():
            value, legal = getattr(self, name), typing.get_args(kind)
            if not isinstance(value, str) or value not in legal:
                raise errors.ConfigError(
                    f"Expected `{name}` to be one of {list(legal)}, found `{value}`."
                )


def require_finite(weights: ModelWeights) -> ModelWeights:
    """Return weights, or fail: finite updates may have sums that are not."""
    trainable = require(
        is_finite(weights.trainable),
        "Expected finite weights after the step of the server, found infinities or"
        " NaN: lower its learning rate, or clip updates with aggregators.clipped",
        *weights.trainable,
    )
    return weights._replace(trainable=tuple(trainable))


def skip_empty(guards: Guards, counts: tf.Tensor, new: Any, old: Any) -> Any:
    """Return what a round made, or what was there before where it had no example."""
    if guards.empty_round == "error":
        flat = require(
            counts,
            "Expected a round with examples, found none at any client: choose other"
            ' clients, or pass Guards(empty_round="skip")',
            *tf.nest.flatten(new),
        )
        return tf.nest.pack_sequence_as(new, flat)
    return tf.nest.map_structure(lambda n, o: tf.where(counts, n, o), new, old)


class PartStates(NamedTuple):
    """States of the parts that hold neither weights nor optimizer.

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
        optimizer: state of the server's function; of federated averaging the variables
            of the server's optimizer, in its own order.
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
    """What clients can be sent of the server: all of it, unless `send` says less.

    Attributes:
        weights: of the model.
        optimizer: the state that the server keeps beside them; also called `state`.
        round_index: i32[], rounds done so far.
    """

    weights: ModelWeights
    optimizer: Any
    round_index: Any

    @property
    def state(self) -> Any:
        """What the server keeps beside the weights, as `server_state` began it."""
        return self.optimizer


class Broadcast(NamedTuple):
    """What `send_weights` sends to every client of a round.

    Attributes:
        weights: to start from.
        round_index: i32[], for a learning rate that follows a schedule.
    """

    weights: ModelWeights
    round_index: Any


@tracebacks.shorten
def send_weights(server: ServerView) -> Broadcast:
    """Return what clients get that need no state of the server: a `send`."""
    return Broadcast(server.weights, server.round_index)


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


@tracebacks.shorten
def build_process(
    model: Model,
    *,
    client: Callable[..., Any] | Part,
    server: Callable[..., Any] | OptimizerLike | OptimizerSpec | Part,
    server_state: Any = (),
    client_state: Any = None,
    send: Callable[[ServerView], Any] | Part | None = None,
    aggregator: Aggregator | Part | None = None,
    num_clients: int | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build a learning process from functions of TensorFlow.

        client(server, batches)       -> update, weight, totals
        client(server, batches, own)  -> update, weight, totals, own
        server(weights, state, update) -> weights, state

    `server` of a client is what `send` returns, `batches` a `tf.data.Dataset` of the
    model's `batch_type`. An update is any structure of tensors, such as `model.delta`;
    a weight is a number, 0 leaves the client out; totals are those of `LocalTraining`,
    `model.evaluate`, or of `model.forward` over the batches. With `client_state`,
    clients keep something between rounds: the function takes and returns it last.

    Each of the four may be a `Part` instead, a pair of typed computations, for what
    functions cannot say. `next` of a part takes and returns its own state first, and

        send        takes ServerView@SERVER, returns B@CLIENTS, the same for all
        client      takes B@CLIENTS and model.data_type, returns ClientResult@CLIENTS,
                    <update, weight, measured=<totals, counts>>; between these it may
                    take what clients kept, K@CLIENTS, which it then returns last
        aggregator  takes update@CLIENTS and weight@CLIENTS, returns U@SERVER and
                    measurements@SERVER, a struct by name, which may be empty
        server      takes weights@SERVER and U@SERVER, returns weights@SERVER

    The process holds

        initialize   ( -> ServerState@SERVER), with the Keras model's weights of now
        next         (<ServerState@SERVER, model.data_type> ->
                      <ServerState@SERVER, metrics@SERVER>); with what clients kept
                     (<ServerState@SERVER, K@CLIENTS, model.data_type> ->
                      <ServerState@SERVER, K@CLIENTS, metrics@SERVER>)

    Metrics are those of `model`, what a typed `client` counts, and the measurements of
    the aggregator.

    Args:
        model: to train.
        client: what clients do.
        server: how the aggregate changes the weights. An optimizer of Keras, an object
            or a name, takes a `model.delta` as minus the gradient.
        server_state: what the server keeps beside the weights before any round: a
            structure of arrays, or a function that makes one of tensors.
        client_state: what a client keeps before its first round: arrays, and numbers,
            of which those of Python are f32 and i32; None: nothing.
        send: what clients get of the server, by default all; such as `send_weights`.
        aggregator: how updates become one, by default their weighted mean.
        num_clients: that ever take part, where the algorithm depends on it: `run`
            refuses other data.
        guards: what broken updates and empty rounds do, by default `Guards()`.

    Raises:
        ValueMismatchError: a function returns something else, types of parts do not go
            together, or clients keep something that nothing says the beginning of.
    """
    expect_model(model)
    guards = Guards() if guards is None else guards
    expect_kind("guards", guards, Guards)
    if aggregator is not None:
        expect_aggregator(aggregator, Part)
    if isinstance(server, str | keras.optimizers.Optimizer | OptimizerSpec):
        server, server_state = server_step(model, OptimizerSpec.of(server))
    send = (lambda view: view) if send is None else send
    for name, given in {"client": client, "server": server, "send": send}.items():
        if not (isinstance(given, Part) or callable(given)):
            raise errors.ValueMismatchError(
                f"Expected a function of TensorFlow or a Part as `{name}`, found"
                f" {errors.describe(given)}."
            )
    initial = None if isinstance(server, Part) else build_initialize(server_state)
    server_type = _state_of("server", server if initial is None else initial)
    members: Any = (model.weights_type, server_type, fl.TensorType(np.int32))
    view_type = fl.to_type(ServerView(*members))
    if not isinstance(send, Part):
        send = _send_part(send, view_type)
    _, sent_type = _check("send", send, [at_server(view_type)], 1)
    _expect_placed("send", sent_type, fl.CLIENTS)
    if not isinstance(client, Part):
        client = _client_part(model, client, sent_type, client_state)
    result_type, kept_type = _client_types(model, client, sent_type)
    if not isinstance(aggregator, Part):
        aggregator = inner_or_mean(aggregator)
        aggregator = aggregator.build(result_type.update, result_type.weight)
    given_types = [at_clients(result_type.update), at_clients(result_type.weight)]
    _, merged_type, metrics_type = _check("aggregator", aggregator, given_types, 2)
    _expect_placed("aggregator", merged_type, fl.SERVER)
    _expect_placed("aggregator", metrics_type, fl.SERVER)
    if not isinstance(server, Part):
        update_type = _contained(merged_type.member, result_type.update)
        server = _server_part(model, server, initial, update_type)
    weights_type = at_server(model.weights_type)
    _, moved_type = _check("server", server, [weights_type, merged_type], 1)
    if not weights_type.is_assignable_from(moved_type):
        raise errors.ValueMismatchError(
            f"Expected `server` to return weights of type `{weights_type}`, as it"
            f" takes, found `{moved_type}`."
        )
    if num_clients is None:
        num_clients = aggregator.num_clients
    elif aggregator.num_clients not in (None, num_clients):
        raise errors.ConfigError(
            f"Expected one number of clients, found `num_clients={num_clients}` and an"
            f" aggregator of {aggregator.num_clients}: its guarantee is of these alone."
        )
    parts = PartStates(send, client, aggregator)
    initialize = _build_initialize(model, parts, server)
    state_type = initialize.type_signature.result
    return LearningProcess(
        initialize,
        _build_next(model, guards, parts, server, state_type, result_type, kept_type),
        privacy=aggregator.privacy,
        initial_client_state=client.initial_client_state,
        num_clients=num_clients,
        facts={
            "model": model.describe(),
            "state": reprs.show_bytes(_count_bytes(state_type.member)),
        },
        model=model,
    )


# Parts of functions.


def _send_part(send: Callable[[Any], Any], view_type: fl.Type) -> Part:
    run, initialize = convert(send), build_initialize(())
    prepare = rtf.computation(lambda view: run(view), view_type)  # noqa: PLW0108

    @fl.federated_computation(
        initialize.type_signature.result, fl.FederatedType(view_type, fl.SERVER)
    )
    def distribute(state: Any, view: Any) -> Any:
        return state, fl.federated_broadcast(fl.federated_map(prepare, view))

    return Part(initialize, distribute)


def _client_part(
    model: Model, client: Callable[..., Any], sent_type: Any, client_state: Any
) -> Part:
    run, initialize = convert(client), build_initialize(())
    state_type = initialize.type_signature.result
    if client_state is None:
        work = _trace(
            client,
            "client(server, batches)",
            {0: sent_type.member, 1: model.data_type.member},
            lambda *given: _read_result(run(*given), keeps=False)[0],
        )

        @fl.federated_computation(state_type, sent_type, model.data_type)
        def next_work(state: Any, sent: Any, data: Any) -> Any:  # pyright: ignore[reportRedeclaration]
            return state, fl.federated_map(work, (sent, data))

        return Part(initialize, next_work)

    initial = tf.nest.map_structure(_as_array, client_state)
    kept_type = fl.to_type(
        tf.nest.map_structure(lambda a: fl.TensorType(a.dtype.type, a.shape), initial)
    )

    work = _trace(
        client,
        "client(server, batches, own)",
        {0: sent_type.member, 2: kept_type, 1: model.data_type.member},
        lambda *given: _read_result(run(*given), keeps=True),
    )

    @fl.federated_computation(
        state_type, sent_type, at_clients(kept_type), model.data_type
    )
    def next_work(state: Any, sent: Any, kept: Any, data: Any) -> Any:
        worked = fl.federated_map(work, (sent, kept, data))
        return state, worked[0], worked[1]

    return Part(initialize, next_work, initial_client_state=initial)


def _as_array(value: Any) -> NDArray[Any]:
    """Return an array; numbers of Python become of the types that TensorFlow has."""
    dtypes: dict[type, Any] = {float: np.float32, int: np.int32}
    return np.asarray(value, dtypes.get(type(value)))


def _read_result(returned: Any, *, keeps: bool) -> tuple[ClientResult, Any]:
    """Return what a client's function returned, as parts hand it on."""
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
            " totals are tensors, those of LocalTraining (`trained.totals`), of"
            f" `model.evaluate` or of `model.forward`{then}."
        )
    update, weight, totals, *kept = found
    if tf.nest.is_nested(weight) or getattr(weight, "ndim", 0):
        raise errors.ValueMismatchError(
            "Expected the function of a client to return update, weight, totals, with a"
            f" number as the weight, found {errors.describe(weight)} there: it is the"
            " second, after the update."
        )
    result = ClientResult(update, tf.cast(weight, tf.float32), Measured(totals, ()))
    return result, kept[0] if keeps else None


def _server_part(
    model: Model, server: Callable[..., Any], initialize: Any, update_type: fl.Type
) -> Part:
    run, state_type = convert(server), initialize.type_signature.result.member
    types = {1: state_type, 0: model.weights_type, 2: update_type}

    def step(*given: Any) -> tuple[Any, Any]:
        returned = run(*given)
        is_pair = isinstance(returned, tuple | list) and len(returned) == 2  # noqa: PLR2004
        is_pair = is_pair and not isinstance(returned, ModelWeights)
        if not is_pair or returned[1] is None:
            raise errors.ValueMismatchError(
                "Expected the function of the server to return weights and its state,"
                f" `()` where it has none, found {errors.describe(returned)}."
            )
        return returned[1], returned[0]

    update = _trace(server, "server(weights, state, update)", types, step)
    state_after = update.type_signature.result[0]
    if not state_type.is_assignable_from(state_after):
        raise errors.ValueMismatchError(
            "Expected the function of the server to return its state second, as"
            f" `server_state` begins it, `{state_type}`, found `{state_after}`: pass a"
            " `server_state` of this kind, or return one of that."
        )

    @fl.federated_computation(*map(at_server, types.values()))
    def finalize(state: Any, weights: Any, merged: Any) -> Any:
        ended = fl.federated_map(update, (state, weights, merged))
        return ended[0], ended[1]

    return Part(initialize, finalize)


def _trace(
    function: Callable[..., Any],
    wanted: str,
    types: Mapping[int, fl.Type],
    run: Callable[..., Any],
) -> Any:
    """Return a computation whose parameters have the names that a function gives them.

    Args:
        function: a user's.
        wanted: how it is called.
        types: of its arguments by their places, in the order of the computation's.
        run: called with the arguments in the function's order.

    Raises:
        ValueMismatchError: the function takes others.
    """
    signature = inspect.signature(function)
    try:
        names = list(signature.bind(*types).arguments)
    except TypeError:
        names = []
    if len(names) != len(types):
        keeps = len(types) == 2 and len(signature.parameters) == 3  # noqa: PLR2004
        then = ": pass what clients begin with as `client_state`" if keeps else ""
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


# Types of parts.


def at_server(member: fl.Type) -> fl.FederatedType:
    """Return the type of a value at the server."""
    return fl.FederatedType(member, fl.SERVER)


def at_clients(member: fl.Type) -> fl.FederatedType:
    """Return the type of one value for each client."""
    return fl.FederatedType(member, fl.CLIENTS)


def _state_of(name: str, part: Any) -> Any:
    """Return the type of the state of a part, or of what initialises one."""
    initialize = part.initialize if isinstance(part, Part) else part
    state = initialize.type_signature.result
    _expect_placed(f"{name}.initialize", state, fl.SERVER)
    return state.member


def _check(
    name: str, part: Part, given: Sequence[fl.Type], num_results: int
) -> list[Any]:
    """Return the types of what a part returns, of which the first is its state."""
    state = at_server(_state_of(name, part))
    signature = part.next.type_signature
    expected = fl.StructType([state, *given])
    if signature.parameter is None or not signature.parameter.is_assignable_from(
        expected
    ):
        raise errors.ValueMismatchError(
            f"Expected `{name}.next` to take `{expected}`, found"
            f" `{signature.parameter}`."
        )
    results = [t for _, t in getattr(signature.result, "items", list)()]
    if len(results) != num_results + 1 or not state.is_assignable_from(results[0]):
        raise errors.ValueMismatchError(
            f"Expected `{name}.next` to return its state, `{state}`, and"
            f" {num_results} more, found `{signature.result}`."
        )
    return results


def _client_types(model: Model, client: Part, sent_type: fl.Type) -> tuple[Any, Any]:
    """Return the members of what clients return and keep; None: they keep nothing."""
    parameter = client.next.type_signature.parameter
    kept = [parameter[2]] if len(parameter) == 4 else []  # noqa: PLR2004 (S, B, K, data)
    given = [sent_type, *kept, model.data_type]
    _, result, *still_kept = _check("client", client, given, 1 + len(kept))
    _expect_placed("client", result, fl.CLIENTS)
    for taken, returned in zip(kept, still_kept, strict=True):
        if not taken.is_assignable_from(returned):
            raise errors.ValueMismatchError(
                f"Expected `client` to return what it keeps as `{taken}`, as it takes"
                f" it, found `{returned}`."
            )
    if bool(kept) != (client.initial_client_state is not None):
        raise errors.ValueMismatchError(
            "Expected clients that keep something, and what they begin with, found one"
            " without the other: a Part of clients takes K@CLIENTS third and returns it"
            " last, and has an `initial_client_state`."
        )
    found = result.member
    is_result = _names(found) == list(ClientResult._fields)
    if not is_result or _names(found.measured) != list(Measured._fields):
        raise errors.ValueMismatchError(
            "Expected `client` to return <update, weight, measured=<totals, counts>> of"
            f" each client, found `{result}`."
        )
    measured: Any = Measured(found.measured.totals, found.measured.counts)
    members: Any = (found.update, found.weight, fl.to_type(measured))
    return fl.to_type(ClientResult(*members)), kept[0].member if kept else None


def _names(type_spec: Any) -> list[str | None]:
    return [name for name, _ in getattr(type_spec, "items", list)()]


def _expect_placed(name: str, found: Any, placement: Any) -> None:
    if not isinstance(found, fl.FederatedType) or found.placement is not placement:
        raise errors.ValueMismatchError(
            f"Expected `{name}` to return a value at {placement}, found `{found}`."
        )


def _contained(found: Any, like: Any) -> Any:
    """Return a type in the Python containers of another one that is built alike.

    Types of parts within parts have lost theirs.
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


def _count_bytes(type_spec: Any) -> int:
    """Return how many bytes values of a type have, whose shapes are known."""
    if isinstance(type_spec, fl.StructType):
        return sum(_count_bytes(member) for _, member in type_spec.items())
    return math.prod(type_spec.shape) * type_spec.dtype.itemsize


# The process.


def _build_initialize(model: Model, parts: PartStates, server: Part) -> Any:
    initial_weights = build_constants(model.initial_weights())
    weights_type: Any = initial_weights.type_signature.result
    members = [
        part.initialize.type_signature.result.member for part in (server, *parts)
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
        states = [part.initialize() for part in (server, *parts)]
        return fl.federated_map(join, (weights, *states))

    return initialize


def _build_next(
    model: Model,
    guards: Guards,
    parts: PartStates,
    server: Part,
    state_type: Any,
    result_type: Any,
    kept_type: Any,
) -> Any:
    send, client, aggregate = parts
    guard = _build_guard(guards, result_type, kept_type)
    checked: Any = guard.type_signature.result
    measured_type = (checked if kept_type is None else checked[0]).measured
    metrics_type = aggregate.next.type_signature.result[2].member
    state_member = state_type.member
    states_type = fl.StructType([t for _, t in state_member.parts.items()])

    @rtf.computation(state_member)
    def view(state: ServerState) -> ServerView:
        return ServerView(state.weights, state.optimizer, state.round_index)

    @rtf.computation(
        state_member,
        states_type,
        state_member.optimizer,
        state_member.weights,
        measured_type,
    )
    def finish(
        state: ServerState, parts: Any, optimizer: Any, weights: Any, measured: Any
    ) -> ServerState:
        new = (weights, optimizer)
        if not aggregate.counts_empty_rounds:
            old = (state.weights, state.optimizer)
            new = skip_empty(guards, measured.totals.num_examples > 0, new, old)
        new_index = state.round_index + np.int32(1)
        kept = require_finite(new[0])
        return ServerState(kept, new[1], new_index, PartStates(*parts))

    @rtf.computation(measured_type, metrics_type)
    def report(measured: Measured, found: Any) -> Any:
        metrics: OrderedDict[str, Any] = model.totals.finish(measured.totals)
        for more in (measured.counts, found):
            metrics.update(more or {})
        return metrics

    def run(state: Any, kept: Any, data: Any) -> tuple[Any, Any, Any]:
        viewed = fl.federated_map(view, state)
        sent = send.next(state.parts.distribute, viewed)
        given = (sent[1], data) if kept is None else (sent[1], kept, data)
        worked = client.next(state.parts.client_work, *given)
        if kept is None:
            result, still_kept = fl.federated_map(guard, worked[1]), None
        else:
            both = fl.federated_map(guard, (worked[1], kept, worked[2]))
            result, still_kept = both[0], both[1]
        merged = aggregate.next(state.parts.aggregate, result.update, result.weight)
        ended = server.next(state.optimizer, state.weights, merged[1])
        measured = fl.federated_sum(result.measured)
        states = fl.federated_zip((sent[0], worked[0], merged[0]))
        new_state = fl.federated_map(
            finish, (state, states, ended[0], ended[1], measured)
        )
        return new_state, still_kept, fl.federated_map(report, (measured, merged[2]))

    if kept_type is None:

        @fl.federated_computation(state_type, model.data_type)
        def run_round(state: Any, data: Any) -> Any:
            new_state, _, metrics = run(state, None, data)
            return new_state, metrics

        return run_round

    @fl.federated_computation(state_type, at_clients(kept_type), model.data_type)
    def run_round_with_kept(state: Any, kept: Any, data: Any) -> Any:
        return run(state, kept, data)

    return run_round_with_kept


def _build_guard(guards: Guards, result_type: Any, kept_type: Any) -> Any:
    """Return the check of a client's result: <result, <kept, new>> -> <result, kept>.

    Where clients keep nothing, it takes and returns the result alone.
    """

    def guard(result: ClientResult, old: Any, new: Any) -> tuple[ClientResult, Any]:
        checked = tf.nest.flatten((result.update, result.weight, new))
        finite = is_finite(checked)
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
    counts = OrderedDict(zeroed.measured.counts or {})
    counts["left_out"] = tf.cast(tf.logical_not(finite), tf.int32)
    return zeroed._replace(measured=zeroed.measured._replace(counts=counts))

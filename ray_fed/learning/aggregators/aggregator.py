"""The base classes of aggregators, and the aggregators that compute means and sums.

An aggregator combines the updates of a round's clients into one aggregate. Most are
sums: a `Summed` has a function for a client and a function for the sum over clients. A
`Prepared` changes updates before its inner aggregator receives them.
"""

# pyright: reportUnknownLambdaType=false

import abc
import dataclasses
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import federated_language as fl
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf
from ray_fed.language.trees import count_bytes
from ray_fed.learning.accounting import SampledGaussian, TreeGaussian
from ray_fed.learning.processes import build_initialize
from ray_fed.learning.tensors import (
    averaged,
    narrowed,
    specs_of,
    widened,
)
from ray_fed.tensorflow.tracing import convert


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """An aggregator that was built for one type of updates.

    Attributes:
        initialize: Computation of the first state, ( -> S@SERVER).
        next: Computation of a round. It takes S@SERVER, update@CLIENTS and
            weight@CLIENTS (f32[], where 0 leaves a client out). It returns S@SERVER,
            aggregate@SERVER and metrics@SERVER, a struct by name, which can be empty.
        privacy: Privacy that each round spends, or None if no client is protected.
        counts_empty_rounds: Whether a round without examples is a round like others.
            This is so with noise, which hides that nobody took part.
        num_clients: Number of clients to draw cohorts from, or None for any number.
        client_state: Values that each client keeps for the aggregator, before its first
            round: a structure of NumPy arrays. `next` then takes K@CLIENTS last, and
            returns the new values last. None: clients keep nothing for the aggregator.
    """

    initialize: Any
    next: Any
    privacy: SampledGaussian | TreeGaussian | None = None
    counts_empty_rounds: bool = False
    num_clients: int | None = None
    client_state: Any = None


class Aggregator(abc.ABC):
    """A rule that combines the updates of a round's clients, for updates of any type.

    `build` returns the computations for one type.
    """

    @property
    def sums_show_broken(self) -> bool:
        """Whether infinities and NaN in an update or weight always show in a sum.

        If so, sums over many clients are checked first, and single clients only if a
        sum has infinities or NaN.
        """
        return False

    @abc.abstractmethod
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> Aggregation:
        """Return the computations that aggregate updates of one type."""

    def count_bytes(self, update_type: fl.Type) -> int | None:
        """Return the bytes of an update as a client of a real federation would send it.

        By default these are the bytes of its tensors. Override this for updates that
        are sent in another form.

        Args:
            update_type: Type of the updates that the aggregator takes.

        Returns:
            The bytes that a client sends, or None if the type does not fix them.
        """
        return count_bytes(update_type)


class _Ended(NamedTuple):
    aggregate: Any
    metrics: Any


class Summed(Aggregator):
    """An aggregator made of two functions of TensorFlow, `client` and `server`.

        class SignMajority(Summed):
            def client(self, update, weight, state):
                return tf.nest.map_structure(tf.sign, update)

            def server(self, sums, state):
                return tf.nest.map_structure(tf.sign, sums), state, {}

    The results of `client` are summed over clients, and `server` receives the sums.
    Types follow from tracing. A `Summed` can be inside of other aggregators:
    `clipped(1.0, SignMajority())`.

    Attributes:
        privacy: Privacy that each round spends, or None if no client is protected.
        counts_empty_rounds: Whether a round without examples is a round like others.
        num_clients: Number of clients to draw cohorts from, or None for any number.
    """

    privacy: SampledGaussian | TreeGaussian | None = None
    counts_empty_rounds: bool = False
    num_clients: int | None = None

    def initial_state(self) -> Any:
        """Return the state before the first round: arrays or tensors, by default ()."""
        return ()

    @abc.abstractmethod
    def client(self, update: Any, weight: Any, state: Any) -> Any:
        """Return the values of a client that are summed: any structure of tensors.

        Args:
            update: The client's update, tensors in their containers.
            weight: Weight of the client, f32[], such as its number of examples. A
                client of weight 0 must not change the sums.
            state: State before the round.
        """

    @abc.abstractmethod
    def server(self, sums: Any, state: Any) -> tuple[Any, Any, Mapping[str, Any]]:
        """Return the aggregate, the new state, and metrics by name.

        If the aggregate has the structure of an update, its floats are cast to the
        update's dtypes.

        Args:
            sums: Sums of the values that `client` returned, or zeros without clients.
            state: State before the round.
        """

    def check(self, update_type: fl.Type) -> None:
        """Raise ValueMismatchError if it cannot aggregate updates of a type."""

    def restore(self, aggregate: Any, like: Any) -> Any:
        """Cast an aggregate to the dtypes of an update, whose specs are `like`."""
        return averaged(aggregate, like)

    @override
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> Aggregation:
        self.check(update_type)
        initialize = build_initialize(self.initial_state)
        state_type = initialize.type_signature.result.member
        keeps = not is_empty(state_type)
        client, server = convert(self.client), convert(self.server)
        like = specs_of(update_type)

        def finish(sums: Any, state: Any) -> Any:
            returned = server(sums, state)
            is_whole = isinstance(returned, tuple | list) and len(returned) == 3  # noqa: PLR2004
            if not is_whole or not isinstance(returned[2], Mapping):
                raise errors.ValueMismatchError(
                    f"Expected `{type(self).__name__}.server` to return the aggregate,"
                    " its state, and metrics by name, `{}` where there are none, found"
                    f" {errors.describe(returned)}."
                )
            aggregate, new, metrics = returned
            if _is_alike(aggregate, like):
                aggregate = self.restore(aggregate, like)
            if keeps:
                return new, aggregate, OrderedDict(metrics)
            # A graph returns no empty struct beside the aggregate.
            return _Ended(aggregate, OrderedDict(metrics)) if metrics else aggregate

        add = _trace(client, state_type, update_type, weight_type)
        end = _trace_end(finish, state_type, add.type_signature.result)
        ended_type = end.type_signature.result
        # The form of the result depends on state and metrics, and is known once traced.
        has_metrics = getattr(ended_type, "python_container", None) is _Ended
        if keeps:
            state_after = end.type_signature.result[0]
            if not state_type.is_assignable_from(state_after):
                raise errors.ValueMismatchError(
                    f"Expected `{type(self).__name__}.server` to return its state"
                    f" second, as `initial_state` begins it, `{state_type}`, found"
                    f" `{state_after}`."
                )

        @fl.federated_computation(
            initialize.type_signature.result,
            fl.FederatedType(update_type, fl.CLIENTS),
            fl.FederatedType(weight_type, fl.CLIENTS),
        )
        def merge(state: Any, update: Any, weight: Any) -> Any:
            sent = [fl.federated_broadcast(state)] if keeps else []
            sums = fl.federated_sum(fl.federated_map(add, (update, weight, *sent)))
            ended = fl.federated_map(end, (state, sums) if keeps else sums)
            if keeps:
                return ended[0], ended[1], ended[2]
            if has_metrics:
                return state, ended[0], ended[1]
            return state, ended, _no_measurements()

        return Aggregation(
            initialize,
            merge,
            privacy=self.privacy,
            counts_empty_rounds=self.counts_empty_rounds,
            num_clients=self.num_clients,
        )


class Prepared(Aggregator):
    """Changes updates before the aggregator `inner` receives them, and counts changes.

    Its own metrics come before the metrics of `inner`.
    """

    inner: Aggregator

    def initial_state(self) -> Any:
        """Return the state before the first round, by default ()."""
        return ()

    @abc.abstractmethod
    def client(self, update: Any, weight: Any, state: Any) -> tuple[Any, Any]:
        """Return a client's changed update, and counts for the sum over clients."""

    @abc.abstractmethod
    def server(self, counts: Any, state: Any) -> tuple[Any, "OrderedDict[str, Any]"]:
        """Return the new state, and metrics by name, from the summed counts."""

    def client_state(self, update_type: fl.Type) -> Any:
        """Return the first values that each client keeps, as a structure of arrays.

        None: clients keep nothing for this aggregator.
        """
        del update_type
        return None

    def keeping_client(self, update: Any, weight: Any, state: Any, own: Any) -> Any:
        """Return the changed update, counts, and the new values that the client keeps.

        This replaces `client` if `client_state` returns arrays. `own` has the kept
        values.
        """
        raise NotImplementedError

    @override
    def count_bytes(self, update_type: fl.Type) -> int | None:
        return self.inner.count_bytes(update_type)

    def check_inner(self, inner: Aggregation) -> None:
        """Raise an error if `inner` does not fit this aggregator; by default never."""

    @override
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> Aggregation:
        inner = self.inner.build(update_type, weight_type)
        self.check_inner(inner)
        own = build_initialize(self.initial_state)
        own_type = own.type_signature.result.member
        has_state = not is_empty(own_type)
        kept = Kept(self.client_state(update_type), inner.client_state)
        if kept.first is None:
            prepare = _trace(self.client, own_type, update_type, weight_type)
        else:
            kept_type = type_of_arrays(kept.first)
            prepare = _trace_keeping(
                self.keeping_client, own_type, update_type, weight_type, kept_type
            )
        end = _trace_end(
            lambda counts, state: self.server(counts, state)[
                slice(None) if has_state else 1
            ],
            own_type,
            prepare.type_signature.result[1],
        )
        returned = end.type_signature.result
        inner_type = inner.next.type_signature.result[2].member
        own_metrics = returned[1] if has_state else returned
        join = rtf.computation(_join, own_metrics, inner_type)

        @fl.federated_computation
        def initialize() -> Any:
            return fl.federated_zip((own(), inner.initialize()))

        begin: Any = initialize if has_state else inner.initialize

        def merge(state: Any, update: Any, weight: Any, values: Any) -> Any:
            first, second = (state[0], state[1]) if has_state else (None, state)
            own_values, inner_values = kept.split(values)
            sent = [fl.federated_broadcast(first)] if has_state else []
            prepared = fl.federated_map(prepare, (update, weight, *own_values, *sent))
            merged = inner.next(second, prepared[0], weight, *inner_values)
            counts = fl.federated_sum(prepared[1])
            ended = fl.federated_map(end, (first, counts) if has_state else counts)
            metrics = ended[1] if has_state else ended
            joined = fl.federated_map(join, (metrics, merged[2]))
            new_state = merged[0]
            if has_state:
                new_state = fl.federated_zip((ended[0], merged[0]))
            new = kept.join(lambda: prepared[2], lambda: merged[3])
            return new_state, merged[1], joined, new

        state_type = begin.type_signature.result
        return dataclasses.replace(
            inner,
            initialize=begin,
            next=build_next(merge, state_type, update_type, weight_type, kept.state),
            client_state=kept.state,
        )


class Kept(NamedTuple):
    """Values that clients keep for two parts, such as an algorithm and its aggregator.

    Attributes:
        first: Arrays that a client keeps for the first part before its first round, or
            None if it keeps nothing for this part.
        second: The same for the second part.
    """

    first: Any
    second: Any

    @property
    def state(self) -> Any:
        """Arrays of both parts as a pair, the arrays of the only part, or None."""
        parts = [part for part in self if part is not None]
        return tuple(parts) if len(parts) > 1 else next(iter(parts), None)

    def split(self, values: Any) -> tuple[list[Any], list[Any]]:
        """Return a list for each part: its values at clients, or empty without any."""
        if self.first is not None and self.second is not None:
            return [values[0]], [values[1]]
        return (
            [] if self.first is None else [values],
            [] if self.second is None else [values],
        )

    def join(self, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
        """Join the new values at clients, which `first` and `second` return by part."""
        pairs = zip(self, (first, second), strict=True)
        values = tuple(read() for part, read in pairs if part is not None)
        return fl.federated_zip(values) if len(values) > 1 else next(iter(values), None)


def build_next(
    combine: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any, Any]],
    state_type: fl.Type,
    update_type: fl.Type,
    weight_type: fl.Type,
    client_state: Any,
) -> Any:
    """Return the computation `next` of an aggregation.

    `combine` maps the state, updates, weights and kept values to the new state,
    aggregate, metrics and kept values. Kept values are None if clients keep nothing.
    `client_state` has the arrays that a client keeps before its first round.
    """
    types = [
        state_type,
        fl.FederatedType(update_type, fl.CLIENTS),
        fl.FederatedType(weight_type, fl.CLIENTS),
    ]
    if client_state is None:

        @fl.federated_computation(*types)
        def merge(state: Any, update: Any, weight: Any) -> Any:
            return combine(state, update, weight, None)[:3]

        return merge
    kept_type = fl.FederatedType(type_of_arrays(client_state), fl.CLIENTS)

    @fl.federated_computation(*types, kept_type)
    def merge_and_keep(state: Any, update: Any, weight: Any, kept: Any) -> Any:
        return combine(state, update, weight, kept)

    return merge_and_keep


def type_of_arrays(arrays: Any) -> fl.Type:
    """Return the federated_language type of a structure of arrays."""
    return fl.to_type(
        tf.nest.map_structure(lambda a: fl.TensorType(a.dtype.type, a.shape), arrays)
    )


def _trace(client: Callable[..., Any], state_type: Any, *given: fl.Type) -> Any:
    """Trace `client`. The computation has no parameter for an empty state."""
    if is_empty(state_type):
        return rtf.computation(
            lambda update, weight: client(update, weight, ()), *given
        )
    return rtf.computation(
        lambda update, weight, state: client(update, weight, state),  # noqa: PLW0108 (its arguments are counted)
        *given,
        state_type,
    )


def _trace_keeping(client: Callable[..., Any], state_type: Any, *given: fl.Type) -> Any:
    """Trace a client that keeps values. They are the computation's third parameter."""
    if is_empty(state_type):
        return rtf.computation(
            lambda update, weight, own: client(update, weight, (), own), *given
        )
    return rtf.computation(
        lambda update, weight, own, state: client(update, weight, state, own),
        *given,
        state_type,
    )


def _trace_end(server: Callable[..., Any], state_type: Any, sums_type: fl.Type) -> Any:
    """Trace `server`. The computation has no parameter for an empty state."""
    if is_empty(state_type):
        return rtf.computation(lambda sums: server(sums, ()), sums_type)
    return rtf.computation(
        lambda state, sums: server(sums, state), state_type, sums_type
    )


def is_empty(type_spec: fl.Type) -> bool:
    """Return whether a type is the empty struct, which stands for no state."""
    return isinstance(type_spec, fl.StructType) and not len(type_spec)


def _is_alike(aggregate: Any, like: Any) -> bool:
    try:
        tf.nest.assert_same_structure(aggregate, like, check_types=False)
    except (TypeError, ValueError):
        return False
    return True


def _no_measurements() -> Any:
    @rtf.computation
    def nothing() -> "OrderedDict[str, Any]":
        return OrderedDict()

    return fl.federated_eval(nothing, fl.SERVER)


def _join(own: Any, inner: Any) -> "OrderedDict[str, Any]":
    """Return the metrics of an aggregator and then the metrics of its inner aggregator.

    If a name occurs in both, the outer metric gets a suffix such as `_1`, as in Keras.
    """
    inner_metrics: dict[str, Any] = dict(inner or {})
    joined: OrderedDict[str, Any] = OrderedDict()
    for name, value in (own or {}).items():
        names = itertools.chain([name], (f"{name}_{n}" for n in itertools.count(1)))
        free = (n for n in names if n not in inner_metrics and n not in joined)
        joined[next(free)] = value
    return OrderedDict(joined | inner_metrics)


def norm_of(update: Any, order: float = 2) -> tf.Tensor:
    """Return the norm of all floats of an update as one vector, f32[].

    `order` is 2, or infinity for the largest absolute value.
    """
    if order == math.inf:
        largest = [
            tf.reduce_max(tf.abs(tf.cast(t, tf.float32)))
            for t in tf.nest.flatten(update)
            if t.dtype.is_floating
        ]
        return tf.reduce_max([tf.constant(0.0), *largest])
    squares = [
        tf.reduce_sum(tf.square(tf.cast(t, tf.float32)))
        for t in tf.nest.flatten(update)
        if t.dtype.is_floating
    ]
    return tf.sqrt(tf.add_n(squares)) if squares else tf.constant(0.0)


def scaled(update: Any, factor: Any) -> Any:
    """Return an update times a number, as float32 or wider. Integers become float64."""

    def scale(tensor: Any) -> tf.Tensor:
        wide = widened(tensor)
        if not wide.dtype.is_floating:
            wide = tf.cast(wide, tf.float64)
        return wide * tf.cast(factor, wide.dtype)

    return tf.nest.map_structure(scale, update)


def statistics_of(update: Any) -> tuple[Any, ...]:
    """Return the running statistics of an update, or of its type."""
    delta = getattr(update, "delta", update)
    return tuple(getattr(delta, "statistics", ()))


def refuse_statistics(update_type: fl.Type, name: str, why: str) -> None:
    """Raise ValueMismatchError for updates with running statistics.

    `why` says why the aggregator `name` cannot average them.
    """
    if found := statistics_of(update_type):
        raise errors.ValueMismatchError(
            f"Expected a model without running statistics for `{name}`, found"
            f" {len(found)}, such as those of BatchNormalization: {why}. Use"
            " GroupNormalization or LayerNormalization, set `trainable = False` on the"
            " layers that have them, or take `aggregators.mean()`."
        )


@dataclasses.dataclass(frozen=True)
class Mean(Summed):
    """The aggregator that `mean` returns."""

    weighted: bool = True

    @property
    @override
    def sums_show_broken(self) -> bool:
        return self.weighted  # 0 * NaN is NaN, but a weight that is NaN counts as 0

    @override
    def client(self, update: Any, weight: Any, state: Any) -> Any:
        counted = weight if self.weighted else tf.cast(weight > 0, weight.dtype)
        return scaled(update, counted), counted

    @override
    def server(self, sums: Any, state: Any) -> Any:
        # A round without clients has the mean 0.
        total, weight = sums
        means = tf.nest.map_structure(
            lambda t: tf.math.divide_no_nan(t, tf.cast(weight, t.dtype)), total
        )
        return means, state, {}


@dataclasses.dataclass(frozen=True)
class Sum(Summed):
    """The aggregator that `sum_of_updates` returns."""

    weighted: bool = False

    @override
    def check(self, update_type: fl.Type) -> None:
        why = "the sum of how far variances moved may be below zero"
        refuse_statistics(update_type, "sum_of_updates", why)

    @override
    def client(self, update: Any, weight: Any, state: Any) -> Any:
        counted = weight if self.weighted else tf.cast(weight > 0, weight.dtype)
        return scaled(update, counted)

    @override
    def server(self, sums: Any, state: Any) -> Any:
        return sums, state, {}

    @override
    def restore(self, aggregate: Any, like: Any) -> Any:
        return narrowed(aggregate, like)


@dataclasses.dataclass(frozen=True)
class WithSum(Aggregator):
    """The aggregator that `with_sum` returns."""

    inner: Aggregator

    @property
    @override
    def sums_show_broken(self) -> bool:
        return self.inner.sums_show_broken

    @override
    def count_bytes(self, update_type: Any) -> int | None:
        (_, first), (_, second) = update_type.items()
        counts = self.inner.count_bytes(first), count_bytes(second)
        return None if None in counts else sum(filter(None, counts))

    @override
    def build(self, update_type: Any, weight_type: fl.Type) -> Aggregation:
        (first, first_type), (second, second_type) = update_type.items()
        inner = self.inner.build(first_type, weight_type)
        if inner.privacy is not None:
            raise errors.ConfigError(
                "Expected an aggregator without noise beside a sum, found one that"
                " promises privacy: the server would see the sum without noise."
            )
        others = Sum().build(second_type, weight_type)

        kept = Kept(None, inner.client_state)

        def merge(state: Any, update: Any, weight: Any, values: Any) -> Any:
            _, given = kept.split(values)
            merged = inner.next(state, _member(update, first, 0), weight, *given)
            nothing = others.initialize()
            summed = others.next(nothing, _member(update, second, 1), weight)
            both = fl.federated_zip((merged[1], summed[1]))
            new = kept.join(lambda: None, lambda: merged[3])
            return merged[0], both, merged[2], new

        state_type = inner.initialize.type_signature.result
        merge_pairs = build_next(
            merge, state_type, update_type, weight_type, kept.state
        )
        return dataclasses.replace(inner, next=merge_pairs)


def _member(update: Any, name: str | None, index: int) -> Any:
    return update[index] if name is None else getattr(update, name)


def inner_or_mean(inner: Aggregator | None) -> Aggregator:
    """Return the aggregator `inner`, or the weighted mean for None."""
    inner = Mean() if inner is None else inner
    expect_aggregator(inner)
    return inner


def expect_aggregator(value: object) -> None:
    """Raise ValueMismatchError unless a value is an aggregator."""
    if not isinstance(value, Aggregator):
        raise errors.ValueMismatchError(
            "Expected an aggregator, found"
            f" {errors.describe(value)}: pass an object, such as"
            " `learning.aggregators.median(max_clients=100)`."
        )


@tracebacks.shorten
def mean(*, weighted: bool = True) -> Aggregator:
    """Return an aggregator that computes the mean of the clients' updates.

    Args:
        weighted: Whether the mean is weighted by the clients' weights, such as their
            numbers of examples. Otherwise each client with a weight above 0 counts the
            same.
    """
    return Mean(weighted)


@tracebacks.shorten
def sum_of_updates(*, weighted: bool = False) -> Aggregator:
    """Return an aggregator that sums updates. It refuses running statistics.

    Args:
        weighted: Whether each update is multiplied by its weight. Otherwise updates
            with weights above 0 are added unchanged.
    """
    return Sum(weighted)


@tracebacks.shorten
def with_sum(inner: Aggregator | None = None) -> Aggregator:
    """Return an aggregator of updates that are pairs, whose second part is summed.

    State and metrics come from `inner`. The second part is neither clipped nor given
    noise, so `inner` must not promise privacy.

    Args:
        inner: Aggregator of the first part, by default the weighted mean.
    """
    return WithSum(inner_or_mean(inner))

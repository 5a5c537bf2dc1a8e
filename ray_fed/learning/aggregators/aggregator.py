"""The seam of aggregators: how the updates of clients become one.

Most are sums: `Summed` is what a client adds, and what the server makes of the sum.
`Prepared` changes updates before another aggregator takes them. Means and sums are what
every other one ends in.
"""

# pyright: reportUnknownLambdaType=false

import abc
import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import federated_language as fl
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf
from ray_fed.learning.accounting import SampledGaussian, TreeGaussian
from ray_fed.learning.processes import Part, build_initialize
from ray_fed.learning.tensors import averaged, narrowed, specs_of, widened
from ray_fed.tensorflow.tracing import convert


class Aggregator(abc.ABC):
    """How updates become one: built for a type once that is known.

    The computation `next` of what it builds

        takes    state@SERVER, update@CLIENTS, weight@CLIENTS (f32[], 0: left out)
        returns  state@SERVER, aggregate@SERVER, measurements@SERVER
    """

    @abc.abstractmethod
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> Part:
        """Return the part for updates of a type."""


class Summed(Aggregator):
    """An aggregator of two functions of TensorFlow, `client` and `server`.

        class SignMajority(Summed):
            def client(self, update, weight, state):
                return tf.nest.map_structure(tf.sign, update)

            def server(self, sums, state):
                return tf.nest.map_structure(tf.sign, sums), state, {}

    What clients return is summed over them; types come from tracing. It composes with
    others: `clipped(1.0, SignMajority())`.

    Attributes:
        privacy: what each round spends; None where it protects no client.
        counts_empty_rounds: whether a round without any example is a round like others.
        num_clients: to choose cohorts from; None: it works with any number.
    """

    privacy: SampledGaussian | TreeGaussian | None = None
    counts_empty_rounds: bool = False
    num_clients: int | None = None

    def initial_state(self) -> Any:
        """Return the state before any round: arrays or tensors; by default none, ()."""
        return ()

    @abc.abstractmethod
    def client(self, update: Any, weight: Any, state: Any) -> Any:
        """Return what a client adds: any structure of tensors.

        Args:
            update: of the client, tensors in their containers.
            weight: f32[], such as its number of examples; 0 leaves the client out.
            state: of before the round.
        """

    @abc.abstractmethod
    def server(self, sums: Any, state: Any) -> tuple[Any, Any, Mapping[str, Any]]:
        """Return the aggregate, the new state, and metrics by name.

        Where the aggregate is built as an update is, its floats become of the types
        of the update's.

        Args:
            sums: of what clients added; zeros where none was there.
            state: of before the round.
        """

    def check(self, update_type: fl.Type) -> None:
        """Raise ValueMismatchError for updates that it cannot take; by default none."""

    def restore(self, aggregate: Any, like: Any) -> Any:
        """Return an aggregate in the types of an update, of which `like` has specs."""
        return averaged(aggregate, like)

    @override
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> Part:
        self.check(update_type)
        initialize = build_initialize(self.initial_state)
        state_type = initialize.type_signature.result
        client, server = convert(self.client), convert(self.server)
        like = specs_of(update_type)
        has_metrics = True

        def finish(sums: Any, state: Any) -> tuple[Any, Any, Any]:
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
            nonlocal has_metrics
            has_metrics = bool(metrics)
            return new, aggregate, OrderedDict(metrics)

        placed = [
            fl.FederatedType(update_type, fl.CLIENTS),
            fl.FederatedType(weight_type, fl.CLIENTS),
        ]
        if not is_empty(state_type.member):
            add = rtf.computation(
                lambda update, weight, state: client(update, weight, state),  # noqa: PLW0108 (its arguments are counted)
                update_type,
                weight_type,
                state_type.member,
            )
            end = rtf.computation(
                lambda state, sums: finish(sums, state),
                state_type.member,
                add.type_signature.result,
            )
            state_after = end.type_signature.result[0]
            if not state_type.member.is_assignable_from(state_after):
                raise errors.ValueMismatchError(
                    f"Expected `{type(self).__name__}.server` to return its state"
                    f" second, as `initial_state` begins it, `{state_type.member}`,"
                    f" found `{state_after}`."
                )

            @fl.federated_computation(state_type, *placed)
            def merge(state: Any, update: Any, weight: Any) -> Any:
                sent = fl.federated_broadcast(state)
                added = fl.federated_map(add, (update, weight, sent))
                ended = fl.federated_map(end, (state, fl.federated_sum(added)))
                return ended[0], ended[1], ended[2]

            return self._part(initialize, merge)

        add = rtf.computation(
            lambda update, weight: client(update, weight, ()), update_type, weight_type
        )
        added_type = add.type_signature.result
        # The aggregate alone where there are no metrics, as a graph returns no less.
        end = rtf.computation(lambda sums: finish(sums, ())[1], added_type)
        if has_metrics:
            end = rtf.computation(lambda sums: finish(sums, ())[1:], added_type)

        @fl.federated_computation(state_type, *placed)
        def merge(state: Any, update: Any, weight: Any) -> Any:
            sums = fl.federated_sum(fl.federated_map(add, (update, weight)))
            ended = fl.federated_map(end, sums)
            if has_metrics:
                return state, ended[0], ended[1]
            return state, ended, _no_measurements()

        return self._part(initialize, merge)

    def _part(self, initialize: Any, merge: Any) -> Part:
        return Part(
            initialize,
            merge,
            privacy=self.privacy,
            counts_empty_rounds=self.counts_empty_rounds,
            num_clients=self.num_clients,
        )


class Prepared(Aggregator):
    """Changes updates, and counts what it did, before another aggregator takes them.

    Attributes:
        inner: the other aggregator, whose metrics follow its own.
    """

    inner: Aggregator

    def initial_state(self) -> Any:
        """Return the state before any round; by default none."""
        return ()

    @abc.abstractmethod
    def client(self, update: Any, weight: Any, state: Any) -> tuple[Any, Any]:
        """Return the changed update, and counts, which are summed."""

    @abc.abstractmethod
    def server(self, counts: Any, state: Any) -> tuple[Any, "OrderedDict[str, Any]"]:
        """Return the new state, and metrics by name."""

    @override
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> Part:
        inner = self.inner.build(update_type, weight_type)
        own = build_initialize(self.initial_state)
        own_type = own.type_signature.result.member
        keeps = not is_empty(own_type)
        if keeps:
            prepare = rtf.computation(self.client, update_type, weight_type, own_type)
            end = rtf.computation(
                lambda state, sums: self.server(sums, state),
                own_type,
                prepare.type_signature.result[1],
            )
            metrics_type = end.type_signature.result[1]
        else:
            prepare = rtf.computation(
                lambda update, weight: self.client(update, weight, ()),
                update_type,
                weight_type,
            )
            end = rtf.computation(
                lambda counts: self.server(counts, ())[1],
                prepare.type_signature.result[1],
            )
            metrics_type = end.type_signature.result
        inner_type = inner.next.type_signature.result[2].member
        join = rtf.computation(_join, metrics_type, inner_type)

        @fl.federated_computation
        def initialize() -> Any:
            return fl.federated_zip((own(), inner.initialize()))

        begin: Any = initialize if keeps else inner.initialize

        @fl.federated_computation(
            begin.type_signature.result,
            fl.FederatedType(update_type, fl.CLIENTS),
            fl.FederatedType(weight_type, fl.CLIENTS),
        )
        def merge(state: Any, update: Any, weight: Any) -> Any:
            if not keeps:
                prepared = fl.federated_map(prepare, (update, weight))
                merged = inner.next(state, prepared[0], weight)
                found = fl.federated_map(end, fl.federated_sum(prepared[1]))
                joined = fl.federated_map(join, (found, merged[2]))
                return merged[0], merged[1], joined
            sent = fl.federated_broadcast(state[0])
            prepared = fl.federated_map(prepare, (update, weight, sent))
            merged = inner.next(state[1], prepared[0], weight)
            counts = fl.federated_sum(prepared[1])
            ended = fl.federated_map(end, (state[0], counts))
            joined = fl.federated_map(join, (ended[1], merged[2]))
            return fl.federated_zip((ended[0], merged[0])), merged[1], joined

        return dataclasses.replace(inner, initialize=begin, next=merge)


def is_empty(type_spec: fl.Type) -> bool:
    """Return whether a type is the empty struct, as of a state that there is not."""
    return isinstance(type_spec, fl.StructType) and not len(type_spec)


def _is_alike(aggregate: Any, like: Any) -> bool:
    try:
        tf.nest.assert_same_structure(aggregate, like, check_types=False)
    except (TypeError, ValueError):
        return False
    return True


def _no_measurements() -> Any:
    """Return an empty struct at the server, inside of a federated computation."""

    @rtf.computation
    def nothing() -> "OrderedDict[str, Any]":
        return OrderedDict()

    return fl.federated_eval(nothing, fl.SERVER)


def _join(first: Any, second: Any) -> "OrderedDict[str, Any]":
    """Return one struct by name of two."""
    return OrderedDict(
        item for struct in (first, second) if struct for item in struct.items()
    )


def norm_of(update: Any) -> tf.Tensor:
    """Return the Euclidean norm of all floats of an update as one vector, f32[]."""
    squares = [
        tf.reduce_sum(tf.square(tf.cast(t, tf.float32)))
        for t in tf.nest.flatten(update)
        if t.dtype.is_floating
    ]
    return tf.sqrt(tf.add_n(squares)) if squares else tf.constant(0.0)


def scaled(update: Any, factor: Any) -> Any:
    """Return an update times a number, in types to add up in: integers as float64."""

    def scale(tensor: Any) -> tf.Tensor:
        wide = widened(tensor)
        if not wide.dtype.is_floating:
            wide = tf.cast(wide, tf.float64)
        return wide * tf.cast(factor, wide.dtype)

    return tf.nest.map_structure(scale, update)


def statistics_of(update: Any) -> tuple[Any, ...]:
    """Return the running statistics of an update, or their types of its type."""
    delta = getattr(update, "delta", update)
    return tuple(getattr(delta, "statistics", ()))


def refuse_statistics(update_type: fl.Type, name: str, why: str) -> None:
    """Raise for updates with running statistics, which a rule does not preserve.

    Args:
        update_type: of a client.
        name: of the aggregator.
        why: it does not.

    Raises:
        ValueMismatchError: there are some.
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
    """See `mean`."""

    weighted: bool = True

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
    """See `sum_of_updates`."""

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
    """See `with_sum`."""

    inner: Aggregator

    @override
    def build(self, update_type: Any, weight_type: fl.Type) -> Part:
        (first, first_type), (second, second_type) = update_type.items()
        inner = self.inner.build(first_type, weight_type)
        others = Sum().build(second_type, weight_type)

        @fl.federated_computation(
            inner.initialize.type_signature.result,
            fl.FederatedType(update_type, fl.CLIENTS),
            fl.FederatedType(weight_type, fl.CLIENTS),
        )
        def merge(state: Any, update: Any, weight: Any) -> Any:
            merged = inner.next(state, _member(update, first, 0), weight)
            nothing = others.initialize()
            summed = others.next(nothing, _member(update, second, 1), weight)
            both = fl.federated_zip((merged[1], summed[1]))
            return merged[0], both, merged[2]

        return dataclasses.replace(inner, next=merge)


def _member(update: Any, name: str | None, index: int) -> Any:
    return update[index] if name is None else getattr(update, name)


def inner_or_mean(inner: Aggregator | None) -> Aggregator:
    """Return what another aggregator ends in, by default the weighted mean.

    Raises:
        ValueMismatchError: it is no aggregator.
    """
    inner = Mean() if inner is None else inner
    expect_aggregator(inner)
    return inner


def expect_aggregator(value: object, *others: type) -> None:
    """Raise ValueMismatchError unless a value is an aggregator, or of other classes."""
    if not isinstance(value, (Aggregator, *others)):
        raise errors.ValueMismatchError(
            "Expected an aggregator, found"
            f" {errors.describe(value)}: pass an object, such as"
            " `learning.aggregators.median(max_clients=100)`."
        )


@tracebacks.shorten
def mean(*, weighted: bool = True) -> Aggregator:
    """Return the mean of updates.

    Args:
        weighted: by the clients' weights, such as their numbers of examples; else each
            client whose weight is above 0 counts the same.
    """
    return Mean(weighted)


@tracebacks.shorten
def sum_of_updates(*, weighted: bool = False) -> Aggregator:
    """Return the sum of updates, which have no running statistics.

    Args:
        weighted: each update times its weight; else those of weights above 0 as is.
    """
    return Sum(weighted)


@tracebacks.shorten
def with_sum(inner: Aggregator | None = None) -> Aggregator:
    """Return an aggregator of pairs, whose second part is summed over clients.

    State and metrics are those of `inner`; the second part is neither clipped nor given
    noise.

    Args:
        inner: aggregates the first part, by default the weighted mean.
    """
    return WithSum(inner_or_mean(inner))

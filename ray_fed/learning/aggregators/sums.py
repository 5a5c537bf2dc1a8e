"""Means and sums: what every other aggregator ends in."""

# pyright: reportUnknownLambdaType=false

import dataclasses
from typing import Any

import federated_language as fl
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import (
    Aggregator,
    Summed,
    refuse_statistics,
    scaled,
)
from ray_fed.learning.processes import Part
from ray_fed.learning.totals import narrowed


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

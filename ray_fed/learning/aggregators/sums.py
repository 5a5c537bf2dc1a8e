"""Means and sums: what every other aggregator ends in."""

# pyright: reportUnknownLambdaType=false

import dataclasses
from typing import Any

import federated_language as fl
import tensorflow as tf
from typing_extensions import override

from ray_fed import tensorflow as rtf
from ray_fed.learning.aggregators.aggregator import (
    Aggregator,
    no_measurements,
    no_state,
    refuse_statistics,
    scaled,
)
from ray_fed.learning.checks import expect_kind
from ray_fed.learning.processes import AggregationPart
from ray_fed.learning.totals import averaged, narrowed, specs_of


@dataclasses.dataclass(frozen=True)
class Mean(Aggregator):
    """See `mean`."""

    weighted: bool = True

    @override
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> AggregationPart:
        initialize = no_state()
        state_type = initialize.type_signature.result

        @rtf.computation(update_type, weight_type)
        def weigh(update: Any, weight: Any) -> Any:
            counted = weight if self.weighted else tf.cast(weight > 0, weight.dtype)
            return scaled(update, counted), counted

        @rtf.computation(weigh.type_signature.result)
        def divide(weighed: Any) -> Any:
            total, weight = weighed
            means = tf.nest.map_structure(
                lambda t: tf.math.divide_no_nan(t, tf.cast(weight, t.dtype)), total
            )
            return averaged(means, specs_of(update_type))

        @fl.federated_computation(state_type, *_placed(update_type, weight_type))
        def merge(state: Any, update: Any, weight: Any) -> Any:
            # Not `federated_mean`, which refuses a round without clients.
            sums = fl.federated_sum(fl.federated_map(weigh, (update, weight)))
            return state, fl.federated_map(divide, sums), no_measurements()

        return AggregationPart(initialize, merge)


def inner_or_mean(inner: Aggregator | None) -> Aggregator:
    """Return what another aggregator ends in, by default the weighted mean.

    Raises:
        ValueMismatchError: it is no aggregator.
    """
    inner = Mean() if inner is None else inner
    expect_kind("aggregator", inner, Aggregator)
    return inner


@dataclasses.dataclass(frozen=True)
class Sum(Aggregator):
    """See `sum_of_updates`."""

    weighted: bool = False

    @override
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> AggregationPart:
        why = "the sum of how far variances moved may be below zero"
        refuse_statistics(update_type, "sum_of_updates", why)
        initialize = no_state()
        state_type = initialize.type_signature.result

        @rtf.computation(update_type, weight_type)
        def weigh(update: Any, weight: Any) -> Any:
            counted = weight if self.weighted else tf.cast(weight > 0, weight.dtype)
            return scaled(update, counted)

        @rtf.computation(weigh.type_signature.result)
        def narrow(total: Any) -> Any:
            return narrowed(total, specs_of(update_type))

        @fl.federated_computation(state_type, *_placed(update_type, weight_type))
        def merge(state: Any, update: Any, weight: Any) -> Any:
            merged = fl.federated_sum(fl.federated_map(weigh, (update, weight)))
            return state, fl.federated_map(narrow, merged), no_measurements()

        return AggregationPart(initialize, merge)


def mean(*, weighted: bool = True) -> Aggregator:
    """Return the mean of updates.

    Args:
        weighted: by the clients' weights, such as their numbers of examples; else each
            client whose weight is above 0 counts the same.
    """
    return Mean(weighted)


def sum_of_updates(*, weighted: bool = False) -> Aggregator:
    """Return the sum of updates, which have no running statistics.

    Args:
        weighted: each update times its weight; else those of weights above 0 as is.
    """
    return Sum(weighted)


def _placed(*types: fl.Type) -> list[fl.FederatedType]:
    return [fl.FederatedType(t, fl.CLIENTS) for t in types]

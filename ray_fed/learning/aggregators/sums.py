"""Means and sums: what every other aggregator ends in."""

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
    scaled,
)
from ray_fed.learning.processes import AggregationPart


@dataclasses.dataclass(frozen=True)
class Mean(Aggregator):
    """See `mean`."""

    weighted: bool = True

    @override
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> AggregationPart:
        initialize = no_state()
        state_type = initialize.type_signature.result
        count = _build_count(weight_type)

        @fl.federated_computation(state_type, *_placed(update_type, weight_type))
        def merge(state: Any, update: Any, weight: Any) -> Any:
            counted = weight if self.weighted else fl.federated_map(count, weight)
            merged = fl.federated_mean(update, weight=counted)
            return state, merged, no_measurements()

        return AggregationPart(initialize, merge)


@dataclasses.dataclass(frozen=True)
class Sum(Aggregator):
    """See `sum_of_updates`."""

    weighted: bool = False

    @override
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> AggregationPart:
        initialize = no_state()
        state_type = initialize.type_signature.result

        @rtf.computation(update_type, weight_type)
        def weigh(update: Any, weight: Any) -> Any:
            counted = weight if self.weighted else tf.cast(weight > 0, weight.dtype)
            return scaled(update, counted)

        @fl.federated_computation(state_type, *_placed(update_type, weight_type))
        def merge(state: Any, update: Any, weight: Any) -> Any:
            merged = fl.federated_sum(fl.federated_map(weigh, (update, weight)))
            return state, merged, no_measurements()

        return AggregationPart(initialize, merge)


def mean(*, weighted: bool = True) -> Aggregator:
    """Return the mean of updates.

    Args:
        weighted: by the clients' weights, such as their numbers of examples; else each
            client whose weight is above 0 counts the same.
    """
    return Mean(weighted)


def sum_of_updates(*, weighted: bool = False) -> Aggregator:
    """Return the sum of updates.

    Args:
        weighted: each update times its weight; else those of weights above 0 as is.
    """
    return Sum(weighted)


def _build_count(weight_type: fl.Type) -> Any:
    @rtf.computation(weight_type)
    def count(weight: Any) -> Any:
        return tf.cast(weight > 0, weight.dtype)

    return count


def _placed(*types: fl.Type) -> list[fl.FederatedType]:
    return [fl.FederatedType(t, fl.CLIENTS) for t in types]

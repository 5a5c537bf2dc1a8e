"""Bounds on updates before they are aggregated: clipping and zeroing by norm.

The adaptive bound follows a quantile gamma of the clients' norms:

    b_k = 1 if |delta_k| <= C else 0;    C <- C exp(-eta (mean b_k - gamma))

Sources:
    Galen Andrew, Om Thakkar, Brendan McMahan, Swaroop Ramaswamy: Differentially Private
    Learning with Adaptive Clipping. NeurIPS 2021, https://arxiv.org/abs/1905.03871,
    Algorithm 1 and Section 2 (the geometric update).
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal, cast

import federated_language as fl
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.learning.aggregators.aggregator import (
    Aggregator,
    joined,
    norm_of,
    scaled,
    state_of,
)
from ray_fed.learning.aggregators.sums import inner_or_mean
from ray_fed.learning.checks import check_number, check_positive
from ray_fed.learning.processes import AggregationPart
from ray_fed.learning.totals import narrowed


@dataclasses.dataclass(frozen=True)
class AdaptiveNorm:
    """A bound that follows a quantile of the clients' norms from round to round.

    Attributes:
        initial: bound of the first round, > 0.
        quantile: gamma of the paper, 0 to 1: the share of clients at or below it.
        learning_rate: eta of the paper, > 0.

    Raises:
        ConfigError: a field is out of its range.
    """

    initial: float = 0.1
    quantile: float = 0.5
    learning_rate: float = 0.2

    def __post_init__(self) -> None:
        check_positive("initial", self.initial)
        check_positive("learning_rate", self.learning_rate)
        check_number("quantile", self.quantile, lambda q: 0 <= q <= 1, "from 0 to 1")

    def next_bound(self, bound: Any, share_within: Any) -> Any:
        """Return the bound after a round in which a share of clients was within it."""
        return bound * tf.exp(-self.learning_rate * (share_within - self.quantile))


@dataclasses.dataclass(frozen=True)
class Bounded(Aggregator):
    """Clips or zeroes what is above a bound, then aggregates; see `clipped`, `zeroed`.

    Attributes:
        inner: takes the bounded updates.
        norm: the bound.
        kind: what happens above it.
    """

    inner: Aggregator
    norm: float | AdaptiveNorm
    kind: Literal["clipped", "zeroed"]

    @override
    def build(self, update_type: fl.Type, weight_type: fl.Type) -> AggregationPart:
        inner = self.inner.build(update_type, weight_type)
        norm = self.norm
        if inner.privacy is not None and isinstance(norm, AdaptiveNorm):
            raise errors.ConfigError(
                "Expected a fixed bound before an aggregator with noise, found one that"
                " follows the clients' norms without noise: give"
                ' `clip_norm="adaptive"` to dp_mean.'
            )
        adaptive = norm if isinstance(norm, AdaptiveNorm) else None
        own = state_of(adaptive.initial if adaptive else norm)  # pyright: ignore[reportArgumentType]
        bound_client = _build_bound(self.kind, update_type, weight_type)
        own_type = own.type_signature.result
        finish = _build_finish(self.kind, adaptive, own_type.member)
        join = joined(
            finish.type_signature.result[1],
            inner.next.type_signature.result[2].member,
        )

        @fl.federated_computation
        def initialize() -> Any:
            return fl.federated_zip((own(), inner.initialize()))

        @fl.federated_computation(
            cast("Any", initialize).type_signature.result,
            fl.FederatedType(update_type, fl.CLIENTS),
            fl.FederatedType(weight_type, fl.CLIENTS),
        )
        def merge(state: Any, update: Any, weight: Any) -> Any:
            bound = fl.federated_broadcast(state[0])
            bounded = fl.federated_map(bound_client, (update, weight, bound))
            merged = inner.next(state[1], bounded[0], weight)
            counts = fl.federated_sum(bounded[1])
            ended = fl.federated_map(finish, (state[0], counts))
            found = fl.federated_map(join, (ended[1], merged[2]))
            return fl.federated_zip((ended[0], merged[0])), merged[1], found

        return dataclasses.replace(inner, initialize=initialize, next=merge)


def clipped(norm: float | AdaptiveNorm, inner: Aggregator | None = None) -> Aggregator:
    """Return an aggregator that scales updates down to a norm, if theirs is above.

    Metrics: `clip_norm` of the round, `share_clipped` and `mean_norm` of the clients.

    Args:
        norm: of all floats of an update as one vector, > 0; or how it adapts.
        inner: aggregates what is clipped, by default the weighted mean.

    Raises:
        ConfigError: `norm` is not above 0 and finite.
    """
    return Bounded(inner_or_mean(inner), _check_norm(norm), "clipped")


def zeroed(norm: float | AdaptiveNorm, inner: Aggregator | None = None) -> Aggregator:
    """Return an aggregator that makes zeros of updates whose norm is above one.

    Metrics: `zero_norm` of the round and `share_zeroed` of the clients.

    Args:
        norm: of all floats of an update as one vector, > 0; or how it adapts.
        inner: aggregates what is left, by default the weighted mean.

    Raises:
        ConfigError: `norm` is not above 0 and finite.
    """
    return Bounded(inner_or_mean(inner), _check_norm(norm), "zeroed")


def clip(update: Any, bound: Any) -> tuple[Any, Any]:
    """Return an update scaled down to a norm, and the norm that it had.

    In types to add up in, as `scaled`.
    """
    norm = norm_of(update)
    factor = tf.where(norm > bound, bound / tf.maximum(norm, 1e-30), 1.0)
    return scaled(update, factor), norm


def _zero(update: Any, bound: Any) -> tuple[Any, Any]:
    norm = norm_of(update)
    return scaled(update, tf.cast(norm <= bound, tf.float32)), norm


def _check_norm(norm: float | AdaptiveNorm) -> float | AdaptiveNorm:
    if not isinstance(norm, AdaptiveNorm):
        check_positive("norm", norm)
    return norm


def _build_bound(kind: str, update_type: fl.Type, weight_type: fl.Type) -> Any:
    limit: Callable[[Any, Any], Any] = clip if kind == "clipped" else _zero

    @rtf.computation(update_type, weight_type, (tf.float32.as_numpy_dtype,))
    def bound_client(update: Any, weight: Any, state: Any) -> Any:
        (bound,) = state
        bounded, norm = limit(update, bound)
        counts = tf.cast(weight > 0, tf.float32)
        above = tf.cast(norm > bound, tf.float32)
        return narrowed(bounded, update), (counts, counts * above, counts * norm)

    return bound_client


def _build_finish(kind: str, adaptive: AdaptiveNorm | None, own_type: Any) -> Any:
    counts_type = fl.StructType([fl.TensorType(tf.float32.as_numpy_dtype)] * 3)

    @rtf.computation(own_type, counts_type)
    def finish(state: Any, sums: Any) -> Any:
        (bound,) = state
        num_clients, above, norms = sums
        share = tf.math.divide_no_nan(above, num_clients)
        name = "clip_norm" if kind == "clipped" else "zero_norm"
        metrics = OrderedDict([(name, bound), (f"share_{kind}", share)])
        if kind == "clipped":
            metrics["mean_norm"] = tf.math.divide_no_nan(norms, num_clients)
        if adaptive is not None:
            new = adaptive.next_bound(bound, 1.0 - share)
            bound = tf.where(num_clients > 0, new, bound)
        return (bound,), metrics

    return finish

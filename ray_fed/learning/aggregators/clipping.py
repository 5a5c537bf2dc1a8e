"""Bounds on the norm of updates before they are aggregated: clipping and zeroing.

The adaptive bound C follows a quantile gamma of the clients' norms:

    b_k = 1 if |delta_k| <= C else 0;    C <- C exp(-eta (mean b_k - gamma))

Sources:
    Galen Andrew, Om Thakkar, Brendan McMahan, Swaroop Ramaswamy: Differentially Private
    Learning with Adaptive Clipping. NeurIPS 2021, https://arxiv.org/abs/1905.03871,
    Algorithm 1 and Section 2 (the geometric update).
"""

import dataclasses
import math
from collections import OrderedDict
from typing import Any, Literal

import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import (
    Aggregation,
    Aggregator,
    Prepared,
    inner_or_mean,
    norm_of,
    scaled,
)
from ray_fed.learning.checks import check_number, check_positive
from ray_fed.learning.tensors import narrowed


@tracebacks.shorten_init
@dataclasses.dataclass(frozen=True)
class AdaptiveNorm:
    """A bound that follows a quantile of the clients' norms from round to round.

    Attributes:
        initial: Bound of the first round, > 0.
        quantile: gamma of the paper, 0 to 1: the share of clients whose norm should be
            at or below the bound.
        learning_rate: eta of the paper, > 0.

    Raises:
        ConfigError: A field is out of its range.
    """

    initial: float = 0.1
    quantile: float = 0.5
    learning_rate: float = 0.2

    def __post_init__(self) -> None:
        check_positive("initial", self.initial)
        check_positive("learning_rate", self.learning_rate)
        check_number("quantile", self.quantile, lambda q: 0 <= q <= 1, "from 0 to 1")

    def next_bound(self, bound: Any, share_within: Any) -> Any:
        """Return the bound after a round with a share of clients within `bound`."""
        return bound * tf.exp(-self.learning_rate * (share_within - self.quantile))


@dataclasses.dataclass(frozen=True)
class Bounded(Prepared):
    """The aggregator that `clipped` and `zeroed` return. They explain its fields."""

    inner: Aggregator
    norm: float | AdaptiveNorm
    kind: Literal["clipped", "zeroed"]
    norm_order: float = 2

    @override
    def check_inner(self, inner: Aggregation) -> None:
        if inner.privacy is not None and isinstance(self.norm, AdaptiveNorm):
            raise errors.ConfigError(
                "Expected a fixed bound before an aggregator with noise, found one that"
                " follows the clients' norms without noise: pass"
                ' `clip_norm="adaptive"` to dp_mean.'
            )

    @override
    def initial_state(self) -> Any:
        norm = self.norm
        first = norm.initial if isinstance(norm, AdaptiveNorm) else norm
        return (tf.constant(first, tf.float32),)

    @override
    def client(self, update: Any, weight: Any, state: Any) -> Any:
        (bound,) = state
        if self.kind == "clipped":
            bounded, norm = clip(update, bound)
        else:
            bounded, norm = _zero(update, bound, self.norm_order)
        counts = tf.cast(weight > 0, tf.float32)
        above = tf.cast(norm > bound, tf.float32)
        return narrowed(bounded, update), (counts, counts * above, counts * norm)

    @override
    def server(self, counts: Any, state: Any) -> Any:
        (bound,) = state
        num_clients, above, norms = counts
        share = tf.math.divide_no_nan(above, num_clients)
        name = "clip_norm" if self.kind == "clipped" else "zero_norm"
        metrics = OrderedDict([(name, bound), (f"share_{self.kind}", share)])
        if self.kind == "clipped":
            metrics["mean_norm"] = tf.math.divide_no_nan(norms, num_clients)
        if isinstance(self.norm, AdaptiveNorm):
            new = self.norm.next_bound(bound, 1.0 - share)
            bound = tf.where(num_clients > 0, new, bound)
        return (bound,), metrics


@tracebacks.shorten
def clipped(norm: float | AdaptiveNorm, inner: Aggregator | None = None) -> Aggregator:
    """Return an aggregator that scales updates with a larger norm down to a bound.

    Its metrics are `clip_norm`, the bound of the round, `share_clipped`, the share of
    clients above the bound, and `mean_norm`, the mean of the clients' norms.

    Args:
        norm: Bound on the norm of all floats of an update as one vector, > 0, or an
            `AdaptiveNorm`.
        inner: Aggregator of the clipped updates, by default the weighted mean.

    Raises:
        ConfigError: `norm` is not above 0 and finite.
    """
    return Bounded(inner_or_mean(inner), _check_norm(norm), "clipped")


@tracebacks.shorten
def zeroed(
    norm: float | AdaptiveNorm,
    inner: Aggregator | None = None,
    *,
    norm_order: float = 2,
) -> Aggregator:
    """Return an aggregator that replaces updates with a larger norm by zeros.

    Its metrics are `zero_norm`, the bound of the round, and `share_zeroed`, the share
    of clients above the bound.

    Args:
        norm: Bound on the norm of all floats of an update as one vector, > 0, or an
            `AdaptiveNorm`.
        inner: Aggregator of the updates after zeroing, by default the weighted mean.
        norm_order: 2 for the Euclidean norm, which grows with the size of the model, or
            `math.inf` for the largest absolute value of a coordinate, which is the
            default of TensorFlow Federated's `zeroing_factory`.

    Raises:
        ConfigError: `norm` is not above 0 and finite, or `norm_order` is neither 2 nor
            infinity.
    """
    if isinstance(norm_order, bool) or norm_order not in (2, math.inf):
        raise errors.ConfigError(
            "Expected `norm_order` to be 2 or `math.inf`, found"
            f" {errors.describe(norm_order)}."
        )
    return Bounded(inner_or_mean(inner), _check_norm(norm), "zeroed", norm_order)


def clip(update: Any, bound: Any) -> tuple[Any, Any]:
    """Scale an update down to a bound on its norm, and return it with its former norm.

    Floats become float32 or wider, and integers become float64.
    """
    norm = norm_of(update)
    factor = tf.where(norm > bound, bound / tf.maximum(norm, 1e-30), 1.0)
    return scaled(update, factor), norm


def _zero(update: Any, bound: Any, order: float) -> tuple[Any, Any]:
    norm = norm_of(update, order)
    return scaled(update, tf.cast(norm <= bound, tf.float32)), norm


def _check_norm(norm: float | AdaptiveNorm) -> float | AdaptiveNorm:
    if not isinstance(norm, AdaptiveNorm):
        check_positive("norm", norm)
    return norm

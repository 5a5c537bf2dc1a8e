"""Samplers: who takes part in a round, by a seed and the round alone.

    UniformSampler        as many clients as asked for, none twice
    PoissonSampler        each client by itself with one probability; sizes vary
    WeightedSampler       as many as asked for, none twice, the heavier more often
    AvailabilitySampler   as many as asked for of those that are there in an hour

A sampler has no state: what it draws depends on its fields, the number of clients and
the round, so that a run that is resumed meets the clients that it would have met.

Sources:
    Pavlos S. Efraimidis, Paul G. Spirakis: Weighted random sampling with a reservoir.
    Information Processing Letters 97(5), 2006, https://doi.org/10.1016/j.ipl.2005.11.003,
    Algorithm A (keys u^(1/w); the largest are drawn).

    Martin Abadi, Andy Chu, Ian Goodfellow, H. Brendan McMahan, Ilya Mironov, Kunal
    Talwar, Li Zhang: Deep Learning with Differential Privacy. CCS 2016,
    https://arxiv.org/abs/1607.00133, Section 3.1 (lots drawn by independent picks).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.data.arguments import check_number


class Sampler(Protocol):
    """Draws clients of a round."""

    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        """Return the indices of a round's clients, ascending.

        Args:
            round_index: >= 0.
            num_clients: to draw from.
            k: how many to draw, where the sampler leaves that open; None: it says so.
        """
        ...


def _generator(seed: int, round_index: int) -> np.random.Generator:
    return np.random.default_rng([seed, round_index])


def _check_size(k: int | None, num_clients: int, among: str) -> int:
    if k is None:
        return num_clients
    if not 1 <= k <= num_clients:
        raise errors.ConfigError(
            f"Expected `k` from 1 to {num_clients}, the number of {among}, found {k}."
        )
    return k


@tracebacks.shorten_init
@dataclasses.dataclass(frozen=True)
class UniformSampler:
    """Draws `k` clients, each set of them equally likely; all where `k` is None.

    Attributes:
        seed: >= 0.

    Raises:
        ConfigError: the seed is no whole number, or negative.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_number(self.seed, "seed")

    @tracebacks.shorten
    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        """Draw clients: see `Sampler`.

        Raises:
            ConfigError: there are fewer than `k`.
        """
        size = _check_size(k, num_clients, "clients")
        generator = _generator(self.seed, round_index)
        return sorted(generator.choice(num_clients, size, replace=False).tolist())


@tracebacks.shorten_init
@dataclasses.dataclass(frozen=True)
class PoissonSampler:
    """Draws each client by itself with one probability, as privacy accountants assume.

    The number of clients of a round is binomial; a round may have none.

    Attributes:
        rate: the probability, above 0 and at most 1; None: `k` over the number of
            clients, so that `k` are drawn on average.
        seed: >= 0.

    Raises:
        ConfigError: a field is out of its range.
    """

    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_number(self.seed, "seed")
        if self.rate is not None and not 0 < self.rate <= 1:
            raise errors.ConfigError(
                f"Expected `rate` above 0 and at most 1, found {self.rate}."
            )

    @tracebacks.shorten
    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        """Draw clients: see `Sampler`.

        Raises:
            ConfigError: there is neither `rate` nor `k`, or there are both.
        """
        if (self.rate is None) == (k is None):
            raise errors.ConfigError(
                "Expected either the `rate` of the sampler or a number `k` of clients"
                f" on average, found {self.rate} and {k}."
            )
        rate = self.rate or _check_size(k, num_clients, "clients") / num_clients
        drawn = _generator(self.seed, round_index).random(num_clients) < rate
        return np.flatnonzero(drawn).tolist()


@tracebacks.shorten_init
@dataclasses.dataclass(frozen=True)
class WeightedSampler:
    """Draws `k` clients one after another, each time in proportion to their weights.

    Attributes:
        weights: one for each client, at least 0; those of 0 are never drawn. For
            example `data.weights`, the numbers of rows where these are known.
        seed: >= 0.

    Raises:
        ConfigError: a field is out of its range.
    """

    weights: tuple[float, ...]
    seed: int = 0

    def __init__(
        self, weights: Sequence[float] | NDArray[np.float64], seed: int = 0
    ) -> None:
        try:
            found = tuple(float(w) for w in weights)
        except (TypeError, ValueError):
            found = (math.nan,)
        if not all(0 <= weight < math.inf for weight in found):
            raise errors.ConfigError(
                "Expected finite `weights` of at least 0, one for each client, found"
                f" {errors.describe(weights)}: pass a list of numbers. `data.weights`"
                " is None where it is not known how many rows clients have."
            )
        object.__setattr__(self, "weights", found)
        object.__setattr__(self, "seed", seed)
        check_number(seed, "seed")

    @tracebacks.shorten
    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        """Draw clients: see `Sampler`.

        Raises:
            ConfigError: there are fewer than `k` of a weight above 0, or another number
                of clients than of weights.
        """
        if len(self.weights) != num_clients:
            raise errors.ConfigError(
                f"Expected one weight for each of {num_clients} clients, found"
                f" {len(self.weights)}."
            )
        weights = np.array(self.weights)
        eligible = np.flatnonzero(weights)
        size = _check_size(k, len(eligible), "clients of a weight above 0")
        uniform = 1 - _generator(self.seed, round_index).random(num_clients)
        keys = np.log(uniform[eligible]) / weights[eligible]  # of u^(1/w), no underflow
        return sorted(eligible[np.argsort(-keys, kind="stable")[:size]].tolist())


@tracebacks.shorten_init
@dataclasses.dataclass(frozen=True)
class AvailabilitySampler:
    """Draws `k` clients among those that are there in the hour of the round.

    Fewer are drawn where fewer are there. A table of the hours of devices is such as
    https://arxiv.org/abs/2006.08848 (Yang et al.: Characterizing Impacts of
    Heterogeneity in Federated Learning upon Large-Scale Smartphone Data, 2021) has.

    Attributes:
        hours: for each client the hours in which it is there, from 0 on; a round takes
            one hour, and after `period` hours they begin anew.
        period: hours, >= 1; 24: a day, 168: a week.
        seed: >= 0.

    Raises:
        ConfigError: a field is out of its range.
    """

    hours: tuple[frozenset[int], ...]
    period: int
    seed: int

    def __init__(
        self, hours: Sequence[Sequence[int]], period: int = 24, seed: int = 0
    ) -> None:
        try:
            object.__setattr__(self, "hours", tuple(map(frozenset, hours)))
        except TypeError:
            raise errors.ConfigError(
                "Expected a list of `hours` for each client, such as `[[0, 1], [1]]`,"
                f" found {errors.describe(hours)}."
            ) from None
        object.__setattr__(self, "period", period)
        object.__setattr__(self, "seed", seed)
        check_number(seed, "seed")
        check_number(period, "period", 1)
        others = {hour for given in self.hours for hour in given} - {*range(period)}
        if others:
            raise errors.ConfigError(
                f"Expected `hours` from 0 to {period - 1}, found {sorted(others)[:5]}."
            )

    @tracebacks.shorten
    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        """Draw clients: see `Sampler`.

        Raises:
            ConfigError: there is another number of clients than of rows of hours.
        """
        if len(self.hours) != num_clients:
            raise errors.ConfigError(
                f"Expected hours for each of {num_clients} clients, found those of"
                f" {len(self.hours)}."
            )
        hour = round_index % self.period
        there = np.flatnonzero([hour in given for given in self.hours])
        size = len(there) if k is None else min(k, len(there))
        generator = _generator(self.seed, round_index)
        return sorted(generator.choice(there, size, replace=False).tolist())

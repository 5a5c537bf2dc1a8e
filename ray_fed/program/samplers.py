"""Samplers choose the cohort of each round, which are the clients that take part.

    UniformSampler        `k` different clients, all equally likely
    PoissonSampler        each client independently with the same probability
    WeightedSampler       `k` different clients, more often if their weight is larger
    AvailabilitySampler   `k` of the clients that are available in the round's hour

    PowerOfChoiceSampler the `k` clients with the largest losses among candidates
    OortSampler           clients whose losses were large, and new clients

A sampler has no state. Its cohorts depend only on its fields, the number of clients and
the round, so a resumed run has the same cohorts. The last two samplers are adaptive:
they also depend on metrics of clients. Before each round, `learning.run` evaluates the
clients that an adaptive sampler proposes, and keeps their metrics in the run's records.

Sources:
    Pavlos S. Efraimidis, Paul G. Spirakis: Weighted random sampling with a reservoir.
    Information Processing Letters 97(5), 2006, https://doi.org/10.1016/j.ipl.2005.11.003,
    Algorithm A (keys u^(1/w); the largest are drawn).

    Martin Abadi, Andy Chu, Ian Goodfellow, H. Brendan McMahan, Ilya Mironov, Kunal
    Talwar, Li Zhang: Deep Learning with Differential Privacy. CCS 2016,
    https://arxiv.org/abs/1607.00133, Section 3.1 (lots drawn by independent picks).

    Yae Jee Cho, Jianyu Wang, Gauri Joshi: Towards Understanding Biased Client Selection
    in Federated Learning. AISTATS 2022, https://arxiv.org/abs/2010.01243 (power of
    choice).

    Fan Lai, Xiangfeng Zhu, Harsha V. Madhyastha, Mosharaf Chowdhury: Oort: Efficient
    Federated Learning via Guided Participant Selection. OSDI 2021,
    https://arxiv.org/abs/2010.06081, Algorithm 1.
"""

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.language.type_checks import read_whole


class Sampler(Protocol):
    """Chooses the clients of each round."""

    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        """Return the indices of a round's clients, ascending.

        Args:
            round_index: The number of rounds before this one, >= 0.
            num_clients: The number of clients to draw from.
            k: The number of clients to choose. If None, the sampler decides.
        """
        ...


def check_cohort(sampler: object, drawn: object, num_clients: int) -> list[int]:
    """Return `drawn`, the clients' indices that a sampler returned, as a list.

    Raises:
        ConfigError: `drawn` has other values than indices of clients, or one twice.
    """
    try:
        found = list(cast("Iterable[Any]", drawn))
        cohort = [operator.index(client) for client in found]
        if any(_is_bool(client) for client in found):
            cohort = [-1]  # A mask: Python takes True for 1.
    except (TypeError, AttributeError):  # TensorFlow's booleans raise the second
        cohort = [-1]
    are_known = all(0 <= client < num_clients for client in cohort)
    if not are_known or len({*cohort}) < len(cohort):
        raise errors.ConfigError(
            f"Expected different indices of clients, from 0 to {num_clients - 1}, of"
            f" the sampler `{sampler}`, found {errors.describe(drawn)}."
        )
    return cohort


def _is_bool(client: object) -> bool:
    dtype = getattr(client, "dtype", None)
    return isinstance(client, bool) or getattr(dtype, "kind", None) == "b"


class ClientMetrics(NamedTuple):
    """The metrics that a client had when it was evaluated last.

    Attributes:
        round_index: The index of the round before which the client was evaluated. The
            evaluation used the weights with which this round began.
        metrics: Numbers by name, such as `loss` and `num_examples`. The loss of a
            client without examples is NaN.
    """

    round_index: int
    metrics: Mapping[str, float]


class AdaptiveSampler(Protocol):
    """Chooses the clients of each round by metrics of clients.

    Before each round, `learning.run` evaluates the clients of `propose` with the
    server's weights, and passes their metrics to `choose`.
    """

    def propose(
        self,
        round_index: int,
        num_clients: int,
        k: int | None,
        seen: Mapping[int, ClientMetrics],
    ) -> list[int]:
        """Return the indices of the clients to evaluate before the round.

        Args:
            round_index: The number of rounds before this one, >= 0.
            num_clients: The number of clients to draw from.
            k: The number of clients to choose, or None if the user set no number.
            seen: The latest metrics of each client that was evaluated before an earlier
                round, by index.
        """
        ...

    def choose(
        self, round_index: int, k: int | None, candidates: Mapping[int, ClientMetrics]
    ) -> list[int]:
        """Return the indices of the round's clients, ascending.

        Args:
            round_index: The number of rounds before this one, >= 0.
            k: The number of clients to choose, or None if the user set no number.
            candidates: The metrics of the proposed clients, by index.
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
    """Draws `k` clients, or all if `k` is None. Each set of `k` is equally likely.

    Attributes:
        seed: The seed of the cohorts, >= 0.

    Raises:
        ConfigError: The seed is not a whole number of at least 0.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        read_whole("seed", self.seed, 0)

    @tracebacks.shorten
    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        """Return the clients. The arguments are as in `Sampler.sample`.

        Raises:
            ConfigError: There are fewer clients than `k`.
        """
        size = _check_size(k, num_clients, "clients")
        generator = _generator(self.seed, round_index)
        return sorted(generator.choice(num_clients, size, replace=False).tolist())


@tracebacks.shorten_init
@dataclasses.dataclass(frozen=True)
class PoissonSampler:
    """Draws each client independently with the same probability.

    Privacy accountants assume this. The number of clients in a round is binomial, and a
    round may have no clients.

    Attributes:
        rate: The probability, above 0 and at most 1. If None, it is `k` divided by the
            number of clients, so that a round has `k` clients on average.
        seed: The seed of the cohorts, >= 0.

    Raises:
        ConfigError: A field is out of its range.
    """

    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        read_whole("seed", self.seed, 0)
        if self.rate is not None and not 0 < self.rate <= 1:
            raise errors.ConfigError(
                f"Expected `rate` above 0 and at most 1, found {self.rate}."
            )

    @tracebacks.shorten
    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        """Return the clients. The arguments are as in `Sampler.sample`.

        Raises:
            ConfigError: Both `rate` and `k` are set, or neither is.
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
        weights: The weights of the clients, in order, >= 0. A client of weight 0 is
            never drawn. Pass `data.weights` to draw by numbers of rows, if these are
            known.
        seed: The seed of the cohorts, >= 0.

    Raises:
        ConfigError: A field is out of its range.
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
        read_whole("seed", seed, 0)

    @tracebacks.shorten
    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        """Return the clients. The arguments are as in `Sampler.sample`.

        Raises:
            ConfigError: Fewer than `k` clients have a weight above 0, or the number of
                weights is not the number of clients.
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
        return sorted(
            _draw_in_proportion(uniform[eligible], eligible, weights[eligible], size)
        )


@tracebacks.shorten_init
@dataclasses.dataclass(frozen=True)
class AvailabilitySampler:
    """Draws `k` of the clients that are available in the hour of the round.

    If fewer than `k` clients are available, all of these are drawn. Yang et al., 2021
    (Characterizing Impacts of Heterogeneity in Federated Learning upon Large-Scale
    Smartphone Data, https://arxiv.org/abs/2006.08848) measured when devices are
    available.

    Attributes:
        hours: The hours in which each client is available, from 0 to `period` - 1, in
            client order. A round takes one hour.
        period: The number of hours after which `hours` repeat, >= 1: 24 for a day, 168
            for a week.
        seed: The seed of the cohorts, >= 0.

    Raises:
        ConfigError: A field is out of its range.
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
        read_whole("seed", seed, 0)
        read_whole("period", period, 1)
        others = {hour for given in self.hours for hour in given} - {*range(period)}
        if others:
            raise errors.ConfigError(
                f"Expected `hours` from 0 to {period - 1}, found {sorted(others)[:5]}."
            )

    @tracebacks.shorten
    def sample(self, round_index: int, num_clients: int, k: int | None) -> list[int]:
        """Return the clients. The arguments are as in `Sampler.sample`.

        Raises:
            ConfigError: The length of `hours` is not `num_clients`.
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


def _read_size(k: int | None, most: int, among: str) -> int:
    if k is None:
        raise errors.ConfigError(
            "Expected a number of clients for a sampler that chooses them by their"
            " losses, found None: pass `cohort_size`."
        )
    return _check_size(k, most, among)


def _read_metric(client: int, found: ClientMetrics, name: str) -> float:
    if name not in found.metrics:
        raise errors.ConfigError(
            f"Expected one of the metrics {list(found.metrics)} of the client at index"
            f" {client} as `metric` of the sampler, found `{name}`."
        )
    return found.metrics[name]


@tracebacks.shorten_init
@dataclasses.dataclass(frozen=True)
class PowerOfChoiceSampler:
    """Draws random candidates, and chooses the `k` candidates with the largest losses.

    Candidates are drawn anew for each round and evaluated with the server's weights.
    This is pi_pow-d of Cho et al. Clients without examples come last. If losses are
    equal, the client with the smaller index comes first.

    Attributes:
        num_candidates: The number of candidates, d of the paper, >= `k`. If it is `k`,
            all candidates take part.
        weights: The weights by which candidates are drawn, as in `WeightedSampler`. The
            paper uses the clients' shares of the data. If None, each set of candidates
            is equally likely.
        seed: The seed of the candidates, >= 0.
        metric: The name of the metric to choose by. Clients with larger values come
            first.

    Raises:
        ConfigError: A field is out of its range.
    """

    num_candidates: int
    weights: tuple[float, ...] | None = None
    seed: int = 0
    metric: str = "loss"

    def __post_init__(self) -> None:
        read_whole("num_candidates", self.num_candidates, 1)
        if self.weights is not None:
            weights = WeightedSampler(self.weights, self.seed).weights
            object.__setattr__(self, "weights", weights)
        read_whole("seed", self.seed, 0)

    @tracebacks.shorten
    def propose(
        self,
        round_index: int,
        num_clients: int,
        k: int | None,
        seen: Mapping[int, ClientMetrics],
    ) -> list[int]:
        """Return the candidates. The arguments are as in `AdaptiveSampler.propose`.

        Raises:
            ConfigError: There are fewer clients than candidates, fewer candidates than
                `k`, or `k` is None.
        """
        del seen
        _read_size(k, self.num_candidates, "candidates of the sampler")
        sampler = (
            UniformSampler(self.seed)
            if self.weights is None
            else WeightedSampler(self.weights, self.seed)
        )
        return sampler.sample(round_index, num_clients, self.num_candidates)

    @tracebacks.shorten
    def choose(
        self, round_index: int, k: int | None, candidates: Mapping[int, ClientMetrics]
    ) -> list[int]:
        """Return the clients. The arguments are as in `AdaptiveSampler.choose`.

        Raises:
            ConfigError: The clients do not have the metric of this sampler.
        """
        del round_index
        losses = {c: _read_metric(c, m, self.metric) for c, m in candidates.items()}
        order = sorted(losses, key=lambda c: (math.isnan(losses[c]), -losses[c], c))
        return sorted(order[: _read_size(k, len(order), "candidates")])


@tracebacks.shorten_init
@dataclasses.dataclass(frozen=True)
class OortSampler:
    """Draws `k` clients: some whose losses were large, and some that are new.

    In round R, counted from 1, the utility of a client that was drawn last in round L,
    with n examples and the loss f, is

        n f + sqrt(0.1 log(R) / L)

    where n f is at most its 95th percentile over clients. To draw m clients that are
    not new, the sampler takes 95 % of the m-th largest utility as a cutoff. From the
    clients above the cutoff, m are drawn in proportion to their utilities. The share of
    new clients is `exploration` in the first round. It is multiplied by `decay` in each
    round until it is `least_exploration`.

    This is Algorithm 1 of Lai et al. with two differences. All clients are equally
    fast. And f is the mean loss of a client's examples. The paper has the root of their
    mean square, which a client's metrics do not have.

    Attributes:
        exploration: The share of new clients in the first round, epsilon of the paper,
            0 to 1.
        decay: The factor of this share in each round, 0 to 1.
        least_exploration: The least share of new clients, 0 to 1.
        seed: The seed of all draws, >= 0.
        metric: The name of the metric that is f.

    Raises:
        ConfigError: A field is out of its range.
    """

    exploration: float = 0.9
    decay: float = 0.98
    least_exploration: float = 0.2
    seed: int = 0
    metric: str = "loss"

    def __post_init__(self) -> None:
        read_whole("seed", self.seed, 0)
        for name in ("exploration", "decay", "least_exploration"):
            if not 0 <= getattr(self, name) <= 1:
                raise errors.ConfigError(
                    f"Expected `{name}` from 0 to 1, found {getattr(self, name)}."
                )

    @tracebacks.shorten
    def propose(
        self,
        round_index: int,
        num_clients: int,
        k: int | None,
        seen: Mapping[int, ClientMetrics],
    ) -> list[int]:
        """Return the indices of the `k` clients of a round, which `choose` keeps.

        The arguments are as in `AdaptiveSampler.propose`.

        Raises:
            ConfigError: There are fewer clients than `k`, `k` is None, or the clients
                do not have the metric of this sampler.
        """
        size = _read_size(k, num_clients, "clients")
        generator = _generator(self.seed, round_index)
        known = [client for client in range(num_clients) if client in seen]
        new = [client for client in range(num_clients) if client not in seen]
        share = max(self.least_exploration, self.exploration * self.decay**round_index)
        num_known = min(len(known), size - min(len(new), round(share * size)))
        drawn = generator.choice(new, size - num_known, replace=False).tolist()
        if num_known:
            utilities = self._find_utilities(round_index, known, seen)
            cutoff = 0.95 * np.sort(utilities)[-num_known]
            pool = np.flatnonzero(utilities >= cutoff)
            uniform = 1 - generator.random(len(pool))
            drawn += _draw_in_proportion(
                uniform, np.array(known)[pool], utilities[pool], num_known
            )
        return sorted(drawn)

    def _find_utilities(
        self, round_index: int, clients: list[int], seen: Mapping[int, ClientMetrics]
    ) -> NDArray[np.float64]:
        losses = np.array([_read_metric(c, seen[c], self.metric) for c in clients])
        counts = np.array([_read_metric(c, seen[c], "num_examples") for c in clients])
        gains = np.nan_to_num(counts * losses, nan=0.0)  # without examples
        gains = np.minimum(gains, np.percentile(gains, 95))
        last = np.array([seen[client].round_index + 1 for client in clients])
        return gains + np.sqrt(0.1 * np.log(round_index + 1) / last)

    @tracebacks.shorten
    def choose(
        self, round_index: int, k: int | None, candidates: Mapping[int, ClientMetrics]
    ) -> list[int]:
        """Return all candidates, because `propose` has already drawn the clients."""
        del round_index, k
        return sorted(candidates)


def _draw_in_proportion(
    uniform: NDArray[np.float64],
    clients: NDArray[np.int64],
    weights: NDArray[np.float64],
    size: int,
) -> list[int]:
    """Draw clients one after another, each time in proportion to their weights.

    `uniform` has a random number for each client, above 0 and at most 1. Clients of
    weight 0 come last.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        keys = np.log(uniform) / weights  # of u^(1/w), without underflow
    return clients[np.argsort(-keys, kind="stable")[:size]].tolist()

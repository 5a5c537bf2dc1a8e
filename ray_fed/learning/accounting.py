"""The privacy budget, epsilon, that rounds with noise spend, computed by dp-accounting.

The server's state records which noise its earlier rounds had. So a resumed run cannot
continue them with other noise, for which one epsilon would be wrong.

Sources:
    Ilya Mironov, Kunal Talwar, Li Zhang: Rényi Differential Privacy of the Sampled
    Gaussian Mechanism. 2019, https://arxiv.org/abs/1908.10530 (sampled rounds).

    Peter Kairouz, Brendan McMahan, Shuang Song, Om Thakkar, Abhradeep Thakurta, Zheng
    Xu: Practical and Private (Deep) Learning without Sampling or Shuffling. ICML 2021,
    https://arxiv.org/abs/2103.00039, Appendix D (trees).

    Antti Koskela, Joonas Jälkö, Antti Honkela: Computing Tight Differential Privacy
    Guarantees Using FFT. AISTATS 2020, https://arxiv.org/abs/1906.03049 (privacy loss
    distributions).
"""

import abc
import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.imports import import_extra
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.checks import check_number, check_positive, expect_one_of


class NoiseState(NamedTuple):
    """The part of the server's state that describes the noise of its rounds.

    Attributes:
        round_index: Number of rounds so far, i32[].
        bound: Bound on the norm of a client's update, f32[].
        spends: Two numbers that decide how much privacy each round spent, f64[2], as in
            `Privacy.a_round`.
    """

    round_index: Any
    bound: Any
    spends: Any


def check_noise(privacy: Any, state: Any) -> None:
    """Raise ConfigError if the rounds of a state had other noise than `privacy` has."""
    if privacy is not None:
        for found in _noise_in(state):
            privacy.check_continues(found.spends, int(found.round_index))


def _noise_in(state: Any) -> Iterator[NoiseState]:
    # A computation returns a mapping in place of a `NoiseState`.
    named: Any = state if isinstance(state, Mapping) else {}
    if isinstance(state, NoiseState):
        yield state
    elif tuple(named) == NoiseState._fields:
        yield NoiseState(**named)
    elif isinstance(state, tuple | Mapping):
        parts: Any = named.values() if named else state
        for part in parts:
            yield from _noise_in(part)


@dataclasses.dataclass(frozen=True)
class Privacy(abc.ABC):
    """The guarantee that rounds with Gaussian noise give to each client.

    Attributes:
        noise_multiplier: Standard deviation of the noise, divided by the bound on a
            client's update, >= 0. Without noise, epsilon is infinite.
        delta: Probability with which the guarantee may fail, between 0 and 1.
    """

    noise_multiplier: float
    delta: float

    @property
    @abc.abstractmethod
    def a_round(self) -> tuple[float, float]:
        """The two numbers that, together with `delta`, decide how much a round spends.

        The first is the noise multiplier. The second is the sampling probability of a
        client, or the number of rounds in a pass.
        """

    def check_continues(self, spends: Any, num_rounds: int) -> None:
        """Raise ConfigError if `spends` of earlier rounds differs from `a_round`."""
        found = tuple(float(number) for number in spends)
        if num_rounds and found != self.a_round:
            raise errors.ConfigError(
                f"Expected a state whose {num_rounds} rounds had the noise of this"
                f" process, {self.a_round} (the noise multiplier, and the sampling"
                f" probability or the rounds of a pass), found {found}: epsilon would"
                " be wrong. Pass a process with this noise, or begin without a state."
            )

    def epsilon(self, num_rounds: Any) -> float:
        """Return epsilon, the privacy budget that a number of rounds spends.

        Epsilon is infinite if rounds have no noise.

        Args:
            num_rounds: Number of rounds, >= 0, such as the `round_index` of a state.

        Raises:
            ConfigError: `num_rounds` is below 0.
            UserError: dp-accounting is not installed.
        """
        num_rounds = read_whole("num_rounds", num_rounds, 0)
        if num_rounds == 0:
            return 0.0
        return self._spend(num_rounds) if self.noise_multiplier else math.inf

    def _spend(self, num_rounds: int) -> float:
        import_extra("dp_accounting", "epsilon")
        parts = [
            (compute_rdp(mechanism), count)
            for mechanism, count in self._parts(num_rounds)
        ]
        (orders, _), _ = parts[0]
        total = sum((count * rdp for (_, rdp), count in parts), np.zeros_like(orders))
        rdp_accounting = import_extra("dp_accounting.rdp", "epsilon")
        epsilon, _ = rdp_accounting.compute_epsilon(orders, total, self.delta)
        return float(epsilon)

    @abc.abstractmethod
    def _parts(self, num_rounds: int) -> list[tuple["Mechanism", int]]:
        """Return each mechanism of the rounds, and how many times it was applied."""


class Mechanism(NamedTuple):
    """The noise of one sampled round, or of one whole or unfinished tree.

    A sampled round has a `sampling_probability` and no `num_steps`. A tree has
    `num_steps`, its number of rounds, and no `sampling_probability`.
    """

    noise_multiplier: float
    sampling_probability: float | None = None
    num_steps: int | None = None


@functools.lru_cache(maxsize=4096)
def compute_rdp(mechanism: Mechanism) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return Rényi orders, and the divergence of a mechanism at each order.

    The divergences of several rounds add up. So the divergence of one round, which
    takes 50 ms, is computed once for a run.
    """
    accounting = import_extra("dp_accounting", "epsilon")
    if mechanism.num_steps is None:
        event = _sampled_event(mechanism)
        accountant = accounting.rdp.RdpAccountant()
    else:
        relation = accounting.NeighboringRelation.REPLACE_SPECIAL
        accountant = accounting.rdp.RdpAccountant(neighboring_relation=relation)
        event = accounting.SingleEpochTreeAggregationDpEvent(
            mechanism.noise_multiplier, mechanism.num_steps
        )
    with _quiet_accountant():
        accountant.compose(event)
    return accountant.orders, accountant.rdp


@functools.lru_cache(maxsize=16)
def compute_pld(mechanism: Mechanism) -> Any:
    """Return the privacy loss distribution of one sampled round, which takes megabytes.

    It is computed once for a run, as `PLDAccountant` of dp-accounting does.
    """
    pld = import_extra("dp_accounting.pld", "epsilon")
    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        mechanism.noise_multiplier, sampling_prob=mechanism.sampling_probability
    )


def _sampled_event(mechanism: Mechanism) -> Any:
    accounting = import_extra("dp_accounting", "epsilon")
    gaussian = accounting.GaussianDpEvent(mechanism.noise_multiplier)
    return accounting.PoissonSampledDpEvent(mechanism.sampling_probability, gaussian)


Accountant = Literal["rdp", "pld"]
"""Methods of dp-accounting: Rényi divergences, or privacy loss distributions."""


@dataclasses.dataclass(frozen=True)
class SampledGaussian(Privacy):
    """The guarantee of rounds in which each client takes part by chance, independently.

    Neighboring sets of clients differ by one additional client.

    Attributes:
        sampling_probability: Probability that a client takes part in a round, 0 to 1.
        accountant: Method of computing epsilon, "rdp" or "pld". "pld" returns a smaller
            epsilon for the same noise, but takes longer.
    """

    sampling_probability: float
    accountant: Accountant = "rdp"

    @property
    @override
    def a_round(self) -> tuple[float, float]:
        return float(self.noise_multiplier), float(self.sampling_probability)

    @override
    def _spend(self, num_rounds: int) -> float:
        if self.accountant == "rdp":
            return super()._spend(num_rounds)
        spent = compute_pld(Mechanism(*self.a_round)).self_compose(num_rounds)
        return float(spent.get_epsilon_for_delta(self.delta))

    @override
    def _parts(self, num_rounds: int) -> list[tuple[Mechanism, int]]:
        return [(Mechanism(*self.a_round), num_rounds)]


@dataclasses.dataclass(frozen=True)
class TreeGaussian(Privacy):
    """The guarantee of passes in which each client takes part at most once.

    The rounds of one pass share the noise of one tree. Neighboring sets of clients
    differ by one client, whose update is zero in one of the sets.

    Attributes:
        rounds_per_pass: Number of rounds in a pass, >= 1. Each pass begins a new tree.
    """

    rounds_per_pass: int

    @property
    @override
    def a_round(self) -> tuple[float, float]:
        return float(self.noise_multiplier), float(self.rounds_per_pass)

    @override
    def _parts(self, num_rounds: int) -> list[tuple[Mechanism, int]]:
        passes, steps = divmod(num_rounds, self.rounds_per_pass)
        counts = {self.rounds_per_pass: passes, steps: 1}
        return [
            (Mechanism(float(self.noise_multiplier), num_steps=num_steps), count)
            for num_steps, count in counts.items()
            if num_steps and count
        ]


@tracebacks.shorten
def find_noise_multiplier(
    epsilon: float,
    *,
    num_rounds: int,
    clients_per_round: int,
    num_clients: int,
    delta: float,
    accountant: Accountant = "rdp",
) -> float:
    """Return the least noise multiplier of `dp_mean` with which rounds spend `epsilon`.

    The search of dp-accounting, `calibrate_dp_mechanism`, is accurate to 1e-6. The
    rounds spend at most `epsilon`.

    Args:
        epsilon: Privacy budget of all rounds together, > 0.
        num_rounds: Number of rounds of the training, >= 1.
        clients_per_round: Expected size of a cohort, as for `dp_mean`.
        num_clients: Number of clients to sample from, as for `dp_mean`.
        delta: Probability with which the guarantee may fail, as for `dp_mean`.
        accountant: Method of computing epsilon. Pass the same one to `dp_mean`.

    Raises:
        ConfigError: An argument is out of its range.
        UserError: dp-accounting is not installed.
    """
    check_positive("epsilon", epsilon)
    num_rounds = read_whole("num_rounds", num_rounds, 1)
    check_cohorts(clients_per_round, num_clients, delta)
    expect_one_of("accountant", accountant, get_args(Accountant))
    accounting = import_extra("dp_accounting", "the noise for an epsilon")
    probability = clients_per_round / num_clients

    def build_event(noise_multiplier: float) -> Any:
        event = _sampled_event(Mechanism(noise_multiplier, probability))
        return accounting.SelfComposedDpEvent(event, num_rounds)

    def calibrate(make_accountant: Any, bracket: Any = None) -> float:
        return accounting.calibrate_dp_mechanism(
            make_accountant, build_event, epsilon, delta, bracket
        )

    def spend(noise_multiplier: float) -> float:
        privacy = SampledGaussian(noise_multiplier, delta, probability, "pld")
        return privacy.epsilon(num_rounds)

    with _quiet_accountant():
        found = calibrate(accounting.rdp.RdpAccountant)
        if accountant == "pld":
            # Little noise makes large privacy loss distributions, so the search begins
            # near the noise that is enough by Rényi divergences.
            upper, lower = found, found / 2
            while spend(lower) <= epsilon:
                upper, lower = lower, lower / 2
            bracket = accounting.LowerEndpointAndGuess(lower, upper)
            found = calibrate(accounting.pld.PLDAccountant, bracket)
    return float(found)


def check_cohorts(clients_per_round: Any, num_clients: Any, delta: Any) -> None:
    """Raise ConfigError if the size of cohorts, or `delta`, is out of its range."""
    read_whole("num_clients", num_clients, 1)
    read_whole("clients_per_round", clients_per_round, 1, num_clients)
    check_number("delta", delta, lambda p: 0 < p < 1, "above 0 and below 1")


@contextlib.contextmanager
def _quiet_accountant() -> Generator[None]:
    """Hide dp-accounting's log line about Rényi orders for which it finds no bound."""
    logger = logging.getLogger("absl")

    def is_other(record: logging.LogRecord) -> bool:
        return "failed to converge" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)

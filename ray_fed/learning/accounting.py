"""What rounds with noise spend of a privacy budget, by dp-accounting.

Sources:
    Ilya Mironov, Kunal Talwar, Li Zhang: Rényi Differential Privacy of the Sampled
    Gaussian Mechanism. 2019, https://arxiv.org/abs/1908.10530 (sampled rounds).

    Peter Kairouz, Brendan McMahan, Shuang Song, Om Thakkar, Abhradeep Thakurta, Zheng
    Xu: Practical and Private (Deep) Learning without Sampling or Shuffling. ICML 2021,
    https://arxiv.org/abs/2103.00039, Appendix D (trees).

What a server's state says of the noise that its rounds had.
"""

import abc
import contextlib
import dataclasses
import logging
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple

from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.imports import import_extra
from ray_fed.learning.checks import read_whole


class NoiseState(NamedTuple):
    """What the server keeps of noise between rounds.

    Attributes:
        round_index: i32[], rounds so far.
        bound: f32[], on the norm of a client's update.
        spends: f64[2], what each round so far spent; see `Privacy.a_round`.
    """

    round_index: Any
    bound: Any
    spends: Any


def check_noise(privacy: Any, state: Any) -> None:
    """Refuse a state whose rounds had other noise than those that are to follow.

    Raises:
        ConfigError: epsilon would count the state's rounds wrongly.
    """
    if privacy is not None:
        for found in _noise_in(state):
            privacy.check_continues(found.spends, int(found.round_index))


def _noise_in(state: Any) -> Iterator[NoiseState]:
    # What a round returns is by name, and of no class.
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
        noise_multiplier: standard deviation of the noise over the clients' bound, >= 0.
        delta: the probability that the guarantee may fail with, above 0, below 1.
    """

    noise_multiplier: float
    delta: float

    @property
    @abc.abstractmethod
    def a_round(self) -> tuple[float, float]:
        """What tells how much a round spends: all fields but `delta`."""

    def check_continues(self, spends: Any, num_rounds: int) -> None:
        """Refuse to count rounds that had other noise.

        Raises:
            ConfigError: they had other noise.
        """
        found = tuple(float(number) for number in spends)
        if num_rounds and found != self.a_round:
            raise errors.ConfigError(
                f"Expected a state whose {num_rounds} rounds had the noise of this"
                f" process, {self.a_round} (its multiplier, and the share of clients or"
                f" rounds of a pass), found {found}: epsilon would count them wrongly."
                " Pass a process with their numbers, or begin anew."
            )

    def epsilon(self, num_rounds: Any) -> float:
        """Return epsilon after a number of rounds, by Rényi accounting.

        Args:
            num_rounds: done so far, >= 0; the `round_index` of a state.

        Raises:
            ConfigError: `num_rounds` is below 0.
            UserError: dp-accounting is not installed.
        """
        num_rounds = read_whole("num_rounds", num_rounds, 0)
        if num_rounds == 0:
            return 0.0
        accounting = import_extra("dp_accounting", "privacy", "epsilon")
        with _quiet_accountant():
            return float(self._account(accounting, num_rounds))

    @abc.abstractmethod
    def _account(self, accounting: Any, num_rounds: int) -> float: ...


@dataclasses.dataclass(frozen=True)
class SampledGaussian(Privacy):
    """Each round takes each client with one probability, whatever others did (Poisson).

    Neighbours are sets of clients of which one has one client more.

    Attributes:
        sampling_probability: of a client in a round, 0 to 1.
    """

    sampling_probability: float

    @property
    @override
    def a_round(self) -> tuple[float, float]:
        return float(self.noise_multiplier), float(self.sampling_probability)

    @override
    def _account(self, accounting: Any, num_rounds: int) -> float:
        gaussian = accounting.GaussianDpEvent(self.noise_multiplier)
        event = accounting.PoissonSampledDpEvent(self.sampling_probability, gaussian)
        accountant = accounting.rdp.RdpAccountant()
        accountant.compose(event, num_rounds)
        return accountant.get_epsilon(self.delta)


@dataclasses.dataclass(frozen=True)
class TreeGaussian(Privacy):
    """Each pass takes each client once at most; noise is that of a tree for each pass.

    Neighbours are sets of clients of which one has a client replaced by one that moves
    nothing.

    Attributes:
        rounds_per_pass: after which a new tree begins, >= 1.
    """

    rounds_per_pass: int

    @property
    @override
    def a_round(self) -> tuple[float, float]:
        return float(self.noise_multiplier), float(self.rounds_per_pass)

    @override
    def _account(self, accounting: Any, num_rounds: int) -> float:
        relation = accounting.NeighboringRelation.REPLACE_SPECIAL
        accountant = accounting.rdp.RdpAccountant(neighboring_relation=relation)
        tree = accounting.SingleEpochTreeAggregationDpEvent
        passes, steps = divmod(num_rounds, self.rounds_per_pass)
        if passes:
            accountant.compose(
                tree(self.noise_multiplier, self.rounds_per_pass), passes
            )
        if steps:
            accountant.compose(tree(self.noise_multiplier, steps))
        return accountant.get_epsilon(self.delta)


@contextlib.contextmanager
def _quiet_accountant() -> Generator[None]:
    """Keep back that some orders of the accountant have no bound: others have."""
    logger = logging.getLogger("absl")

    def is_other(record: logging.LogRecord) -> bool:
        return "failed to converge" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)

"""Who takes part in a round, and who has which examples: both by a seed alone.

Sources:
    Tzu-Ming Harry Hsu, Hang Qi, Matthew Brown: Measuring the Effects of Non-Identical
    Data Distribution for Federated Visual Classification. 2019,
    https://arxiv.org/abs/1909.06335, Section 3 (the split by label).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.learning.accounting import SampledGaussian, TreeGaussian
from ray_fed.learning.checks import check_positive, read_whole
from ray_fed.program import PoissonSampler

_MAX_NAMED = 10  # clients of a cohort that a note lists


@dataclasses.dataclass(frozen=True)
class CohortSampler:
    """Draws the clients of each round, without replacement.

    What it draws depends on its fields and the round alone, not on earlier draws: a run
    that is resumed meets the clients that it would have met.

    Attributes:
        num_clients: to draw from, >= 1.
        cohort_size: clients a round, 1 to `num_clients`.
        seed: >= 0.

    Raises:
        ConfigError: a field is out of its range.
    """

    num_clients: int
    cohort_size: int
    seed: int

    def __post_init__(self) -> None:
        read_whole("num_clients", self.num_clients, 1)
        read_whole("cohort_size", self.cohort_size, 1, self.num_clients)
        read_whole("seed", self.seed, 0)

    def sample(self, round_index: int) -> list[int]:
        """Return the indices of a round's clients, ascending.

        Args:
            round_index: >= 0.
        """
        generator = np.random.default_rng([self.seed, round_index])
        drawn = generator.choice(self.num_clients, self.cohort_size, replace=False)
        return sorted(int(client) for client in drawn)


@dataclasses.dataclass(frozen=True)
class PrivateCohorts:
    """Draws the clients of each round as the accountant of a process assumes it.

    With the noise of `dp_mean` each client takes part by itself with one probability;
    a round may have none. With that of `dp_ftrl_mean` each pass has each client once.

    Attributes:
        num_clients: to draw from, >= 1.
        privacy: of the process.
        seed: >= 0.
    """

    num_clients: int
    privacy: SampledGaussian | TreeGaussian
    seed: int

    def __post_init__(self) -> None:
        read_whole("seed", self.seed, 0)

    @property
    def cohort_size(self) -> str:
        """How cohorts are drawn, in words."""
        return f"as for {self.privacy}"

    def sample(self, round_index: int) -> list[int]:
        """Return the indices of a round's clients, ascending.

        Args:
            round_index: >= 0.
        """
        if isinstance(self.privacy, TreeGaussian):
            index, step = divmod(round_index, self.privacy.rounds_per_pass)
            order = np.random.default_rng([self.seed, index])
            clients = order.permutation(self.num_clients)
            parts = np.array_split(clients, self.privacy.rounds_per_pass)
            return sorted(parts[step].tolist())
        sampler = PoissonSampler(self.privacy.sampling_probability, self.seed)
        return sampler.sample(round_index, self.num_clients, None)


@tracebacks.shorten
def split_by_label(
    labels: NDArray[Any], num_clients: int, alpha: float, seed: int
) -> list[NDArray[np.int64]]:
    """Split examples among clients of equal size that prefer different labels.

    Each client in turn draws its mix of labels from a Dirichlet distribution around
    that of all examples, then its examples by that mix; once a label is used up, the
    mix is scaled over those that are left. Every example goes to one client.

    Args:
        labels: of all examples, any dtype that has an order, [n].
        num_clients: 1 to n; sizes differ by one at most, so that none is empty.
        alpha: > 0; small: few labels a client, large: all clients alike.
        seed: >= 0.

    Returns:
        The indices of each client's examples, in random order.

    Raises:
        ConfigError: an argument is out of its range, or a label is missing.
    """
    labels = read_labels(labels, "labels")
    num_clients = read_whole("num_clients", num_clients, 1, len(labels))
    check_positive("alpha", alpha)
    seed = read_whole("seed", seed, 0)
    generator = np.random.default_rng(seed)
    pools = [
        list(generator.permutation(np.flatnonzero(labels == label)))
        for label in np.unique(labels)
    ]
    prior = np.array([len(pool) for pool in pools]) / len(labels)
    sizes = [len(part) for part in np.array_split(np.arange(len(labels)), num_clients)]
    return [
        _draw(generator, generator.dirichlet(alpha * prior), pools, size)
        for size in sizes
    ]


def read_labels(given: object, name: str) -> NDArray[Any]:
    """Return one label for each example, of an array, a list or a column of pandas.

    Raises:
        ConfigError: they are not one for each, of one kind, or one is missing.
    """
    labels = np.asarray(given)
    if labels.ndim != 1 or not labels.size:
        raise errors.ConfigError(
            f"Expected one label for each example as `{name}`, found an array of the"
            f" shape {list(labels.shape)}."
        )
    try:
        np.unique(labels)
        hash(tuple(labels.tolist()))
        are_whole = not np.not_equal(labels, labels).any()  # NaN, NaT
        are_whole &= all(label is not None for label in labels)
    except (TypeError, ValueError):  # NA has no order, text and numbers neither
        are_whole = False
    if not are_whole:
        raise errors.ConfigError(
            f"Expected labels of one kind as `{name}`, and none missing, found others:"
            " leave such examples out, such as by `dropna`, or make text of all, such"
            " as by `astype(str)`."
        )
    return labels


def _draw(
    generator: np.random.Generator,
    mix: NDArray[np.float64],
    pools: list[list[np.int64]],
    size: int,
) -> NDArray[np.int64]:
    """Take `size` examples out of the pools of labels, by the mix as far as it goes."""
    drawn: list[np.int64] = []
    while len(drawn) < size:
        left = np.array([len(pool) for pool in pools])
        wanted = np.where(left > 0, mix, 0.0)
        if not wanted.sum() > 0:
            wanted = left.astype(np.float64)
        counts = generator.multinomial(size - len(drawn), wanted / wanted.sum())
        for pool, count in zip(pools, counts, strict=True):
            taken = min(int(count), len(pool))
            drawn.extend(pool[:taken])
            del pool[:taken]
    return generator.permutation(np.array(drawn, np.int64))


def say_who(
    error: BaseException, round_index: int, cohort: Sequence[int], data: object
) -> None:
    """Note which round and clients an error is of: it knows of its call alone.

    Args:
        error: of a round.
        round_index: of the run.
        cohort: the clients of the round, by index in `data`.
        data: of all clients; those of `ClientData` are named by their ids.
    """
    place = getattr(getattr(error, "location", None), "client_index", None)
    ids: Sequence[object] = getattr(data, "ids", ())
    if place is None:
        shown = ", ".join(repr(ids[i]) if ids else str(i) for i in cohort[:_MAX_NAMED])
        others = f" and {len(cohort) - _MAX_NAMED} others" * (len(cohort) > _MAX_NAMED)
        who = f"cohort is, in order, `data[i]` for i in {shown}{others}"
        if ids:
            who = f"cohort is, in order, the clients with the ids {shown}{others}"
    elif ids:
        who = f"client is the one with the id {ids[cohort[place]]!r}"
    else:
        who = f"client at position {place} of the cohort is `data[{cohort[place]}]`"
    error.add_note(f"In round {round_index + 1} of the run, the {who}.")

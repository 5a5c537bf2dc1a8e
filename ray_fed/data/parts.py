"""Clients and rows held out, by a seed alone."""

import dataclasses
import hashlib
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors


def seed_of(*fields: object) -> int:
    """Return the seed of a generator that some fields name."""
    return int.from_bytes(hashlib.sha256(repr(fields).encode()).digest()[:16])


@dataclasses.dataclass(frozen=True)
class Part:
    """Some rows of each client, drawn by a seed.

    Attributes:
        fraction: of the rows that are held out, above 0 and below 1.
        seed: >= 0.
        is_held_out: whether this is the part held out, or what is left.
    """

    fraction: float
    seed: int
    is_held_out: bool

    def rows(self, client: Hashable, count: int) -> NDArray[np.int64]:
        """Return the rows of the part, ascending."""
        generator = np.random.default_rng(seed_of("part", self.seed, client))
        held = generator.permutation(count)[: round(self.fraction * count)]
        if self.is_held_out:
            return np.sort(held)
        return np.setdiff1d(np.arange(count), held)


def check_fraction(fraction: float, seed: int) -> None:
    """Raise unless a part can be held out.

    Raises:
        ConfigError: the fraction is not between 0 and 1, or the seed is negative.
    """
    if not 0 < fraction < 1:
        raise errors.ConfigError(
            f"Expected a `fraction` above 0 and below 1, found {fraction}."
        )
    if seed < 0:
        raise errors.ConfigError(f"Expected `seed` to be at least 0, found {seed}.")


def draw_held_out(
    count: int, fraction: float, seed: int
) -> tuple[list[int], list[int]]:
    """Return which of some clients are kept, and which are held out, each in order.

    Raises:
        ConfigError: there are fewer than two, or an argument is out of its range.
    """
    check_fraction(fraction, seed)
    if count < 2:  # noqa: PLR2004 (one for each side)
        raise errors.ConfigError(
            f"Expected at least 2 clients to hold some out, found {count}."
        )
    held_count = min(max(1, round(fraction * count)), count - 1)
    order = np.random.default_rng(seed_of("clients", seed)).permutation(count)
    return sorted(order[held_count:].tolist()), sorted(order[:held_count].tolist())

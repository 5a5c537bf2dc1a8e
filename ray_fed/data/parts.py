"""Clients and rows held out, by a seed alone."""

import dataclasses
import hashlib
import numbers
from collections.abc import Hashable
from typing import cast

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.data.arguments import check_number


def seed_of(*fields: object) -> int:
    """Return the seed of a generator that some fields name."""
    return int.from_bytes(hashlib.sha256(repr(fields).encode()).digest()[:16])


@dataclasses.dataclass(frozen=True)
class Part:
    """Some rows of each client, drawn by a seed, or the last ones.

    Attributes:
        fraction: of the rows that are held out, above 0 and below 1.
        seed: >= 0; None: the last rows are held out.
        is_held_out: whether this is the part held out, or what is left.
    """

    fraction: float
    seed: int | None
    is_held_out: bool

    def rows(self, client: Hashable, count: int) -> NDArray[np.int64]:
        """Return the rows of the part, ascending."""
        num_held = round(self.fraction * count)
        if self.seed is None:
            held = np.arange(count - num_held, count)
        else:
            generator = np.random.default_rng(seed_of("part", self.seed, client))
            held = generator.permutation(count)[:num_held]
        if self.is_held_out:
            return np.sort(held)
        return np.setdiff1d(np.arange(count), held)


def check_fraction(fraction: float, seed: int) -> None:
    """Raise unless a part can be held out.

    Raises:
        ConfigError: the fraction is not between 0 and 1, or the seed is no whole number
            of at least 0.
    """
    if not isinstance(cast("object", fraction), numbers.Real) or not 0 < fraction < 1:
        raise errors.ConfigError(
            f"Expected a `fraction` above 0 and below 1, found {fraction!r}."
        )
    check_number(seed, "seed")


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

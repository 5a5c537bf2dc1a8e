"""The numbers of a mean with noise: checked when it is made."""

from typing import Any

import numpy as np

import ray_fed.errors as errors

_MOST = 2**31 - 1
"""Clients, and seeds: what an int32 holds."""


def check_norm(norm: Any) -> None:
    """Refuse a bound on clients' updates that is none.

    Raises:
        ConfigError: it is not above 0 and finite.
    """
    if not (_is_number(norm) and 0 < norm < np.inf):
        raise errors.ConfigError(
            f'Expected `clip_norm` above 0 and finite, or "adaptive", found `{norm}`:'
            " without a bound no noise protects a client."
        )


def check_numbers(
    noise_multiplier: Any,
    clients_per_round: Any,
    num_clients: Any,
    delta: Any,
    seed: Any,
) -> None:
    """Refuse numbers with which nothing is protected, or none that are numbers.

    Raises:
        ConfigError: one is out of its range.
    """
    if not (_is_number(noise_multiplier) and 0 < noise_multiplier < np.inf):
        raise errors.ConfigError(
            "Expected `noise_multiplier` above 0 and finite, found"
            f" {errors.describe(noise_multiplier)}: without noise nothing is protected;"
            " use aggregators.clipped."
        )
    for name, value, most in (
        ("num_clients", num_clients, _MOST),
        ("clients_per_round", clients_per_round, num_clients),
        ("seed", seed, _MOST),
    ):
        least = int(name != "seed")
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole and least <= value <= most):
            raise errors.ConfigError(
                f"Expected `{name}` as a whole number from {least} to {most}, found"
                f" {errors.describe(value)}."
            )
    if not (_is_number(delta) and 0 < delta < 1):
        raise errors.ConfigError(
            f"Expected `delta` above 0 and below 1, found {errors.describe(delta)}."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

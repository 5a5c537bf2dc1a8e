"""What users hand in: checked once, where it comes in."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import ray_fed.errors as errors


def expect_object(value: object, cls: type, example: str) -> None:
    """Raise unless a value is an object of a class of Keras.

    Keras takes names and functions in many places; a name says too little here.

    Raises:
        ValueMismatchError: it is something else.
    """
    if not isinstance(value, cls):
        raise errors.ValueMismatchError(
            f"Expected a Keras {cls.__name__}, found `{value!r}` of Python type"
            f" `{type(value).__name__}`: pass an object, such as {example}."
        )


def expect_kind(name: str, value: object, *classes: type) -> None:
    """Raise unless a value is an object of a class of `learning`.

    Raises:
        ValueMismatchError: it is something else.
    """
    if not isinstance(value, classes):
        wanted = " or ".join(cls.__name__ for cls in classes)
        raise errors.ValueMismatchError(
            f"Expected an object of {wanted} as `{name}`, found"
            f" {errors.describe(value)}."
        )


def check_number(
    name: str, value: Any, fits: Callable[[float], bool], wanted: str
) -> None:
    """Raise unless a value is a finite number in a range.

    Raises:
        ConfigError: it is no number, not finite, or out of the range.
    """
    is_number = not isinstance(value, bool) and isinstance(value, numbers.Real)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:  # of a whole number
        number = math.inf
    if not (math.isfinite(number) and fits(number)):
        kind = "" if is_number else ", a number"
        raise errors.ConfigError(
            f"Expected `{name}` {wanted}{kind}, found {errors.describe(value)}."
        )


def check_positive(name: str, value: Any) -> None:
    """Raise unless a value is a finite number above 0; see `check_number`."""
    check_number(name, value, lambda number: number > 0, "above 0 and finite")


def read_whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a value that is a whole number in a range.

    Raises:
        ConfigError: it is no whole number, or out of the range.
    """
    is_whole = not isinstance(value, bool) and isinstance(value, numbers.Integral)
    if not is_whole or int(value) < least or (most is not None and int(value) > most):
        within = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise errors.ConfigError(
            f"Expected `{name}` as a whole number {within}, found"
            f" {errors.describe(value)}."
        )
    return int(value)


def read_whole_or_none(name: str, value: Any, least: int) -> int | None:
    """Return what `read_whole` does, or None for None."""
    return None if value is None else read_whole(name, value, least)

"""Types of settings: each reads a value strictly, and says what it expects."""

import contextlib
import math
import numbers
from collections.abc import Mapping
from typing import Annotated, Any

import pydantic
import pydantic_core

from ray_fed.config.frozen_values import freeze

MAX_WORKERS = 2**16
"""Of one pool: beyond what one Ray cluster holds."""

_MAX_BUDGET = 10**6
"""Of failures: Ray takes the sum of all budgets as one 32-bit number."""

_GRAIN = 1e-4
"""The smallest part of a resource that Ray gives."""


def _read_whole(value: object) -> int:
    """Return a whole number of Python's or numpy's; nothing else is taken for one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise pydantic_core.PydanticCustomError(
            "whole", "Input should be a whole number"
        )
    return int(value)


def _read_real(value: object) -> float:
    """Return a number that is finite; YAML hands in `1e3` as text."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real | str):
        with contextlib.suppress(ValueError, OverflowError):
            found = float(value)
            if math.isfinite(found):
                return found
    raise pydantic_core.PydanticCustomError("real", "Input should be a finite number")


def _check_grain(value: float) -> float:
    if 0 < value < _GRAIN:
        raise pydantic_core.PydanticCustomError(
            "grain", "Input should be 0 or at least 0.0001, the least that Ray gives"
        )
    return value


def _check_names(resources: Mapping[str, float]) -> Mapping[str, float]:
    own = {"CPU": "num_cpus", "GPU": "num_gpus"}
    own |= {setting: setting for setting in own.values()}
    for name in resources:
        if name in own:
            raise pydantic_core.PydanticCustomError(
                "name", "Input should be given as `workers.{own}`", {"own": own[name]}
            )
        if not name.isprintable() or not name:
            raise pydantic_core.PydanticCustomError(
                "name", "Names of resources should be text that can be printed"
            )
    return resources


_Whole = Annotated[int, pydantic.BeforeValidator(_read_whole)]
Real = Annotated[float, pydantic.BeforeValidator(_read_real)]

Count = Annotated[_Whole, pydantic.Field(ge=1, lt=2**31)]
CountOrNone = Annotated[_Whole, pydantic.Field(ge=0, lt=2**31)]
Budget = Annotated[_Whole, pydantic.Field(ge=0, le=_MAX_BUDGET)]
Bytes = Annotated[_Whole, pydantic.Field(ge=0, lt=2**63)]
Seed = Annotated[_Whole, pydantic.Field(gt=-(2**128), lt=2**128)]
Seconds = Annotated[Real, pydantic.Field(gt=0, le=10**9)]
Amount = Annotated[
    Real, pydantic.Field(ge=0, le=2**31), pydantic.AfterValidator(_check_grain)
]
Amounts = Annotated[
    Mapping[str, Amount],
    pydantic.AfterValidator(_check_names),
    pydantic.AfterValidator(freeze),
]
Environment = Annotated[Mapping[str, Any], pydantic.AfterValidator(freeze)]


COUNTED = ("workers", "subrounds")
"""Fields whose short form is a count."""


def expand_count(value: object) -> object:
    """Return a count as the settings that it is short for; the rest as it is."""
    whole = isinstance(value, Mapping | pydantic.BaseModel | bool | None)
    return value if whole else {"count": value}


def expand_counts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without short forms, so that sources can be merged."""
    return {
        key: expand_count(value) if key in COUNTED else value
        for key, value in settings.items()
    }


def name_switch(value: object) -> object:
    """Return "on" or "off" for a truth value; the rest as it is."""
    names = {True: "on", False: "off"}  # what YAML makes of the bare words
    return names[value] if isinstance(value, bool) else value


def _read_size(value: object) -> int | tuple[int, int] | None:
    """Return a count, or the ends of a range; None as it is."""
    match value:
        case None:
            return None
        case (first, last):
            ends = _size_of(first), _size_of(last)
            if ends[0] <= ends[1]:
                return ends
        case _:
            return _size_of(value)
    raise _size_error()


def _size_of(value: object) -> int:
    try:
        size = _read_whole(value)
    except pydantic_core.PydanticCustomError as error:
        raise _size_error() from error
    if not 1 <= size <= MAX_WORKERS:
        raise _size_error()
    return size


def _size_error() -> pydantic_core.PydanticCustomError:
    return pydantic_core.PydanticCustomError(
        "size",
        "Input should be a count >= 1, or (min, max) with 1 <= min <= max, of at most"
        " {most} workers",
        {"most": MAX_WORKERS},
    )


Size = Annotated[int | tuple[int, int] | None, pydantic.BeforeValidator(_read_size)]

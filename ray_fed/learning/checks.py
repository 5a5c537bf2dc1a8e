"""Checks of what users pass, made once, where a value enters the library."""

import importlib
import math
import numbers
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import ray_fed.errors as errors
from ray_fed.language.type_checks import read_whole


def check_keras_backend() -> None:
    """Raise UserError unless Keras computes with TensorFlow."""
    try:
        backend = importlib.import_module("keras").config.backend()
    except ImportError as error:
        backend = os.environ.get("KERAS_BACKEND", "tensorflow")
        if backend == "tensorflow":
            raise
        raise _backend_error(backend) from error
    if backend != "tensorflow":
        raise _backend_error(backend)


def _backend_error(backend: str) -> errors.UserError:
    return errors.UserError(
        f"Expected Keras with TensorFlow as its backend, found `{backend}`: ray_fed"
        " computes with TensorFlow, so set `KERAS_BACKEND=tensorflow` before Keras is"
        " imported, or change `backend` in `~/.keras/keras.json`."
    )


def join_metrics(*parts: tuple[str, Any]) -> "OrderedDict[str, Any]":
    """Return the metrics of several owners in one dictionary.

    Each of `parts` is the name of an owner, for errors, and its metrics or None. Raises
    ValueMismatchError if two owners have metrics of the same name.
    """
    joined: OrderedDict[str, Any] = OrderedDict()
    owners: dict[str, str] = {}
    for owner, metrics in parts:
        for name, value in (metrics or {}).items():
            if name in joined:
                raise errors.ValueMismatchError(
                    "Expected metrics of different names, found one named"
                    f" `{name}` of {owners[name]} and one of {owner}: give one of them"
                    " another name. A metric of Keras takes it as `name=`."
                )
            joined[name], owners[name] = value, owner
    return joined


def expect_object(value: object, cls: type, example: str) -> None:
    """Raise ValueMismatchError unless `value` is an object of the Keras class `cls`.

    Names and functions, which Keras also accepts, are refused. The error shows
    `example`.
    """
    if not isinstance(value, cls):
        raise errors.ValueMismatchError(
            f"Expected a Keras {cls.__name__}, found `{value!r}` of Python type"
            f" `{type(value).__name__}`: pass an object, such as {example}."
        )


def expect_kind(name: str, value: object, *classes: type) -> None:
    """Raise ValueMismatchError unless the argument `name` is an object of `classes`."""
    if not isinstance(value, classes):
        wanted = " or ".join(cls.__name__ for cls in classes)
        raise errors.ValueMismatchError(
            f"Expected an object of {wanted} as `{name}`, found"
            f" {errors.describe(value)}."
        )


def expect_one_of(name: str, value: object, legal: Sequence[str]) -> None:
    """Raise ConfigError unless the setting `name` is one of the texts in `legal`."""
    if not isinstance(value, str) or value not in legal:
        raise errors.ConfigError(
            f"Expected `{name}` to be one of {list(legal)}, found `{value}`."
        )


def check_number(
    name: str, value: Any, fits: Callable[[float], bool], wanted: str
) -> None:
    """Raise ConfigError with the text `wanted` unless a value is finite and `fits`."""
    is_number = not isinstance(value, bool) and isinstance(value, numbers.Real)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:  # an integer that is too large for a float
        number = math.inf
    if not (math.isfinite(number) and fits(number)):
        kind = "" if is_number else ", a number"
        raise errors.ConfigError(
            f"Expected `{name}` {wanted}{kind}, found {errors.describe(value)}."
        )


def check_positive(name: str, value: Any) -> None:
    """Raise ConfigError unless the setting `name` is a finite number above 0."""
    check_number(name, value, lambda number: number > 0, "above 0 and finite")


def read_whole_or_none(name: str, value: Any, least: int) -> int | None:
    """Return None for None, and otherwise the result of `read_whole`."""
    return None if value is None else read_whole(name, value, least)

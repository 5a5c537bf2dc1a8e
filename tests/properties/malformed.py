"""A seeded generator of malformed inputs, and what each of them may end in.

A case calls ray_fed as a user would, with an input that is wrong more often than not.
An oracle that knows Python, numpy and the documents, and nothing of ray_fed's checks,
says what must come of it:

    Right(value)   this value, whatever checks there are
    REFUSED        an error
    Either(check)  an error, or what the check accepts: bytes may be damaged where
                   nothing depends on them
"""

import dataclasses
import pathlib
import random
import signal
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeAlias

import federated_language as fl
import numpy as np

import ray_fed.errors as errors
from ray_fed.contexts.execution_context import ExecutionContext

OUTCOMES = (
    "right",
    "clear",
    "wrong class",
    "accepted wrong",
    "refused wrong",
    "waited",
)


@dataclasses.dataclass(frozen=True)
class Right:
    """The input is right.

    Attributes:
        value: what the call returns.
    """

    value: Any


@dataclasses.dataclass(frozen=True)
class Either:
    """The input may be refused or not.

    Attributes:
        accepts: whether a value may be returned.
    """

    accepts: Callable[[Any], bool]


REFUSED = "refused"
Expected: TypeAlias = Right | Either | str


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        kind: of input.
        label: what the input is, in words.
        run: makes the call.
        expected: what it must end in.
    """

    kind: str
    label: str
    run: Callable[[], Any]
    expected: Expected


@dataclasses.dataclass(frozen=True)
class Place:
    """What cases run in.

    Attributes:
        context: on the local backend.
        folder: for files.
    """

    context: ExecutionContext
    folder: pathlib.Path


class Waited(BaseException):
    """The watchdog ended a call."""


@contextmanager
def watchdog(seconds: float) -> Generator[None]:
    """Raise `Waited` in the main thread if the block takes longer."""

    def bark(*_: object) -> None:
        raise Waited

    before = signal.signal(signal.SIGALRM, bark)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(case: Case, patience_s: float) -> tuple[str, str]:
    """Run a case; return its outcome, one of OUTCOMES, and what was found."""
    try:
        with watchdog(patience_s):
            found = case.run()
    except Waited:
        return "waited", f"more than {patience_s} s"
    except Exception as error:  # noqa: BLE001 (which class it is, is the question)
        shown = f"{type(error).__name__}: {str(error)[:300]!r}"
        if not _is_clear(error):
            where = traceback.extract_tb(error.__traceback__)[-1]
            return "wrong class", f"{shown} at {where.filename}:{where.lineno}"
        return ("refused wrong" if isinstance(case.expected, Right) else "clear"), shown
    match case.expected:
        case Right(value):
            is_right = same(found, value)
        case Either(accepts):
            is_right = accepts(found)
        case _:
            is_right = False
    return ("right" if is_right else "accepted wrong"), errors.describe(found)


def _is_clear(error: Exception) -> bool:
    """Return whether an error is of ray_fed's tree, or of a documented check."""
    if isinstance(error, errors.RayFedError | fl.program.ProgramStateNotFoundError):
        return "Expected" in str(error) or isinstance(error, errors.LocatedError)
    if type(error) not in (TypeError, ValueError):
        return isinstance(error, fl.framework.ComputationReturnedNoneError)
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    return str(error).startswith("Expected") or "/federated_language/" in where


def same(found: Any, expected: Any) -> bool:
    """Return whether two values are equal to the bit, NaN to NaN, and of one kind."""
    if isinstance(expected, list | tuple):
        return (
            isinstance(found, list | tuple)
            and len(found) == len(expected)
            and all(map(same, found, expected))
        )
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and list(found) == list(expected)
            and all(map(same, found.values(), expected.values()))
        )
    if isinstance(expected, np.ndarray | np.generic):
        is_array = isinstance(found, np.ndarray | np.generic)
        return is_array and found.dtype == expected.dtype and _equal(found, expected)
    return type(found) is type(expected) and found == expected


def _equal(found: Any, expected: Any) -> bool:
    has_nan = expected.dtype.kind in "fc"
    return np.array_equal(found, expected, equal_nan=has_nan)


def damaged(generator: random.Random, content: bytes) -> bytes:
    """Return bytes with a few of them changed, lost, doubled or moved."""
    found = bytearray(content)
    for _ in range(generator.choice([1, 1, 2, 8])):
        at = generator.randrange(len(found) + 1)
        length = generator.choice([1, 1, 2, 4, 8, 100])
        match generator.randrange(5):
            case 0 if at < len(found):
                found[at] ^= 1 << generator.randrange(8)
            case 1:
                del found[at : at + length]
            case 2:
                found[at:at] = found[at : at + length]
            case 3:
                found[at : at + length] = generator.randbytes(length)
            case _:
                found = found[:at] if generator.random() < 0.3 else found
        if not found:
            break
    return bytes(found)

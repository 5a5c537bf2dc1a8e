"""Collects notes about how work ran, for the report of its round.

An executor adds notes to a set in a context variable, which asyncio tasks and calls on
other threads inherit. The function that evaluates a subround collects them with
`noting`, and returns them with the results. Each note becomes one event of the round,
before its `RoundFinished` event.
"""

import contextlib
import contextvars
import dataclasses
import traceback
import types
from collections.abc import Generator, Iterable
from typing import TypeAlias

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors

_DEFECT_ERRORS = AttributeError, AssertionError, LookupError, NameError


@dataclasses.dataclass(frozen=True)
class RandomOpsUnkeyed:
    """Note that random ops ran whose numbers do not depend on seed, call and client.

    Attributes:
        computation: Name and source line of the computation, as in error messages.
        content: First digits of the computation's hash.
        ops: Name and kind of each op. It draws other numbers if the work is repeated.
        round_index: Index of the round, which is set when the note becomes an event.
    """

    computation: str
    content: str
    ops: tuple[str, ...]
    round_index: int = -1


@dataclasses.dataclass(frozen=True)
class ComputationUnlowered:
    """Note that a computation read its sequences through tf.data, which takes longer.

    Attributes:
        computation: Name and source line of the computation, as in error messages.
        content: First digits of the computation's hash.
        reason: The op that cannot run without tf.data, or a few words.
        round_index: Index of the round, which is set when the note becomes an event.
    """

    computation: str
    content: str
    reason: str
    round_index: int = -1


@dataclasses.dataclass(frozen=True)
class WorkUnshaped:
    """Note that clients ran without XLA or one at a time, against the settings.

    Attributes:
        reason: The op that prevented it, or a few words.
        round_index: Index of the round, which is set when the note becomes an event.
    """

    reason: str
    round_index: int = -1


@dataclasses.dataclass(frozen=True)
class JitDecision:
    """Note about the decision of the setting `kernels.jit="auto"` for some clients.

    Attributes:
        jit: Whether XLA compiled the work of these clients.
        reason: The reason, in a few words.
    """

    jit: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class WorkInterpreted:
    """Note that work ran step by step, because an error prevented its single graph.

    Attributes:
        work: The work of the graph, in a few words.
        reason: The class of the error, and the first line of its message.
        round_index: Index of the round, which is set when the note becomes an event.
    """

    work: str
    reason: str
    round_index: int = -1

    @classmethod
    def of(cls, work: str, error: BaseException) -> "WorkInterpreted":
        """Return the note about `work`, whose graph raised `error`.

        Raises `error` itself if `is_final` is true for it.
        """
        if is_final(error):
            raise error
        return cls(work, first_line(error))


Note: TypeAlias = (
    RandomOpsUnkeyed
    | ComputationUnlowered
    | WorkUnshaped
    | JitDecision
    | WorkInterpreted
)

_noted: contextvars.ContextVar[set[Note] | None] = contextvars.ContextVar(
    "ray_fed_notes", default=None
)


@contextlib.contextmanager
def noting() -> Generator[set[Note]]:
    """Yield a set that receives all notes which `note` adds in the `with` block."""
    noted: set[Note] = set()
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note(notes: Iterable[Note]) -> None:
    """Add notes to the set of the innermost `noting` block, if there is one."""
    noted = _noted.get()
    if noted is not None:
        noted.update(notes)


def in_order(noted: Iterable[Note]) -> tuple[Note, ...]:
    """Return notes sorted by their text, so that reports do not depend on timing."""
    return tuple(sorted(noted, key=repr))


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message, as one line."""
    return error_texts.summarize(error).partition("\n")[0]


def is_final(error: BaseException) -> bool:
    """Return whether an error of a graph must be raised to the user.

    After any other error, the work can be tried without the graph. Final errors are
    ClusterErrors, and errors that show a mistake in ray_fed: an AttributeError, an
    AssertionError, a LookupError or a NameError that a line of ray_fed raised.
    """
    if isinstance(error, errors.ClusterError):
        return True
    # TensorFlow may raise an error again as another object of the same class. The last
    # frame of that object is in TensorFlow, so the causes are checked, too.
    cause: BaseException | None = error
    while isinstance(cause, _DEFECT_ERRORS):
        frames = list(traceback.walk_tb(cause.__traceback__))
        if frames and _is_of_ray_fed(frames[-1][0]):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _is_of_ray_fed(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("ray_fed.")

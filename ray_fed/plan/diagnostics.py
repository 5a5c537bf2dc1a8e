"""Notes that work adds while it runs, for the report of its round.

An executor adds notes to a set in a context variable, which follows asyncio tasks and
calls to other threads. The function that evaluates a subround collects them with
`noting` and returns them with the results. Each note becomes one event of the round,
before its `RoundFinished`.
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
    """Random ops ran whose numbers do not depend on seed, call and client.

    Attributes:
        computation: Name and source line of the computation, as errors show them.
        content: The beginning of the computation's hash.
        ops: Name and kind of each op. It draws other numbers in every attempt.
        round_index: Index of the round, once the note is an event.
    """

    computation: str
    content: str
    ops: tuple[str, ...]
    round_index: int = -1


@dataclasses.dataclass(frozen=True)
class ComputationUnlowered:
    """A computation read its sequences through tf.data, which takes longer.

    Attributes:
        computation: Name and source line of the computation, as errors show them.
        content: The beginning of the computation's hash.
        reason: The op that has no other way, or a few words.
        round_index: Index of the round, once the note is an event.
    """

    computation: str
    content: str
    reason: str
    round_index: int = -1


@dataclasses.dataclass(frozen=True)
class WorkUnshaped:
    """Clients ran without XLA, or one at a time, although settings ask for more.

    Attributes:
        reason: An op, or a few words.
        round_index: Index of the round, once the note is an event.
    """

    reason: str
    round_index: int = -1


@dataclasses.dataclass(frozen=True)
class JitDecision:
    """The decision of `kernels.jit="auto"` for some leaves of a kernel.

    Attributes:
        jit: Whether XLA compiled them.
        reason: The reason, in a few words.
    """

    jit: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class WorkInterpreted:
    """Executors did some work step by step, because its graph raised an error.

    Attributes:
        work: The work of the graph, in a few words.
        reason: The class of the error, and the first line of its message.
        round_index: Index of the round, once the note is an event.
    """

    work: str
    reason: str
    round_index: int = -1

    @classmethod
    def of(cls, work: str, error: BaseException) -> "WorkInterpreted":
        """Return the note about work whose graph raised an error.

        Raises:
            Exception: The error itself, if it is final; see `is_final`.
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
    """Yield a set to which `note` adds all notes of the `with` block."""
    noted: set[Note] = set()
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note(notes: Iterable[Note]) -> None:
    """Add notes to the innermost `noting`. Outside `noting`, do nothing."""
    noted = _noted.get()
    if noted is not None:
        noted.update(notes)


def in_order(noted: Iterable[Note]) -> tuple[Note, ...]:
    """Return notes sorted by their content."""
    return tuple(sorted(noted, key=repr))


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return error_texts.summarize(error).partition("\n")[0]


def is_final(error: BaseException) -> bool:
    """Return whether an error of a graph must be raised, and no other way be tried.

    The cluster's errors are final. So are mistakes in ray_fed: a line of ray_fed raised
    an AttributeError, an AssertionError, a LookupError or a NameError. Functions and
    graphs of users, and TensorFlow, raise such errors in their own lines. TensorFlow
    may raise an error again as another object of the same class, so causes are checked,
    too.
    """
    if isinstance(error, errors.ClusterError):
        return True
    cause: BaseException | None = error
    while isinstance(cause, _DEFECT_ERRORS):
        frames = list(traceback.walk_tb(cause.__traceback__))
        if frames and _is_of_ray_fed(frames[-1][0]):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _is_of_ray_fed(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("ray_fed.")

"""Notes that work leaves as it runs, beside its results, for the reports of its round.

An executor adds notes to a set in a context variable, which follows asyncio tasks and
calls to other threads. The function that evaluates a subround collects them with
`noting` and returns them with the results. Each is one event of the round, before its
`RoundFinished`, and comes once.
"""

import contextlib
import contextvars
import dataclasses
import traceback
import types
from collections.abc import Generator, Iterable
from typing import TypeAlias

import ray_fed.error_texts as error_texts

_DEFECT_ERRORS = AttributeError, AssertionError, LookupError, NameError


@dataclasses.dataclass(frozen=True)
class RandomOpsUnkeyed:
    """Random ops of a computation ran that seed, call and client do not decide.

    Attributes:
        computation: what an error would call it: name and source line where known.
        content: starts the hash of the computation.
        ops: name and kind of each op; it drew anew on every attempt.
        round_index: of the round, once it is an event.
    """

    computation: str
    content: str
    ops: tuple[str, ...]
    round_index: int = -1


@dataclasses.dataclass(frozen=True)
class ComputationUnlowered:
    """A computation read its sequences through tf.data, which takes longer.

    Attributes:
        computation: what an error would call it: name and source line where known.
        content: starts the hash of the computation.
        reason: why it cannot do without: an op, or a few words.
        round_index: of the round, once it is an event.
    """

    computation: str
    content: str
    reason: str
    round_index: int = -1


@dataclasses.dataclass(frozen=True)
class WorkUnshaped:
    """Clients ran without XLA, or one at a time, where settings ask for more.

    Attributes:
        reason: an op, or a few words.
        round_index: of the round, once it is an event.
    """

    reason: str
    round_index: int = -1


@dataclasses.dataclass(frozen=True)
class JitDecision:
    """Which way some leaves of a kernel ran with `kernels.jit="auto"`, and why.

    Attributes:
        jit: whether XLA compiled them.
        reason: in a few words.
    """

    jit: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class WorkInterpreted:
    """Executors did some work step by step, because its graph raised an error.

    Attributes:
        work: what the graph was to do, in a few words.
        reason: the class of the error, and the first line of its message.
        round_index: of the round, once it is an event.
    """

    work: str
    reason: str
    round_index: int = -1

    @classmethod
    def of(cls, work: str, error: BaseException) -> "WorkInterpreted":
        """Return the note about work whose graph raised an error.

        Raises:
            Exception: the error itself, where it tells of a mistake in ray_fed.
        """
        if is_defect(error):
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
    """Yield a set to which `note` adds what it is given inside the `with` block."""
    noted: set[Note] = set()
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note(notes: Iterable[Note]) -> None:
    """Add notes to the innermost `noting`; outside of one, do nothing."""
    noted = _noted.get()
    if noted is not None:
        noted.update(notes)


def in_order(noted: Iterable[Note]) -> tuple[Note, ...]:
    """Return notes sorted by their content."""
    return tuple(sorted(noted, key=repr))


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return error_texts.summarize(error).partition("\n")[0]


def is_defect(error: BaseException) -> bool:
    """Return whether an error tells of a mistake in ray_fed, and of nothing else.

    True for an AttributeError, a failed assertion and their like that a line of ray_fed
    raised. A user's function or graph, and TensorFlow, raise such errors in lines of
    their own. TensorFlow may raise one again, as another object of the same class.
    """
    cause: BaseException | None = error
    while isinstance(cause, _DEFECT_ERRORS):
        frames = list(traceback.walk_tb(cause.__traceback__))
        if frames and _is_of_ray_fed(frames[-1][0]):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _is_of_ray_fed(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("ray_fed.")
